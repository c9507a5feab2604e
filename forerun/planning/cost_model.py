"""What forwards cost, for length rules."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.engine.sequence import Sequence

STEP = 256  # tokens of context by which tables are made


@dataclass(frozen=True)
class Costs:
    """A table of costs in ms on this machine (`forerun.backends.costs`). A batch costs as much as one row with all of
    its new tokens.

    The longer a text is, the more attention costs. `at` returns the table for a step's context, by the
    table `far` of a long one.
    """

    target: dict[int, float]  # {new tokens of a forward: ms}, at least one entry
    draft: dict[int, float]  # likewise; empty without a draft
    policy: float = 0.0  # of a call of the length policy's layer, if any
    glance: float = 0.0  # of reading the draft's probability of a token
    drawing: float = 0.0  # that sampling adds to a drafted token
    judging: float = 0.0  # that sampling adds to each node of a target forward
    chained: float = 0.0  # of a token in a fused draft; 0 without these
    chained_sampled: float = 0.0  # likewise in sampling
    head: dict[int, float] = field(
        default_factory=dict
    )  # {rows: ms of a head's next state and its logits}
    context: int = 0  # tokens of the row before the new ones
    far: Costs | None = None  # after more tokens; None if that was not measured

    @cached_property
    def sampled(self) -> Costs:
        """Return the table with the costs of sampling added."""
        target = {tokens: ms + self.judging * tokens for tokens, ms in self.target.items()}
        draft = {rows: ms + self.drawing * rows for rows, ms in self.draft.items()}
        far = self.far.sampled if self.far is not None else None
        return replace(self, target=target, draft=draft, chained=self.chained_sampled, far=far)

    def at(self, context: float, rows: int = 1) -> Costs:
        """Return the table for steps of N rows after so many tokens, the mean of the rows.

        What attention takes grows with each row's own context, and less with a row's second new token
        than with the first of another row. Without `far`, this table is returned.
        """
        if self.far is None:
            return self
        key = rounded(max(context, self.context)), rows
        if key not in self._known:
            self._known[key] = self._between(self.far, *key)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, int], Costs]:
        return {}  # by rounded contexts and rows

    def _between(self, far: Costs, context: int, rows: int) -> Costs:
        share = max(0, context - self.context) / (far.context - self.context)
        widened = {2 * rows: self.verify(2 * rows)} | self.target  # a line needs two entries

        def longer(near: dict[int, float], long: dict[int, float]) -> dict[int, float]:
            if not near or not long:
                return near
            found = {}
            for tokens in sorted({rows, *near}):
                parts = min(rows, tokens)  # rows that share these tokens evenly
                each = interpolated(long, tokens / parts) - interpolated(near, tokens / parts)
                found[tokens] = interpolated(near, tokens) + share * parts * max(0.0, each)
            return found

        def verified(table: dict[int, float]) -> dict[int, float]:
            """Leave out forwards of fewer tokens than rows, which there are none of."""
            return convex({tokens: ms for tokens, ms in table.items() if tokens >= rows})

        def single(near: float, long: float) -> float:
            return near + share * max(0.0, long - near) if near and long else near

        return replace(
            self,
            target=verified(longer(widened, far.target)),
            draft=longer(self.draft, far.draft),
            chained=single(self.chained, far.chained),
            chained_sampled=single(self.chained_sampled, far.chained_sampled),
            head=longer(self.head, far.head),
            context=context,
            far=None,
        )

    def verify(self, tokens: float) -> float:
        """Return ms of a target forward of N tokens."""
        return interpolated(self.target, tokens)

    def drafting(self, rows: int) -> float:
        """Return ms of drafting one token for each of N rows."""
        if rows == 1 and self.chained:
            return self.chained
        return interpolated(self.draft, rows)

    def steps(self, rows: int, most: int) -> list[float]:
        """Return ms of whole steps whose rows draft 0, 1, ... `most` tokens each."""
        return [
            count * self.drafting(rows) + self.verify(rows * (count + 1))
            for count in range(most + 1)
        ]

    def reading(self, tokens: int, by_head: bool = False) -> float:
        """Return ms in which the draft model, or the head, runs that many tokens of a prompt."""
        table = self.head if by_head else self.draft
        return tokens * table[max(table)] / max(table)

    def marginal(self, rows: int) -> float:
        """Return the probability from which a drafted token is worth its place in a target forward of N rows."""
        return self.verify(2 * rows) / self.verify(rows) - 1

    def heading(self, rows: int) -> float:
        """Return ms of a head's next state for each of N rows."""
        return interpolated(self.head, rows)


def costs_of(found: dict[str, Any]) -> Costs:
    """Return costs from JSON. Raises ValueError, KeyError, TypeError or AttributeError for anything else."""
    found = dict(found)
    context, far = int(found.pop("context", 0)), found.pop("far", None)
    longer = costs_of(far) if far is not None else None
    if longer is not None and longer.context <= context:
        raise ValueError(
            f"costs of a long context of {longer.context} tokens must be of more than {context}"
        )
    tables = {
        part: {int(n): float(ms) for n, ms in found[part].items()}
        for part in ("target", "draft", "head")
    }
    if not tables["target"] or not all(
        0 <= ms < inf for table in tables.values() for ms in table.values()
    ):
        raise ValueError(
            "costs must map numbers of tokens to milliseconds, with entries for the target"
        )
    if not all(tables["target"].values()):
        raise ValueError("costs of the target must be above 0")
    single: dict[str, Any] = {part: float(ms) for part, ms in found.items() if part not in tables}
    return Costs(**single | tables, context=context, far=longer)


def mean_context(seqs: Several[Sequence]) -> float:
    """Return the mean number of tokens of some sequences, at least one."""
    return sum(len(seq.tokens) for seq in seqs) / len(seqs)


def rounded(context: float) -> int:
    """Return a context to the next multiple of STEP, so that few occur."""
    return round(context / STEP) * STEP


def interpolated(table: dict[int, float], at: float) -> float:
    """Return a table's value by linear interpolation. Beyond the last entry the last line goes on, but never falls, as
    noise may suggest."""
    counts = sorted(table)
    if len(counts) == 1:
        return table[counts[0]]
    right = min(max(bisect_left(counts, at), 1), len(counts) - 1)
    low, high = counts[right - 1], counts[right]
    slope = max(0.0, _slope(table, low, high))
    if at > high:
        return table[high] + slope * (at - high)
    return table[low] + slope * (max(at, low) - low)


def convex(table: dict[int, float]) -> dict[int, float]:
    """Return the largest table below this one that never falls and whose slope never falls. A disturbance makes single
    forwards slower, and would hide where more tokens begin to cost."""
    least = {at: min(ms for count, ms in table.items() if count >= at) for at in sorted(table)}
    kept: list[int] = []
    for at in least:
        while len(kept) > 1 and _slope(least, kept[-2], kept[-1]) >= _slope(least, kept[-1], at):
            kept.pop()
        kept.append(at)
    return {at: interpolated({count: least[count] for count in kept}, at) for at in table}


def _slope(table: dict[int, float], low: int, high: int) -> float:
    return (table[high] - table[low]) / (high - low)
