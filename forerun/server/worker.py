"""One thread owns the models and the engine; jobs of the event loop get its steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event, Thread
from time import perf_counter, sleep
from typing import Any, TypeVar

from forerun.api.decoder import Decoder
from forerun.engine.engine import Engine, QueueFullError, Step
from forerun.engine.sequence import Request
from forerun.failures import UNATTRIBUTABLE
from forerun.sampling.grammar import FormError
from forerun.server.errors import ApiError, decoding_failed, queue_full, shutting_down
from forerun.server.memory import default_kv_memory
from forerun.server.metrics import Load

_LOG = logging.getLogger("forerun.server")
_T = TypeVar("_T")

MOST_CALLS = 256  # bodies that are read or wait for it
READERS = 4  # threads that read them: a long text, or a schema that takes seconds, does not hold up the others
TRIES = 3  # steps that may fail one after the other, with no request to blame, before all are given up


@dataclass(frozen=True)
class Loader:
    """Loads a decoder where it is called: in the thread that computes, or on another node.

    Attributes:
        method: a name, its settings, or None for `forerun.load`'s choice.
        options: other arguments of `forerun.load`.
        threads: of torch, for the thread that calls.
        is_shared: clients do not know each other. So nothing that was decoded for one is drafted for another: rejected
            drafts, which a client may ask for, would be words of other clients' answers.
    """

    target: str
    method: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    is_shared: bool = False

    def __call__(self) -> Decoder:
        import torch

        from forerun.api.load import load

        if self.threads:
            torch.set_num_threads(self.threads)
        return load(self.target, method=self.method, share_outputs=not self.is_shared, **self.options)


class Job:
    """The requests of one body, and what comes of them: (which, its step, when), or the error that ends them all.

    Attributes:
        begun, queued: when the body's request came, and when its requests were queued.
        open: index of a choice by its id in the engine.
    """

    def __init__(self, begun: float) -> None:
        self.begun, self.queued = begun, perf_counter()
        self.open: dict[int, int] = {}
        self._steps: list[tuple[int, Step, float]] = []
        self._error: ApiError | None = None
        self._wanted: asyncio.Future[None] | None = None

    def put(self, found: tuple[int, Step, float] | ApiError) -> None:
        if isinstance(found, ApiError):
            self._error = found
        else:
            self._steps.append(found)
        self._wake()

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return not (self.open or self._steps or self._error)

    async def take(self, seconds: float) -> list[tuple[int, Step, float]]:
        """Return all steps that are there, or the next ones; none where none came in time. Raises the ApiError that
        ended it, after the last steps. One waits at a time. A queue of asyncio's would cost several times as much a
        step."""
        if not self._steps and self._error is None:
            loop = asyncio.get_running_loop()
            self._wanted = loop.create_future()
            late = loop.call_later(seconds, self._wake)
            try:
                await self._wanted
            finally:
                late.cancel()
                self._wanted = None
        found, self._steps = self._steps, []
        if not found and self._error is not None:
            raise self._error.with_traceback(None)  # one error may end many jobs
        return found


def to_api_error(error: BaseException) -> ApiError:
    """Return what a client gets for an error that ended its request alone."""
    return ApiError(400, str(error), "response_format") if isinstance(error, FormError) else decoding_failed(error)


def _contain(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function. A panic of a library in Rust, which no handler of exceptions would catch, becomes a
    RuntimeError."""
    try:
        return function(*args)
    except (Exception, *UNATTRIBUTABLE):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _warm_engine(decoder: Decoder) -> Engine:
    """Return the engine after a few steps: the first ones try out and build what later ones use."""
    engine = decoder.engine
    engine.add(decoder.request([0] * 4, max_new_tokens=8, ignore_eos=True))
    while engine.busy:
        for step in engine.step():
            if step.error is not None:
                raise step.error
    assert engine.target.position_bytes  # known before `add` asks for it in another thread
    return engine


class Worker:
    """Loads a decoder in its thread and runs its engine there. Everything else is called in the event loop's thread.

    Attributes:
        decoder: None until it is loaded.
        failed: what loading raised, or what ended the thread.
        on_step: called for every step before its job gets it, with when it came.
        on_failure: called when `failed` is set.
    """

    def __init__(self, make: Callable[[], Decoder]) -> None:
        self._make = make
        self.decoder: Decoder | None = None
        self.failed: BaseException | None = None
        self.ready = asyncio.Event()
        self.on_step: Callable[[Step, float], None] = lambda step, at: None
        self.on_failure: Callable[[], None] = lambda: None
        self._engine: Engine | None = None
        self._jobs: dict[int, Job] = {}
        self._wake, self._stopping = Event(), False
        self._calls = 0  # that wait for a reader, or are in one
        self._readers = ThreadPoolExecutor(READERS, "forerun-reader")
        self._thread = Thread(target=self._run, name="forerun-engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def wait(self) -> None:
        """Wait until it can decode. Raises what loading raised."""
        while not self.ready.is_set():
            if self.failed is not None:
                raise self.failed
            await asyncio.sleep(0.05)

    async def stop(self, seconds: float = 4) -> None:
        """End the thread after its step, if that comes in time. Jobs that are open get an error."""
        self.give_up(shutting_down())
        self._stopping = True
        self._wake.set()
        self._readers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._thread.join, seconds if self.ready.is_set() else 0)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ApiError(503, "the model is being loaded", code="loading")
        return self._engine

    def load(self) -> Load:
        """Return what there is to do; nothing before the engine is ready."""
        return Load.of(self.engine) if self.ready.is_set() else Load()

    @property
    def ended(self) -> bool:
        """Whether none of its threads does anything."""
        return not self._thread.is_alive() and not self._calls

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call what takes long, in a thread for that. Raises ApiError where too many wait for one. Where nobody waits
        for it any more, it is not begun."""
        if self._calls >= MOST_CALLS:
            raise ApiError(503, "too many requests are being read; try again later", code="queue_full")
        called = self._readers.submit(_contain, function, *args)
        self._calls += 1
        called.add_done_callback(lambda _: self._post(self._called))
        return await asyncio.wrap_future(called)

    def _called(self) -> None:
        self._calls -= 1

    def submit(self, requests: Sequence[Request], begun: float) -> Job:
        """Queue all requests of a body that came at `begun`, or none. Raises ApiError where the queue is full or never
        could hold them."""
        job, engine = Job(begun), self.engine
        capacity = None if engine.max_queue is None else engine.max_rows + engine.max_queue
        if capacity is not None and len(requests) > capacity:
            raise ApiError(400, f"{len(requests)} answers at once; this server holds {capacity}", "n")
        try:
            for index, request in enumerate(requests):
                id = engine.new_id()
                job.open[id], self._jobs[id] = index, job
                engine.add(request, id)
        except QueueFullError:
            self.cancel(job)
            raise queue_full() from None
        except ValueError as error:
            self.cancel(job)
            raise ApiError(400, str(error), "max_tokens") from None
        self._wake.set()
        return job

    def cancel(self, job: Job) -> None:
        """End what has not ended; its rows are free with the next step."""
        for id in job.open:
            self._jobs.pop(id, None)
            self.engine.abort(id)
        job.open.clear()
        self._wake.set()

    def fail(self, job: Job, error: ApiError) -> None:
        """End a job with an error, unless it has ended."""
        if job.open:
            self.cancel(job)
            job.put(error)

    def give_up(self, error: ApiError) -> None:
        """End all jobs with an error."""
        for job in set(self._jobs.values()):
            self.fail(job, error)

    def _deliver(self, steps: list[Step], at: float) -> None:
        for step in steps:
            self.on_step(step, at)
            job = self._jobs.get(step.id)
            if job is None:
                continue
            if step.error is not None:
                _LOG.error("a request failed: %r", step.error)
                self.fail(job, to_api_error(step.error))
                continue
            index = job.open[step.id]
            if step.finish_reason is not None:
                del job.open[step.id], self._jobs[step.id]
            job.put((index, step, at))

    # In the threads.

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        try:
            decoder = self._make()
            if decoder.kv_memory is None:  # now, as the models have taken theirs; a client must not take all the rest
                decoder.kv_memory = decoder.target.agreed(default_kv_memory(decoder.target.device))
            if decoder.kv_memory is not None:
                _LOG.info("keys and values may take %.2f GiB", decoder.kv_memory / 2**30)
            self.decoder = decoder
            self._engine = _warm_engine(decoder)
            self._post(self.ready.set)
            self._decode(self._engine)
        except BaseException as error:  # SystemExit too: without its thread the server could only keep clients waiting
            self.failed = error
            self._post(self.give_up, decoding_failed(error))
            self._post(self.on_failure)

    def _decode(self, engine: Engine) -> None:
        failures = 0
        while not self._stopping:
            if not engine.busy:
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                steps = engine.step()
                failures = 0
            except UNATTRIBUTABLE:
                raise
            except BaseException as error:  # the engine has undone it, and found no request to blame
                failures += 1
                _LOG.exception("a step of the engine failed")
                if failures == TRIES:
                    failures = 0
                    self._post(self.give_up, decoding_failed(error))
                sleep(0.05)
                continue
            self._post(self._deliver, steps, perf_counter())
