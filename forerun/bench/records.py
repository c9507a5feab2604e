"""The lines of records.jsonl: what one method did with one batch of prompts in one round."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from forerun.engine.engine import Step
from forerun.engine.stats import Stats

Group = tuple[int, str, int]  # round, dataset, batch: what is compared with each other


@dataclass(frozen=True)
class Times:
    """Where the time of decoding steps went, in seconds; a step of a batch counts once.

    Attributes:
        draft, policy, verify: drafting, deciding how long to draft, and the target's forward with its verdicts.
        rest: everything else in a step.
        forward: inside forwards of the target and the draft; on a GPU the time to start them.
    """

    draft: float
    policy: float
    verify: float
    rest: float
    forward: float

    @property
    def seconds(self) -> float:
        return self.draft + self.policy + self.verify + self.rest

    @property
    def overhead_share(self) -> float:
        """Share of step time outside the models' forwards."""
        return 1 - self.forward / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Record:
    """One measurement.

    Attributes:
        prompts: ids of the batch's prompts.
        stats, times: counts and step times of all rows; times is None if the method keeps no steps.
        equal: for each row whether it is the reference's greedy output; None when sampling.
    """

    round: int
    dataset: str
    batch: int
    prompts: list[str]
    method: str
    stats: Stats
    times: Times | None
    equal: list[bool] | None

    @property
    def group(self) -> Group:
        return self.round, self.dataset, self.batch

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def parse(line: str) -> Record:
    """Return the record of a line."""
    entry = json.loads(line)
    stats: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry["stats"].items()
    }
    times = Times(**entry["times"]) if entry["times"] is not None else None
    return Record(**entry | {"stats": Stats(**stats), "times": times})


def total(parts: Sequence[Stats]) -> Stats:
    """Return the statistics of several calls together."""
    names = ("tokens", "target_forwards", "draft_forwards", "drafted", "tested", "accepted", "seconds")
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
    return Stats(
        **sums,
        reached=tuple(map(sum, zip_longest(*(part.reached for part in parts), fillvalue=0))),
        kept=tuple(map(sum, zip_longest(*(part.kept for part in parts), fillvalue=0))),
    )


def times(rows: Sequence[Sequence[Step]]) -> Times:
    """Return the time of a batch from the steps of its rows; steps of one number are one step of the engine."""
    steps = {step.number: step for row in rows for step in row}.values()
    draft = sum(step.draft_seconds for step in steps)
    policy = sum(step.policy_seconds for step in steps)
    verify = sum(step.verify_seconds for step in steps)
    return Times(
        draft=draft,
        policy=policy,
        verify=verify,
        rest=sum(step.seconds for step in steps) - draft - policy - verify,
        forward=sum(step.forward_seconds for step in steps),
    )
