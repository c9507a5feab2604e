"""What forwards cost, as numbers that a length rule or a tuner can reckon with."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one forward by the number of its new tokens, for one row; see `forerun.backends.costs`.

    Attributes:
        target, draft: {new tokens: ms}; at least one entry each, none without a draft. In a batch, rows count as so
            many more tokens.
        policy: ms of one call of the length policy's layer, if it has one.
        glance: ms of reading off how probable a draft's token was to the draft.
        chained, chained_sampled: ms of a draft's token of one row where drafts are made in one call, else 0.
        head: of a state of a head over hidden states with its logits, by the number of rows; none without a head.
        drawing, judging: ms that a draft's token and a node of the target's forward take longer in sampling.
    """

    target: dict[int, float]
    draft: dict[int, float]
    policy: float = 0.0
    glance: float = 0.0
    drawing: float = 0.0
    judging: float = 0.0
    chained: float = 0.0
    chained_sampled: float = 0.0
    head: dict[int, float] = field(default_factory=dict)

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
        """ms of a target forward of that many tokens."""
        return interpolated(self.target, tokens)

    def drafting(self, rows: int) -> float:
        """ms of a draft's token for each of that many rows."""
        if rows == 1 and self.chained:
            return self.chained
        return interpolated(self.draft, rows)

    def heading(self, rows: int) -> float:
        """ms of a head's next state for each of that many rows."""
        return interpolated(self.head, rows)


def interpolated(table: dict[int, float], at: float) -> float:
    """A table's value between its entries, on straight lines; beyond its ends the first or last of these goes on, but
    never downwards, as noise can make a table."""
    counts = sorted(table)
    if len(counts) == 1:
        return table[counts[0]]
    right = min(max(bisect_left(counts, at), 1), len(counts) - 1)
    low, high = counts[right - 1], counts[right]
    slope = max(0.0, (table[high] - table[low]) / (high - low))
    if at > high:
        return table[high] + slope * (at - high)
    return table[low] + slope * (max(at, low) - low)
