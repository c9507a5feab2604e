"""Pacer: draft block by block, and stop when a trained layer expects a rejection.

Blockwise pre-verification is the idea of arXiv 2602.01274. The stop rule by measured costs and the layer's inputs
(forerun/heads/pre_verifier.py) are ours.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf, log, log2
from typing import TYPE_CHECKING, ClassVar

from forerun.engine.costs import mean_context
from forerun.heads.echo import SIZES, Echo
from forerun.methods.base import Parts, integer, number
from forerun.methods.chain import Drafting
from forerun.methods.later import np, pre_verifier, quick, torch
from forerun.methods.later import probabilities as probs
from forerun.methods.stop import Bounds, DraftState, LengthPolicy, StopRule, Within

if TYPE_CHECKING:
    from forerun.engine.acceptance import Verdict
    from forerun.engine.costs import Costs
    from forerun.engine.draft import Draft
    from forerun.engine.sequence import Mode, Sequence
    from forerun.heads.pre_verifier import PreVerifier
    from forerun.heads.quick import Array, QuickState

BLOCK, BLOCKS = 4, (1, 2, 4, 8)
SHORT = 256  # tokens of context up to which costs are taken to be the same


@dataclass(frozen=True)
class Pacer(Drafting):
    """Draft blocks of `block` tokens until a trained layer expects a rejection: until the survival of a block's last
    token is below `threshold`.

    None ("auto") is the best value by the table of costs; with a threshold, a block of None is 4.
    """

    block: int | None = integer(None)
    threshold: float | None = number(None, 0, 1)
    most: int = integer(32)
    name: ClassVar[str] = "pacer"
    layer: ClassVar[str | None] = "pre-verifier"

    @property
    def needs_costs(self) -> bool:
        return self.threshold is None

    def policy(self, parts: Parts) -> LengthPolicy:
        assert parts.pre_verifier is not None
        made = parts.pre_verifier, self.block, self.most, self.threshold
        return PacerStop(*made, lambda mode, rows: self.costs(parts, mode, rows))

    def costs(self, parts: Parts, mode: Mode, rows: int) -> Costs | None:
        """Return the table of costs for `rows` rows of a mode that stop together."""
        return parts.costs


def best_threshold(
    traces: Array, block: int, costs: Costs, rows: int = 1, evidence: Array | None = None
) -> tuple[float, float]:
    """Return the threshold with which decoding is fastest by a table of costs, and its tokens per ms.

    `traces` [N, G] are a calibrated layer's survival at each token of N drafts. A draft that stops after n tokens is
    worth 1 plus the sum of their survival. It takes n draft forwards, n / block calls of the layer and a target forward
    on n + 1 tokens. The best threshold has the largest ratio of these sums over all drafts. If given, `evidence`
    [N, G] is compared with the threshold in place of `traces`.

    A step of several `rows` takes as long as its longest draft, so rows stop together, by the mean of their scores.
    Here drafts are combined at random.
    """
    block = min(block, traces.shape[1])
    blocks = traces.shape[1] // block
    scores = (traces if evidence is None else evidence)[:, block - 1 :: block][:, :blocks]
    tokens = 1 + traces.cumsum(-1)[:, block - 1 :: block][:, :blocks]
    if rows > 1:
        together = np.random.default_rng(0).integers(len(traces), size=(len(traces), rows))
        scores, tokens = scores[together].mean(1), tokens[together].mean(1)
    ends = block * np.arange(1, blocks + 1)
    prices = np.array(costs.steps(rows, int(ends[-1])))[ends]
    prices = (prices + costs.policy * np.arange(1, blocks + 1)) / rows
    best, found = 0.0, 0.5
    for threshold in np.linspace(0.02, 0.98, 49):
        stops = scores < threshold
        stops[:, -1] = True
        at = stops.argmax(-1)
        rate = float(tokens[np.arange(len(at)), at].sum() / prices[at].sum())
        if rate > best:
            best, found = rate, float(threshold)
    return found, best


@dataclass
class _Past:
    """The state of a sequence.

    Attributes:
        echo: its text.
        runs: lengths of its last 3 runs of accepted tokens, the present one first.
    """

    echo: Echo = field(default_factory=Echo)
    runs: list[float] = field(
        default_factory=lambda: [0.0, pre_verifier.USUAL_RUN, pre_verifier.USUAL_RUN]
    )


class PacerStop(LengthPolicy):
    """The length policy of `pacer`; arguments are its settings.

    Without a threshold it uses the best one for the layer's traces, greedy or sampled, by the table of costs and the
    number of rows (`best_threshold`); without costs 0.5. Without a block too, it uses the best of BLOCKS or, if the
    layer does not pay, the product of the draft's own probabilities, token by token. Then greedy rows stop together,
    and sampled rows, and those beside them, stop as they would alone. No clock is read.
    """

    def __init__(
        self,
        layer: PreVerifier,
        block: int | None,
        most: int,
        threshold: float | None = None,
        costs: Callable[[Mode, int], Costs | None] = lambda mode, rows: None,
    ) -> None:
        """Take over a layer. `costs(mode, rows)` returns the table for rows that stop together, or None."""
        self.layer, self.most = quick.quick(layer), most
        self.block, self.threshold, self.costs = block, threshold, costs
        self.past: dict[int, _Past] = {}
        self._settings: dict[tuple[Mode, int, bool, int], tuple[int, float, bool]] = {}

    def admit(self, seq: Sequence) -> None:
        self.past[seq.id] = _Past()

    def drop(self, seq: Sequence) -> None:
        self.past.pop(seq.id, None)

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        # Whether fused drafts are possible.
        is_alone = len(seqs) == 1 and (
            seqs[0].sampler.is_argmax or seqs[0].sampler.distribution is not None
        )
        # Beside sampled rows greedy ones stop as those do, each on its own.
        mode: Mode = "greedy" if all(seq.greedy for seq in seqs) else "sampled"
        count = rows if mode == "greedy" else 1
        block, threshold, together = self.settings(mode, count, is_alone, mean_context(seqs))
        if not block:
            return Within(Bounds(self.most, product=threshold), count if together else 1)
        return BlockRule(self, block, threshold, count if together else 1)

    def settings(
        self, mode: Mode, count: int, is_alone: bool, context: float = 0.0
    ) -> tuple[int, float, bool]:
        """Return the block (0: use the draft's probabilities), the threshold, and whether `count` rows of a mode stop
        together. `is_alone`: no other row drafts. `context`: the mean of the rows."""
        step = 1 << max(0, count.bit_length() - 3)
        count = -(-count // step) * step  # so that few numbers occur
        # A search takes longer than a step, so it is made for contexts that are powers of two.
        key = mode, count, is_alone, 1 << round(log2(max(context, SHORT)))
        if key not in self._settings:
            self._settings[key] = self._find(*key)
        return self._settings[key]

    def _find(
        self, mode: Mode, count: int, is_alone: bool, context: int
    ) -> tuple[int, float, bool]:
        costs = self.costs(mode, count)
        if self.threshold is not None or costs is None:
            return self.block or BLOCK, self.threshold if self.threshold is not None else 0.5, False
        greedy = mode == "greedy"
        blocks = BLOCKS if self.block is None else (self.block,)
        costs = (costs if greedy else costs.sampled).at(context, count)
        if costs.chained and is_alone:  # a fused draft returns probabilities
            costs = replace(costs, policy=max(0.0, costs.policy - costs.glance), glance=0.0)
        else:
            costs = replace(costs, chained=0.0)
        known = self.layer.thresholds
        key = repr(costs), greedy, count, blocks, self.most
        if key not in known:
            traces, products = self.layer.traces["greedy" if greedy else "sampled"][
                ..., : self.most
            ]
            found = {block: best_threshold(traces, block, costs, count) for block in blocks}
            if len(blocks) > 1:
                glancing = replace(costs, policy=costs.glance)
                found[0] = best_threshold(traces, 1, glancing, count, products)
            block = max(found, key=lambda block: found[block][1])
            known[key] = block, found[block][0]
        return *known[key], greedy

    def observe(
        self, seqs: abc.Sequence[Sequence], drafts: list[Draft], verdicts: list[Verdict]
    ) -> None:
        for seq, verdict in zip(seqs, verdicts, strict=True):
            past = self.past[seq.id]
            past.runs[0] += verdict.accepted
            if verdict.rejected:
                past.runs = [0.0, *past.runs[:2]]
            else:
                past.runs[0] += 1


class BlockRule(StopRule):
    """Pacer's rule for one draft. With `together` above 1, `together` rows stop together, by their mean score."""

    def __init__(self, policy: PacerStop, block: int, threshold: float, together: int) -> None:
        self.policy, self.block, self.threshold, self.together = policy, block, threshold, together
        self.states: list[DraftState] = []  # states of this block
        self.ids: list[int] = []  # of the rows of `state`
        self.state: QuickState | None = None

    def bounds(self) -> Bounds:
        return Bounds(min(self.block, self.policy.most))

    def bounds_after(
        self, seq: Sequence, drafted: list[int], probabilities: list[float]
    ) -> Bounds | None:
        if len(drafted) >= self.policy.most:
            return None
        output = self._output([seq], [drafted], [probabilities])
        return (
            Bounds(min(self.block, self.policy.most - len(drafted)))
            if self._judged(output)[0]
            else None
        )

    def more(self, state: DraftState) -> list[bool]:
        self.states.append(state)
        if state.depth >= self.policy.most or state.depth % self.block:
            return [state.depth < self.policy.most] * len(state.tokens)
        return self._judged(self._ask(state))

    def _judged(self, output: Array) -> list[bool]:
        """Return whether each row drafts on, by the layer's logits [R, b] for the last blocks."""
        last, least = output[:, -1], self.threshold
        if self.together > 1:
            survival = 1 / (1 + np.exp(-last))
            return [bool(survival.sum() >= least * self.together)] * len(last)
        least = log(least / (1 - least)) if 0 < least < 1 else inf if least else -inf
        found: list[bool] = (last >= least).tolist()
        return found

    def _ask(self, state: DraftState) -> Array:
        """Return the layer's logits [R, b] for the last block of the remaining rows."""
        ids, new = {seq.id for seq in state.seqs}, len(self.states)
        parts = [
            each.part([row for row, seq in enumerate(each.seqs) if seq.id in ids])
            for each in self.states
        ]
        self.states = []
        tokens = torch.tensor(
            [drafted[-new:] for drafted in state.tokens], device=state.scores.device
        )
        scores = (
            parts[0].scores[:, None]
            if new == 1
            else torch.stack([part.scores for part in parts], 1)
        )
        q = probs.probabilities_of(scores, tokens).tolist()
        return self._output(state.seqs, state.tokens, q)

    def _output(
        self, seqs: abc.Sequence[Sequence], drafted: list[list[int]], q: list[list[float]]
    ) -> Array:
        """Return the layer's logits [R, b] for the last b tokens, with probabilities `q`."""
        policy, ids, new = self.policy, [seq.id for seq in seqs], len(q[0])
        if self.state is None:
            self.state = policy.layer.begin([policy.past[seq.id].runs for seq in seqs])
        elif ids != self.ids:
            self.state = self.state.select([self.ids.index(id) for id in ids])
        self.ids = ids
        output, self.state = policy.layer.step(
            self.state,
            [[log(max(each, pre_verifier.MIN_PROBABILITY)) for each in row] for row in q],
            [self._echo(*row, new) for row in zip(seqs, drafted, strict=True)],
        )
        return output

    def _echo(self, seq: Sequence, drafted: list[int], new: int) -> list[tuple[int, ...]]:
        text, echo, reach = seq.tokens, self.policy.past[seq.id].echo, max(SIZES)
        echo.read(text)
        return echo.answers([*text[-reach:], *drafted[:-new]][-reach:], drafted[-new:])
