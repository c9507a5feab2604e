"""Conversations in files, and the part of a conversation that fits the model's context."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Message = dict[str, str]
SAVED_FORMAT = "forerun-chat"
RESERVED_SHARE = 4  # at most a quarter of the context is kept free for the answer


@dataclass(frozen=True)
class Conversation:
    """A conversation as a file holds it.

    Attributes:
        messages: a question and its answer in turns.
        system: the system prompt; None for the chat template's own.
    """

    messages: list[Message] = field(default_factory=list)
    system: str | None = None


def save(conversation: Conversation, path: Path) -> None:
    """Write a conversation: as JSON if the name ends in .json, else as Markdown."""
    if path.suffix == ".json":
        text = json.dumps(
            {
                "format": SAVED_FORMAT,
                "system": conversation.system,
                "messages": conversation.messages,
            },
            ensure_ascii=False,
            indent=1,
        )
    else:
        parts = [f"## System\n\n{conversation.system}"] if conversation.system else []
        names = {"user": "Question", "assistant": "Answer"}
        parts += [
            f"## {names[message['role']]}\n\n{message['content'].strip()}"
            for message in conversation.messages
        ]
        text = "\n\n".join(parts)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> Conversation | str:
    """Return the conversation that `save` wrote as JSON, or the text of any other file.

    Raises ValueError for a file that cannot be read, or is no text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8") from None
    if "\0" in text:
        raise ValueError(f"{path} is not a text: it has a NUL character")
    try:
        saved = json.loads(text)
    except ValueError:
        return text
    if not isinstance(saved, dict) or saved.get("format") != SAVED_FORMAT:
        return text
    return _checked(saved, path)


def _checked(saved: dict[str, object], path: Path) -> Conversation:
    """Return the conversation of a file's JSON. Raises ValueError."""
    messages = saved.get("messages")
    system = saved.get("system")
    if not isinstance(messages, list) or len(messages) % 2 or not _take_turns(messages):
        raise ValueError(f"{path}: messages must be questions and answers in turns")
    if system is not None and not isinstance(system, str):
        raise ValueError(f"{path}: system must be a text or null")
    return Conversation(messages, system)


def _take_turns(messages: list[object]) -> bool:
    """Return whether messages are texts of the user and of the assistant in turns."""
    roles = ("user", "assistant")
    return all(
        isinstance(message, dict)
        and message.get("role") == roles[number % 2]
        and isinstance(message.get("content"), str)
        for number, message in enumerate(messages)
    )


def as_block(name: str, text: str) -> str:
    """Return a file's text as a block of code under its name."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{name}:\n{fence}\n{text.rstrip()}\n{fence}"


def first_that_fits(
    messages: list[Message], count: Callable[[list[Message]], int], context: int, answer: int
) -> int:
    """Return the index of the first message that is still sent.

    If the messages and an answer do not fit the context, the oldest questions leave with their
    answers until the rest has half of it. To leave no more than needed would move the beginning
    with every question, and the model would have to read everything again each time. The last
    question always stays.

    Args:
        messages: the conversation, with a question at its end.
        count: the number of tokens of some of the messages.
        context: tokens of the model's context.
        answer: tokens that an answer may have.
    """
    if count(messages) <= context - min(answer, context // RESERVED_SHARE):
        return 0
    first = 0
    while first + 2 < len(messages) and count(messages[first:]) > context // 2:
        first += 2
    return first
