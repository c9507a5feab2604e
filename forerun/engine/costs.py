"""What forwards cost, for length rules and tuning."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from typing import Any


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one forward by the number of its new tokens, for one row (`forerun.backends.costs`). In a batch,
    rows count as that many more tokens."""

    target: dict[int, float]  # {new tokens: ms}, at least one entry
    draft: dict[int, float]  # likewise; empty without a draft
    policy: float = 0.0  # of one call of the length policy's layer, if it has one
    glance: float = 0.0  # of reading the draft's probability of its token
    drawing: float = 0.0  # that a draft's token takes longer in sampling
    judging: float = 0.0  # that a node of the target's forward takes longer in sampling
    chained: float = 0.0  # of a draft's token of one row if drafts are made in one call, else 0
    chained_sampled: float = 0.0  # likewise in sampling
    head: dict[int, float] = field(default_factory=dict)  # of a state of a head with its logits, by the number of rows

    @property
    def c(self) -> float:
        """Draft forward / target forward, of one token each."""
        return self.draft[min(self.draft)] / self.target[min(self.target)]

    @property
    def sampled(self) -> Costs:
        """The table of forwards whose tokens are sampled."""
        target = {tokens: ms + self.judging * tokens for tokens, ms in self.target.items()}
        draft = {rows: ms + self.drawing * rows for rows, ms in self.draft.items()}
        return replace(self, target=target, draft=draft, chained=self.chained_sampled)

    def verify(self, tokens: float) -> float:
        """Return ms of a target forward of that many tokens."""
        return interpolated(self.target, tokens)

    def drafting(self, rows: int) -> float:
        """Return ms of a draft's token for each of that many rows."""
        if rows == 1 and self.chained:
            return self.chained
        return interpolated(self.draft, rows)

    def steps(self, rows: int, most: int) -> list[float]:
        """Return ms of steps whose rows draft 0, 1, ... `most` tokens each, and verify them."""
        return [count * self.drafting(rows) + self.verify(rows * (count + 1)) for count in range(most + 1)]

    def saved(self, rows: int, most: int, chance: float) -> float:
        """Return ms that a token of each row takes less than in a plain step, with the best draft of at most `most`
        tokens that are each accepted with probability `chance`; 0 if none is faster."""
        prices = self.steps(rows, most)
        tokens = accumulate(chance**count for count in range(most + 1))
        return prices[0] - min(ms / count for ms, count in zip(prices, tokens, strict=True))

    def reading(self, tokens: int) -> float:
        """Return ms in which the draft model runs that many tokens of a prompt."""
        most = max(self.draft)
        return tokens * self.draft[most] / most

    def marginal(self, rows: int) -> float:
        """Return how probable a drafted token must be to be worth its place in a target forward of that many rows."""
        return self.verify(2 * rows) / self.verify(rows) - 1

    def heading(self, rows: int) -> float:
        """Return ms of a head's next state for each of that many rows."""
        return interpolated(self.head, rows)


def costs_of(found: dict[str, Any]) -> Costs:
    """Return costs from JSON. Raises ValueError, TypeError or AttributeError for what is no table of costs."""
    tables = {part: {int(n): float(ms) for n, ms in found[part].items()} for part in ("target", "draft", "head")}
    if not tables["target"] or not all(0 <= ms < inf for table in tables.values() for ms in table.values()):
        raise ValueError("costs must be milliseconds by numbers of tokens, and have some of the target")
    if not all(tables["target"].values()):
        raise ValueError("costs of the target must be above 0")
    single: dict[str, Any] = {part: float(ms) for part, ms in found.items() if part not in tables}
    return Costs(**single | tables)


def interpolated(table: dict[int, float], at: float) -> float:
    """Return a table's value between its entries, on straight lines. Beyond its ends the first or last line goes on,
    but never downwards, as noise may have it."""
    counts = sorted(table)
    if len(counts) == 1:
        return table[counts[0]]
    right = min(max(bisect_left(counts, at), 1), len(counts) - 1)
    low, high = counts[right - 1], counts[right]
    slope = max(0.0, (table[high] - table[low]) / (high - low))
    if at > high:
        return table[high] + slope * (at - high)
    return table[low] + slope * (max(at, low) - low)
