"""The KV cache against lists: what was committed reads back, whatever the order of calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import cache as cache_module
from forerun.cache import BLOCK, KVCache

LAYERS, HEADS, DIM = 2, 2, 3


class Pair:
    """A KVCache and the plain lists it should equal; every entry is a number that was never used before."""

    def __init__(self, rows: int) -> None:
        self.cache, self.lists = KVCache(LAYERS, rows), [[] for _ in range(rows)]
        self.next = 1

    def forward(self, new: int) -> list[list[int]]:
        """Writes `new` provisional entries a row and checks what attention would be given."""
        rows = len(self.lists)
        written = torch.arange(self.next, self.next + rows * new).view(rows, new)
        self.next += rows * new
        self.cache.begin(torch.device("cpu"), new)
        for number, layer in enumerate(self.cache.layers):
            states = entries(written, number).transpose(1, 2)
            keys, values = layer.update(states, -states)
            longest = max(map(len, self.lists))
            assert keys.shape == values.shape == (rows, HEADS, longest + new, DIM)
            for row, expected in enumerate(self.lists):
                whole = entries(torch.tensor([*expected, *written[row].tolist()]), number).transpose(0, 1)
                assert keys[row, :, : whole.shape[1]].equal(whole)
                assert values[row, :, : whole.shape[1]].equal(-whole)
        return written.tolist()

    def check(self) -> None:
        assert self.cache.lengths == [len(expected) for expected in self.lists]
        assert self.cache.get_seq_length() == max(map(len, self.lists))
        for number, layer in enumerate(self.cache.layers):
            for row, expected in enumerate(self.lists):
                if expected:
                    whole = entries(torch.tensor(expected), number).transpose(0, 1)
                    assert layer.keys[row, :, : len(expected)].equal(whole)
                    assert layer.values[row, :, : len(expected)].equal(-whole)


def entries(ids: torch.Tensor, layer: int) -> torch.Tensor:
    """[..., HEADS, DIM] states that tell their id, layer, head and place apart."""
    places = torch.arange(HEADS * DIM).view(HEADS, DIM) / 10 + 1000.0 * layer
    return ids[..., None, None] * 10_000.0 + places


@given(st.data())
@settings(max_examples=150)
def test_any_order_of_calls_equals_lists(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "BLOCK", 4)  # many growths
        pair = Pair(data.draw(st.integers(1, 4), "rows"))
        for _ in range(data.draw(st.integers(1, 8), "calls")):
            call = data.draw(st.sampled_from(["commit", "commit", "forget", "crop", "keep"]))
            if call in ("commit", "forget"):
                new = data.draw(st.integers(1, 6), "new")
                written = pair.forward(new)
                if call == "commit":
                    paths = [sorted(data.draw(st.sets(st.integers(0, new - 1)))) for _ in written]
                    pair.cache.commit(paths)
                    for expected, row, path in zip(pair.lists, written, paths, strict=True):
                        expected += [row[node] for node in path]
            elif call == "crop":
                lengths = [data.draw(st.integers(0, len(expected))) for expected in pair.lists]
                pair.cache.crop_to(lengths)
                pair.lists = [expected[:length] for expected, length in zip(pair.lists, lengths, strict=True)]
            else:
                rows = data.draw(st.lists(st.integers(0, len(pair.lists) - 1), min_size=1, max_size=4, unique=True))
                pair.cache.keep(rows)
                pair.lists = [list(pair.lists[row]) for row in rows]
            pair.check()


def test_growth_over_a_block_keeps_what_was_there() -> None:
    pair = Pair(2)
    for new in (BLOCK - 1, 3, BLOCK + 1):
        written = pair.forward(new)
        pair.cache.commit([list(range(new)), list(range(new - 1))])
        pair.lists[0] += written[0]
        pair.lists[1] += written[1][:-1]
        pair.check()
    # Room for what is needed, in whole blocks.
    assert pair.cache.layers[0].keys.shape[-2] == 3 * BLOCK


def test_a_longer_length_cannot_be_cropped_to() -> None:
    pair = Pair(1)
    pair.forward(2)
    pair.cache.commit([[0, 1]])
    with pytest.raises(AssertionError):
        pair.cache.crop_to([3])


def test_no_rows_left() -> None:
    pair = Pair(2)
    pair.forward(2)
    pair.cache.keep([])
    assert pair.cache.lengths == [] and len(pair.cache.layers[0].keys) == 0
