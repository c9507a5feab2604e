"""Pacer: draft block by block, and stop when a trained layer expects a rejection.

Blockwise pre-verification is the idea of arXiv 2602.01274. The stop rule by measured costs and the
layer's inputs (forerun/heads/pre_verifier.py) are ours.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace
from math import inf, log, log2
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from forerun.heads import pre_verifier
from forerun.heads.echo import SIZES, Echo
from forerun.heads.quick import quick
from forerun.planning.cost_model import mean_context
from forerun.planning.stop_rules import Bounds, DraftState, LengthPolicy, StopRule, Within
from forerun.sampling.probabilities import probabilities_of

if TYPE_CHECKING:
    from forerun.engine.sequence import Mode, Sequence
    from forerun.engine.step import RowOutcome
    from forerun.heads.pre_verifier import PreVerifier
    from forerun.heads.quick import Array, QuickState
    from forerun.planning.cost_model import Costs

USUAL_BLOCK = 4  # with a given threshold, or without costs
BLOCKS = (1, 2, 4, 8)  # those that are tried by costs
USUAL_THRESHOLD = 0.5  # without costs
SHORT_CONTEXT = 256  # tokens of context up to which costs are assumed to be the same


def best_threshold(
    traces: Array, block: int, costs: Costs, rows: int = 1, evidence: Array | None = None
) -> tuple[float, float]:
    """Return the threshold with which decoding is fastest by costs, and its tokens per ms.

    A draft that stops after n tokens is worth 1 plus the sum of their survival. It takes n draft
    forwards, n / block calls of the layer and a target forward on n + 1 tokens. The best threshold
    has the largest ratio of these sums over all drafts.

    A step of several rows takes as long as its longest draft, so rows stop together, by the mean of
    their scores. Here drafts are combined at random.

    Args:
        traces: [N, G] a calibrated layer's survival at each token of N drafts.
        block: the tokens of a block.
        costs: the table.
        rows: the number of rows that stop together.
        evidence: [N, G] what is compared with the threshold; None for `traces`.
    """
    block = min(block, traces.shape[1])
    blocks = traces.shape[1] // block
    scores = (traces if evidence is None else evidence)[:, block - 1 :: block][:, :blocks]
    tokens = 1 + traces.cumsum(-1)[:, block - 1 :: block][:, :blocks]
    if rows > 1:
        drafts = np.random.default_rng(0).integers(len(traces), size=(len(traces), rows))
        scores = scores[drafts].mean(1)
        tokens = tokens[drafts].mean(1)
    ends = block * np.arange(1, blocks + 1)
    prices = np.array(costs.steps(rows, int(ends[-1])))[ends]
    prices = (prices + costs.policy * np.arange(1, blocks + 1)) / rows
    best_rate = 0.0
    best = USUAL_THRESHOLD
    for threshold in np.linspace(0.02, 0.98, 49):
        stops = scores < threshold
        stops[:, -1] = True
        at = stops.argmax(-1)
        rate = float(tokens[np.arange(len(at)), at].sum() / prices[at].sum())
        if rate > best_rate:
            best_rate = rate
            best = float(threshold)
    return best, best_rate


class BlockSettings(NamedTuple):
    """How drafts end.

    Attributes:
        block: the tokens of a block; 0 to use the draft's own probabilities, token by token.
        threshold: the survival below which a draft ends.
        stops_together: whether the rows stop together.
    """

    block: int
    threshold: float
    stops_together: bool


@dataclass
class _Past:
    """The state of a sequence.

    Attributes:
        echo: its text.
        runs: the lengths of its last 3 runs of accepted tokens, the present one first.
    """

    echo: Echo = field(default_factory=Echo)
    runs: list[float] = field(
        default_factory=lambda: [0.0, pre_verifier.USUAL_RUN, pre_verifier.USUAL_RUN]
    )


class PacerStop(LengthPolicy):
    """The length policy of `pacer`; arguments are its settings.

    Without a threshold it uses the best one for the layer's traces, greedy or sampled, by the table
    of costs and the number of rows (`best_threshold`). Without costs the threshold is 0.5.

    Without a block too, it uses the best of BLOCKS. If the layer does not pay, it uses the product
    of the draft's own probabilities, token by token. Then greedy rows stop together. Sampled rows,
    and those beside them, stop as they would alone. No clock is read.
    """

    def __init__(
        self,
        layer: PreVerifier,
        block: int | None,
        most: int,
        threshold: float | None = None,
        costs: Costs | None = None,
    ) -> None:
        """Take over a layer. `costs`: the table, if it is known."""
        self.layer = quick(layer)
        self.block = block
        self.most = most
        self.threshold = threshold
        self.costs = costs
        self.past: dict[int, _Past] = {}
        self._settings: dict[tuple[Mode, int, bool, int], BlockSettings] = {}

    def admit(self, seq: Sequence) -> None:
        """Begin a sequence's history."""
        self.past[seq.id] = _Past()

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence's history."""
        self.past.pop(seq.id, None)

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        """Return the rule of a step: by blocks, or by the draft's own probabilities."""
        # A single row may be drafted in fused calls.
        sampler = seqs[0].sampler
        is_alone = len(seqs) == 1 and (sampler.is_argmax or sampler.distribution is not None)
        # Beside sampled rows greedy ones stop as sampled rows do, each by itself.
        mode: Mode = "greedy" if all(seq.greedy for seq in seqs) else "sampled"
        count = rows if mode == "greedy" else 1
        settings = self.settings(mode, count, is_alone, mean_context(seqs))
        shared_rows = count if settings.stops_together else 1
        if not settings.block:
            return Within(Bounds(self.most, min_product=settings.threshold), shared_rows)
        return BlockRule(self, settings.block, settings.threshold, shared_rows)

    def settings(
        self, mode: Mode, count: int, is_alone: bool, context: float = 0.0
    ) -> BlockSettings:
        """Return how drafts end in a step.

        Args:
            mode: of the step.
            count: the number of rows that may stop together.
            is_alone: whether no other row drafts.
            context: the mean of the rows.
        """
        # A search takes longer than a step. So counts are rounded, and contexts are powers of two.
        step = 1 << max(0, count.bit_length() - 3)
        count = -(-count // step) * step
        key = mode, count, is_alone, 1 << round(log2(max(context, SHORT_CONTEXT)))
        if key not in self._settings:
            self._settings[key] = self._find(*key)
        return self._settings[key]

    def _find(self, mode: Mode, count: int, is_alone: bool, context: int) -> BlockSettings:
        if self.threshold is not None:
            return BlockSettings(self.block or USUAL_BLOCK, self.threshold, False)
        if self.costs is None:
            return BlockSettings(self.block or USUAL_BLOCK, USUAL_THRESHOLD, False)
        greedy = mode == "greedy"
        costs = (self.costs if greedy else self.costs.sampled).at(context, count)
        if costs.chained and is_alone:  # a fused draft returns probabilities
            costs = replace(
                costs, policy=max(0.0, costs.policy - costs.read_prob_ms), read_prob_ms=0.0
            )
        else:
            costs = replace(costs, chained=0.0)
        block, threshold = self._best(costs, greedy, count)
        return BlockSettings(block, threshold, greedy)

    def _best(self, costs: Costs, greedy: bool, count: int) -> tuple[int, float]:
        """Return the block and the threshold with the most tokens per ms.

        They are kept with the layer, because the search takes long.
        """
        blocks = BLOCKS if self.block is None else (self.block,)
        known = self.layer.thresholds
        key = repr(costs), greedy, count, blocks, self.most
        if key not in known:
            mode = "greedy" if greedy else "sampled"
            traces, products = self.layer.traces[mode][..., : self.most]
            by_block = {block: best_threshold(traces, block, costs, count) for block in blocks}
            if len(blocks) > 1:
                one_policy = replace(costs, policy=costs.read_prob_ms)
                by_block[0] = best_threshold(traces, 1, one_policy, count, products)
            best = max(by_block, key=lambda block: by_block[block][1])
            known[key] = best, by_block[best][0]
        return known[key]

    def observe(self, outcomes: abc.Sequence[RowOutcome]) -> None:
        """Record the runs of accepted tokens."""
        for outcome in outcomes:
            past = self.past[outcome.sequence.id]
            past.runs[0] += outcome.verdict.accepted
            if outcome.verdict.rejected:
                past.runs = [0.0, *past.runs[:2]]
            else:
                past.runs[0] += 1


class BlockRule(StopRule):
    """Pacer's rule for one draft.

    Attributes:
        states: those of the present block.
        state: the layer's.
        ids: the sequences of the rows of `state`.
    """

    def __init__(self, policy: PacerStop, block: int, threshold: float, shared_rows: int) -> None:
        """Begin a draft.

        Args:
            policy: what made the rule.
            block: the tokens of a block.
            threshold: the survival below which the draft ends.
            shared_rows: if above 1, so many rows stop together, by their mean score.
        """
        self.policy = policy
        self.block = block
        self.threshold = threshold
        self.shared_rows = shared_rows
        self.states: list[DraftState] = []
        self.ids: list[int] = []
        self.state: QuickState | None = None

    def bounds(self) -> Bounds:
        """Return the bounds of the first block."""
        return Bounds(min(self.block, self.policy.most))

    def bounds_after(
        self, seq: Sequence, drafted: list[int], probabilities: list[float]
    ) -> Bounds | None:
        """Return the bounds of the next block, if the last one is expected to be accepted."""
        left = self.policy.most - len(drafted)
        if left <= 0:
            return None
        output = self._output([seq], [drafted], [probabilities])
        return Bounds(min(self.block, left)) if self._judged(output)[0] else None

    def more(self, state: DraftState) -> list[bool]:
        """Return whether each row drafts on. The layer is asked at the end of a block."""
        self.states.append(state)
        if state.depth >= self.policy.most or state.depth % self.block:
            return [state.depth < self.policy.most] * len(state.tokens)
        return self._judged(self._ask(state))

    def _judged(self, output: Array) -> list[bool]:
        """Return whether each row drafts on, by the layer's logits [R, b] for the last blocks."""
        last = output[:, -1]
        if self.shared_rows > 1:
            survival = 1 / (1 + np.exp(-last))
            is_sure = bool(survival.sum() >= self.threshold * self.shared_rows)
            return [is_sure] * len(last)
        going: list[bool] = (last >= _log_odds(self.threshold)).tolist()
        return going

    def _ask(self, state: DraftState) -> Array:
        """Return the layer's logits [R, b] for the last block of the remaining rows."""
        ids = {seq.id for seq in state.seqs}
        new = len(self.states)
        parts = []
        for earlier in self.states:
            rows = [row for row, seq in enumerate(earlier.seqs) if seq.id in ids]
            parts.append(earlier.part(rows))
        self.states = []
        last = [drafted[-new:] for drafted in state.tokens]
        tokens = torch.tensor(last, device=state.scores.device)
        if new == 1:
            scores = parts[0].scores[:, None]
        else:
            scores = torch.stack([part.scores for part in parts], 1)
        q = probabilities_of(scores, tokens).tolist()
        return self._output(state.seqs, state.tokens, q)

    def _output(
        self, seqs: abc.Sequence[Sequence], drafted: list[list[int]], q: list[list[float]]
    ) -> Array:
        """Return the layer's logits [R, b] for the last b tokens, with probabilities `q`."""
        policy = self.policy
        ids = [seq.id for seq in seqs]
        if self.state is None:
            self.state = policy.layer.begin([policy.past[seq.id].runs for seq in seqs])
        elif ids != self.ids:
            self.state = self.state.select([self.ids.index(id) for id in ids])
        self.ids = ids
        new = len(q[0])
        echoes = [self._echo(*row, new) for row in zip(seqs, drafted, strict=True)]
        output, self.state = policy.layer.step(self.state, list(map(_logs, q)), echoes)
        return output

    def _echo(self, seq: Sequence, drafted: list[int], new: int) -> list[tuple[int, ...]]:
        """Return the echoes of a sequence's last `new` drafted tokens."""
        echo = self.policy.past[seq.id].echo
        echo.read(seq.tokens)
        reach = max(SIZES)
        context = [*seq.tokens[-reach:], *drafted[:-new]][-reach:]
        return echo.answers(context, drafted[-new:])


def _log_odds(probability: float) -> float:
    """Return the log-odds of a probability, infinite ones for 0 and 1."""
    if 0 < probability < 1:
        return log(probability / (1 - probability))
    return inf if probability else -inf


def _logs(probabilities: list[float]) -> list[float]:
    return [log(max(probability, pre_verifier.MIN_PROBABILITY)) for probability in probabilities]
