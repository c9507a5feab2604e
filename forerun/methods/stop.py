"""Stop rules, which end the draft of a chain."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Protocol

from forerun.planning.cost_model import mean_context, rounded
from forerun.sampling import probabilities

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome
    from forerun.planning.cost_model import Costs

MOST = 16  # tokens of a draft whose length follows from costs
PRIOR, WEIGHT, KEPT = 0.7, 4.0, 0.98  # of `BestLength`
EXPECTED = 0.75  # how often a token is accepted, as long as that is not known


@dataclass(frozen=True)
class DraftState:
    """The input of a stop rule after a drafted token: the sequences that still draft, all at one depth.

    Attributes:
        tokens: [R][depth] their drafted tokens so far.
        scores: [R, V] processed scores that gave the last tokens.
    """

    seqs: abc.Sequence[Sequence]
    tokens: list[list[int]]
    scores: Tensor

    @property
    def depth(self) -> int:
        return len(self.tokens[0])

    def part(self, rows: list[int]) -> DraftState:
        """Return the state of these rows alone."""
        if len(rows) == len(self.tokens):
            return self
        tokens = [self.tokens[row] for row in rows]
        return DraftState([self.seqs[row] for row in rows], tokens, self.scores[rows])


@dataclass(frozen=True)
class Bounds:
    """A stop rule in numbers: a draft of at most `most` tokens, ended by a token less probable than `least`, or by one
    that brings the product of all probabilities below `product`. A greedy draft leaves the last one out if that is
    below `floor`."""

    most: int
    least: float = 0.0
    product: float = 0.0
    floor: float = 0.0


class StopRule(Protocol):
    """End one draft. The rule is called after every drafted token.

    It may stop after a token, but must not discard a sampled token that it has seen: that would change the distribution
    that the token was sampled from.
    """

    def more(self, state: DraftState) -> list[bool]:
        """Return whether each row drafts on. Rows that have stopped are left out of later calls."""
        raise NotImplementedError

    def drops(self, seq: Sequence, product: float | None = None) -> bool:
        """Return whether a greedy draft leaves out its last token, as the target's forward of it would not pay.
        `product`: of the probabilities of a fused draft; None: of those that the rule has seen."""
        return False

    def bounds(self) -> Bounds | None:
        """Return the rule for the first tokens of one row as numbers, or None if that is not possible."""
        return None

    def bounds_after(
        self, seq: Sequence, drafted: list[int], probabilities: list[float]
    ) -> Bounds | None:
        """Return the bounds of the next tokens, given the probabilities of those within the last bounds; None to
        stop."""
        return None


class LengthPolicy(Protocol):
    """Keep the state of each sequence between drafts, by its id; `begin` makes the rule of one draft."""

    def admit(self, seq: Sequence) -> None:
        """Add a sequence."""
        return

    def drop(self, seq: Sequence) -> None:
        """Remove a sequence, if it was added."""
        return

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        """Return the rule of a draft for these sequences, one forward a token. `rows`: number in the target's
        forward."""
        raise NotImplementedError

    def observe(self, outcomes: abc.Sequence[RowOutcome]) -> None:
        """Record the outcomes of a step, whose drafts are this policy's."""
        return


class Fixed(LengthPolicy, StopRule):
    """A length policy with one stop rule for every draft: itself."""

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        return self


class Bounded(LengthPolicy):
    """A length policy with the same bounds for every draft."""

    def __init__(self, limits: Bounds) -> None:
        self.limits = limits

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        return Within(self.limits)


class FixedLength(Bounded):
    """Exactly `gamma` tokens (Leviathan et al., arXiv 2211.17192)."""

    def __init__(self, gamma: int) -> None:
        super().__init__(Bounds(gamma))


class Within(StopRule):
    """End one draft by bounds. With `together` above 1, `together` rows stop together, by their mean product, in which
    ended rows count as 0."""

    def __init__(self, limits: Bounds, together: int = 1) -> None:
        self.limits, self.together = limits, together
        self.products: dict[int, float] = {}

    def bounds(self) -> Bounds:
        return replace(self.limits, product=self.limits.product * self.together)

    def drops(self, seq: Sequence, product: float | None = None) -> bool:
        return (self.products.get(seq.id, 1.0) if product is None else product) < self.limits.floor

    def more(self, state: DraftState) -> list[bool]:
        fits, floor = state.depth < self.limits.most, self.limits.floor
        if not (fits or floor) or not (self.limits.least or self.limits.product or floor):
            return [fits] * len(state.tokens)
        last = probabilities.last_probabilities(state.scores, state.tokens)
        found = [
            self.products.get(seq.id, 1.0) * each
            for seq, each in zip(state.seqs, last, strict=True)
        ]
        self.products = {seq.id: product for seq, product in zip(state.seqs, found, strict=True)}
        least, product = self.limits.least, self.limits.product
        if self.together > 1:
            return [fits and sum(found) >= product * self.together] * len(found)
        return [
            fits and each >= least and whole >= product
            for each, whole in zip(last, found, strict=True)
        ]


class BestLength(LengthPolicy):
    """Draft the length with the least expected ms a token, by the table of costs at the context, the number of rows,
    and how often tokens of each place were accepted lately, greedily and in sampling. Ours.

    An estimate is a mean in which each draft counts `KEPT` times as much as the one after it, and what is expected as
    `WEIGHT` drafts: of the first place `PRIOR`, of another the estimate of the place before it.
    """

    def __init__(self, costs: Costs) -> None:

        def prices(greedy: bool, rows: int, context: int) -> list[float]:
            return (costs if greedy else costs.sampled).at(context, rows).steps(rows, MOST)

        self._prices = lru_cache(prices)
        # [2, MOST] by greediness: drafts in which a place was tested, and in which its token was accepted
        self.seen = {greedy: [[0.0] * MOST, [0.0] * MOST] for greedy in (True, False)}

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        greedy = all(seq.greedy for seq in seqs)
        prices = self._prices(greedy, rows, rounded(mean_context(seqs)))
        return Within(Bounds(max(1, best_length(prices, self.estimates(greedy)))))

    def estimates(self, greedy: bool) -> list[float]:
        """Return how probable it is that a token of each place is accepted if those before it are."""
        found, expected = [], PRIOR
        for tested, accepted in zip(*self.seen[greedy], strict=True):
            expected = (accepted + WEIGHT * expected) / (tested + WEIGHT)
            found.append(expected)
        return found

    def observe(self, outcomes: abc.Sequence[RowOutcome]) -> None:
        for outcome in outcomes:
            verdict = outcome.verdict
            tested, accepted = self.seen[outcome.sequence.greedy]
            for place in range(min(verdict.tested, MOST)):
                tested[place] = KEPT * tested[place] + 1
                accepted[place] = KEPT * accepted[place] + (place < verdict.accepted)


def token_costs(prices: abc.Sequence[float], probabilities: abc.Sequence[float]) -> list[float]:
    """Return the expected ms a token, by the number of drafted tokens from 0 to one for each of `probabilities`: that a
    token of this place is accepted if those before it are. `prices`: `Costs.steps`."""
    tokens = accumulate(accumulate(probabilities, mul), initial=1.0)
    return [ms / count for ms, count in zip(prices, tokens, strict=False)]


def best_length(prices: abc.Sequence[float], probabilities: abc.Sequence[float]) -> int:
    """Return the number of drafted tokens with the least ms a token; arguments are those of `token_costs`."""
    found = token_costs(prices, probabilities)
    return found.index(min(found))


def saving(costs: Costs, rows: int) -> float:
    """Return ms that a token of each row takes less than in a plain step with the best expected length, at least 0."""
    prices = costs.steps(rows, MOST)
    return prices[0] - min(token_costs(prices, [EXPECTED] * MOST))
