"""How far outputs are from the reference's, in one line: how many differ, and how nearly the target chose otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any


def parted(equal: Sequence[bool], mismatches: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What is known of outputs that differ; None where none does, or where outputs were sampled.

    Args:
        equal: for each output whether it is the reference's, token for token.
        mismatches: the places where outputs part for the first time, with the target's margin there
            (`forerun.bench.measure.margins`), each with the number of times it was seen.

    Returns:
        How many outputs there are and how many differ, and the median and the largest of their margins without a sign;
        None for margins that were not taken.
    """
    if all(equal):
        return None
    taken = [each for each in mismatches if each["margin"] is not None]
    margins = [abs(each["margin"]) for each in taken for _ in range(each["times"])]
    return {
        "outputs": len(equal),
        "differ": len(equal) - sum(equal),
        "margin_median": median(margins) if margins else None,
        "margin_max": max(margins) if margins else None,
    }


def explained(differences: dict[str, Any], reference: str) -> str:
    """The same as half a sentence."""
    text = f"{differences['differ']} of {differences['outputs']} outputs differ from {reference}'s"
    if differences["margin_max"] is None:
        return text
    return f"{text}, at margins of at most {differences['margin_max']:.2g} (median {differences['margin_median']:.2g})"
