"""Load: requests that come one behind another or by a clock, and how long each of them waits."""

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


@dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        clients: closed loop: each client asks again as soon as it is answered. None in an open loop.
        rate: open loop: mean requests a second; the times between them are exponential (Poisson arrivals).
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
    """A request of a load: a prompt, how many tokens are wanted, when it comes (seconds from the start) and a seed."""

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
    """The requests of a load. Lengths are uniform in `new_tokens`; they and the arrivals follow from the seed alone."""
    lengths, gaps = Random(seed), Random(seed)
    dues = [0.0] * requests
    if load.rate is not None:
        dues[1:] = accumulate(gaps.expovariate(load.rate) for _ in range(requests - 1))
    return [
        Job(tuple(prompts[at % len(prompts)]), lengths.randint(*new_tokens), due, seed + at)
        for at, due in enumerate(dues)
    ]


@dataclass(frozen=True)
class Event:
    """What happened to a request, by its key, at a time of the clock. Its first event means that it has begun."""

    key: int
    time: float
    tokens: Sequence[int] = ()
    done: bool = False


class Server(Protocol):
    """What a load is put on."""

    def add(self, job: Job) -> int:
        """Takes a request; returns its key. Must not wait."""
        ...

    def step(self, timeout: float | None) -> list[Event]:
        """Goes on until something happens, or `timeout` seconds are over where it can wait no shorter."""
        ...


class EngineServer:
    """A method of ours. `batch` makes it serve static batches: so many requests, or as many as there are, begin when
    all of the batch before have ended."""

    def __init__(self, decoder: Decoder, params: SamplingParams, batch: int | None = None) -> None:
        self.decoder, self.params, self.batch = decoder, params, batch
        self.queue: deque[tuple[int, Request]] = deque()
        self.keys: dict[int, int] = {}
        self.begun: set[int] = set()
        self._count = count()
        forget_phrases(decoder)
        if batch is not None:
            decoder.engine.limits.chunk_seconds = (
                60.0  # nobody decodes yet who would wait for the others' prompts
            )

    def add(self, job: Job) -> int:
        params = replace(self.params, max_new_tokens=job.new_tokens, seed=job.seed)
        self.queue.append((next(self._count), self.decoder.request(list(job.prompt), params)))
        return self.queue[-1][0]

    def step(self, timeout: float | None) -> list[Event]:
        engine = self.decoder.engine
        if self.batch is None or not engine.busy:
            for _ in range(min(len(self.queue), self.batch or len(self.queue))):
                key, request = self.queue.popleft()
                self.keys[engine.add(request)] = key
        before = time.perf_counter()
        steps = engine.step()
        now, waiting = time.perf_counter(), {seq.id for seq in engine.waiting}
        fresh = [id for id in self.keys if id not in waiting and id not in self.begun]
        self.begun.update(fresh)
        events = [Event(self.keys[id], before) for id in fresh]
        for step in steps:
            if step.error is not None:
                raise step.error
            events.append(
                Event(self.keys[step.id], now, step.tokens, step.finish_reason is not None)
            )
            if step.finish_reason is not None:
                del self.keys[step.id]
                self.begun.discard(step.id)
        return events


@dataclass
class Served:
    """What became of a request, in seconds from the start: when it came, when it began (None: it has not), its tokens
    and when each of them was there."""

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
    """Puts a load on a server until all requests are answered. With `clients`, that many requests are open while there
    are enough of them; without, each comes when it is due, whatever the server does."""
    start, coming, served = clock(), deque(jobs), list[Served]()
    open: dict[int, Served] = {}
    while coming or open:
        while coming and (len(open) < clients if clients else coming[0].due <= clock() - start):
            job = coming.popleft()
            served.append(Served(clock() - start if clients else job.due))
            open[server.add(job)] = served[-1]
        left = None if clients or not coming else max(0.0, coming[0].due - (clock() - start))
        if not open:
            sleep(left or 0.0)
            continue
        for event in server.step(left):
            one, at = open[event.key], event.time - start
            one.begun = at if one.begun is None else one.begun
            one.tokens += event.tokens
            one.times += [at] * len(event.tokens)
            if event.done:
                del open[event.key]
    return served


def figures(served: Sequence[Served]) -> dict[str, float]:
    """What a load came to. Milliseconds: of the first token behind a request's coming (ttft), of the others each
    (tpot), of waiting in the queue (wait), and of the gaps between the steps that brought a request's tokens (gap)."""
    tokens, seconds = sum(len(one.tokens) for one in served), max(one.times[-1] for one in served)
    samples = {
        "ttft": [one.times[0] - one.due for one in served],
        "tpot": [
            (one.times[-1] - one.times[0]) / (len(one.times) - 1)
            for one in served
            if len(one.times) > 1
        ],
        "wait": [(one.begun or one.due) - one.due for one in served],
        "gap": [late - soon for one in served for soon, late in pairwise(one.times) if late > soon],
    }
    found = {"tokens_per_s": tokens / seconds, "tokens": tokens, "seconds": seconds}
    for name, values in samples.items():
        for rank in (50, 99, 100):
            label = f"p{rank}" if rank < 100 else "max"
            found[f"{name}_ms_{label}"] = 1000 * float(np.percentile(values or [0.0], rank))
    return {name: round(value, 3) for name, value in found.items()}


def middle(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median over rounds of each figure."""
    return {name: round(median(each[name] for each in rounds), 3) for name in rounds[0]}


def rows_over_time(
    served: Sequence[Served], first: Callable[[Served], float]
) -> tuple[list[float], list[int]]:
    """When the number of requests between `first` and their end changed, and what it was from then on."""
    changes = sorted([(first(one), 1) for one in served] + [(one.times[-1], -1) for one in served])
    return [at for at, _ in changes], list(accumulate(change for _, change in changes))
