"""Conversations as prompts, by the chat template of a tokenizer. Needs no torch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant")
_ANSWER = "forerunAnswer"  # stands for an answer, to see what a template writes after one


def has_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Return whether conversations can be rendered."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[dict[str, Any]],
    system: str | None = None,
    **template_args: Any,
) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins. The template writes all special tokens.

    Args:
        messages: as for `checked`; the last one is not from the assistant.
        system: a system prompt, put in front.
        template_args: more names for the template, such as enable_thinking=False.

    Raises:
        ValueError: no tokenizer, no chat template, two system prompts, nothing to answer, and what `checked` or the
            template refuses.
    """
    if tokenizer is None:
        raise ValueError("a chat needs a tokenizer; give tokenizer=...")
    if not has_template(tokenizer):
        raise ValueError("the model has no chat template: give an instruct model, or a plain prompt without chat")
    found = with_system(checked(messages), system)
    if found[-1]["role"] == "assistant":
        raise ValueError("the last message is from the assistant; there is nothing to answer")
    taken = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"tools", "documents", "kwargs"}
    for name in template_args:
        if name in taken:
            raise ValueError(f"{name!r} is no argument for the chat template")
    try:
        ids: Any = tokenizer.apply_chat_template(
            found, add_generation_prompt=True, tokenize=True, return_dict=False, **template_args
        )
    except Exception as error:  # templates may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the chat template refuses these messages: {reason}") from None
    return [int(token) for token in ids]


def checked(messages: Any) -> list[dict[str, str]]:
    """Return messages {"role", "content"} with contents as plain strings.

    A content is text, or OpenAI's list of {"type": "text", "text": ...}, each of which becomes a line. Raises
    ValueError for no messages, other keys or roles, and contents that are no text or that no file could hold.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages must be a list of {{role, content}}, not {type(messages).__name__}")
    if not messages:
        raise ValueError("there are no messages")
    return [_message(number, message) for number, message in enumerate(messages, 1)]


def with_system(messages: list[dict[str, str]], system: str | None) -> list[dict[str, str]]:
    """Return the messages after a system prompt. Raises ValueError if they begin with one."""
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise ValueError("there is a system prompt and a system message; give one of them")
    return [{"role": "system", "content": _text("the system prompt", system)}, *messages]


def turn_ends(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the special token that the template writes after an answer, if any. Models that were trained on it end
    with it, even if their generation config does not name it."""
    if tokenizer is None or not has_template(tokenizer):
        return frozenset()
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template that wants other messages: the model's own end tokens have to do
        return frozenset()
    after = text.rpartition(_ANSWER)[2].lstrip()
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    special |= {str(token): id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    found = [token for token in special if token and after.startswith(token)]
    return frozenset([special[max(found, key=len)]] if found else [])


def _message(number: int, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f"message {number} must be {{role, content}}, not {type(message).__name__}")
    for key in message:
        if key not in ("role", "content"):
            raise ValueError(f"message {number} has an unknown key {key!r}; there are role and content")
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f"message {number} has no {key}")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}; there are {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "\n".join(_part(number, part) for part in content)
    return {"role": role, "content": _text(f"the content of message {number}", content)}


def _part(number: int, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise ValueError(f"message {number} has a part that is no text: {str(kind)[:40]!r}")
    return _text(f"a part of message {number}", part.get("text"))


def _text(what: str, text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{what} must be text, not {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{what} has a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} has half of a surrogate pair, which is no character") from None
    return text
