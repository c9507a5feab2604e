"""A pre-verifier for decoding, in NumPy and block by block.

It works on few numbers, for which torch's calls would take most of the time. The arithmetic is that
of forerun/heads/pre_verifier.py, and is tested equal to it.
"""

from __future__ import annotations

from math import log1p
from typing import Any, NamedTuple

import numpy as np

from forerun.heads.echo import SIZES
from forerun.heads.pre_verifier import INPUTS, MAX_ECHO_COUNT, PreVerifier

Array = np.ndarray


class QuickState(NamedTuple):
    """The state of N drafts after some tokens.

    Attributes:
        places: the number of tokens so far.
        runs: [N][3] the history.
        running: [N][..] the sum and the minimum of log-probabilities, and the counts of echoes of
            -1 and of 0.
    """

    places: int
    runs: list[list[float]]
    running: list[list[float]]

    def select(self, rows: list[int]) -> QuickState:
        """Return the state of these drafts."""
        runs = [self.runs[row] for row in rows]
        running = [self.running[row] for row in rows]
        return QuickState(self.places, runs, running)


class QuickPreVerifier:
    """A copy of a PreVerifier, which later training does not change."""

    def __init__(self, layer: PreVerifier) -> None:
        # Computed from the traces by forerun.drafters.pacer.
        self.thresholds: dict[Any, tuple[int, float]] = {}
        weights = {
            name: value.detach().float().cpu().numpy() for name, value in layer.state_dict().items()
        }
        # One matrix, so that one product serves all inputs.
        self.enter = np.concatenate([weights[f"enter.{name}.weight"].T for name in INPUTS])
        self.place = weights["place"]
        self.middle = weights["middle.weight"].T, weights["middle.bias"]
        self.leave = weights["leave.weight"][0], weights["leave.bias"]
        self.traces = {
            "greedy": _without_empty_columns(weights["greedy_traces"] / 255),
            "sampled": _without_empty_columns(weights["drawn_traces"] / 255),
        }

    def begin(self, history: list[list[float]]) -> QuickState:
        """Return the state before N drafts, given their history [N][3]."""
        runs = [list(map(log1p, row)) for row in history]
        running = [[0.0] * (2 + 2 * len(SIZES)) for _ in history]
        return QuickState(0, runs, running)

    def step(
        self, state: QuickState, log_q: list[list[float]], echoes: list[list[tuple[int, ...]]]
    ) -> tuple[Array, QuickState]:
        """Return the layer's logits [N, b] for the next b tokens, and the new state.

        Args:
            state: the state before these tokens.
            log_q: as for `PreVerifier.forward`, as lists.
            echoes: as for `PreVerifier.forward`, as lists.
        """
        features = []
        running = []
        for row in zip(log_q, state.runs, state.running, echoes, strict=True):
            row_features, row_running = _features(*row)
            features.append(row_features)
            running.append(row_running)
        places = state.places + len(log_q[0])
        last = len(self.place) - 1
        x = np.array(features, np.float32) @ self.enter
        x += self.place[[min(at, last) for at in range(state.places, places)]]
        np.maximum(x, 0, out=x)
        x = x @ self.middle[0]
        x += self.middle[1]
        np.maximum(x, 0, out=x)
        logits = x @ self.leave[0] + self.leave[1]
        return logits, QuickState(places, state.runs, running)


def _without_empty_columns(traces: Array) -> Array:
    """Return traces [2, TRACES, G] up to the last token of the longest draft."""
    return traces[..., : max(1, int(traces.any((0, 1)).sum()))]


def _features(
    log_q: list[float], runs: list[float], running: list[float], echoes: list[tuple[int, ...]]
) -> tuple[list[list[float]], list[float]]:
    """Return the features [b, the sum of INPUTS] of one row's tokens, and its new `running`."""
    total, lowest, *counts = running
    size = len(SIZES)
    features = []
    for at, value in enumerate(log_q):
        total += value
        lowest = min(lowest, value)
        for i, echo in enumerate(echoes[at]):
            if echo < 0:
                counts[i] += 1
            elif echo == 0:
                counts[size + i] += 1
        capped = counts
        if max(counts) > MAX_ECHO_COUNT:
            capped = [min(count, MAX_ECHO_COUNT) for count in counts]
        features.append([value, max(total, -20.0) / 2, lowest, *echoes[at], *capped, *runs])
    return features, [total, lowest, *counts]


def quick(layer: PreVerifier) -> QuickPreVerifier:
    """Return the layer's quick form, which is made once."""
    made: QuickPreVerifier | None = getattr(layer, "_quick", None)
    if made is None:
        made = QuickPreVerifier(layer)
        layer._quick = made  # type: ignore[assignment]
    return made
