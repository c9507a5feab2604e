"""`FamilyForward` with what stands between the products in C (`forerun.backends.native`)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.backends.bits import BLOCK, Packed
from forerun.backends.exact import ROWS, is_invariant, remembered
from forerun.backends.family import PRODUCTS, FamilyForward, Layer, head_size
from forerun.backends.native import LANES, LARGEST_HEAD, TokenBatch, lay_out_tokens
from forerun.backends.native_layers import LayerWeights, NativeLayers, buffers, places_and_space
from forerun.backends.tiles import Tiles, room
from forerun.engine.target import Capture
from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache, KVLayer


def fits(model: PreTrainedModel) -> bool:
    """Whether all sizes are those that the C code can do."""
    config = model.config
    size = head_size(config)
    sizes = size, config.hidden_size, config.intermediate_size
    return all(each % LANES == 0 for each in sizes) and size % (2 * LANES) == 0 and size <= LARGEST_HEAD


class NativeForward(FamilyForward):
    """The same arithmetic, in another order. Attention looks at as many keys as there are, in the order of their
    places, whatever the tree."""

    pads = False

    def __init__(self, model: PreTrainedModel, library: Any) -> None:
        self.library = library
        super().__init__(model)
        followers = [*(layer.first for layer in self.layers[1:]), self.norm]
        self._last = self.norm.data_ptr()
        self.whole = self._in_one_call()
        self._quick: list[Any] = [
            (layer, *(_direct(getattr(layer, name)) for name in PRODUCTS), layer.second.data_ptr(), gain.data_ptr())
            for layer, gain in zip(self.layers, followers, strict=True)
        ]

    def _in_one_call(self) -> NativeLayers | None:
        """All layers as C takes them at once; None where a product is none of our own."""
        found: list[LayerWeights] = []
        for layer in self.layers:
            products = {name: getattr(layer, name) for name in PRODUCTS}
            if not all(isinstance(product, Tiles) for product in products.values()):
                return None
            rest = {name: getattr(layer, name) for name in ("first", "second", "bias", "each", "rotates")}
            found.append(LayerWeights(**products, **rest, window=self.sliding[layer.sliding] or 0))
        return NativeLayers(self.library, found, self.norm, self.heads, self.groups, self.size, self.eps)

    def _between(self, width: int, inner: int) -> bool:
        """Tries what C does, as `FamilyForward` tries what torch does."""
        self.inner, self.floors = inner, (width * self.eps, self.size * self.eps)

        def tried() -> bool:
            maker = torch.Generator().manual_seed(0)
            x, up = (torch.randn(ROWS, size, generator=maker) for size in (width, 2 * inner))
            parts = torch.randn(ROWS, (self.heads + 2 * self.groups) * self.size, generator=maker).bfloat16()
            gain = torch.rand(width, generator=maker)

            def normed(rows: Tensor) -> Tensor:
                own, out = rows.clone(), torch.empty(rows.shape, dtype=torch.bfloat16)
                sizes = gain.data_ptr(), self.floors[0], *rows.shape
                self.library.add_and_norm(own.data_ptr(), None, *sizes, out.data_ptr(), None)
                return out

            def gated(rows: Tensor) -> Tensor:
                own, out = rows.contiguous(), torch.empty(len(rows), inner, dtype=torch.bfloat16)
                self.library.gate(own.data_ptr(), len(own), inner, out.data_ptr())
                return out

            return (
                is_invariant(normed, x)
                and is_invariant(gated, up.bfloat16())
                and all(self._attends_alike(parts, length) for length in (0, 1, 37, 300))
            )

        return remembered(f"C: {self.heads}x{self.groups}x{self.size} of {width}, {inner}", tried)

    def _attends_alike(self, parts: Tensor, length: int) -> bool:
        """Whether a chain behind so many keys gets what its tokens get one by one."""
        maker = torch.Generator().manual_seed(length)
        plain: Any = SimpleNamespace(bias=None, each=None, rotates=True, sliding=next(iter(self.sliding)))
        before = torch.randn(1, length or 1, 2 * self.groups, self.size, generator=maker).bfloat16()

        def run(counts: list[int]) -> Tensor:
            cache, found, done = KVCache(1), [], 0
            cache.add(0, length + ROWS + 1)
            lay_out_tokens(Inputs([0], [range(len(before[0]))], tokens=[[0] * len(before[0])]), cache)
            cache.layers[0].update_both(before)
            cache.lengths[0] = length
            for count in counts:
                batch = lay_out_tokens(Inputs([0], [range(count)], tokens=[[0] * count]), cache)
                turn = torch.ones(count, self.size), torch.zeros(count, self.size)
                out = torch.empty(count, self.heads * self.size, dtype=torch.bfloat16)
                self._attention(batch, count, turn, out)(
                    parts[done : done + count].contiguous(), plain, cache.layers[0]
                )
                found.append(out)
                cache.lengths[0] += count
                done += count
            return torch.cat(found)

        single = run([1] * ROWS)
        return all(torch.equal(run(counts), single) for counts in ([ROWS], [3, 5, 8], [1, 2, 4, 9]))

    def __call__(
        self, inputs: Inputs, cache: KVCache, logits: bool, capture: Capture
    ) -> tuple[Tensor | None, Tensor | None]:
        batch = lay_out_tokens(inputs, cache)
        x = self.embed(batch.ids).float().contiguous()
        count, width = x.shape
        turn = self._turn(batch.positions, batch.end)
        if self.whole is not None:
            whole, states = self.whole(x, batch, turn, cache, capture == "below")
            return self.head(whole) if logits else None, states if capture else None
        # Buffers that all layers use: every allocation counts here.
        h, whole = room(count, width, dtype=torch.bfloat16), room(count, width)
        attended = room(count, self.heads * self.size, dtype=torch.bfloat16)
        inner = room(count, self.inner, dtype=torch.bfloat16)
        here, there, floor = x.data_ptr(), h.data_ptr(), self.floors[0]
        attention = self._attention(batch, count, turn, attended)
        norm, gate, inside = self.library.add_and_norm, self.library.gate, inner.data_ptr()
        norm(here, None, self.layers[0].first.data_ptr(), floor, count, width, there, None)
        for weights, stored in zip(self._quick, cache.layers, strict=True):
            layer, qkv, out, up, down, second, following = weights
            if capture == "below" and following == self._last:
                below = x.bfloat16()  # now, as x is added to in its place
            attention(qkv(h), layer, stored)
            added = out(attended)
            norm(here, added.data_ptr(), second, floor, count, width, there, None)
            both = up(h)
            gate(both.data_ptr(), count, self.inner, inside)
            added = down(inner)
            last = whole.data_ptr() if following == self._last else None
            norm(here, added.data_ptr(), following, floor, count, width, there, last)
        hidden = below if capture == "below" else h if capture else None
        return self.head(whole) if logits else None, hidden

    def _turn(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, D], of which the sines of the first half are negative."""
        cos, sin = self.rotations(end)
        return cos[positions], sin[positions]

    def _attention(
        self, batch: TokenBatch, count: int, turn: tuple[Tensor, Tensor], out: Tensor
    ) -> Callable[[Tensor, Layer, KVLayer], None]:
        """A function that puts a layer's attention [n, H D] into `out`, from queries, keys and values
        [n, (H + 2 G) D]; keys and values go into the cache."""
        width, space = places_and_space(batch.end, self.heads, self.groups, self.size)
        scratch = room(space)
        places = [part.data_ptr() for part in (batch.row, batch.length, batch.slot, batch.place, batch.paths)]
        sizes = batch.paths.shape[1], count, self.heads, self.groups, self.size
        cos, sin = (part.data_ptr() for part in turn)
        attend, floor, spare, found = self.library.attend, self.floors[1], scratch.data_ptr(), out.data_ptr()

        def run(parts: Tensor, layer: Layer, stored: KVLayer, kept: Any = (scratch, turn, batch)) -> None:
            both = buffers(stored, self.groups, self.size)
            attend(
                parts.data_ptr(),
                None if layer.bias is None else layer.bias.data_ptr(),
                None if layer.each is None else layer.each.data_ptr(),
                floor,
                *((cos, sin) if layer.rotates else (None, None)),
                both.data_ptr(),
                both.shape[0],
                both.shape[2],
                *places,
                *sizes,
                self.sliding[layer.sliding] or 0,
                width,
                space,
                spare,
                found,
            )

        return run


def _direct(product: Any) -> Callable[[Tensor], Tensor]:
    """A product of contiguous bfloat16 rows, contiguous, without a word between it and the kernel where that can be."""
    if isinstance(product, Packed) and product.bits == 4 and len(product.weight) == product.out:
        kernel, weight, scales = torch._weight_int4pack_mm_for_cpu, product.weight, product.scales
        return lambda x: kernel(x, weight, BLOCK, scales)
    return lambda x: product(x).contiguous()
