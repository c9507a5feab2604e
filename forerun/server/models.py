"""Several models: which are in memory, and which of their services answers a request.

Each model has a service, an app and a worker of its own, as in a server of one model. A request
that names a model waits until that model is loaded. If there is no room, the least recently used
model leaves, once its requests have ended. New requests for a model that is to leave wait until it
is loaded again, so that none waits forever.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from time import perf_counter
from typing import Any

import torch

from forerun.api.decoder import Decoder
from forerun.backends.facts import weight_memory
from forerun.heap import give_back
from forerun.server.app import Service, Settings, app_of
from forerun.server.errors import ApiError, loading, queue_full, shutting_down
from forerun.server.worker import Worker

_LOG = logging.getLogger("forerun.server")

MAX_WAITING = 256  # requests that wait for models


class State(StrEnum):
    """What a model does; /v1/models says it."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"


class Model:
    """One of the models of a server.

    Attributes:
        name: what clients call it.
        worker: its engine, which may be started and unloaded again and again.
        service: answers its requests.
        app: the endpoints of its service.
        bytes: of the weights of target and draft; those of their files before it is loaded for the
            first time.
        context: the length of its context; None before it is loaded for the first time, or if it
            has no bound.
        state: what it does.
        is_leaving: whether it is to be unloaded as soon as its requests have ended.
        users: how many requests it answers.
        used_at: when the last one came or ended, as a time of `perf_counter`.
        loads: how often it was loaded.
        tickets: of the requests that wait for it, the oldest first.
    """

    def __init__(
        self, make: Callable[[], Decoder], settings: Settings, file_bytes: int, kv_share: float
    ) -> None:
        """Describe a model.

        Args:
            make: loads it.
            settings: how to serve it, with its name.
            file_bytes: of its files, or 0 if they are not here yet.
            kv_share: the share of the free memory that is for its keys and values.
        """
        self.name = settings.model
        self.worker = Worker(make, kv_share)
        self.service = Service(self.worker, settings)
        self.app = app_of(self.service)
        self.bytes = file_bytes
        self.context: int | None = None
        self.state = State.UNLOADED
        self.is_leaving = False
        self.users = 0
        self.used_at = 0.0
        self.loads = 0
        self.tickets: list[Ticket] = []

    @property
    def is_usable(self) -> bool:
        """Whether it can take a request at once."""
        return self.state is State.LOADED and not self.is_leaving and self.worker.failed is None

    def note_load(self) -> None:
        """Note what is known once the model is loaded."""
        decoder = self.worker.decoder
        assert decoder is not None
        parts = [part for part in (decoder.target, decoder.draft) if part is not None]
        self.bytes = sum(map(weight_memory, parts))
        self.context = decoder.target.context
        self.state = State.LOADED
        self.loads += 1

    def grant(self) -> None:
        """Let the requests that wait for it begin."""
        for ticket in self.tickets:
            if not ticket.done():
                self.users += 1
                ticket.set_result(None)
        self.tickets = []

    def refuse(self, error: ApiError) -> None:
        """Give an error to the requests that wait for it."""
        for ticket in self.tickets:
            if not ticket.done():
                ticket.set_exception(error)
        self.tickets = []


class Ticket(asyncio.Future[None]):
    """A request's place in the queue for a model. It ends when the model is loaded or cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.taken_at = perf_counter()


class Models:
    """The models of a server, and a task that loads and unloads them, one at a time.

    All methods are called in the event loop's thread, except that `draining` may be set in a
    signal's handler.

    Attributes:
        all: the models; the first is for requests that name none. It is loaded at the start.
        limit: most bytes of weights that are loaded at once; None for no limit.
    """

    def __init__(self, models: Sequence[Model], limit: int | None) -> None:
        self.all = list(models)
        self.limit = limit
        self._is_draining = False
        self._has_begun = asyncio.Event()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # As `forerun.server.run` asks.

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the server is about to end."""
        return self._is_draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._is_draining = value
        for model in self.all:
            model.service.draining = value

    @property
    def open(self) -> int:
        """The number of requests that are being answered."""
        return sum(model.users for model in self.all)

    @property
    def failed(self) -> BaseException | None:
        """What ended all models for good: nothing does."""
        return None

    def when_failed(self, call: Callable[[], None]) -> None:
        """Do nothing, because the other models go on when one fails."""

    async def until_ready(self) -> None:
        """Wait until the first model is loaded, or cannot be."""
        await self._has_begun.wait()

    def begin_drain(self) -> None:
        """Refuse the requests that wait for a model."""
        for model in self.all:
            model.refuse(shutting_down())
        self._changed.set()

    def give_up(self, error: ApiError) -> None:
        """End all requests with an error."""
        for model in self.all:
            model.refuse(error)
            model.worker.give_up(error)

    def start(self) -> None:
        """Begin to load the first model, and others when they are asked for."""
        first = Ticket()
        first.add_done_callback(lambda ticket: self._end_start(ticket, self.all[0]))
        self.all[0].tickets.append(first)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End all requests with an error, and stop decoding."""
        self.draining = True
        self.begin_drain()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(model.worker.stop() for model in self.all))

    def _end_start(self, ticket: asyncio.Future[None], model: Model) -> None:
        if ticket.exception() is None:
            self.release(model)
        if not self.draining:
            self._has_begun.set()

    # Requests.

    def find(self, name: Any) -> Model:
        """Return the model of a request. Raises ApiError if there is none of that name.

        It is the first one for requests that name none, or whose name is no text: its service
        refuses them.
        """
        if not isinstance(name, str):
            return self.all[0]
        for model in self.all:
            if model.name == name:
                return model
        self.all[0].service.check_model(name)
        return self.all[0]

    def check_ready(self) -> None:
        """Raise ApiError while no requests are accepted."""
        if self.draining:
            raise shutting_down()
        if not self._has_begun.is_set():
            raise loading()

    async def acquire(self, model: Model, seconds: float) -> None:
        """Wait until a model is loaded. It stays loaded until `release`.

        Raises ApiError if it cannot be loaded, if it is not loaded in time, and if the server ends.
        """
        if self.draining:
            raise shutting_down()
        if model.is_usable:
            model.users += 1
            model.used_at = perf_counter()
            return
        if sum(len(other.tickets) for other in self.all) >= MAX_WAITING:
            raise queue_full()
        ticket = Ticket()
        model.tickets.append(ticket)
        self._changed.set()
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(ticket)
        except BaseException as error:
            self._give_back(ticket, model)
            if isinstance(error, TimeoutError):
                raise _not_in_time(model) from None
            if isinstance(error, ApiError):  # which many requests may share
                raise error.with_traceback(None) from None
            raise

    def _give_back(self, ticket: Ticket, model: Model) -> None:
        """End the wait of a request, which may have been granted just now."""
        if ticket in model.tickets:
            model.tickets.remove(ticket)
            self._changed.set()
        if not ticket.done():
            ticket.cancel()
        elif not ticket.cancelled() and ticket.exception() is None:
            self.release(model)

    def release(self, model: Model) -> None:
        """Note that a request has ended."""
        model.users -= 1
        model.used_at = perf_counter()
        self._changed.set()

    # Loading and unloading, in a task.

    async def _run(self) -> None:
        """Load the model whose request has waited longest, again and again."""
        while True:
            waiting = [model for model in self.all if model.tickets]
            if not waiting:
                self._changed.clear()
                await self._changed.wait()
                continue
            model = min(waiting, key=lambda model: model.tickets[0].taken_at)
            try:
                await self._provide(model)
                model.grant()
            except ApiError as error:
                model.refuse(error)
            except Exception as error:
                _LOG.exception("the model %s could not be provided", model.name)
                model.refuse(_load_error(model, error))

    async def _provide(self, model: Model) -> None:
        """Load a model, unless it is loaded or nobody waits for it any more. Raises ApiError."""
        if model.is_usable:
            return
        if model.worker.failed is not None:  # its engine, while it was loaded
            await self._unload(model)
        problem = self._size_error(model)
        if problem is not None:
            raise problem
        if not await self._make_room(model):
            return
        _LOG.info("loading the model %s ...", model.name)
        started_at = perf_counter()
        model.state = State.LOADING
        try:
            problem = await self._load(model)
        except BaseException:
            await self._unload(model)
            raise
        if problem is not None:
            await self._unload(model)
            _LOG.error(problem.message)
            raise problem
        model.used_at = perf_counter()
        seconds = model.used_at - started_at
        _LOG.info("loaded %s in %.1f s: %d bytes of weights", model.name, seconds, model.bytes)
        await self._make_room(model)  # its weights may take more than its files

    async def _load(self, model: Model) -> ApiError | None:
        """Load a model. Return what its requests are told if it cannot be loaded.

        That error does not refer to the one of the load, whose frames may hold parts of the model.
        """
        model.worker.start()
        try:
            await model.worker.until_ready()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also what would end the event loop
            return _load_error(model, error)
        model.note_load()
        return self._size_error(model)

    def _size_error(self, model: Model) -> ApiError | None:
        """Return what requests are told if a model is larger than the limit."""
        # The files of a model that was never loaded say too little: it may be stored in few bits.
        if self.limit is None or not model.loads or model.bytes <= self.limit:
            return None
        return ApiError(
            500,
            f"the weights of {model.name[:100]!r} take {model.bytes} bytes, more than the "
            f"{self.limit} of --models-memory",
            "model",
            "model_too_large",
        )

    async def _make_room(self, model: Model) -> bool:
        """Unload other models until a model fits, the least recently used first.

        A model with requests is waited for. Returns False if nobody waits for the room any more.
        """
        try:
            while True:
                others = [other for other in self.all if other is not model and _takes_room(other)]
                taken = model.bytes + sum(other.bytes for other in others)
                if self.limit is None or taken <= self.limit or not others:
                    return True
                if not model.tickets:
                    return False
                oldest = min(others, key=lambda other: (other.users > 0, other.used_at))
                oldest.is_leaving = True
                if oldest.users:
                    self._changed.clear()
                    await self._changed.wait()
                else:
                    _LOG.info("unloading the model %s", oldest.name)
                    await self._unload(oldest)
        finally:
            for other in self.all:
                other.is_leaving = False

    async def _unload(self, model: Model) -> None:
        """Give the memory of a model back."""
        await model.worker.unload()
        model.state = State.UNLOADED
        gc.collect()  # parts of a model refer to each other
        give_back()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _takes_room(model: Model) -> bool:
    return model.state is not State.UNLOADED


def _not_in_time(model: Model) -> ApiError:
    return ApiError(
        503,
        f"the model {model.name[:100]!r} could not be loaded in time, because others are busy; try "
        "again later",
        "model",
        "loading",
    )


def _load_error(model: Model, error: BaseException) -> ApiError:
    message = f"the model {model.name[:100]!r} cannot be loaded: {error}"
    return ApiError(500, message, "model", "model_not_loaded")
