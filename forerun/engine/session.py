"""`Session`: one engine for callers in any number of threads."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from threading import Event, Lock
from time import sleep
from weakref import ref

from forerun.engine.engine import Engine, Step
from forerun.engine.sequence import Request
from forerun.failures import UNATTRIBUTABLE

_LOG = logging.getLogger("forerun.engine.session")

PATIENCE = 0.01  # seconds to wait for a turn before the box is read again
TRIES = 3  # successive failed steps, with no request to blame, before `drive` reports the error
PAUSE = 0.05  # seconds before such a step is tried again


class Run:
    """Requests that were added together, and their steps as they come.

    Iterating takes turns at the engine. It yields lists of (index of the request, its step) until all have ended, and
    raises what a user's processor or criterion raised. Closing or dropping a run aborts what has not ended. A caller
    with a loop of its own subclasses it and reads `box`.

    Attributes:
        open: {id in the engine: index} of requests that have not ended.
        box: (index, step) pairs that have not been taken.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.open: dict[int, int] = {}
        self.box: deque[tuple[int, Step]] = deque()

    def take(self) -> list[tuple[int, Step]]:
        """Empty the box and return its contents."""
        return [self.box.popleft() for _ in range(len(self.box))]

    def __iter__(self) -> Run:
        return self

    def __next__(self) -> list[tuple[int, Step]]:
        try:
            while not self.box:
                if not self.open or self.session is None:
                    raise StopIteration
                self.session.take_turn(self)
            found = self.take()
            for _, step in found:
                if step.error is not None:
                    raise step.error
        except BaseException:
            self.close()
            raise
        return found

    def collect(self) -> list[list[Step]]:
        """Wait until all requests have ended; return all steps of each."""
        steps: list[list[Step]] = [[] for _ in self.open]
        for batch in self:
            for index, step in batch:
                steps[index].append(step)
        return steps

    def close(self) -> None:
        """Abort what has not ended. Takes no lock, as garbage collection may call it."""
        if self.session is not None:
            self.session.abort(self)

    def __del__(self) -> None:
        self.close()


class Session:
    """One engine, shared by callers in any number of threads.

    `add` and `abort` may be called from any thread and do not wait for a step. Each step goes to the box of its run.
    The engine steps in the threads of callers, which take turns while they iterate over their runs, or in one thread
    that calls `drive` until `stop`, for callers that must not wait.

    Attributes:
        was_used: whether anything was added.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.was_used = False
        self._turn, self._wake, self._stopping = Lock(), Event(), False
        self._runs: dict[int, ref[Run]] = {}  # weak, so that a dropped run ends

    def add(self, requests: Iterable[Request], run: Run | None = None) -> Run:
        """Queue requests, all or none, and return their run: `run`, or a new one. Raises as `Engine.add`."""
        run = Run() if run is None else run
        run.session, self.was_used = self, True
        try:
            for index, request in enumerate(requests):
                id = self.engine.new_id()  # known to the run before its first step
                run.open[id], self._runs[id] = index, ref(run)
                self.engine.add(request, id)
        except BaseException:
            self.abort(run)
            raise
        self._wake.set()
        return run

    def abort(self, run: Run) -> None:
        """End the requests of a run that have not ended; their rows are free with the next step. Takes no lock."""
        for id in list(run.open):
            run.open.pop(id, None)
            self._runs.pop(id, None)
            self.engine.abort(id)

    def runs(self) -> set[Run]:
        """Return the runs that have not ended."""
        return {run for each in list(self._runs.values()) if (run := each()) is not None}

    def advance(self) -> list[tuple[Run | None, Step]]:
        """Step the engine once, and put each step into the box of its run. Return (run, step) pairs; None for an
        aborted run. One thread at a time may call it: that of `drive`, or one that has a turn.
        """
        self.engine.advance()
        found: list[tuple[Run | None, Step]] = []
        while self.engine.outbox:
            step = self.engine.outbox[0]
            known = self._runs.get(step.id)
            run = known() if known is not None else None
            index = run.open.get(step.id) if run is not None else None
            self.engine.outbox.popleft()
            if run is not None and index is not None:
                run.box.append((index, step))
            if step.finish_reason is not None:
                self._runs.pop(step.id, None)
                if run is not None:
                    run.open.pop(step.id, None)  # after its last step is in the box
            found.append((run, step))
        return found

    def take_turn(self, run: Run) -> None:
        """Step the engine once for a waiting run. Return early if another caller steps, which may bring the run's
        step."""
        if not self._turn.acquire(timeout=PATIENCE):
            return
        try:
            if not run.box and run.open:
                assert self.engine.busy
                self.advance()
        finally:
            self._turn.release()

    def drive(
        self,
        on_steps: Callable[[list[tuple[Run | None, Step]]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Step the engine whenever there is something to do, until `stop`.

        Args:
            on_steps: called with the result of each `advance`.
            on_failure: called with the error after TRIES successive steps have failed with no request to blame. The
                engine has undone them, and goes on.
        """
        failures = 0
        while not self._stopping:
            if not self.engine.busy:
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                with self._turn:
                    found = self.advance()
            except UNATTRIBUTABLE:
                raise
            except BaseException as error:
                failures += 1
                _LOG.exception("a step of the engine failed")
                if failures == TRIES:
                    failures = 0
                    on_failure(error)
                sleep(PAUSE)
                continue
            failures = 0
            on_steps(found)

    def stop(self) -> None:
        """End `drive` after its present step."""
        self._stopping = True
        self._wake.set()
