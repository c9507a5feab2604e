"""The app: its endpoints, and the way of a body from its request to its answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
from forerun.server.anthropic import add_messages
from forerun.server.embeddings import add_embeddings
from forerun.server.errors import ApiError, add_handlers, loading, shutting_down, timed_out
from forerun.server.llamacpp import add_llamacpp
from forerun.server.logprobs import TokenTexts
from forerun.server.metrics import Metrics
from forerun.server.middleware import AllowedHosts, ApiKey, BasePaths, BodyLimit, RequestIds
from forerun.server.ollama import add_ollama
from forerun.server.readers import Readers
from forerun.server.responses import ResponseAnswer, prepare_response
from forerun.server.worker import Worker

_LOG = logging.getLogger("forerun.server")
_T = TypeVar("_T")

STATIC = Path(__file__).parent / "static"
PAGE_SUFFIXES = {".html", ".css", ".js", ".mjs", ".svg"}
PAGE_HEADERS = {
    # Trusted Types let only DOMPurify make elements of a text, so that nothing else can by mistake.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Settings:
    """How to serve.

    Attributes:
        model: the name by which clients know the model.
        api_key: the key that clients must send, or None if everyone may ask.
        allow_origin: the sites whose pages may send requests (CORS).
        allowed_hosts: public names under which the server is asked; `*` is any. Without a key,
            others are refused (`forerun.server.middleware.AllowedHosts`).
        max_body: the largest number of bytes of a body.
        body_seconds: seconds within which the whole body must come.
        max_seconds: the longest time of a request, from its headers to its last token.
        sends_ids: whether responses have the header x-request-id. Replicas leave it out, because
            the proxies of Ray Serve add it.
        tool_parser: the form of tool calls, one of `forerun.text.tool_calls.FORMS`; None for the
            form that the chat template shows.
    """

    model: str
    api_key: str | None = None
    allow_origin: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body: int = 4 * 2**20
    body_seconds: float = 30
    max_seconds: float = 600
    sends_ids: bool = True
    tool_parser: str | None = None


class _Stream(StreamingResponse):
    """A stream that calls a function at its end, even if the stream never began.

    `forerun.server.protocol` may send `idle_event` between two events.
    """

    def __init__(
        self, content: AsyncIterator[bytes], at_end: Callable[[], None], idle_event: bytes
    ) -> None:
        super().__init__(
            content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._at_end = at_end
        self._idle_event = idle_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["idle_event"] = self._idle_event
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()


class Service:
    """The state of an app.

    Attributes:
        draining: whether new requests are refused because the server is about to end.
        open: the number of bodies that are being answered.
        created: when the server started, in seconds since 1970.
    """

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker = worker
        self.settings = settings
        self.readers = Readers()
        self.draining = False
        self.open = 0
        self.created = int(time())
        self.metrics = Metrics(worker)
        worker.on_step = self.metrics.count_step
        self._texts: TokenTexts | None = None

    @property
    def failed(self) -> BaseException | None:
        """What ended the worker for good, or None."""
        return self.worker.failed

    def when_failed(self, call: Callable[[], None]) -> None:
        """Have a function called when the worker ends for good."""
        self.worker.on_failure = call

    async def until_ready(self) -> None:
        """Wait until the model is loaded; for ever if it cannot be."""
        await self.worker.ready.wait()

    def begin_drain(self) -> None:
        """Refuse the requests that wait for a model: none do, as they are refused at once."""

    def give_up(self, error: ApiError) -> None:
        """End all requests with an error."""
        self.worker.give_up(error)

    def decoder(self) -> Decoder:
        """Return the worker's decoder. Raises ApiError while no requests are accepted."""
        if self.draining:
            raise shutting_down()
        if self.worker.decoder is None or not self.worker.ready.is_set():
            raise loading()
        return self.worker.decoder

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model."""
        if name is not None and name != self.settings.model:
            raise ApiError(
                404, f"the model {name[:100]!r} does not exist here", "model", "model_not_found"
            )

    async def read(self, request: Request, function: Callable[..., _T], body: schemas.Body) -> _T:
        """Return `function(body, decoder)`, called in a reader's thread.

        Raises ApiError, also if the body names another model or has unsupported fields.
        """
        decoder = self.decoder()
        self.check_model(body.model)
        unknown = body.unknown()
        if unknown:
            names = ", ".join(ascii(name[:40]) for name in unknown[:10])
            _LOG.info("request %s: unknown fields: %s", request.state.request_id, names)
        if decoder.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer", "model")
        seconds = max(0.0, self._until(request) - perf_counter())
        return await while_connected(request, self.readers.call(function, body, decoder), seconds)

    async def compute(self, request: Request, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of some work for a request, which counts as being answered meanwhile.

        Raises ApiError if the client disconnects, or if the time of the request is over.
        """
        self.open += 1
        try:
            return await while_connected(request, work, self._until(request) - perf_counter())
        finally:
            self.open -= 1

    def _until(self, request: Request) -> float:
        """Return when the time of a request is over."""
        return float(request.state.arrived) + self.settings.max_seconds

    async def answer(
        self,
        body: Any,
        request: Request,
        prepare: Callable[..., requests.Prepared],
        kind: type[Answer] = Answer,
    ) -> Response:
        """Answer a body, which `prepare` turns into requests. `kind` writes the answer."""
        prepared = await self.read(request, prepare, body)
        # This raises ApiError if the server has begun to shut down while the body was read.
        tokenizer = self.decoder().tokenizer
        assert tokenizer is not None
        if self._texts is None or self._texts.tokenizer is not tokenizer:  # loaded again
            self._texts = TokenTexts(tokenizer)
        job = self.worker.submit(prepared.requests, request.state.arrived, prepared.limit_field)
        answer = kind(body, prepared, job, self._texts, self.settings.model)
        self.open += 1
        self.metrics.prompt_tokens.inc(answer.counts.prompt_tokens)
        at_end = partial(self._end, answer, request)
        until = self._until(request)
        if body.stream:
            return _Stream(answer.chunks(until), at_end, answer.idle_event())
        try:
            content = await while_connected(request, answer.whole(until))
            return Response(content, media_type="application/json")
        finally:
            at_end()

    def _end(self, answer: Answer, request: Request) -> None:
        """Count and log an answer that has ended, and abort what its job still runs."""
        self.open -= 1
        answer.job.close()
        reasons = [choice.finish_reason or answer.ended_by for choice in answer.choices]
        counts = answer.counts
        self.metrics.count_answer(counts, reasons)
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
            "total_ms": round(1000 * (perf_counter() - counts.started_at), 1),
            "reason": ",".join(sorted(set(reasons))),
        }
        _LOG.info(" ".join(f"{key}={value!r}" for key, value in line.items()))


async def while_connected(
    request: Request, work: Coroutine[Any, Any, _T], seconds: float | None = None
) -> _T:
    """Return the result of some work, which is cancelled if the client disconnects.

    Raises ApiError: 499, which nobody receives, if the client disconnects; 504 after `seconds`.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result = asyncio.ensure_future(work)
    disconnection = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait(
            [result, disconnection], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if result.done():
            return result.result()
        if disconnection.done():
            raise ApiError(499, "the client has disconnected")
        raise timed_out()
    finally:
        result.cancel()
        disconnection.cancel()
        await asyncio.gather(result, disconnection, return_exceptions=True)


def create_app(worker: Worker, settings: Settings) -> FastAPI:
    """Return the app. Its lifespan starts and stops the worker."""
    service = Service(worker, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if not worker.ready.is_set():  # a replica starts its worker before it makes its app
            worker.start()
        yield
        await worker.stop()

    app = app_of(service, lifespan)
    add_middleware(app, settings, service.metrics.count_status)
    return app


def app_of(
    service: Service,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """Return an app with all endpoints of a service, but without middleware."""
    errors: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": schemas.ErrorBody},
        "5XX": {"model": schemas.ErrorBody},
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
    _add_answers(app, service)
    add_messages(app, service)
    add_embeddings(app, service)
    _add_facts(app, service)
    add_ollama(app, service)
    add_llamacpp(app, service)
    _add_page(app)
    return app


def _page() -> dict[str, Path]:
    """Return the files of the page by their paths in URLs."""
    files = [path for path in sorted(STATIC.rglob("*.*")) if path.suffix in PAGE_SUFFIXES]
    page = {f"/{path.relative_to(STATIC).as_posix()}": path for path in files}
    page["/"] = STATIC / "index.html"
    return page


def _add_page(app: FastAPI) -> None:
    page = _page()

    async def page_file(request: Request) -> Response:
        return FileResponse(page[request.url.path], headers=PAGE_HEADERS)

    for path in page:
        app.add_route(path, page_file, include_in_schema=False)


def add_middleware(
    app: FastAPI, settings: Settings, on_status: Callable[[Scope, int], None]
) -> None:
    """Add the middleware; a request passes through the last one first.

    `on_status` is called with the scope of each request and the status of its response.
    """
    app.add_middleware(BasePaths)
    app.add_middleware(BodyLimit, limit=settings.max_body, seconds=settings.body_seconds)
    if settings.api_key is not None:
        open_paths = frozenset(["/health", *_page()])
        app.add_middleware(ApiKey, key=settings.api_key, open_paths=open_paths)
    elif "*" not in settings.allowed_hosts:
        app.add_middleware(AllowedHosts, names=settings.allowed_hosts)
    app.add_middleware(RequestIds, on_status=on_status, sends=settings.sends_ids)
    if settings.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "Retry-After"],
        )


def _add_answers(app: FastAPI, service: Service) -> None:
    """Add the endpoints that decode."""
    parser = service.settings.tool_parser
    event_stream: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}

    @app.post("/v1/chat/completions", responses=event_stream)
    async def chat_completions(body: schemas.ChatBody, request: Request) -> Response:
        return await service.answer(body, request, partial(requests.prepare_chat, parser=parser))

    @app.post("/v1/completions", responses=event_stream)
    async def completions(body: schemas.CompletionBody, request: Request) -> Response:
        return await service.answer(body, request, requests.prepare_completion)

    @app.post("/v1/responses", responses=event_stream)
    async def responses(body: schemas.ResponsesBody, request: Request) -> Response:
        return await service.answer(
            body, request, partial(prepare_response, parser=parser), ResponseAnswer
        )


def _add_facts(app: FastAPI, service: Service) -> None:
    """Add the endpoints that decode nothing."""

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "forerun",
            "max_model_len": service.decoder().target.context,
        }

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
