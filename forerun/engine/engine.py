"""The engine: requests join and leave between steps, and one loop decodes for every method."""

from __future__ import annotations

import logging
from collections import abc, deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from forerun.engine.acceptance import Verdict
from forerun.engine.draft import Draft
from forerun.engine.retries import Retries
from forerun.engine.sequence import Request, Sequence
from forerun.engine.step import Drafter, Proposal, RowOutcome, Step
from forerun.engine.target import Target
from forerun.engine.verify import committed, judge, origins, scores_after
from forerun.failures import UNATTRIBUTABLE, NotNumbersError
from forerun.sampling.probabilities import Logprob, logprobs_of

__all__ = ["Drafter", "Engine", "Proposal", "QueueFullError", "Step"]

_LOG = logging.getLogger("forerun.engine.engine")

CHUNKS = (32, 2048)  # smallest and largest prefill chunk, in tokens
ALONE = 256  # the smallest if nothing runs: C reads weights once for so many tokens
SCORED = 128  # the largest chunk whose logits are wanted


class QueueFullError(RuntimeError):
    """More requests wait than the engine allows."""


class Engine:
    """One target and one drafter. Requests join and leave between steps.

    `add` and `abort` may be called from any thread; `step` by one thread at a time.

    First come, first served. A request is admitted when a row is free and the KV budget holds its whole reservation
    (prompt, new tokens, draft), so no row is ever evicted. Prompts are prefilled one at a time and apart from
    verification, for about `chunk_seconds` between two steps.

    Attributes:
        running: sequences that are decoded.
        waiting: sequences in the queue.
        outbox: steps that no caller has fetched.
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
        """Take over `target` and `drafter`. `kv_memory`: limit of the target's keys and values, in bytes. `max_queue`:
        limit of waiting requests. None is no limit."""
        for name, value in (
            ("max_rows", max_rows),
            ("max_queue", max_queue),
            ("kv_memory", kv_memory),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.target, self.drafter = target, drafter
        self._capture = drafter.wants_hidden
        self.max_rows, self.max_queue, self.kv_memory = max_rows, max_queue, kv_memory
        self.chunk_seconds = chunk_seconds
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.outbox: deque[Step] = deque()
        self._ids, self._aborted = count(), deque[int]()
        self._prefilling: tuple[Sequence, Iterator[int]] | None = None
        self._rate = 256 / chunk_seconds  # tokens of prefill a second, until it is measured
        self._number = 0
        self._retries = Retries(max_rows)
        self._begun: dict[int, Sequence] = {}  # sequences whose last step is not in the outbox yet
        self._before: dict[
            int, tuple[int, Tensor | None]
        ] = {}  # lengths and random states before the present step
        self._features: dict[
            int, list[Tensor]
        ] = {}  # hidden states of each row's tokens, to be parked with its KV

    @property
    def busy(self) -> bool:
        """Return whether anything runs or waits."""
        return bool(self.running or self.waiting or self._prefilling or self.outbox)

    @property
    def prefilling(self) -> bool:
        """Return whether a prompt is being read; its request neither waits nor runs."""
        return self._prefilling is not None

    def new_id(self) -> int:
        """Return an id for `add`, for a caller that needs it before the request is queued."""
        return next(self._ids)

    def add(self, request: Request, id: int | None = None) -> int:
        """Queue a request; return its id, which its steps carry.

        Raises:
            ValueError: a prompt that fills the model's context, or a request that the KV budget can never hold.
            QueueFullError: `max_queue` requests wait for a row.
        """
        context = self.target.context
        if context is not None and len(request.tokens) >= context:
            raise ValueError(
                f"the prompt of {len(request.tokens)} tokens fills the context of {context}"
            )
        free = max(0, self.max_rows - len(self.running) - bool(self._prefilling))
        if self.max_queue is not None and len(self.waiting) >= self.max_queue + free:
            raise QueueFullError(
                f"the queue is full: {len(self.waiting)} of {self.max_queue} requests wait"
            )
        seq = Sequence(request, self.new_id() if id is None else id, self.target.device, context)
        if not self._fits(seq, 0):
            raise ValueError(
                f"the prompt and its new tokens need {self._reserve(seq)} positions of keys and values, more than the "
                f"{self.kv_memory} bytes of kv_memory hold"
            )
        self.waiting.append(seq)
        return seq.id

    def abort(self, id: int) -> None:
        """End a request with the next step, if it has not ended."""
        self._aborted.append(id)

    def step(self) -> list[Step]:
        """Admit what fits, then draft and run one target forward for all running sequences. Return a Step for each.

        An exception of a sequence's processor or criterion ends that sequence alone. Any other undoes the step:
        sequences go back to the front of the queue with the tokens they had, and drafters begin anew. A sequence that
        fails alone twice ends with the error (`forerun.engine.retries`). An exception that no sequence caused, such as
        KeyboardInterrupt, is raised (`forerun.failures`).
        """
        self.advance()
        return [self.outbox.popleft() for _ in range(len(self.outbox))]

    @torch.inference_mode()
    def advance(self) -> None:
        """Do what `step` does, but leave the steps in `outbox`."""
        try:
            self._leave_aborted()
            self._admit()
            if self.running:
                seqs = self._retries.choose(self.running)
                for seq in seqs:
                    state = None if seq.generator is None else seq.generator.get_state()
                    self._before[seq.id] = len(seq.tokens), state
                self._step(seqs)
                self._before.clear()
                self._retries.passed(seqs)
        except BaseException as error:
            stepped = set(self._before)
            self._undo()
            failed = [seq for seq in list(self.waiting) if seq.id in stepped]
            if not failed or isinstance(error, UNATTRIBUTABLE):
                raise
            self._blame(failed, error)

    def _undo(self) -> None:
        """Drop all rows. Their sequences go back to the queue as they were before the step."""
        delivered = {step.id for step in self.outbox if step.finish_reason is not None}
        waiting = {seq.id for seq in list(self.waiting)}
        begun = [self._begun[id] for id in sorted(self._begun) if id not in delivered | waiting]
        for seq in [*self._begun.values(), *self.running]:
            if seq.id in self._before and seq.id not in delivered:
                seq.cut(*self._before[seq.id])
            self.drafter.drop(seq)  # after the cut: undone tokens are no output to draft from
        self.target.reset()
        self.running, self._prefilling = [], None
        for each in (self._begun, self._before, self._features):
            each.clear()
        self.waiting.extendleft(reversed(begun))

    def _blame(self, seqs: list[Sequence], error: BaseException) -> None:
        """End the sequence of a failed step if it ran alone and is to blame."""
        if not self._retries.failed(seqs):
            _LOG.warning(
                "decoding of %d requests failed; each is tried again alone",
                len(seqs),
                exc_info=error,
            )
            return
        seqs[0].error = error
        self.waiting.remove(seqs[0])
        self.outbox.append(Step(seqs[0].id, self._number, 0, finish_reason="error", error=error))

    def _step(self, seqs: list[Sequence]) -> None:
        begun, ids = perf_counter(), [seq.id for seq in seqs]
        proposal = self._propose(seqs)
        drafts, begun = proposal.drafts, begun + proposal.prompt_seconds
        proposed = perf_counter()
        logits, hidden = self.target.forward(ids, drafts, self._capture)
        forwarded = perf_counter()
        verdicts, scores = judge(seqs, drafts, logits)
        spoilt = _without_drafts(seqs, drafts)
        self.target.commit(ids, [verdict.path for verdict in verdicts])
        verified = perf_counter()
        grown = []
        for seq, draft, verdict, own, row in zip(
            seqs, drafts, verdicts, scores, logits, strict=True
        ):
            grows = not seq.error and seq not in spoilt
            count = (
                seq.extend(committed(draft, verdict), partial(scores_after, own, verdict))
                if grows
                else 0
            )
            grown.append((count, self._logprobs(seq, row, verdict, count)))
        states = [None] * len(seqs) if hidden is None else hidden
        self._observe(list(map(RowOutcome, seqs, drafts, verdicts, states)), proposal.memo)
        ended = [seq for seq in seqs if seq.finish_reason is not None]
        self._leave(ended)
        self._leave(spoilt)
        for seq in spoilt:
            self.waiting.appendleft(self._begun.pop(seq.id))
        self._number += 1
        shared = {
            "number": self._number,
            "rows": len(seqs),
            "draft_forwards": proposal.forwards,
            "draft_seconds": proposed - begun - proposal.policy_seconds,
            "policy_seconds": proposal.policy_seconds,
            "verify_seconds": verified - proposed,
            "forward_seconds": proposal.forward_seconds + forwarded - proposed,
            "seconds": perf_counter() - begun,
        }
        self.outbox += [
            Step(
                id=seq.id,
                tokens=tuple(seq.tokens[len(seq.tokens) - count :]),
                origins=origins(draft, verdict)[:count],
                rejected=tuple(
                    draft.tokens[node] for node in range(1, len(draft)) if node not in verdict.path
                ),
                drafted=draft.drafted,
                tested=verdict.tested,
                accepted=verdict.accepted,
                rests=proposal.rests and not seq.request.plain,
                logprobs=logprobs,
                prompt_logprobs=None if seq.prompt_logprobs is None else tuple(seq.prompt_logprobs),
                waited=seq.waited or 0.0,
                finish_reason=seq.finish_reason,
                error=seq.error,
                **shared,  # type: ignore[arg-type]
            )
            for seq, draft, verdict, (count, logprobs) in zip(
                seqs, drafts, verdicts, grown, strict=True
            )
        ]
        for seq in seqs:
            seq.prompt_logprobs = None
        for seq in ended:
            del self._begun[seq.id]

    def _propose(self, seqs: list[Sequence]) -> Proposal:
        drafted = [seq for seq in seqs if not seq.request.plain]
        if len(drafted) == len(seqs):
            return self.drafter.propose(seqs)
        proposal = self.drafter.propose(drafted) if drafted else Proposal([])
        found = iter(proposal.drafts)
        drafts = [Draft.root(seq.tokens[-1]) if seq.request.plain else next(found) for seq in seqs]
        return replace(proposal, drafts=drafts)

    def _observe(self, outcomes: list[RowOutcome], memo: Any) -> None:
        drafted = [outcome for outcome in outcomes if not outcome.sequence.request.plain]
        if drafted:
            self.drafter.observe(drafted, memo)
        for outcome in outcomes:
            features = self._features.get(outcome.sequence.id)
            if outcome.hidden is not None and features is not None:
                features.append(outcome.hidden[outcome.verdict.path])

    def _logprobs(
        self, seq: Sequence, logits: Tensor, verdict: Verdict, count: int
    ) -> tuple[Logprob, ...]:
        if seq.request.logprobs is None or not count:
            return ()
        return tuple(
            logprobs_of(logits[verdict.path[:count]], seq.tokens[-count:], seq.request.logprobs)
        )

    # Joining.

    def _fits(self, seq: Sequence, rows: int) -> bool:
        """Return whether the KV budget holds a sequence's whole reservation besides those of `rows` rows."""
        return self.kv_memory is None or self.target.fits(rows, self._reserve(seq), self.kv_memory)

    def _reserve(self, seq: Sequence) -> int:
        return seq.limit + self.drafter.spread

    def _admit(self) -> None:
        """Prefill waiting sequences in order, for about `chunk_seconds`, or a large chunk if nothing runs."""
        if self._prefilling is None and not self.waiting:
            return
        begun, left, idle = self.target.clock(), CHUNKS[1], not self.running
        while self._prefilling is not None or self._next_fits():
            if self._prefilling is None:
                seq = self._begun[self.waiting[0].id] = self.waiting[0]
                self.waiting.popleft()
                seq.rows = min(len(self.running) + len(self.waiting) + 1, self.max_rows)
                if seq.waited is None:
                    seq.waited = perf_counter() - seq.asked
                self._prefilling = seq, self._prefill(seq, self._chunk())
            seq, prefill = self._prefilling
            try:
                done = next(prefill, None)
            except UNATTRIBUTABLE:
                raise
            except BaseException as error:
                self._prefilling = None
                self._leave([seq])
                self.target.forget_prompt()
                del self._begun[seq.id]
                self.waiting.appendleft(seq)
                self._blame([seq], error)
                continue
            if done is None:
                self._prefilling = None
                self.running.append(seq)
            left -= done or 0
            tokens = len(self.waiting[0].tokens) if done is None and self.waiting else CHUNKS[1]
            late = (
                self.target.clock() - begun + min(tokens, self._chunk()) / self._rate
                > self.chunk_seconds
            )
            if left <= 0 if idle else late:
                return

    def _next_fits(self) -> bool:
        if (
            not self.waiting
            or len(self.running) >= self.max_rows
            or not self._retries.may_join(self.running)
        ):
            return False
        return not self.running or self._fits(self.waiting[0], len(self.running))

    def _prefill(self, seq: Sequence, chunk: int) -> Iterator[int]:
        is_scored = seq.request.prompt_logprobs and not seq.output
        score, size = (seq.score_prompt, min(chunk, SCORED)) if is_scored else (None, chunk)
        seq.prompt_logprobs = [] if is_scored else None
        begun = self.target.clock()
        for done in self.target.prefill(
            seq.tokens[:-1], size, seq.request.salt, self._capture, score
        ):
            if done >= CHUNKS[0]:
                self._rate = done / max(self.target.clock() - begun, 1e-9)
            seq.report(self.target.prompt_read)
            yield done
            begun = self.target.clock()
        self.target.join(seq.id, self._reserve(seq))
        hidden = self.target.prompt_hidden
        if hidden is not None and self.target.keeps_prefixes:
            self._features[seq.id] = [hidden]
        if not seq.request.plain:
            yield from self.drafter.admit(seq, hidden, chunk)

    def _chunk(self) -> int:
        """Return the tokens of prefill between two steps: a power of two, so that few sizes occur. They are more if
        nothing runs, because then nobody waits for the next step."""
        size = 1 << int(max(self._rate * self.chunk_seconds, 1)).bit_length() - 1
        smallest = CHUNKS[0] if self.running else ALONE
        return min(max(size, smallest), CHUNKS[1])

    # Leaving.

    def _leave(self, seqs: abc.Sequence[Sequence]) -> None:
        gone = {seq.id for seq in seqs}
        self.running = [seq for seq in self.running if seq.id not in gone]
        if not self.busy:
            self.target.forget_prompt()  # before the rows go, because a long prompt would be copied back from its row
        for seq in seqs:
            if seq.finish_reason in ("stop", "length", "abort"):
                features = self._features.get(seq.id)
                hidden = torch.cat(features) if features else None
                self.target.park(seq.id, seq.tokens, hidden, seq.request.salt, self._capture)
            self._features.pop(seq.id, None)
            self.drafter.drop(seq)
            self.target.drop(seq.id)

    def _leave_aborted(self) -> None:
        gone = set(self._aborted)
        if not gone:
            return
        leaving = [seq for seq in self._begun.values() if seq.id in gone]
        if self._prefilling is not None and self._prefilling[0].id in gone:
            self._prefilling[1].close()  # type: ignore[attr-defined]
            self._prefilling = None
        queued = [seq for seq in list(self.waiting) if seq.id in gone]
        for seq in queued:
            self.waiting.remove(seq)
        for seq in leaving:
            seq.finish_reason = "abort"
        self._leave(leaving)
        for seq in leaving + queued:
            self.outbox.append(Step(seq.id, self._number, 0, finish_reason="abort"))
            self._begun.pop(seq.id, None)
        while self._aborted and self._aborted[0] in gone:
            self._aborted.popleft()


def _without_drafts(seqs: list[Sequence], drafts: list[Draft]) -> list[Sequence]:
    """Return sequences whose scores are NaN, and end drafting for them. A drafted token may be the cause: in one
    forward it may spoil the scores before it. The caller runs them again."""
    found = []
    for seq, draft in zip(seqs, drafts, strict=True):
        if isinstance(seq.error, NotNumbersError) and len(draft) > 1:
            seq.cut(len(seq.tokens), None)
            seq.request = replace(seq.request, plain=True)
            found.append(seq)
    return found
