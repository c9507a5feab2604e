"""Pacer: draft block by block, and stop where a trained layer finds that the target will not follow.

The idea of blockwise pre-verification is that of arXiv 2602.01274. The stop rule that follows from measured costs, and
the layer's inputs (forerun/heads/pre_verifier.py), are ours.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf, log
from typing import TYPE_CHECKING, ClassVar

from forerun.heads.echo import SIZES, Echo
from forerun.methods.base import Parts, Sampling, integer, number
from forerun.methods.chain import Drafting
from forerun.methods.confidence import ProductRule
from forerun.methods.later import np, pre_verifier, quick, torch
from forerun.methods.later import probabilities as probs
from forerun.methods.stop import Bounds, DraftState, LengthPolicy, StopRule

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.acceptance import Verdict
    from forerun.engine.costs import Costs
    from forerun.engine.draft import Draft
    from forerun.engine.sequence import Mode, Sequence
    from forerun.heads.pre_verifier import PreVerifier
    from forerun.heads.quick import Array, QuickState

BLOCK, BLOCKS = 4, (1, 2, 4, 8)


@dataclass(frozen=True)
class Pacer(Sampling, Drafting):
    """Drafts blocks of `block` tokens until a trained layer finds that the target will not follow.

    A block of None ("auto") is the best size by the table of costs; 4 with a threshold.

    It stops after a block if the survival of its last token is below `threshold`; a threshold of None ("auto") is the
    best one by the table of costs.
    """

    block: int | None = integer(None)
    threshold: float | None = number(None, 0, 1)
    most: int = integer(32)
    name: ClassVar[str] = "pacer"
    layer: ClassVar[str | None] = "pre-verifier"
    kind: ClassVar[str | None] = "survival"

    @property
    def needs_costs(self) -> bool:
        return self.threshold is None

    def policy(self, parts: Parts) -> LengthPolicy:
        assert parts.pre_verifier is not None
        made = parts.pre_verifier, self.block, self.most, self.threshold
        return PacerStop(*made, lambda mode, rows: self.costs(parts, mode, rows))

    def costs(self, parts: Parts, mode: Mode, rows: int) -> Costs | None:
        """Return the table for `rows` rows of a mode that stop together."""
        return parts.costs


def best_threshold(
    traces: Array, block: int, costs: Costs, rows: int = 1, evidence: Array | None = None
) -> tuple[float, float]:
    """Return the threshold with which decoding is fastest by a table of costs, and its tokens per ms.

    `traces` [N, G] are a calibrated layer's survival of the tokens of drafts. A draft that stops after n of them is
    worth 1 + the sum of their survival tokens. It takes n draft forwards, n / block calls of the layer and a forward
    of the target on n + 1 tokens. The threshold with the largest ratio of the sums over all drafts solves the stopping
    problem among rules of this form. The rule goes by `evidence` [N, G], if given, in their place.

    A step of several `rows` takes as long as its longest draft. So they stop together, by the mean of their scores;
    here drafts are put together at random.
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
    """What is known of a sequence.

    Attributes:
        echo: its text.
        runs: lengths of its last runs of accepted tokens, the present one first.
        law: entropy and top probability of the target's distribution that its last token was chosen from.
        length: of the sequence, when that token was the last one.
    """

    echo: Echo = field(default_factory=Echo)
    runs: list[float] = field(default_factory=lambda: [0.0, pre_verifier.USUAL, pre_verifier.USUAL])
    law: tuple[float, float] = (0.0, 0.0)  # UNKNOWN
    length: int = 0


class PacerStop(LengthPolicy):
    """The rule of `pacer`; arguments are its settings.

    Without a threshold it takes the best one for the drafts that the layer carries as a sample, greedy or sampled, by
    the table of costs and the number of rows (`best_threshold`); without costs 0.5. Without a block as well it takes
    the best of BLOCKS. If even so the layer's calls cost more than they bring, it goes by the product of the draft's
    own probabilities, token by token. Greedy rows then stop together; sampled rows stop as they would alone. No clock
    is read.
    """

    def __init__(
        self,
        layer: PreVerifier,
        block: int | None,
        most: int,
        threshold: float | None = None,
        costs: Callable[[Mode, int], Costs | None] = lambda mode, rows: None,
    ) -> None:
        """`costs` returns the table for a number of rows of a mode that stop together, if any."""
        self.layer, self.most = quick.quick(layer), most
        self.block, self.threshold, self.costs = block, threshold, costs
        inputs = layer.config.inputs
        self.wants_draft, self.echoing = "hidden" in inputs, "echoes" in inputs
        self.weighing = "entropy" in inputs or "top" in inputs
        self.past: dict[int, _Past] = {}
        self._settings: dict[tuple[Mode, int, bool], tuple[int, float, bool]] = {}

    def admit(self, seq: Sequence) -> None:
        self.past[seq.id] = _Past()

    def drop(self, seq: Sequence) -> None:
        self.past.pop(seq.id, None)

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        modes: list[Mode] = list(dict.fromkeys(seq.mode for seq in seqs))
        # Greedy rows without a draft have their part of the costs as well.
        together = rows - sum(not seq.greedy for seq in seqs)
        # Whether the draft model may draft it in calls of C.
        is_alone = len(seqs) == 1 and (seqs[0].sampler.is_argmax or seqs[0].sampler.distribution is not None)
        rules = {mode: self._rule(mode, together if mode == "greedy" else 1, is_alone) for mode in modes}
        return rules[modes[0]] if len(modes) == 1 else _ByMode(rules)

    def _rule(self, mode: Mode, count: int, is_alone: bool) -> StopRule:
        block, threshold, together = self.settings(mode, count, is_alone)
        if not block:
            return ProductRule(threshold, self.most, count if together else 1)
        return BlockRule(self, block, threshold, count if together else 1)

    def settings(self, mode: Mode, count: int, is_alone: bool) -> tuple[int, float, bool]:
        """Return the block (0: go by the draft's probabilities), the threshold, and whether `count` rows of a mode stop
        together. `is_alone`: no other row drafts."""
        step = 1 << max(0, count.bit_length() - 3)
        count = -(-count // step) * step  # so that few numbers are in use
        key = mode, count, is_alone
        if key not in self._settings:
            self._settings[key] = self._find(*key)
        return self._settings[key]

    def _find(self, mode: Mode, count: int, is_alone: bool) -> tuple[int, float, bool]:
        costs = self.costs(mode, count)
        if self.threshold is not None or costs is None:
            return self.block or BLOCK, self.threshold if self.threshold is not None else 0.5, False
        greedy = mode == "greedy"
        blocks = BLOCKS if self.block is None else (self.block,)
        costs = costs if greedy else costs.sampled
        if costs.chained and is_alone and not self.wants_draft:  # the draft says how probable its tokens are
            costs = replace(costs, policy=max(0.0, costs.policy - costs.glance), glance=0.0)
        else:
            costs = replace(costs, chained=0.0)
        known = self.layer.thresholds
        key = repr(costs), greedy, count, blocks, self.most
        if key not in known:
            traces, products = self.layer.traces["greedy" if greedy else "sampled"][..., : self.most]
            found = {block: best_threshold(traces, block, costs, count) for block in blocks}
            if len(blocks) > 1:
                glancing = replace(costs, policy=costs.glance)
                found[0] = best_threshold(traces, 1, glancing, count, products)
            block = max(found, key=lambda block: found[block][1])
            known[key] = block, found[block][0]
        return *known[key], greedy

    def observe(self, seqs: abc.Sequence[Sequence], drafts: list[Draft], verdicts: list[Verdict]) -> None:
        for seq, verdict in zip(seqs, verdicts, strict=True):
            past = self.past[seq.id]
            past.runs[0] += verdict.accepted
            if verdict.rejected:
                past.runs = [0.0, *past.runs[:2]]
            else:
                past.runs[0] += 1
        known = [(seq, each.scores) for seq, each in zip(seqs, verdicts, strict=True) if each.scores is not None]
        if self.weighing and known:
            laws = pre_verifier.law_of(torch.stack([scores.float() for _, scores in known])).tolist()
            for (seq, _), (entropy, top) in zip(known, laws, strict=True):
                self.past[seq.id].law, self.past[seq.id].length = (entropy, top), len(seq.tokens)

    def law(self, seq: Sequence) -> tuple[float, float]:
        """Return entropy and top probability of the distribution that a sequence's last token was chosen from: unknown
        after its prompt, and if it has grown unobserved, as in a guard's pause."""
        past = self.past[seq.id]
        return past.law if past.length == len(seq.tokens) else pre_verifier.UNKNOWN


class BlockRule(StopRule):
    """Pacer's rule for one draft. With `together` above 1 that many rows stop together, by the mean of their scores."""

    def __init__(self, policy: PacerStop, block: int, threshold: float, together: int) -> None:
        self.policy, self.block, self.threshold, self.together = policy, block, threshold, together
        self.states: list[DraftState] = []  # of this block
        self.ids: list[int] = []  # of the rows of `state`
        self.state: QuickState | None = None

    def min_more(self, depth: int) -> int:
        return min(self.block - depth % self.block, self.policy.most - depth)

    def bounds(self) -> Bounds | None:
        return None if self.policy.wants_draft else Bounds(self.min_more(0))

    def bounds_after(self, seq: Sequence, drafted: list[int], probabilities: list[float]) -> Bounds | None:
        if len(drafted) >= self.policy.most:
            return None
        output = self._output([seq], [drafted], [probabilities])
        return Bounds(self.min_more(len(drafted))) if self._judged(output)[0] else None

    def more(self, state: DraftState) -> list[bool]:
        self.states.append(state)
        if state.depth >= self.policy.most or state.depth % self.block:
            return [state.depth < self.policy.most] * len(state.tokens)
        return self._judged(self._ask(state))

    def _judged(self, output: Array) -> list[bool]:
        """Return whether rows draft on, by the layer's output [R, b], logits for their last blocks."""
        last, least = output[:, -1], self.threshold
        if self.together > 1:
            survival = 1 / (1 + np.exp(-last))
            return [bool(survival.sum() >= least * self.together)] * len(last)
        least = log(least / (1 - least)) if 0 < least < 1 else inf if least else -inf
        found: list[bool] = (last >= least).tolist()
        return found

    def _ask(self, state: DraftState) -> Array:
        """Return the layer's output [R, b] for the last block of the rows that have come here."""
        ids, new = {seq.id for seq in state.seqs}, len(self.states)
        parts = [each.part([row for row, seq in enumerate(each.seqs) if seq.id in ids]) for each in self.states]
        self.states = []
        tokens = torch.tensor([drafted[-new:] for drafted in state.tokens], device=state.scores.device)
        scores = parts[0].scores[:, None] if new == 1 else torch.stack([part.scores for part in parts], 1)
        hidden = torch.stack([part.hidden for part in parts], 1) if self.policy.wants_draft else None  # type: ignore[misc]
        q = probs.probabilities_of(scores, tokens).tolist()
        return self._output(state.seqs, state.tokens, q, hidden)

    def _output(
        self,
        seqs: abc.Sequence[Sequence],
        drafted: list[list[int]],
        q: list[list[float]],
        hidden: Tensor | None = None,
    ) -> Array:
        """Return the layer's output [R, b] for the last b tokens, whose probabilities are `q`."""
        policy, ids, new = self.policy, [seq.id for seq in seqs], len(q[0])
        if self.state is None:
            self.state = self._begin(seqs)
        elif ids != self.ids:
            self.state = self.state.select([self.ids.index(id) for id in ids])
        self.ids = ids
        output, self.state = policy.layer.step(
            self.state,
            [[log(max(each, pre_verifier.LEAST)) for each in row] for row in q],
            [self._echo(*row, new) for row in zip(seqs, drafted, strict=True)] if policy.echoing else None,
            hidden,
        )
        return output

    def _begin(self, seqs: abc.Sequence[Sequence]) -> QuickState:
        law = [self.policy.law(seq) for seq in seqs] if self.policy.weighing else None
        return self.policy.layer.begin([self.policy.past[seq.id].runs for seq in seqs], law)

    def _echo(self, seq: Sequence, drafted: list[int], new: int) -> list[tuple[int, ...]]:
        text, echo, reach = seq.tokens, self.policy.past[seq.id].echo, max(SIZES)
        echo.read(text)
        return echo.answers([*text[-reach:], *drafted[:-new]][-reach:], drafted[-new:])


class _ByMode(StopRule):
    """Rows of several modes, each mode with a rule of its own."""

    def __init__(self, rules: dict[Mode, StopRule]) -> None:
        self.rules = rules

    def more(self, state: DraftState) -> list[bool]:
        going = [False] * len(state.tokens)
        for mode, rule in self.rules.items():
            rows = [row for row, seq in enumerate(state.seqs) if seq.mode == mode]
            for row, on in zip(rows, rule.more(state.part(rows)) if rows else (), strict=True):
                going[row] = on
        return going

    def min_more(self, depth: int) -> int:
        return min(rule.min_more(depth) for rule in self.rules.values())
