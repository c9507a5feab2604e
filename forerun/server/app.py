"""The app: its endpoints, and the way of a body from its request to its answer."""

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
from forerun.server.errors import ApiError, add_handlers, loading, shutting_down, timed_out
from forerun.server.logprobs import TokenTexts
from forerun.server.metrics import Metrics
from forerun.server.middleware import ApiKey, BodyLimit, RequestIds
from forerun.server.readers import Readers
from forerun.server.responses import ResponseAnswer, prepare_response
from forerun.server.worker import Worker

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
        max_body: bytes of a body; body_seconds: seconds until all of it must have come.
        max_seconds: of a request, from its headers to its last token.
        sends_ids: answers have the header x-request-id, which Serve's proxies add for replicas.
        tool_parser: the form of tool calls, one of `forerun.text.tool_calls.FORMS`; None: as the chat template shows.
    """

    model: str
    api_key: str | None = None
    allow_origin: tuple[str, ...] = ()
    max_body: int = 4 * 2**20
    body_seconds: float = 30
    max_seconds: float = 600
    sends_ids: bool = True
    tool_parser: str | None = None


class _Stream(StreamingResponse):
    """A stream whose end is noticed, even if it never began."""

    def __init__(self, content: AsyncIterator[bytes], at_end: Callable[[], None]) -> None:
        super().__init__(
            content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()


class Service:
    """The state of an app.

    Attributes:
        draining: no more requests are taken.
        open: bodies that are being answered.
    """

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker, self.settings, self.readers = worker, settings, Readers()
        self.draining = False
        self.open = 0
        self.began = int(time())
        self.metrics = Metrics(worker)
        worker.on_step = self.metrics.step
        self._texts: TokenTexts | None = None

    def decoder(self) -> Decoder:
        """Return the worker's decoder. Raises ApiError while no request can be taken."""
        if self.draining:
            raise shutting_down()
        if self.worker.decoder is None or not self.worker.ready.is_set():
            raise loading()
        return self.worker.decoder

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model:
            raise ApiError(
                404, f"there is no model {name[:100]!r} here", "model", "model_not_found"
            )

    async def read(self, request: Request, function: Callable[..., _T], body: schemas.Body) -> _T:
        """Call a function with a body and the decoder in a reader's thread. Raises ApiError, also for a body of another
        model and for unsupported fields."""
        decoder = self.decoder()
        self.check_model(body.model)
        if unknown := body.unknown():
            names = ", ".join(ascii(name[:40]) for name in unknown[:10])
            _LOG.info("request %s: unknown fields: %s", request.state.request_id, names)
        if decoder.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer", "model")
        seconds = max(0.0, self._until(request) - perf_counter())
        return await _unless_gone(request, self.readers.call(function, body, decoder), seconds)

    def _until(self, request: Request) -> float:
        return float(request.state.arrived) + self.settings.max_seconds

    async def answer(
        self,
        body: Any,
        request: Request,
        prepare: Callable[..., requests.Prepared],
        kind: type[Answer] = Answer,
    ) -> Response:
        prepared = await self.read(request, prepare, body)
        tokenizer = (
            self.decoder().tokenizer
        )  # raises if the server has begun to shut down meanwhile
        assert tokenizer is not None
        self._texts = self._texts or TokenTexts(tokenizer)
        job = self.worker.submit(prepared.requests, request.state.arrived)
        answer = kind(body, prepared, job, self._texts, self.settings.model)
        self.open += 1
        self.metrics.prompt_tokens.inc(answer.counts.prompt_tokens)
        at_end, until = partial(self._end, answer, request), self._until(request)
        if body.stream:
            return _Stream(answer.chunks(until), at_end)
        try:
            return Response(
                await _unless_gone(request, answer.whole(until)), media_type="application/json"
            )
        finally:
            at_end()

    def _end(self, answer: Answer, request: Request) -> None:
        self.open -= 1
        answer.job.close()
        reasons = [choice.finish_reason or answer.ended_by for choice in answer.choices]
        counts = answer.counts
        self.metrics.answer(counts, reasons)
        line: dict[str, Any] = {
            "id": answer.id,
            "request": request.state.request_id,
            "n": answer.body.n or 1,
            "choices": len(answer.choices),
            "prompt": counts.prompt_tokens,
            "tokens": counts.tokens,
            "tau": round(counts.tau, 2),
            "queue_ms": round(1000 * counts.waited, 1),
            "first_ms": round(1000 * counts.to_first, 1),
            "total_ms": round(1000 * (perf_counter() - counts.begun), 1),
            "reason": ",".join(sorted(set(reasons))),
        }
        _LOG.info(" ".join(f"{key}={value!r}" for key, value in line.items()))


async def _unless_gone(
    request: Request, wanted: Coroutine[Any, Any, _T], seconds: float | None = None
) -> _T:
    """Return a result.

    Raises ApiError: 499 if the reader has gone (nobody sees it), 504 after `seconds`.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    found, left = asyncio.ensure_future(wanted), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([found, left], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if found.done():
            return found.result()
        raise ApiError(499, "the reader has gone") if left.done() else timed_out()
    finally:
        for task in (found, left):
            task.cancel()
        await asyncio.gather(found, left, return_exceptions=True)


def create_app(worker: Worker, settings: Settings) -> FastAPI:
    """Return the app; its lifespan starts and stops the worker."""
    service = Service(worker, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if not worker.ready.is_set():  # a replica has loaded its model before
            worker.start()
        yield
        await worker.stop()

    errors: dict[int | str, dict[str, Any]] = {
        each: {"model": schemas.ErrorBody} for each in ("4XX", "5XX")
    }
    app = FastAPI(
        title="forerun",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=errors,
    )
    app.state.service = service
    add_handlers(app)
    _add_api(app, service)
    page = {f"/{path.name}": path for path in sorted(STATIC.glob("*.*"))}
    page["/"] = STATIC / "index.html"

    async def page_file(request: Request) -> Response:
        return FileResponse(page[request.url.path], headers=PAGE_HEADERS)

    for path in page:
        app.add_route(path, page_file, include_in_schema=False)
    app.add_middleware(BodyLimit, limit=settings.max_body, seconds=settings.body_seconds)
    if settings.api_key is not None:
        app.add_middleware(ApiKey, key=settings.api_key, open_paths=frozenset(["/health", *page]))
    app.add_middleware(RequestIds, on_status=service.metrics.status, sends=settings.sends_ids)
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
    parser = service.settings.tool_parser

    @app.post("/v1/chat/completions", responses=streams)
    async def chat_completions(body: schemas.ChatBody, request: Request) -> Response:
        return await service.answer(body, request, partial(requests.prepare_chat, parser=parser))

    @app.post("/v1/completions", responses=streams)
    async def completions(body: schemas.CompletionBody, request: Request) -> Response:
        return await service.answer(body, request, requests.prepare_completion)

    @app.post("/v1/responses", responses=streams)
    async def responses(body: schemas.ResponsesBody, request: Request) -> Response:
        return await service.answer(
            body, request, partial(prepare_response, parser=parser), ResponseAnswer
        )

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        about = {
            "created": service.began,
            "owned_by": "forerun",
            "max_model_len": service.decoder().target.context,
        }
        return {"id": name, "object": "model", **about}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [await model(service.settings.model)]}

    @app.post("/tokenize")
    async def tokenize(body: schemas.TokenizeBody, request: Request) -> dict[str, Any]:
        tokens = await service.read(request, requests.tokenize, body)
        return {
            "count": len(tokens),
            "max_model_len": service.decoder().target.context,
            "tokens": tokens,
        }

    @app.post("/detokenize")
    async def detokenize(body: schemas.DetokenizeBody, request: Request) -> dict[str, str]:
        return {"prompt": await service.read(request, requests.detokenize, body)}

    @app.get("/health")
    async def health() -> dict[str, str]:
        service.decoder()
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(
            service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )
