"""What weights can be stored as. Needs no torch."""

from __future__ import annotations

KINDS = ("float32", "bfloat16", "int8", "int4")


def check_kind(kind: str | None) -> None:
    """Raise ValueError for what weights cannot be stored as; "auto" and None leave it to the checkpoint."""
    if kind not in (None, "auto", *KINDS):
        raise ValueError(f"unknown weights {kind!r}; there are {', '.join(KINDS)} and auto")
