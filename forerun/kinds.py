"""The formats that weights can be stored in. Needs no torch."""

from __future__ import annotations

WEIGHT_FORMATS = ("float32", "bfloat16", "int8", "int4")


def check_kind(kind: str | None) -> None:
    """Raise ValueError for an unknown format of weights.

    "auto" and None leave the format to the checkpoint.
    """
    if kind not in (None, "auto", *WEIGHT_FORMATS):
        raise ValueError(
            f"unknown weights {kind!r}; there are {', '.join(WEIGHT_FORMATS)} and auto"
        )
