"""A batch job on a Ray cluster: Ray Data hands lines to actors, which have an engine each."""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayError
from ray.util.annotations import RayDeprecationWarning

from forerun.scale.batch_file import BadLine, Line
from forerun.scale.batch_folder import Folder
from forerun.scale.batch_local import Answerer, window
from forerun.server.worker import Loader

if TYPE_CHECKING:
    from forerun.api.decoder import Decoder

_LOG = logging.getLogger("forerun.model.batch")

BLOCK = 4  # lines of a block: what is handed out, and given back, at once
ROUND, ROUND_BYTES = 20_000, 64 * 2**20  # lines of one pass of Ray Data, and of their bodies
ALONE = 32  # lines of a pass that asks one after the other
TRIES = 3  # passes without an answer before the job is given up; actors that a line may end


class Engine:
    """What an actor is: an engine behind the server's app, whose rows lines of several blocks share."""

    def __init__(self, loader: Loader, model: str) -> None:
        decoder = loader()  # here, so that what is wrong with it ends the job and not a line

        def make() -> Decoder:
            import torch

            torch.set_num_threads(loader.threads or 1)  # of the thread that computes
            return decoder

        self._answerer = Answerer(make, model)
        self._begun: asyncio.Task[Answerer] | None = None

    async def begin(self) -> None:
        """Raises what keeps the engine from its work."""
        if self._begun is None:
            self._begun = asyncio.ensure_future(self._answerer.__aenter__())
        await asyncio.shield(self._begun)

    async def ask(self, url: str, body: bytes) -> tuple[int, str, bytes]:
        """See `Answerer.ask`. Ends the process where the engine's thread has ended: Ray starts the actor anew."""
        try:
            return await self._answerer.ask(url, body)
        except BaseException:
            if self._answerer.worker.failed is not None:
                _LOG.exception("the engine failed")
                os._exit(1)
            raise

    async def __call__(self, block: pa.Table) -> AsyncIterator[pa.Table]:
        await self.begin()
        asked = zip(block["url"].to_pylist(), block["body"].to_pylist(), strict=True)
        found = await asyncio.gather(*(self.ask(*each) for each in asked))
        status, request_id, body = zip(*found, strict=True)
        yield pa.table(
            {
                "number": block["number"],
                "status": pa.array(status, pa.int32()),
                "request_id": pa.array(request_id, pa.string()),
                "answer": pa.array(body, pa.large_binary()),
            }
        )


def threads_of(actors: int) -> int:
    """Cores for each of so many actors on the nodes that are there; 0 where they do not fit."""
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    threads = sum(cores) // actors
    while threads and sum(each // threads for each in cores) < actors:
        threads -= 1
    return threads


def run(
    loader: Loader,
    model: str,
    max_rows: int,
    lines: Callable[[], Iterable[Line | BadLine]],
    folder: Folder,
    actors: int | None,
) -> float:
    """Answers lines on the cluster that Ray is connected to; returns seconds, loading included.

    `lines` gives those that have no record, whenever it is called. `actors`: one a node by default. Threads are the
    loader's, by default as many as there are cores for each. What was at an actor or node that dies is asked again
    behind all others, in blocks of one line. Where it is lost again, it is asked alone: then it is known which lines
    end their actors, and these fail.

    Raises ValueError where the actors do not fit into the cluster, and where pass after pass brings no answer.
    """
    begun, failures, last = perf_counter(), 0, ""
    wanted = actors or max(1, sum(node["Alive"] and bool(node["Resources"].get("CPU")) for node in ray.nodes()))
    each = loader.threads or threads_of(wanted)
    if not each or threads_of(wanted) < each:
        cores = int(ray.cluster_resources().get("CPU", 0))
        raise ValueError(f"--actors {wanted} with {max(1, each)} threads each do not fit into {cores} cores")
    loader, lost, level = replace(loader, threads=each), Counter[int](), 0

    def settled() -> int:
        return len(folder.done) + (len(folder.failed) if level == 2 else 0)

    while not folder.ended:
        assert level < 3
        asked = _next((line for line in lines() if lost[line.number] == level), folder)
        before, last = settled(), ""
        if not asked:
            level += 1
            continue
        try:
            if level == 2 or failures:  # one after the other also says why nothing came
                _alone(loader, model, asked[:ALONE], folder)
            else:
                block = 1 if level else BLOCK
                _pass(loader, model, max_rows, asked, block, folder, _fitting(wanted, each))
                lost.update(line.number for line in asked if not folder.has(line.number))
        except RayError as error:
            last = _why(error)
        failures = 0 if settled() > before else failures + 1
        if failures >= TRIES and not folder.ended:
            last = last or (f"see {folder.path}/failed.jsonl" if folder.failed else "the actors died")
            raise ValueError(f"{TRIES} passes brought no answer: {last}")
    return perf_counter() - begun


def _next(lines: Iterable[Line | BadLine], folder: Folder) -> list[Line]:
    """Lines for one pass. Bad ones on the way get their record."""
    asked, size = list[Line](), 0
    for line in lines:
        if isinstance(line, BadLine):
            folder.refuse(line)
            continue
        asked.append(line)
        size += len(line.body)
        if len(asked) == ROUND or size >= ROUND_BYTES:
            break
    return asked


def _why(error: RayError) -> str:
    return str(error).strip().splitlines()[-1]


def _gpus(actors: int) -> float:
    return min(1.0, float(ray.cluster_resources().get("GPU", 0)) / actors)


def _alone(loader: Loader, model: str, lines: list[Line], folder: Folder) -> None:
    """Asks one actor one line after the other; a line that ends it too often has failed. Raises RayError where the
    actor does not begin."""
    new = ray.remote(num_cpus=loader.threads or 1, num_gpus=_gpus(1))(Engine).remote
    actor: Any = None
    for line in lines:
        for tries in range(1, TRIES + 1):
            if actor is None:
                actor = new(loader, model)
                ray.get(actor.begin.remote())
            try:
                folder.answer(line, *ray.get(actor.ask.remote(line.url, line.body)))
                break
            except RayError as error:
                actor = None
                if tries == TRIES:
                    folder.fail(line, _why(error))


def _fitting(actors: int, threads: int) -> int:
    """Actors that have room on the nodes that are there now."""
    while actors > 1 and threads_of(actors) < threads:
        actors -= 1
    return actors


def _pass(
    loader: Loader,
    model: str,
    max_rows: int,
    lines: list[Line],
    block: int,
    folder: Folder,
    actors: int,
) -> None:
    """Hands all lines out once, in blocks of so many. A block that an actor takes with it when it dies is left out."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # Ray would wait for the node of an actor that died for ever, and try its blocks there. Without them all other
    # blocks come to their end, and the next pass has those that are left, on the nodes that are left.
    context.max_errored_blocks = -1
    # Its rules against full object stores leave one block at a time to stores of some 100 MB. Lines are small, and the
    # pool bounds how many blocks are out.
    context.set_config("backpressure_policies.enabled", [])
    asked = [{"number": line.number, "url": line.url, "body": line.body} for line in lines]
    pool = ray.data.ActorPoolStrategy(size=actors, max_concurrent_calls_per_actor=-(-window(max_rows) // block))
    warnings.simplefilter("ignore", RayDeprecationWarning)  # of max_task_retries, for which there is no other name yet
    answers = ray.data.from_items(asked, override_num_blocks=-(-len(lines) // block)).map_batches(
        Engine,
        fn_constructor_args=(loader, model),
        batch_size=None,
        batch_format="pyarrow",
        compute=pool,
        num_cpus=loader.threads,
        num_gpus=_gpus(actors),
        max_task_retries=0,
    )
    by_number = {line.number: line for line in lines}
    for table in answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        assert isinstance(table, pa.Table)
        for found in table.to_pylist():
            line = by_number[found["number"]]
            if not folder.has(line.number):
                folder.answer(line, found["status"], found["request_id"], found["answer"])
