"""Stop rules by the entropy of the draft's distribution, because a high one makes rejection likely.

Both rules assume that a token sampled from a distribution of entropy H (in nats) is accepted with a
probability of at least about `1 - sqrt(scale * H)`. They stop where this is below a threshold. For
greedy tokens the distribution is the softmax of the scores.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from forerun.engine.sequence import Sequence
from forerun.engine.step import RowOutcome
from forerun.methods import Drafting, Parts
from forerun.methods.base import integer, number
from forerun.planning.stop_rules import DraftState, Fixed, LengthPolicy

# AdaEDL's moving averages: the share of the past in the acceptance rate and in the threshold.
OLD_RATE = 0.5
OLD_THRESHOLD = 0.9


def entropies(scores: Tensor) -> list[float]:
    """Return the entropy [R], in nats, of the softmax of each row of scores [R, V]."""
    # Tokens below e**-80 add nothing, but -inf times 0 would be NaN. This is twice as fast as
    # torch.special.entr.
    logs = scores.log_softmax(-1).clamp_min_(-80.0)
    return torch.linalg.vecdot(logs.exp(), -logs).tolist()


@dataclass(frozen=True)
class SVIP(Drafting):
    """Drafts until `1 - sqrt(scale * entropy)` is below `threshold`.

    Both defaults are those of the authors' code.
    """

    threshold: float = number(0.7, 0, 1)
    scale: float = number(0.15, 0, 100)
    most: int = integer(32)
    name: ClassVar[str] = "svip"

    def policy(self, parts: Parts) -> LengthPolicy:
        return EntropyStop(self.threshold, self.scale, self.most)


@dataclass(frozen=True)
class AdaEDL(Drafting):
    """Drafts as SVIP does, with a threshold that adapts to hold the acceptance rate at `goal`.

    It moves by a tenth of `step` after each draft. The defaults are the paper's values, but those
    of `threshold`, where it begins, and of `most` are ours.
    """

    threshold: float = number(0.5, 0, 1)
    scale: float = number(0.2, 0, 100)
    goal: float = number(0.9, 0, 1)
    step: float = number(0.01, 0, 1)
    most: int = integer(32)
    name: ClassVar[str] = "adaedl"

    def policy(self, parts: Parts) -> LengthPolicy:
        return AdaptiveEntropyStop(self.threshold, self.scale, self.goal, self.step, self.most)


class EntropyStop(Fixed):
    """SVIP's rule (arXiv 2411.18462).

    It stops after a token where `1 - sqrt(scale * H) < threshold`, and after `most` tokens. As in
    the authors' code, the token at which it stops is sent to the target like the others.
    """

    def __init__(self, threshold: float, scale: float, most: int) -> None:
        self.threshold = threshold
        self.scale = scale
        self.most = most

    def threshold_of(self, seq: Sequence) -> float:
        return self.threshold

    def more(self, state: DraftState) -> list[bool]:
        if state.depth >= self.most:
            return [False] * len(state.tokens)
        return [
            1 - sqrt(self.scale * entropy) >= self.threshold_of(seq)
            for seq, entropy in zip(state.seqs, entropies(state.scores), strict=True)
        ]


class AdaptiveEntropyStop(EntropyStop):
    """AdaEDL's rule (arXiv 2410.18351): SVIP's bound, with an adaptive threshold for each sequence.

    After every draft:

        rate = 0.5 * rate + 0.5 * accepted / drafted
        wanted = threshold + step  if rate < goal
                 threshold - step  if not, unless `most` tokens were accepted
        threshold = 0.9 * threshold + 0.1 * wanted

    The update and its constants (with scale 0.2, goal 0.9, step 0.01) are the paper's, as notes and
    code of others report them. Ours: the token at which it stops is sent as well (the paper stops
    before it); the rate starts at the goal; each sequence starts with the first threshold; drafts
    without tokens change nothing.
    """

    def __init__(self, threshold: float, scale: float, goal: float, step: float, most: int) -> None:
        super().__init__(threshold, scale, most)
        self.goal, self.step = goal, step
        self.rates: dict[int, float] = {}
        self.thresholds: dict[int, float] = {}

    def admit(self, seq: Sequence) -> None:
        self.rates[seq.id] = self.goal
        self.thresholds[seq.id] = self.threshold

    def drop(self, seq: Sequence) -> None:
        self.rates.pop(seq.id, None)
        self.thresholds.pop(seq.id, None)

    def threshold_of(self, seq: Sequence) -> float:
        return self.thresholds[seq.id]

    def observe(self, outcomes: abc.Sequence[RowOutcome]) -> None:
        for outcome in outcomes:
            seq = outcome.sequence
            drafted = outcome.draft.drafted
            accepted = outcome.verdict.accepted
            if not drafted:
                continue
            rate = OLD_RATE * self.rates[seq.id] + (1 - OLD_RATE) * accepted / drafted
            if rate < self.goal:
                step = self.step
            elif accepted < self.most:
                step = -self.step
            else:
                step = 0.0
            self.rates[seq.id] = rate
            self.thresholds[seq.id] += (1 - OLD_THRESHOLD) * step
