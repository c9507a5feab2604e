"""/v1/responses without state: a body is that of a chat in other words, and its answer is told as items and events."""

from __future__ import annotations

import json
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

# Fields of a chat's body that have the same name here, and those that have another one.
_SAME = "temperature top_p top_k min_p seed ignore_eos cache_salt forerun_method chat_template_kwargs stream"
_SAME += " parallel_tool_calls"
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
_TEXTS = ("input_text", "output_text", "text")


def prepare_response(body: ResponsesBody, decoder: Decoder, parser: str | None = None) -> Prepared:
    """Return the request of a body. Raises ApiError, which names the body's own fields."""
    try:
        return prepare_chat(_chat_body(body), decoder, parser)
    except ApiError as error:
        raise _renamed(error) from None


def _renamed(error: ApiError) -> ApiError:
    return ApiError(
        error.status, error.message, _NAMES.get(error.param or "", error.param), error.code
    )


def _chat_body(body: ResponsesBody) -> ChatBody:
    """Return the same as a chat's body, whose fields `prepare_chat` checks. Raises ApiError."""
    fields: dict[str, Any] = {name: vars(body)[name] for name in _SAME.split()}
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
            form = {
                "type": "json_schema",
                "json_schema": {key: form[key] for key in form if key != "type"},
            }
    with blame("tools"):
        _check_json(body.tools)
        fields["tools"] = [
            _tool(number, tool) for number, tool in enumerate(_listed(body.tools or [], "tools"), 1)
        ]
    with blame("tool_choice"):
        _check_json(body.tool_choice)
        fields["tool_choice"] = _choice(body.tool_choice)
    return ChatBody.model_construct(
        **fields, max_completion_tokens=body.max_output_tokens, response_format=form
    )


def _check_json(value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise ValueError(
            "it has a number or a character that JSON lacks, or is nested too deeply"
        ) from None


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list")
    return value


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return the messages of an input; calls become part of the assistant's message before them. Raises ValueError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    for number, item in enumerate(_listed(given, "input, unless it is text,"), 1):
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        if kind == "message" and item.get("role") != "tool":
            found.append({"role": item.get("role"), "content": _content(item.get("content"))})
        elif kind == "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            calls = found[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "type": "function", "function": call})
        elif kind == "function_call_output":
            content = _content(item.get("output"))
            found.append(
                {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content}
            )
        else:
            raise ValueError(
                f"input item {number} has the type {str(kind)[:40]!r}; there are message, function_call and "
                "function_call_output"
            )
    return found


def _content(content: Any) -> Any:
    # What has another form is passed on as it is: a chat's checks say what is wrong with it.
    if not isinstance(content, list):
        return content
    texts = [isinstance(part, dict) and part.get("type") in _TEXTS for part in content]
    return [
        {**part, "type": "text"} if is_text else part
        for part, is_text in zip(content, texts, strict=True)
    ]


def _tool(number: int, tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else tool
    if kind != "function":
        raise ValueError(f"tool {number} has the type {str(kind)[:40]!r}; there are functions only")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise ValueError(
            'tool_choice must be none, auto, required or {"type": "function", "name": ...}'
        )
    return {"type": "function", "function": {"name": choice["name"]}}


class ResponseAnswer(Answer):
    """An answer as a response: one text or several calls, each an item; streamed as events."""

    def __init__(
        self, body: ResponsesBody, prepared: Prepared, job: Job, texts: TokenTexts, model: str
    ) -> None:
        super().__init__(
            ChatBody.model_construct(messages=[], stream=body.stream), prepared, job, texts, model
        )
        self.id = f"resp_{uuid4().hex}"
        self._about = {
            "id": self.id,
            "object": "response",
            "created_at": int(time()),
            "model": model,
        } | _echo(body)
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item is text that goes on
        self._number = 0

    async def whole(self, until: float) -> bytes:
        try:
            return await super().whole(until)
        except ApiError as error:
            raise _renamed(error) from None

    def _whole(self) -> bytes:
        self._told()
        self._last()
        return as_json(self._response(self._status, True))

    def _told(self) -> list[bytes]:
        (choice,) = self.choices
        pieces: list[str | ToolCall] = [*([choice.text] if choice.text else []), *choice.calls]
        choice.text, choice.calls = "", []
        return [event for piece in pieces for event in self._add(piece)]

    def _begin(self) -> list[bytes]:
        about = self._response("in_progress")
        return [
            self._event(f"response.{name}", response=about) for name in ("created", "in_progress")
        ]

    async def _chunks(self, index: int, step: Step, at: float) -> list[bytes]:
        await self._take(index, step, at)
        return self._told()

    def _end(self, error: ApiError | None = None) -> list[bytes]:
        if error is not None:
            told = self._response("failed") | {
                "error": {"code": "server_error", "message": error.message}
            }
            return [self._event("response.failed", response=told)]
        found = self._last()
        return [
            *found,
            self._event(f"response.{self._status}", response=self._response(self._status, True)),
        ]

    @property
    def _status(self) -> str:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    def _response(self, status: str, has_ended: bool = False) -> dict[str, Any]:
        found = self._about | {
            "status": status,
            "output": self._items,
            "error": None,
            "usage": None,
        }
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        found["incomplete_details"] = reason
        return (
            found | {"usage": _usage(self.counts.usage()), **self.counts.statistics()}
            if has_ended
            else found
        )

    def _add(self, piece: str | ToolCall) -> list[bytes]:
        """Return the events of a call, or of text: of the item that is open, or of a new one."""
        if isinstance(piece, ToolCall):
            return [*self._close("completed"), *self._call(piece)]
        found = list[bytes]()
        if not self._is_open:
            self._is_open = True
            item = {
                "type": "message",
                "id": f"msg_{uuid4().hex}",
                "role": "assistant",
                "content": [],
            }
            found = [self._new(item)]
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._items[-1]["content"] = [part]
            found.append(self._event("response.content_part.added", **self._text, part=part))
        self._items[-1]["content"][0]["text"] += piece
        return [
            *found,
            self._event("response.output_text.delta", **self._text, delta=piece, logprobs=[]),
        ]

    def _call(self, call: ToolCall) -> list[bytes]:
        stream, kind = self.choices[0].tools, "response.function_call_arguments"
        assert stream is not None
        item = {"type": "function_call", "id": f"fc_{uuid4().hex}", "call_id": call_id(stream.form)}
        begun = self._new(item | {"name": call.name, "arguments": ""})
        item, where = self._items[-1], {"item_id": item["id"], "output_index": len(self._items) - 1}
        item |= {"arguments": call.arguments, "status": "completed"}
        return [
            begun,
            self._event(f"{kind}.delta", **where, delta=call.arguments),
            self._event(f"{kind}.done", **where, **vars(call)),
            self._done(),
        ]

    def _new(self, item: dict[str, Any]) -> bytes:
        self._items.append(item | {"status": "in_progress"})
        return self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1]
        )

    def _done(self) -> bytes:
        return self._event(
            "response.output_item.done", output_index=len(self._items) - 1, item=self._items[-1]
        )

    def _close(self, status: str) -> list[bytes]:
        if not self._is_open:
            return []
        self._is_open, item = False, self._items[-1]
        item["status"] = status
        (part,) = item["content"]
        found = [
            self._event("response.output_text.done", **self._text, text=part["text"], logprobs=[])
        ]
        return [
            *found,
            self._event("response.content_part.done", **self._text, part=part),
            self._done(),
        ]

    def _last(self) -> list[bytes]:
        """Return the events that end the last item. An answer has one, be it empty."""
        found = [] if self._items else self._add("")
        return [*found, *self._close(self._status)]

    @property
    def _text(self) -> dict[str, Any]:
        return {
            "item_id": self._items[-1]["id"],
            "output_index": len(self._items) - 1,
            "content_index": 0,
        }

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return b"event: %s\ndata: %s\n\n" % (
            kind.encode(),
            as_json({"type": kind, "sequence_number": number, **content}),
        )


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields of a request that its response has. Nothing is stored, whatever was asked for."""
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
        "reasoning": None,
    }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's usage in the shape of responses. Which tokens of the prompt were cached is not counted."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0} | usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
