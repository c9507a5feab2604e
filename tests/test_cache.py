"""The KV cache against lists: what was committed reads back, whatever the order of calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.model import kv_cache as cache_module
from forerun.model.batch import Inputs, pad
from forerun.model.kv_cache import BLOCK, KVCache

LAYERS, HEADS, DIM = 2, 2, 3


class Pair:
    """A KVCache and the plain lists it should equal; every entry is a number that was never used before."""

    def __init__(self) -> None:
        self.cache, self.lists = KVCache(LAYERS), dict[int, list[int]]()
        self.next = 1

    def add(self, id: int, reserve: int = 0) -> None:
        self.cache.add(id, reserve)
        self.lists[id] = []

    def drop(self, id: int) -> None:
        self.cache.drop(id)
        self.lists.pop(id, None)

    def forward(self, counts: dict[int, int]) -> dict[int, list[int]]:
        """Writes provisional entries and checks what attention would be given."""
        rows = [self.cache.row(id) for id in counts]
        size, new = max(rows) + 1, max(counts.values())
        depths = [range(count) for count in counts.values()]
        inputs = Inputs(rows, depths, tokens=[[0] * count for count in counts.values()])
        batch = pad(inputs, self.cache, torch.device("cpu"), torch.float32)
        written = torch.arange(self.next, self.next + size * new).view(size, new)
        self.next += size * new
        for number, layer in enumerate(self.cache.layers):
            states = entries(written, number).transpose(1, 2)
            keys, values = layer.update(states, -states)
            assert keys.shape == values.shape == (size, HEADS, batch.end, DIM)
            for id, row in zip(counts, rows, strict=True):
                whole = entries(torch.tensor([*self.lists[id], *written[row].tolist()]), number).transpose(0, 1)
                start = len(self.lists[id]) if self.cache._slots is not None else self.cache._start
                assert start == len(self.lists[id])
                assert keys[row, :, : whole.shape[1]].equal(whole)
                assert values[row, :, : whole.shape[1]].equal(-whole)
        return {id: written[row].tolist() for id, row in zip(counts, rows, strict=True)}

    def commit(self, written: dict[int, list[int]], paths: list[list[int]]) -> None:
        self.cache.commit(list(written), paths)
        for (id, row), path in zip(written.items(), paths, strict=True):
            self.lists[id] += [row[node] for node in path]

    def check(self) -> None:
        assert sorted(self.cache.ids) == sorted(self.lists)
        for row, id in enumerate(self.cache.ids):
            expected = self.lists[id]
            assert self.cache.row(id) == row and self.cache.length(id) == self.cache.lengths[row] == len(expected)
            for number, layer in enumerate(self.cache.layers):
                if expected:
                    whole = entries(torch.tensor(expected), number).transpose(0, 1)
                    assert layer.keys[row, :, : len(expected)].equal(whole)
                    assert layer.values[row, :, : len(expected)].equal(-whole)


def entries(ids: torch.Tensor, layer: int) -> torch.Tensor:
    """[..., HEADS, DIM] states that tell their id, layer, head and place apart."""
    places = torch.arange(HEADS * DIM).view(HEADS, DIM) / 10 + 1000.0 * layer
    return ids[..., None, None] * 10_000.0 + places


@given(st.data())
@settings(max_examples=200)
def test_any_order_of_calls_equals_lists(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "BLOCK", 4)  # many growths
        pair, fresh = Pair(), iter(range(5, 100, 3))
        pair.cache.budget = data.draw(st.sampled_from([None, 2000]), "budget")
        for _ in range(data.draw(st.integers(1, 14), "calls")):
            call = data.draw(st.sampled_from(["add", "commit", "commit", "forget", "crop", "drop", "reset", "copy"]))
            ids = list(pair.lists)
            if call == "add" or not ids:
                pair.add(next(fresh), data.draw(st.integers(0, 20), "reserve"))
            elif call in ("commit", "forget"):
                some = data.draw(st.lists(st.sampled_from(ids), min_size=1, unique=True), "rows")
                written = pair.forward({id: data.draw(st.integers(1, 6), "new") for id in some})
                if call == "commit":
                    # Paths may only hold nodes that the row had.
                    counts = [len(row) for row in written.values()]
                    pair.commit(written, [sorted(data.draw(st.sets(st.integers(0, count - 1)))) for count in counts])
            elif call == "crop":
                some = data.draw(st.lists(st.sampled_from(ids), unique=True), "rows")
                lengths = [data.draw(st.integers(0, len(pair.lists[id]))) for id in some]
                pair.cache.crop_to(some, lengths)
                for id, length in zip(some, lengths, strict=True):
                    pair.lists[id] = pair.lists[id][:length]
            elif call == "drop":
                pair.drop(data.draw(st.sampled_from([*ids, 1]), "id"))
            elif call == "reset":
                pair.cache.reset()
                pair.lists.clear()
            else:
                one, other = data.draw(st.sampled_from(ids)), next(fresh)
                length = data.draw(st.integers(0, len(pair.lists[one])))
                stored = [each and (each[0].clone(), each[1].clone()) for each in pair.cache.view(one, length)]
                pair.add(other)
                pair.cache.copy_in(other, stored, length)
                pair.lists[other] = pair.lists[one][:length]
            pair.check()


def test_buffers_stay_where_they_are_within_what_was_reserved() -> None:
    pair = Pair()
    pair.add(1, 3 * BLOCK)
    pair.commit(pair.forward({1: 2}), [[0, 1]])
    places = [layer.keys.data_ptr() for layer in pair.cache.layers]
    for turn in range(20):
        written = pair.forward({1: 30})
        pair.commit(written, [list(range(30 if turn % 2 else 7))])
    pair.drop(1)
    pair.add(2, BLOCK)
    pair.commit(pair.forward({2: 5}), [[0, 4]])
    pair.check()
    assert [layer.keys.data_ptr() for layer in pair.cache.layers] == places
    assert (pair.cache.rows_capacity, pair.cache.capacity) == (1, 3 * BLOCK)


def test_buffers_grow_by_blocks_and_by_powers_of_two() -> None:
    pair = Pair()
    for id in range(5):
        pair.add(id, 10)
        pair.commit(pair.forward({id: 1}), [[0]])
    assert (pair.cache.rows_capacity, pair.cache.capacity) == (8, BLOCK)
    pair.commit(pair.forward({3: BLOCK + 1}), [list(range(BLOCK + 1))])  # more than was reserved
    pair.check()
    assert (pair.cache.rows_capacity, pair.cache.capacity) == (8, 2 * BLOCK)


def test_growth_stays_within_the_budget() -> None:
    pair = Pair()
    pair.add(0, BLOCK)
    pair.commit(pair.forward({0: 1}), [[0]])
    size = pair.cache.position_bytes
    assert size == LAYERS * 2 * HEADS * DIM * 4
    budget = 6 * BLOCK * size
    for id in range(1, 6):
        assert pair.cache.fits(BLOCK, budget)
        pair.add(id, BLOCK)
    assert pair.cache.rows_capacity == 6  # eight do not fit
    assert not pair.cache.fits(BLOCK, budget) and not pair.cache.fits(1, budget)
    for id in range(2, 6):
        pair.drop(id)
    assert pair.cache.fits(2 * BLOCK, budget) and not pair.cache.fits(2 * BLOCK + 1, budget)
    pair.add(9, 2 * BLOCK)  # rows that are not in use make room for longer ones
    assert (pair.cache.rows_capacity, pair.cache.capacity) == (3, 2 * BLOCK)
    assert pair.cache.allocated_bytes <= budget
    assert pair.cache.fits(6 * BLOCK, budget, rows=0) and not pair.cache.fits(6 * BLOCK + 1, budget, rows=0)
    pair.check()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_what_is_reserved_takes_no_memory_before_it_is_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

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
    with pytest.raises(ValueError, match="has a row already"):
        cache.add(4)
    cache.drop(5)
    assert 4 in cache and 5 not in cache and cache.length(5) == 0
