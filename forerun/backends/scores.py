"""The LM head in few bits, with logits in float32.

Torch's kernels for few bits round what they give to bfloat16: steps of 0.125 between logits of 16 and 32, which makes
ties of tokens that are not alike. So a head multiplies integers, which is exact, and computes the largest logits again
from the weight's own values. Integers also cost little for many rows. Both are choices of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from forerun.backends.bits import Blocks, Packed, pack, quantise, take
from forerun.backends.kernels import library
from forerun.backends.packed import Product, product
from forerun.backends.panels import Panels, Rows
from forerun.backends.tiles import BLOCK, HeadArgument, Tiles, has_tiles, score, tile_head

LARGEST = 16  # logits of a row that are computed from the weight's own values
_LOW = 254  # steps of the low half of a state in one of the high half
_ROWS = 4096
LONGEST = 2**16


def draft_head(weight: Tensor, bias: Tensor | None, few: bool) -> Product:
    """The LM head [V, d] of a draft, which may round: in integers with `few`, where this machine has our kernels."""
    if few and library() is not None and weight.shape[1] % BLOCK == 0:
        own = Panels(Rows.quantised(weight, Type.Q8_0))
        return own if bias is None else lambda x: own(x) + bias
    if not (few and has_tiles() and weight.shape[1] % BLOCK == 0):
        return product(weight, bias, one_row=True, few=few)
    found = scores(weight.bfloat16())
    return found if bias is None else lambda x: found(x) + bias


@dataclass(frozen=True)
class Scores:
    """An LM head.

    Attributes:
        codes: [V, d] int8.
        scales: [V] float32.
        exact: the weight's own values: blocks, or [V, d] of floats.
        rough: takes the place of the integers where torch does not multiply them exactly.
        tiles: the codes as our own product has them, where there is one; `codes` are none then.
    """

    codes: Tensor
    scales: Tensor
    exact: Blocks | Tensor
    rough: Packed | Tiles | None = None
    tiles: Tensor | None = None

    @property
    def out(self) -> int:
        return self.scales.shape[0]

    @property
    def inputs(self) -> int:
        return self.exact.codes.shape[1] if isinstance(self.exact, Blocks) else self.exact.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.tiles is None else self.tiles.nbytes)

    @property
    def argument(self) -> HeadArgument:
        """For C."""
        assert self.tiles is not None
        table = None if isinstance(self.exact, Blocks) else self.exact.data_ptr()
        codes, steps, least = (
            (each.data_ptr() for each in (self.exact.codes, self.exact.scales, self.exact.least))
            if isinstance(self.exact, Blocks)
            else (None,) * 3
        )
        return HeadArgument(
            self.tiles.data_ptr(), codes, self.scales.data_ptr(), steps, least, table, self.out, self.inputs
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [n, V] float32 of states [n, d]."""
        x = x.float()
        if self.tiles is not None:
            return score(self.argument, x.contiguous())
        y = self._integers(x) if self.rough is None else self.rough(x).float()
        best = y.topk(min(LARGEST, self.out), sorted=False).indices
        own = take(self.exact, best.flatten()).view(*best.shape, -1)
        return y.scatter_(1, best, (own * x[:, None]).sum(-1))

    def _integers(self, x: Tensor) -> Tensor:
        """Logits of states in two halves of 8 bits, times weights of 8 bits."""
        size = x.abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-30)
        steps = x / size
        high = steps.round()
        low = steps.sub_(high).mul_(_LOW).round_()
        both = torch._int_mm(torch.cat((high, low)).to(torch.int8), self.codes.T)
        return both[: len(x)].float().mul_(_LOW).add_(both[len(x) :]).mul_(self.scales).mul_(size / _LOW)


@torch.no_grad()
def scores(weight: Blocks | Tensor) -> Scores:
    """The head of a weight [V, d], which is kept for its largest logits."""
    size = weight.codes if isinstance(weight, Blocks) else weight
    codes, scales = torch.empty(size.shape, dtype=torch.int8), torch.empty(len(size), dtype=torch.float32)
    for start in range(0, len(size), _ROWS):
        ids = torch.arange(start, min(start + _ROWS, len(size)))
        values = take(weight, ids)
        step = values.abs().amax(-1).div_(127).clamp_(min=1e-30)
        codes[ids], scales[ids] = values.div_(step[:, None]).round_().to(torch.int8), step
    fits = isinstance(weight, Blocks) or weight.dtype == torch.bfloat16
    # The sums of more products of 8 bits than LONGEST do not fit into 32.
    if has_tiles() and codes.shape[1] % BLOCK == 0 and codes.shape[1] <= LONGEST and fits:
        return Scores(codes[:0], scales, _contiguous(weight), tiles=tile_head(codes))
    if _multiplies_integers():
        return Scores(codes, scales, weight)
    blocks = weight if isinstance(weight, Blocks) else quantise(weight, 8)
    return Scores(codes[:0], scales, weight, pack(blocks))


def _contiguous(weight: Blocks | Tensor) -> Blocks | Tensor:
    if isinstance(weight, Tensor):
        return weight.contiguous()
    codes, scales, least = weight.codes, weight.scales, weight.least
    if codes.is_contiguous() and scales.is_contiguous() and least.is_contiguous():
        return weight  # an embedding may share it
    return Blocks(codes.contiguous(), scales.contiguous(), least.contiguous(), weight.bits)


@cache
def _multiplies_integers() -> bool:
    """Whether torch's product of 8-bit integers is exact here: without instructions for it, oneDNN's sums overflow."""
    maker = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-127, 128, shape, generator=maker, dtype=torch.int8) for shape in ((4, 576), (96, 576)))
    x[0], weight[:48] = 127, 127
    x[1] = -127
    return torch.equal(torch._int_mm(x, weight.T).long(), x.long() @ weight.long().T)
