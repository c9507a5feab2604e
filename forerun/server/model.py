"""One of the models of a server, and the requests that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from time import perf_counter

from forerun.api.decoder import Decoder
from forerun.server.app import Service, Settings, app_of
from forerun.server.errors import ApiError
from forerun.server.memory import MemoryShare, prefix_memory
from forerun.server.worker import Worker


class State(StrEnum):
    """What a model does; /v1/models says it."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"


class Ticket(asyncio.Future[None]):
    """A request's place in the queue for a model. It ends when the model is loaded or cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.taken_at = perf_counter()


class Model:
    """One of the models of a server.

    Attributes:
        name: what clients call it.
        worker: its engine, which may be started and unloaded again and again.
        service: answers its requests.
        app: the endpoints of its service.
        weight_bytes: of its models and trained layers; those of their files before it is loaded for
            the first time.
        prefix_bytes: most bytes of the earlier texts that it keeps while it is loaded; 0 before
            that is known.
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
        self, make: Callable[[], Decoder], settings: Settings, file_bytes: int, share: MemoryShare
    ) -> None:
        """Describe a model.

        Args:
            make: loads it.
            settings: how to serve it, with its name.
            file_bytes: of its files, or 0 if they are not here yet.
            share: what it may take of the memory.
        """
        self.name = settings.model
        self.worker = Worker(make, share)
        self.service = Service(self.worker, settings)
        self.app = app_of(self.service)
        self.weight_bytes = file_bytes
        self.prefix_bytes = 0
        self.context: int | None = None
        self.state = State.UNLOADED
        self.is_leaving = False
        self.users = 0
        self.used_at = 0.0
        self.loads = 0
        self.tickets: list[Ticket] = []

    @property
    def bytes(self) -> int:
        """What it takes of the memory, beside keys and values of running requests."""
        return self.weight_bytes + self.prefix_bytes

    @property
    def is_usable(self) -> bool:
        """Whether it can take a request at once."""
        return self.state is State.LOADED and not self.is_leaving and self.worker.failed is None

    def note_load(self) -> None:
        """Note what is known once the model is loaded."""
        decoder = self.worker.decoder
        assert decoder is not None
        self.weight_bytes = self.worker.weight_bytes
        self.prefix_bytes = prefix_memory(decoder)
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
