"""`FamilyForward` with what stands between the products in C (`forerun.runtime.native`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.batch import Inputs
from forerun.cache import KVCache
from forerun.runtime.exact import ROWS, is_invariant, remembered
from forerun.runtime.family import FamilyForward
from forerun.runtime.native import LANES, LARGEST_HEAD, TokenBatch, lay_out_tokens


def fits(model: PreTrainedModel) -> bool:
    """Whether all sizes are those that the C code can do."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = size, config.hidden_size, config.intermediate_size
    return all(each % LANES == 0 for each in sizes) and size % (2 * LANES) == 0 and size <= LARGEST_HEAD


class NativeForward(FamilyForward):
    """The same arithmetic, in another order. Attention looks at as many keys as there are, in the order of their
    places, whatever the tree."""

    def __init__(self, model: PreTrainedModel, library: Any) -> None:
        self.library = library
        super().__init__(model)

    def _between(self, width: int, inner: int) -> bool:
        """Tries what C does, as `FamilyForward` tries what torch does."""
        self.inner, self.floors = inner, (width * self.eps, self.size * self.eps)

        def tried() -> bool:
            maker = torch.Generator().manual_seed(0)
            x, up = (torch.randn(ROWS, size, generator=maker) for size in (width, 2 * inner))
            parts = torch.randn(ROWS, (self.heads + 2 * self.groups) * self.size, generator=maker).bfloat16()
            gain = torch.rand(width, generator=maker)

            def normed(rows: Tensor) -> Tensor:
                return self._normed(rows.clone(), None, gain)[0]

            return (
                is_invariant(normed, x)
                and is_invariant(self._gated, up.bfloat16())
                and all(self._attends_alike(parts, length) for length in (0, 1, 37, 300))
            )

        return remembered(f"C: {self.heads}x{self.groups}x{self.size} of {width}, {inner}", tried)

    def _attends_alike(self, parts: Tensor, length: int) -> bool:
        """Whether a chain behind so many keys gets what its tokens get one by one."""
        maker = torch.Generator().manual_seed(length)
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
                own = parts[done : done + count].contiguous()
                found.append(self._attended(own, None, None, turn, batch, cache.layers[0], 0))
                cache.lengths[0] += count
                done += count
            return torch.cat(found)

        single = run([1] * ROWS)
        return all(torch.equal(run(counts), single) for counts in ([ROWS], [3, 5, 8], [1, 2, 4, 9]))

    def lay_out(self, inputs: Inputs, cache: KVCache) -> Any:
        """What `__call__` takes."""
        return lay_out_tokens(inputs, cache)

    def __call__(self, batch: Any, cache: KVCache, logits: bool, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
        """As `FamilyForward` has it."""
        rows, new = batch.positions.shape
        x = self.embed(batch.ids.reshape(-1)).float().contiguous()
        turn = self._turn(batch.positions.flatten(), batch.end)
        gains = [*(layer.first for layer in self.layers[1:]), self.norm]
        h, whole = self._normed(x, None, self.layers[0].first)
        for layer, gain, stored in zip(self.layers, gains, cache.layers, strict=True):
            window = self.sliding[layer.sliding] or 0
            parts = layer.qkv(h).contiguous()
            attended = self._attended(
                parts, layer.bias, layer.each, turn if layer.rotates else None, batch, stored, window
            )
            h, _ = self._normed(x, layer.out(attended), layer.second)
            added = layer.down(self._gated(layer.up(h)))
            h, whole = self._normed(x, added, gain, whole=gain is self.norm)
        scores = self.head(whole).view(rows, new, -1) if logits else None
        return scores, h.view(rows, new, -1) if wanted else None

    def _normed(self, x: Tensor, added: Tensor | None, gain: Tensor, whole: bool = False) -> tuple[Tensor, Tensor]:
        """x [n, d] += added; RMSNorm of it in bfloat16, and, with `whole`, in float32."""
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        full = torch.empty_like(x) if whole else x
        more = None if added is None else added.contiguous()
        self.library.add_and_norm(
            x.data_ptr(),
            None if more is None else more.data_ptr(),
            gain.data_ptr(),
            self.floors[0],
            *x.shape,
            out.data_ptr(),
            full.data_ptr() if whole else None,
        )
        return out, full

    def _gated(self, both: Tensor) -> Tensor:
        both = both.contiguous()
        out = torch.empty(len(both), self.inner, dtype=torch.bfloat16)
        self.library.gate(both.data_ptr(), len(both), self.inner, out.data_ptr())
        return out

    def _turn(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, D], of which the sines of the first half are negative."""
        cos, sin = self.rotations(end)
        return cos[positions], sin[positions]

    def _attended(
        self,
        parts: Tensor,
        bias: Tensor | None,
        gains: Tensor | None,
        turn: tuple[Tensor, Tensor] | None,
        batch: TokenBatch,
        stored: Any,
        window: int,
    ) -> Tensor:
        """Attention [n, H D] of queries, keys and values [n, (H + 2 G) D], which go into the cache."""
        count = len(parts)
        if not stored.is_initialized:
            states = parts.view(1, count, -1, self.size)[:, :, : self.groups].transpose(1, 2)
            stored.lazy_initialization(states, states)
        both = stored.both
        out = torch.empty(count, self.heads * self.size, dtype=torch.bfloat16)
        width = -(-batch.end // LANES) * LANES
        scratch = torch.empty(2 * self.heads * self.size + self.heads // self.groups * width)
        self.library.attend(
            parts.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if gains is None else gains.data_ptr(),
            self.floors[1],
            None if turn is None else turn[0].data_ptr(),
            None if turn is None else turn[1].data_ptr(),
            both.data_ptr(),
            both.shape[2],
            *(part.data_ptr() for part in (batch.row, batch.length, batch.slot, batch.place, batch.paths)),
            batch.paths.shape[1],
            count,
            self.heads,
            self.groups,
            self.size,
            window,
            width,
            scratch.data_ptr(),
            out.data_ptr(),
        )
        return out
