"""/v1/responses without state.

A body is read as that of a chat under other names, and its answer is written as items and events.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from time import time
from typing import Any
from uuid import uuid4

from forerun.api.decoder import Decoder
from forerun.engine.engine import Step
from forerun.server.answers import Answer, call_id
from forerun.server.errors import ApiError, blame
from forerun.server.job import Job
from forerun.server.logprobs import TokenTexts, as_json
from forerun.server.requests import Prepared, prepare_chat
from forerun.server.schemas import ChatBody, ResponsesBody
from forerun.text.tool_calls import ToolCall

# Fields that a chat's body has under the same name.
_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "seed",
    "ignore_eos",
    "cache_salt",
    "forerun_method",
    "thinking_budget_tokens",
    "chat_template_kwargs",
    "stream",
    "parallel_tool_calls",
)
# Names of a chat's fields, and the names that they have here.
_OTHER_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_TEXT_PARTS = ("input_text", "output_text", "text")


def prepare_response(body: ResponsesBody, decoder: Decoder, parser: str | None = None) -> Prepared:
    """Return the request of a body. Raises ApiError, which names the body's own fields."""
    try:
        prepared = prepare_chat(_chat_body(body), decoder, parser)
    except ApiError as error:
        raise _renamed(error) from None
    return replace(prepared, limit_field="max_output_tokens")


def _renamed(error: ApiError) -> ApiError:
    """Return an error of a chat with the name that its field has here."""
    param = _OTHER_NAMES.get(error.param or "")
    if error.param is None or param is None:
        return error
    message = error.message.replace(error.param, param)
    return ApiError(error.status, message, param, error.code)


def _chat_body(body: ResponsesBody) -> ChatBody:
    """Return a chat's body that asks for the same; `prepare_chat` checks its fields.

    Raises ApiError.
    """
    fields: dict[str, Any] = {name: vars(body)[name] for name in _SAME_NAME}
    with blame("instructions"):
        _check_json(body.instructions)
    with blame("input"):
        fields["messages"] = _messages(body.input)
    if body.instructions:
        fields["messages"].insert(0, {"role": "system", "content": body.instructions})
    with blame("text.format"):
        form = body.text.format if body.text is not None else None
        _check_json(form)
        if form is not None and form.get("type") == "json_schema":
            schema = {key: value for key, value in form.items() if key != "type"}
            form = {"type": "json_schema", "json_schema": schema}
    with blame("tools"):
        _check_json(body.tools)
        tools = body.tools or []
        _check_list(tools, "tools must be a list")
        fields["tools"] = [_tool(number, tool) for number, tool in enumerate(tools, 1)]
    with blame("tool_choice"):
        _check_json(body.tool_choice)
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    return ChatBody.model_construct(
        **fields, max_completion_tokens=body.max_output_tokens, response_format=form
    )


def _check_json(value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise ValueError(
            "it has a number or a character that JSON does not allow, or is nested too deeply"
        ) from None


def _check_list(value: Any, message: str) -> None:
    if not isinstance(value, list):
        raise ValueError(message)


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat for an input. Raises ValueError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    _check_list(given, "input must be a text or a list of items")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(given, 1):
        _add_item(messages, number, item)
    return messages


def _add_item(messages: list[dict[str, Any]], number: int, item: Any) -> None:
    """Add an item of an input. A call becomes part of the assistant's message before it."""
    kind = None
    if isinstance(item, dict):
        kind = item.get("type") or "message"
    if kind == "message":
        if item.get("role") == "tool":
            raise ValueError(
                f"input item {number} has the role 'tool'; the result of a tool is an item of type "
                "function_call_output"
            )
        message = {"role": item.get("role"), "content": _content(item.get("content"))}
        has_thoughts = bool(messages) and "content" not in messages[-1]
        if has_thoughts and message["role"] == "assistant":
            message = messages.pop() | message
        messages.append(message)
    elif kind == "reasoning":
        messages.append({"role": "assistant", "reasoning_content": _thoughts_of(item)})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append({"id": item.get("call_id"), "type": "function", "function": call})
    elif kind == "function_call_output":
        messages.append(
            {
                "role": "tool",
                "tool_call_id": str(item.get("call_id")),
                "content": _content(item.get("output")),
            }
        )
    else:
        raise ValueError(
            f"input item {number} has the type {str(kind)[:40]!r}; the types message, reasoning, "
            "function_call and function_call_output are supported"
        )


def _thoughts_of(item: dict[str, Any]) -> str:
    """Return the thoughts of an item of an earlier response; "" if it has only a summary."""
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise ValueError("the content of a reasoning item must be a list of parts")
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("the parts of a reasoning item must have texts")
    return "\n".join(map(str, texts))


def _content(content: Any) -> Any:
    """Return a content with parts of text as a chat names them.

    Anything else is passed on as it is, because a chat's checks say what is wrong with it.
    """
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        parts.append({**part, "type": "text"} if is_text else part)
    return parts


def _tool(number: int, tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else tool
    if kind != "function":
        raise ValueError(
            f"tool {number} has the type {str(kind)[:40]!r}; only functions are supported"
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise ValueError(
            'tool_choice must be none, auto, required, {"type": "function", "name": ...} or '
            '{"type": "allowed_tools", ...}'
        )
    return {"type": "function", "function": {"name": choice["name"]}}


@dataclass(frozen=True)
class _TextKind:
    """A kind of item that has a text.

    Attributes:
        prefix: what its id begins with.
        item: its members.
        part: the type of its only part, after which its events are named.
        more: further members of the part.
        logprobs: further members of its events.
    """

    prefix: str
    item: dict[str, Any]
    part: str
    more: dict[str, Any] = field(default_factory=dict)
    logprobs: dict[str, Any] = field(default_factory=dict)


_MESSAGE = _TextKind(
    "msg",
    {"type": "message", "role": "assistant"},
    "output_text",
    {"annotations": [], "logprobs": []},
    {"logprobs": []},
)
_REASONING = _TextKind("rs", {"type": "reasoning", "summary": []}, "reasoning_text")


class ResponseAnswer(Answer):
    """An answer as a response: texts and calls are its items; a stream tells them as events.

    The events have sequence numbers, so they must be made in the order in which they are sent.
    """

    def __init__(
        self, body: ResponsesBody, prepared: Prepared, job: Job, texts: TokenTexts, model: str
    ) -> None:
        chat_body = ChatBody.model_construct(messages=[], stream=body.stream)
        super().__init__(chat_body, prepared, job, texts, model)
        self.id = f"resp_{uuid4().hex}"
        self._about = {
            "id": self.id,
            "object": "response",
            "created_at": int(time()),
            "model": model,
        } | _echoed_fields(body)
        self._items: list[dict[str, Any]] = []
        self._open_kind: _TextKind | None = None  # of the last item, if its text may go on
        self._sequence_number = 0  # of the next event

    async def whole(self, until: float) -> bytes:
        """Return the whole response. Raises as `Answer.whole`, with the names of fields here."""
        try:
            return await super().whole(until)
        except ApiError as error:
            raise _renamed(error) from None

    def _whole_json(self) -> bytes:
        self._new_events()
        self._ending_events()
        return as_json(self._ended_response())

    def _first_events(self) -> list[bytes]:
        about = self._response("in_progress")
        return [
            self._event("response.created", response=about),
            self._event("response.in_progress", response=about),
        ]

    async def _step_events(self, index: int, step: Step, at: float) -> list[bytes]:
        await self._take(index, step, at)
        return self._new_events()

    def _last_events(self, error: ApiError | None = None) -> list[bytes]:
        if error is not None:
            response = self._response("failed")
            response["error"] = {"code": "server_error", "message": error.message}
            return [self._event("response.failed", response=response)]
        events = self._ending_events()
        events.append(self._event(f"response.{self._status}", response=self._ended_response()))
        return events

    @property
    def _status(self) -> str:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._about | {
            "status": status,
            "output": self._items,
            "error": None,
            "usage": None,
            "incomplete_details": reason,
        }

    def _ended_response(self) -> dict[str, Any]:
        usage = _usage(self.counts.usage())
        return self._response(self._status) | {"usage": usage, **self.counts.statistics()}

    def _new_events(self) -> list[bytes]:
        """Return the events of what has come since the last call: thoughts, text and calls."""
        (choice,) = self.choices
        events: list[bytes] = []
        if choice.reasoning:
            events += self._text_events(_REASONING, choice.reasoning)
        if choice.text:
            events += self._text_events(_MESSAGE, choice.text)
        for call in choice.calls:
            events += self._close_text("completed")
            events += self._call_events(call)
        choice.clear()
        return events

    def _text_events(self, kind: _TextKind, text: str) -> list[bytes]:
        """Return the events of a text, which continues the open item or begins a new one."""
        events = []
        if self._open_kind is not kind:
            events += self._close_text("completed")
            self._open_kind = kind
            item_id = f"{kind.prefix}_{uuid4().hex}"
            events.append(self._open_item({"id": item_id, **kind.item, "content": []}))
            part = {"type": kind.part, "text": "", **kind.more}
            self._items[-1]["content"] = [part]
            events.append(self._event("response.content_part.added", **self._text_place, part=part))
        self._items[-1]["content"][0]["text"] += text
        name = f"response.{kind.part}.delta"
        events.append(self._event(name, **self._text_place, delta=text, **kind.logprobs))
        return events

    def _call_events(self, call: ToolCall) -> list[bytes]:
        """Return the events of a call, which is one item and comes whole."""
        tools = self.choices[0].tools
        assert tools is not None
        opening = self._open_item(
            {
                "type": "function_call",
                "id": f"fc_{uuid4().hex}",
                "call_id": call_id(tools.form),
                "name": call.name,
                "arguments": "",
            }
        )
        item = self._items[-1]
        item |= {"arguments": call.arguments, "status": "completed"}
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        kind = "response.function_call_arguments"
        return [
            opening,
            self._event(f"{kind}.delta", **place, delta=call.arguments),
            self._event(f"{kind}.done", **place, **vars(call)),
            self._close_item(),
        ]

    def _open_item(self, item: dict[str, Any]) -> bytes:
        """Add an item, and return the event that says so."""
        self._items.append(item | {"status": "in_progress"})
        return self._item_event("response.output_item.added")

    def _close_item(self) -> bytes:
        return self._item_event("response.output_item.done")

    def _item_event(self, kind: str) -> bytes:
        return self._event(kind, output_index=len(self._items) - 1, item=self._items[-1])

    def _close_text(self, status: str) -> list[bytes]:
        """Return the events that end the text of the last item, if it is open."""
        kind = self._open_kind
        if kind is None:
            return []
        self._open_kind = None
        item = self._items[-1]
        item["status"] = status
        (part,) = item["content"]
        place = self._text_place
        name = f"response.{kind.part}.done"
        return [
            self._event(name, **place, text=part["text"], **kind.logprobs),
            self._event("response.content_part.done", **place, part=part),
            self._close_item(),
        ]

    def _ending_events(self) -> list[bytes]:
        """Return the events that end the last item. A response without items gets an empty text."""
        events = [] if self._items else self._text_events(_MESSAGE, "")
        return [*events, *self._close_text(self._status)]

    @property
    def _text_place(self) -> dict[str, Any]:
        return {
            "item_id": self._items[-1]["id"],
            "output_index": len(self._items) - 1,
            "content_index": 0,
        }

    def _event(self, kind: str, **content: Any) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        data = as_json({"type": kind, "sequence_number": number, **content})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


def _echoed_fields(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields of a request that come back in its response.

    Nothing is stored, even if `store` was true.
    """
    form = body.text.format if body.text is not None else None
    same = ("instructions", "max_output_tokens", "user", "prompt_cache_key", "safety_identifier")
    return {name: vars(body)[name] for name in same} | {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": form or {"type": "text"}},
        "metadata": body.metadata or {},
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "reasoning": None if body.reasoning is None else body.reasoning.model_dump(),
    }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's usage in the shape of responses.

    `cached_tokens` is always 0, because the server does not count them by request.
    """
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0} | usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
