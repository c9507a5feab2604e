"""Anthropic's Messages API: its endpoints, and a chat's answer written as blocks and events."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import Response

from forerun.engine.engine import Step
from forerun.server.answers import Answer, call_id
from forerun.server.anthropic_prompt import count_prompt, own_names, prepare_message, renamed
from forerun.server.anthropic_schemas import MessageErrorBody, MessagesBody, PromptBody
from forerun.server.errors import MESSAGES_PATH, ApiError
from forerun.server.job import Job
from forerun.server.logprobs import TokenTexts, as_json
from forerun.server.requests import Prepared
from forerun.server.schemas import ChatBody
from forerun.text.tool_calls import ToolCall

if TYPE_CHECKING:
    from forerun.server.app import Service

# Clients send thoughts back only with a signature. Nobody looks at this one.
SIGNATURE = "unsigned"

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def add_messages(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""
    parser = service.settings.tool_parser
    errors: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": MessageErrorBody},
        "5XX": {"model": MessageErrorBody},
    }
    described = {200: {"content": {"text/event-stream": {}}}, **errors}

    @app.post(MESSAGES_PATH, responses=described)
    async def messages(body: MessagesBody, request: Request) -> Response:
        prepare = partial(prepare_message, parser=parser)
        return await service.answer(body, request, prepare, MessageAnswer)

    @app.post(f"{MESSAGES_PATH}/count_tokens", responses=errors)
    async def count_tokens(body: PromptBody, request: Request) -> dict[str, int]:
        count = partial(count_prompt, parser=parser)
        return {"input_tokens": await service.read(request, count, body)}


class MessageAnswer(Answer):
    """An answer as a message: thoughts, texts and calls are its blocks, told as events."""

    def __init__(
        self, body: MessagesBody, prepared: Prepared, job: Job, texts: TokenTexts, model: str
    ) -> None:
        chat_body = ChatBody.model_construct(
            messages=[], stream=body.stream, stop=body.stop_sequences
        )
        super().__init__(chat_body, prepared, job, texts, model)
        self.id = f"msg_{uuid4().hex}"
        self._about = {"id": self.id, "type": "message", "role": "assistant", "model": model}
        self._shows_thoughts = body.thinking is None or body.thinking.display != "omitted"
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False  # whether the last block may go on

    async def whole(self, until: float) -> bytes:
        """Return the whole message. Raises as `Answer.whole`, with the names of fields here."""
        with own_names():
            return await super().whole(until)

    def _whole_json(self) -> bytes:
        self._new_events()
        self._ending_events()
        return as_json(self._message(self._stop()) | self.counts.statistics())

    def _first_events(self) -> list[bytes]:
        message = self._message({"stop_reason": None, "stop_sequence": None})
        return [_event("message_start", message=message), _event("ping")]

    async def _step_events(self, index: int, step: Step, at: float) -> list[bytes]:
        await self._take(index, step, at)
        return self._new_events()

    def _last_events(self, error: ApiError | None = None) -> list[bytes]:
        if error is not None:
            return [_event("error", error=renamed(error).body(MESSAGES_PATH)["error"])]
        ending = {"delta": self._stop(), "usage": self._usage(), **self.counts.statistics()}
        return [
            *self._ending_events(),
            _event("message_delta", **ending),
            _event("message_stop"),
        ]

    def _message(self, stop: dict[str, Any]) -> dict[str, Any]:
        return self._about | {"content": self._blocks} | stop | {"usage": self._usage()}

    def _stop(self) -> dict[str, Any]:
        (choice,) = self.choices
        reason = _STOP_REASONS[choice.finish_reason or "stop"]
        stop_string = choice.stream.stop_string if reason == "end_turn" else None
        if stop_string is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop_string}

    def _usage(self) -> dict[str, Any]:
        """Return Anthropic's `usage`. Reading from memory is not counted by request."""
        return {
            "input_tokens": self.counts.prompt_tokens,
            "output_tokens": self.counts.tokens,
            "output_tokens_details": {"thinking_tokens": self.counts.reasoning_tokens},
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }

    def _new_events(self) -> list[bytes]:
        """Return the events of what has come since the last call: thoughts, text and calls."""
        (choice,) = self.choices
        events: list[bytes] = []
        if choice.reasoning and self._shows_thoughts:
            events += self._text_events("thinking", choice.reasoning)
        if choice.text:
            events += self._text_events("text", choice.text)
        for call in choice.calls:
            events += self._call_events(call)
        choice.clear()
        return events

    def _text_events(self, kind: str, text: str) -> list[bytes]:
        """Return the events of a text, which continues the open block or begins a new one."""
        events: list[bytes] = []
        if not (self._is_open and self._blocks[-1]["type"] == kind):
            more = {"signature": ""} if kind == "thinking" else {}
            events = self._begin({"type": kind, kind: "", **more})
        self._blocks[-1][kind] += text
        return [*events, self._delta(f"{kind}_delta", kind, text)]

    def _call_events(self, call: ToolCall) -> list[bytes]:
        """Return the events of a call, which is one block and comes whole."""
        tools = self.choices[0].tools
        assert tools is not None
        block = {"type": "tool_use", "id": call_id(tools.form), "name": call.name, "input": {}}
        events = self._begin(block)
        # JSON has no NaN, which a model may write all the same.
        block["input"] = json.loads(call.arguments, parse_constant=str)
        events.append(self._delta("input_json_delta", "partial_json", call.arguments))
        return [*events, *self._end()]

    def _begin(self, block: dict[str, Any]) -> list[bytes]:
        """End the open block, and begin another one. Return the events."""
        events = self._end()
        self._blocks.append(block)
        self._is_open = True
        return [*events, self._block_event("start", content_block=block)]

    def _end(self) -> list[bytes]:
        """Return the events that end the last block, if it is open."""
        if not self._is_open:
            return []
        self._is_open = False
        events = []
        if self._blocks[-1]["type"] == "thinking":
            self._blocks[-1]["signature"] = SIGNATURE
            events.append(self._delta("signature_delta", "signature", SIGNATURE))
        return [*events, self._block_event("stop")]

    def _ending_events(self) -> list[bytes]:
        """Return the events that end the last block. Without any, a text is one."""
        events = [] if self._blocks else self._text_events("text", "")
        return [*events, *self._end()]

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        return self._block_event("delta", delta={"type": kind, key: text})

    def _block_event(self, kind: str, **content: Any) -> bytes:
        return _event(f"content_block_{kind}", index=len(self._blocks) - 1, **content)


def _event(kind: str, **content: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), as_json({"type": kind, **content}))
