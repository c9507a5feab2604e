"""Conversations to train on, as `forerun.train.chat_data` makes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

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


def read_chats(folder: Path, split: str) -> list[Conversation]:
    """The conversations of a split; raises ValueError where they have not been made."""
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        raise ValueError(f"no conversations in {folder}: `forerun train chat-data` makes them")
    return [Conversation(**json.loads(line)) for line in read_text(path).splitlines()]
