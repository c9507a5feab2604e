"""Conversations of a chat model's own making, to train drafts, heads and layers on.

No data set is needed. The model writes the user's turns itself: what it samples after its template's user header (as
in Magpie, arXiv 2406.08464). Others are questions about the standard library's functions, which is our choice. Then it
answers them, half of them greedily and half at temperature 1. Everything is kept in files, so that a run goes on where
it was stopped.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.api.decoder import Decoder
from forerun.api.load import load
from forerun.files import read_text, write_text
from forerun.sampling.params import SamplingParams
from forerun.text.chat import chat_prompt, has_template, turn_ends
from forerun.train.corpus import STRETCH, source_files, split_of
from forerun.train.loop import claim
from forerun.train.texts import SPLITS, Conversation

Question = tuple[str, str, str]  # its text, source and split
ROWS = 64  # decoded together
OF_A_FILE = 8  # questions about one file's functions
ASKED = (
    "What does this Python function do?\n\n{}",
    "Explain this code in two sentences.\n\n{}",
    "How would I test this function?\n\n{}",
    "Write a docstring for this function.\n\n{}",
    "Can this Python code be made simpler?\n\n{}",
    "What are the parameters of `{name}` in Python's `{module}`, and what does it return?\n\n{}",
)
_MARK = "\x01"


@dataclass(frozen=True)
class ChatRecipe:
    """Sizes.

    Attributes:
        conversations: how many are made; a few are dropped as others' neighbours.
        code: how many of a hundred ask about the standard library.
        question, answer: tokens of a turn at most; an unfinished question is dropped.
        shard: conversations of a file.
        seed: of sampling and of the order.
    """

    conversations: int = 14_000
    code: int = 25
    question: int = 128
    answer: int = 256
    shard: int = 512
    seed: int = 0


def make_chats(
    target: str,
    out: Path,
    recipe: ChatRecipe,
    *,
    weights: str | None = None,
    device: str | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Makes all conversations in `out` and says what came of it. Goes on with what is there.

    Raises ValueError for a target without a chat template, or whose template does not begin with the user's words, and
    for an `out` of another target or recipe.
    """
    decoder = load(target, method="ar", weights=weights, device=device, max_rows=ROWS)
    tokenizer = decoder.tokenizer
    if tokenizer is None or not has_template(tokenizer):
        raise ValueError(f"{target!r} has no chat template, so it cannot talk to itself")
    # Turns end where the template ends them, even where the checkpoint's generation config does not say so.
    config = decoder.target.model.generation_config
    known = [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id or []
    config.eos_token_id = sorted({*known, *turn_ends(tokenizer)})
    claim(out, asdict(recipe) | {"target": decoder.target.fingerprint})
    questions = _questions(decoder, tokenizer, out, recipe, say)
    shards = -(-len(questions) // recipe.shard)
    begun, made = perf_counter(), 0
    for number in range(shards):
        path = out / f"answers-{number:05d}.jsonl"
        if not path.exists():
            part = questions[number * recipe.shard : (number + 1) * recipe.shard]
            new = _answered(decoder, tokenizer, part, recipe, number)
            _write(path, new)
            made += sum(len(each.answer) for each in new)
            pace = made / (perf_counter() - begun)
            say(f"answers {number + 1}/{shards}, {made} tokens in this run, {pace:.0f} a second")
            _share_out(out, recipe, questions)  # training can begin before all are made
    found = _share_out(out, recipe, questions)
    say(json.dumps({key: found[key] for key in ("conversations", "answer_tokens", "dropped_as_neighbours")}))
    return found


def _share_out(out: Path, recipe: ChatRecipe, questions: Sequence[Question]) -> dict[str, Any]:
    """Writes the splits of the answers that are there."""
    lines = [line for path in sorted(out.glob("answers-*.jsonl")) for line in read_text(path).splitlines()]
    kept, dropped = apart([Conversation(**json.loads(line)) for line in lines], questions)
    splits = {split: [each for each in kept if each.split == split] for split in SPLITS}
    found = {
        "conversations": {split: len(own) for split, own in splits.items()},
        "answer_tokens": {split: sum(len(each.answer) for each in own) for split, own in splits.items()},
        "dropped_as_neighbours": dropped,
        "sources": {source: sum(each.source == source for each in kept) for source in ("own", "stdlib")},
        "recipe": asdict(recipe),
    }
    for split, own in splits.items():
        _write(out / f"{split}.jsonl", own)
    write_text(out / "summary.json", json.dumps(found, indent=1) + "\n")
    return found


# Questions.


def _questions(
    decoder: Decoder, tokenizer: PreTrainedTokenizerBase, out: Path, recipe: ChatRecipe, say: Callable[[str], None]
) -> list[Question]:
    """(question, source, split), in an order of their hashes."""
    wanted = recipe.conversations * (100 - recipe.code) // 100
    own: dict[str, str] = {}
    number = 0
    while len(own) < wanted:
        path = out / f"questions-{number:05d}.json"
        if not path.exists():
            write_text(path, json.dumps(_sampled_questions(decoder, tokenizer, recipe, number)))
        known = len(own)
        for text in json.loads(read_text(path)):
            own.setdefault(_plain(text), text)
        if len(own) == known:
            raise ValueError("the model asks nothing new after its template's user header: give --code 100")
        number += 1
        say(f"questions {min(len(own), wanted)}/{wanted}")
    found: list[Question] = [(text, "own", split_of(text)) for text in list(own.values())[:wanted]]
    found += [(text, "stdlib", split) for text, split in code_questions(recipe.conversations - wanted)]
    return sorted(found, key=lambda each: _digest(each[0]))


def _sampled_questions(
    decoder: Decoder, tokenizer: PreTrainedTokenizerBase, recipe: ChatRecipe, number: int
) -> list[str]:
    text = str(tokenizer.apply_chat_template([_message(_MARK)], tokenize=False, add_generation_prompt=True))
    header, mark, _ = text.partition(_MARK)
    if not mark:
        raise ValueError("the chat template does not show the user's words as they are")
    ids = tokenizer(header, add_special_tokens=False)["input_ids"]
    params = SamplingParams(
        max_new_tokens=recipe.question, temperature=1.0, top_p=0.95, seed=recipe.seed + 100_000 + number
    )
    found = decoder.generate([ids] * recipe.shard, params)
    return [each.text.strip() for each in found if each.finish_reason == "stop" and is_sound(each.text)]


def is_sound(text: str) -> bool:
    """Whether a sampled question is worth an answer: letters mostly, of a fair length, that repeats little."""
    text = text.strip()
    if not 12 <= len(text) <= 600 or not text.replace("\n", " ").isprintable():
        return False
    letters = sum(each.isascii() and (each.isalpha() or each.isspace()) for each in text)
    if letters < 0.75 * len(text):
        return False
    return len(text) < 120 or len(zlib.compress(text.encode())) > 0.45 * len(text)


def code_questions(count: int) -> Iterator[tuple[str, str]]:
    """Questions about functions of the standard library, with the splits of the files that these stand in."""
    files = [(relative, text, split) for split in SPLITS for relative, text in source_files(split)]
    seen: set[str] = set()
    for relative, text, split in sorted(files, key=lambda each: _digest(each[0])):
        module = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        functions = [] if module.startswith("test.") else sorted(_functions(text), key=lambda each: _digest(each[1]))
        for name, code in functions[:OF_A_FILE]:
            if len(seen) == count:
                return
            if code not in seen:
                seen.add(code)
                form = ASKED[int(_digest(code)[:8], 16) % len(ASKED)]
                yield form.format(f"```python\n{code}\n```", name=name, module=module), split


def _functions(text: str) -> Iterator[tuple[str, str]]:
    """Short functions of a source file, with their names."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            indent = len(code) - len(code.lstrip())
            code = re.sub(rf"^ {{{indent}}}", "", code, flags=re.MULTILINE)
            if 120 <= len(code) <= 500:
                yield node.name, code


def _plain(text: str) -> str:
    """What two questions that differ in case, spaces and signs alone have in common."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# Answers.


def _answered(
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    recipe: ChatRecipe,
    number: int,
) -> list[Conversation]:
    """Each other question is answered greedily, the rest at temperature 1."""
    conversations = []
    for temperature in (0.0, 1.0):
        chosen = questions[int(temperature) :: 2]
        prompts = [chat_prompt(tokenizer, [_message(question)]) for question, _, _ in chosen]
        seed = recipe.seed + number if temperature else None
        params = SamplingParams(max_new_tokens=recipe.answer, temperature=temperature, seed=seed)
        for (question, source, split), prompt, done in zip(
            chosen, prompts, decoder.generate(prompts, params), strict=True
        ):
            text = str(tokenizer.decode(done.tokens, skip_special_tokens=True))
            conversations.append(Conversation(question, prompt, done.tokens, text, temperature, source, split))
    return conversations


def _message(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def apart(conversations: list[Conversation], questions: Sequence[Question]) -> tuple[list[Conversation], int]:
    """Conversations without those that share a stretch of STRETCH characters with a question that is held out from
    their split, and how many that were. So test questions stay as they are, and training loses the most.

    `questions`: (question, source, split) of all, those that are not answered yet among them.
    """
    kept: list[Conversation] = []
    seen: set[int] = set()
    for split in reversed(SPLITS):
        own = [each for each in conversations if each.split == split]
        chosen = [each for each in own if not seen.intersection(stretches(f"{each.question}\n{each.text}"))]
        kept += chosen
        if split != SPLITS[0]:
            for question, _, of in questions:
                if of == split:
                    seen.update(stretches(question))
    return kept, len(conversations) - len(kept)


def stretches(text: str) -> Iterator[int]:
    """Hashes of all stretches of STRETCH characters."""
    return (hash(text[start : start + STRETCH]) for start in range(len(text) - STRETCH + 1))


def _write(path: Path, conversations: list[Conversation]) -> None:
    write_text(path, "".join(json.dumps(asdict(each)) + "\n" for each in conversations))
