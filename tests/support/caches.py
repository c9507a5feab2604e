"""A KV cache beside plain lists of what it must hold."""

from __future__ import annotations

import torch

from forerun.model.batch import Inputs, pad
from forerun.model.kv_cache import KVCache

LAYERS = 2
HEADS = 2
DIM = 3


class Pair:
    """A KVCache and the plain lists that it must equal. Every entry is a number used only once."""

    def __init__(self, width: int = DIM, context: int | None = None) -> None:
        self.cache = KVCache(LAYERS, context=context)
        self.lists = dict[int, list[int]]()
        self.width = width
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
        size = max(rows) + 1
        new = max(counts.values())
        depths = [range(count) for count in counts.values()]
        inputs = Inputs(rows, depths, tokens=[[0] * count for count in counts.values()])
        batch = pad(inputs, self.cache, torch.device("cpu"), torch.float32)
        written = torch.arange(self.next, self.next + size * new).view(size, new)
        self.next += size * new
        for number, layer in enumerate(self.cache.layers):
            states = entries(written, number).transpose(1, 2)
            keys, values = layer.update(states, -states[..., : self.width])
            assert keys.shape == (size, HEADS, batch.end, DIM) and values.shape == (
                *keys.shape[:3],
                self.width,
            )
            for id, row in zip(counts, rows, strict=True):
                assert self.cache._slots is not None or self.cache._start == len(self.lists[id])
                same(keys[row], values[row], [*self.lists[id], *written[row].tolist()], number)
        return {id: written[row].tolist() for id, row in zip(counts, rows, strict=True)}

    def commit(self, written: dict[int, list[int]], paths: list[list[int]]) -> None:
        self.cache.commit(list(written), paths)
        for (id, row), path in zip(written.items(), paths, strict=True):
            self.lists[id] += [row[node] for node in path]

    def run(self, paths: dict[int, list[int]]) -> None:
        self.commit(
            self.forward({id: path[-1] + 1 for id, path in paths.items()}), list(paths.values())
        )

    def check(self) -> None:
        assert sorted(self.cache.ids) == sorted(self.lists)
        for row, id in enumerate(self.cache.ids):
            length = len(self.lists[id])
            assert (
                self.cache.row(id) == row
                and self.cache.length(id) == self.cache.lengths[row] == length
            )
            for number, layer in enumerate(self.cache.layers if length else ()):
                same(layer.keys[row], layer.values[row], self.lists[id], number)

    @property
    def size(self) -> tuple[int, int]:
        return self.cache.rows_capacity, self.cache.capacity


def entries(ids: torch.Tensor, layer: int) -> torch.Tensor:
    """[..., HEADS, DIM] states that tell their id, layer, head and place apart."""
    places = torch.arange(HEADS * DIM).view(HEADS, DIM) / 10 + 1000.0 * layer
    return ids[..., None, None] * 10_000.0 + places


def same(keys: torch.Tensor, values: torch.Tensor, expected: list[int], layer: int) -> None:
    whole = entries(torch.tensor(expected), layer).transpose(0, 1)
    assert keys[:, : len(expected)].equal(whole)
    assert values[:, : len(expected)].equal(-whole[..., : values.shape[-1]])
