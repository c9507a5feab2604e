"""Statistics of a generation, all derived from its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from forerun.engine.engine import Step

_COUNTS = ("tokens", "target_forwards", "draft_forwards", "drafted", "tested", "accepted")


@dataclass(frozen=True)
class Stats:
    """What the steps of one or more sequences add up to. A forward counts once for each sequence that took part."""

    tokens: int  # committed
    target_forwards: int
    draft_forwards: int
    drafted: int  # tokens proposed
    tested: int  # those that the target looked at
    accepted: int  # those that it kept
    seconds: float  # wall time of the whole call, prefill included
    reached: tuple[int, ...]  # [k] drafts whose position k was tested
    kept: tuple[int, ...]  # [k] those of them whose position k was accepted

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """[k] share accepted of the drafts that reached position k."""
        return tuple(kept / reached for kept, reached in zip(self.kept, self.reached, strict=True))

    @property
    def tau(self) -> float:
        """Mean tokens committed per target forward, bonus or correction included; autoregressive is 1."""
        return self.tokens / max(1, self.target_forwards)

    @property
    def tau_without_bonus(self) -> float:
        """Mean draft tokens accepted per target forward; autoregressive is 0."""
        return self.accepted / max(1, self.target_forwards)

    @property
    def alpha(self) -> float:
        """Accepted / tested; the first rejected token counts as tested, nothing after it does."""
        return self.accepted / max(1, self.tested)

    @property
    def utilisation(self) -> float:
        """Accepted / drafted."""
        return self.accepted / max(1, self.drafted)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, float | int | list[float]]:
        """Everything, for JSON."""
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 6),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "tau": round(self.tau, 4),
            "alpha": round(self.alpha, 4),
            "utilisation": round(self.utilisation, 4),
            **{name: getattr(self, name) for name in _COUNTS[1:]},
            "acceptance_by_position": [round(share, 4) for share in self.acceptance_by_position],
        }


def summarise(steps: Sequence[Step], seconds: float) -> Stats:
    """Add up steps, of one sequence or of many, over `seconds` of wall time."""
    depths = range(1, max((step.tested for step in steps), default=0) + 1)
    return Stats(
        tokens=sum(len(step.tokens) for step in steps),
        target_forwards=len(steps),
        draft_forwards=sum(step.draft_forwards for step in steps),
        drafted=sum(step.drafted for step in steps),
        tested=sum(step.tested for step in steps),
        accepted=sum(step.accepted for step in steps),
        seconds=seconds,
        reached=tuple(sum(step.tested >= depth for step in steps) for depth in depths),
        kept=tuple(sum(step.accepted >= depth for step in steps) for depth in depths),
    )


def total(parts: Sequence[Stats]) -> Stats:
    """The statistics of several calls together."""
    found: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in (*_COUNTS, "seconds")}
    for name in ("reached", "kept"):  # by position
        found[name] = tuple(map(sum, zip_longest(*(getattr(part, name) for part in parts), fillvalue=0)))
    return Stats(**found)


@dataclass(frozen=True)
class Times:
    """Where the time of decoding steps went, in seconds; a step of a batch counts once.

    Attributes:
        steps: how many steps.
        draft, policy, verify: drafting, deciding how long to draft, and the target's forward with its verdicts.
        rest: everything else in a step.
        forward: inside forwards of the target and the draft; on a GPU the time to start them.
    """

    steps: int
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


def times(rows: Sequence[Sequence[Step]]) -> Times:
    """The time of a batch from the steps of its rows; steps of one number are one step of the engine."""
    steps = {step.number: step for row in rows for step in row}.values()
    draft = sum(step.draft_seconds for step in steps)
    policy = sum(step.policy_seconds for step in steps)
    verify = sum(step.verify_seconds for step in steps)
    return Times(
        steps=len(steps),
        draft=draft,
        policy=policy,
        verify=verify,
        rest=sum(step.seconds for step in steps) - draft - policy - verify,
        forward=sum(step.forward_seconds for step in steps),
    )


Work = tuple[tuple[int, int, float, int], ...]


def work(rows: Sequence[Sequence[Step]], pads: bool = True) -> Work:
    """What a batch did, as far as time depends on it: (how many steps, rows, nodes that the target verified in each
    row, draft forwards), one for each kind of step that there was. Where it `pads`, all rows are as wide as the widest;
    else the nodes are the mean."""
    by_number: dict[int, list[Step]] = {}
    for row in rows:
        for step in row:
            by_number.setdefault(step.number, []).append(step)
    found: Counter[tuple[int, float, int]] = Counter()
    for steps in by_number.values():
        drafted, forwards = [step.drafted for step in steps], max(step.draft_forwards for step in steps)
        found[len(steps), 1 + (max(drafted) if pads else round(sum(drafted) / len(drafted), 3)), forwards] += 1
    return tuple((count, *shape) for shape, count in sorted(found.items()))
