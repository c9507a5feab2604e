"""Statistics of a generation, all derived from its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.decode import Step


@dataclass(frozen=True)
class Stats:
    """What the steps of one or more sequences add up to.

    Attributes:
        tokens: tokens committed.
        target_forwards: target forwards, counted once for each sequence that took part.
        draft_forwards: draft forwards, counted likewise.
        drafted, tested, accepted: proposed tokens, those the target looked at, and those it kept.
        seconds: wall time of the whole call, prefill included.
        acceptance_by_position: [k] share accepted of the drafts that reached position k.
    """

    tokens: int
    target_forwards: int
    draft_forwards: int
    drafted: int
    tested: int
    accepted: int
    seconds: float
    acceptance_by_position: tuple[float, ...]

    @property
    def tau(self) -> float:
        """Mean tokens committed per target forward, bonus or correction included; autoregressive is 1."""
        return self.tokens / max(1, self.target_forwards)

    @property
    def alpha(self) -> float:
        """Accepted / tested; the first rejected token counts as tested, nothing behind it does."""
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
            "target_forwards": self.target_forwards,
            "draft_forwards": self.draft_forwards,
            "drafted": self.drafted,
            "tested": self.tested,
            "accepted": self.accepted,
            "acceptance_by_position": [round(share, 4) for share in self.acceptance_by_position],
        }


def summarise(steps: Sequence[Step], seconds: float) -> Stats:
    """Adds up steps, of one sequence or of many, over `seconds` of wall time."""
    deepest = max((step.tested for step in steps), default=0)
    positions = []
    for depth in range(1, deepest + 1):
        reached = sum(step.tested >= depth for step in steps)
        positions.append(sum(step.accepted >= depth for step in steps) / reached)
    return Stats(
        tokens=sum(len(step.tokens) for step in steps),
        target_forwards=len(steps),
        draft_forwards=sum(step.draft_forwards for step in steps),
        drafted=sum(step.drafted for step in steps),
        tested=sum(step.tested for step in steps),
        accepted=sum(step.accepted for step in steps),
        seconds=seconds,
        acceptance_by_position=tuple(positions),
    )
