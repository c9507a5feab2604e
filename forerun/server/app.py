"""The endpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from forerun import __version__
from forerun.chat import turn_ends
from forerun.decoder import Decoder
from forerun.server import asking
from forerun.server.answers import Answer, as_json
from forerun.server.errors import ApiError, add_handlers
from forerun.server.guards import Bodies, Key, RequestIds
from forerun.server.metrics import Metrics
from forerun.server.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, Sampling, TokenizeBody
from forerun.server.worker import Worker

_LOG = logging.getLogger("forerun.server")
STATIC = Path(__file__).parent / "static"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Settings:
    """How to serve.

    Attributes:
        model: its name for clients.
        max_body: bytes of a body; body_seconds: until it has to be there.
        max_seconds: of a request, from its first byte in the queue to its last token.
        log_prompts: whether the log may hold prompts.
    """

    model: str
    api_key: str | None = None
    allow_origin: tuple[str, ...] = ()
    max_body: int = 4 * 2**20
    body_seconds: float = 30
    max_seconds: float = 600
    log_prompts: bool = False


class _Told(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: _Told


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

    async def answer(self, body: Sampling, request: Request) -> Response:
        decoder = self.check(body, request)
        asked = await self._ask(body, decoder)
        self.decoder()  # it may have begun to shut down meanwhile
        answer = Answer(asked, self.worker.submit(asked.requests), decoder, self.settings.model)
        self.open += 1
        self.metrics.prompt_tokens.inc(answer.tally.prompt_tokens)
        until, at_end = perf_counter() + self.settings.max_seconds, partial(self._ended, answer, request)
        if body.stream:
            return _Stream(answer.chunks(until), at_end)
        try:
            return await _unless_gone(request, answer.whole(until))
        finally:
            at_end()

    async def _ask(self, body: Sampling, decoder: Decoder) -> asking.Asked:
        if isinstance(body, ChatBody):
            if self._ends is None:
                self._ends = await self.worker.ask(turn_ends, decoder.tokenizer)
            return await self.worker.ask(asking.ask_chat, body, decoder, self._ends)
        assert isinstance(body, CompletionBody)
        return await self.worker.ask(asking.ask_completion, body, decoder)

    def _ended(self, answer: Answer, request: Request) -> None:
        """An answer was given, or nobody waits for it any more."""
        self.open -= 1
        aborted = bool(answer.job.open)
        self.worker.cancel(answer.job)
        reasons = [choice.finish_reason or ("abort" if aborted else "error") for choice in answer.choices]
        tally = answer.tally
        self.metrics.answer(tally, reasons)
        line: dict[str, Any] = {
            "id": answer.id,
            "request": request.state.request_id,
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


async def _unless_gone(request: Request, whole: Any) -> Response:
    """An answer, given up when its reader has gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(whole), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return Response(as_json(tasks[0].result()), media_type="application/json")
        return Response(status_code=499)  # nobody reads it
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def create_app(worker: Worker, settings: Settings) -> FastAPI:
    """The app; its lifespan starts and stops the worker."""
    service = Service(worker, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await worker.stop()

    errors: dict[int | str, dict[str, Any]] = {each: {"model": ErrorBody} for each in ("4XX", "5XX")}
    app = FastAPI(
        title="forerun", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, responses=errors
    )
    app.state.service = service
    add_handlers(app)
    streams: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}

    @app.post("/v1/chat/completions", responses=streams)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await service.answer(body, request)

    @app.post("/v1/completions", responses=streams)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await service.answer(body, request)

    def model() -> dict[str, Any]:
        context = service.decoder().target.context
        own = {"id": settings.model, "object": "model", "created": service.began, "owned_by": "forerun"}
        return own | {"max_model_len": context}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model()

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
        decoder = service.check(body, request)
        tokens = await worker.ask(asking.tokenize, body, decoder)
        return {"count": len(tokens), "max_model_len": decoder.target.context, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, Any]:
        decoder = service.check(body, request)
        return {"prompt": await worker.ask(asking.detokenize, body, decoder)}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        service.decoder()
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": __version__}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    paths = _add_page(app)
    app.add_middleware(Bodies, limit=settings.max_body, seconds=settings.body_seconds)
    if settings.api_key is not None:
        app.add_middleware(Key, key=settings.api_key, open_paths=frozenset(["/health", *paths]))

    def on_status(status: int) -> None:
        if status >= 400:
            service.metrics.refused.labels(status=str(status)).inc()

    app.add_middleware(RequestIds, on_status=on_status)
    if settings.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "Retry-After"],
        )
    return app


def _add_page(app: FastAPI) -> list[str]:
    """The files of the page, where they are there; their paths."""
    files = {f"/{path.name}": path for path in sorted(STATIC.glob("*.*"))} if STATIC.is_dir() else {}
    if "/index.html" in files:
        files["/"] = files["/index.html"]

    async def page(request: Request) -> Response:
        return FileResponse(files[request.url.path], headers=PAGE_HEADERS)

    for path in files:
        app.add_route(path, page, include_in_schema=False)
    return list(files)
