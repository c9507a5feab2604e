"""Which sequences of an engine have rows: the queue, admission with its prefill, and leaving."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import count
from time import perf_counter

from forerun.engine.reading import MAX_READINGS, Chunk, PrefillRates, Reading, Readings
from forerun.engine.recent_states import RecentStates
from forerun.engine.reporting import Reports
from forerun.engine.retries import Retries
from forerun.engine.sequence import Phase, Request, Sequence
from forerun.engine.step import Drafter
from forerun.engine.target import EngineChunks, Target
from forerun.failures import UNATTRIBUTABLE

# Numbers of prompt tokens that are read at once.
SMALLEST_CHUNK = 16  # after 6,000 tokens it can take a tenth of a second
SMALLEST_IDLE_CHUNK = 256  # if nothing runs, because C reads weights once for so many tokens
LARGEST_CHUNK = 2048
COPIES = 256  # tokens for which the copies of a long prompt count, so that short ones go first
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
        self._readings = Readings()
        # Until a rate is measured, a first chunk has 256 tokens.
        self._rates = PrefillRates(256 / limits.chunk_seconds)

    @property
    def running(self) -> list[Sequence]:
        """Return the sequences that are decoded."""
        return [seq for seq in self.admitted if seq.phase is Phase.RUNNING]

    @property
    def prefilling(self) -> int:
        """Return how many prompts are being read; their sequences neither wait nor run."""
        return len(self._readings)

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
        if not self._fits(0, self._reserve(seq)):
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
        """Read prompts of waiting sequences in turns, for about `chunk_seconds`.

        If nothing runs, it reads as many tokens as the largest chunk has. Once a prompt has been
        read, a step comes before the next prompt if more than a chunk of that is left. An abort
        ends this early.

        Args:
            on_failure: called with a sequence, alone in its list, and the exception that its
                prefill raised. The sequence is at the front of the queue again by then.
        """
        started_at = self._target.clock()
        tokens_left = LARGEST_CHUNK
        rows = len(self.running)
        while self._take_waiting():
            reading = self._readings.next()
            try:
                tokens_left -= self._read_on(reading)
            except UNATTRIBUTABLE:
                raise
            except BaseException as error:
                self._readings.end(reading)
                self.release([reading.seq])
                self._target.forget_prompt()
                self.requeue([reading.seq])
                on_failure([reading.seq], error)
                continue
            spent = self._target.clock() - started_at
            has_newcomer = len(self.running) > rows
            if has_newcomer and self._next_left() > self._chunk_size(self._next_position()):
                unused = 1.0 - spent / self._limits.chunk_seconds
                self._readings.count_early_step(max(0.0, unused))
                return
            is_over = self._is_late(spent) if rows else tokens_left <= 0
            if is_over or self._aborted:
                return

    def _read_on(self, reading: Reading) -> int:
        """Read a chunk of a prompt, and return its tokens. After the last one its sequence runs."""
        tokens = 0
        chunk = Chunk(0, 0)
        started_at = self._target.clock()
        for chunk in reading.chunks:
            tokens += chunk.size
            if chunk.left:
                break
        seconds = self._target.clock() - started_at
        self._readings.count(reading, chunk, seconds / self._limits.chunk_seconds)
        if chunk.left:
            return tokens
        self._readings.end(reading)
        reading.seq.phase = Phase.RUNNING
        return tokens

    def _take_waiting(self) -> bool:
        """Begin with prompts in the order of the queue; return whether there are any to read."""
        while len(self._readings) < MAX_READINGS and self._next_fits():
            self._begin_reading(self.waiting[0])
        return bool(self._readings)

    def _next_fits(self) -> bool:
        """Return whether the first waiting sequence may leave the queue."""
        taken = self.running + self._readings.seqs
        if not self.waiting or len(taken) >= self._limits.max_rows:
            return False
        if not self._retries.may_join(taken):
            return False
        reserve = max(self._reserve(self.waiting[0]), self._readings.reserve)
        return not taken or self._fits(len(taken), reserve)

    def _fits(self, rows: int, reserve: int) -> bool:
        """Return whether the KV budget holds a row of `reserve` positions beside `rows` others."""
        kv_memory = self._limits.kv_memory
        return kv_memory is None or self._target.fits(rows, reserve, kv_memory)

    def _reserve(self, seq: Sequence) -> int:
        """Return the number of positions of keys and values that a sequence may need."""
        return seq.limit + self._drafter.extra_nodes

    def _is_late(self, spent: float) -> bool:
        """Return whether another chunk would take prefill beyond `chunk_seconds`."""
        position = self._next_position()
        tokens = min(self._next_left(), self._chunk_size(position))
        if self._readings and self._readings.next().is_copying:
            tokens = 0
        return spent + tokens / self._rates.at(position) > self._limits.chunk_seconds

    def _next_position(self) -> int:
        """Return how many tokens have been read of the prompt whose turn is next."""
        return self._readings.next().position if self._readings else 0

    def _next_left(self) -> int:
        """Return how many tokens are left of the prompt whose turn is next, at most."""
        if self._readings:
            return self._readings.next().left
        return len(self.waiting[0].tokens) if self.waiting else LARGEST_CHUNK

    def _begin_reading(self, seq: Sequence) -> None:
        """Take the first sequence out of the queue, and let its prompt be read in turns."""
        self.admitted.append(seq)
        self.waiting.popleft()
        seq.phase = Phase.PREFILLING
        seq.rows = min(len(self.admitted) + len(self.waiting), self._limits.max_rows)
        chunks = self._chunks(seq)
        self._readings.add(Reading(seq, chunks, self._reserve(seq), len(seq.tokens)))

    def _chunks(self, seq: Sequence) -> Generator[Chunk, None, None]:
        """Read a prompt, first with the target and then with the drafter.

        A long prompt is also copied to the prefix store, a layer at a time, and to its row if its
        memory cannot be moved there. Steps and other prompts may come between these pieces.
        """
        if seq.waited is None:
            seq.waited = perf_counter() - seq.added_at
        score_chunk = None
        largest = LARGEST_CHUNK
        seq.prompt_logprobs = None
        if seq.request.prompt_logprobs and not seq.output:
            score_chunk = seq.score_prompt
            largest = LARGEST_SCORED_CHUNK
            seq.prompt_logprobs = []
        length = len(seq.tokens) - 1
        copies = COPIES if length > LARGEST_CHUNK else 0
        started_at = self._target.clock()
        for tokens in self._target.prefill(
            seq.tokens[:-1],
            lambda: min(self._chunk_size(self._target.prompt_read), largest),
            seq.request.cache_salt,
            self._capture,
            score_chunk,
            self._drafter.reads,
        ):
            if tokens >= SMALLEST_CHUNK:
                seconds = self._target.clock() - started_at
                self._rates.measure(self._target.prompt_read - tokens, tokens, seconds)
            if tokens:
                seq.report(self._target.prompt_read)
            position = self._target.prompt_read
            left = length - position
            is_copying = not (tokens and left)
            yield Chunk(tokens, left + copies, is_copying, position)
            started_at = self._target.clock()
        self._target.join(seq.id, self._reserve(seq))
        hidden = self._target.prompt_hidden
        if hidden is not None and self._target.keeps_prefixes:
            seq.features = RecentStates(self._drafter.reads, length, hidden)
        if seq.request.plain:
            return
        if copies:
            yield Chunk(0, length)
        count = 0
        chunks = EngineChunks(lambda: self._chunk_size(count), self._has_one)
        for tokens in self._drafter.admit(seq, hidden, chunks):
            count += tokens
            yield Chunk(tokens, max(0, length - count) + copies, not tokens, count)

    def _chunk_size(self, position: int) -> int:
        """Return the number of prompt tokens from a position on that fill `chunk_seconds`.

        It is a power of two, so that few sizes occur. If nothing runs, or one sequence alone whose
        drafter reads its prompt, it may be larger, because then nobody waits for the next step.
        """
        tokens = int(max(self._rates.at(position) * self._limits.chunk_seconds, 1))
        power = 1 << (tokens.bit_length() - 1)
        is_busy = bool(self.running) and not self._has_one()
        smallest = SMALLEST_CHUNK if is_busy else SMALLEST_IDLE_CHUNK
        return min(max(power, smallest), LARGEST_CHUNK)

    def _has_one(self) -> bool:
        """Return whether there is one request alone, in whatever phase."""
        return len(self.admitted) == 1 and not self.waiting

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
        self._readings.end_of(aborted)
        leaving = [seq for seq in self.admitted if seq.id in aborted]
        for seq in leaving:
            seq.finish_reason = "abort"
        self.end(leaving)
        while self._aborted and self._aborted[0] in aborted:
            self._aborted.popleft()

    def end(self, seqs: abc.Sequence[Sequence]) -> None:
        """Release and report sequences that have ended outside of a step."""
        self.release(seqs)
        for seq in seqs:
            self._reports.add_end(seq)
        self.dismiss(seqs)

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
        self._readings.clear()
        self.waiting.extendleft(sorted(lost, key=lambda seq: seq.id, reverse=True))
        for seq in self.admitted:
            seq.phase = Phase.ENDED if seq.id in ended else Phase.WAITING
            seq.features = None
        self.admitted = []
