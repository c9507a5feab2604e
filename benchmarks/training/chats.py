"""Conversations of a chat model's own making, to train drafts, heads and layers on.

    python -m benchmarks.training.chats --target smollm2 --out chats

`forerun train --chats` reads them. No data set is needed. The model writes user turns itself: it
samples after its template's user header (as in Magpie, arXiv 2406.08464), beside questions from
files. Then it answers them, half of them greedily and half at temperature 1. All is kept in files,
so that a stopped run continues.
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
from forerun.cli.options import grouped
from forerun.files import read_text, write_text
from forerun.sampling.params import SamplingParams
from forerun.text.chat import chat_prompt, has_template, turn_ends
from forerun.train.corpus import STRETCH, split_of
from forerun.train.loop import claim
from forerun.train.texts import SPLITS, Conversation, read_texts

ROWS = 64  # decoded together
QUESTION_SEED = 100_000  # added to the seed of questions, so that answers have other ones
MARK = "\x01"  # stands for the user's words in the template
Say = Callable[[str], None]


class Question(NamedTuple):
    text: str
    source: str
    split: str


@dataclass(frozen=True)
class ChatRecipe:
    """Sizes of the data.

    Attributes:
        conversations: how many, with those of files; a few are dropped as neighbours of held-out
            questions.
        question: most tokens of a question; an unfinished one is dropped.
        answer: most tokens of an answer.
        shard: conversations of a file.
        seed: of sampling.
    """

    conversations: int = 14_000
    question: int = 128
    answer: int = 256
    shard: int = 512
    seed: int = 0


def make_chats(
    target: str,
    out: Path,
    recipe: ChatRecipe,
    *,
    given: Sequence[str] = (),
    weights: str | None = None,
    device: str | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Make all conversations in `out`, continuing from existing files; return a summary.

    The first questions are `given`; the model asks the rest.

    Raises:
        ValueError: the target has no chat template that shows the user's words, or `out` is of
            another target, recipe or `given`.
    """
    decoder = load(target, method="ar", weights=weights, device=device, max_rows=ROWS)
    tokenizer = decoder.tokenizer
    if tokenizer is None or not has_template(tokenizer):
        raise ValueError(f"{target!r} has no chat template, so it cannot talk to itself")
    end_with_turns(decoder)
    digest = _digest("\0".join(given))
    claim(out, asdict(recipe) | {"target": decoder.target.fingerprint, "given": digest})
    questions = _questions(decoder, out, recipe, given, say)
    starts = range(0, len(questions), recipe.shard)
    shards = [questions[start : start + recipe.shard] for start in starts]
    started_at = perf_counter()
    tokens = 0
    for number, shard in enumerate(shards):
        path = out / f"answers-{number:05d}.jsonl"
        if path.exists():
            continue
        conversations = _answered(decoder, shard, recipe, number)
        _write(path, conversations)
        tokens += sum(len(conversation.answer) for conversation in conversations)
        pace = tokens / (perf_counter() - started_at)
        say(f"answers {number + 1}/{len(shards)}, {tokens} tokens in this run, {pace:.0f} a second")
        _write_splits(out, recipe, questions)  # training can begin before all are made
    summary = _write_splits(out, recipe, questions)
    say(json.dumps(summary))
    return summary


def end_with_turns(decoder: Decoder) -> None:
    """Let outputs end where the template ends a turn.

    The checkpoint's generation config may not list that token.
    """
    config = decoder.target.model.generation_config
    known = config.eos_token_id or []
    if isinstance(config.eos_token_id, int):
        known = [config.eos_token_id]
    config.eos_token_id = sorted({*known, *turn_ends(decoder.tokenizer)})


def _write_splits(out: Path, recipe: ChatRecipe, questions: Sequence[Question]) -> dict[str, Any]:
    """Write the splits of the existing answers; return their summary."""
    answered = []
    for path in sorted(out.glob("answers-*.jsonl")):
        answered += [Conversation(**json.loads(line)) for line in read_text(path).splitlines()]
    kept, dropped = apart(answered, questions)
    counts = {}
    tokens = {}
    for split in SPLITS:
        part = [conversation for conversation in kept if conversation.split == split]
        counts[split] = len(part)
        tokens[split] = sum(len(conversation.answer) for conversation in part)
        _write(out / f"{split}.jsonl", part)
    summary = {
        "conversations": counts,
        "answer_tokens": tokens,
        "dropped_as_neighbours": dropped,
    }
    record = summary | {"recipe": asdict(recipe)}
    write_text(out / "summary.json", json.dumps(record, indent=1) + "\n")
    return summary


def _write(path: Path, conversations: list[Conversation]) -> None:
    lines = [json.dumps(asdict(conversation)) + "\n" for conversation in conversations]
    write_text(path, "".join(lines))


def _questions(
    decoder: Decoder, out: Path, recipe: ChatRecipe, given: Sequence[str], say: Say
) -> list[Question]:
    """Return all questions in the order of their hashes."""
    given_texts = list(dict.fromkeys(given))[: recipe.conversations]
    made_up = _made_up(decoder, out, recipe, recipe.conversations - len(given_texts), say)
    questions = [Question(text, "given", split_of(text)) for text in given_texts]
    questions += [Question(text, "own", split_of(text)) for text in made_up]
    return sorted(questions, key=lambda question: _digest(question.text))


def _made_up(decoder: Decoder, out: Path, recipe: ChatRecipe, wanted: int, say: Say) -> list[str]:
    """Return so many questions that the model asks, each once. Raises ValueError."""
    texts: dict[str, str] = {}  # by the question in lower case, without signs
    number = 0
    while len(texts) < wanted:
        path = out / f"questions-{number:05d}.json"
        if not path.exists():
            write_text(path, json.dumps(_sampled_questions(decoder, recipe, number)))
        known = len(texts)
        for text in json.loads(read_text(path)):
            texts.setdefault(plain(text), text)
        if len(texts) == known:
            raise ValueError(
                "the model asks nothing new after its template's user header: give --questions"
            )
        number += 1
        say(f"questions {min(len(texts), wanted)}/{wanted}")
    return list(texts.values())[:wanted]


def _sampled_questions(decoder: Decoder, recipe: ChatRecipe, number: int) -> list[str]:
    header = user_header(decoder.tokenizer)
    seed = recipe.seed + QUESTION_SEED + number
    params = SamplingParams(max_new_tokens=recipe.question, temperature=1.0, top_p=0.95, seed=seed)
    completions = decoder.generate([header] * recipe.shard, params)
    return [
        completion.text.strip()
        for completion in completions
        if completion.finish_reason == "stop" and is_sound(completion.text)
    ]


def user_header(tokenizer: Any) -> list[int]:
    """Return the tokens of a conversation up to where the user's words begin."""
    text = str(
        tokenizer.apply_chat_template([_message(MARK)], tokenize=False, add_generation_prompt=True)
    )
    header, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError("the chat template does not show the user's words as they are")
    return list(tokenizer(header, add_special_tokens=False)["input_ids"])


def plain(text: str) -> str:
    """Return a question in lower case, without signs."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def is_sound(text: str) -> bool:
    """Return whether a sampled question is worth an answer.

    It must consist mostly of letters, have a fair length and repeat little.
    """
    text = text.strip()
    letters = sum(char.isascii() and (char.isalpha() or char.isspace()) for char in text)
    has_length = 12 <= len(text) <= 600
    is_printable = text.replace("\n", " ").isprintable()
    if not has_length or not is_printable or letters < 0.75 * len(text):
        return False
    return len(text) < 120 or len(zlib.compress(text.encode())) > 0.45 * len(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _answered(
    decoder: Decoder, questions: Sequence[Question], recipe: ChatRecipe, number: int
) -> list[Conversation]:
    """Return conversations, half of them answered greedily, half at temperature 1."""
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    conversations = []
    for temperature in (0.0, 1.0):
        chosen = questions[int(temperature) :: 2]
        prompts = [chat_prompt(tokenizer, [_message(question.text)]) for question in chosen]
        seed = recipe.seed + number if temperature else None
        params = SamplingParams(max_new_tokens=recipe.answer, temperature=temperature, seed=seed)
        completions = decoder.generate(prompts, params)
        for question, prompt, completion in zip(chosen, prompts, completions, strict=True):
            conversations.append(
                Conversation(
                    question=question.text,
                    prompt=prompt,
                    answer=completion.tokens,
                    text=str(tokenizer.decode(completion.tokens, skip_special_tokens=True)),
                    temperature=temperature,
                    source=question.source,
                    split=question.split,
                )
            )
    return conversations


def _message(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def apart(
    conversations: list[Conversation], questions: Sequence[Question]
) -> tuple[list[Conversation], int]:
    """Drop the conversations that share text with a held-out question of another split.

    They share it if both have a stretch of STRETCH characters. Test questions are kept, and
    training loses the most.

    Args:
        conversations: those that are answered.
        questions: all of them, with those that are not answered yet.

    Returns:
        The conversations that are kept, and the number of dropped ones.
    """
    kept: list[Conversation] = []
    seen: set[int] = set()
    for split in reversed(SPLITS):
        for conversation in conversations:
            text = f"{conversation.question}\n{conversation.text}"
            if conversation.split == split and not seen.intersection(stretches(text)):
                kept.append(conversation)
        if split != SPLITS[0]:
            for question in questions:
                if question.split == split:
                    seen.update(stretches(question.text))
    return kept, len(conversations) - len(kept)


def stretches(text: str) -> Iterator[int]:
    """Yield hashes of all stretches of STRETCH characters, with one space for any white space."""
    text = " ".join(text.split())
    for start in range(len(text) - STRETCH + 1):
        yield hash(text[start : start + STRETCH])


@dataclass(frozen=True)
class RecipeOptions:
    """The sizes that a user may choose."""

    conversations: Annotated[int, typer.Option(min=20, help="How many.")] = 14_000
    answer: Annotated[int, typer.Option(min=8, help="Most tokens of an answer.")] = 256
    shard: Annotated[
        int, typer.Option(min=2, help="Conversations of a file, between which a run can stop.")
    ] = 512
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0


@grouped
def main(
    out: Annotated[Path, typer.Option(help="Folder of the conversations.")],
    target: Annotated[
        str, typer.Option(help="Hub id, folder or GGUF file of a chat model.")
    ] = "smollm2",
    questions: Annotated[
        list[str] | None,
        typer.Option(
            help='Questions to begin with: files whose lines hold a "text" (.jsonl); repeatable.'
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="What the model's weights are stored as.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="By default a GPU if there is one.")] = None,
    *,
    sizes: RecipeOptions,
) -> None:
    """Have a chat model ask and answer questions."""
    given = list(read_texts(questions or ()))
    recipe = ChatRecipe(**vars(sizes))
    make_chats(target, out, recipe, given=given, weights=weights, device=device)
    print(
        f"the conversations are in {out}: forerun train draft --target {target} --chats {out} "
        "--out DRAFT"
    )


if __name__ == "__main__":
    run(main)
