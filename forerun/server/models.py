"""Several models: which of their services answers a request, and how long the request waits.

Each model has a service, an app and a worker of its own, as in a server of one model. A request
that names a model waits until that model is loaded. New requests for a model that is to leave wait
until it is loaded again, so that none waits forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from forerun.server.errors import ApiError, loading, queue_full, shutting_down
from forerun.server.loader import Loader
from forerun.server.model import Model, Ticket

MAX_WAITING = 256  # requests that wait for models


class Models:
    """The models of a server, and what their requests wait for.

    All methods are called in the event loop's thread, except that `draining` may be set in a
    signal's handler.

    Attributes:
        all: the models; the first is for requests that name none. It is loaded at the start.
        loader: loads and unloads them.
    """

    def __init__(self, models: Sequence[Model], limit: int | None) -> None:
        """Take models, of which those that are loaded at once take at most `limit` bytes."""
        self.all = list(models)
        self.loader = Loader(models, limit)
        self._is_draining = False
        self._has_begun = asyncio.Event()

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
        self.loader.wake()

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
        self.loader.start()

    async def stop(self) -> None:
        """End all requests with an error, and stop decoding."""
        self.draining = True
        self.begin_drain()
        await self.loader.stop()

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
        self.loader.wake()
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
            self.loader.wake()
        if not ticket.done():
            ticket.cancel()
        elif not ticket.cancelled() and ticket.exception() is None:
            self.release(model)

    def release(self, model: Model) -> None:
        """Note that a request has ended."""
        model.users -= 1
        model.used_at = perf_counter()
        self.loader.wake()


def _not_in_time(model: Model) -> ApiError:
    return ApiError(
        503,
        f"the model {model.name[:100]!r} could not be loaded in time, because others are busy; try "
        "again later",
        "model",
        "loading",
    )
