"""The table of costs, corrected by what every step takes. How it is corrected is ours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import exp, inf, log
from typing import Literal

from forerun.planning.cost_model import Costs, CostSource, Table

TableName = Literal["target", "draft", "head"]  # of `Costs`
Part = tuple[TableName, int]  # a table and a size: new tokens or rows of a forward

# A part of a step counts as if it had taken 1.5 times as long as expected at most, or 1 / 1.5 at
# least, because one slow step proves nothing.
LARGEST_SURPRISE = log(1.5)
LOAD_RATE = 0.2  # the weight of a step's surprise in the load
FACTOR_RATE = 0.05  # in a factor: one step changes it by 2 % at most
# So many larger surprises of a part in a row, to one side, show that its factor is wrong. Then it
# is corrected at this rate, by all of the surprise.
WRONG_AFTER = 4
WRONG_RATE = 0.3
# Another part proves this only by one of so many last observations, because the load changes.
RECENT = 64
# The logarithm of a raised factor is e times smaller after so many observations of other parts,
# because a phase may have been slow, and sizes that look dear are not run again. Those that really
# are dear are tried for a few steps then.
FORGETTING = 2048
# The table is made anew when a factor has changed by this, so that planners can keep what they have
# computed from it.
CHANGE = log(1.05)


@dataclass(frozen=True)
class StepTime:
    """What a step took.

    Attributes:
        rows: of the step.
        context: the mean number of tokens of the rows.
        greedy: whether the rows decode greedily; None for a step of both modes.
        forwards: of the draft model or the head.
        forward_rows: the rows that they had; 0 if that is not known.
        by_head: whether they are the head's.
        draft_ms: the time until the drafts were made.
        nodes: new tokens of the target's forward.
        target_ms: the rest: the target's forward, with everything after it.
    """

    rows: int
    context: float
    greedy: bool | None
    forwards: int
    forward_rows: int
    by_head: bool
    draft_ms: float
    nodes: int = 0
    target_ms: float = 0.0


@dataclass(frozen=True)
class Surprise:
    """By how much a part of a step took longer than expected.

    Attributes:
        size: the logarithm of measured to expected time; negative if it took less.
        side: 1 if it took much longer, -1 if it took much less, else 0.
        number: of the observation, counted over all parts.
        first: the number of the first surprise of the part in a row to this side.
        in_a_row: the surprises of that row.
    """

    size: float
    side: int
    number: int
    first: int
    in_a_row: int


class CorrectedCosts(CostSource):
    """A measured table, with a factor for each of its entries that follows what steps take.

    A factor is a decaying mean of measured to expected time, by logarithms and clipped. It is that
    of one table (target, draft model or head) and one size (new tokens or rows). A size that no
    step has had takes the factor of the nearest one that a step had, because otherwise sizes that
    were never tried would look cheaper than those that were.

    What all parts take longer is the load of the machine. It is averaged apart and four times as
    fast, so that factors hardly take it up, because it changes no choice.

    A part that surprises again and again while another one does not is corrected faster, because
    each step by a table that is far off costs time.

    Factors above 1 of parts that steps no longer have return to 1 slowly, so that what has looked
    dear is tried again.

    Times depend on the machine, so lengths of drafts do too. Greedy and seeded output does not.
    """

    def __init__(self, measured: Costs) -> None:
        """Begin with the table as it was measured."""
        self.measured = measured
        tables = {"target": measured.target, "draft": measured.draft, "head": measured.head}
        self._tables: dict[str, Table] = tables
        self._load = 0.0  # a logarithm, as the factors
        self._factors: dict[Part, float] = {}
        self._surprises: dict[Part, Surprise] = {}  # the last one of each part
        self._observed = 0  # parts of steps
        self._applied: dict[Part, float] = {}
        self._table = measured

    @property
    def table(self) -> Costs:
        """The table as it is known at present. It is another object after each change."""
        return self._table

    def observe(self, step: StepTime) -> None:
        """Correct the table by a step. Steps of both modes are left out."""
        if step.greedy is None:
            return
        costs = self.measured if step.greedy else self.measured.sampled
        costs = costs.at(step.context, step.rows)
        self._correct("target", step.nodes, step.target_ms, costs.verify(step.nodes))
        rows = step.forward_rows
        if rows and step.by_head and costs.head:
            self._correct("head", rows, step.draft_ms, step.forwards * costs.head_ms(rows))
        elif rows and not step.by_head and costs.draft:
            self._correct("draft", rows, step.draft_ms, step.forwards * costs.drafting(rows))
        self._apply()

    def _correct(self, name: TableName, size: int, ms: float, expected_ms: float) -> None:
        """Correct the factor of a size by what a step took."""
        if not (0 < ms < inf and expected_ms > 0):
            return
        entry = _nearest(self._tables[name], size)
        self._forget((name, entry))
        factor = self._factor(name, entry)
        surprise = log(ms / expected_ms) - factor - self._load
        if self._is_wrong((name, entry), surprise):
            self._factors[name, entry] = factor + WRONG_RATE * surprise
            return
        surprise = min(max(surprise, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        self._load += LOAD_RATE * surprise
        self._factors[name, entry] = factor + FACTOR_RATE * surprise

    def _forget(self, observed: Part) -> None:
        """Let raised factors return to 1, and that of the observed part.

        That of a part which is observed alone is else as low as the load is high.
        """
        for part, factor in self._factors.items():
            if factor > 0 or part == observed:
                self._factors[part] = factor * exp(-1 / FORGETTING)

    def _is_wrong(self, part: Part, size: float) -> bool:
        """Record a surprise, and return whether it shows that the factor of its part is wrong.

        It does if another part was not surprised to the same side lately, and since the first of
        the row. Else it may be the load.
        """
        self._observed += 1
        side = 0
        if abs(size) > LARGEST_SURPRISE:
            side = 1 if size > 0 else -1
        last = self._surprises.get(part)
        begins = last is None or side == 0 or last.side != side
        surprise = Surprise(
            size=size,
            side=side,
            number=self._observed,
            first=self._observed if last is None or begins else last.first,
            in_a_row=1 if last is None or begins else last.in_a_row + 1,
        )
        self._surprises[part] = surprise
        if side == 0 or surprise.in_a_row < WRONG_AFTER:
            return False
        since = max(surprise.first, self._observed - RECENT)
        return any(
            other.number > since and side * other.size < LARGEST_SURPRISE / 2
            for other in self._surprises.values()
            if other is not surprise
        )

    def _factor(self, name: TableName, size: int) -> float:
        """Return the logarithm of the factor of a size, or of the nearest size that steps had."""
        sizes = [known for table, known in self._factors if table == name]
        return self._factors[name, _nearest(sizes, size)] if sizes else 0.0

    def _apply(self) -> None:
        """Make the table anew if a factor has changed enough."""
        for part, factor in self._factors.items():
            if abs(factor - self._applied.get(part, 0.0)) > CHANGE:
                self._applied = dict(self._factors)
                self._table = self._corrected(self.measured)
                return

    def _corrected(self, costs: Costs) -> Costs:
        of_one_row = exp(self._factor("draft", 1))
        return replace(
            costs,
            target=self._times("target", costs.target),
            draft=self._times("draft", costs.draft),
            chained=costs.chained * of_one_row,
            chained_sampled=costs.chained_sampled * of_one_row,
            head=self._times("head", costs.head),
            far=self._corrected(costs.far) if costs.far is not None else None,
        )

    def _times(self, name: TableName, table: Table) -> Table:
        return {size: exp(self._factor(name, size)) * ms for size, ms in table.items()}


def _nearest(sizes: Iterable[int], size: int) -> int:
    """Return the size that is nearest by its logarithm."""
    return min(sizes, key=lambda known: abs(log(known / size)))
