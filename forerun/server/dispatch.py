"""The app of several models: it hands each request to the service of its model.

What it answers itself are the lists of models, /health and /metrics. All else goes to the app that
the model would have alone, once the model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import prometheus_client as prometheus
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from starlette.types import Message, Receive, Scope, Send

from forerun import __version__
from forerun.server.app import Settings, add_middleware, while_connected
from forerun.server.early_streams import EarlyStream, stream_form
from forerun.server.errors import OLLAMA_PATH, ApiError, add_handlers
from forerun.server.metrics import with_models
from forerun.server.model import Model, State
from forerun.server.models import Models


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
        "forerun:request_errors",
        "Requests answered with an error, by model where they have one.",
        ["model", "status"],
        registry=registry,
    )

    def count_status(scope: Scope, status: int) -> None:
        if status >= 400:
            refused.labels(model=scope["state"].get("model", ""), status=str(status)).inc()

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

    # Ollama's lists.

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        models.check_ready()
        return {"models": [_listed(model) for model in models.all]}

    @app.get("/api/ps")
    async def loaded_models() -> dict[str, Any]:
        models.check_ready()
        loaded = [model for model in models.all if model.state is State.LOADED]
        return {"models": [_listed(model) for model in loaded]}

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
        "weight_bytes": model.weight_bytes,
        "prefix_bytes": model.prefix_bytes,
    }


def _listed(model: Model) -> dict[str, Any]:
    """Return a model as Ollama lists it. `POST /api/show` tells more, and loads it."""
    return {"name": model.name, "model": model.name, "size": model.weight_bytes, "details": {}}


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
            scope["state"]["model"] = model.name
            await model.app(scope, receive, send)
            return
        content = await request.body()
        body = _object(content)
        model = self._models.find(self._name(body, request.url.path))
        scope["state"]["model"] = model.name
        answer = EarlyStream(send, stream_form(request.url.path, body, model.name))
        seconds = request.state.arrived + self._max_seconds - perf_counter()
        try:
            async with answer.kept_alive():
                await while_connected(request, self._models.acquire(model, seconds))
        except ApiError as error:
            if not answer.has_begun:
                raise
            await answer.end(json.dumps(error.body(request.url.path)).encode())
            return
        messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        try:
            await model.app(scope, receive_again, answer.send)
        finally:
            self._models.release(model)

    def _name(self, body: dict[str, Any], path: str) -> Any:
        """Return the name of a model that a body has, as the server knows it.

        Ollama's clients write `name` as well, "" for none, and `:latest` after a name.
        """
        if not path.startswith(OLLAMA_PATH):
            return body.get("model")
        name = body.get("model") or body.get("name") or None
        known = [model.name for model in self._models.all]
        if isinstance(name, str) and name not in known:
            return name.removesuffix(":latest")
        return name


def _object(content: bytes) -> dict[str, Any]:
    """Return the object that a body is, or {} for another one, which the model's app refuses."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
