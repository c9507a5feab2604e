"""A batch job on a Ray cluster: actors with an engine each, which this process asks line by line."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from forerun.scale.batch_file import BadLine, Line
from forerun.scale.batch_folder import Folder
from forerun.scale.batch_local import Answerer, window
from forerun.scale.cluster import cores, gpus_each, most_threads
from forerun.server.worker import Loader

_LOG = logging.getLogger("forerun.model.batch")

TRIES = 3  # actors that may die before they have begun
BARREN = 5  # actors in a row that may die without an answer, while they have several lines each
ALONE = 3  # actors that a line may end when it is asked alone


class Actor:
    """The server's app with an engine, in a process of its own."""

    def __init__(self, loader: Loader, model: str) -> None:
        self._answerer = Answerer(loader, model)

    async def begin(self) -> None:
        """Load the models."""
        await self._answerer.__aenter__()

    async def ask(self, url: str, body: bytes) -> tuple[int, str, bytes]:
        """Return what `Answerer.ask` does. Ends the process if the engine's thread has ended."""
        try:
            return await self._answerer.ask(url, body)
        except BaseException:
            if self._answerer.worker.failed is not None:
                _LOG.exception("the engine failed")
                os._exit(1)
            raise


class Slot:
    """The place of an actor: when it dies, the next one is started as soon as a node has room.

    Attributes:
        barren: actors in a row that died without an answer.
    """

    def __init__(self, new: Callable[[], Any]) -> None:
        self._new, self.barren = new, 0
        self._starting: asyncio.Future[Any] | None = None

    async def actor(self) -> Any:
        """Return the actor when it has begun. Raises ValueError if none does."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Any:
        why = ""
        for _ in range(TRIES):
            actor = self._new()
            try:
                await actor.begin.remote()
                return actor
            except RayActorError as error:
                why = _why(error)
            except RayError as error:
                raise ValueError(f"--ray: an actor did not begin: {_why(error)}") from None
        raise ValueError(f"--ray: {TRIES} actors died before they had begun: {why}")

    def lose(self, actor: Any) -> None:
        """Start another actor when one is needed, if this one is not replaced yet."""
        if self._starting is not None and self._starting.done() and self._starting.result() is actor:
            self._starting = None
            self.barren += 1


def run(
    loader: Loader, model: str, max_rows: int, lines: Iterator[Line | BadLine], folder: Folder, actors: int | None
) -> float:
    """Answer lines on the cluster that Ray is connected to. Return the seconds, loading included.

    Lines that an actor had when it died are asked again after all others. Those that are lost twice are asked alone:
    then it is known which ones end their actors, and these fail.

    Args:
        actors: one a node by default. Threads are the loader's, by default the cores divided by the actors.

    Raises ValueError if the actors do not fit into the cluster, do not begin, or die without an answer.
    """
    begun = perf_counter()
    wanted = actors or max(1, sum(each > 0 for each in cores()))
    fitting = most_threads(wanted)
    threads = loader.threads or fitting
    if not threads or fitting < threads:
        found = sum(cores())
        raise ValueError(f"--actors {wanted} with {max(1, threads)} threads each do not fit into {found} cores")
    wide = window(max_rows)
    gpus = gpus_each(wanted, loader.options.get("device"))
    resources: dict[str, Any] = {"num_cpus": threads, "num_gpus": gpus, "max_concurrency": wide + 1}
    made: Any = ray.remote(Actor).options(**resources)  # type: ignore[attr-defined]
    loader = replace(loader, threads=threads)
    asyncio.run(_answer_all(lambda: made.remote(loader, model), wanted, wide, lines, folder))
    return perf_counter() - begun


async def _answer_all(
    new: Callable[[], Any], actors: int, wide: int, lines: Iterator[Line | BadLine], folder: Folder
) -> None:
    slots, lost = [Slot(new) for _ in range(actors)], dict[Line, str]()
    for width in (wide, wide, *[1] * ALONE):
        lost = await _answer_once(slots, width, lines, folder)
        lines = iter(lost)
        if not lost:
            return
    for line, why in lost.items():
        folder.fail(line, why)


async def _answer_once(
    slots: list[Slot], width: int, lines: Iterator[Line | BadLine], folder: Folder
) -> dict[Line, str]:
    """Ask every line once, `width` at a time of each actor. Return the lines that were lost, and why."""
    lost, asking = dict[Line, str](), 0

    async def work(slot: Slot) -> None:
        nonlocal asking
        while True:
            actor = await slot.actor()
            line = next(lines, None)  # all take from the same lines
            if line is None:
                return
            if isinstance(line, BadLine):
                folder.refuse(line)
                continue
            asking += 1
            try:
                found = await actor.ask.remote(line.url, line.body)
            except RayError as error:
                lost[line] = _why(error)
                if isinstance(error, RayActorError):
                    slot.lose(actor)
                if slot.barren >= BARREN and width > 1:
                    raise ValueError(f"--ray: {BARREN} actors in a row died without an answer: {lost[line]}") from None
            else:
                slot.barren = 0
                folder.answer(line, *found)
            finally:
                asking -= 1

    tasks = {asyncio.ensure_future(work(slot)) for slot in slots for _ in range(width)}
    waiting = tasks
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not asking:  # no line is left: others only wait for an actor, perhaps for ever
                break
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return lost


def _why(error: RayError) -> str:
    return str(error).strip().splitlines()[-1]
