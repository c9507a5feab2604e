"""Replicas by Ray Serve: `forerun serve --ray`, and the application for a Serve config. See docs/replicas.md."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from fastapi import FastAPI
from pydantic import BaseModel, Field
from ray import serve
from ray.serve.handle import DeploymentHandle

from forerun import methods
from forerun.scale.engines import Loader, ServeReplicas, engines
from forerun.scale.fleet import Fleet
from forerun.server.app import create_app
from forerun.server.service import Settings
from forerun.zoo import EMBEDDED

APPLICATION = "forerun"


class Ingress:
    """The app, for Serve's own HTTP proxies."""

    def __init__(self, handle: DeploymentHandle, settings: Settings) -> None:
        self._handle, self._settings = handle, settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        application = serve.get_replica_context().app_name
        return create_app(Fleet(ServeReplicas(lambda: self._handle, application)), self._settings)


class Args(BaseModel, extra="forbid"):
    """Arguments of `app` in a Serve config.

    Attributes:
        target: hub id, folder on every node, or a name that forerun knows.
        load: other arguments of `forerun.load`: draft, method and its settings, weights, max_rows, ...
        replicas: how many; more than that, up to max_replicas, while requests wait.
        ingresses: copies of the app. Each keeps its own count of what is in flight.
        cpus, gpus, threads: of a replica.
        serve: fields of `forerun.server.service.Settings`: api_key, max_seconds, ...
    """

    target: str = EMBEDDED
    load: dict[str, Any] = {}
    replicas: int = Field(2, ge=1)
    max_replicas: int | None = Field(None, ge=1)
    ingresses: int = Field(1, ge=1)
    cpus: float = Field(1, ge=0)
    gpus: float = Field(0, ge=0)
    threads: int | None = Field(None, ge=1)
    model_name: str | None = None
    serve: dict[str, Any] = {}


def app(args: Args) -> serve.Application:
    """An application for a Serve config: `import_path: forerun.scale.replicas:app`. Raises ValueError."""
    most = args.max_replicas or args.replicas
    if most < args.replicas:
        raise ValueError(f"max_replicas must be at least replicas, {args.replicas}, not {most}")
    options = {"max_queue": 256} | args.load
    method = options.pop("method", None)
    if method is not None and "warm" not in options and hasattr(methods.method(method), "warm"):
        options["warm"] = False  # drafts that a client may ask for would be words of other clients' answers
    rows = options.get("max_rows", 64)
    made = engines(
        Loader(args.target, method, options, args.threads),
        least=args.replicas,
        most=most,
        rows=rows,
        room=rows + (options["max_queue"] or 1024),
        cpus=args.cpus,
        gpus=args.gpus,
    )
    unknown = sorted(set(args.serve) - (set(Settings.__dataclass_fields__) - {"model"}))
    if unknown:
        raise ValueError(f"serve has no argument {unknown[0]!r}")
    settings = Settings(args.model_name or args.target, **args.serve)
    front = serve.deployment(
        name="Ingress",
        num_replicas=args.ingresses,
        max_ongoing_requests=4096,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.max_seconds,
    )
    return front(serve.ingress()(Ingress)).bind(made, settings)


@contextmanager
def cluster(address: str, cpus: int) -> Iterator[None]:
    """A connection to a cluster, or, by the name `local`, one of this machine alone with room for so many CPUs, which
    ends with it. The application ends in any case.

    Raises ValueError where there is none at that address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": 100 * 2**20, "num_cpus": cpus}
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError) as error:
        raise ValueError(f"--ray: no cluster at {address!r}: {str(error).splitlines()[0]}") from None
    try:
        yield
    finally:
        if serve.status().applications.get(APPLICATION) is not None:
            serve.delete(APPLICATION)
        ray.shutdown()


def fleet(application: serve.Application) -> Fleet:
    """An app's worker outside of Serve: its replicas start with the app, and are asked from this process."""

    def start() -> DeploymentHandle:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        try:
            return serve.run(application, name=APPLICATION, route_prefix=None)
        except RuntimeError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise ValueError(f"--ray: the replicas did not start: {lines[-1].strip()}") from None

    return Fleet(ServeReplicas(start, APPLICATION))
