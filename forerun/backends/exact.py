"""Whether a forward gives each row the same bits whatever stands beside it, found out by trying.

That depends on the machine: on its instructions, on how torch was built, on the number of threads. So every kernel is
tried at its real shapes when a model is loaded, and what was found is remembered in a file of the user's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.backends.bits import ConcatLinear, Dense, LinearSlice, Packed
from forerun.backends.blocks import attend, lay_out_blocks
from forerun.backends.machine import machine
from forerun.backends.native import build
from forerun.backends.packed import Product
from forerun.backends.scores import Scores
from forerun.backends.stored import kind_of
from forerun.backends.tiles import Tiles
from forerun.files import home, write_text
from forerun.model.batch import Inputs
from forerun.model.kv_cache import BLOCK, KVCache

ROWS = 16  # that a kernel is tried with
_OUTPUTS = 2**20  # numbers of a product that are compared: some kernels differ in one of ten thousand
_CHEAP = 1.25  # how much longer than one row as many may take, if they are to be run in its place


@dataclass(frozen=True)
class Fixed:
    """A product that is always run with so many rows."""

    product: Product
    rows: int = ROWS

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] @ weight.T [n, out]."""
        padded = functional.pad(x, (0, 0, 0, -len(x) % self.rows))
        return torch.cat([self.product(part) for part in padded.split(self.rows)])[: len(x)]


def is_invariant(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether each row of x [n, in] gets the same bits alone, behind others, and among many."""
    whole = function(x)
    many = function(torch.cat([x.flip(0), x, x]))[len(x) : 2 * len(x)]
    firsts = all(torch.equal(function(x[:count]), whole[:count]) for count in range(1, len(x)))
    alone = all(torch.equal(function(x[row : row + 1])[0], whole[row]) for row in range(1, len(x)))
    return firsts and alone and torch.equal(many, whole)


@torch.inference_mode()
def attention_is_invariant(heads: int, groups: int, size: int) -> bool:
    """Whether each query of `forerun.backends.blocks.attend` gets the same bits alone, in a chain and in a batch, and
    whether it matters how many keys stand behind those that it sees."""
    maker = torch.Generator().manual_seed(0)
    states = torch.randn(3, 3 * BLOCK, 2 * groups, size, generator=maker).bfloat16()
    asked = torch.randn(ROWS, heads, size, generator=maker).bfloat16()
    for length in (1, 37, BLOCK - ROWS // 2, BLOCK, 2 * BLOCK - 3):
        cache = KVCache(1)
        for id in range(3):
            cache.add(id, 3 * BLOCK)

        def ask(first: int, count: int, rows: list[int], cache: KVCache = cache, length: int = length) -> Tensor:
            cache.lengths[:] = [length + first + 7 * row for row in range(3)]
            inputs = Inputs(rows, [range(count)] * len(rows), tokens=[[0] * count] * len(rows))
            batch = lay_out_blocks(inputs, cache, heads // groups, {False: None})
            cache.layers[0].update_both(torch.zeros(inputs.size, count, 2 * groups, size, dtype=torch.bfloat16))
            both = cache.layers[0].both
            assert both is not None
            both[:3, :, : 3 * BLOCK] = states.transpose(1, 2)
            queries = asked[first : first + count].expand(inputs.size, -1, -1, -1)
            return attend(queries, heads, *cache.layers[0].seen(), batch.masks[False]).view(inputs.size, count, -1)[0]

        whole = ask(0, ROWS, [0])
        if not all(torch.equal(ask(0, count, [0]), whole[:count]) for count in (*range(1, 9), ROWS - 1)):
            return False
        if not all(torch.equal(ask(row, 1, [0])[0], whole[row]) for row in range(ROWS)):
            return False
        if not all(torch.equal(ask(0, count, [0, 1, 2]), whole[:count]) for count in (1, 5, ROWS)):
            return False
    return True


def product_is_invariant(product: Packed | Tiles | Dense | LinearSlice | ConcatLinear | Scores) -> bool:
    """Likewise for a product of `forerun.backends.bits`; remembered by its shape."""
    if isinstance(product, ConcatLinear):
        return all(map(product_is_invariant, product.parts))

    maker = torch.Generator().manual_seed(0)

    def tried() -> bool:
        times = -(-_OUTPUTS // (ROWS * product.out))
        rows = (torch.randn(ROWS, product.inputs, generator=maker).bfloat16() for _ in range(times))
        return all(is_invariant(product, x) for x in rows)

    return remembered(named(product), tried)


def named(product: Packed | Tiles | Dense | LinearSlice | ConcatLinear | Scores) -> str:
    """A kernel and its shape."""
    whole = product.whole if isinstance(product, LinearSlice) else product
    kind = "" if isinstance(whole, ConcatLinear) else f" {kind_of(whole)}"
    if isinstance(whole, Scores):
        kind = " in C" if whole.tiles is not None else " in torch" if whole.rough is None else " by blocks"
    return f"{type(whole).__name__}{kind} {product.out}x{product.inputs}"


def fixed_where_cheap(product: Any) -> Product | None:
    """A product at a fixed number of rows, None where that costs more than a little; what was found is remembered, so
    that a model rounds alike whenever it is loaded."""
    x = torch.zeros(ROWS, product.inputs, dtype=torch.bfloat16)

    def cheap() -> bool:
        seconds: dict[int, list[float]] = {1: [], ROWS: []}
        for _ in range(10):
            for rows, taken in seconds.items():
                begun = perf_counter()
                product(x[:rows])
                taken.append(perf_counter() - begun)
        return min(seconds[ROWS]) <= _CHEAP * min(seconds[1])

    return Fixed(product) if remembered(f"{named(product)} in {ROWS} rows is cheap", cheap) else None


def remembered(name: str, tried: Callable[[], bool]) -> bool:
    """What a trial of this name gave on this machine, with this torch and number of threads; it is made where there is
    none on file."""
    path = home() / "exact" / f"{machine()}-{_code()}-{build()}.json"
    found: dict[str, bool] = {}
    with suppress(OSError, ValueError):
        stored = json.loads(path.read_text())
        found = stored if isinstance(stored, dict) else {}
    if not isinstance(found.get(name), bool):
        found[name] = tried()
        with suppress(OSError):  # a folder that cannot be written to: it is tried again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(found, indent=1) + "\n")
    return found[name]


@cache
def _code() -> str:
    """Differs between versions of what is tried."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), *here.glob("*.c")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
