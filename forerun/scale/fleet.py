"""Many replicas in place of one worker: requests go to one of them, and go on elsewhere when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from secrets import randbits
from time import monotonic, perf_counter
from typing import Protocol

from forerun.api.decoder import Decoder
from forerun.engine.engine import Step
from forerun.engine.sequence import Request
from forerun.scale.messages import ModelInfo, SentRequest, Steps
from forerun.scale.routing import beginning, choose
from forerun.server.backend import Job, Load
from forerun.server.errors import ApiError, loading, queue_full, shutting_down, to_api_error

_LOG = logging.getLogger("forerun.server")

LOSSES = 4  # replicas that an answer may lose: some answers are what kills them
SILENCE = 20.0  # seconds without a message, after which a replica counts as lost; it sends one every `messages.BEAT`
AWAY = 15.0  # seconds that a lost replica gets nothing, if it is there at all
LOOK = 0.1  # seconds between two looks for a replica
_ELSEWHERE = ("loading", "shutting_down")


class LostError(Exception):
    """A replica did not go on."""


class Replicas(Protocol):
    """Engines elsewhere."""

    async def model(self) -> ModelInfo:
        """Wait for the first one."""
        ...

    def figures(self) -> Mapping[str, Mapping[str, float]]:
        """Return the replicas that can be asked now, with the last known fields of `Load` of each."""
        ...

    def decode(self, name: str, sent: Sequence[SentRequest]) -> AsyncGenerator[Steps, None]:
        """Yield what `messages.decode` does. Raises its ApiError, which by its code may be the replica's matter
        (`_ELSEWHERE`), and LostError for all that happens to a replica."""
        ...


class _Group:
    """The requests of a body with one prompt. They stay together: the first one has the prompt's log probabilities."""

    def __init__(self, sent: dict[int, SentRequest]) -> None:
        self.sent = sent  # by index of the choice
        self.emitted: dict[int, list[int]] = {index: [] for index in sent}
        self.key = beginning(next(iter(sent.values())).tokens)
        self.name: str | None = None  # its replica
        self.lost = 0  # replicas before that one
        self.last_message = perf_counter()

    def rest(self) -> list[SentRequest]:
        """Return what is still to be decoded."""
        return [replace(each, emitted=tuple(self.emitted[index])) for index, each in self.sent.items()]


class Fleet:
    """The server's `Backend` whose engines are elsewhere.

    Attributes:
        loads: requests in flight, by replica.
        resumed: how often the requests of a body with one prompt went on with another replica.
        recovered: seconds from the last message of the lost replica to the first tokens of the next one.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.decoder: Decoder | None = None
        self.ready = asyncio.Event()
        self.failed: BaseException | None = None
        self.on_step: Callable[[Step, float], None] = lambda step, at: None
        self.on_failure: Callable[[], None] = lambda: None
        self._model: ModelInfo | None = None
        self.loads: Counter[str] = Counter()
        self.resumed, self.recovered = 0, deque[float](maxlen=1000)
        self._away: dict[str, float] = {}  # time until which a replica is not asked
        self._hits: dict[str, int] = {}
        self._jobs: dict[Job, list[asyncio.Task[None]]] = {}

    def start(self) -> None:
        self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        try:
            self._model = await self._replicas.model()
            self.decoder = self._model.decoder()
            self.ready.set()
        except Exception as error:
            self.failed = error
            self.on_failure()

    async def stop(self) -> None:
        self._connecting.cancel()
        self.give_up(shutting_down())

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise loading()
        return self._model

    def load(self) -> Load:
        """Return sums over the replicas."""
        total: Counter[str] = Counter()
        for name, figures in self._replicas.figures().items():
            total.update({each: int(value) for each, value in figures.items()})
            self._hits[name] = int(figures.get("hits", 0))  # kept when a replica goes: it is a counter
        return Load(**{**total, "hits": sum(self._hits.values())})

    def submit(self, requests: Sequence[Request], begun: float) -> Job:
        job, model = Job(begun), self.model
        capacity, running = model.capacity, sum(len(each.open) for each in self._jobs)
        if capacity is not None and len(requests) > capacity:
            raise ApiError(400, f"{len(requests)} answers at once; a replica holds {capacity}", "n")
        if capacity is not None and running + len(requests) > capacity * max(1, len(self.available())):
            raise queue_full()
        longest = max((len(each.tokens) + each.max_new_tokens for each in requests), default=0)
        longest = min(longest, model.context or longest)
        if model.positions is not None and longest > model.positions:
            message = f"the prompt and its new tokens are {longest}; a replica has memory for {model.positions}"
            raise ApiError(400, message, "max_tokens")
        seed, tasks = randbits(61), []
        for _, same in groupby(enumerate(requests), key=lambda each: list(each[1].tokens)):
            group = _Group({choice: SentRequest.of(request, seed) for choice, request in same})
            self._place(group)  # at once, so that the next one counts it
            tasks.append(asyncio.ensure_future(self._follow(job, group)))
        self._jobs[job], job.open = tasks, {choice: choice for choice in range(len(requests))}
        return job

    def cancel(self, job: Job) -> None:
        job.open.clear()
        for task in self._jobs.pop(job, ()):
            if task is not asyncio.current_task():
                task.cancel()

    def give_up(self, error: ApiError) -> None:
        for job in [job for job in self._jobs if job.open]:
            self._fail(job, error)

    def _fail(self, job: Job, error: ApiError) -> None:
        job.fail(error)
        self.cancel(job)

    def available(self) -> dict[str, int]:
        """Return the requests in flight on each replica that can be asked."""
        now = monotonic()
        self._away = {name: until for name, until in self._away.items() if until > now}
        return {name: self.loads[name] for name in self._replicas.figures() if name not in self._away}

    def _place(self, group: _Group) -> None:
        """Give a group to a replica, if one has room for it."""
        group.name = choose(group.key, self.available(), len(group.sent), self.model.capacity)
        if group.name is not None:
            self.loads[group.name] += len(group.sent)

    def _release(self, group: _Group, requests: int) -> None:
        if group.name is not None:
            self.loads[group.name] -= requests
            if not self.loads[group.name]:
                del self.loads[group.name]

    async def _follow(self, job: Job, group: _Group) -> None:
        """Decode a group, wherever that is possible."""
        try:
            while group.sent:
                if group.name is None:
                    await asyncio.sleep(LOOK)
                    self._place(group)
                    continue
                try:
                    await self._read(job, group)
                    continue
                except LostError as error:
                    self._lose(group, str(error))
                except ApiError as error:
                    if error.code == "queue_full":  # other apps ask it as well
                        self._away[group.name] = monotonic() + 10 * LOOK
                    elif error.code in _ELSEWHERE:
                        self._lose(group, error.message)
                    else:
                        raise
                self._release(group, len(group.sent))
                group.name = None
        except ApiError as error:
            self._fail(job, error)
        except Exception as error:
            _LOG.exception("a request failed")
            self._fail(job, to_api_error(error))
        finally:
            self._release(group, len(group.sent))

    def _lose(self, group: _Group, why: str) -> None:
        """Take a group from a replica that is lost. Raises ApiError if it has lost too many."""
        assert group.name is not None
        _LOG.warning("replica %s is lost: %s", group.name, why)
        self._away[group.name] = monotonic() + AWAY
        group.lost += 1
        if group.lost > LOSSES:
            raise ApiError(500, f"decoding failed: {group.lost} replicas were lost with it", code="replica_lost")
        self.resumed += 1

    async def _read(self, job: Job, group: _Group) -> None:
        """Take the steps of a replica."""
        assert group.name is not None
        order, stream = list(group.sent), self._replicas.decode(group.name, group.rest())
        resumed_from = group.last_message if group.lost else None
        try:
            while True:
                try:
                    found = await asyncio.wait_for(anext(stream), SILENCE)
                except StopAsyncIteration:
                    break
                except TimeoutError:
                    raise LostError(f"nothing came for {SILENCE:g} seconds") from None
                at = group.last_message = perf_counter()
                if found and resumed_from is not None:
                    self.recovered.append(at - resumed_from)
                    resumed_from = None
                for index, step in found:
                    self._take(job, group, order[index], step, at)
        finally:
            await stream.aclose()
        if group.sent:
            raise LostError("its answer broke off")

    def _take(self, job: Job, group: _Group, choice: int, step: Step, at: float) -> None:
        group.emitted[choice] += step.tokens
        if step.finish_reason is not None:
            self._release(group, 1)
            del group.sent[choice]
        self.on_step(step, at)
        if step.error is not None:
            raise to_api_error(step.error)
        if job in self._jobs:
            job.put(choice, step, at)
            if step.finish_reason is not None:
                del job.open[choice]
