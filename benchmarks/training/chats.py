"""Conversations of a chat model's own making, to train drafts, heads and layers on (`forerun train --chats`):

    python -m benchmarks.training.chats --target smollm2 --out chats

No data set is needed. The model writes user turns itself: it samples after its template's user header (as in Magpie,
arXiv 2406.08464), beside questions from files. Then it answers them, half of them greedily and half at temperature 1.
All is kept in files, so that a stopped run continues.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.command import run
from forerun.api.decoder import Decoder
from forerun.api.load import load
from forerun.files import read_text, write_text
from forerun.sampling.params import SamplingParams
from forerun.text.chat import chat_prompt, has_template, turn_ends
from forerun.train.corpus import STRETCH, split_of
from forerun.train.loop import claim
from forerun.train.texts import SPLITS, Conversation, read_texts

ROWS = 64  # decoded together
_MARK = "\x01"


class Question(NamedTuple):
    text: str
    source: str
    split: str


@dataclass(frozen=True)
class ChatRecipe:
    """Sizes of the data."""

    conversations: int = (
        14_000  # with those of files; a few are dropped as neighbours of held-out questions
    )
    question: int = 128  # most tokens; an unfinished question is dropped
    answer: int = 256  # most tokens
    shard: int = 512  # conversations of a file
    seed: int = 0  # of sampling


def make_chats(
    target: str,
    out: Path,
    recipe: ChatRecipe,
    *,
    given: Sequence[str] = (),
    weights: str | None = None,
    device: str | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Make all conversations in `out`, continuing from existing files; return a summary.

    The first questions are `given`; the model asks the rest. Raises ValueError for a target without a chat template
    that shows the user's words, and for an `out` of another target, recipe or `given`.
    """
    decoder = load(target, method="ar", weights=weights, device=device, max_rows=ROWS)
    tokenizer = decoder.tokenizer
    if tokenizer is None or not has_template(tokenizer):
        raise ValueError(f"{target!r} has no chat template, so it cannot talk to itself")
    # Turns end where the template ends them, even if the checkpoint's generation config does not list that token.
    config = decoder.target.model.generation_config
    known = (
        [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id or []
    )
    config.eos_token_id = sorted({*known, *turn_ends(tokenizer)})
    digest = _digest("\0".join(given))
    claim(out, asdict(recipe) | {"target": decoder.target.fingerprint, "given": digest})
    questions = _questions(decoder, out, recipe, given, say)
    shards = [
        questions[start : start + recipe.shard] for start in range(0, len(questions), recipe.shard)
    ]
    begun, made = perf_counter(), 0
    for number, shard in enumerate(shards):
        path = out / f"answers-{number:05d}.jsonl"
        if not path.exists():
            new = _answered(decoder, shard, recipe, number)
            _write(path, new)
            made += sum(len(each.answer) for each in new)
            pace = made / (perf_counter() - begun)
            say(
                f"answers {number + 1}/{len(shards)}, {made} tokens in this run, {pace:.0f} a second"
            )
            _share_out(out, recipe, questions)  # training can begin before all are made
    found = _share_out(out, recipe, questions)
    say(json.dumps(found))
    return found


def _share_out(out: Path, recipe: ChatRecipe, questions: Sequence[Question]) -> dict[str, Any]:
    """Write the splits of the existing answers; return their summary."""
    lines = [
        line
        for path in sorted(out.glob("answers-*.jsonl"))
        for line in read_text(path).splitlines()
    ]
    kept, dropped = apart([Conversation(**json.loads(line)) for line in lines], questions)
    found: dict[str, Any] = {
        "conversations": {},
        "answer_tokens": {},
        "dropped_as_neighbours": dropped,
    }
    for split in SPLITS:
        own = [each for each in kept if each.split == split]
        found["conversations"][split] = len(own)
        found["answer_tokens"][split] = sum(len(each.answer) for each in own)
        _write(out / f"{split}.jsonl", own)
    write_text(
        out / "summary.json", json.dumps(found | {"recipe": asdict(recipe)}, indent=1) + "\n"
    )
    return found


def _write(path: Path, conversations: list[Conversation]) -> None:
    write_text(path, "".join(json.dumps(asdict(each)) + "\n" for each in conversations))


def _questions(
    decoder: Decoder,
    out: Path,
    recipe: ChatRecipe,
    given: Sequence[str],
    say: Callable[[str], None],
) -> list[Question]:
    """Return all questions in the order of their hashes."""
    found = [Question(text, "given", split_of(text)) for text in dict.fromkeys(given)][
        : recipe.conversations
    ]
    wanted = recipe.conversations - len(found)
    own: dict[str, str] = {}  # by the question in lower case, without signs
    number = 0
    while len(own) < wanted:
        path = out / f"questions-{number:05d}.json"
        if not path.exists():
            write_text(path, json.dumps(_sampled_questions(decoder, recipe, number)))
        known = len(own)
        for text in json.loads(read_text(path)):
            own.setdefault(plain(text), text)
        if len(own) == known:
            raise ValueError(
                "the model asks nothing new after its template's user header: give --questions"
            )
        number += 1
        say(f"questions {min(len(own), wanted)}/{wanted}")
    found += [Question(text, "own", split_of(text)) for text in list(own.values())[:wanted]]
    return sorted(found, key=lambda each: _digest(each.text))


def _sampled_questions(decoder: Decoder, recipe: ChatRecipe, number: int) -> list[str]:
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    ids = user_header(tokenizer)
    seed = recipe.seed + 100_000 + number
    params = SamplingParams(max_new_tokens=recipe.question, temperature=1.0, top_p=0.95, seed=seed)
    found = decoder.generate([ids] * recipe.shard, params)
    return [
        each.text.strip() for each in found if each.finish_reason == "stop" and is_sound(each.text)
    ]


def user_header(tokenizer: Any) -> list[int]:
    """Return the tokens of a conversation up to where the user's words begin."""
    text = str(
        tokenizer.apply_chat_template([_message(_MARK)], tokenize=False, add_generation_prompt=True)
    )
    header, mark, _ = text.partition(_MARK)
    if not mark:
        raise ValueError("the chat template does not show the user's words as they are")
    return list(tokenizer(header, add_special_tokens=False)["input_ids"])


def plain(text: str) -> str:
    """Return a question in lower case, without signs."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def is_sound(text: str) -> bool:
    """Return whether a sampled question is worth an answer: mostly letters, of a fair length, with few repeats."""
    text = text.strip()
    letters = sum(each.isascii() and (each.isalpha() or each.isspace()) for each in text)
    is_text = (
        12 <= len(text) <= 600
        and text.replace("\n", " ").isprintable()
        and letters >= 0.75 * len(text)
    )
    return is_text and (len(text) < 120 or len(zlib.compress(text.encode())) > 0.45 * len(text))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _answered(
    decoder: Decoder, questions: Sequence[Question], recipe: ChatRecipe, number: int
) -> list[Conversation]:
    """Return conversations, half of them answered greedily, half at temperature 1."""
    conversations, tokenizer = [], decoder.tokenizer
    assert tokenizer is not None
    for temperature in (0.0, 1.0):
        chosen = questions[int(temperature) :: 2]
        prompts = [chat_prompt(tokenizer, [_message(question)]) for question, _, _ in chosen]
        seed = recipe.seed + number if temperature else None
        params = SamplingParams(max_new_tokens=recipe.answer, temperature=temperature, seed=seed)
        answers = decoder.generate(prompts, params)
        for (question, source, split), prompt, done in zip(chosen, prompts, answers, strict=True):
            text = str(tokenizer.decode(done.tokens, skip_special_tokens=True))
            conversations.append(
                Conversation(question, prompt, done.tokens, text, temperature, source, split)
            )
    return conversations


def _message(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def apart(
    conversations: list[Conversation], questions: Sequence[Question]
) -> tuple[list[Conversation], int]:
    """Return the conversations that share no stretch of STRETCH characters with a question held out from their split,
    and the number of dropped ones. So test questions stay as they are, and training loses the most.

    `questions`: all of them, with those that are not answered yet.
    """
    kept: list[Conversation] = []
    seen: set[int] = set()
    for split in reversed(SPLITS):
        own = [each for each in conversations if each.split == split]
        kept += [
            each
            for each in own
            if not seen.intersection(stretches(f"{each.question}\n{each.text}"))
        ]
        if split != SPLITS[0]:
            for question, _, of in questions:
                if of == split:
                    seen.update(stretches(question))
    return kept, len(conversations) - len(kept)


def stretches(text: str) -> Iterator[int]:
    """Return hashes of all stretches of STRETCH characters, with one space where there is any."""
    text = " ".join(text.split())
    return (hash(text[start : start + STRETCH]) for start in range(len(text) - STRETCH + 1))


def main(
    out: Annotated[Path, typer.Option(help="Folder of the conversations.")],
    target: Annotated[
        str, typer.Option(help="Hub id, folder or GGUF file of a chat model.")
    ] = "smollm2",
    conversations: Annotated[int, typer.Option(min=20, help="How many.")] = 14_000,
    questions: Annotated[
        list[str] | None,
        typer.Option(
            help='Questions to begin with: files whose lines hold a "text" (.jsonl); repeatable.'
        ),
    ] = None,
    answer: Annotated[int, typer.Option(min=8, help="Most tokens of an answer.")] = 256,
    shard: Annotated[
        int, typer.Option(min=2, help="Conversations of a file, between which a run can stop.")
    ] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0,
    weights: Annotated[
        str | None, typer.Option(help="What the model's weights are stored as.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="By default a GPU if there is one.")] = None,
) -> None:
    """Have a chat model ask and answer questions."""
    recipe = ChatRecipe(conversations, answer=answer, shard=shard, seed=seed)
    make_chats(
        target, out, recipe, given=list(read_texts(questions or ())), weights=weights, device=device
    )
    print(
        f"the conversations are in {out}: forerun train draft --target {target} --chats {out} --out DRAFT"
    )


if __name__ == "__main__":
    run(main)
