"""How steps are reported to the engine's callers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from forerun.engine.sequence import Sequence
from forerun.engine.step import Proposal, RowOutcome, Step
from forerun.engine.verify import origins
from forerun.sampling.probabilities import Logprob


@dataclass
class StepTimes:
    """When the parts of a step ended, in seconds of `perf_counter`."""

    started_at: float
    proposed_at: float = 0.0
    forwarded_at: float = 0.0
    verified_at: float = 0.0


@dataclass(frozen=True)
class RowGrowth:
    """What a step added to one sequence.

    Attributes:
        outcome: the draft and the verdict that it comes from.
        count: number of tokens; they are the last ones of the sequence.
        logprobs: the log probabilities of these tokens if they are requested, else empty.
    """

    outcome: RowOutcome
    count: int
    logprobs: tuple[Logprob, ...]


class Reports:
    """The steps that no caller has fetched yet.

    Attributes:
        outbox: the steps, in order.
        number: of the engine's last step.
    """

    def __init__(self) -> None:
        self.outbox: deque[Step] = deque()
        self.number = 0

    @property
    def ended(self) -> set[int]:
        """Return the ids of the sequences whose last step is in the outbox."""
        return {step.id for step in self.outbox if step.finish_reason is not None}

    def holds_later(self, seq: Sequence, number: int) -> bool:
        """Return whether the outbox holds a step of a sequence after the step of that number."""
        return any(step.id == seq.id and step.number > number for step in self.outbox)

    def add_end(self, seq: Sequence) -> None:
        """Report a sequence that ended outside of a step."""
        self.outbox.append(
            Step(seq.id, self.number, 0, finish_reason=seq.finish_reason, error=seq.error)
        )

    def add_step(self, growths: list[RowGrowth], proposal: Proposal, times: StepTimes) -> None:
        """Report one step, of one or more sequences."""
        self.number += 1
        shared = _shared_fields(proposal, times)
        shared |= {"number": self.number, "rows": len(growths)}
        self.outbox += [_step_of(growth, proposal.rests, shared) for growth in growths]


def _shared_fields(proposal: Proposal, times: StepTimes) -> dict[str, Any]:
    """Return the costs of a step, as fields of `Step` that all its rows share."""
    started_at = times.started_at + proposal.prompt_seconds
    return {
        "draft_forwards": proposal.forwards,
        "draft_seconds": times.proposed_at - started_at - proposal.policy_seconds,
        "policy_seconds": proposal.policy_seconds,
        "verify_seconds": times.verified_at - times.proposed_at,
        "forward_seconds": proposal.forward_seconds + times.forwarded_at - times.proposed_at,
        "seconds": perf_counter() - started_at,
    }


def _step_of(growth: RowGrowth, rests: bool, shared: dict[str, Any]) -> Step:
    """Return the step of one sequence."""
    seq = growth.outcome.sequence
    draft = growth.outcome.draft
    verdict = growth.outcome.verdict
    rejected = [draft.tokens[node] for node in range(1, len(draft)) if node not in verdict.path]
    return Step(
        id=seq.id,
        tokens=tuple(seq.tokens[len(seq.tokens) - growth.count :]),
        origins=origins(draft, verdict)[: growth.count],
        rejected=tuple(rejected),
        drafted=draft.drafted,
        tested=verdict.tested,
        accepted=verdict.accepted,
        rests=rests and not seq.request.plain,
        logprobs=growth.logprobs,
        prompt_logprobs=None if seq.prompt_logprobs is None else tuple(seq.prompt_logprobs),
        waited=seq.waited or 0.0,
        finish_reason=seq.finish_reason,
        error=seq.error,
        **shared,
    )
