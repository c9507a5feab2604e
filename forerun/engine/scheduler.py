"""Which sequences of an engine have rows: the queue, admission with its prefill, and leaving."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import count
from time import perf_counter

from forerun.engine.recent_states import RecentStates
from forerun.engine.reporting import Reports
from forerun.engine.retries import Retries
from forerun.engine.sequence import Phase, Request, Sequence
from forerun.engine.step import Drafter
from forerun.engine.target import Target
from forerun.failures import UNATTRIBUTABLE

# Numbers of prompt tokens that are read at once.
SMALLEST_CHUNK = 32
SMALLEST_IDLE_CHUNK = 256  # if nothing runs, because C reads weights once for so many tokens
LARGEST_CHUNK = 2048
LARGEST_SCORED_CHUNK = 128  # if the logits of the prompt are wanted


class QueueFullError(RuntimeError):
    """More requests wait than the engine allows."""


@dataclass
class Limits:
    """The limits of an engine, which may be changed between two steps.

    Attributes:
        max_rows: number of sequences that are decoded at once.
        max_queue: number of sequences that wait; None for no limit.
        kv_memory: bytes of the target's keys and values; None for no limit.
        chunk_seconds: time for prefill between two steps.
    """

    max_rows: int
    max_queue: int | None
    kv_memory: int | None
    chunk_seconds: float

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_queue", "kv_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


class Scheduler:
    """The sequences of an engine, from `add` until their last step is reported.

    `add` and `abort` may be called from any thread, all else by the thread that steps.

    An exception may break off any method, a KeyboardInterrupt at any point. So that `requeue_all`
    misses no sequence then, a sequence is put into its new place before it leaves the old one.

    Attributes:
        waiting: the queue.
        admitted: sequences that have left the queue, in this order, until their end is reported.
    """

    def __init__(
        self, target: Target, drafter: Drafter, limits: Limits, retries: Retries, reports: Reports
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.admitted: list[Sequence] = []
        self._target = target
        self._drafter = drafter
        self._limits = limits
        self._retries = retries
        self._reports = reports
        self._capture = drafter.wants_hidden
        self._ids = count()
        self._aborted: deque[int] = deque()  # ids
        self._prefill: tuple[Sequence, Generator[int, None, None]] | None = None
        # Tokens of prefill per second. Until it is measured, a first chunk has 256 tokens.
        self._prefill_rate = 256 / limits.chunk_seconds

    @property
    def running(self) -> list[Sequence]:
        """Return the sequences that are decoded."""
        return [seq for seq in self.admitted if seq.phase is Phase.RUNNING]

    @property
    def prefilling(self) -> bool:
        """Return whether a prompt is being read; its sequence neither waits nor runs."""
        return self._prefill is not None

    # Requests come and are aborted, in any thread.

    def new_id(self) -> int:
        """Return an id for `add`."""
        return next(self._ids)

    def add(self, request: Request, id: int | None = None) -> int:
        """Queue a request, and return its id. Raises as `Engine.add`."""
        context = self._target.context
        if context is not None and len(request.tokens) >= context:
            raise ValueError(
                f"the prompt of {len(request.tokens)} tokens fills the context of {context}"
            )
        max_queue = self._limits.max_queue
        free_rows = max(0, self._limits.max_rows - len(self.running) - self.prefilling)
        if max_queue is not None and len(self.waiting) >= max_queue + free_rows:
            raise QueueFullError(
                f"the queue is full: {len(self.waiting)} of {max_queue} requests wait"
            )
        id = self.new_id() if id is None else id
        seq = Sequence(request, id, self._target.device, context)
        if not self._fits(seq, 0):
            raise ValueError(
                f"the prompt and its new tokens need {self._reserve(seq)} positions of keys and "
                f"values, more than the {self._limits.kv_memory} bytes of kv_memory hold"
            )
        self.waiting.append(seq)
        return seq.id

    def abort(self, id: int) -> None:
        """End a request with the next step, if it has not ended."""
        self._aborted.append(id)

    # Joining.

    def admit(self, on_failure: Callable[[list[Sequence], BaseException], None]) -> None:
        """Prefill waiting sequences in order, for about `chunk_seconds`.

        If no sequence runs, the limit is LARGEST_CHUNK tokens in place of a time.

        Args:
            on_failure: called with a sequence, alone in its list, and the exception that its
                prefill raised. The sequence is at the front of the queue again by then.
        """
        if not self.prefilling and not self.waiting:
            return
        started_at = self._target.clock()
        tokens_left = LARGEST_CHUNK
        was_idle = not self.running
        while self._prefill is not None or self._next_fits():
            if self._prefill is None:
                self._prefill = self._begin_prefill(self.waiting[0])
            seq, chunks = self._prefill
            try:
                chunk = next(chunks, None)
            except UNATTRIBUTABLE:
                raise
            except BaseException as error:
                self._prefill = None
                self.release([seq])
                self._target.forget_prompt()
                self.requeue([seq])
                on_failure([seq], error)
                continue
            if chunk is None:
                self._prefill = None
                seq.phase = Phase.RUNNING
            else:
                tokens_left -= chunk
            if was_idle:
                is_over = tokens_left <= 0
            else:
                is_over = self._is_late(self._target.clock() - started_at)
            if is_over:
                return

    def _next_fits(self) -> bool:
        """Return whether the first waiting sequence may leave the queue."""
        running = self.running
        if not self.waiting or len(running) >= self._limits.max_rows:
            return False
        if not self._retries.may_join(running):
            return False
        return not running or self._fits(self.waiting[0], len(running))

    def _fits(self, seq: Sequence, rows: int) -> bool:
        """Return whether the KV budget holds the reservation of a sequence beside `rows` others."""
        kv_memory = self._limits.kv_memory
        return kv_memory is None or self._target.fits(rows, self._reserve(seq), kv_memory)

    def _reserve(self, seq: Sequence) -> int:
        """Return the number of positions of keys and values that a sequence may need."""
        return seq.limit + self._drafter.extra_nodes

    def _is_late(self, spent: float) -> bool:
        """Return whether another chunk would take prefill beyond `chunk_seconds`."""
        tokens = LARGEST_CHUNK
        if self._prefill is None and self.waiting:
            tokens = len(self.waiting[0].tokens)
        seconds = min(tokens, self._chunk_size()) / self._prefill_rate
        return spent + seconds > self._limits.chunk_seconds

    def _begin_prefill(self, seq: Sequence) -> tuple[Sequence, Generator[int, None, None]]:
        """Take the first sequence out of the queue. Return it with the chunks of its prefill."""
        self.admitted.append(seq)
        self.waiting.popleft()
        seq.phase = Phase.PREFILLING
        seq.rows = min(len(self.running) + len(self.waiting) + 1, self._limits.max_rows)
        if seq.waited is None:
            seq.waited = perf_counter() - seq.added_at
        return seq, self._chunks(seq, self._chunk_size())

    def _chunks(self, seq: Sequence, size: int) -> Generator[int, None, None]:
        """Read a prompt, and yield the number of tokens in each chunk."""
        score_chunk = None
        target_size = size
        seq.prompt_logprobs = None
        if seq.request.prompt_logprobs and not seq.output:
            score_chunk = seq.score_prompt
            target_size = min(size, LARGEST_SCORED_CHUNK)
            seq.prompt_logprobs = []
        started_at = self._target.clock()
        for tokens in self._target.prefill(
            seq.tokens[:-1],
            target_size,
            seq.request.cache_salt,
            self._capture,
            score_chunk,
            self._drafter.reads,
        ):
            if tokens >= SMALLEST_CHUNK:
                self._prefill_rate = tokens / max(self._target.clock() - started_at, 1e-9)
            seq.report(self._target.prompt_read)
            yield tokens
            started_at = self._target.clock()
        self._target.join(seq.id, self._reserve(seq))
        hidden = self._target.prompt_hidden
        if hidden is not None and self._target.keeps_prefixes:
            seq.features = RecentStates(self._drafter.reads, len(seq.tokens) - 1, hidden)
        if not seq.request.plain:
            yield from self._drafter.admit(seq, hidden, size)

    def _chunk_size(self) -> int:
        """Return the number of prompt tokens that fill `chunk_seconds`.

        It is a power of two, so that few sizes occur. If nothing runs it may be larger, because
        then nobody waits for the next step.
        """
        tokens = int(max(self._prefill_rate * self._limits.chunk_seconds, 1))
        power = 1 << (tokens.bit_length() - 1)
        smallest = SMALLEST_CHUNK if self.running else SMALLEST_IDLE_CHUNK
        return min(max(power, smallest), LARGEST_CHUNK)

    # Leaving.

    def release_aborted(self) -> None:
        """End and report the sequences that were aborted since the last step."""
        aborted = set(self._aborted)
        if not aborted:
            return
        for seq in list(self.waiting):
            if seq.id in aborted:
                seq.finish_reason = "abort"
                seq.phase = Phase.ENDED
                self.waiting.remove(seq)
                self._reports.add_end(seq)
        if self._prefill is not None and self._prefill[0].id in aborted:
            self._prefill[1].close()
            self._prefill = None
        leaving = [seq for seq in self.admitted if seq.id in aborted]
        for seq in leaving:
            seq.finish_reason = "abort"
        self.release(leaving)
        for seq in leaving:
            self._reports.add_end(seq)
        self.dismiss(leaving)
        while self._aborted and self._aborted[0] in aborted:
            self._aborted.popleft()

    def release(self, seqs: abc.Sequence[Sequence]) -> None:
        """Take the rows of sequences. They stay admitted until `dismiss` or `requeue`.

        The keys and values of a sequence that has ended without an error are saved as a prefix.
        """
        if not seqs:
            return
        for seq in seqs:
            seq.phase = Phase.LEAVING
        if not self.waiting and all(seq.phase is Phase.LEAVING for seq in self.admitted):
            # Before the rows go, because a long prompt would be copied back from its row.
            self._target.forget_prompt()
        for seq in seqs:
            if seq.finish_reason in ("stop", "length", "abort"):
                hidden = seq.features.joined() if seq.features is not None else None
                self._target.save_prefix(
                    seq.id, seq.tokens, hidden, seq.request.cache_salt, self._capture
                )
            seq.features = None
            self._drafter.drop(seq)
            self._target.drop(seq.id)

    def dismiss(self, seqs: abc.Sequence[Sequence]) -> None:
        """Forget sequences whose end has been reported."""
        for seq in seqs:
            seq.phase = Phase.ENDED
        self.admitted = [seq for seq in self.admitted if seq.phase is not Phase.ENDED]

    def requeue(self, seqs: abc.Sequence[Sequence]) -> None:
        """Put admitted sequences without a row back in front of the queue, in this order."""
        self.waiting.extendleft(reversed(seqs))
        for seq in seqs:
            seq.phase = Phase.WAITING
        self.admitted = [seq for seq in self.admitted if seq.phase is not Phase.WAITING]

    def requeue_all(self) -> None:
        """Put admitted sequences back, the oldest first, except those whose end is reported.

        The caller has reset the target, so that no sequence has a row.
        """
        ended = self._reports.ended
        queued = {seq.id for seq in list(self.waiting)}
        lost = [seq for seq in self.admitted if seq.id not in ended | queued]
        self._prefill = None
        self.waiting.extendleft(sorted(lost, key=lambda seq: seq.id, reverse=True))
        for seq in self.admitted:
            seq.phase = Phase.ENDED if seq.id in ended else Phase.WAITING
            seq.features = None
        self.admitted = []
