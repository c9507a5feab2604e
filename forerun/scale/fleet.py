"""Many replicas in the place of one worker: what an app submits goes to one of them, and goes on elsewhere when it is
lost. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby
from secrets import randbits
from time import monotonic, perf_counter
from typing import Protocol

from forerun.engine.engine import Step
from forerun.engine.sequence import Request
from forerun.scale.parts import Face, Found, Part
from forerun.scale.routing import beginning, choose
from forerun.server.errors import ApiError, decoding_failed, queue_full, shutting_down
from forerun.server.metrics import Load
from forerun.server.worker import Job, Worker

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

    def __init__(self, parts: dict[int, Part], ids: dict[int, int]) -> None:
        self.parts, self.ids = parts, ids  # by index of the choice
        self.emitted: dict[int, list[int]] = {index: [] for index in parts}
        self.key = beginning(next(iter(parts.values())).tokens)
        self.name: str | None = None  # the replica that has it
        self.lost = 0  # replicas before that one
        self.heard = perf_counter()  # when the last word of one came

    def rest(self) -> list[Part]:
        """What is still to be decoded."""
        return [replace(part, emitted=tuple(self.emitted[index])) for index, part in self.parts.items()]


class Fleet(Worker):
    """A worker whose engines are elsewhere.

    Attributes:
        resumed: answers, or their parts with one prompt, that went on with another replica.
        recovered: seconds from the last word of the lost replica to the first tokens of the next one.
    """

    def __init__(self, replicas: Replicas) -> None:
        super().__init__(lambda: self.face.decoder())
        self._replicas = replicas
        self.face: Face
        self.loads: Counter[str] = Counter()  # requests in flight
        self.resumed, self.recovered = 0, deque[float](maxlen=1000)
        self._away: dict[str, float] = {}  # until when one is not asked
        self._hits: dict[str, int] = {}
        self._new_ids, self._tasks = count(), dict[Job, list[asyncio.Task[None]]]()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            self.face = await self._replicas.face()
            self.decoder = self.face.decoder()
            self.ready.set()
        except Exception as error:
            self.failed = error
            self.on_failure()

    async def stop(self, seconds: float = 4) -> None:
        self._connecting.cancel()
        self.give_up(shutting_down())
        self._readers.shutdown(wait=False, cancel_futures=True)

    def load(self) -> Load:
        """Sum up what is known of the replicas."""
        total: Counter[str] = Counter()
        for name, figures in self._replicas.figures().items():
            total.update({each: int(value) for each, value in figures.items()})
            self._hits[name] = int(figures.get("hits", 0))  # also of those that are gone: it is a counter
        return Load(**{**total, "hits": sum(self._hits.values())})

    @property
    def ended(self) -> bool:
        return not self._calls

    def submit(self, requests: Sequence[Request], begun: float) -> Job:
        job, room, face = Job(begun), self.face.room, self.face
        if room is not None and len(requests) > room:
            raise ApiError(400, f"{len(requests)} answers at once; a replica holds {room}", "n")
        for request in requests:
            if face.positions is not None and face.reserve(request) > face.positions:
                message = f"the prompt and its new tokens need {face.reserve(request)} positions of keys and values"
                raise ApiError(400, f"{message}; a replica holds {face.positions}", "max_tokens")
        if room is not None and len(self._jobs) + len(requests) > room * max(1, len(self._there())):
            raise queue_full()
        seed, tasks = randbits(61), []
        for _, same in groupby(enumerate(requests), key=lambda each: list(each[1].tokens)):
            parts = {index: Part.of(request, seed) for index, request in same}
            ids = {index: next(self._new_ids) for index in parts}
            job.open |= {id: index for index, id in ids.items()}
            self._jobs |= dict.fromkeys(ids.values(), job)
            group = _Group(parts, ids)
            self._place(group)  # at once, so that the next one sees it
            tasks.append(asyncio.ensure_future(self._follow(job, group)))
        self._tasks[job] = tasks
        return job

    def cancel(self, job: Job) -> None:
        for id in job.open:
            self._jobs.pop(id, None)
        job.open.clear()
        for task in self._tasks.pop(job, ()):
            if task is not asyncio.current_task():
                task.cancel()

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
                    await self._read(group)
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
            self.fail(job, error)
        except Exception as error:
            _LOG.exception("a request failed")
            self.fail(job, decoding_failed(error))
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

    async def _read(self, group: _Group) -> None:
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
                    self._take(group, order[which], step, at)
        finally:
            await stream.aclose()
        if group.parts:
            raise LostError("its answer broke off")

    def _take(self, group: _Group, index: int, step: Step, at: float) -> None:
        group.emitted[index] += step.tokens
        if step.finish_reason is not None:
            self._release(group, 1)
            del group.parts[index]
        self._deliver([replace(step, id=group.ids[index])], at)
