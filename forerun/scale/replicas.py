"""Replicas by Ray Serve: `forerun serve --ray`, and the application for a Serve config. See docs/replicas.md."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import Any

import ray
from fastapi import FastAPI
from pydantic import BaseModel, Field
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ReplicaState

from forerun.scale.cluster import cluster
from forerun.scale.engines import ServeReplicas, engines
from forerun.scale.fleet import Fleet
from forerun.server.app import Settings, create_app
from forerun.server.worker import Loader
from forerun.zoo import EMBEDDED

LOOK = 0.25  # seconds until it is looked again whether a replica has started

_LOG = logging.getLogger("forerun.server")


class Ingress:
    """The app, for Serve's own HTTP proxies."""

    def __init__(self, handle: DeploymentHandle, settings: Settings) -> None:
        self._handle, self._settings = handle, settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        self._fleet = Fleet(ServeReplicas(self._engines, serve.get_replica_context().app_name))
        return create_app(self._fleet, self._settings)

    async def _engines(self) -> DeploymentHandle:
        return self._handle

    def check_health(self) -> None:
        if self._fleet.failed is not None:  # another copy tries again
            raise RuntimeError("it found no engine") from self._fleet.failed


class Args(BaseModel, extra="forbid"):
    """Arguments of `app` in a Serve config.

    Attributes:
        target: hub id, folder on every node, or a name that forerun knows.
        load: other arguments of `forerun.load`: draft, method and its settings, weights, max_rows, ...
        replicas: how many; more than that, up to max_replicas, while requests wait.
        ingresses: copies of the app. Each keeps its own count of what is in flight.
        cpus, gpus, threads: of a replica.
        serve: fields of `forerun.server.app.Settings`: api_key, max_seconds, ...
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
    shares = not args.load.keys().isdisjoint(("warm", "phrases"))
    options = {"max_queue": 256, "share_outputs": shares} | args.load
    method = options.pop("method", None)
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
def serving(address: str, *, least: int, most: int, cpus: int) -> Iterator[str]:
    """`cluster`, and a new name for an application there, which ends with it.

    Args:
        least, most: replicas, which take `cpus` cores each.

    Raises ValueError where the least of them do not fit.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with cluster(address, 100 * 2**20, cpus * most):
        cores = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        if sum(int(each // cpus) for each in cores) < least:
            raise ValueError(f"--replicas {least} with {cpus} threads each do not fit into {sum(cores):g} cores")
        name = f"forerun-{token_hex(4)}"
        try:
            yield name
        finally:
            with suppress(Exception):  # the cluster may be gone; what ended the server is what is to be told
                serve.delete(name, _blocking=False)
                serve.status()  # Serve has heard of it, and goes on with it alone


def fleet(application: serve.Application, name: str) -> Fleet:
    """An app's worker outside of Serve: its replicas start with the app, and are asked from this process."""

    def deploy() -> DeploymentHandle:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        target = serve.RunTarget(application, name, route_prefix=None)
        return serve.run_many([target], wait_for_applications_running=False)[0]

    async def start() -> DeploymentHandle:
        """Threads only for what is short: one that waits for a replica would hold up the end of the process."""
        _LOG.info("the Serve application is %s", name)
        told = ""
        try:
            handle = await asyncio.to_thread(deploy)
            while True:
                found = (await asyncio.to_thread(serve.status)).applications.get(name)
                replicas = None if found is None else found.deployments.get("Engine")
                if found is None or replicas is None:
                    raise ValueError("--ray: somebody else has ended the Serve application")
                if replicas.replica_states.get(ReplicaState.RUNNING):
                    return handle
                lines = [line.strip() for line in (replicas.message or found.message).splitlines() if line.strip()]
                if found.status == ApplicationStatus.DEPLOY_FAILED:
                    raise ValueError(f"--ray: the replicas did not start: {lines[-1] if lines else found.status}")
                if lines and lines[-1] != told:
                    told = lines[-1]
                    _LOG.warning("no replica has started: %s", told)
                await asyncio.sleep(LOOK)
        except (RayError, RayServeException) as error:
            raise ValueError(f"--ray: the cluster is gone: {(str(error) or repr(error)).splitlines()[0]}") from None

    return Fleet(ServeReplicas(start, name))
