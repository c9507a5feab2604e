"""Conversations to train on, as `forerun.train.chat_data` makes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from forerun.files import read_text
from forerun.zoo.corpus import Split

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Conversation:
    """One question with its answer.

    Attributes:
        question: the user's turn.
        prompt: ids [p] of the whole prompt, the template's own included.
        answer: ids [a], with the end token where it ended.
        text: the answer.
        temperature: that it was answered at.
        source: "own" or "stdlib".
        split: one of SPLITS, which follows from the question.
    """

    question: str
    prompt: list[int]
    answer: list[int]
    text: str
    temperature: float
    source: str
    split: str


def check_chats(folder: Path, tokenizer: PreTrainedTokenizerBase, target: str) -> None:
    """Raises ValueError where there are no conversations, or those of a model with another tokenizer."""
    for each in read_chats(folder, SPLITS[0], most=8):
        is_known = max([*each.prompt, *each.answer]) < len(tokenizer)
        if not is_known or tokenizer.decode(each.answer, skip_special_tokens=True) != each.text:
            raise ValueError(f"the conversations in {folder} are of a model with other tokens than {target!r}")


def read_chats(folder: Path, split: str, most: int | None = None) -> list[Conversation]:
    """The conversations of a split, or the first ones of it; raises ValueError where they have not been made."""
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        raise ValueError(f"no conversations in {folder}: `forerun train chat-data` makes them")
    return [Conversation(**json.loads(line)) for line in read_text(path).splitlines()[:most]]
