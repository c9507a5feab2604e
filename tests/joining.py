"""Rows as an engine fills them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.model.causal_lm import CausalLM


def join_all(
    lm: CausalLM, rows: Mapping[int, Sequence[int]], chunk: int = 512, reserve: int = 0, capture: Any = ""
) -> None:
    """Prefills each text and has it join under its id."""
    for id, tokens in rows.items():
        ran = list(lm.prefill(tokens, chunk, capture=capture))
        assert all(0 < count <= chunk for count in ran)
        lm.join(id, reserve)
