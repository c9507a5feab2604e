"""The app of several models: it hands each request to the service of its model.

What it answers itself is /v1/models, /health and /metrics. All else goes to the app that the model
would have alone, once the model is loaded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import Any

import prometheus_client as prometheus
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from forerun import __version__
from forerun.server.answers import KEEP_ALIVE
from forerun.server.app import Settings, add_middleware, while_connected
from forerun.server.errors import OLLAMA_PATH, ApiError, add_handlers
from forerun.server.metrics import with_models
from forerun.server.models import Model, Models, State

# Paths whose streams consist of server-sent events, so that comments may stand before an answer.
EVENT_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def create_models_app(models: Models, settings: Settings) -> FastAPI:
    """Return the app. Its lifespan starts and stops the models.

    `settings` say how to serve; the name of the model in them is of no importance.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        models.start()
        yield
        await models.stop()

    app = FastAPI(
        title="forerun",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # each model's own app has it
    )
    app.state.models = models
    registry = prometheus.CollectorRegistry()
    refused = prometheus.Counter(
        "forerun:request_errors", "Requests answered with an error.", ["status"], registry=registry
    )

    def count_status(status: int) -> None:
        if status >= 400:
            refused.labels(status=str(status)).inc()

    registry.register(_Collector(models.all))
    add_handlers(app)
    _add_facts(app, models, registry)
    app.mount("/", Dispatcher(models, settings.max_seconds))
    add_middleware(app, settings, count_status)
    return app


def _add_facts(app: FastAPI, models: Models, registry: prometheus.CollectorRegistry) -> None:
    """Add the endpoints that are about all models."""

    @app.get("/v1/models")
    async def every_model() -> dict[str, Any]:
        models.check_ready()
        return {"object": "list", "data": [_facts(model) for model in models.all]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        models.check_ready()
        return _facts(models.find(name))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        models.check_ready()
        return {"status": "ok", "models": {model.name: model.state for model in models.all}}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        text = generate_latest(registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _facts(model: Model) -> dict[str, Any]:
    """Return OpenAI's object of a model, with its state and what is known of it."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.service.created,
        "owned_by": "forerun",
        "max_model_len": model.context,
        "state": model.state,
        "weight_bytes": model.bytes,
    }


class _Collector:
    """The metrics of all models, and of which of them are loaded."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics, as `prometheus_client` asks."""
        yield from with_models({model.name: model.service.metrics for model in self._models})
        loaded = GaugeMetricFamily(
            "forerun:model_loaded", "Whether the model is loaded.", labels=["model"]
        )
        waiting = GaugeMetricFamily(
            "forerun:num_requests_waiting_for_model",
            "Requests that wait for the model to be loaded.",
            labels=["model"],
        )
        loads = CounterMetricFamily(
            "forerun:model_loads", "How often the model was loaded.", labels=["model"]
        )
        for model in self._models:
            loaded.add_metric([model.name], float(model.state is State.LOADED))
            waiting.add_metric([model.name], len(model.tickets))
            loads.add_metric([model.name], model.loads)
        yield from (loaded, waiting, loads)


class Dispatcher:
    """An ASGI app that hands a request to the app of its model.

    The model of a POST is the one that its body names, and it is loaded before. Of other requests
    it is the one that the query names, `?model=NAME`, as it is.
    """

    def __init__(self, models: Models, max_seconds: float) -> None:
        self._models = models
        self._max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI asks."""
        request = Request(scope, receive)
        if request.method != "POST":
            model = self._models.find(request.query_params.get("model"))
            await model.app(scope, receive, send)
            return
        content = await request.body()
        body = _object(content)
        model = self._models.find(_named(body, request.url.path))
        answer = _Answer(send)
        is_event_stream = body.get("stream") is True and request.url.path in EVENT_PATHS
        seconds = request.state.arrived + self._max_seconds - perf_counter()
        try:
            async with answer.kept_alive(is_event_stream):
                await while_connected(request, self._models.acquire(model, seconds))
        except ApiError as error:
            if not answer.has_begun:
                raise
            await answer.end(json.dumps(error.body()).encode())
            return
        messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        try:
            await model.app(scope, receive_again, answer.send)
        finally:
            self._models.release(model)


def _named(body: dict[str, Any], path: str) -> Any:
    """Return the model that a body names; Ollama's names may end in `:latest`, or be `name`."""
    if not path.startswith(OLLAMA_PATH):
        return body.get("model")
    name = body.get("model") or body.get("name")
    return name.removesuffix(":latest") if isinstance(name, str) else name


def _object(content: bytes) -> dict[str, Any]:
    """Return the object that a body is, or {} for another one, which the model's app refuses."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


class _Answer:
    """The answer to a request, which may begin as a stream of events before its model is loaded.

    Attributes:
        has_begun: whether it has begun before.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False
        self._is_error = False
        self._error = b""

    @asynccontextmanager
    async def kept_alive(self, is_event_stream: bool) -> AsyncIterator[None]:
        """Send comments while something is waited for for long, if the answer is a stream."""
        is_over = asyncio.Event()
        task = asyncio.create_task(self._comment(is_over)) if is_event_stream else None
        try:
            yield
        finally:
            is_over.set()
            if task is not None:
                await task  # it is not cancelled, because it may have sent half of something

    async def _comment(self, is_over: asyncio.Event) -> None:
        """Send a comment now and then until something is over."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEP_ALIVE):
                    await is_over.wait()
                    return
            if not self.has_begun:
                self.has_begun = True
                headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send_part(b": keep-alive\n\n")

    async def _send_part(self, content: bytes, has_more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": has_more})

    async def end(self, error: bytes) -> None:
        """End a stream that has begun with an error, which is JSON."""
        await self._send_part(b"data: " + error + b"\n\ndata: [DONE]\n\n", has_more=False)

    async def send(self, message: Message) -> None:
        """Send a message of the model's app.

        Where the stream has begun, an error cannot be the response, and becomes its last event.
        """
        if not self.has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._is_error = not kind.startswith("text/event-stream")
        elif self._is_error:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                await self.end(self._error)
        else:
            await self._send(message)
