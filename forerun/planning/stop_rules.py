"""Stop rules: where the draft of a chain ends."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from forerun.planning.cost_model import CostSource, mean_context
from forerun.planning.forecast import StepSituation
from forerun.planning.length import LengthChooser
from forerun.sampling.probabilities import last_probabilities

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.sequence import Sequence
    from forerun.engine.step import RowOutcome


@dataclass(frozen=True)
class DraftState:
    """What a stop rule sees after a drafted token: the rows that still draft, all at one depth.

    Attributes:
        seqs: the sequences of these rows.
        tokens: [R][depth] their drafted tokens so far.
        scores: [R, V] the processed scores that gave the last tokens.
    """

    seqs: abc.Sequence[Sequence]
    tokens: list[list[int]]
    scores: Tensor

    @property
    def depth(self) -> int:
        """The number of drafted tokens so far."""
        return len(self.tokens[0])

    def part(self, rows: list[int]) -> DraftState:
        """Return the state of these rows alone."""
        if len(rows) == len(self.tokens):
            return self
        tokens = [self.tokens[row] for row in rows]
        return DraftState([self.seqs[row] for row in rows], tokens, self.scores[rows])


@dataclass(frozen=True)
class Bounds:
    """A stop rule in numbers.

    Attributes:
        max_tokens: the most tokens of a draft.
        min_probability: a token that is less probable is the last one.
        min_product: a token that brings the product of all probabilities below it is the last one.
        floor: a greedy draft leaves out its last token if the product is below it.
    """

    max_tokens: int
    min_probability: float = 0.0
    min_product: float = 0.0
    floor: float = 0.0


class StopRule(Protocol):
    """End one draft. The rule is called after every drafted token.

    It may stop after a token, but must not discard a sampled token that it has looked at, because
    that would change the distribution from which the token was sampled.
    """

    def more(self, state: DraftState) -> list[bool]:
        """Return whether each row drafts on. Rows that have stopped are left out of later calls."""
        raise NotImplementedError

    def drops(self, seq: Sequence, product: float | None = None) -> bool:
        """Return whether a greedy draft leaves out its last token.

        It does so where verifying that token costs more time than it is expected to save.

        Args:
            seq: the sequence.
            product: of the probabilities of a fused draft; None: of those that the rule has seen.
        """
        return False

    def bounds(self) -> Bounds | None:
        """Return the rule for the first tokens of a row as numbers; None if it has no such form."""
        return None

    def bounds_after(
        self, seq: Sequence, drafted: list[int], probabilities: list[float]
    ) -> Bounds | None:
        """Return the bounds of the next tokens of a row; None to stop.

        Args:
            seq: the sequence.
            drafted: all drafted tokens so far.
            probabilities: of the tokens within the last bounds.
        """
        return None


class LengthPolicy(Protocol):
    """Keep the state of each sequence between drafts, and make the stop rule of each draft."""

    def admit(self, seq: Sequence) -> None:
        """Add a sequence."""
        return

    def drop(self, seq: Sequence) -> None:
        """Remove a sequence, if it was added."""
        return

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        """Return the stop rule of a draft.

        Args:
            seqs: the sequences that draft, a token of each in one forward.
            rows: the number of rows of the target's forward.
        """
        raise NotImplementedError

    def observe(self, outcomes: abc.Sequence[RowOutcome]) -> None:
        """Record the outcomes of a step, whose drafts are this policy's."""
        return


class Fixed(LengthPolicy, StopRule):
    """A length policy with one stop rule for every draft: itself."""

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        """Return this rule."""
        return self


class Bounded(LengthPolicy):
    """A length policy with the same bounds for every draft."""

    def __init__(self, limits: Bounds) -> None:
        self.limits = limits

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        """Return a rule by the bounds."""
        return Within(self.limits)


class FixedLength(Bounded):
    """Exactly `gamma` tokens (Leviathan et al., arXiv 2211.17192)."""

    def __init__(self, gamma: int) -> None:
        super().__init__(Bounds(gamma))


class BestLength(LengthPolicy):
    """Draft the length with the least expected ms per token (`LengthChooser`).

    It follows from the costs at the step's context, the number of rows, and how often tokens of
    each place were accepted lately.
    """

    def __init__(self, costs: CostSource) -> None:
        self.chooser = LengthChooser(costs)

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        """Return a rule that ends all drafts of the step at the best length."""
        greedy = all(seq.greedy for seq in seqs)
        return Within(Bounds(self.chooser.length(StepSituation(rows, mean_context(seqs), greedy))))

    def observe(self, outcomes: abc.Sequence[RowOutcome]) -> None:
        """Record how many tokens were tested and accepted."""
        for outcome in outcomes:
            verdict = outcome.verdict
            self.chooser.record(outcome.sequence.greedy, verdict.tested, verdict.accepted)


class Within(StopRule):
    """End one draft by bounds."""

    def __init__(self, limits: Bounds, shared_rows: int = 1) -> None:
        """Begin a draft.

        Args:
            limits: the bounds.
            shared_rows: how many rows stop together, by the mean of their products. Rows that have
                ended count as 0.
        """
        self.limits = limits
        self.shared_rows = shared_rows
        self.products: dict[int, float] = {}

    def bounds(self) -> Bounds:
        """Return the bounds for the only row that drafts of those that stop together."""
        return replace(self.limits, min_product=self.limits.min_product * self.shared_rows)

    def drops(self, seq: Sequence, product: float | None = None) -> bool:
        """Return whether the product is below `floor`."""
        if product is None:
            product = self.products.get(seq.id, 1.0)
        return product < self.limits.floor

    def more(self, state: DraftState) -> list[bool]:
        """Return whether each row is within the bounds."""
        limits = self.limits
        fits = state.depth < limits.max_tokens
        # Probabilities are read only where they matter, because that takes time.
        if not (fits or limits.floor):
            return [fits] * len(state.tokens)
        if not (limits.min_probability or limits.min_product or limits.floor):
            return [fits] * len(state.tokens)
        last = last_probabilities(state.scores, state.tokens)
        products: dict[int, float] = {}
        for seq, probability in zip(state.seqs, last, strict=True):
            products[seq.id] = self.products.get(seq.id, 1.0) * probability
        self.products = products
        if self.shared_rows > 1:
            is_sure = sum(products.values()) >= limits.min_product * self.shared_rows
            return [fits and is_sure] * len(products)
        return [
            fits and probability >= limits.min_probability and product >= limits.min_product
            for probability, product in zip(last, products.values(), strict=True)
        ]
