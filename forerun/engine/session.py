"""`Session`: one engine for callers in any number of threads."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Event, Lock
from time import monotonic, sleep
from weakref import ref

from forerun.engine.engine import Engine, Step
from forerun.engine.sequence import Request
from forerun.failures import UNATTRIBUTABLE
from forerun.heap import give_back

_LOG = logging.getLogger("forerun.engine.session")

TURN_SECONDS = 0.01  # the longest wait for a turn before the box is read again
# So many successive steps must fail, with no request to blame, before `drive` reports the error.
FAILURES_TO_REPORT = 3
PAUSE_SECONDS = 0.05  # before such a step is tried again
# How long `drive` rests before it gives freed memory back. Until then the next request may use it.
REST_SECONDS = 1.0
BUSY_SECONDS = 30.0  # between two such calls while there is always work
SIDE_TURNS = 4  # side works that take turns; the others wait, because each may hold memory


class Run:
    """Requests that were added together, and their steps as they come.

    Iteration takes turns at the engine. It yields lists of (index of the request, its step) until
    all requests have ended, and raises what a user's processor or criterion raised. Closing a run,
    or dropping the last reference to it, aborts the requests that have not ended. A caller that
    does not iterate, such as an event loop, subclasses `Run` and reads `box`.

    Attributes:
        session: the session that the run was added to, or None.
        open: {id in the engine: index} of the requests that have not ended.
        box: (index, step) pairs that nobody has taken yet.
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
            steps = self.take()
            for _, step in steps:
                if step.error is not None:
                    raise step.error
        except BaseException:
            self.close()
            raise
        return steps

    def collect(self) -> list[list[Step]]:
        """Wait until all requests have ended, and return a list of the steps of each."""
        steps: list[list[Step]] = [[] for _ in self.open]
        for batch in self:
            for index, step in batch:
                steps[index].append(step)
        return steps

    def close(self) -> None:
        """Abort the requests that have not ended.

        It takes no lock, because garbage collection may call it at any point.
        """
        if self.session is not None:
            self.session.abort(self)

    def __del__(self) -> None:
        self.close()


class Session:
    """One engine, shared by callers in any number of threads.

    `add` and `abort` may be called from any thread and do not wait for a step. Each step goes to
    the box of its run. The engine steps in one of two ways: in the threads of callers, which take
    turns while they iterate over their runs, or, for callers that must not wait, in one thread that
    calls `drive`.

    Attributes:
        engine: the engine that is shared.
        was_used: whether anything was added.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.was_used = False
        self._turn = Lock()  # held by the thread that steps the engine
        self._wake = Event()
        self._stopping = False
        self._side_works: deque[Iterator[None]] = deque()
        # By id in the engine. The references are weak, so that a run that its caller drops ends.
        self._runs: dict[int, ref[Run]] = {}

    def add(self, requests: Iterable[Request], run: Run | None = None) -> Run:
        """Queue requests, all or none, and return their run: `run`, or a new one.

        Raises:
            ValueError: `Engine.add` refuses a request.
            QueueFullError: the queue is full.
        """
        run = Run() if run is None else run
        run.session = self
        self.was_used = True
        try:
            for index, request in enumerate(requests):
                id = self.engine.new_id()  # the run must know the id before the first step
                run.open[id] = index
                self._runs[id] = ref(run)
                self.engine.add(request, id)
        except BaseException:
            self.abort(run)
            raise
        self._wake.set()
        return run

    def abort(self, run: Run) -> None:
        """End the requests of a run that have not ended; the next step frees their rows.

        It takes no lock, because `Run.close` must not.
        """
        for id in list(run.open):
            run.open.pop(id, None)
            self._runs.pop(id, None)
            self.engine.abort(id)

    def add_side_work(self, work: Iterator[None]) -> None:
        """Have `drive` advance an iterator between its steps, once each time, until it ends.

        Steps wait for each piece, so pieces must be short. Works take turns. They must not raise.
        """
        self._side_works.append(work)
        self._wake.set()

    def _advance_side_work(self) -> None:
        """Do the next piece of the side work whose turn it is, if there is any."""
        if not self._side_works:
            return
        work = self._side_works[0]  # which stays there meanwhile, so that an empty queue means rest
        has_more = next(work, self) is not self  # pieces are None, so the default is another value
        self._side_works.popleft()
        if has_more:
            self._side_works.insert(SIDE_TURNS - 1, work)

    def runs(self) -> set[Run]:
        """Return the runs that have not ended."""
        runs = [reference() for reference in list(self._runs.values())]
        return {run for run in runs if run is not None}

    def advance(self) -> list[tuple[Run | None, Step]]:
        """Step the engine once, and put each step into the box of its run.

        Return (run, step) pairs, with None in place of an aborted run. One thread at a time may
        call it: that of `drive`, or one that has a turn.
        """
        self.engine.advance()
        delivered: list[tuple[Run | None, Step]] = []
        while self.engine.outbox:
            step = self.engine.outbox[0]
            reference = self._runs.get(step.id)
            run = reference() if reference is not None else None
            index = run.open.get(step.id) if run is not None else None
            self.engine.outbox.popleft()
            if run is not None and index is not None:
                run.box.append((index, step))
            if step.finish_reason is not None:
                self._runs.pop(step.id, None)
                if run is not None:
                    run.open.pop(step.id, None)  # after its last step is in the box
            delivered.append((run, step))
        return delivered

    def take_turn(self, run: Run) -> None:
        """Step the engine once for a waiting run.

        If another caller's step takes long, return without a step of one's own, because that step
        may serve this run too.
        """
        if not self._turn.acquire(timeout=TURN_SECONDS):
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

        Side works are advanced between the steps. After REST_SECONDS without work, and every
        BUSY_SECONDS with it, memory that was freed goes back to the system.

        Args:
            on_steps: called with the result of each `advance`.
            on_failure: called with the error after FAILURES_TO_REPORT successive steps have failed
                with no request to blame. The engine has undone them, and goes on.
        """
        failures = 0
        given_back_at = monotonic()
        while not self._stopping:
            if monotonic() - given_back_at > BUSY_SECONDS:
                give_back()
                given_back_at = monotonic()
            self._advance_side_work()
            if not self.engine.busy:
                if not self._side_works and self._rest():
                    given_back_at = monotonic()
                continue
            try:
                with self._turn:
                    steps = self.advance()
            except UNATTRIBUTABLE:
                raise
            except BaseException as error:
                failures += 1
                _LOG.exception("a step of the engine failed")
                if failures == FAILURES_TO_REPORT:
                    failures = 0
                    on_failure(error)
                sleep(PAUSE_SECONDS)
                continue
            failures = 0
            on_steps(steps)

    def _rest(self) -> bool:
        """Wait until there is something to do, and return whether memory was given back."""
        is_long = not self._wake.wait(REST_SECONDS)
        if is_long:
            give_back()
            self._wake.wait()
        self._wake.clear()
        return is_long

    def stop(self) -> None:
        """End `drive` after its present step."""
        self._stopping = True
        self._wake.set()
