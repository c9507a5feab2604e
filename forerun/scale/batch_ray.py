"""A batch job on a Ray cluster: Ray Data hands lines to actors, which have an engine each."""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forerun.decoder import Decoder

_LOG = logging.getLogger("forerun.batch")

BLOCK = 4  # lines of a block: what is handed out, and given back, at once
ROUND = 20_000  # lines of one pass of Ray Data
TRIES = 3  # passes without a record before the job is given up


@dataclass(frozen=True)
class Recipe:
    """How an actor loads its decoder: `forerun.load`'s arguments, on the actor's own node."""

    target: str
    method: Any
    options: dict[str, Any]

    def load(self, threads: int) -> Decoder:
        import torch

        from forerun.api import load

        torch.set_num_threads(threads)
        return load(self.target, method=self.method, **self.options)


class Engine:
    """What an actor is: an engine behind the server's app, whose rows lines of several blocks share."""

    def __init__(self, recipe: Recipe, model: str, threads: int) -> None:
        decoder = recipe.load(threads)  # here, so that what is wrong with it ends the job and not a line

        def make() -> Decoder:
            import torch

            torch.set_num_threads(threads)  # of the thread that computes
            return decoder

        self._answerer = Answerer(make, model)
        self._begun: asyncio.Task[Answerer] | None = None

    async def __call__(self, block: pa.Table) -> AsyncIterator[pa.Table]:
        if self._begun is None:
            self._begun = asyncio.ensure_future(self._answerer.__aenter__())
        await asyncio.shield(self._begun)
        try:
            asked = zip(block["url"].to_pylist(), block["body"].to_pylist(), strict=True)
            found = await asyncio.gather(*(self._answerer.ask(*each) for each in asked))
        except BaseException:
            if self._answerer.worker.failed is not None:
                _LOG.exception("the engine failed")
                os._exit(1)  # Ray starts the actor anew
            raise
        status, request_id, body = zip(*found, strict=True)
        yield pa.table(
            {
                "number": block["number"],
                "status": pa.array(status, pa.int32()),
                "request_id": pa.array(request_id, pa.string()),
                "answer": pa.array(body, pa.large_binary()),
            }
        )


@contextmanager
def cluster(address: str) -> Iterator[None]:
    """A connection to a cluster, or, by the name `local`, a cluster of this machine alone, which ends with it.

    Raises ValueError where there is none at that address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Else actors that die, Ray's own ones too, are many lines on stderr.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": 256 * 2**20}
    try:
        ray.init(address=address, **options)
    except Exception as error:  # Ray raises that class itself, where its processes do not start in time
        raise ValueError(f"--ray: no cluster at {address!r}: {(str(error) or repr(error)).splitlines()[0]}") from None
    try:
        yield
    finally:
        ray.shutdown()


def threads_of(actors: int) -> int:
    """Cores for each of so many actors on the nodes that are there; 0 where they do not fit."""
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    threads = sum(cores) // actors
    while threads and sum(each // threads for each in cores) < actors:
        threads -= 1
    return threads


def run(
    recipe: Recipe,
    model: str,
    max_rows: int,
    lines: Callable[[], Iterable[Line | BadLine]],
    folder: Folder,
    on_record: Callable[[], None],
    *,
    actors: int | None,
    threads: int | None,
) -> float:
    """Answers lines on the cluster that Ray is connected to; returns seconds, loading included.

    `lines` gives those that have no record, whenever it is called. `actors`: one a node by default; `threads`: of each,
    by default as many as there are cores for it. What was at an actor or node that dies is asked again, in a pass of
    its own at the end.

    Raises ValueError where the actors do not fit into the cluster, and where no pass brings anything.
    """
    begun, failures, last = perf_counter(), 0, "their actors died"
    wanted = actors or max(1, sum(node["Alive"] and bool(node["Resources"].get("CPU")) for node in ray.nodes()))
    each = threads or threads_of(wanted)
    if not each or threads_of(wanted) < each:
        cores = int(ray.cluster_resources().get("CPU", 0))
        raise ValueError(f"--actors {wanted} with {max(1, each)} threads each do not fit into {cores} cores")
    while not folder.complete:
        before, asked = len(folder.done), []
        for line in islice(lines(), ROUND):
            if isinstance(line, BadLine):
                folder.refuse(line)
                on_record()
            else:
                asked.append(line)
        if asked:
            try:
                _pass(recipe, model, max_rows, asked, folder, on_record, _fitting(wanted, each), each)
            except RayError as error:
                last = str(error).strip().splitlines()[-1]
        failures = 0 if len(folder.done) > before else failures + 1
        if failures == TRIES:
            raise ValueError(f"{len(asked)} lines got no answer in {TRIES} tries: {last}")
    return perf_counter() - begun


def _fitting(actors: int, threads: int) -> int:
    """Actors that have room on the nodes that are there now."""
    while actors > 1 and threads_of(actors) < threads:
        actors -= 1
    return actors


def _pass(
    recipe: Recipe,
    model: str,
    max_rows: int,
    lines: list[Line],
    folder: Folder,
    on_record: Callable[[], None],
    actors: int,
    threads: int,
) -> None:
    """Hands all lines out once. A block that an actor takes with it when it dies is left out."""
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
    pool = ray.data.ActorPoolStrategy(size=actors, max_concurrent_calls_per_actor=-(-window(max_rows) // BLOCK))
    warnings.simplefilter("ignore", RayDeprecationWarning)  # of max_task_retries, for which there is no other name yet
    answers = ray.data.from_items(asked, override_num_blocks=-(-len(lines) // BLOCK)).map_batches(
        Engine,
        fn_constructor_args=(recipe, model, threads),
        batch_size=None,
        batch_format="pyarrow",
        compute=pool,
        num_cpus=threads,
        num_gpus=min(1.0, ray.cluster_resources().get("GPU", 0) / actors),
        max_task_retries=0,
    )
    by_number = {line.number: line for line in lines}
    for block in answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        assert isinstance(block, pa.Table)
        for found in block.to_pylist():
            line = by_number[found["number"]]
            if line.number not in folder.done:
                folder.answer(line, found["status"], found["request_id"], found["answer"])
                on_record()
