"""Conversations as prompts, by the chat template of a tokenizer. It needs no torch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forerun.text.tool_calls import json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant", "tool")
_EXTRA_KEYS = {"assistant": "tool_calls", "tool": "tool_call_id"}  # beside role and content
# Placeholders for a call and an answer, which show what a template writes around them.
_CALL = "forerunCall"
_ANSWER = "forerunAnswer"


def has_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Return whether conversations can be rendered."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[dict[str, Any]],
    system: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    **template_args: Any,
) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins.

    The template writes all special tokens.

    Args:
        tokenizer: that of the model, with a chat template.
        messages: as for `checked`; the last one is not from the assistant.
        system: a system prompt, which is put before the messages.
        tools: functions that the model may call, in the form of OpenAI's API.
        template_args: further names for the template, such as enable_thinking=False.

    Raises:
        ValueError: there is no tokenizer, no chat template, a second system prompt or nothing to
            answer, or `checked` or the template refuses the messages.
    """
    if tokenizer is None:
        raise ValueError("a chat needs a tokenizer; give tokenizer=...")
    if not has_template(tokenizer):
        raise ValueError(
            "the model has no chat template: give an instruct model, or a plain prompt without chat"
        )
    conversation = checked(messages)
    if system is not None:
        if conversation[0]["role"] == "system":
            raise ValueError("there is a system prompt and a system message; give one of them")
        text = checked_text("the system prompt", system)
        conversation.insert(0, {"role": "system", "content": text})
    if conversation[-1]["role"] == "assistant":
        raise ValueError("the last message is from the assistant; there is nothing to answer")
    has_calls = any(
        "tool_calls" in message or message["role"] == "tool" for message in conversation
    )
    if has_calls and not _renders_calls(tokenizer):
        raise ValueError(
            "the chat template of this model takes no tool calls and no messages of role tool"
        )
    parameters = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    for name in template_args:
        if name in parameters - {"documents", "kwargs"}:
            raise ValueError(f"{name!r} is not an argument of chat templates")
    options: dict[str, Any] = {
        "tools": tools or None,
        "add_generation_prompt": True,
        "tokenize": True,
        "return_dict": False,
    }
    try:
        ids: Any = tokenizer.apply_chat_template(conversation, **options, **template_args)
    except Exception as error:  # templates may raise errors of any type
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the chat template refuses these messages: {reason}") from None
    return [int(token) for token in ids]


def checked(messages: Any) -> list[dict[str, Any]]:
    """Return messages {"role", "content"} with contents as plain strings.

    A content is text, or a list of {"type": "text", "text": ...} as in OpenAI's API, whose texts
    become lines. A message of the assistant may have `tool_calls` and then no content. The
    arguments of these calls become objects, because templates expect them. A message of role tool
    has the `tool_call_id` of a call before it, and gets the name of that function.

    Raises:
        ValueError: there are no messages, or one has another key or role, or a content that is not
            text or that cannot be encoded.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(
            f"messages must be a list of {{role, content}}, not {type(messages).__name__}"
        )
    if not messages:
        raise ValueError("there are no messages")
    names: dict[str, str] = {}  # of functions, by the ids of calls so far
    return [_message(number, message, names) for number, message in enumerate(messages, 1)]


def turn_ends(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the special token that the template writes after an answer, if any.

    Models that were trained with the template end with it, even if their generation config does not
    name it.
    """
    if tokenizer is None or not has_template(tokenizer):
        return frozenset()
    # Empty if the template refuses this conversation; then only the model's end tokens are used.
    conversation = _rendered(tokenizer, [{"role": "assistant", "content": _ANSWER}])
    after = conversation.rpartition(_ANSWER)[2].lstrip()
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    for id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special[str(token)] = id
    ends = [text for text in special if text and after.startswith(text)]
    return frozenset([special[max(ends, key=len)]] if ends else [])


def renders_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template tells the model of tools."""
    function = {
        "name": _ANSWER,
        "description": "x",
        "parameters": {"type": "object", "properties": {}},
    }
    return _ANSWER in _rendered(tokenizer, [], [{"type": "function", "function": function}])


def _renders_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes tool calls and their results."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _CALL, "arguments": {}}}
    result = {"role": "tool", "content": _ANSWER, "name": _CALL, "tool_call_id": "abcdefghi"}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = _rendered(tokenizer, [calling, result])
    return _ANSWER in text and _CALL in text


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[Any], tools: list[Any] | None = None
) -> str:
    """Return a conversation as the template writes it; "" if the template refuses it."""
    conversation = [{"role": "user", "content": "x"}, *messages]
    try:
        return str(tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False))
    except Exception:  # templates may raise errors of any type
        return ""


def _message(number: int, message: Any, names: dict[str, str]) -> dict[str, Any]:
    """Return a message as `checked` does; `names` has the called functions by the calls' ids."""
    if not isinstance(message, dict):
        raise ValueError(
            f"message {number} must be {{role, content}}, not {type(message).__name__}"
        )
    role = message.get("role")
    allowed = {"role", "content"}
    if isinstance(role, str) and role in _EXTRA_KEYS:
        allowed.add(_EXTRA_KEYS[role])
    for key in message:
        if key not in allowed:
            raise ValueError(
                f"message {number} has an unknown key {key!r}; there are role and content"
            )
    calls = message.get("tool_calls")
    content = message.get("content") or ("" if calls else message.get("content"))
    for key, value in (("role", role), ("content", content)):
        if value is None and key not in message:
            raise ValueError(f"message {number} has no {key}")
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}; there are {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "\n".join(_part(number, part) for part in content)
    more: dict[str, Any] = {"tool_calls": _calls(number, calls, names)} if calls else {}
    if role == "tool" and (id := message.get("tool_call_id")) is not None:
        if not isinstance(id, str) or id not in names:
            raise ValueError(
                f"message {number} answers the tool call {str(id)[:40]!r}, "
                "which no message before it has"
            )
        more |= {"tool_call_id": id, "name": names[id]}
    text = checked_text(f"the content of message {number}", content)
    return {"role": role, "content": text, **more}


def _calls(number: int, calls: Any, names: dict[str, str]) -> list[dict[str, Any]]:
    """Return the tool calls of a message with their arguments as objects.

    Arguments that are not an object stay text, because a model may have written them.
    """
    if not isinstance(calls, list | tuple):
        raise _calls_error(number)
    checked_calls = []
    for call in calls:
        function: Any = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(call.get("id", ""), str):
            raise _calls_error(number)
        id = call.get("id", "")
        name = checked_text("the name of a tool call", function.get("name"))
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, dict):
            text = checked_text(f"the arguments of a tool call in message {number}", arguments)
            read = json_object(text)
            arguments = text if read is None else read
        names[id] = name
        checked_function = {"name": name, "arguments": arguments}
        checked_calls.append({"id": id, "type": "function", "function": checked_function})
    return checked_calls


def _calls_error(number: int) -> ValueError:
    return ValueError(
        f"tool_calls of message {number} must be a list of {{id, function: {{name, arguments}}}}"
    )


def _part(number: int, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise ValueError(f"message {number} has a part that is no text: {str(kind)[:40]!r}")
    return checked_text(f"a part of message {number}", part.get("text"))


def checked_text(what: str, text: Any) -> str:
    """Return a text.

    Raises ValueError for anything else, and for a text that cannot be encoded.
    """
    if not isinstance(text, str):
        raise ValueError(f"{what} must be text, not {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{what} has a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} has half of a surrogate pair, which is no character") from None
    return text
