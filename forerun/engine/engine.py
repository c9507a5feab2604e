"""The engine: requests join and leave between steps, and one loop decodes for every method."""

from __future__ import annotations

from collections import abc, deque
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from forerun.engine.draft import Draft
from forerun.engine.recovery import Recovery
from forerun.engine.reporting import Reports, RowGrowth, StepTimes
from forerun.engine.retries import Retries
from forerun.engine.scheduler import Limits, QueueFullError, Scheduler
from forerun.engine.sequence import Request, Sequence
from forerun.engine.step import Drafter, Proposal, RowOutcome, Step
from forerun.engine.target import Target
from forerun.engine.verify import committed, end_drafting_of_nan, judge, scores_after
from forerun.failures import UNATTRIBUTABLE
from forerun.sampling.probabilities import logprobs_of
from forerun.sampling.waits import short_waits

__all__ = ["Drafter", "Engine", "Proposal", "QueueFullError", "Step"]


class Engine:
    """One target and one drafter. Requests join and leave between steps.

    `add` and `abort` may be called from any thread; `step` by one thread at a time.

    First come, first served. A request is admitted when a row is free and the KV budget holds its
    whole reservation (prompt, new tokens, draft), so no row is ever evicted. Prompts are prefilled
    apart from verification, for about `chunk_seconds` between two steps. Their chunks take turns
    (`forerun.engine.reading`).

    Attributes:
        target: the model that is decoded.
        drafter: the source of drafts.
        limits: the limits that `__init__` was given; they may be changed between steps.
        scheduler: the queue, and the sequences that have left it.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        max_rows: int = 64,
        max_queue: int | None = None,
        kv_memory: int | None = None,
        chunk_seconds: float = 0.1,
    ) -> None:
        """Take over `target` and `drafter`.

        Args:
            target: the model, with its cache.
            drafter: what a method builds.
            max_rows: limit of sequences that are decoded at once.
            max_queue: limit of waiting requests; None for no limit.
            kv_memory: limit of the target's keys and values, in bytes; None for no limit.
            chunk_seconds: time for prefill between two steps.
        """
        self.target = target
        self.drafter = drafter
        self.limits = Limits(max_rows, max_queue, kv_memory, chunk_seconds)
        self._capture = drafter.wants_hidden
        self._retries = Retries(max_rows)
        self._reports = Reports()
        self.scheduler = Scheduler(target, drafter, self.limits, self._retries, self._reports)
        self._recovery = Recovery(target, drafter, self.scheduler, self._retries, self._reports)

    @property
    def max_rows(self) -> int:
        """Return the limit of sequences that are decoded at once."""
        return self.limits.max_rows

    @property
    def max_queue(self) -> int | None:
        """Return the limit of waiting requests, or None."""
        return self.limits.max_queue

    @property
    def kv_memory(self) -> int | None:
        """Return the limit of the target's keys and values in bytes, or None."""
        return self.limits.kv_memory

    @property
    def running(self) -> list[Sequence]:
        """Return the sequences that are decoded."""
        return self.scheduler.running

    @property
    def waiting(self) -> deque[Sequence]:
        """Return the sequences in the queue."""
        return self.scheduler.waiting

    @property
    def outbox(self) -> deque[Step]:
        """Return the steps that no caller has fetched. The caller removes what it takes."""
        return self._reports.outbox

    @property
    def busy(self) -> bool:
        """Return whether anything runs, waits or is to be fetched."""
        return bool(self.scheduler.admitted or self.scheduler.waiting or self.outbox)

    @property
    def prefilling(self) -> int:
        """Return how many prompts are being read; their requests neither wait nor run."""
        return self.scheduler.prefilling

    def new_id(self) -> int:
        """Return an id for `add`, for a caller that needs it before the request is queued."""
        return self.scheduler.new_id()

    def add(self, request: Request, id: int | None = None) -> int:
        """Queue a request. Return its id, which its steps carry.

        Raises:
            ValueError: the prompt fills the model's context, or the KV budget can never hold the
                request.
            QueueFullError: `max_queue` requests wait for a row.
        """
        return self.scheduler.add(request, id)

    def abort(self, id: int) -> None:
        """End a request with the next step, if it has not ended."""
        self.scheduler.abort(id)

    def step(self) -> list[Step]:
        """Admit what fits, run one target forward for all running sequences, and return the steps.

        An exception of a sequence's processor or criterion ends that sequence alone. Any other
        exception undoes the step: sequences go back to the front of the queue with the tokens that
        they had before, and drafters forget them. A sequence that fails alone twice ends with the
        error (`forerun.engine.retries`). An exception that no sequence can have caused, such as
        KeyboardInterrupt, propagates to the caller (`forerun.failures`).
        """
        self.advance()
        return [self.outbox.popleft() for _ in range(len(self.outbox))]

    @torch.inference_mode()
    def advance(self) -> None:
        """Do what `step` does, but leave the steps in `outbox`."""
        try:
            self.scheduler.release_aborted()
            self.scheduler.admit(on_failure=self._recovery.blame)
            with short_waits():
                seqs = self._ready(self._retries.choose(self.running))
                if seqs:
                    for seq in seqs:
                        seq.save_checkpoint(self._reports.number)
                    self._step(seqs)
                    self._retries.passed(seqs)
        except BaseException as error:
            stepped = self._recovery.undo()
            if not stepped or isinstance(error, UNATTRIBUTABLE):
                raise
            self._recovery.blame(stepped, error)

    def _ready(self, seqs: list[Sequence]) -> list[Sequence]:
        """Return the sequences that a step can be about, and end those that end late.

        The others sit out, because it is not known yet what their constraints allow. If that is so
        for all of them, wait a little.
        """
        if all(seq.sampler.constraint is None for seq in seqs):
            return seqs
        ready = [seq for seq in seqs if _is_ready(seq, waits=False)]
        if not ready:
            ready = [seq for seq in seqs[:1] if _is_ready(seq, waits=True)]
        for seq in ready:
            constraint = seq.sampler.constraint
            if constraint is None:
                continue
            seq.settle()
            if constraint.is_slow and not seq.request.plain:
                seq.request = replace(seq.request, plain=True)
                # Because it is not asked for this one again. It may be reading its prompt.
                self.drafter.drop(seq)
        self.scheduler.end([seq for seq in ready if seq.finish_reason is not None])
        return [seq for seq in ready if seq.finish_reason is None]

    def _step(self, seqs: list[Sequence]) -> None:
        """Propose, forward, judge, commit, grow, observe, release and report."""
        ids = [seq.id for seq in seqs]
        times = StepTimes(perf_counter())
        proposal = self._propose(seqs)
        drafts = proposal.drafts
        times.proposed_at = perf_counter()
        logits, hidden = self.target.forward(ids, drafts, self._capture)
        times.forwarded_at = perf_counter()
        verdicts, scores = judge(seqs, drafts, logits)
        states: abc.Sequence[Tensor | None] = [None] * len(seqs) if hidden is None else hidden
        outcomes = list(map(RowOutcome, seqs, drafts, verdicts, states))
        spoilt = end_drafting_of_nan(outcomes)
        self.target.commit(ids, [verdict.path for verdict in verdicts])
        times.verified_at = perf_counter()
        growths = [_grow(spoilt, *row) for row in zip(outcomes, scores, logits, strict=True)]
        self._observe(outcomes, proposal.memo)
        ended = [seq for seq in seqs if seq.finish_reason is not None]
        self.scheduler.release(ended)
        self.scheduler.release(spoilt)
        self._reports.add_step(growths, proposal, times)
        for seq in seqs:
            seq.prompt_logprobs = None
            seq.checkpoint = None
        self.scheduler.dismiss(ended)
        self.scheduler.requeue(spoilt)

    def _propose(self, seqs: list[Sequence]) -> Proposal:
        """Return a draft for each sequence. The drafter is not asked for plain requests."""
        drafting = [seq for seq in seqs if not seq.request.plain]
        if len(drafting) == len(seqs):
            return self.drafter.propose(seqs)
        proposal = self.drafter.propose(drafting) if drafting else Proposal([])
        proposed = iter(proposal.drafts)
        drafts = [
            Draft.root(seq.tokens[-1]) if seq.request.plain else next(proposed) for seq in seqs
        ]
        return replace(proposal, drafts=drafts)

    def _observe(self, outcomes: list[RowOutcome], memo: Any) -> None:
        """Hand the outcomes to the drafter, and keep the hidden states of committed tokens."""
        drafted = [outcome for outcome in outcomes if not outcome.sequence.request.plain]
        if drafted:
            self.drafter.observe(drafted, memo)
        for outcome in outcomes:
            features = outcome.sequence.features
            if outcome.hidden is not None and features is not None:
                features.append(outcome.hidden[outcome.verdict.path])


def _is_ready(seq: Sequence, waits: bool) -> bool:
    """Return whether the scores after a sequence can be had, now or after a short wait."""
    constraint = seq.sampler.constraint
    return constraint is None or constraint.is_ready(seq.tokens, waits)


def _grow(
    spoilt: abc.Sequence[Sequence], outcome: RowOutcome, scores: Tensor, logits: Tensor
) -> RowGrowth:
    """Append the committed tokens to a sequence, up to its end.

    Args:
        spoilt: the sequences whose step is run again, which do not grow.
        outcome: of a row of the step; its sequence has not grown yet.
        scores: [N, V] the processed scores at the draft's nodes.
        logits: [N, V] the target's logits there.
    """
    seq = outcome.sequence
    verdict = outcome.verdict
    if seq.error is not None or seq in spoilt:
        return RowGrowth(outcome, 0, ())
    count = seq.extend(committed(outcome.draft, verdict), partial(scores_after, scores, verdict))
    if seq.request.logprobs is None:
        return RowGrowth(outcome, count, ())
    logits = logits[verdict.path[:count]]
    logprobs = logprobs_of(logits, seq.tokens[-count:], seq.request.logprobs)
    return RowGrowth(outcome, count, tuple(logprobs))
