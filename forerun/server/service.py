"""An app's state: what is done with a body, and what is counted and logged of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from time import perf_counter, time
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from forerun.chat import turn_ends
from forerun.decoder import Decoder
from forerun.server import asking
from forerun.server.answers import Answer
from forerun.server.errors import ApiError, too_late
from forerun.server.logprobs import Spelling
from forerun.server.metrics import Metrics
from forerun.server.protocol import Body, ChatBody, CompletionBody, Sampling
from forerun.server.worker import Worker

_LOG = logging.getLogger("forerun.server")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Settings:
    """How to serve.

    Attributes:
        model: its name for clients.
        max_body: bytes of a body; body_seconds: until it has to be there.
        max_seconds: of a request, from its headers to its last token.
        log_prompts: whether the log may hold prompts.
    """

    model: str
    api_key: str | None = None
    allow_origin: tuple[str, ...] = ()
    max_body: int = 4 * 2**20
    body_seconds: float = 30
    max_seconds: float = 600
    log_prompts: bool = False


class _Stream(StreamingResponse):
    """A stream whose end is noticed, even if it never began."""

    def __init__(self, content: AsyncIterator[bytes], at_end: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()


class Service:
    """An app's state.

    Attributes:
        draining: no request is taken any more.
        open: bodies that are being answered.
    """

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker, self.settings = worker, settings
        self.draining = False
        self.open = 0
        self.began = int(time())
        self.metrics = Metrics(lambda: worker.engine if worker.decoder is not None and worker.ready.is_set() else None)
        worker.on_step = self.metrics.step
        self._ends: frozenset[int] | None = None
        self._spelling: Spelling | None = None

    def decoder(self) -> Decoder:
        """Raises ApiError while no request can be taken."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if self.worker.decoder is None or not self.worker.ready.is_set():
            raise ApiError(503, "the model is being loaded", code="loading")
        return self.worker.decoder

    def check(self, body: Body, request: Request) -> Decoder:
        """The decoder for a body. Raises ApiError for another model's and for fields that are not supported."""
        decoder = self.decoder()
        self.check_model(body.model)
        unknown = body.unknown()
        if unknown:
            names = ", ".join(ascii(name[:40]) for name in unknown[:10])
            _LOG.info("request %s: fields that are not known: %s", request.state.request_id, names)
        if decoder.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer", "model")
        return decoder

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model:
            raise ApiError(404, f"there is no model {name[:100]!r} here", "model", "model_not_found")

    async def read(self, request: Request, function: Callable[..., _T], *args: Any) -> _T:
        """Calls what takes long, in a thread for that, for as long as somebody waits for it. Raises ApiError."""
        return await _unless_gone(request, self._in_time(request, self.worker.ask(function, *args)))

    async def _in_time(self, request: Request, asked: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(self._until(request) - perf_counter()):
                return await asked
        except TimeoutError:
            raise too_late() from None

    def _until(self, request: Request) -> float:
        return float(request.state.arrived) + self.settings.max_seconds

    async def answer(self, body: Sampling, request: Request) -> Response:
        decoder = self.check(body, request)
        if isinstance(body, ChatBody):
            if self._ends is None:
                self._ends = await self.read(request, turn_ends, decoder.tokenizer)
            asked = await self.read(request, asking.ask_chat, body, decoder, self._ends)
        else:
            assert isinstance(body, CompletionBody)
            asked = await self.read(request, asking.ask_completion, body, decoder)
        self.decoder()  # it may have begun to shut down meanwhile
        if self._spelling is None:
            assert decoder.tokenizer is not None
            self._spelling = Spelling(decoder.tokenizer)
        job = self.worker.submit(asked.requests, request.state.arrived)
        answer = Answer(asked, job, self._spelling, self.settings.model)
        self.open += 1
        self.metrics.prompt_tokens.inc(answer.tally.prompt_tokens)
        at_end, until = partial(self._ended, answer, request), self._until(request)
        if body.stream:
            return _Stream(answer.chunks(until), at_end)
        try:
            return Response(await _unless_gone(request, answer.whole(until)), media_type="application/json")
        finally:
            at_end()

    def _ended(self, answer: Answer, request: Request) -> None:
        """An answer was given, or nobody waits for it any more."""
        self.open -= 1
        self.worker.cancel(answer.job)
        reasons = [choice.finish_reason or answer.broken_by for choice in answer.choices]
        tally = answer.tally
        self.metrics.answer(tally, reasons)
        line: dict[str, Any] = {
            "id": answer.id,
            "request": request.state.request_id,
            "n": answer.asked.body.n or 1,
            "choices": len(answer.choices),
            "prompt": tally.prompt_tokens,
            "tokens": tally.tokens,
            "tau": round(tally.tau, 2),
            "queue_ms": round(1000 * tally.waited, 1),
            "first_ms": round(1000 * tally.to_first, 1),
            "total_ms": round(1000 * (perf_counter() - tally.begun), 1),
            "reason": ",".join(sorted(set(reasons))),
        }
        if self.settings.log_prompts:
            line["prompts"] = [asking.text_of(self.worker.decoder, each) for each in answer.asked.prompts]  # type: ignore[arg-type]
        _LOG.info(" ".join(f"{key}={value!r}" for key, value in line.items()), extra={"line": line})


async def _unless_gone(request: Request, wanted: Coroutine[Any, Any, _T]) -> _T:
    """What is wanted, given up when its reader has gone: then nobody sees the ApiError that is raised."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    found, left = asyncio.ensure_future(wanted), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([found, left], return_when=asyncio.FIRST_COMPLETED)
        if not found.done():
            raise ApiError(499, "the reader has gone")
        return found.result()
    finally:
        for task in (found, left):
            task.cancel()
        await asyncio.gather(found, left, return_exceptions=True)
