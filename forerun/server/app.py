"""The endpoints, and what is done with a body between its request and its answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from forerun import __version__
from forerun.api.decoder import Decoder
from forerun.server import requests, schemas
from forerun.server.answers import Answer
from forerun.server.errors import ApiError, add_handlers, shutting_down, timed_out
from forerun.server.logprobs import TokenTexts
from forerun.server.metrics import Metrics
from forerun.server.middleware import ApiKey, BodyLimit, RequestIds
from forerun.server.worker import Worker
from forerun.text.chat import turn_ends

_LOG = logging.getLogger("forerun.server")
_T = TypeVar("_T")

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
        self.metrics = Metrics(worker.load)
        worker.on_step = self.metrics.step
        self._ends: frozenset[int] | None = None
        self._texts: TokenTexts | None = None

    def decoder(self) -> Decoder:
        """Return the decoder. Raises ApiError while no request can be taken."""
        if self.draining:
            raise shutting_down()
        if self.worker.decoder is None or not self.worker.ready.is_set():
            raise ApiError(503, "the model is being loaded", code="loading")
        return self.worker.decoder

    def check(self, body: schemas.Body, request: Request) -> Decoder:
        """Return the decoder for a body. Raises ApiError for another model's and for unsupported fields."""
        decoder = self.decoder()
        self.check_model(body.model)
        unknown = body.unknown()
        if unknown:
            names = ", ".join(ascii(name[:40]) for name in unknown[:10])
            _LOG.info("request %s: unknown fields: %s", request.state.request_id, names)
        if decoder.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer", "model")
        return decoder

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model:
            raise ApiError(404, f"there is no model {name[:100]!r} here", "model", "model_not_found")

    async def call(self, request: Request, function: Callable[..., _T], *args: Any) -> _T:
        """Call what takes long, in a thread for that, for as long as somebody waits for it. Raises ApiError."""

        async def in_time() -> _T:
            try:
                async with asyncio.timeout(self._until(request) - perf_counter()):
                    return await self.worker.call(function, *args)
            except TimeoutError:
                raise timed_out() from None

        return await _unless_gone(request, in_time())

    def _until(self, request: Request) -> float:
        return float(request.state.arrived) + self.settings.max_seconds

    async def answer(self, body: schemas.ChatBody | schemas.CompletionBody, request: Request) -> Response:
        decoder = self.check(body, request)
        if isinstance(body, schemas.ChatBody):
            if self._ends is None:
                self._ends = await self.call(request, turn_ends, decoder.tokenizer)
            prepared = await self.call(request, requests.prepare_chat, body, decoder, self._ends)
        else:
            prepared = await self.call(request, requests.prepare_completion, body, decoder)
        self.decoder()  # it may have begun to shut down meanwhile
        if self._texts is None:
            assert decoder.tokenizer is not None
            self._texts = TokenTexts(decoder.tokenizer)
        job = self.worker.submit(prepared.requests, request.state.arrived)
        answer = Answer(prepared, job, self._texts, self.settings.model)
        self.open += 1
        self.metrics.prompt_tokens.inc(answer.counts.prompt_tokens)
        at_end, until = partial(self._end, answer, request), self._until(request)
        if body.stream:
            return _Stream(answer.chunks(until), at_end)
        try:
            return Response(await _unless_gone(request, answer.whole(until)), media_type="application/json")
        finally:
            at_end()

    def _end(self, answer: Answer, request: Request) -> None:
        """Count and log an answer that was given, or that nobody waits for any more."""
        self.open -= 1
        self.worker.cancel(answer.job)
        reasons = [choice.finish_reason or answer.ended_by for choice in answer.choices]
        counts = answer.counts
        self.metrics.answer(counts, reasons)
        line: dict[str, Any] = {
            "id": answer.id,
            "request": request.state.request_id,
            "n": answer.body.n or 1,
            "choices": len(answer.choices),
            "prompt": counts.prompt_tokens,
            "tokens": counts.counts.tokens,
            "tau": round(counts.counts.tau, 2),
            "queue_ms": round(1000 * counts.waited, 1),
            "first_ms": round(1000 * counts.to_first, 1),
            "total_ms": round(1000 * (perf_counter() - counts.begun), 1),
            "reason": ",".join(sorted(set(reasons))),
        }
        if self.settings.log_prompts:
            decoder: Any = self.worker.decoder
            line["prompts"] = [requests.text_of(decoder, each) for each in answer.prepared.prompts]
        _LOG.info(" ".join(f"{key}={value!r}" for key, value in line.items()), extra={"line": line})


async def _unless_gone(request: Request, wanted: Coroutine[Any, Any, _T]) -> _T:
    """Return what is wanted, given up when its reader has gone: then nobody sees the ApiError that is raised."""

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


def create_app(worker: Worker, settings: Settings) -> FastAPI:
    """Return the app; its lifespan starts and stops the worker."""
    service = Service(worker, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await worker.stop()

    errors: dict[int | str, dict[str, Any]] = {each: {"model": schemas.ErrorBody} for each in ("4XX", "5XX")}
    app = FastAPI(
        title="forerun", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, responses=errors
    )
    app.state.service = service
    add_handlers(app)
    _add_api(app, service)
    paths = _add_page(app)
    app.add_middleware(BodyLimit, limit=settings.max_body, seconds=settings.body_seconds)
    if settings.api_key is not None:
        app.add_middleware(ApiKey, key=settings.api_key, open_paths=frozenset(["/health", *paths]))
    app.add_middleware(RequestIds, on_status=service.metrics.status)
    if settings.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "Retry-After"],
        )
    return app


def _add_api(app: FastAPI, service: Service) -> None:
    streams: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}

    # Answers are not put through their models: large ones are made piece by piece.
    @app.post("/v1/chat/completions", response_model=schemas.ChatCompletion, responses=streams)
    async def chat_completions(body: schemas.ChatBody, request: Request) -> Response:
        return await service.answer(body, request)

    @app.post("/v1/completions", response_model=schemas.TextCompletion, responses=streams)
    async def completions(body: schemas.CompletionBody, request: Request) -> Response:
        return await service.answer(body, request)

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> schemas.Model:
        service.check_model(name)
        context = service.decoder().target.context
        return schemas.Model(id=name, created=service.began, max_model_len=context)

    @app.get("/v1/models")
    async def models() -> schemas.Models:
        return schemas.Models(data=[await one_model(service.settings.model)])

    @app.post("/tokenize")
    async def tokenize(body: schemas.TokenizeBody, request: Request) -> schemas.Tokens:
        decoder = service.check(body, request)
        tokens = await service.call(request, requests.tokenize, body, decoder)
        return schemas.Tokens(count=len(tokens), max_model_len=decoder.target.context, tokens=tokens)

    @app.post("/detokenize")
    async def detokenize(body: schemas.DetokenizeBody, request: Request) -> schemas.Text:
        return schemas.Text(prompt=await service.call(request, requests.detokenize, body, service.check(body, request)))

    @app.get("/health")
    async def health() -> schemas.Health:
        service.decoder()
        return schemas.Health()

    @app.get("/version")
    async def version() -> schemas.Version:
        return schemas.Version(version=__version__)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_page(app: FastAPI) -> list[str]:
    """Add the files of the page, where they are there; return their paths."""
    files = {f"/{path.name}": path for path in sorted(STATIC.glob("*.*"))}
    if "/index.html" in files:
        files["/"] = files["/index.html"]

    async def page(request: Request) -> Response:
        return FileResponse(files[request.url.path], headers=PAGE_HEADERS)

    for path in files:
        app.add_route(path, page, include_in_schema=False)
    return list(files)
