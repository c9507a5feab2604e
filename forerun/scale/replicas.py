"""Replicas by Ray Serve for `forerun serve --ray`.

Each replica is a whole server, behind the proxies of Ray Serve. See docs/guide/scale.md.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from secrets import token_hex
from time import perf_counter, sleep
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from forerun.api.decoder import Decoder
from forerun.server.app import Settings, create_app
from forerun.server.memory import MemoryShare
from forerun.server.worker import Worker

_LOG = logging.getLogger("forerun.server")

OBJECT_STORE_BYTES = 100 * 2**20  # of a local cluster, whose replicas share no objects
DAY = 24 * 3600.0  # seconds
GPU_FRACTIONS = 10_000  # Ray rounds fractions of a GPU to so many parts, perhaps up


@dataclass(frozen=True)
class ReplicaPlan:
    """How many replicas there are, and what each of them has.

    Attributes:
        count: the number of replicas.
        capacity: the requests that a replica holds, running and waiting.
        cpus: the cores, and so the threads, of a replica.
        device: torch's device, or None for the default.
        drain: seconds for running requests when a replica ends.
    """

    count: int
    capacity: int
    cpus: int
    device: str | None
    drain: float


@serve.ingress(None)
class Replica:
    """A server with its engine. Ray counts it as started when its model is loaded."""

    async def __init__(  # type: ignore[misc]
        self, make: Callable[[], Decoder], settings: Settings, share: MemoryShare
    ) -> None:
        self._worker = Worker(make, share)
        self._settings = settings
        self._worker.start()
        await self._worker.until_ready()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._worker, replace(self._settings, sends_ids=False))

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has failed for good: Ray then replaces the replica."""
        if self._worker.failed is not None:
            raise RuntimeError("its engine has failed") from self._worker.failed


@contextmanager
def cluster(address: str, cpus: int) -> Iterator[None]:
    """Connect to a cluster. Raises ValueError if there is none at the address.

    The address `local` starts a cluster of this machine alone, with `cpus` cores, which ends with
    the connection.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise each actor that dies, Ray's own ones too, writes many lines to stderr.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options |= {
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "num_cpus": cpus,
        }
    try:
        ray.init(address=address, **options)
    except Exception as error:  # the class that Ray raises if its processes do not start in time
        raise ValueError(f"--ray: no cluster at {address!r}: {_last_line(error)}") from None
    try:
        yield
    finally:
        ray.shutdown()


def gpus_per_replica(replicas: int, device: str | None) -> float:
    """Return the GPUs that each replica asks for.

    This is one GPU, or a fraction that all replicas fit into; it is 0 on a CPU.
    """
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus or (device or "").startswith("cpu"):
        return 0
    replicas_per_gpu = -(-replicas // gpus)
    return GPU_FRACTIONS // replicas_per_gpu / GPU_FRACTIONS


def machine_share(replicas: int) -> float:
    """Return the part of a machine's memory for each replica, as Ray spreads them evenly."""
    machines = sum(cores > 0 for cores in _cores_by_node())
    replicas_per_machine = -(-replicas // machines)
    return 1 / replicas_per_machine


def application(
    make: Callable[[], Decoder], settings: Settings, plan: ReplicaPlan
) -> serve.Application:
    """Return the application of the replicas."""
    gpus = gpus_per_replica(plan.count, plan.device)
    deployment = serve.deployment(
        name="Replica",
        num_replicas=plan.count,
        # More than a replica holds, because the replica itself refuses what its queue cannot hold.
        max_ongoing_requests=2 * plan.capacity,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": gpus},
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=plan.drain,
        # In all: a model that cannot be loaded ends the server.
        max_constructor_retry_count=3,
    )
    return deployment(Replica).bind(make, settings, MemoryShare(gpus or machine_share(plan.count)))


def run(
    address: str,
    make: Callable[[], Decoder],
    settings: Settings,
    plan: ReplicaPlan,
    *,
    host: str,
    port: int,
    started_at: float,
) -> None:
    """Serve from a cluster until a signal comes.

    Raises ValueError if there is no such cluster, or if the replicas do not fit into its cores or
    cannot start.

    Args:
        address: the address of the cluster, `auto` or `local`.
        make: loads a replica's decoder, on the node that is to compute.
        settings: how each replica serves.
        plan: how many replicas there are, and what each of them has.
        host: the address on which the proxies listen.
        port: their port.
        started_at: when the command started, as a time of `perf_counter`.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with cluster(address, plan.cpus * plan.count):
        _check_cores(plan)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: sys.exit(0))
        made = application(make, settings, plan)
        name = f"forerun-{token_hex(4)}"
        try:
            _LOG.info("the Serve application is %s", name)
            serve.start(
                http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"}
            )
            serve.run(made, name=name)
            _LOG.info("ready in %.1f s: http://%s:%d", perf_counter() - started_at, host, port)
            while True:
                sleep(DAY)  # until a signal; Windows has no signal.pause
        except (RayError, RayServeException, RuntimeError) as error:
            reason = _reason(name, error)
            raise ValueError(f"--ray: the replicas did not start: {reason}") from None
        finally:
            with suppress(RayError, RayServeException):  # the cluster may be gone
                # This returns when running answers have ended, or after `plan.drain` seconds.
                serve.delete(name)


def _check_cores(plan: ReplicaPlan) -> None:
    """Raise ValueError if the cluster lacks cores. A replica has all of its cores on one node."""
    cores = _cores_by_node()
    if sum(count // plan.cpus for count in cores) < plan.count:
        raise ValueError(
            f"--replicas {plan.count} with {plan.cpus} threads each do not fit into {sum(cores)} "
            "cores"
        )


def _cores_by_node() -> list[int]:
    """Return the cores of each node that lives, 0 for one that Ray gives no work."""
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


def _reason(name: str, error: Exception) -> str:
    """Return why an application did not start, as Ray says of its replicas, or as the error."""
    message = ""
    with suppress(RayError, RayServeException, KeyError):
        message = serve.status().applications[name].deployments["Replica"].message.strip()
    return _last_line(RuntimeError(message) if message else error)


def _last_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[-1]
