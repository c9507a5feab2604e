"""Prompts to measure on.

Reading them needs no torch, so that a bad file is refused before a model is loaded.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.files import read_text
from forerun.text.chat import chat_prompt, checked, checked_text
from forerun.train.corpus import held_out_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STDLIB = {"stdlib-test": "test", "stdlib-validation": "validation"}
DATASET_SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Prompt:
    """One prompt, as text, as a conversation or as token ids.

    Attributes:
        id: unique in its dataset.
        text: None if there are only token ids or messages.
        tokens: None until the text has been tokenised.
        cut: whether tokens were dropped at the beginning so that the output fits the context.
        messages: the messages of a conversation, which the target's chat template renders.
        known_messages: how many messages at the beginning a method is to have read before.
        known: how many tokens these are, once the conversation has been tokenised.
    """

    id: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    cut: bool = False
    messages: tuple[dict[str, str], ...] | None = None
    known_messages: int = 0
    known: int = 0


def dataset_name(dataset: str) -> str:
    """Return the name of a dataset in results: its own, or that of its file without the folder."""
    return Path(dataset).name


def check_datasets(datasets: Sequence[str]) -> None:
    """Raise ValueError for a dataset that is unknown or given twice."""
    for dataset in datasets:
        if dataset not in STDLIB and not dataset.endswith(DATASET_SUFFIXES):
            raise ValueError(
                f"unknown dataset {dataset!r}; there are {', '.join(STDLIB)} and FILE.jsonl or "
                "FILE.jsonl.gz"
            )
    names = [dataset_name(dataset) for dataset in datasets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"dataset {twice[0]!r} is given twice")


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Return the first prompts of a file.

    Raises:
        ValueError: a line is not a prompt; the message names the file and the line.
    """
    prompts = []
    for number, entry in _lines(path):
        try:
            prompts.append(_prompt(number, entry))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts[:limit]


def read_files(datasets: Sequence[str], limit: int | None = None) -> dict[str, list[Prompt]]:
    """Return the prompts of the datasets that are files."""
    return {
        dataset: read_prompts(Path(dataset), limit) for dataset in datasets if dataset not in STDLIB
    }


def front_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the special tokens that a tokenizer puts before a text."""
    text = tokenizer("x", add_special_tokens=False)["input_ids"]
    whole = tokenizer("x")["input_ids"]
    start = next((i for i in range(len(whole)) if whole[i : i + len(text)] == text), 0)
    return tuple(whole[:start])


def stdlib_prompts(
    dataset: str, tokenizer: PreTrainedTokenizerBase, tokens: int, limit: int | None
) -> list[Prompt]:
    """Return the first prompts from held-out files of this Python's standard library.

    Each has `tokens` token ids, including the special tokens that the tokenizer puts before a text.
    """
    split: Any = STDLIB[dataset]
    front = front_of(tokenizer)
    if tokens <= len(front):
        raise ValueError(
            f"prompt_tokens must be more than the {len(front)} that the tokenizer begins with"
        )
    rows = held_out_prompts(
        tokenizer, split, 2**62 if limit is None else limit, tokens - len(front)
    )
    if not rows:
        raise ValueError(
            f"dataset {dataset!r} has no prompts: this Python comes without the library's sources"
        )
    return [Prompt(str(number), tokens=(*front, *row)) for number, row in enumerate(rows, 1)]


def tokenised(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    longest: int | None,
    vocab_size: int,
    front: tuple[int, ...] = (),
    chat: bool = False,
) -> Prompt:
    """Return the prompt as its last `longest` token ids.

    If the prompt begins with the special tokens `front`, it still does after the cut. A
    conversation is rendered by the chat template and never cut. With `chat` a text counts as a
    conversation of one message.
    """
    is_chat = chat or prompt.messages is not None
    tokens = _chat_tokens(prompt, tokenizer, front) if is_chat else prompt.tokens
    if tokens is None:
        assert tokenizer is not None
        tokens = tuple(tokenizer(prompt.text)["input_ids"])
    if not tokens:
        raise ValueError(f"prompt {prompt.id!r} has no tokens")
    if max(tokens) >= vocab_size:
        raise ValueError(f"prompt {prompt.id!r} has token ids outside 0..{vocab_size - 1}")
    if longest is None or len(tokens) <= longest:
        return replace(prompt, tokens=tokens, known=_known(prompt, tokens, tokenizer))
    if is_chat:
        raise ValueError(
            f"prompt {prompt.id!r} has {len(tokens)} tokens as a chat; there is room for {longest}"
        )
    if tokens[: len(front)] != front or len(front) >= longest:
        front = ()
    return replace(prompt, tokens=front + tokens[len(front) - longest :], cut=True)


def _chat_tokens(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, front: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the token ids of a conversation, or of a text as its only message."""
    messages: Any = prompt.messages
    if messages is None:
        text = prompt.text
        if text is None:
            assert tokenizer is not None
            assert prompt.tokens is not None
            tokens = list(prompt.tokens)
            if prompt.tokens[: len(front)] == front:
                tokens = tokens[len(front) :]
            text = str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        messages = [{"role": "user", "content": text}]
    try:
        return tuple(chat_prompt(tokenizer, messages))
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id!r}: {error}") from None


def _known(prompt: Prompt, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Return how many tokens the conversation shares with its known messages alone."""
    if not prompt.known_messages or prompt.messages is None or tokenizer is None:
        return 0
    beginning = list(prompt.messages[: prompt.known_messages])
    rendered = tokenizer.apply_chat_template(beginning, tokenize=False)
    known = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    for place, (token, other) in enumerate(zip(known, tokens, strict=False)):
        if token != other:
            return place
    return min(len(known), len(tokens))


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.suffix == ".gz":
        try:
            text = gzip.decompress(path.read_bytes()).decode()
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {path}: {error}") from None
    else:
        text = read_text(path)
    # Not splitlines(), because JSON strings may hold other characters that it takes for line ends.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:  # bad syntax, huge numbers; deep nesting
            raise ValueError(
                f"{path}, line {number}: not JSON: {getattr(error, 'msg', error)}"
            ) from None
        if not isinstance(entry, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object")
        yield number, entry


def _prompt(number: int, entry: dict[str, Any]) -> Prompt:
    """Return the prompt of a line.

    It is one of `messages`, `tokens` and `prompt` (as in HumanEval), the `question` of GSM8K, or
    the first of the `turns` of Spec-Bench. The first `known` messages are to be read before.
    """
    id = str(number)
    if "messages" in entry:
        return _conversation(id, entry)
    if "tokens" in entry:
        tokens = entry["tokens"]
        is_list = isinstance(tokens, list) and bool(tokens)
        if not is_list or not all(type(token) is int and token >= 0 for token in tokens):
            raise ValueError("'tokens' must be a list of token ids, at least one")
        return Prompt(id, tokens=tuple(tokens))
    if "prompt" not in entry and "question" in entry:
        return Prompt(id, f"Question: {_text(entry, 'question')}\nAnswer:")
    if "prompt" not in entry and isinstance(entry.get("turns"), list) and entry["turns"]:
        return Prompt(id, _text({"turns": entry["turns"][0]}, "turns"))
    return Prompt(id, _text(entry, "prompt"))


def _conversation(id: str, entry: dict[str, Any]) -> Prompt:
    messages = checked(entry["messages"])
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is from the assistant; there is nothing to answer")
    known = entry.get("known", 0)
    if type(known) is not int or not 0 <= known < len(messages):
        raise ValueError(
            f"'known' must be a number of messages before the last, not {json.dumps(known)[:40]}"
        )
    return Prompt(id, messages=tuple(messages), known_messages=known)


def _text(entry: dict[str, Any], field: str) -> str:
    if field not in entry:
        raise ValueError(f"no field {field!r}")
    if not isinstance(entry[field], str) or not entry[field]:
        raise ValueError(
            f"{field!r} must be a string that is not empty, not {json.dumps(entry[field])[:40]}"
        )
    return checked_text(repr(field), entry[field])
