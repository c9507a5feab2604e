"""Several callers, in one thread or in many, on one engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from threading import Lock

from forerun.engine.engine import Engine, Step
from forerun.engine.sequence import Request

PATIENCE = 0.01  # seconds to wait for a turn before looking into one's box again


class Driver:
    """Shares an engine. There is no thread of its own: whoever waits for its steps takes a turn at the engine, and
    what that brings others waits for them in their boxes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._turn = Lock()
        self._boxes: dict[int, deque[Step]] = {}
        self.called = False  # whether there was a call

    def run(self, requests: Iterable[Request]) -> Run:
        """Queues requests; raises what `Engine.add` does, and then none of them is queued."""
        run, self.called = Run(self), True
        try:
            for index, request in enumerate(requests):
                id = self.engine.new_id()  # the box is there before the first step
                run.open[id], self._boxes[id] = index, run.box
                self.engine.add(request, id)
        except BaseException:
            run.close()
            raise
        return run

    def advance(self, box: deque[Step]) -> None:
        """A step of the engine. None where another caller is at it for long: its step may have filled this box."""
        if not self._turn.acquire(timeout=PATIENCE):
            return
        try:
            if box:
                return
            assert self.engine.busy
            self.engine.advance()
            while self.engine.outbox:
                box_of = self._boxes.get(self.engine.outbox[0].id)
                step = self.engine.outbox.popleft()
                if box_of is not None:
                    box_of.append(step)
                if step.finish_reason is not None:
                    self._boxes.pop(step.id, None)
        finally:
            self._turn.release()

    def forget(self, ids: Iterable[int]) -> None:
        """Aborts these requests. Takes no lock: it may be called while garbage is collected."""
        for id in list(ids):
            self._boxes.pop(id, None)
            self.engine.abort(id)


class Run:
    """The steps of some requests as they come: lists of (which of them, its step), until all have ended.

    Closing it, or letting go of it, aborts what has not ended. What a user's processor or criterion raised is raised
    here.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.box: deque[Step] = deque()
        self.open: dict[int, int] = {}

    def __iter__(self) -> Run:
        return self

    def __next__(self) -> list[tuple[int, Step]]:
        if not self.open:
            raise StopIteration
        try:
            while not self.box:
                self.driver.advance(self.box)
            found = [(self.open[step.id], step) for step in self._taken()]
            for _, step in found:
                if step.error is not None:
                    raise step.error
                if step.finish_reason is not None:
                    del self.open[step.id]
        except BaseException:
            self.close()
            raise
        return found

    def collect(self) -> list[list[Step]]:
        """All steps of each request, when all have ended."""
        steps: list[list[Step]] = [[] for _ in self.open]
        for batch in self:
            for index, step in batch:
                steps[index].append(step)
        return steps

    def _taken(self) -> list[Step]:
        return [self.box.popleft() for _ in range(len(self.box))]

    def close(self) -> None:
        """Aborts what has not ended."""
        ids, self.open = self.open, {}
        self.driver.forget(ids)

    def __del__(self) -> None:
        self.close()
