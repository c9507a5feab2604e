"""`Session`: one thread that drives the engine for callers that do not wait, and runs that are let go of."""

from __future__ import annotations

import gc
from threading import Event, Thread
from typing import Any

import pytest
from toys import decode, tiny, tokens_of

from forerun.engine.engine import Engine
from forerun.engine.sequence import Request
from forerun.engine.session import TRIES, Session
from forerun.methods.ar import PlainDrafter
from forerun.model.causal_lm import CausalLM

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14]]


@pytest.mark.parametrize("failing", [0, TRIES - 1, TRIES])
def test_one_thread_steps_for_all_and_goes_on_after_steps_that_fail(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Request(prompt, 9 + i) for i, prompt in enumerate(PROMPTS)]
    wanted = [tokens_of(steps) for steps in decode(CausalLM(tiny("llama")), PlainDrafter(), asked)]
    session, done = Session(Engine(CausalLM(tiny("llama")), PlainDrafter())), Event()
    left, advance, failures = [failing], session.engine.advance, list[BaseException]()

    def fails() -> None:
        if left[0]:
            left[0] -= 1
            raise ZeroDivisionError
        advance()

    def on_steps(found: list[Any]) -> None:
        assert all(run is not None for run, _ in found)
        if not session.runs():
            done.set()

    monkeypatch.setattr(session.engine, "advance", fails)
    runs = [session.add(asked[:2]), session.add(asked[2:])]
    thread = Thread(target=session.drive, args=(on_steps, failures.append))
    thread.start()
    assert done.wait(60)
    session.stop()
    thread.join(60)
    assert not thread.is_alive() and len(failures) == (failing == TRIES)
    found: list[list[int]] = [[], [], []]
    for first, run in zip((0, 2), runs, strict=True):
        for index, step in run.take():
            found[first + index] += step.tokens
    assert found == wanted


def test_a_run_that_is_let_go_of_is_aborted_and_others_go_on() -> None:
    session = Session(Engine(CausalLM(tiny("llama")), PlainDrafter()))
    kept, gone = session.add([Request(PROMPTS[0], 9)]), session.add([Request(PROMPTS[1], 90)])
    next(gone)
    del gone
    gc.collect()
    assert session.runs() == {kept}
    assert sum(len(step.tokens) for step in kept.collect()[0]) == 9
    assert not session.engine.busy and not session.runs()
