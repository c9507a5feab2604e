"""What threads share of a model in C: no call may see what another thread changes.

The threads here take turns by events. A deadline only ends a test that would otherwise hang.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Event, Thread, current_thread
from typing import Any

import numpy as np
import pytest
import torch

from forerun.api.load import Decoder
from forerun.backends import prepare, quantised
from forerun.backends.quantised import QuantisedForward
from forerun.csrc.library import checked, library, variant, variants
from forerun.methods import AR, method
from forerun.model.causal_lm import CausalLM
from tests.support.families import tiny

DEADLINE = 120  # seconds
SHORT, LONG = 40, 600  # tokens, in tables of 256 and of 1,024 positions
Task = Callable[[], Any]


def started(name: str, task: Task) -> Future[Any]:
    """Run a task in a thread of that name."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, name=name, daemon=True).start()
    return future


class Turns:
    """Have a thread "short" keep its tables of rotations at a chosen moment of a call of "long".

    "short" has looked for tables, found none, and made some, when "long" looks, finds none either,
    makes longer ones, keeps them and calls C. There it meets `before_c`. "short" keeps its own
    tables when it is told to `go_on`.
    """

    def __init__(self, patch: pytest.MonkeyPatch, before_c: Callable[[Turns, Task], int]) -> None:
        self.made, self.going, self.kept, self.calling = (Event() for _ in range(4))
        outer, run = torch.outer, quantised.run

        def slow_outer(*given: Any) -> torch.Tensor:
            table = outer(*given)
            if current_thread().name == "short":
                self.made.set()
                assert self.going.wait(DEADLINE)
            return table

        def slow_run(function: str, *given: Any) -> int:
            if current_thread().name == "short":
                self.kept.set()
            is_long = current_thread().name == "long" and last_position(given[2]) >= 256
            if is_long and not self.calling.is_set():
                return before_c(self, lambda: run(function, *given))
            return run(function, *given)

        patch.setattr(torch, "outer", slow_outer)
        patch.setattr(quantised, "run", slow_run)

    def go_on(self) -> None:
        """Let "short" keep its tables, and wait until it has."""
        self.going.set()
        assert self.kept.wait(DEADLINE)

    def both(self, short: Task, long: Task) -> list[Any]:
        """Return what these tasks give, which run at once."""
        first = started("short", short)
        assert self.made.wait(DEADLINE)
        second = started("long", long)
        return [each.result(DEADLINE) for each in (first, second)]


def last_position(argument: Any) -> int:
    """Return the position of the last token of a batch, which stands behind a pointer."""
    batch = argument._obj
    return int((ctypes.c_int32 * batch.n).from_address(batch.position)[batch.n - 1])


def just_before(turns: Turns, call: Task) -> int:
    """ "short" keeps its tables after the last line of Python before C."""
    turns.calling.set()
    turns.go_on()
    return int(call())


def some_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 64, count).tolist()


def read(model: CausalLM, tokens: list[int]) -> list[torch.Tensor]:
    """Return the logits of a prompt, with its keys and values in all layers."""
    logits: list[torch.Tensor] = []
    list(model.prefill(tokens, LONG, on_logits=logits.append))
    stored = model.prompts.cache.view(0, len(tokens))
    return [*logits, *(part.clone() for pair in stored if pair is not None for part in pair)]


def same(tensors: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(tensors, wanted, strict=True))


def in_c() -> CausalLM:
    """A tiny model that has not run yet."""
    found = prepare(tiny("llama"))
    assert isinstance(found.backend, QuantisedForward)
    return found


def test_tables_that_another_thread_keeps_change_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    short = some_tokens(SHORT, 1)
    long = some_tokens(LONG, 2)
    wanted = [read(in_c(), tokens) for tokens in (short, long)]
    model = in_c()
    turns = Turns(monkeypatch, just_before)
    found = turns.both(lambda: read(model.fresh(), short), lambda: read(model.fresh(), long))
    assert all(same(*pair) for pair in zip(found, wanted, strict=True))


def test_tables_that_another_thread_keeps_change_no_checked_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C checks positions against the tables. Then it waits, as this test has the threads' pool.

    If the machine is so busy that C has not checked yet, the test passes all the same; it only
    proves no more than the one above.
    """
    short = some_tokens(SHORT, 1)
    long = some_tokens(LONG, 2)
    wanted = [read(in_c(), tokens) for tokens in (short, long)]
    model = in_c()
    functions = library()

    def without_threads(function: str, *given: Any) -> int:
        # Not as `library.run`, whose `fr_threads` would wait before C has checked anything.
        return checked(getattr(functions, function)(*given))

    def call_and_wait(turns: Turns, call: Task) -> int:
        turns.calling.set()
        return int(call())

    monkeypatch.setattr(quantised, "run", without_threads)
    turns = Turns(monkeypatch, call_and_wait)
    first = started("short", lambda: read(model.fresh(), short))
    assert turns.made.wait(DEADLINE)
    functions.fr_enter()
    try:
        second = started("long", lambda: read(model.fresh(), long))
        assert turns.calling.wait(DEADLINE)
        time.sleep(0.5)
        turns.go_on()
    finally:
        functions.fr_leave()
    found = [each.result(DEADLINE) for each in (first, second)]
    assert all(same(*pair) for pair in zip(found, wanted, strict=True))


def test_two_decoders_of_one_model_do_not_disturb_each_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that failed would be tried again, with a warning."""
    short = some_tokens(SHORT, 1)
    long = some_tokens(LONG, 2)
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    plain = Decoder(in_c(), method=AR())
    wanted = [plain.generate(tokens, **options).tokens for tokens in (short, long)]
    one = Decoder(in_c(), method=AR(), guard=False)
    other = one.replace(method=method("suffix"))
    turns = Turns(monkeypatch, just_before)
    tasks = partial(one.generate, short, **options), partial(other.generate, long, **options)
    found = turns.both(*tasks)
    assert [each.tokens for each in found] == wanted
    assert not caplog.records


def test_tables_never_shrink() -> None:
    layers = in_c().backend.layers
    long = layers.rotate_to(700)
    (table,) = long.tables
    kept = table.cos.clone(), table.sin.clone()
    assert long.positions == 1024
    assert layers.rotate_to(30) is long
    longer = layers.rotate_to(1025)
    assert longer.positions == 2048
    (larger,) = longer.tables
    assert torch.equal(larger.cos[:1024], kept[0]) and torch.equal(larger.sin[:1024], kept[1])
    # A call that holds the first ones may go on.
    assert (long.model.positions, long.arguments[0].cos) == (1024, table.cos.data_ptr())


def test_asking_for_variants_chooses_none() -> None:
    functions = library()
    before = variant()
    try:
        functions.fr_select(b"plain")
        assert "plain" in variants()
        assert variant() == "plain"
    finally:
        functions.fr_select(before.encode())


def test_a_variant_is_chosen_between_two_calls() -> None:
    functions = library()
    before = variant()
    try:
        functions.fr_enter()
        try:
            choice = started("choice", lambda: functions.fr_select(b"plain"))
            time.sleep(0.1)
            assert (variant(), choice.done()) == (before, False)
        finally:
            functions.fr_leave()
        assert choice.result(DEADLINE) == 0
        assert variant() == "plain"
    finally:
        functions.fr_select(before.encode())


def test_a_model_that_is_changed_in_place_changes_no_norm_or_bias() -> None:
    """Its embedding is not copied: whoever trains a model makes a new Decoder (README)."""
    model = tiny("qwen2")
    forward = prepare(model).backend
    assert isinstance(forward, QuantisedForward)
    structure = forward.layers.rotate_to(1).model
    layer = quantised.LayerArgument.from_address(structure.layer)
    assert structure.norm.gain != model.model.norm.weight.data_ptr()
    assert layer.q_bias != model.model.layers[0].self_attn.q_proj.bias.data_ptr()
