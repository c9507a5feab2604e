"""A pre-verifier for decoding, in NumPy and block by block: for few numbers torch's calls take most of the time.

The arithmetic is that of forerun/heads/pre_verifier.py, and is tested equal to it.
"""

from __future__ import annotations

from math import log1p
from typing import Any, NamedTuple

import numpy as np

from forerun.heads.echo import SIZES
from forerun.heads.pre_verifier import COUNTED, INPUTS, PreVerifier

Array = np.ndarray


class QuickState(NamedTuple):
    """The state of N drafts after some tokens."""

    places: int  # tokens so far
    runs: list[list[float]]  # [N][3] the history
    running: list[
        list[float]
    ]  # [N][..] sum and minimum of log-probabilities, counts of echoes of -1 and 0

    def select(self, rows: list[int]) -> QuickState:
        """Return the state of these drafts."""
        runs, running = ([part[row] for row in rows] for part in (self.runs, self.running))
        return QuickState(self.places, runs, running)


class QuickPreVerifier:
    """A copy of a PreVerifier, which later training does not change."""

    def __init__(self, layer: PreVerifier) -> None:
        self.thresholds: dict[
            Any, tuple[int, float]
        ] = {}  # computed from the traces by forerun.drafters.pacer
        weights = {
            name: value.detach().float().cpu().numpy() for name, value in layer.state_dict().items()
        }
        self.enter = np.concatenate(
            [weights[f"enter.{name}.weight"].T for name in INPUTS]
        )  # one product for all
        self.place = weights["place"]
        self.middle = weights["middle.weight"].T, weights["middle.bias"]
        self.leave = weights["leave.weight"][0], weights["leave.bias"]
        traces = {
            "greedy": weights["greedy_traces"] / 255,
            "sampled": weights["drawn_traces"] / 255,
        }
        # Columns beyond the longest draft are empty.
        self.traces = {
            name: value[..., : max(1, int(value.any((0, 1)).sum()))]
            for name, value in traces.items()
        }

    def begin(self, history: list[list[float]]) -> QuickState:
        """Return the state before N drafts, given their history [N][3]."""
        runs = [[log1p(run) for run in row] for row in history]
        running = [[0.0] * (2 + 2 * len(SIZES)) for _ in history]
        return QuickState(0, runs, running)

    def step(
        self, state: QuickState, log_q: list[list[float]], echoes: list[list[tuple[int, ...]]]
    ) -> tuple[Array, QuickState]:
        """Return the layer's logits [N, b] for the next b tokens, and the new state. Arguments are those of
        `PreVerifier.forward`, as lists."""
        new, last = len(log_q[0]), len(self.place) - 1
        found = [
            _features(*row) for row in zip(log_q, state.runs, state.running, echoes, strict=True)
        ]
        x = np.array([features for features, _ in found], np.float32) @ self.enter
        x += self.place[[min(at, last) for at in range(state.places, state.places + new)]]
        np.maximum(x, 0, out=x)
        x = x @ self.middle[0]
        x += self.middle[1]
        np.maximum(x, 0, out=x)
        running = [run for _, run in found]
        return x @ self.leave[0] + self.leave[1], QuickState(
            state.places + new, state.runs, running
        )


def _features(
    log_q: list[float], runs: list[float], running: list[float], echoes: list[tuple[int, ...]]
) -> tuple[list[list[float]], list[float]]:
    """Return the features [b, the sum of INPUTS] of one row's tokens, and its new `running`."""
    total, least, *counts = running
    size = len(SIZES)
    features = []
    for at, value in enumerate(log_q):
        total += value
        least = min(least, value)
        for i, echo in enumerate(echoes[at]):
            if echo < 0:
                counts[i] += 1
            elif echo == 0:
                counts[size + i] += 1
        capped = counts if max(counts) <= COUNTED else [min(count, COUNTED) for count in counts]
        features.append([value, max(total, -20.0) / 2, least, *echoes[at], *capped, *runs])
    return features, [total, least, *counts]


def quick(layer: PreVerifier) -> QuickPreVerifier:
    """Return the layer's quick form, which is made once."""
    made = getattr(layer, "_quick", None)
    if made is None:
        made = layer._quick = QuickPreVerifier(layer)  # type: ignore[assignment]
    return made
