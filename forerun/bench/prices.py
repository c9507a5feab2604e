"""What steps cost, from a table of forwards and what a clock measured beside it. Tuning and simulation use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from forerun.bench.records import Record
from forerun.bench.runners import Outcome
from forerun.costs import Costs
from forerun.engine import Step
from forerun.methods import AR, METHODS, Method


@dataclass(frozen=True)
class Prices:
    """Milliseconds of steps.

    Attributes:
        costs: of forwards.
        step_ms: of a step beyond its forwards.
        draft_ms: of a step with a draft beyond that.
        token_ms: of a draft's forward beyond that of one token (choosing tokens, the length rule, guesses), by kind of
            method.
        own_ms: of a step of a kind of method that makes no forwards for its drafts, beyond `step_ms`.
        start_ms: of a prompt, or of a batch of them, by kind of method.
        load: the time that decoding took over that which these prices say: more than 1 on a machine that is busy.
    """

    costs: Costs
    step_ms: float = 0.0
    draft_ms: float = 0.0
    token_ms: Mapping[str, float] = field(default_factory=dict)
    own_ms: Mapping[str, float] = field(default_factory=dict)
    start_ms: Mapping[str, float] = field(default_factory=dict)
    load: float = 1.0

    @property
    def plain_ms(self) -> float:
        """A step without a draft."""
        return self.costs.verify(1) + self.step_ms

    def shape(self, kind: str, rows: int, nodes: float, forwards: int) -> float:
        """A step of so many rows, each of which has `nodes` tokens under the target's eyes, the root included; at
        least half of its forwards in the table, as few measurements can give nonsense."""
        table = self.costs.verify(rows * nodes) + forwards * drafting(self.costs, kind, rows)
        ms = table + self.step_ms + self.own_ms.get(kind, 0.0) + forwards * self.token_ms.get(kind, 0.0)
        return max(ms + (self.draft_ms if nodes > 1 else 0.0), table / 2)

    def step(self, kind: str, step: Step) -> float:
        """A step, as if its sequence were decoded alone."""
        return self.shape(kind, 1, step.drafted + 1, forwards_of(kind, step))

    def speedup(self, kind: str, outcomes: Sequence[Outcome]) -> float:
        """Of those outcomes over plain decoding of as many tokens."""
        rows = [row for outcome in outcomes for row in outcome.steps or []]
        ours = sum(self.step(kind, step) for row in rows for step in row) + len(rows) * self.start_ms.get(kind, 0.0)
        tokens = sum(len(step.tokens) for row in rows for step in row)
        return (tokens * self.plain_ms + len(rows) * self.start_ms.get(AR.name, 0.0)) / max(ours, 1e-9)

    def steps_ms(self, kind: str, record: Record) -> float:
        """All steps of a record."""
        return sum(
            count * self.shape(kind, rows, nodes, forwards) for count, rows, nodes, forwards in record.work or ()
        )


def forwards_of(kind: str, step: Step) -> int:
    """Draft forwards of a step for its own sequence. In a batch the draft goes on for other rows; a chain's own are as
    many as its tokens, but for those that a block runs behind an end token. A head makes states that it may not use.
    (Drafts by phrases and by costs are not decoded in batches where this is asked.)"""
    if METHODS[kind.partition(" ")[0]].head is not None:
        return step.draft_forwards
    return min(step.draft_forwards, step.drafted)


def drafting(costs: Costs, kind: str, rows: int = 1) -> float:
    """ms of what a method of this kind calls a draft's forward."""
    if METHODS[kind.partition(" ")[0]].head is not None:
        return costs.heading(rows) if costs.head else 0.0
    return costs.drafting(rows) if costs.draft else 0.0


def kind(method: Method) -> str:
    """Methods of one kind spend the same on a draft's forward."""
    settings = ("block", "width", *(("window",) if method.phrases is not None else ()))
    given = {key: getattr(method, key, None) for key in settings}
    return " ".join([method.name, *(f"{key}={value}" for key, value in given.items() if value is not None)])


def fitted(costs: Costs, records: Sequence[Record], kinds: Mapping[str, str]) -> Prices:
    """Prices beside the table from measurements; `kinds`: of the methods' names. `ar` is among them.

    What `ar` takes beyond its forwards is the median over its records; the others' is shared out by least squares on
    shares of a record's time.
    """
    own = [record for record in records if record.method in kinds and record.work and record.times]

    def beyond(record: Record, prices: Prices) -> float:
        assert record.times is not None
        return 1000 * record.times.seconds - prices.steps_ms(kinds[record.method], record)

    def counts(record: Record) -> tuple[int, int, int]:
        """Steps, those with a draft, and forwards for drafts."""
        work = np.array(record.work)
        return int(work[:, 0].sum()), int(work[work[:, 2] > 1, 0].sum()), int(work[:, 0] @ work[:, 3])

    step_ms = median(beyond(each, Prices(costs)) / counts(each)[0] for each in own if each.method == AR.name)
    drafting = [record for record in own if record.method != AR.name]
    free = {kinds[each.method] for each in drafting} - {kinds[each.method] for each in drafting if counts(each)[2]}
    columns = {kind: place for place, kind in enumerate(dict.fromkeys(kinds[each.method] for each in drafting), 1)}
    table, seen = np.zeros((len(drafting), 1 + len(columns))), np.zeros(len(drafting))
    for row, record in enumerate(drafting):
        assert record.times is not None
        kind, (steps, drafted, forwards) = kinds[record.method], counts(record)
        table[row, 0], table[row, columns[kind]] = drafted, steps if kind in free else forwards
        seen[row] = beyond(record, Prices(costs, step_ms))
        table[row] /= 1000 * record.times.seconds
        seen[row] /= 1000 * record.times.seconds
    found = np.linalg.lstsq(table, seen, rcond=None)[0].round(5).tolist() if drafting else [0.0]
    start_ms: dict[str, list[float]] = {}
    for record in own:
        start_ms.setdefault(kinds[record.method], []).append(1000 * (record.prefill_seconds or 0.0))
    return Prices(
        costs,
        step_ms,
        draft_ms=found[0],
        token_ms={kind: found[place] for kind, place in columns.items() if kind not in free},
        own_ms={kind: found[place] for kind, place in columns.items() if kind in free},
        start_ms={kind: median(values) for kind, values in start_ms.items()},
    )
