"""An engine that is only reckoned: it admits and steps as `forerun.engine` does, and a cost table is its clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil, inf

from forerun.bench.arrivals import Arrival
from forerun.costs import Costs

CHUNKS, CHUNK_SECONDS = (32, 2048), 0.1  # the engine's (`forerun.engine`, which needs torch)


@dataclass(frozen=True)
class Engines:
    """What all replicas are like.

    Attributes:
        costs: of forwards; the target's take longer than 0 ms.
        rows: sequences that one decodes at once.
        kv: positions that its keys and values have room for, None for no bound. As in the engine they are a rectangle:
            rows times the longest reservation.
        gamma, tau: tokens drafted a step, and tokens that a step brings.
        step_ms: of a step beyond its forwards.
    """

    costs: Costs
    rows: int
    kv: int | None = None
    gamma: int = 0
    tau: float = 1.0
    step_ms: float = 0.0

    def __post_init__(self) -> None:
        if not min(self.costs.target.values(), default=0.0) > 0:
            raise ValueError("the costs of the target's forwards must be above 0 ms")
        for name, value in (("rows", self.rows), ("kv", self.kv)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.gamma < 0:
            raise ValueError(f"gamma must be 0 or more, not {self.gamma}")
        if not 1 <= self.tau <= self.gamma + 1:
            raise ValueError(f"tau must be from 1 to gamma + 1 = {self.gamma + 1} tokens a step, not {self.tau:g}")
        if not 0 <= self.step_ms < inf:
            raise ValueError(f"step_ms must be 0 or more, not {self.step_ms}")

    def step(self, rows: int) -> float:
        """Seconds of a step of so many rows."""
        drafting = self.costs.drafting if self.costs.draft else self.costs.heading if self.costs.head else None
        drafts = self.gamma * drafting(rows) if drafting is not None else 0.0
        return (self.costs.verify(rows * (self.gamma + 1)) + drafts + self.step_ms) / 1000

    def read(self, tokens: int) -> float:
        """Seconds of so many tokens of a prompt, by target and draft."""
        drafts = self.costs.drafting(tokens) if self.gamma and self.costs.draft else 0.0
        return (self.costs.verify(tokens) + drafts) / 1000

    @property
    def chunk(self) -> int:
        """Tokens of a prompt between two steps: a power of two that takes about CHUNK_SECONDS."""
        found = CHUNKS[0]
        while found < CHUNKS[1] and self.read(2 * found) <= CHUNK_SECONDS:
            found *= 2
        return found


@dataclass
class Served:
    """A request under way. Times are those of the trace; `steps` are left."""

    arrival: Arrival
    unread: int
    steps: int
    reserve: int
    first: float | None = None
    last: float = 0.0


@dataclass
class Replica:
    """One engine. `now` is when it begins its next round."""

    engines: Engines
    now: float = 0.0
    waiting: deque[Served] = field(default_factory=deque)
    reading: Served | None = None
    running: list[Served] = field(default_factory=list)
    done: list[Served] = field(default_factory=list)
    busy: float = 0.0
    kv: int = 0  # most positions that were reserved
    width: int = 0  # most rows

    def add(self, arrival: Arrival) -> None:
        engines = self.engines
        if not self.waiting and self.reading is None and not self.running:
            self.now = max(self.now, arrival.seconds)
        reserve = arrival.prompt + arrival.output + engines.gamma
        if engines.kv is not None and reserve > engines.kv:
            raise ValueError(f"a request of {arrival.prompt} + {arrival.output} tokens does not fit kv {engines.kv}")
        steps = ceil(arrival.output / (arrival.tau or engines.tau))
        self.waiting.append(Served(arrival, arrival.prompt - 1, steps, reserve))

    def in_flight(self, at: float) -> int:
        """Requests that have not ended at a time."""
        late = 0
        for seq in reversed(self.done):
            if seq.last <= at:
                break
            late += 1
        return late + len(self.waiting) + len(self.running) + (self.reading is not None)

    def run(self, until: float) -> None:
        """All rounds that begin before a time."""
        while self.now < until and (self.waiting or self.reading is not None or self.running):
            begun = self.now
            self._admit()
            if self.running:
                self._step(until)
            self.busy += self.now - begun

    def _fits(self) -> bool:
        if not self.waiting or len(self.running) >= self.engines.rows:
            return False
        return not self.running or self.engines.kv is None or self._reserved(self.waiting[0]) <= self.engines.kv

    def _reserved(self, more: Served | None = None) -> int:
        all_ = [*self.running, *([more] if more is not None else [])]
        return len(all_) * max(seq.reserve for seq in all_)

    def _admit(self) -> None:
        """`Engine._admit`, with the table for a clock."""
        begun, left, idle, chunk = self.now, CHUNKS[1], not self.running, self.engines.chunk
        while self.reading is not None or self._fits():
            if self.reading is None:
                self.reading = self.waiting.popleft()
            seq, part = self.reading, min(chunk, self.reading.unread)
            if part:
                seq.unread -= part
                left -= part
                self.now += self.engines.read(part)
            else:
                self.running.append(seq)
                self.reading = None
                self.kv, self.width = max(self.kv, self._reserved()), max(self.width, len(self.running))
            next_ = self.waiting[0].arrival.prompt if not part and self.waiting else CHUNKS[1]
            late = self.now - begun + self.engines.read(min(next_, chunk)) > CHUNK_SECONDS
            if left <= 0 if idle else late:
                return

    def _step(self, until: float) -> None:
        """A step, or as many alike as come before anything can change."""
        each, count = self.engines.step(len(self.running)), 1
        changes = self.reading is not None or self._fits() or any(seq.first is None for seq in self.running)
        if not changes:  # until a row ends: who waits now waits for that
            count = min(seq.steps for seq in self.running)
            if until < inf:
                count = max(1, min(count, ceil((until - self.now) / each)))
        self.now += count * each
        for seq in self.running:
            seq.steps -= count
            seq.last = self.now
            seq.first = seq.first if seq.first is not None else self.now
        self.done += [seq for seq in self.running if not seq.steps]
        self.running = [seq for seq in self.running if seq.steps]
