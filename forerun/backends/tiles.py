"""Weights in 4 and 8 bits for our own product, which multiplies integers of 8 bits (`layers.c`).

It is for processors that have an instruction for such products (VNNI, with registers of 512 bits), where there is a
compiler. Eight rows cost it little more than one, as the weights are read once. With weights in 4 bits, inputs are
rounded to 8 bits in blocks of 32, as in llama.cpp (ggml's `Q8_1`), beside weights in 8 bits to 16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.backends.native import library

BLOCK, LANES = 32, 16


class TileArgument(ctypes.Structure):
    """`tiles` of layers.c."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("out", "inputs", "bits", "ieee")),
    )


class LayerArgument(ctypes.Structure):
    """`layer` of layers.c."""

    _fields_ = (
        *((name, TileArgument) for name in ("qkv", "out", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("second", "next", "bias", "gains", "cache")),
        *((name, ctypes.c_int64) for name in ("rows", "capacity", "rotates", "window")),
    )


class HeadArgument(ctypes.Structure):
    """`head` of layers.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "codes", "scales", "steps", "least", "table")),
        *((name, ctypes.c_int64) for name in ("out", "inputs")),
    )


class StatesArgument(ctypes.Structure):
    """`states` of layers.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("high", "low", "highs", "lows", "steps"))


class RoomArgument(ctypes.Structure):
    """`inputs` of layers.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("x", "rest", "scales", "sums", "finer"))


class BatchArgument(ctypes.Structure):
    """`batch` of layers.c."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("layers", "n", "d", "inner", "heads", "groups", "size", "path", "width", "space", "threads", "steps"),
                *("most", "slots", "routes"),
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("first", "cos", "sin", "row", "length", "slot", "place", "paths", "x", "whole", "below", "scratch"),
                *("h", "parts", "attended", "both", "inside", "entry"),
            )
        ),
        ("fuse", TileArgument),
        ("between", TileArgument),
        ("room", RoomArgument),
        *((name, ctypes.c_float) for name in ("floor", "floor_each")),
    )


class ChainArgument(ctypes.Structure):
    """`chain` of layers.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "rest", "names", "met", "pending", "ends", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("logits", "chances", "drafted", "places", "numbers", "keys", "laws")),
        ("halves", StatesArgument),
        *((name, ctypes.c_int64) for name in ("at", "length", "count", "most", "known", "ended", "size", "among")),
        *((name, ctypes.c_int64) for name in ("longest", "positions")),
        *((name, ctypes.c_float) for name in ("least", "product", "turn", "top_p")),
    )


class GuessArgument(ctypes.Structure):
    """`guess` of layers.c."""

    _fields_ = (
        ("embed", HeadArgument),
        *((name, TileArgument) for name in ("both", "alone", "between", "answer")),
        *((name, ctypes.c_void_p) for name in ("given", "old", "cos", "sin", "behind", "hot", "tokens")),
        *((name, ctypes.c_void_p) for name in ("found", "logits", "sums", "chances", "drafted", "entry", "own")),
        ("halves", StatesArgument),
        ("room", RoomArgument),
        *((name, ctypes.c_int64) for name in ("at", "length", "count", "start", "most", "olds", "root", "sees")),
        *((name, ctypes.c_int64) for name in ("longest", "positions")),
        ("weight", ctypes.c_float),
    )


class Halves:
    """Memory for n states as a head takes them."""

    def __init__(self, rows: int, width: int) -> None:
        self.halves, self.sums = room(2, rows, width, dtype=torch.int8), room(3, rows, dtype=torch.int32)
        self.argument = StatesArgument(*_parts(self.halves), *_parts(self.sums))


class Room:
    """Memory for n inputs as a product takes them."""

    def __init__(self, rows: int, inputs: int) -> None:
        self.numbers = room(2, rows, inputs, dtype=torch.int8)
        self.facts = room(3, rows, inputs // BLOCK)
        self.argument = RoomArgument(*_parts(self.numbers), *_parts(self.facts))


@dataclass(frozen=True)
class Tiles:
    """A weight [out, in] in the form of our product.

    Attributes:
        data: [out / 16, in / 32, bytes] uint8, see layers.c.
        bits: 4 or 8.
        ieee: whether blocks have scales and least values of IEEE's 16 bits, as in GGUF files, or scales and middles in
            bfloat16, as torch's kernel has them.
    """

    data: Tensor
    bits: int
    ieee: bool

    @property
    def out(self) -> int:
        return LANES * self.data.shape[0]

    @property
    def inputs(self) -> int:
        return BLOCK * self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def argument(self) -> TileArgument:
        """For C."""
        return TileArgument(self.data.data_ptr(), self.out, self.inputs, self.bits, self.ieee)

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] @ weight.T [n, out], in bfloat16."""
        x = x.bfloat16().contiguous()
        _check_width(x, self.inputs)
        y, own = room(len(x), self.out, dtype=torch.bfloat16), Room(len(x), self.inputs)
        arguments = ctypes.byref(self.argument), x.data_ptr(), len(x), ctypes.byref(own.argument), y.data_ptr()
        _compiled().multiply(*arguments, torch.get_num_threads())
        return y

    def values(self) -> Tensor:
        """[out, in] float32."""
        panels, blocks, _ = self.data.shape
        numbers = self.data[..., : 64 * self.bits]
        if self.bits == 4:
            numbers = torch.cat([numbers & 15, numbers >> 4], -1)
        codes = numbers.view(panels, blocks, 8, LANES, 4).permute(0, 3, 1, 2, 4).reshape(self.out, blocks, BLOCK)
        kind = torch.float16 if self.ieee else torch.bfloat16
        scales, least = (
            self.data[..., start : start + 2 * LANES].contiguous().view(kind).float().transpose(1, 2).flatten(0, 1)
            for start in (64 * self.bits, 64 * self.bits + 2 * LANES)
        )
        if not self.ieee:
            least = least - 2 ** (self.bits - 1) * scales
        return (codes * scales[..., None] + least[..., None]).flatten(1)


def score(head: HeadArgument, x: Tensor) -> Tensor:
    """Logits [n, V] float32 of states [n, d] float32, contiguous."""
    _check_width(x, head.inputs)
    count, width = x.shape
    y, own = room(count, head.out), Halves(count, width)
    arguments = (
        ctypes.byref(head),
        x.data_ptr(),
        count,
        ctypes.byref(own.argument),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    _compiled().score(*arguments)
    return y


def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for C to write to, whatever torch's defaults are."""
    return torch.empty(*shape, dtype=dtype, device="cpu")


def _parts(whole: Tensor) -> range:
    """Addresses of the parts [..] of a contiguous [n, ..]."""
    start, size = whole.data_ptr(), max(whole.nbytes // whole.shape[0], 1)  # no rows: none of them is looked at
    return range(start, start + whole.shape[0] * size, size)


def _check_width(x: Tensor, inputs: int) -> None:
    """C would read what is not there."""
    if x.ndim != 2 or x.shape[1] != inputs:
        raise ValueError(f"inputs must be [n, {inputs}], not {list(x.shape)}")


def tile_head(codes: Tensor) -> Tensor:
    """Codes [V, d] int8 as the head's data, filled up where panels of 16 do not divide V."""
    padded = functional.pad(codes.view(torch.uint8) ^ 128, (0, 0, 0, -len(codes) % LANES))
    return padded.view(-1, LANES, codes.shape[1] // 4, 4).transpose(1, 2).contiguous()


_kept: list[Any] = []  # the library that tiles were made for; what is in the environment may change later


def _compiled() -> Any:
    return _kept[-1]


def has_tiles() -> bool:
    """Whether our product can be had on this machine."""
    found = library()
    if found is None or not found.has_products():
        return False
    if found not in _kept:
        _kept.append(found)
    return True


def tile(codes: Tensor, scales: Tensor, least: Tensor, bits: int) -> Tiles | None:
    """Codes [out, in] uint8 below 2**bits with scales and least values [out, in / 32] float32.

    None for outputs that panels of 16 do not divide, and for scales that are numbers of neither kind of 16 bits.
    """
    out, inputs = codes.shape
    if out % LANES:
        return None
    middle = least + 2 ** (bits - 1) * scales
    ieee = not _are(torch.bfloat16, scales, middle)  # ours are, whatever their size
    if ieee and not _are(torch.float16, scales, least):
        return None
    numbers = codes.view(out // LANES, LANES, inputs // BLOCK, 8, 4).permute(0, 2, 3, 1, 4)
    if bits == 4:
        numbers = numbers[:, :, :4] | numbers[:, :, 4:] << 4
    kind = torch.float16 if ieee else torch.bfloat16
    sides = [
        each.to(kind).view(out // LANES, LANES, -1).transpose(1, 2).contiguous().view(torch.uint8)
        for each in (scales, least if ieee else middle)
    ]
    return Tiles(torch.cat([numbers.flatten(2), *sides], -1), bits, ieee)


def _are(kind: torch.dtype, *values: Tensor) -> bool:
    return all(torch.equal(each.to(kind).float(), each) for each in values)


def beside(parts: Sequence[Tiles]) -> Tiles | None:
    """Weights with the same inputs in one, None where they are of different kinds."""
    if len({(part.bits, part.ieee) for part in parts}) > 1:
        return None
    return Tiles(torch.cat([part.data for part in parts]), parts[0].bits, parts[0].ieee)
