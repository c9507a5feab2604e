"""The rotation that a GGUF file describes, in transformers' words."""

from __future__ import annotations

import math
from typing import Any

from forerun.backends.gguf.metadata import Metadata

LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
_KINDS = ("none", "linear", "yarn", "longrope")


def rotation_of_file(metadata: Metadata, context: int) -> dict[str, Any]:
    """Return `rope_parameters` of a file.

    YaRN is scaled as llama.cpp does it: its attention factor is that of the file times
    1 + 0.1 log(factor), or the quotient of two of these if the file has `yarn_log_multiplier`.

    Args:
        metadata: the file's.
        context: the positions that the file claims.

    Raises:
        ValueError: a kind of scaling is unknown, or a number is impossible.
    """
    theta = metadata.number("rope.freq_base", float, 10000.0)
    kind = metadata.value("rope.scaling.type", str, "linear")
    factor = _factor(metadata)
    attention_factor = metadata.value("rope.scaling.attn_factor", float, 0.0) or 1.0
    original = metadata.value("rope.scaling.original_context_length", int, 0) or context
    plain = {"rope_type": "default", "rope_theta": theta}
    if metadata.has(LONG_FACTORS) or metadata.has(SHORT_FACTORS) or kind == "longrope":
        return _longrope(metadata, plain, original, attention_factor)
    if kind not in _KINDS or not factor > 0:
        known = ", ".join(_KINDS)
        raise metadata.file.error(
            f"its rotation is scaled ({kind!r}, {factor:g}); supported are {known}, by more than 0"
        )
    if kind == "yarn" and factor != 1:
        return plain | _yarn(metadata, factor, original, attention_factor)
    if attention_factor != 1:
        raise metadata.file.error(
            f"rope.scaling.attn_factor is {attention_factor:g}, which is supported for yarn only"
        )
    if kind == "linear" and factor != 1:
        return plain | {"rope_type": "linear", "factor": factor}
    return plain


def _factor(metadata: Metadata) -> float:
    """Return by which factor positions are shrunk. Files may say 0 for none, or use an old key."""
    old = metadata.value("rope.scale_linear", float, 0.0)
    factor: float = metadata.value("rope.scaling.factor", float, old)
    return factor or 1.0


def _yarn(
    metadata: Metadata, factor: float, original: int, attention_factor: float
) -> dict[str, Any]:
    if metadata.value("rope.scaling.yarn_ext_factor", float, 1.0) not in (1.0, -1.0):
        raise metadata.file.error("rope.scaling.yarn_ext_factor must be 1")
    attention_factor *= metadata.value("rope.scaling.yarn_attn_factor", float, 0.0) or 1.0
    log_multiplier = metadata.value("rope.scaling.yarn_log_multiplier", float, 0.0)
    scale = _growth(factor, 1.0)
    if log_multiplier:
        scale /= _growth(factor, log_multiplier)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": attention_factor * scale,
        "beta_fast": metadata.value("rope.scaling.yarn_beta_fast", float, 32.0),
        "beta_slow": metadata.value("rope.scaling.yarn_beta_slow", float, 1.0),
    }


def _growth(factor: float, multiplier: float) -> float:
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(
    metadata: Metadata, plain: dict[str, Any], original: int, attention_factor: float
) -> dict[str, Any]:
    """Return longrope's parameters. A model is limited to the range of its short factors."""
    file = metadata.file
    factors = {}
    for name, tensor in (("short_factor", SHORT_FACTORS), ("long_factor", LONG_FACTORS)):
        (rows,) = file.floats(file.tensor(tensor))
        factors[name] = [float(value) for value in rows[0]]
        if not all(value > 0 for value in factors[name]):
            raise file.error(f"{tensor} must be above 0")
    return plain | {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "attention_factor": attention_factor,
        **factors,
    }
