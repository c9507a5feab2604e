"""A connection to a Ray cluster, and the cores of its nodes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray


@contextmanager
def cluster(address: str, store: int, cpus: int | None = None) -> Iterator[None]:
    """Connect to a cluster, or, by the name `local`, start one of this machine alone, which ends with the connection.

    Args:
        store: bytes of the object store of a local cluster.
        cpus: how many cores it may take; all by default.

    Raises ValueError if there is none at that address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Else actors that die, Ray's own ones too, are many lines on stderr.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": store, "num_cpus": cpus}
    try:
        ray.init(address=address, **options)
    except Exception as error:  # Ray raises that class itself, if its processes do not start in time
        raise ValueError(f"--ray: no cluster at {address!r}: {first_line(error)}") from None
    try:
        yield
    finally:
        ray.shutdown()


def cores() -> list[int]:
    """Return the number of cores of each node."""
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


def gpus_each(processes: int, device: str | None) -> float:
    """Return the GPUs that each of these processes asks for: one, or a part that they all fit into; none on a CPU."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus or (device or "").startswith("cpu"):
        return 0
    return 10_000 // -(-processes // gpus) / 10_000  # Ray rounds to so many decimals, perhaps up


def first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
