"""From bodies of Anthropic's Messages API to the chats that they mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forerun.api.decoder import Decoder
from forerun.server.anthropic_schemas import (
    MessagesBody,
    MessageThinking,
    OutputConfig,
    PromptBody,
    SchemaTool,
    SystemTurn,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from forerun.server.errors import ApiError
from forerun.server.requests import Prepared, chat_tokens, prepare_chat, read_tools
from forerun.server.schemas import ChatBody, Thinking
from forerun.text.chat import renders_late_system
from forerun.text.per_tokenizer import per_tokenizer

# Fields that a chat's body has under the same name.
_SHARED = (
    "max_tokens temperature top_p top_k min_p typical_p seed ignore_eos cache_salt forerun_method"
)
# Names of a chat's fields, and the names that they have here.
_NAMES = {
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_budget_tokens": "thinking",
}
_MODES = {"auto": "auto", "any": "required", "none": "none"}
# What Claude Code writes for its maker before the system prompt. It differs in every request, so
# that no later one would begin alike.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:.*\n*")

_renders_late_system = per_tokenizer(renders_late_system)


def prepare_message(body: MessagesBody, decoder: Decoder, parser: str | None = None) -> Prepared:
    """Return the request of a body. Raises ApiError, which names the body's own fields."""
    with own_names():
        return prepare_chat(_chat_body(body, decoder), decoder, parser)


def count_prompt(body: PromptBody, decoder: Decoder, parser: str | None = None) -> int:
    """Return the number of tokens of a body's prompt. Raises ApiError as `prepare_message`."""
    with own_names():
        chat = _chat_body(body, decoder)
        return len(chat_tokens(chat, decoder, read_tools(chat, decoder, parser)))


@contextmanager
def own_names() -> Iterator[None]:
    """Name the fields of a chat in an ApiError as they are called here."""
    try:
        yield
    except ApiError as error:
        raise renamed(error) from None


def renamed(error: ApiError) -> ApiError:
    """Return an error of a chat with the names that its fields have here."""
    param = _NAMES.get(error.param or "", error.param)
    message = error.message.replace("response_format", _NAMES["response_format"])
    return ApiError(error.status, message, param, error.code)


def _chat_body(body: PromptBody, decoder: Decoder) -> ChatBody:
    """Return a chat's body that asks for the same; `prepare_chat` checks its fields."""
    names = body.chat_template_kwargs or {}
    output = body.output_config or OutputConfig()
    if output.effort is not None:
        # A template that does not know the name leaves it out, because effort is only a hint.
        names = {"reasoning_effort": output.effort} | names
    choice = body.tool_choice
    return ChatBody.model_construct(
        **{name: vars(body)[name] for name in _SHARED.split()},
        messages=_messages(body, decoder),
        tools=[_tool(tool) for tool in body.tools or []],
        tool_choice=_tool_choice(body),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        response_format=output.format,
        stop=body.stop_sequences,
        thinking=_thinking(body.thinking),
        chat_template_kwargs=names,
    )


def _messages(body: PromptBody, decoder: Decoder) -> list[dict[str, Any]]:
    """Return the messages of a chat. Neighbours of the same role are one message.

    A system message inside the conversation, as Claude Code sends them, becomes the user's where
    the chat template takes none there.
    """
    assert decoder.tokenizer is not None
    messages: list[dict[str, Any]] = []
    for part in body.system or []:
        text = _BILLING.sub("", part.text)
        if text:
            _say(messages, "system", "content", text)
    for turn in body.messages:
        role: str = turn.role
        is_late = isinstance(turn, SystemTurn) and any(m["role"] != "system" for m in messages)
        if is_late and not _renders_late_system(decoder.tokenizer):
            role = "user"
        for block in turn.content:
            if isinstance(block, ToolResultBlock):
                result = {"tool_call_id": block.tool_use_id, "content": _result(block)}
                messages.append({"role": "tool", **result})
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": block.input}
                calls = _message(messages, role).setdefault("tool_calls", [])
                calls.append({"id": block.id, "type": "function", "function": function})
            elif isinstance(block, ThinkingBlock):
                _say(messages, role, "reasoning_content", block.thinking)
            else:
                _say(messages, role, "content", block.text)
    return messages


def _message(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """Return the last message if it has a role, otherwise a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role})
    return messages[-1]


def _say(messages: list[dict[str, Any]], role: str, key: str, text: str) -> None:
    message = _message(messages, role)
    message[key] = f"{message[key]}\n{text}" if key in message else text


def _result(block: ToolResultBlock) -> str:
    """Return the text of a result. It says that it is an error, as chats have no such field."""
    text = "\n".join(part.text for part in block.content or [])
    return f"Error: {text}" if block.is_error else text


def _tool(tool: SchemaTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _tool_choice(body: PromptBody) -> Any:
    """Return a chat's `tool_choice`. Raises ApiError."""
    if body.tool_choice is None:
        return None
    kind = body.tool_choice.type
    names = [tool.name for tool in body.tools or []]
    if kind == "any" and not names:
        raise ApiError(400, "tool_choice any needs tools", "tool_choice")
    if kind != "tool":
        return _MODES[kind]
    if body.tool_choice.name not in names:
        raise ApiError(400, "tool_choice must have the name of one of the tools", "tool_choice")
    return {"type": "function", "function": {"name": body.tool_choice.name}}


def _thinking(given: MessageThinking | None) -> Thinking | None:
    """Return a chat's `thinking`. "enabled" lets a model think, and is no error for others."""
    if given is None:
        return None
    kind = "disabled" if given.type == "disabled" else "adaptive"
    return Thinking.model_construct(type=kind, budget_tokens=given.budget_tokens)
