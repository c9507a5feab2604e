"""Many replicas in the place of one worker: what an app submits goes to one of them, and goes on elsewhere when it is
lost. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from secrets import randbits
from time import monotonic, perf_counter
from typing import Protocol

from forerun.api.decoder import Decoder
from forerun.engine.engine import Step
from forerun.engine.sequence import Request
from forerun.scale.parts import Face, Found, Part
from forerun.scale.routing import beginning, choose
from forerun.server.backend import Job, Load
from forerun.server.errors import ApiError, loading, queue_full, shutting_down, to_api_error

_LOG = logging.getLogger("forerun.server")

LOSSES = 4  # replicas that an answer may lose: some answers are what kills them
SILENCE = 20.0  # seconds without a word, behind which a replica counts as lost; it speaks every `parts.BEAT`
AWAY = 15.0  # seconds that one which was lost gets nothing, if it is there at all
LOOK = 0.1  # seconds until it is looked again whether there is a replica
_ELSEWHERE = ("loading", "shutting_down")


class LostError(Exception):
    """A replica did not go on."""


class Replicas(Protocol):
    """Engines elsewhere."""

    async def face(self) -> Face:
        """Waits for the first one."""
        ...

    def names(self) -> Collection[str]:
        """Those that can be asked now."""
        ...

    def figures(self) -> Mapping[str, Mapping[str, float]]:
        """The last that is known of each: running, waiting, used, allocated, hits."""
        ...

    def decode(self, name: str, parts: Sequence[Part]) -> AsyncGenerator[Found, None]:
        """The steps of parts with one prompt, and empty lists in between. Raises ApiError for what ends the body or,
        by its code, is the replica's matter (`_ELSEWHERE`); LostError for all that happens to a replica."""
        ...


class _Group:
    """The requests of a body with one prompt. They stay together: the first one has the prompt's log probabilities."""

    def __init__(self, parts: dict[int, Part]) -> None:
        self.parts = parts  # by index of the choice
        self.emitted: dict[int, list[int]] = {index: [] for index in parts}
        self.key = beginning(next(iter(parts.values())).tokens)
        self.name: str | None = None  # the replica that has it
        self.lost = 0  # replicas before that one
        self.heard = perf_counter()  # when the last word of one came

    def rest(self) -> list[Part]:
        """What is still to be decoded."""
        return [replace(part, emitted=tuple(self.emitted[index])) for index, part in self.parts.items()]


class Fleet:
    """The server's `Backend` whose engines are elsewhere.

    Attributes:
        resumed: answers, or their parts with one prompt, that went on with another replica.
        recovered: seconds from the last word of the lost replica to the first tokens of the next one.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.decoder: Decoder | None = None
        self.ready = asyncio.Event()
        self.failed: BaseException | None = None
        self.on_step: Callable[[Step, float], None] = lambda step, at: None
        self.on_failure: Callable[[], None] = lambda: None
        self._face: Face | None = None
        self.loads: Counter[str] = Counter()  # requests in flight
        self.resumed, self.recovered = 0, deque[float](maxlen=1000)
        self._away: dict[str, float] = {}  # until when one is not asked
        self._hits: dict[str, int] = {}
        self._jobs: dict[Job, list[asyncio.Task[None]]] = {}

    def start(self) -> None:
        self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        try:
            self._face = await self._replicas.face()
            self.decoder = self._face.decoder()
            self.ready.set()
        except Exception as error:
            self.failed = error
            self.on_failure()

    async def stop(self) -> None:
        self._connecting.cancel()
        self.give_up(shutting_down())

    @property
    def face(self) -> Face:
        if self._face is None:
            raise loading()
        return self._face

    def load(self) -> Load:
        """Sum up what is known of the replicas."""
        total: Counter[str] = Counter()
        for name, figures in self._replicas.figures().items():
            total.update({each: int(value) for each, value in figures.items()})
            self._hits[name] = int(figures.get("hits", 0))  # also of those that are gone: it is a counter
        return Load(**{**total, "hits": sum(self._hits.values())})

    def submit(self, requests: Sequence[Request], begun: float) -> Job:
        job, room, face = Job(begun), self.face.room, self.face
        if room is not None and len(requests) > room:
            raise ApiError(400, f"{len(requests)} answers at once; a replica holds {room}", "n")
        for request in requests:
            if face.positions is not None and face.reserve(request) > face.positions:
                message = f"the prompt and its new tokens need {face.reserve(request)} positions of keys and values"
                raise ApiError(400, f"{message}; a replica holds {face.positions}", "max_tokens")
        running = sum(len(each.open) for each in self._jobs)
        if room is not None and running + len(requests) > room * max(1, len(self._there())):
            raise queue_full()
        seed, tasks = randbits(61), []
        for _, same in groupby(enumerate(requests), key=lambda each: list(each[1].tokens)):
            group = _Group({choice: Part.of(request, seed) for choice, request in same})
            self._place(group)  # at once, so that the next one sees it
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

    def _there(self) -> dict[str, int]:
        """What is in flight on each replica that can be asked."""
        now = monotonic()
        self._away = {name: until for name, until in self._away.items() if until > now}
        return {name: self.loads[name] for name in self._replicas.names() if name not in self._away}

    def _place(self, group: _Group) -> None:
        """Gives a group to a replica, if there is one for it."""
        group.name = choose(group.key, self._there(), len(group.parts), self.face.room)
        if group.name is not None:
            self.loads[group.name] += len(group.parts)

    def _release(self, group: _Group, requests: int) -> None:
        if group.name is not None:
            self.loads[group.name] -= requests
            if not self.loads[group.name]:
                del self.loads[group.name]

    async def _follow(self, job: Job, group: _Group) -> None:
        """Decodes a group, wherever that can be."""
        try:
            while group.parts:
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
                    if error.code == "queue_full":  # others ask it as well
                        self._away[group.name] = monotonic() + 10 * LOOK
                    elif error.code in _ELSEWHERE:
                        self._lose(group, error.message)
                    else:
                        raise
                self._release(group, len(group.parts))
                group.name = None
        except ApiError as error:
            self._fail(job, error)
        except Exception as error:
            _LOG.exception("a request failed")
            self._fail(job, to_api_error(error))
        finally:
            self._release(group, len(group.parts))

    def _lose(self, group: _Group, why: str) -> None:
        """A replica is gone while it had a group. Raises ApiError where too many are."""
        assert group.name is not None
        _LOG.warning("replica %s is lost: %s", group.name, why)
        self._away[group.name] = monotonic() + AWAY
        group.lost += 1
        if group.lost > LOSSES:
            raise ApiError(500, f"decoding failed: {group.lost} replicas were lost with it", code="replica_lost")
        self.resumed += 1

    async def _read(self, job: Job, group: _Group) -> None:
        """Takes what a replica gives."""
        assert group.name is not None
        order, stream = list(group.parts), self._replicas.decode(group.name, group.rest())
        resumed_from = group.heard if group.lost else None
        try:
            while True:
                try:
                    found = await asyncio.wait_for(anext(stream), SILENCE)
                except StopAsyncIteration:
                    break
                except TimeoutError:
                    raise LostError(f"nothing came for {SILENCE:g} seconds") from None
                at = group.heard = perf_counter()
                if found and resumed_from is not None:
                    self.recovered.append(at - resumed_from)
                    resumed_from = None
                for which, step in found:
                    self._take(job, group, order[which], step, at)
        finally:
            await stream.aclose()
        if group.parts:
            raise LostError("its answer broke off")

    def _take(self, job: Job, group: _Group, choice: int, step: Step, at: float) -> None:
        group.emitted[choice] += step.tokens
        if step.finish_reason is not None:
            self._release(group, 1)
            del group.parts[choice]
        self.on_step(step, at)
        if step.error is not None:
            raise to_api_error(step.error)
        if job in self._jobs:
            job.put(choice, step, at)
            if step.finish_reason is not None:
                del job.open[choice]
