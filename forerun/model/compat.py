"""Differences between versions of transformers.

No other module checks a version, or tries which of two names exists.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import transformers

TESTED = (5, 24)  # the newest version with which the whole suite passes
# The name of the cache argument since 5.24, and the one before.
CACHE_NAMES = ("cache", "past_key_values")

_LOG = logging.getLogger("forerun")


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the name of the cache argument of a model's forward, or None if it has none.

    The signature decides, not the version, because remote code may keep the older name.
    """
    accepted = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in accepted), None)


def user_cache(model_kwargs: dict[str, Any]) -> tuple[str, Any]:
    """Return the name and the value of the cache in the arguments that `generate` passes on.

    The value is None if they have no cache.
    """
    for name in CACHE_NAMES:
        if model_kwargs.get(name) is not None:
            return name, model_kwargs[name]
    return CACHE_NAMES[0], None


@cache
def warn_if_newer() -> None:
    """Log one line per process if transformers is newer than TESTED."""
    version = transformers.__version__
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers > TESTED:
        _LOG.warning(
            f"transformers {version} is newer than {TESTED[0]}.{TESTED[1]}, the newest that "
            "forerun was tested with; if something fails, install that one (constraints.txt has "
            "all tested versions)"
        )
