"""Loading and unloading of models, so that those in memory keep within a limit.

If there is no room, the least recently used model leaves, once its requests have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from time import perf_counter

import torch

from forerun.garbage import free_garbage
from forerun.heap import give_back
from forerun.server.errors import ApiError
from forerun.server.model import Model, State

_LOG = logging.getLogger("forerun.server")


class Loader:
    """A task that loads and unloads models, one at a time.

    All methods are called in the event loop's thread.

    Attributes:
        all: the models.
        limit: most bytes of the models that are loaded at once; None for no limit.
    """

    def __init__(self, models: Sequence[Model], limit: int | None) -> None:
        self.all = list(models)
        self.limit = limit
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to load the models that are waited for."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End the task, and stop decoding."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(model.worker.stop() for model in self.all))

    def wake(self) -> None:
        """Look again at who waits, and at who answers."""
        self._changed.set()

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
        _LOG.info(
            "loaded %s in %.1f s: %d bytes of weights, %d for earlier texts",
            model.name,
            seconds,
            model.weight_bytes,
            model.prefix_bytes,
        )
        await self._make_room(model)  # it may take more than its files

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
            f"{model.name[:100]!r} takes {model.bytes} bytes ({model.weight_bytes} of weights, "
            f"{model.prefix_bytes} for earlier texts), more than the {self.limit} of "
            "--models-memory",
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
        free_garbage()  # parts of a model refer to each other
        give_back()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _takes_room(model: Model) -> bool:
    return model.state is not State.UNLOADED


def _load_error(model: Model, error: BaseException) -> ApiError:
    message = f"the model {model.name[:100]!r} cannot be loaded: {error}"
    return ApiError(500, message, "model", "model_not_loaded")
