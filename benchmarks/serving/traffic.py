"""Requests that come one after another or by a clock, and how long each of them waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise
from random import Random
from statistics import median
from typing import Any, Protocol

import numpy as np

from forerun.api.load import Decoder
from forerun.bench.measure import forget_phrases
from forerun.engine.sequence import Request
from forerun.sampling.params import SamplingParams

STATIC_CHUNK_SECONDS = 60.0  # of prompts read in one step of a static batch


@dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        clients: a closed loop: each client asks again as soon as it is answered. None for an open
            loop.
        rate: an open loop: mean requests per second; the times between them are exponential
            (Poisson arrivals).
    """

    clients: int | None = None
    rate: float | None = None

    @property
    def kind(self) -> str:
        return "clients" if self.clients is not None else "rate"

    @property
    def size(self) -> str:
        return f"{self.clients if self.clients is not None else self.rate:g}"


@dataclass(frozen=True)
class Job:
    """A request of a load.

    Attributes:
        prompt: its tokens.
        new_tokens: how many are wanted.
        due: when it comes, in seconds from the start.
        seed: of sampling.
    """

    prompt: tuple[int, ...]
    new_tokens: int
    due: float
    seed: int


def jobs_of(
    load: Load,
    prompts: Sequence[Sequence[int]],
    requests: int,
    new_tokens: tuple[int, int],
    seed: int,
) -> list[Job]:
    """Return the requests of a load.

    Lengths are uniform in `new_tokens`. They and the arrivals follow from the seed alone.
    """
    lengths = Random(seed)
    gaps = Random(seed)
    dues = [0.0] * requests
    if load.rate is not None:
        dues[1:] = accumulate(gaps.expovariate(load.rate) for _ in range(requests - 1))
    return [
        Job(tuple(prompts[place % len(prompts)]), lengths.randint(*new_tokens), due, seed + place)
        for place, due in enumerate(dues)
    ]


@dataclass(frozen=True)
class Event:
    """What happened to a request, by its key, at a time of the clock.

    The first event of a request says that it has begun.
    """

    key: int
    time: float
    tokens: Sequence[int] = ()
    done: bool = False


class Server(Protocol):
    """What a load is put on."""

    def add(self, job: Job) -> int:
        """Take a request and return its key, without waiting."""
        ...

    def step(self, timeout: float | None) -> list[Event]:
        """Go on until something happens.

        A server that can wait returns after `timeout` seconds at the latest.
        """
        ...


class EngineServer:
    """A method of ours.

    With `batch` it serves static batches: so many requests, or as many as there are, begin when all
    of the batch before have ended.
    """

    def __init__(self, decoder: Decoder, params: SamplingParams, batch: int | None = None) -> None:
        self.decoder = decoder
        self.params = params
        self.batch = batch
        self.queue: deque[tuple[int, Request]] = deque()
        self.keys: dict[int, int] = {}  # by the engine's ids
        self.begun: set[int] = set()  # the engine's ids
        self._count = count()
        forget_phrases(decoder)
        if batch is not None:
            # Nobody decodes yet who would wait for the others' prompts.
            decoder.engine.limits.chunk_seconds = STATIC_CHUNK_SECONDS

    def add(self, job: Job) -> int:
        key = next(self._count)
        params = replace(self.params, max_new_tokens=job.new_tokens, seed=job.seed)
        self.queue.append((key, self.decoder.request(list(job.prompt), params)))
        return key

    def step(self, timeout: float | None) -> list[Event]:
        self._admit()
        before = time.perf_counter()
        steps = self.decoder.engine.step()
        now = time.perf_counter()
        events = self._beginnings(before)
        for step in steps:
            if step.error is not None:
                raise step.error
            is_done = step.finish_reason is not None
            events.append(Event(self.keys[step.id], now, step.tokens, is_done))
            if is_done:
                del self.keys[step.id]
                self.begun.discard(step.id)
        return events

    def _admit(self) -> None:
        """Give the engine waiting requests, if it may take some now."""
        engine = self.decoder.engine
        if self.batch is not None and engine.busy:
            return
        for _ in range(min(len(self.queue), self.batch or len(self.queue))):
            key, request = self.queue.popleft()
            self.keys[engine.add(request)] = key

    def _beginnings(self, at: float) -> list[Event]:
        """Return events of the requests that have left the engine's queue."""
        waiting = {seq.id for seq in self.decoder.engine.waiting}
        fresh = [id for id in self.keys if id not in waiting and id not in self.begun]
        self.begun.update(fresh)
        return [Event(self.keys[id], at) for id in fresh]


@dataclass
class Served:
    """What became of a request, in seconds from the start.

    Attributes:
        due: when it came.
        begun: when it began; None if it has not.
        tokens: its output.
        times: when each token of it was there.
    """

    due: float
    begun: float | None = None
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


def drive(
    server: Server,
    jobs: Sequence[Job],
    clients: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Served]:
    """Put a load on a server until all requests are answered.

    With `clients`, that many requests are open while there are enough of them. Without, each comes
    when it is due, whatever the server does.
    """
    start = clock()
    coming = deque(jobs)
    served: list[Served] = []
    open_requests: dict[int, Served] = {}

    def may_come() -> bool:
        if clients:
            return len(open_requests) < clients
        return coming[0].due <= clock() - start

    while coming or open_requests:
        while coming and may_come():
            job = coming.popleft()
            request = Served(clock() - start if clients else job.due)
            served.append(request)
            open_requests[server.add(job)] = request
        timeout = None
        if coming and not clients:
            timeout = max(0.0, coming[0].due - (clock() - start))
        if not open_requests:
            sleep(timeout or 0.0)
            continue
        for event in server.step(timeout):
            request = open_requests[event.key]
            at = event.time - start
            if request.begun is None:
                request.begun = at
            request.tokens += event.tokens
            request.times += [at] * len(event.tokens)
            if event.done:
                del open_requests[event.key]
    return served


def figures(served: Sequence[Served]) -> dict[str, float]:
    """Return the figures of a load.

    Milliseconds are from a request's coming to its first token (ttft), per further token (tpot), of
    waiting in the queue (wait), and between the steps that brought a request's tokens (gap).
    """
    tokens = sum(len(request.tokens) for request in served)
    seconds = max(request.times[-1] for request in served)
    results = {"tokens_per_s": tokens / seconds, "tokens": tokens, "seconds": seconds}
    samples: dict[str, list[float]] = {"ttft": [], "tpot": [], "wait": [], "gap": []}
    for request in served:
        times = request.times
        samples["ttft"].append(times[0] - request.due)
        if len(times) > 1:
            samples["tpot"].append((times[-1] - times[0]) / (len(times) - 1))
        samples["wait"].append((request.begun or request.due) - request.due)
        samples["gap"] += [late - soon for soon, late in pairwise(times) if late > soon]
    for name, values in samples.items():
        for label, rank in (("p50", 50), ("p99", 99), ("max", 100)):
            value = float(np.percentile(values or [0.0], rank))
            results[f"{name}_ms_{label}"] = 1000 * value
    return {name: round(value, 3) for name, value in results.items()}


def medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median over rounds of each figure."""
    results = {}
    for name in rounds[0]:
        results[name] = round(median(row[name] for row in rounds), 3)
    return results


def rows_over_time(
    served: Sequence[Served], first: Callable[[Served], float]
) -> tuple[list[float], list[int]]:
    """Return when the number of requests between `first` and their end changed, and to what."""
    begins = [(first(request), 1) for request in served]
    ends = [(request.times[-1], -1) for request in served]
    changes = sorted(begins + ends)
    return [at for at, _ in changes], list(accumulate(change for _, change in changes))
