"""Memory that was freed goes back to the system while an engine rests."""

from __future__ import annotations

import threading

import pytest

from forerun.drafters.plain import PlainDrafter
from forerun.engine import session as sessions
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request
from forerun.engine.session import Run, Session
from forerun.heap import _malloc_trim
from forerun.model.causal_lm import CausalLM
from tests.support.commands import run
from tests.support.toys import tiny

# The resident MB before and after. Small blocks that stay hold the large ones, which are freed.
PROGRAM = """
from pathlib import Path
from forerun.heap import give_back

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 10**6

large = []
small = []
for _ in range(2000):
    large.append(bytearray(100_000))
    small.append(bytearray(1000))
large.clear()
before = resident()
give_back()
print(before, resident())
"""


@pytest.mark.skipif(_malloc_trim() is None, reason="the C library keeps nothing")
def test_freed_memory_between_blocks_that_stay_goes_back() -> None:
    done = run(program=PROGRAM)
    before, after = map(int, done.stdout.split())
    assert before - after > 150


def test_an_engine_that_rests_gives_memory_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    runs: list[Run] = []  # a run that is dropped ends
    given = threading.Event()
    session = Session(Engine(CausalLM(tiny("llama")), PlainDrafter()))

    def give_back() -> None:
        calls.append(session.engine.busy)
        given.set()

    def now() -> float:
        """Each rest is long, and the request that ends it must not wait for one more call."""
        return 2 * sessions.BUSY_SECONDS * len(calls)

    monkeypatch.setattr(sessions, "give_back", give_back)
    monkeypatch.setattr(sessions, "monotonic", now)
    monkeypatch.setattr(sessions, "REST_SECONDS", 0.01)
    thread = threading.Thread(target=session.drive, args=(lambda steps: None, calls.append))
    thread.start()
    for _ in range(3):
        assert given.wait(60)
        given.clear()
        runs.append(session.add([Request([5, 6], 9)]))
    assert given.wait(60)
    session.stop()
    thread.join(60)
    assert not thread.is_alive() and calls == [False] * 4
    assert not any(run.open for run in runs)


def test_an_engine_that_never_rests_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    session = Session(Engine(CausalLM(tiny("llama")), PlainDrafter()))
    run = session.add([Request([5, 6], 60)])
    steps = 0

    def give_back() -> None:
        calls.append(session.engine.busy)

    def on_steps(_: object) -> None:
        nonlocal steps
        steps += 1
        if not run.open:
            session.stop()

    monkeypatch.setattr(sessions, "give_back", give_back)
    monkeypatch.setattr(sessions, "BUSY_SECONDS", 0.0)
    session.drive(on_steps, calls.append)
    assert steps > 50
    assert len(calls) >= steps - 1
    assert all(calls)
