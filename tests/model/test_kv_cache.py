"""The KV cache against plain lists, for any order of calls.

And memory that cannot be allocated, which harms nothing else.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import Decoder
from forerun.backends import prepare
from forerun.backends.hot import prepare_draft
from forerun.backends.stored import store
from forerun.engine.engine import Engine, Step
from forerun.engine.sequence import Request
from forerun.methods import method
from forerun.model import buffers as buffers_module
from forerun.model import kv_cache as cache_module
from forerun.model import pages as pages_module
from forerun.model.buffers import can_reserve
from forerun.model.causal_lm import CausalLM
from forerun.model.kv_cache import BLOCK, KVCache
from forerun.model.pages import can_move
from forerun.server.memory import free_memory
from tests.support.caches import DIM, HEADS, LAYERS, Pair, same
from tests.support.families import tiny
from tests.support.toys import noisy_copy, refuses, take_step, tokens_of

CALLS = ["add", "commit", "commit", "forget", "crop", "drop", "reset", "copy", "take", "detach"]


# Reservations that are large, outgrown at once, or not whole pages per row; and buffers that are
# copied.
MEMORIES: dict[str, dict[str, Any]] = {
    "reserved": {"context": 508},
    "outgrown": {"context": 12},
    "no pages": {"context": 13},
    "mapped": {"can_reserve": lambda: False},
    "plain": {"MAPPED": 10**9},
}


class Calls:
    """Calls of a cache with drawn arguments, each also made of the plain lists."""

    def __init__(self, data: st.DataObject, pair: Pair, context: int | None) -> None:
        self.data = data
        self.pair = pair
        self.context = context
        self.ids = iter(range(5, 100, 3))  # of sequences that are added

    def draw(self, strategy: st.SearchStrategy[Any], label: str | None = None) -> Any:
        return self.data.draw(strategy, label)

    def pick(self, label: str | None = None) -> int:
        """Draw the id of a sequence."""
        return self.draw(st.sampled_from(list(self.pair.lists)), label)

    def add(self) -> None:
        self.pair.add(next(self.ids), self.draw(st.integers(0, 20), "reserve"))

    def forget(self) -> dict[int, list[int]]:
        """Write provisional entries of some rows, and return them. No call commits them."""
        ids = list(self.pair.lists)
        some = self.draw(st.lists(st.sampled_from(ids), min_size=1, unique=True), "rows")
        return self.pair.forward({id: self.draw(st.integers(1, 6), "new") for id in some})

    def commit(self) -> None:
        written = self.forget()
        # Paths may only hold nodes that the row had.
        nodes = [st.sets(st.integers(0, len(row) - 1)) for row in written.values()]
        self.pair.commit(written, [sorted(self.draw(some)) for some in nodes])

    def crop(self) -> None:
        some = self.draw(st.lists(st.sampled_from(list(self.pair.lists)), unique=True), "rows")
        lengths = [self.draw(st.integers(0, len(self.pair.lists[id]))) for id in some]
        self.pair.cache.crop_to(some, lengths)
        for id, length in zip(some, lengths, strict=True):
            self.pair.lists[id] = self.pair.lists[id][:length]

    def drop(self) -> None:
        self.pair.drop(self.draw(st.sampled_from([*self.pair.lists, 1]), "id"))

    def reset(self) -> None:
        self.pair.cache.reset()
        self.pair.lists.clear()

    def copy(self) -> None:
        one = self.pick()
        other = next(self.ids)
        length = self.draw(st.integers(0, len(self.pair.lists[one])))
        stored = [
            both and (both[0].clone(), both[1].clone())
            for both in self.pair.cache.view(one, length)
        ]
        self.pair.add(other)
        self.pair.cache.copy_in(other, stored, length)
        self.pair.lists[other] = self.pair.lists[one][:length]

    def take(self) -> None:
        """Move the beginning of another cache's row, where this cache can take it over."""
        prompt = Pair(self.pair.width, self.context)
        prompt.next = self.pair.next
        prompt.add(0)
        prompt.run({0: list(range(self.draw(st.integers(1, 9), "prompt")))})
        self.pair.next = prompt.next
        length = self.draw(st.integers(0, len(prompt.lists[0])))
        other = next(self.ids)
        if prompt.cache.is_releasable:
            self.pair.add(other)
            self.pair.cache.take(other, prompt.cache, 0, length)
            self.pair.lists[other] = prompt.lists[0][:length]
            prompt.lists[0] = []
        prompt.check()

    def detach(self) -> None:
        """Take the beginning of a row out of the cache, where memory can be moved."""
        id = self.pick()
        length = self.draw(st.integers(0, len(self.pair.lists[id])))
        if self.pair.cache.is_releasable:
            stored = self.pair.cache.detach(id, length)
            detached = self.pair.lists[id][:length]
            self.pair.lists[id] = []
            for number, both in enumerate(stored):
                assert length == 0 or both is not None
                if both is not None:
                    same(*both, detached, number)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300)
def test_any_order_of_calls_equals_lists(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "BLOCK", 4)  # many growths
        patch.setattr(cache_module, "RESERVED_ROWS", 3)
        patch.setattr(buffers_module, "MAPPED", 1)
        moved_bytes = data.draw(st.sampled_from([1, 50, 10**9]), "bytes that move")
        patch.setattr(buffers_module, "MOVED_PAGES", moved_bytes)
        patches = dict(MEMORIES[data.draw(st.sampled_from(sorted(MEMORIES)), "memory")])
        context = patches.pop("context", None)
        for name, value in patches.items():
            patch.setattr(buffers_module, name, value)
        pair = Pair(data.draw(st.sampled_from([DIM, DIM - 1])), context)
        pair.cache.budget = data.draw(st.sampled_from([None, 2000]), "budget")
        calls = Calls(data, pair, context)
        for _ in range(data.draw(st.integers(1, 14), "calls")):
            name = data.draw(st.sampled_from(CALLS))
            # Without a row the only call is one that adds a row.
            getattr(calls, name if pair.lists else "add")()
            pair.check()


def test_buffers_stay_where_they_are_within_what_was_reserved() -> None:
    pair = Pair()
    pair.add(1, 3 * BLOCK)
    pair.run({1: [0, 1]})
    places = [layer.keys.data_ptr() for layer in pair.cache.layers]
    for turn in range(20):
        pair.commit(pair.forward({1: 30}), [list(range(30 if turn % 2 else 7))])
    pair.drop(1)
    pair.add(2, BLOCK)
    pair.run({2: [0, 4]})
    pair.check()
    assert [layer.keys.data_ptr() for layer in pair.cache.layers] == places and pair.size == (
        1,
        3 * BLOCK,
    )


def test_buffers_grow_by_blocks_and_by_powers_of_two() -> None:
    pair = Pair()
    for id in range(5):
        pair.add(id, 10)
        pair.run({id: [0]})
    assert pair.size == (8, BLOCK)
    pair.run({3: list(range(BLOCK + 1))})  # more than was reserved
    pair.check()
    assert pair.size == (8, 2 * BLOCK)


def test_growth_stays_within_the_budget() -> None:
    pair = Pair()
    pair.add(0, BLOCK)
    pair.run({0: [0]})
    assert pair.cache.position_bytes == LAYERS * 2 * HEADS * DIM * 4
    budget = 6 * BLOCK * (each := pair.cache.position_bytes)

    def fits(positions: int, rows: int | None = None) -> bool:
        return pair.cache.fits(
            len(pair.cache.ids) if rows is None else rows, positions, budget, each
        )

    for id in range(1, 6):
        assert fits(BLOCK)
        pair.add(id, BLOCK)
    assert pair.size[0] == 6 and not fits(BLOCK) and not fits(1)  # eight rows do not fit
    for id in range(2, 6):
        pair.drop(id)
    assert fits(2 * BLOCK) and not fits(2 * BLOCK + 1)
    pair.add(9, 2 * BLOCK)  # rows that are not in use make room for longer ones
    assert pair.size == (3, 2 * BLOCK) and pair.cache.allocated_bytes <= budget
    assert fits(6 * BLOCK, rows=0) and not fits(6 * BLOCK + 1, rows=0)
    pair.check()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak() -> int:
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) * 1024


def fill(cache: KVCache, id: int, count: int) -> None:
    """Write and commit `count` entries of 32 KiB in 8 layers, some at a time."""
    for layer in range(0, count, 100):
        cache.begin(cache.row(id) + 1, layer, layer + 100)
        for each in cache.layers:
            each.update(*(torch.ones(cache.row(id) + 1, 8, 100, 64) for _ in "kv"))
        cache.commit([id], [range(100)])


def filled(ids: int, count: int) -> KVCache:
    """A cache of 8 layers with `count` entries in each of some rows."""
    cache = KVCache(8)
    for id in range(ids):
        cache.add(id, 1000)
        fill(cache, id, count)
    return cache


# AddressSanitizer keeps freed memory for a while, so what is resident says nothing there.
counts_memory = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="memory of a sanitizer"
)


@counts_memory
@pytest.mark.skipif(not can_reserve(), reason="buffers are copied here")
def test_buffers_grow_without_a_copy_and_dropped_rows_give_memory_back() -> None:
    cache = KVCache(8)
    before = resident()
    cache.add(0, 1000)
    fill(cache, 0, 1000)
    entries = 1000 * cache.position_bytes
    full = resident() - before
    places = [layer.keys.data_ptr() for layer in cache.layers]
    assert 0.99 * entries < full < 1.3 * entries
    Path("/proc/self/clear_refs").write_text("5")
    cache.add(1, 30_000)
    assert peak() - before < full + entries // 20  # nothing was copied
    assert places == [layer.keys.data_ptr() for layer in cache.layers]
    cache.copy_in(1, cache.view(0, 1000), 1000)
    cache.drop(0)  # the second row takes its place
    assert peak() - before < full + entries * 1.2
    assert resident() - before < 1.3 * entries and cache.length(1) == 1000
    cache.reset()
    assert resident() - before < 0.3 * entries


@counts_memory
@pytest.mark.skipif(not can_reserve(), reason="buffers are copied here")
def test_a_row_that_is_taken_is_nowhere_twice() -> None:
    one = filled(1, 1000)
    other = KVCache(8)
    entries = 1000 * one.position_bytes
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")
    other.add(5, 2000)
    other.take(5, one, 0, 1000)
    assert peak() - before < 0.05 * entries  # one group of 128
    assert (
        other.length(5) == 1000
        and one.length(0) == 0
        and bool((other.layers[3].keys[0, :, :1000] == 1).all())
    )


def written_pages() -> int:
    """Return how many pages this process was given so far."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[7])


@counts_memory
@pytest.mark.skipif(not can_move(), reason="entries are copied here")
def test_pages_of_long_rows_move_without_a_copy() -> None:
    one = filled(2, 1000)
    other = filled(1, 100)  # so that it has buffers
    pages = 1000 * one.position_bytes // mmap.PAGESIZE
    before = written_pages()
    one.drop(0)  # the second row takes its place
    other.take(0, one, 1, 1000)
    (keys, values), *_ = other.detach(0, 1000)
    assert written_pages() - before < pages // 10
    assert keys.shape == values.shape == (8, 1000, 64)
    assert bool((keys == 1).all() and (values == 1).all())
    assert not other.layers[0].keys.any() and not one.layers[0].keys.any()


@counts_memory
@pytest.mark.skipif(not can_move(), reason="entries are copied here")
def test_entries_behind_a_moved_text_take_no_memory() -> None:
    one = filled(1, 1000)
    other = filled(1, 100)
    one.crop_to([0], [100])
    before = resident()
    other.take(0, one, 0, 100)
    assert before - resident() > 800 * one.position_bytes
    assert bool((other.layers[3].keys[0, :, :100] == 1).all())
    assert not other.layers[3].keys[0, :, 200:].any()


def test_a_row_that_cannot_be_detached_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_module, "MAPPED", 1)
    monkeypatch.setattr(buffers_module, "MOVED_PAGES", 1)
    pair = Pair()
    pair.add(1, 10)
    pair.run({1: [0, 1, 2]})
    calls = count()
    real = mmap.mmap

    def mapped(*args: Any, **options: Any) -> mmap.mmap:
        if next(calls):
            raise OSError("no addresses")
        return real(*args, **options)

    monkeypatch.setattr(mmap, "mmap", mapped)
    with pytest.raises(MemoryError, match="no addresses"):
        pair.cache.detach(1, 3)
    pair.check()


@pytest.mark.skipif(not can_move(), reason="entries are copied here")
def test_rows_are_copied_where_a_move_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        """A C library whose `mremap` unmaps its target before it fails, as Linux may."""

        real = pages_module._libc()
        mmap = real.mmap

        def mremap(self, source: int, size: int, _: int, flags: int, target: int) -> int:
            ctypes.CDLL(None).munmap(ctypes.c_void_p(target), ctypes.c_size_t(size))
            return 2**64 - 1

    cache = filled(2, 1000)
    monkeypatch.setattr(pages_module, "_libc", Failing)
    cache.drop(0)
    assert all(bool((layer.keys[0, :, :1000] == 1).all()) for layer in cache.layers)
    assert not any(layer.keys[1].any() for layer in cache.layers)


@pytest.mark.skipif(not can_reserve(), reason="nothing is reserved here")
def test_fewer_addresses_do_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a system that refuses reservations, and then anything."""
    real, most = mmap.mmap, 10**7

    def mapped(file: int, size: int, **options: Any) -> mmap.mmap:
        if size > most:
            raise OSError("no addresses")
        return real(file, size, **options)

    monkeypatch.setattr(mmap, "mmap", mapped)
    monkeypatch.setattr(buffers_module, "MAPPED", 1)
    pair = Pair()
    for id in (1, 2, 3):
        pair.add(id, 10)
        pair.run({id: [0, 2]})
    pair.check()
    assert pair.cache.layers[0].keys.untyped_storage().nbytes() <= most
    pair.add(4, 5 * BLOCK)
    pair.check()
    before = facts(pair)
    most = 100
    with pytest.raises(MemoryError, match="no addresses"):
        pair.add(5, 50 * BLOCK)
    assert facts(pair) == before
    pair.run({1: [0, 1, 2, 3], 4: [0, BLOCK - 1]})
    pair.check()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_what_is_reserved_takes_no_memory_before_it_is_used() -> None:
    cache = KVCache(4)
    cache.add(0, 100_000)
    before = resident()
    cache.begin(1, 0, 4)
    for layer in cache.layers:
        layer.update(torch.ones(1, 8, 4, 64), torch.ones(1, 8, 4, 64))
    assert cache.allocated_bytes > 1_600_000_000 and resident() - before < 50_000_000


def test_a_sequence_has_one_row() -> None:
    cache = KVCache(LAYERS)
    cache.add(4)
    refuses("has a row already", cache.add, 4)
    cache.drop(5)
    assert 4 in cache and 5 not in cache and cache.length(5) == 0
    with pytest.raises(AssertionError):  # a longer length cannot be cropped to
        cache.crop_to([4], [3])


# Memory that cannot be had.

NEVER = 10**9


@contextmanager
def memory(fails: int = NEVER, most: int = NEVER) -> Iterator[count]:
    """Count allocations of buffers, of which one fails, or all that are too large."""
    taken = count()
    zeros = torch.Tensor.new_zeros

    def new_zeros(like: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        is_buffer = isinstance(shape[0], tuple) and len(shape[0]) == 4  # they alone have four sizes
        if is_buffer and (next(taken) == fails or torch.Size(shape[0]).numel() > most):
            raise torch.OutOfMemoryError("no memory")
        return zeros(like, *shape, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers_module, "MAPPED", NEVER)
        patch.setattr(torch.Tensor, "new_zeros", new_zeros)
        yield taken


def facts(pair: Pair) -> Any:
    kept = pair.cache
    shapes = [(layer.keys.shape, layer.values.shape) for layer in kept._ready()]
    return list(kept.ids), list(kept.lengths), kept.rows_capacity, kept.capacity, shapes


GROWTHS: dict[str, Callable[[Pair], Any]] = {
    "rows": lambda pair: pair.add(7, 10),
    "positions": lambda pair: pair.add(7, BLOCK + 1),
    "forward": lambda pair: pair.forward({1: BLOCK}),
    "copy": lambda pair: pair.cache.copy_in(1, pair.cache.view(1, 2), BLOCK + 1),
    "reserve": lambda pair: pair.cache.reserve(5, 3 * BLOCK),
}


@pytest.mark.parametrize(("width", "allocations"), [(DIM, LAYERS), (DIM - 1, 2 * LAYERS)])
@pytest.mark.parametrize("way", GROWTHS)
def test_buffers_that_cannot_grow_stay(way: str, width: int, allocations: int) -> None:
    """Keys and values of one size are one buffer."""
    for fails in range(allocations):
        with memory():
            pair = Pair(width)
            for id in (1, 2):
                pair.add(id, 10)
                pair.run({id: [0, 2]})
            before = facts(pair)
            with memory(fails), pytest.raises(torch.OutOfMemoryError):
                GROWTHS[way](pair)
            assert facts(pair) == before
            pair.check()
            pair.run({1: [0, 1, 2, 3], 2: [0, BLOCK - 1]})  # within what there is, and beyond
            pair.add(3, 5 * BLOCK)
            pair.run({3: [0, 1]})
            pair.check()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_first_buffers_that_cannot_be_had_are_tried_again(layer: int) -> None:
    pair = Pair()
    pair.add(1, 3 * BLOCK)
    with memory(fails=layer), pytest.raises(torch.OutOfMemoryError):
        pair.forward({1: 3})
    assert pair.cache.ids == [1] and pair.cache.lengths == [0] and not pair.cache._ready()
    pair.run({1: [0, 2]})
    pair.add(2, 3 * BLOCK)
    pair.run({1: [0], 2: [0, 1, 2]})
    pair.check()


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
    return Decoder(
        target.fresh(), draft=draft.fresh(), method=method("sd", gamma=3), prefix_bytes=2**20
    ).engine


REQUESTS = [([5, 6, 7, 5, 6], 12), (list(range(3, 60)), 20), ([9, 8, 7], 260), ([11, 12, 11], 9)]


def answers(engine: Engine, wanted: list[tuple[list[int], int]]) -> list[list[int] | None]:
    """Return the tokens of each request, None if an error ended it. Failed steps are repeated."""
    ids = [engine.add(Request(prompt, count)) for prompt, count in wanted]
    steps: dict[int, list[Step]] = {}
    while engine.busy:
        with suppress(torch.OutOfMemoryError):
            take_step(engine, steps)
    errors = [steps[id][-1].error for id in ids]
    assert all(isinstance(error, torch.OutOfMemoryError | None) for error in errors)
    return [None if error else tokens_of(steps[id]) for id, error in zip(ids, errors, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_failed_allocation_harms_no_other_request(kind: str) -> None:
    with memory() as taken:
        expected = answers(engine(kind), REQUESTS)
    allocations = next(taken)
    assert None not in expected and allocations >= 16
    for number in range(allocations):
        with memory(fails=number):
            running = engine(kind)
            for _ in range(2):
                assert answers(running, REQUESTS) == expected  # what fails once is tried again


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_request_that_is_too_large_ends_alone(kind: str) -> None:
    small, large = REQUESTS[0], (REQUESTS[0][0], 1500)
    (expected,) = answers(engine(kind), [small])
    with memory(most=100_000):
        running = engine(kind)
        assert answers(running, [large, small, small]) == [None, expected, expected]
        assert answers(running, [small, large]) == [expected, None]


def test_free_memory_is_what_the_machine_and_the_group_leave(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    group = tmp_path / "sys/fs/cgroup"
    assert (free_memory(cpu) or 0) > 0
    assert (free_memory(cpu, tmp_path) or 1) > 0  # a system that tells nothing
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  900 kB\nMemAvailable:     500 kB\n")
    assert free_memory(cpu, tmp_path) == 500 * 1024
    group.mkdir(parents=True)
    for name, text in {"max": "300000", "current": "200000", "stat": "inactive_file 7"}.items():
        (group / f"memory.{name}").write_text(text + "\n")
    assert free_memory(cpu, tmp_path) == 100_007
    (group / "memory.max").write_text("max\n")
    assert free_memory(cpu, tmp_path) == 500 * 1024
