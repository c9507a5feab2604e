"""Memory that cannot be had: what asked for it raises, and everything else is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from test_cache import LAYERS, Pair
from toys import noisy_copy

from forerun import Decoder
from forerun.backends import prepare
from forerun.backends.hot import prepare_draft
from forerun.backends.stored import store
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request
from forerun.methods import method
from forerun.model import kv_cache as cache_module
from forerun.model.causal_lm import CausalLM
from forerun.model.kv_cache import BLOCK
from forerun.server.memory import free_memory

NEVER = 10**9


class Memory:
    """Allocations of buffers, of which one fails, or all that are too large."""

    def __init__(self, fails: int = NEVER, most: int = NEVER) -> None:
        self.count, self.fails, self.most = 0, fails, most

    def take(self, shape: Any) -> None:
        self.count += 1
        if self.count - 1 == self.fails or torch.Size(shape).numel() > self.most:
            raise torch.OutOfMemoryError("no memory")


@contextmanager
def memory(**given: int) -> Iterator[Memory]:
    found, zeros = Memory(**given), torch.Tensor.new_zeros

    def new_zeros(like: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        if isinstance(shape[0], tuple) and len(shape[0]) == 4:  # buffers alone have four sizes
            found.take(shape[0])
        return zeros(like, *shape, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "MAPPED", NEVER)
        patch.setattr(torch.Tensor, "new_zeros", new_zeros)
        yield found


def facts(pair: Pair) -> Any:
    """All that a failure must leave alone."""
    kept = pair.cache
    places = [(layer.keys.data_ptr(), layer.values.data_ptr(), layer.keys.shape) for layer in kept._ready()]
    return list(kept.ids), list(kept.lengths), kept.rows_capacity, kept.capacity, places


GROWTHS: dict[str, Callable[[Pair], Any]] = {
    "rows": lambda pair: pair.add(7, 10),
    "positions": lambda pair: pair.add(7, BLOCK + 1),
    "forward": lambda pair: pair.forward({1: BLOCK}),
    "copy": lambda pair: pair.cache.copy_in(1, pair.cache.view(1, 2), BLOCK + 1),
    "reserve": lambda pair: pair.cache.reserve(5, 3 * BLOCK),
}


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("way", GROWTHS)
def test_buffers_that_cannot_grow_stay(way: str, layer: int) -> None:
    pair = Pair()
    for id in (1, 2):
        pair.add(id, 10)
        pair.commit(pair.forward({id: 3}), [[0, 2]])
    before = facts(pair)
    with memory(fails=layer), pytest.raises(torch.OutOfMemoryError):
        GROWTHS[way](pair)
    assert facts(pair) == before
    pair.check()
    pair.commit(pair.forward({1: 4, 2: BLOCK}), [[0, 1, 2, 3], [0, 5]])  # within what there is, and beyond
    pair.add(3, 5 * BLOCK)
    pair.commit(pair.forward({3: 2}), [[0, 1]])
    pair.check()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_first_buffers_that_cannot_be_had_are_tried_again(layer: int) -> None:
    pair = Pair()
    pair.add(1, 3 * BLOCK)
    with memory(fails=layer), pytest.raises(torch.OutOfMemoryError):
        pair.forward({1: 3})
    assert pair.cache.ids == [1] and pair.cache.lengths == [0] and not pair.cache.ready
    pair.commit(pair.forward({1: 3}), [[0, 2]])
    pair.add(2, 3 * BLOCK)
    pair.commit(pair.forward({1: 2, 2: 4}), [[0], [0, 1, 2]])
    pair.check()


def test_keys_and_values_of_two_sizes_grow_together() -> None:
    pair = cache_module.KVCache(1)
    pair.add(0, 4)
    states = torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 4)
    pair.begin(1, 0, 1)
    pair.layers[0].update(*states)
    pair.commit([0], [[0]])
    for place in range(2):
        with memory(fails=place), pytest.raises(torch.OutOfMemoryError):
            pair.reserve(1, 2 * BLOCK)
        assert pair.layers[0].keys.shape[2] == pair.layers[0].values.shape[2] == pair.capacity == BLOCK
    pair.reserve(1, 2 * BLOCK)
    pair.begin(1, 1, 2)
    keys, values = pair.layers[0].update(*states)
    assert keys.eq(1).all() and values.eq(1).all()


@cache
def models(kind: str) -> tuple[CausalLM, CausalLM]:
    """A target and a draft, whose layers run in torch or, where there is a compiler, in C."""
    target = tiny("llama", max_position_embeddings=2048)
    draft = noisy_copy(target, 0.02)
    if kind == "float32":
        return prepare(target), prepare(draft)
    return prepare(store(target, kind)), prepare_draft(store(draft, kind), None, None)


def engine(kind: str) -> Engine:
    target, draft = models(kind)
    return Decoder(target.fresh(), draft=draft.fresh(), method=method("sd", gamma=3), prefix_bytes=2**20).engine


REQUESTS = [([5, 6, 7, 5, 6], 12), (list(range(3, 60)), 20), ([9, 8, 7], 260), ([11, 12, 11], 9)]


def answers(engine: Engine, wanted: list[tuple[list[int], int]]) -> list[list[int] | None]:
    """Tokens of each request, None for those that an error has ended. Steps that fail are tried again."""
    ids = [engine.add(Request(prompt, count)) for prompt, count in wanted]
    found: dict[int, list[int] | None] = {id: [] for id in ids}
    while engine.busy:
        try:
            steps = engine.step()
        except torch.OutOfMemoryError:
            continue
        for step in steps:
            own = found[step.id]
            assert own is not None
            found[step.id] = None if step.error is not None else own + list(step.tokens)
            assert step.error is None or isinstance(step.error, torch.OutOfMemoryError)
    return [found[id] for id in ids]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_failed_allocation_harms_no_other_request(kind: str) -> None:
    with memory() as counted:
        expected = answers(engine(kind), REQUESTS)
    assert None not in expected and counted.count >= 16
    for number in range(counted.count):
        with memory(fails=number):
            running = engine(kind)
            assert answers(running, REQUESTS) == expected  # what fails once is tried again
            assert answers(running, REQUESTS) == expected


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_request_that_is_too_large_ends_alone(kind: str) -> None:
    small, large = REQUESTS[0], (REQUESTS[0][0], 1500)
    (expected,) = answers(engine(kind), [small])
    with memory(most=100_000):
        running = engine(kind)
        assert answers(running, [large, small, small]) == [None, expected, expected]
        assert answers(running, [small, large]) == [expected, None]


def test_free_memory_is_what_the_machine_and_the_group_leave(tmp_path: Path) -> None:
    cpu, group = torch.device("cpu"), tmp_path / "sys/fs/cgroup"
    assert (free_memory(cpu) or 0) > 0
    assert (free_memory(cpu, tmp_path) or 1) > 0  # a system that tells nothing
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  900 kB\nMemAvailable:     500 kB\n")
    assert free_memory(cpu, tmp_path) == 500 * 1024
    group.mkdir(parents=True)
    for name, text in (
        ("memory.max", "300000\n"),
        ("memory.current", "200000\n"),
        ("memory.stat", "inactive_file 7\n"),
    ):
        (group / name).write_text(text)
    assert free_memory(cpu, tmp_path) == 100_007
    (group / "memory.max").write_text("max\n")
    assert free_memory(cpu, tmp_path) == 500 * 1024
