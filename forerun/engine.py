"""The engine: requests join and leave between steps, and one loop decodes for every method."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from time import perf_counter

import torch
from torch import Tensor

from forerun.generation import Generation, Request
from forerun.model import CausalLM
from forerun.sampling import Verdict
from forerun.steps import Drafter, Proposal, Step
from forerun.verify import committed, judge, origins, scores_behind

__all__ = ["Drafter", "Engine", "Proposal", "QueueFullError", "Step"]

SLACK = 64  # positions that a tree may need beyond a sequence's limit
CHUNKS = (32, 2048)  # least and most tokens of a prefill chunk


class QueueFullError(RuntimeError):
    """More requests wait than the engine allows."""


class Engine:
    """One target and one drafter. Requests join and leave between steps.

    `add` and `abort` may be called from any thread; `step` by one thread at a time.

    First come, first served. A request is admitted when a row is free and the KV budget holds the row's whole
    reservation (prompt, new tokens, draft), so nothing is ever thrown out. Prompts are prefilled one at a time and
    apart from verification, at most about `chunk_seconds` between two steps.

    Attributes:
        running: sequences that are decoded.
        waiting: those that have not begun.
    """

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter,
        *,
        max_rows: int = 64,
        max_queue: int | None = None,
        kv_memory: int | None = None,
        chunk_seconds: float = 0.1,
    ) -> None:
        """`target` and `drafter` are the engine's own from now on. `kv_memory`: bytes that keys and values of the
        target may take; None for no bound. `max_queue`: requests that may wait."""
        for name, value in (("max_rows", max_rows), ("max_queue", max_queue), ("kv_memory", kv_memory)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.target, self.drafter = target, drafter
        target.keeps_hidden = drafter.wants_hidden
        self.max_rows, self.max_queue, self.kv_memory = max_rows, max_queue, kv_memory
        self.chunk_seconds = chunk_seconds
        self.running: list[Generation] = []
        self.waiting: deque[Generation] = deque()
        self._ids, self._aborted = count(), deque[int]()
        self._prefilling: tuple[Generation, Iterator[int]] | None = None
        self._rate = 256 / chunk_seconds  # tokens of prefill a second, until it is measured
        self._number = 0
        self._ended: list[Step] = []  # of sequences that ended without a forward
        self._features: dict[int, list[Tensor]] = {}  # hidden states of each row's tokens, to be parked with its KV

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.running or self.waiting or self._prefilling or self._ended)

    def add(self, request: Request) -> int:
        """Queues a request; returns its id, which its steps carry.

        Raises:
            ValueError: a prompt that fills the model's context, or a request that the KV budget can never hold.
            QueueFullError: `max_queue` requests wait.
        """
        context = self.target.context
        if context is not None and len(request.tokens) >= context:
            raise ValueError(f"the prompt of {len(request.tokens)} tokens fills the context of {context}")
        if self.max_queue is not None and len(self.waiting) >= self.max_queue:
            raise QueueFullError(f"{len(self.waiting)} requests wait already; the queue holds {self.max_queue}")
        seq = Generation(request, next(self._ids), self.target.device, context)
        if not self._fits(seq, 0):
            raise ValueError(
                f"the prompt and its new tokens need {self._reserve(seq)} positions of keys and values, more than the "
                f"{self.kv_memory} bytes of kv_memory hold"
            )
        self.waiting.append(seq)
        return seq.id

    def abort(self, id: int) -> None:
        """Ends a request with the next step; nothing happens where it has ended."""
        self._aborted.append(id)

    @torch.inference_mode()
    def step(self) -> list[Step]:
        """Admits what fits, then one draft and one target forward for all running sequences: a Step for each of them.

        Without anything to do, an empty list. An exception in a sequence's processor or criterion, or while it is
        admitted, ends that sequence alone. Any other, KeyboardInterrupt included, undoes the step: sequences go back
        to the front of the queue with what they had, and the engine can be used on.
        """
        seqs = self.running
        lengths = [len(seq.tokens) for seq in seqs]
        try:
            self._leave_aborted()
            self._admit()
            seqs = self.running
            lengths = [len(seq.tokens) for seq in seqs]
            steps = self._step(seqs) if seqs else []
        except BaseException:
            seqs = [seq for seq in seqs if seq.finish_reason != "abort"]
            for seq, length in zip(seqs, lengths, strict=False):
                seq.cut(length)
            self._requeue(seqs)
            raise
        ended, self._ended = self._ended, []
        return ended + steps

    def reset(self) -> None:
        """Forgets all requests."""
        self._requeue(self.running)
        for each in (self.waiting, self._aborted, self._ended):
            each.clear()  # type: ignore[attr-defined]

    def _step(self, seqs: list[Generation]) -> list[Step]:
        begun, ids = perf_counter(), [seq.id for seq in seqs]
        proposal = self.drafter.propose(seqs)
        drafts = proposal.drafts
        proposed = perf_counter()
        logits = self.target.forward(ids, drafts)
        forwarded = perf_counter()
        verdicts, scores = judge(seqs, drafts, logits)
        self.target.commit(ids, [verdict.path for verdict in verdicts])
        verified = perf_counter()
        counts = [
            0 if seq.error else seq.extend(committed(draft, verdict), partial(scores_behind, found, verdict))
            for seq, draft, verdict, found in zip(seqs, drafts, verdicts, scores, strict=True)
        ]
        self.drafter.observe(seqs, drafts, verdicts, self.target.hidden)
        self._keep_features(seqs, verdicts)
        self._leave([seq for seq in seqs if seq.finish_reason is not None])
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
        return [
            Step(
                id=seq.id,
                tokens=tuple(seq.tokens[len(seq.tokens) - count :]),
                origins=origins(draft, verdict)[:count],
                rejected=tuple(draft.tokens[node] for node in range(1, len(draft)) if node not in verdict.path),
                drafted=draft.drafted,
                tested=verdict.tested,
                accepted=verdict.accepted,
                finish_reason=seq.finish_reason,
                error=seq.error,
                **shared,  # type: ignore[arg-type]
            )
            for seq, draft, verdict, count in zip(seqs, drafts, verdicts, counts, strict=True)
        ]

    # Joining.

    def _fits(self, seq: Generation, rows: int) -> bool:
        """Whether the KV budget holds a sequence's whole reservation beside so many rows."""
        return self.kv_memory is None or self.target.fits(rows, self._reserve(seq), self.kv_memory)

    @staticmethod
    def _reserve(seq: Generation) -> int:
        return seq.limit + SLACK

    def _admit(self) -> None:
        """Prefills what waits, in its order, for about `chunk_seconds`."""
        begun = perf_counter()
        while self._prefilling is not None or self._next_fits():
            if self._prefilling is None:
                seq = self.waiting.popleft()
                self._prefilling = seq, self._prefill(seq, self._chunk())
            seq, prefill = self._prefilling
            try:
                done = next(prefill, None)
            except Exception as error:
                seq.error, self._prefilling = error, None
                self._leave([seq])
                self._ended.append(Step(seq.id, self._number, 0, finish_reason="error", error=error))
                continue
            if done is None:
                self._prefilling = None
                self.running.append(seq)
            tokens = len(self.waiting[0].tokens) if done is None and self.waiting else CHUNKS[1]
            if perf_counter() - begun + min(tokens, self._chunk()) / self._rate > self.chunk_seconds:
                return

    def _next_fits(self) -> bool:
        """Whether the first of those that wait may be admitted."""
        if not self.waiting or len(self.running) >= self.max_rows:
            return False
        return not self.running or self._fits(self.waiting[0], len(self.running))

    def _prefill(self, seq: Generation, chunk: int) -> Iterator[int]:
        begun = perf_counter()
        for done in self.target.prefill(seq.tokens[:-1], chunk):
            if done >= CHUNKS[0]:
                self._rate = done / max(perf_counter() - begun, 1e-9)
            yield done
            begun = perf_counter()
        self.target.join(seq.id, self._reserve(seq))
        hidden = self.target.prompt_hidden
        if hidden is not None and self.target.prefixes is not None:
            self._features[seq.id] = [hidden]
        yield from self.drafter.admit(seq, hidden, chunk)

    def _chunk(self) -> int:
        """Tokens of prefill between two steps: a power of two, so that few sizes are in use."""
        size = 1 << int(max(self._rate * self.chunk_seconds, 1)).bit_length() - 1
        return min(max(size, CHUNKS[0]), CHUNKS[1])

    # Leaving.

    def _keep_features(self, seqs: list[Generation], verdicts: list[Verdict]) -> None:
        if not self._features or self.target.hidden is None:
            return
        for seq, verdict, hidden in zip(seqs, verdicts, self.target.hidden, strict=True):
            if seq.id in self._features:
                self._features[seq.id].append(hidden[verdict.path])

    def _leave(self, seqs: Sequence[Generation]) -> None:
        for seq in seqs:
            if seq.finish_reason in ("stop", "length", "abort"):
                features = self._features.get(seq.id)
                self.target.park(seq.id, seq.tokens, torch.cat(features) if features else None)
            self._features.pop(seq.id, None)
            self.drafter.drop(seq)
            self.target.drop(seq.id)
        gone = {seq.id for seq in seqs}
        self.running = [seq for seq in self.running if seq.id not in gone]
        if not self.busy:
            self.target.forget_prompt()

    def _leave_aborted(self) -> None:
        gone = {self._aborted.popleft() for _ in range(len(self._aborted))}
        if not gone:
            return
        leaving = [seq for seq in self.running if seq.id in gone]
        if self._prefilling is not None and self._prefilling[0].id in gone:
            leaving.append(self._prefilling[0])
            self._prefilling[1].close()  # type: ignore[attr-defined]
            self._prefilling = None
        queued = [seq for seq in list(self.waiting) if seq.id in gone]
        for seq in queued:
            self.waiting.remove(seq)
        for seq in leaving + queued:
            seq.finish_reason = "abort"
            self._ended.append(Step(seq.id, self._number, 0, finish_reason="abort"))
        self._leave(leaving)

    def _requeue(self, seqs: list[Generation]) -> None:
        """Gives up all rows; these sequences and the one that is prefilled wait again."""
        begun = [*seqs, *([self._prefilling[0]] if self._prefilling is not None else [])]
        self.running, self._prefilling = [], None
        self._features.clear()
        for seq in begun:
            self.drafter.drop(seq)
        self.target.reset()
        self.waiting.extendleft(reversed(begun))
