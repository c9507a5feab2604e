"""Weights in 4 and 8 bits, and the product with them.

A weight is cut into blocks of 32 inputs. A block has one scale and one least value, as in GGUF's Q4_1 (ggml,
`block_q4_1`). Torch's 4-bit kernel for CPUs takes just this form, with scale and middle in bfloat16. Eight bits go
through the same kernel as two halves of four, side by side: `x [high | low] = x high * 16 + x low`. That is our choice:
torch's 8-bit kernel has one scale a row of the weight, which loses more, and is about as fast (docs/log.md).

What makes the kernel worth having is that row i of a product has the same bits whatever rows stand beside it. So has
our own product (`forerun.backends.tiles`), which takes its place on processors that can do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forerun.backends.tiles import BLOCK, Tiles, beside, has_tiles, tile

_PANEL = 64  # outputs that the kernel takes at once; rows are packed in multiples of these
_ROWS = 4096  # of a weight that are packed at a time, as the kernel's packing wants 4 bytes a number


@dataclass(frozen=True)
class Blocks:
    """A weight [out, in] in blocks: `codes * scales + least`.

    Attributes:
        codes: [out, in] uint8, below 2**bits.
        scales, least: [out, in / 32] float32.
        bits: 4 or 8.
    """

    codes: Tensor
    scales: Tensor
    least: Tensor
    bits: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.least.nbytes

    def values(self) -> Tensor:
        """[out, in] float32."""
        codes = self.codes.unflatten(1, (-1, BLOCK)).float()
        return (codes * self.scales[..., None] + self.least[..., None]).flatten(1)

    def rows(self, order: Tensor) -> Blocks:
        """The same with its outputs in another order."""
        return Blocks(self.codes[order], self.scales[order], self.least[order], self.bits)


def join(parts: list[Blocks]) -> Blocks:
    """Weights with the same inputs and bits, one behind the other."""
    codes, scales, least = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales", "least"))
    return Blocks(codes, scales, least, parts[0].bits)


def quantise(weight: Tensor, bits: int) -> Blocks:
    """A float weight [out, in] in blocks of 4 or 8 bits. Scales are numbers of bfloat16, so that packing rounds none of
    them: 4 bits from the least to the greatest number of a block, 8 bits the same on both sides of zero.

    Raises ValueError for inputs that blocks of 32 do not divide.
    """
    check_inputs(weight.shape[1])
    blocks = weight.detach().float().unflatten(1, (-1, BLOCK))
    if bits == 8:
        scales = _up(blocks.abs().amax(-1) / 127)
        least = -128 * scales
    else:
        low, high = blocks.amin(-1), blocks.amax(-1)
        scales = _up((high - low) / 15)
        # The middle is what the kernel is given.
        least = (low + 8 * scales).bfloat16().float() - 8 * scales
    steps = (blocks - least[..., None]) / scales.clamp(min=1e-30)[..., None]
    codes = steps.round_().clamp_(0, 2**bits - 1).to(torch.uint8).flatten(1)
    return Blocks(codes, scales, least, bits)


def _up(scales: Tensor) -> Tensor:
    """Rounded to bfloat16, upwards, so that a block's ends are not cut off."""
    rounded = scales.bfloat16()
    return torch.where(rounded.float() < scales, rounded * (1 + 2**-7), rounded).float()


def check_inputs(inputs: int, name: str = "a weight") -> None:
    """Raises ValueError for a number of inputs that blocks do not divide."""
    if inputs % BLOCK:
        raise ValueError(f"{name} has {inputs} inputs, which blocks of {BLOCK} do not divide: choose bfloat16 weights")


@dataclass(frozen=True)
class Packed:
    """A weight in the form of torch's 4-bit kernel.

    Attributes:
        weight: [out', in'/2] uint8, two numbers a byte; of 8 bits in' is twice the inputs. out' is a multiple of 64.
        scales: [in'/32, out', 2] bfloat16: scale and middle, `(code - 8) * scale + middle`.
        out, inputs, bits: of what was packed.
    """

    weight: Tensor
    scales: Tensor
    out: int
    inputs: int
    bits: int

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes

    def values(self) -> Tensor:
        """[out, in] float32, as the kernel has them. Slow: for tests, and for parts of small weights."""
        eye = torch.eye(self.inputs, dtype=torch.bfloat16)
        return torch.cat([self(rows).T.float() for rows in eye.split(256)], 1)

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] @ weight.T [n, out], in bfloat16."""
        x = x.bfloat16().contiguous()
        if self.bits == 8:
            x = torch.cat((x, x), 1)
        y = torch._weight_int4pack_mm_for_cpu(x, self.weight, BLOCK, self.scales)
        return y if y.shape[1] == self.out else y[:, : self.out]


@torch.no_grad()
def pack(blocks: Blocks) -> Packed | Tiles:
    """The weight for our kernel where there is one, else for torch's."""
    tiles = tile(blocks.codes, blocks.scales, blocks.least, blocks.bits) if has_tiles() else None
    return tiles or for_torch(blocks)


def for_torch(blocks: Blocks) -> Packed:
    """The weight for torch's kernel."""
    out, inputs = blocks.codes.shape
    padded, halves = -(-out // _PANEL) * _PANEL, blocks.bits // 4
    weight = torch.empty(padded, halves * inputs // 2, dtype=torch.uint8)
    scales = torch.empty(halves * inputs // BLOCK, padded, 2, dtype=torch.bfloat16)
    for start in range(0, out, _ROWS):
        part = slice(start, start + _ROWS)
        codes, step, least = blocks.codes[part], blocks.scales[part], blocks.least[part]
        short = -len(codes) % _PANEL
        if short:
            codes, step, least = (functional.pad(each, (0, 0, 0, short)) for each in (codes, step, least))
        if blocks.bits == 8:
            # (high - 8) * 16 s + (low - 8) * s + 136 s + least; only the low half has a middle.
            middle = least + 136 * step
            codes = torch.cat([codes >> 4, codes & 15], 1)
            middle = torch.cat([torch.zeros_like(middle), middle], 1)
            step = torch.cat([16 * step, step], 1)
        else:
            middle = least + 8 * step
        weight[part] = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        scales[:, part] = torch.stack([step, middle], -1).bfloat16().transpose(0, 1)
    return Packed(weight, scales, out, inputs, blocks.bits)


@dataclass(frozen=True)
class Dense:
    """A weight [out, in] in bfloat16, as torch has it."""

    weight: Tensor

    @property
    def out(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] @ weight.T [n, out], in bfloat16. A lone row is run twice: torch has another kernel for it, which
        rounds otherwise."""
        x = x.bfloat16()
        return functional.linear(x, self.weight) if len(x) > 1 else functional.linear(x.expand(2, -1), self.weight)[:1]


def stored(weight: Tensor, kind: str) -> Packed | Tiles | Dense:
    """A float weight [out, in] as `kind` has it; raises ValueError for inputs that its blocks do not divide."""
    if kind == "bfloat16":
        return Dense(weight.detach().bfloat16())
    return pack(quantise(weight, int(kind.removeprefix("int"))))


@dataclass(frozen=True)
class ConcatLinear:
    """Products of the same input, side by side."""

    parts: Sequence[Packed | Tiles | Dense | LinearSlice]

    @property
    def inputs(self) -> int:
        return self.parts[0].inputs

    @property
    def out(self) -> int:
        return sum(part.out for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] @ weight.T [n, out] of all of them, in bfloat16."""
        return torch.cat([part(x) for part in self.parts], 1)


def joined(parts: Sequence[Packed | Tiles | Dense | LinearSlice]) -> Packed | Tiles | Dense | ConcatLinear:
    """One product that gives what these give of the same input, side by side: one kernel's where that can be."""
    dense = [part.weight for part in parts if isinstance(part, Dense)]
    if len(dense) == len(parts):
        return Dense(torch.cat(dense))
    tiles = [part for part in parts if isinstance(part, Tiles)]
    if len(tiles) == len(parts):
        return beside(tiles) or ConcatLinear(parts)
    packed = [part for part in parts if isinstance(part, Packed) and not part.out % _PANEL]
    if len(packed) < len(parts) or len({part.bits for part in packed}) > 1:
        return ConcatLinear(parts)
    weight, scales = torch.cat([part.weight for part in packed]), torch.cat([part.scales for part in packed], 1)
    return Packed(weight, scales, sum(part.out for part in packed), packed[0].inputs, packed[0].bits)


@dataclass(frozen=True)
class LinearSlice:
    """Some outputs of a joined weight."""

    whole: Packed | Tiles | Dense
    start: int
    out: int

    @property
    def inputs(self) -> int:
        return self.whole.inputs

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] @ weight.T [n, out], in bfloat16."""
        return self.whole(x)[:, self.start : self.start + self.out]


def take(weight: Blocks | Tensor, rows: Tensor) -> Tensor:
    """Some rows [n, in] of a weight, in float32."""
    return weight.rows(rows).values() if isinstance(weight, Blocks) else weight[rows].float()
