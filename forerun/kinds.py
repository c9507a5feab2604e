"""What weights can be stored as, and how drafts with another tokenizer draft. Needs no torch."""

from __future__ import annotations

KINDS = ("float32", "bfloat16", "int8", "int4")
WAYS = ("auto", "shared", "text")  # of drafting with another tokenizer


def check_kind(kind: str | None) -> None:
    """Raise ValueError for what weights cannot be stored as; "auto" and None leave it to the checkpoint."""
    if kind not in (None, "auto", *KINDS):
        raise ValueError(f"unknown weights {kind!r}; there are {', '.join(KINDS)} and auto")


def check_way(way: str | None) -> None:
    """Raise ValueError for an unknown way to draft with another tokenizer; None is "auto"."""
    if way not in (None, *WAYS):
        raise ValueError(f"draft_tokens must be {', '.join(WAYS[:-1])} or {WAYS[-1]}, not {way!r}")
