"""Conversations as prompts, by the chat template of a tokenizer. It needs no torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from forerun.text import generic_tools
from forerun.text.tool_calls import json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant", "tool")
# Beside role and content.
_EXTRA_KEYS = {
    "assistant": ("tool_calls", "reasoning_content"),
    "tool": ("tool_call_id", "name"),
}
# How templates name the thoughts of an earlier answer.
_REASONING = ("reasoning_content", "reasoning", "thinking")
# Placeholders for a call and an answer, which show what a template writes around them.
_CALL = "forerunCall"
_ANSWER = "forerunAnswer"


class PromptEnd(Enum):
    """What stands at the end of a conversation's prompt."""

    ANSWER = "answer"  # the beginning of an answer, as the template writes it
    CONTINUE = "continue"  # the text of the last message, which goes on
    CLOSED = "closed"  # the end of the last message


def has_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Return whether conversations can be rendered."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[dict[str, Any]],
    system: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    end: PromptEnd | None = None,
    **template_args: Any,
) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins.

    The template writes all special tokens. If it has no tools or no calls, they are written as
    text (`forerun.text.generic_tools`).

    Args:
        tokenizer: that of the model, with a chat template.
        messages: as for `checked`.
        system: a system prompt, which is put before the messages.
        tools: functions that the model may call, in the form of OpenAI's API.
        end: what the prompt ends with. By default the answer continues a last message of the
            assistant, and answers any other.
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
    parameters = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    for name in template_args:
        if name in parameters - {"documents", "kwargs"}:
            raise ValueError(f"{name!r} is not an argument of chat templates")
    conversation, end = _with_end(conversation, end)
    has_calls = any(
        "tool_calls" in message or message["role"] == "tool" for message in conversation
    )
    if has_calls and not _renders_calls(tokenizer):
        conversation = generic_tools.with_calls_as_text(conversation)
    if tools and not renders_tools(tokenizer):
        conversation = generic_tools.with_tools(conversation, tools, _renders_system(tokenizer))
        tools = None
    options: dict[str, Any] = {
        "tools": tools or None,
        "add_generation_prompt": end is PromptEnd.ANSWER,
        "continue_final_message": end is PromptEnd.CONTINUE,
        "tokenize": True,
        "return_dict": False,
    }
    try:
        template = str(tokenizer.get_chat_template(tools=tools or None))
        rendered = [_with_reasoning(message, template) for message in conversation]
        ids: Any = tokenizer.apply_chat_template(rendered, **options, **template_args)
    except Exception as error:  # templates may raise errors of any type
        raise ValueError(_refusal(error, conversation)) from None
    return [int(token) for token in ids]


def _with_end(
    conversation: list[dict[str, Any]], end: PromptEnd | None
) -> tuple[list[dict[str, Any]], PromptEnd]:
    """Return the messages to render, and what their prompt ends with.

    A last message of the assistant that says nothing yet is left out: its continuation is an
    answer. Raises ValueError if there is nothing to continue.
    """
    last = conversation[-1]
    is_answer = last["role"] == "assistant"
    if end is None:
        end = PromptEnd.CONTINUE if is_answer else PromptEnd.ANSWER
    if end is not PromptEnd.CONTINUE:
        return conversation, end
    if "tool_calls" in last:
        raise ValueError("the last message calls tools; their results must follow")
    if is_answer and not last["content"].strip():
        if len(conversation) == 1:
            raise ValueError("the only message is an empty one from the assistant")
        return conversation[:-1], PromptEnd.ANSWER
    return conversation, end


def _with_reasoning(message: dict[str, Any], template: str) -> dict[str, Any]:
    """Return a message with its thoughts under the names that the template reads, if any."""
    if "reasoning_content" not in message:
        return message
    thoughts = message["reasoning_content"]
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    names = [name for name in _REASONING if re.search(rf"\b{name}\b", template)]
    return kept | dict.fromkeys(names, thoughts)


def _refusal(error: Exception, conversation: list[dict[str, Any]]) -> str:
    """Return why a template refuses messages, in one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    called = {call["id"] for message in conversation for call in message.get("tool_calls", ())}
    for number, message in enumerate(conversation, 1):
        id = message.get("tool_call_id")
        if message["role"] == "tool" and (not called or (id is not None and id not in called)):
            return (
                f"the chat template refuses message {number}, whose tool call no message before it "
                f"has: {reason}"
            )
    return f"the chat template refuses these messages: {reason}"


def checked(messages: Any) -> list[dict[str, Any]]:
    """Return messages {"role", "content"} with contents as plain strings.

    A content is text, or a list of {"type": "text", "text": ...} as in OpenAI's API, whose texts
    become lines. A message of the assistant may have `tool_calls`, and `reasoning_content`, which
    are the thoughts before its content; its content may be null. The arguments of calls become
    objects, because templates expect them. A message of role tool may have the `tool_call_id` of a
    call before it, and then gets the name of that function.

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


def _renders_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes system messages."""
    messages = [{"role": "system", "content": _ANSWER}, {"role": "user", "content": "x"}]
    try:
        return _ANSWER in str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # templates may raise errors of any type
        return False


def renders_late_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes a system message that is not the first message."""
    return _ANSWER in _rendered(tokenizer, [{"role": "system", "content": _ANSWER}])


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
    allowed = ["role", "content"]
    if isinstance(role, str):
        allowed += _EXTRA_KEYS.get(role, ())
    for key in message:
        if key not in allowed:
            raise ValueError(
                f"message {number} has an unknown key {key!r}; there are role and content"
            )
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is None and role == "assistant" and (calls or "content" in message):
        content = ""
    for key, value in (("role", role), ("content", content)):
        if value is None and key not in message:
            raise ValueError(f"message {number} has no {key}")
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}; there are {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "\n".join(_part(number, part) for part in content)
    text = checked_text(f"the content of message {number}", content)
    more = _tool_keys(number, message, names) if role == "tool" else {}
    if calls:
        more["tool_calls"] = _calls(number, calls, names)
    thoughts = message.get("reasoning_content")
    if thoughts is not None:
        more["reasoning_content"] = checked_text(f"reasoning_content of message {number}", thoughts)
    return {"role": role, "content": text, **more}


def _tool_keys(number: int, message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the id of the call that a message of role tool answers, and the function's name.

    A call that no message has may have been trimmed away with the beginning of the conversation.
    """
    keys: dict[str, Any] = {}
    id = message.get("tool_call_id")
    if id is not None:
        keys["tool_call_id"] = checked_text(f"tool_call_id of message {number}", id)
    name = names.get(keys.get("tool_call_id", ""), message.get("name"))
    if name is not None:
        keys["name"] = checked_text(f"the name of message {number}", name)
    return keys


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
