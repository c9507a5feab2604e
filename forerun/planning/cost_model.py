"""What forwards cost on one machine: the table that everything in `forerun.planning` asks."""

from __future__ import annotations

from bisect import bisect_left
from collections import abc
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from forerun.engine.sequence import Sequence

CONTEXT_STEP = 256  # tables are made for contexts that are multiples of it, in tokens

Table = dict[int, float]  # {new tokens or rows of a forward: ms}
Forwards = Literal["draft", "head"]  # what a drafter runs, by its table in `Costs`


class CostSource(Protocol):
    """What planners ask for the table of costs, each time that they need it."""

    @property
    def table(self) -> Costs:
        """The table as it is known at present. It is another object after each change."""
        raise NotImplementedError


@dataclass(frozen=True)
class Costs(CostSource):
    """A table of costs in ms on one machine (`forerun.backends.costs` measures it).

    A batch costs as much as one row with all of its new tokens.

    Attention takes longer after a longer text. `at` returns the table for a step's context: it lies
    on the line between this table and `far`, the table after a long text.

    Attributes:
        target: {new tokens of a target forward: ms}, with at least one entry.
        draft: the same of the draft model; empty without one.
        policy: a call of the length policy's trained layer; 0 without one.
        read_prob_ms: reading the draft's probability of a token.
        sample_ms: what sampling adds to a drafted token.
        verify_sample_ms: what sampling adds to each node of a target forward.
        chained: a token of a fused draft; 0 if the draft model has no fused drafts.
        chained_sampled: the same with sampling.
        head: {rows: ms of a head's next state and its logits}; empty without a head.
        context: tokens of the row before the new ones.
        far: the table after a longer text; None if that was not measured.
        has_experts: whether the target has experts. Further tokens may add less than those before
            them there, because they share experts.
    """

    target: Table
    draft: Table
    policy: float = 0.0
    read_prob_ms: float = 0.0
    sample_ms: float = 0.0
    verify_sample_ms: float = 0.0
    chained: float = 0.0
    chained_sampled: float = 0.0
    head: Table = field(default_factory=dict)
    context: int = 0
    far: Costs | None = None
    has_experts: bool = False

    @property
    def table(self) -> Costs:
        """Itself: a measured table does not change (`CorrectedCosts`)."""
        return self

    @cached_property
    def sampled(self) -> Costs:
        """The table with the costs of sampling added."""
        target = {tokens: ms + self.verify_sample_ms * tokens for tokens, ms in self.target.items()}
        draft = {rows: ms + self.sample_ms * rows for rows, ms in self.draft.items()}
        far = self.far.sampled if self.far is not None else None
        return replace(self, target=target, draft=draft, chained=self.chained_sampled, far=far)

    @cached_property
    def _tables(self) -> dict[tuple[int, int], Costs]:
        """The tables that `at` has made, by rounded context and rows."""
        return {}

    @cached_property
    def _steps(self) -> dict[tuple[int, int], tuple[float, ...]]:
        """The answers of `steps`, by its arguments."""
        return {}

    def at(self, context: float, rows: int = 1) -> Costs:
        """Return the table for steps of `rows` rows with `context` tokens each on average.

        What attention adds grows with each row's own context. A row's second new token adds less
        than the first token of another row. Without `far`, this table is returned.
        """
        if self.far is None:
            return self
        key = rounded(max(context, self.context)), rows
        if key not in self._tables:
            self._tables[key] = self._between(self.far, *key)
        return self._tables[key]

    def _between(self, far: Costs, context: int, rows: int) -> Costs:
        share = max(0, context - self.context) / (far.context - self.context)
        # Two entries at least, because one makes no line.
        target = {2 * rows: self.verify(2 * rows)} | self.target
        verified = _table_between(target, far.target, share, rows)
        # No forward has fewer new tokens than rows.
        possible = {tokens: ms for tokens, ms in verified.items() if tokens >= rows}
        return replace(
            self,
            target=smooth(possible, self.has_experts),
            draft=_table_between(self.draft, far.draft, share, rows),
            chained=_value_between(self.chained, far.chained, share),
            chained_sampled=_value_between(self.chained_sampled, far.chained_sampled, share),
            head=_table_between(self.head, far.head, share, rows),
            context=context,
            far=None,
        )

    def verify(self, tokens: float) -> float:
        """Return the ms of a target forward with `tokens` new tokens."""
        return interpolated(self.target, tokens)

    def drafting(self, rows: int) -> float:
        """Return the ms of drafting one token for each of the rows."""
        if rows == 1 and self.chained:
            return self.chained
        return interpolated(self.draft, rows)

    def head_ms(self, rows: int) -> float:
        """Return the ms of a head's next state for each of the rows."""
        return interpolated(self.head, rows)

    def steps(self, rows: int, most: int) -> tuple[float, ...]:
        """Return the ms of whole steps whose rows draft 0, 1, ... `most` tokens each."""
        key = rows, most
        if key not in self._steps:
            self._steps[key] = tuple(
                count * self.drafting(rows) + self.verify(rows * (count + 1))
                for count in range(most + 1)
            )
        return self._steps[key]

    def reading(self, tokens: int, by_head: bool = False) -> float:
        """Return the ms in which the draft model or the head reads `tokens` tokens of a prompt."""
        table = self.head if by_head else self.draft
        return tokens * table[max(table)] / max(table)

    def marginal(self, rows: int) -> float:
        """Return the cost of a further token per row, relative to a target forward of the rows.

        It is the acceptance probability above which verifying a drafted token gains time.
        """
        return self.verify(2 * rows) / self.verify(rows) - 1


# Files of costs that were written before 28 November 2026 have these names.
EARLIER_NAMES = {
    "glance": "read_prob_ms",
    "drawing": "sample_ms",
    "judging": "verify_sample_ms",
}


def costs_of(data: abc.Mapping[str, Any]) -> Costs:
    """Return the costs that JSON data hold.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the data are no table of costs.
    """
    values = {EARLIER_NAMES.get(name, name): value for name, value in data.items()}
    context = int(values.pop("context", 0))
    has_experts = bool(values.pop("has_experts", False))
    far_data = values.pop("far", None)
    far = costs_of(far_data) if far_data is not None else None
    if far is not None and far.context <= context:
        raise ValueError(
            f"the costs after a longer text are for {far.context} tokens of context, "
            f"but this must be more than {context}"
        )
    tables: dict[str, Table] = {}
    for part in ("target", "draft", "head"):
        tables[part] = {int(tokens): float(ms) for tokens, ms in values.pop(part).items()}
    every_ms = [ms for table in tables.values() for ms in table.values()]
    if not tables["target"] or not all(0 <= ms < inf for ms in every_ms):
        raise ValueError(
            "costs must map numbers of tokens to milliseconds, with entries for the target"
        )
    if not all(tables["target"].values()):
        raise ValueError("the costs of the target must be above 0 ms")
    fields: dict[str, Any] = {part: float(ms) for part, ms in values.items()}
    fields |= tables
    return Costs(**fields, context=context, far=far, has_experts=has_experts)


def mean_context(seqs: abc.Sequence[Sequence]) -> float:
    """Return the mean number of tokens of sequences, of which there is at least one."""
    return sum(len(seq.tokens) for seq in seqs) / len(seqs)


def rounded(context: float) -> int:
    """Return the nearest multiple of CONTEXT_STEP, so that few tables are made."""
    return round(context / CONTEXT_STEP) * CONTEXT_STEP


def interpolated(table: Table, at: float) -> float:
    """Return a table's value by linear interpolation.

    Beyond the last entry its last line goes on. No line falls, because only noise can make more
    tokens cheaper.
    """
    counts = sorted(table)
    if len(counts) == 1:
        return table[counts[0]]
    right = min(max(bisect_left(counts, at), 1), len(counts) - 1)
    low, high = counts[right - 1], counts[right]
    slope = max(0.0, _slope(table, low, high))
    if at > high:
        return table[high] + slope * (at - high)
    return table[low] + slope * (max(at, low) - low)


def smooth(table: Table, has_experts: bool) -> Table:
    """Return a measured table of forwards without what disturbed it.

    It is made convex. With experts it only never falls: it would lie far too low if it were convex.
    """
    return rising(table) if has_experts else convex(table)


def rising(table: Table) -> Table:
    """Return the largest table below this one that never falls."""
    lowest: Table = {}
    least = inf
    for at in sorted(table, reverse=True):
        least = min(least, table[at])
        lowest[at] = least
    return {at: lowest[at] for at in table}


def convex(table: Table) -> Table:
    """Return the largest table below this one that never falls and whose slope never falls.

    A disturbance makes single forwards slower. It would hide from which number of tokens on more
    tokens take more time.
    """
    lowest = rising(dict(sorted(table.items())))
    corners: list[int] = []
    for at in lowest:
        while len(corners) > 1 and _slope(lowest, *corners[-2:]) >= _slope(lowest, corners[-1], at):
            corners.pop()
        corners.append(at)
    lines = {count: lowest[count] for count in corners}
    return {at: interpolated(lines, at) for at in table}


def _slope(table: Table, low: int, high: int) -> float:
    return (table[high] - table[low]) / (high - low)


def _value_between(near: float, far: float, share: float) -> float:
    """Return `near` plus a share of what a longer text adds. 0 stands for a missing value."""
    return near + share * max(0.0, far - near) if near and far else near


def _table_between(near: Table, far: Table, share: float, rows: int) -> Table:
    """Return `near` plus a share of what a longer text adds, for forwards of `rows` rows.

    What is added counts once for each row that has a new token: at most `rows` rows share the new
    tokens of a forward evenly.
    """
    if not near or not far:
        return near
    table = {}
    for tokens in sorted({rows, *near}):
        sharing = min(rows, tokens)
        of_a_row = tokens / sharing
        added = interpolated(far, of_a_row) - interpolated(near, of_a_row)
        table[tokens] = interpolated(near, tokens) + share * sharing * max(0.0, added)
    return table
