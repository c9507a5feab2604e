"""One engine, in a thread that owns the models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Thread
from time import perf_counter
from typing import Any, TypeVar

from forerun.api.decoder import Decoder
from forerun.engine.engine import Engine, QueueFullError, Step
from forerun.engine.sequence import Request
from forerun.engine.session import Run, Session
from forerun.failures import UNATTRIBUTABLE
from forerun.garbage import leave_out_of_searches
from forerun.sampling.grammar import prepare
from forerun.server.errors import ApiError, loading, queue_full, shutting_down, to_api_error
from forerun.server.job import Job
from forerun.server.memory import (
    MemoryShare,
    default_kv_memory,
    default_prefix_bytes,
    weight_memory,
)

_LOG = logging.getLogger("forerun.server")

JOIN_SECONDS = 4  # for the engine's thread at the end, because a step may be long

_T = TypeVar("_T")


def loaded(target: str, method: Any, options: Mapping[str, Any], threads: int | None) -> Decoder:
    """Load a decoder in the thread, or on the node, that is to compute.

    `threads` is the number of torch's threads there; None leaves it to torch.
    """
    import torch

    from forerun.api.load import load

    if threads:
        torch.set_num_threads(threads)
    decoder = load(target, method=method, **options)
    leave_out_of_searches()
    return decoder


class Worker:
    """An engine and its thread.

    All methods are called in the event loop's thread, except those that say otherwise.

    Attributes:
        decoder: reads bodies; None until it is loaded.
        ready: set when the decoder is loaded and has decoded something.
        failed: what loading raised, or what ended decoding for good; otherwise None.
        on_step: called with every step and the time when it came, before its job gets it.
        on_failure: called when `failed` is set.
    """

    def __init__(self, make: Callable[[], Decoder], share: MemoryShare | None = None) -> None:
        """Describe an engine that is not started.

        Args:
            make: loads the decoder. It is called in the worker's thread.
            share: what it may take of the memory. Default: all.
        """
        self._make = make
        self._share = share or MemoryShare()
        self.decoder: Decoder | None = None
        self.weight_bytes = 0  # of the decoder, once it is loaded
        self.failed: BaseException | None = None
        self.ready = asyncio.Event()
        self.on_step: Callable[[Step, float], None] = lambda step, at: None
        self.on_failure: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Session | None = None
        self._side_results: set[Future[Any]] = set()  # that are awaited
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin to load, in a thread of the worker."""
        self._loop = asyncio.get_running_loop()
        self._thread = Thread(target=self._run, name="forerun-engine", daemon=True)
        self._thread.start()

    async def until_ready(self) -> None:
        """Wait until the worker can decode. Raises what loading raised."""
        while not self.ready.is_set():
            if self.failed is not None:
                raise self.failed
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End all jobs with an error, then stop decoding."""
        self.give_up(shutting_down())
        if self._session is not None:
            self._session.stop()
        if self._thread is not None:
            # A thread that still loads is not waited for.
            await asyncio.to_thread(self._thread.join, JOIN_SECONDS if self.ready.is_set() else 0)

    async def unload(self) -> None:
        """Stop, and forget the decoder, so that its memory is free. `start` loads it again."""
        await self.stop()
        self.ready.clear()
        self.decoder = None
        self.failed = None
        self._session = None
        self._thread = None

    @property
    def session(self) -> Session:
        """The session that the worker drives. Raises ApiError until there is one."""
        if self._session is None:
            raise loading()
        return self._session

    @property
    def engine(self) -> Engine:
        """The engine. Raises ApiError until there is one."""
        return self.session.engine

    def submit(
        self, requests: Sequence[Request], started_at: float, limit_field: str = "max_tokens"
    ) -> Job:
        """Queue all requests of a body, or none of them.

        Raises ApiError if the queue is full, or if it could never hold so many requests or so many
        tokens.

        Args:
            requests: those of the body.
            started_at: when the body's HTTP request came.
            limit_field: the body's name of the most new tokens, for errors.
        """
        engine = self.engine
        job = Job(started_at)
        capacity = None if engine.max_queue is None else engine.max_rows + engine.max_queue
        if capacity is not None and len(requests) > capacity:
            raise ApiError(
                400,
                f"{len(requests)} answers were asked for; this server can hold {capacity} at once",
                "n",
            )
        try:
            self.session.add(requests, job)
        except QueueFullError:
            raise queue_full() from None
        except ValueError as error:
            raise ApiError(400, str(error), limit_field) from None
        return job

    async def between_steps(self, work: Generator[None, None, _T]) -> _T:
        """Return what some work returns that the engine's thread does piece by piece.

        Each piece goes up to a `yield`. The engine's steps go on between the pieces. The work is
        broken off if the caller is cancelled. Raises ApiError if the work fails, if too much of the
        kind waits, or if the worker gives up.
        """
        limit = self.engine.max_queue
        if limit is not None and len(self._side_results) >= limit:
            raise queue_full()
        result: Future[_T] = Future()
        self._side_results.add(result)
        try:
            self.session.add_side_work(_pieces(work, result))
            return await asyncio.wrap_future(result)
        finally:
            self._side_results.discard(result)

    def give_up(self, error: ApiError) -> None:
        """End all jobs and all work between steps with an error."""
        for result in self._side_results:
            with suppress(InvalidStateError):  # which says that it has ended
                result.set_exception(error)
        if self._session is None:
            return
        for run in self._session.runs():
            if isinstance(run, Job):
                run.fail(error)

    def _deliver(self, steps: list[tuple[Run | None, Step]], at: float) -> None:
        """Hand the steps of a forward, which came at the time `at`, to their jobs."""
        for run, step in steps:
            self.on_step(step, at)
            if not isinstance(run, Job):
                continue
            for choice, taken in run.take():
                if taken.error is None:
                    run.put(choice, taken, at)
                else:
                    _LOG.error("a request failed: %r", taken.error)
                    run.fail(to_api_error(taken.error))

    # The methods below run in the worker's thread.

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        """Have the event loop call a function."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        """Load, then drive the session until it is stopped."""
        try:
            session = self._load()
            self._post(self.ready.set)
            session.drive(
                lambda steps: self._post(self._deliver, steps, perf_counter()),
                lambda error: self._post(self.give_up, to_api_error(error)),
            )
        except BaseException as error:
            # SystemExit too: without its thread the server could only keep its clients waiting.
            self.failed = error
            self._post(self.give_up, to_api_error(error))
            self._post(self.on_failure)

    def _load(self) -> Session:
        """Load the decoder, and return its session after a first request."""
        decoder = self._make()
        # Before the first steps, as for the bounds, because what these steps keep is no weight.
        self.weight_bytes = weight_memory(decoder)
        decoder = self._bounded(decoder)
        session = decoder.session
        # The first steps of an engine measure and build what later ones use.
        session.add([decoder.request([0] * 4, max_new_tokens=8, ignore_eos=True)]).collect()
        prepare(decoder.tokenizer)
        # `Session.add` asks for this in the event loop's thread, so it must be known by now.
        assert session.engine.target.position_bytes
        self._session = session
        self.decoder = decoder
        return session

    def _bounded(self, decoder: Decoder) -> Decoder:
        """Return a decoder with bounds for keys and values, and for those of earlier texts.

        The free memory is measured now, because the models have theirs already. Without a bound one
        client could take all of the rest.
        """
        if decoder.options.prefix_bytes is None:
            decoder = decoder.replace(prefix_bytes=default_prefix_bytes(decoder, self._share))
        if decoder.options.kv_memory is None:
            decoder = decoder.replace(kv_memory=default_kv_memory(decoder, self._share))
        options = decoder.options
        if options.kv_memory is not None:
            _LOG.info("keys and values may take %.2f GiB", options.kv_memory / 2**30)
        _LOG.info("those of earlier texts may take %.2f GiB", options.prefix_limit / 2**30)
        return decoder


def _pieces(work: Generator[None, None, _T], result: Future[_T]) -> Iterator[None]:
    """Yield after each piece of some work. At its end set the result, if it is still wanted."""
    try:
        while not result.done():
            next(work)
            yield
    except StopIteration as end:
        with suppress(InvalidStateError):
            result.set_result(end.value)
    except UNATTRIBUTABLE:
        raise
    except BaseException as error:
        _LOG.exception("a request failed")
        with suppress(InvalidStateError):
            result.set_exception(to_api_error(error))
