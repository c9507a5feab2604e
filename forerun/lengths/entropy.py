"""Stopping where the entropy of the draft's law says that its tokens will be rejected.

Both rules reckon that a token drawn from a law of entropy H (in nats) is accepted with a probability of at least about
`1 - sqrt(scale * H)`, and stop where this is below a threshold. Greedy tokens are judged by the softmax of the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from forerun.decode import Generation
from forerun.draft import Draft
from forerun.lengths import LengthPolicy, Look
from forerun.sampling import Verdict

# AdaEDL's moving averages: the share that the past keeps in the acceptance rate and in the threshold.
RATE_KEEPS, THRESHOLD_KEEPS = 0.5, 0.9


class EntropyStop(LengthPolicy):
    """SVIP (arXiv 2411.18462): stops behind a token where `1 - sqrt(scale * H) < threshold`, and behind `most` tokens.

    As in the authors' code, the token at which it stops is sent to the target like the others.
    """

    def __init__(self, threshold: float, scale: float, most: int) -> None:
        self.threshold, self.scale, self.most = threshold, scale, most

    def start(self, seqs: Sequence[Generation]) -> None:
        self.thresholds = [self.threshold] * len(seqs)

    def more(self, look: Look) -> list[bool]:
        if look.depth >= self.most:
            return [False] * len(look.rows)
        bounds = [1 - sqrt(self.scale * entropy) for entropy in entropies(look.scores)]
        return [bound >= self.thresholds[row] for row, bound in zip(look.rows, bounds, strict=True)]

    def keep(self, rows: list[int]) -> None:
        self.thresholds = [self.thresholds[row] for row in rows]


class AdaptiveEntropyStop(EntropyStop):
    """AdaEDL (arXiv 2410.18351): the same bound, with a threshold that follows the acceptance rate, for each row by
    itself. Behind every draft:

        rate = 0.5 * rate + 0.5 * accepted / drafted
        wanted = threshold + step  if rate < goal
                 threshold - step  if not, unless `most` tokens were accepted
        threshold = 0.9 * threshold + 0.1 * wanted

    The update and its constants (with scale 0.2, goal 0.9, step 0.01) are the paper's, read in second-hand notes and
    code. Ours: the token at which it stops is sent as well (the paper stops before it); the rate starts at the goal;
    thresholds start anew with every sequence; drafts without tokens change nothing.
    """

    def __init__(self, threshold: float, scale: float, goal: float, step: float, most: int) -> None:
        super().__init__(threshold, scale, most)
        self.goal, self.step = goal, step

    def start(self, seqs: Sequence[Generation]) -> None:
        super().start(seqs)
        self.rates = [self.goal] * len(seqs)

    def observe(self, drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None) -> None:
        for row, (draft, verdict) in enumerate(zip(drafts, verdicts, strict=True)):
            if not draft.drafted:
                continue
            rate = RATE_KEEPS * self.rates[row] + (1 - RATE_KEEPS) * verdict.accepted / draft.drafted
            step = self.step if rate < self.goal else -self.step if verdict.accepted < self.most else 0.0
            self.rates[row] = rate
            self.thresholds[row] += (1 - THRESHOLD_KEEPS) * step

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.rates = [self.rates[row] for row in rows]


def entropies(scores: Tensor) -> list[float]:
    """The entropy [R], in nats, of the softmax of each row of scores [R, V]."""
    # What is as improbable as e**-80 adds nothing; -inf times 0 would be NaN. Twice as fast as torch.special.entr.
    logs = scores.log_softmax(-1).clamp_min_(-80.0)
    return torch.linalg.vecdot(logs.exp(), -logs).tolist()
