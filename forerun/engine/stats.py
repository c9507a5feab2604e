"""Statistics of sequences, derived from their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.engine.engine import Step

_COUNTS = ("target_forwards", "draft_forwards", "drafted", "tested", "accepted")


@dataclass(frozen=True)
class Stats:
    """Sums over the steps of one or more sequences.

    A forward counts once for each of its sequences.
    """

    tokens: int  # committed
    target_forwards: int
    draft_forwards: int
    drafted: int  # tokens proposed
    tested: int  # drafted tokens that the target tested
    accepted: int  # tested tokens that it accepted
    seconds: float  # wall time of the whole call, prefill included
    reached: tuple[int, ...]  # at [k] the number of drafts whose position k was tested
    kept: tuple[int, ...]  # at [k] the number of drafts whose position k was accepted

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Return the acceptance rate at each position, among the drafts that reached it."""
        return tuple(kept / reached for kept, reached in zip(self.kept, self.reached, strict=True))

    @property
    def tau(self) -> float:
        """Return the mean number of committed tokens per target forward.

        The bonus or correction is included, so it is 1 for plain decoding.
        """
        return self.tokens / max(1, self.target_forwards)

    @property
    def alpha(self) -> float:
        """Return accepted / tested. Tokens after the first rejected one do not count as tested."""
        return self.accepted / max(1, self.tested)

    @property
    def utilisation(self) -> float:
        """Return accepted / drafted."""
        return self.accepted / max(1, self.drafted)

    @property
    def mean_drafted(self) -> float:
        """Return the mean length of drafts: drafted tokens per target forward.

        Forwards without a draft count too, so a table of it by context shows what a method drafts
        after texts of each length.
        """
        return self.drafted / max(1, self.target_forwards)

    @property
    def tokens_per_s(self) -> float:
        """Return the committed tokens per second of wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, float | int | list[float]]:
        """Return all fields and rates, for JSON."""
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 6),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "tau": round(self.tau, 4),
            "alpha": round(self.alpha, 4),
            "utilisation": round(self.utilisation, 4),
            "mean_drafted": round(self.mean_drafted, 4),
            **{name: getattr(self, name) for name in _COUNTS},
            "acceptance_by_position": [round(share, 4) for share in self.acceptance_by_position],
        }


def summarise(steps: Sequence[Step], seconds: float) -> Stats:
    """Return the statistics of steps of one or more sequences over `seconds` of wall time."""
    depth = max((step.tested for step in steps), default=0)
    reached = [0] * depth
    kept = [0] * depth
    for step in steps:
        for position in range(step.tested):
            reached[position] += 1
        for position in range(step.accepted):
            kept[position] += 1
    return Stats(
        tokens=sum(len(step.tokens) for step in steps),
        target_forwards=len(steps),
        draft_forwards=sum(step.draft_forwards for step in steps),
        drafted=sum(step.drafted for step in steps),
        tested=sum(step.tested for step in steps),
        accepted=sum(step.accepted for step in steps),
        seconds=seconds,
        reached=tuple(reached),
        kept=tuple(kept),
    )
