"""One engine, in a thread that owns the models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from time import perf_counter
from typing import Any

from forerun.api.decoder import Decoder
from forerun.engine.engine import Engine, QueueFullError, Step
from forerun.engine.sequence import Request
from forerun.engine.session import Run, Session
from forerun.server.errors import ApiError, loading, shutting_down, to_api_error
from forerun.server.job import Job
from forerun.server.memory import default_kv_memory

_LOG = logging.getLogger("forerun.server")


def loaded(target: str, method: Any, options: Mapping[str, Any], threads: int | None) -> Decoder:
    """Load a decoder in the thread, or on the node, that computes with that many of torch's threads."""
    import torch

    from forerun.api.load import load

    if threads:
        torch.set_num_threads(threads)
    return load(target, method=method, **options)


class Worker:
    """An engine and its thread. All calls are made in the event loop's thread.

    Attributes:
        decoder: reads bodies; None until it is loaded.
        ready: set when it can decode.
        failed: what loading raised, or what ended decoding for good.
        on_step: called with every step, and when it came, before its job gets it.
        on_failure: called when `failed` is set.
    """

    def __init__(self, make: Callable[[], Decoder]) -> None:
        """`make` loads the decoder in the worker's thread."""
        self._make = make
        self.decoder: Decoder | None = None
        self.failed: BaseException | None = None
        self.ready = asyncio.Event()
        self.on_step: Callable[[Step, float], None] = lambda step, at: None
        self.on_failure: Callable[[], None] = lambda: None
        self._session: Session | None = None
        self._thread = Thread(target=self._run, name="forerun-engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def until_ready(self) -> None:
        """Wait until it can decode. Raises what loading raised."""
        while not self.ready.is_set():
            if self.failed is not None:
                raise self.failed
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End all jobs with an error, then decoding."""
        self.give_up(shutting_down())
        if self._session is not None:
            self._session.stop()
        await asyncio.to_thread(
            self._thread.join, 4 if self.ready.is_set() else 0
        )  # seconds; a step may be long

    @property
    def session(self) -> Session:
        if self._session is None:
            raise loading()
        return self._session

    @property
    def engine(self) -> Engine:
        return self.session.engine

    def submit(self, requests: Sequence[Request], begun: float) -> Job:
        """Queue all requests of a body that came at `begun`, or none. Raises ApiError if the queue is full, or could
        never hold them."""
        job, engine = Job(begun), self.engine
        capacity = None if engine.max_queue is None else engine.max_rows + engine.max_queue
        if capacity is not None and len(requests) > capacity:
            raise ApiError(
                400, f"{len(requests)} answers at once; this server holds {capacity}", "n"
            )
        try:
            self.session.add(requests, job)
        except QueueFullError:
            raise ApiError(503, "the queue is full; try again later", code="queue_full") from None
        except ValueError as error:
            raise ApiError(400, str(error), "max_tokens") from None
        return job

    def give_up(self, error: ApiError) -> None:
        """End all jobs with an error."""
        for run in self._session.runs() if self._session is not None else ():
            if isinstance(run, Job):
                run.fail(error)

    def _deliver(self, steps: list[tuple[Run | None, Step]], at: float) -> None:
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

    # In the thread.

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        try:
            decoder = self._make()
            kv_memory = decoder.options.kv_memory
            if (
                kv_memory is None
            ):  # measured now, as the models have their memory; no client may take the rest
                kv_memory = default_kv_memory(decoder.target.device)
                decoder = decoder.replace(kv_memory=kv_memory)
            if kv_memory is not None:
                _LOG.info("keys and values may take %.2f GiB", kv_memory / 2**30)
            session = decoder.session  # its first steps try out and build what later ones use
            session.add([decoder.request([0] * 4, max_new_tokens=8, ignore_eos=True)]).collect()
            assert (
                session.engine.target.position_bytes
            )  # known before `add` asks for it in another thread
            self._session, self.decoder = session, decoder
            self._post(self.ready.set)
            session.drive(
                lambda steps: self._post(self._deliver, steps, perf_counter()),
                lambda error: self._post(self.give_up, to_api_error(error)),
            )
        except (
            BaseException
        ) as error:  # SystemExit too: without its thread the server could only keep clients waiting
            self.failed = error
            self._post(self.give_up, to_api_error(error))
            self._post(self.on_failure)
