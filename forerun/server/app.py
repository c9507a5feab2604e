"""The endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from starlette.middleware.cors import CORSMiddleware

from forerun import __version__
from forerun.server import asking, schemas
from forerun.server.errors import add_handlers
from forerun.server.guards import Bodies, Key, RequestIds
from forerun.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from forerun.server.service import Service, Settings
from forerun.server.worker import Worker

STATIC = Path(__file__).parent / "static"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_app(worker: Worker, settings: Settings) -> FastAPI:
    """The app; its lifespan starts and stops the worker."""
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
    streams: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}

    # Answers are not put through their models, which only describe them.
    @app.post("/v1/chat/completions", response_model=schemas.ChatCompletion, responses=streams)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await service.answer(body, request)

    @app.post("/v1/completions", response_model=schemas.TextCompletion, responses=streams)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await service.answer(body, request)

    def model() -> schemas.Model:
        context = service.decoder().target.context
        return schemas.Model(id=settings.model, created=service.began, max_model_len=context)

    @app.get("/v1/models")
    async def models() -> schemas.Models:
        return schemas.Models(data=[model()])

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> schemas.Model:
        service.check_model(name)
        return model()

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> schemas.Tokens:
        decoder = service.check(body, request)
        tokens = await service.read(request, asking.tokenize, body, decoder)
        return schemas.Tokens(count=len(tokens), max_model_len=decoder.target.context, tokens=tokens)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> schemas.Text:
        decoder = service.check(body, request)
        return schemas.Text(prompt=await service.read(request, asking.detokenize, body, decoder))

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
