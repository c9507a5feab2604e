"""Replicas by Ray Serve for `forerun serve --ray`: the whole server in each, behind Serve's own proxies. See
docs/replicas.md."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from secrets import token_hex
from time import perf_counter
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from forerun.api.decoder import Decoder
from forerun.server.app import Settings, create_app
from forerun.server.worker import Worker

_LOG = logging.getLogger("forerun.server")


@serve.ingress(None)
class Replica:
    """A server with its engine. It has begun when its model is loaded."""

    async def __init__(self, make: Callable[[], Decoder], settings: Settings) -> None:  # type: ignore[misc]
        self._worker, self._settings = Worker(make), settings
        self._worker.start()
        await self._worker.until_ready()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._worker, replace(self._settings, sends_ids=False))

    def check_health(self) -> None:
        if self._worker.failed is not None:
            raise RuntimeError("its engine has failed") from self._worker.failed


@contextmanager
def cluster(address: str, cpus: int) -> Iterator[None]:
    """Connect to a cluster, or, by the name `local`, start one of this machine alone with that many cores, which ends
    with the connection. Raises ValueError if there is none at that address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Else actors that die, Ray's own ones too, are many lines on stderr.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options |= {
            "include_dashboard": False,
            "object_store_memory": 100 * 2**20,
            "num_cpus": cpus,
        }
    try:
        ray.init(address=address, **options)
    except (
        Exception
    ) as error:  # Ray raises that class itself, if its processes do not start in time
        raise ValueError(f"--ray: no cluster at {address!r}: {_line(error)}") from None
    try:
        yield
    finally:
        ray.shutdown()


def gpus_each(processes: int, device: str | None) -> float:
    """Return the GPUs that each of these processes asks for: one, or a part that they all fit into; none on a CPU."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus or (device or "").startswith("cpu"):
        return 0
    return 10_000 // -(-processes // gpus) / 10_000  # Ray rounds to so many decimals, perhaps up


def application(
    make: Callable[[], Decoder],
    settings: Settings,
    *,
    replicas: int,
    room: int,
    cpus: int,
    gpus: float,
    drain: float,
) -> serve.Application:
    """Return an application of replicas, each of which holds `room` requests."""
    deployment = serve.deployment(
        name="Replica",
        num_replicas=replicas,
        max_ongoing_requests=2 * room,  # the replica says itself that its queue is full
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=drain,
        max_constructor_retry_count=3,  # in all; a model that cannot be loaded ends the server
    )
    return deployment(Replica).bind(make, settings)


def run(
    address: str,
    make: Callable[[], Decoder],
    settings: Settings,
    *,
    host: str,
    port: int,
    replicas: int,
    cpus: int,
    device: str | None,
    begun: float,
    **options: Any,
) -> None:
    """Serve from a cluster until a signal comes.

    Raises ValueError if there is no such cluster, the replicas do not fit into its cores, or cannot start.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with cluster(address, cpus * replicas):
        cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        if sum(each // cpus for each in cores) < replicas:
            raise ValueError(
                f"--replicas {replicas} with {cpus} threads each do not fit into {sum(cores)} cores"
            )
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: sys.exit(0))
        made = application(
            make,
            settings,
            replicas=replicas,
            cpus=cpus,
            gpus=gpus_each(replicas, device),
            **options,
        )
        name = f"forerun-{token_hex(4)}"
        try:
            _LOG.info("the Serve application is %s", name)
            serve.start(
                http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"}
            )
            serve.run(made, name=name)
            _LOG.info("ready in %.1f s: http://%s:%d", perf_counter() - begun, host, port)
            while True:
                signal.pause()
        except (RayError, RayServeException, RuntimeError) as error:
            with suppress(RayError, RayServeException, KeyError):
                message = serve.status().applications[name].deployments["Replica"].message
                error = RuntimeError(message.strip() or error)
            raise ValueError(f"--ray: the replicas did not start: {_line(error)}") from None
        finally:
            with suppress(RayError, RayServeException):  # the cluster may be gone
                serve.delete(
                    name
                )  # returns when running answers have ended, or after `drain` seconds


def _line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[-1]
