"""A connection to a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray


@contextmanager
def cluster(address: str, store: int, cpus: int | None = None) -> Iterator[None]:
    """A connection to a cluster, or, by the name `local`, a cluster of this machine alone, which ends with it.

    Args:
        store: bytes of the object store, and `cpus`: how many may be taken, of the latter; all of them by default.

    Raises ValueError where there is none at that address.
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
    except Exception as error:  # Ray raises that class itself, where its processes do not start in time
        raise ValueError(f"--ray: no cluster at {address!r}: {(str(error) or repr(error)).splitlines()[0]}") from None
    try:
        yield
    finally:
        ray.shutdown()
