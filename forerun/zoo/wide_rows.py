"""Rows of IQ1, IQ2, IQ3 and TQ formats in more bits that hold the same values. Needs no torch.

Files store such weights as places in tables of up to 2,048 groups of values. Products need each
weight by itself. So every weight becomes a code of 4 bits, which is exact because a group has 16
different values at most: 3 or 8 sizes with a sign (IQ2, IQ3), or -1, 0 and 1, a little more or less
(IQ1).

The wide rows of the IQ formats are ours. A block of 256 weights has 146 bytes:

    d 2 | scales 16 | codes 128

A weight is d / 8 x the scale of its 16 x the number of its code (`NUMBERS`), which is exact in
float32. The low half of code byte i belongs to weight 2 i, the high half to weight 2 i + 1. The TQ
formats become Q4_0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants

from forerun.zoo.formats import WIDE_BLOCK_BYTES, WideType, block_sizes

_SIZES_OF_IQ3 = (8, 24, 40, 56, 72, 88, 104)  # and one more, which differs
# Numbers of codes, of which the last 8 belong to negative signs. In IQ1 the sign is that of the
# eighth that is added to -1, 0 or 1.
_SMALL = (8, 25, 43, 0, -7, 1, 9, 0, -8, -25, -43, 0, -9, -1, 7, 0)
NUMBERS: Mapping[WideType, tuple[int, ...]] = {
    **dict.fromkeys(
        (WideType.IQ1_S, WideType.IQ1_M, WideType.IQ2_XXS, WideType.IQ2_XS, WideType.IQ2_S), _SMALL
    ),
    WideType.IQ3_XXS: (*_SIZES_OF_IQ3, 124, *(-size for size in _SIZES_OF_IQ3), -124),
    WideType.IQ3_S: (*_SIZES_OF_IQ3, 120, *(-size for size in _SIZES_OF_IQ3), -120),
}
_FIRST_CODE_OF_IQ1 = 4
# For each byte of signs the sign bits of 8 codes.
_SIGN_BITS = sum(
    ((np.arange(256, dtype=np.uint32) >> i & 1) << 4 * i + 3 for i in range(8)),
    start=np.zeros(256, np.uint32),
)
# What a block says: d as float16 [n, 1], its sub-scales [n, 8 or 16], places in the table
# [n, 32 or 64], and signs of 8 weights each [n, 32].
_Block = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def wide_rows(rows: np.ndarray, type: Type) -> np.ndarray:
    """Return rows [n, bytes] uint8 of a file as rows of `loaded_type(type)`, with the same values.

    Args:
        rows: of a file.
        type: their format: IQ1, IQ2, IQ3, TQ1_0 or TQ2_0.
    """
    blocks = np.ascontiguousarray(rows).reshape(-1, block_sizes(type)[1])
    if type in (Type.TQ1_0, Type.TQ2_0):
        return _ternary(blocks, type).reshape(len(rows), -1)
    d, scales, places, signs = _READERS[type](blocks)
    codes = _codes_of_places(type)[places].view("<u4") | _SIGN_BITS[signs]
    factors = np.repeat(2 * scales + 1, 16 // scales.shape[1], 1).astype(np.uint8)
    parts = (d.view(np.uint8), factors, codes.view(np.uint8))
    return np.concatenate(parts, 1).reshape(len(rows), -1)


def wide_values(rows: np.ndarray, type: WideType) -> np.ndarray:
    """Return the values [n, inputs] float32 of wide rows [n, bytes]."""
    blocks = np.ascontiguousarray(rows).reshape(-1, WIDE_BLOCK_BYTES)
    d = blocks[:, :2].view(np.float16).astype(np.float32) / 8
    factors = np.repeat(blocks[:, 2:18], 16, 1).astype(np.float32)
    codes = np.stack([blocks[:, 18:] & 15, blocks[:, 18:] >> 4], 2).reshape(len(blocks), -1)
    numbers = np.array(NUMBERS[type], np.float32)[codes]
    return (d * factors * numbers).reshape(len(rows), -1)


def _ternary(blocks: np.ndarray, type: Type) -> np.ndarray:
    """Return blocks of TQ formats as blocks of Q4_0 [8 n, 18], whose codes are more by 8."""
    d_bytes = blocks[:, -2:].copy()
    unit = blocks.copy()
    unit[:, -2:] = np.ones(1, np.float16).view(np.uint8)
    codes = (quants.dequantize(unit, type) + 8).astype(np.uint8).reshape(-1, 2, 16)
    packed = codes[:, 0] | codes[:, 1] << 4
    return np.concatenate([np.repeat(d_bytes, 8, 0), packed], 1)


@cache
def _codes_of_places(type: Type) -> np.ndarray:
    """Return the codes of each group of a format's table, 4 bits a code.

    They are uint32 for groups of 8, and uint16 for groups of 4.
    """
    kinds: dict[Type, Any] = {
        Type.IQ1_S: quants.IQ1_S,
        Type.IQ1_M: quants.IQ1_M,
        Type.IQ2_XXS: quants.IQ2_XXS,
        Type.IQ2_XS: quants.IQ2_XS,
        Type.IQ2_S: quants.IQ2_S,
        Type.IQ3_XXS: quants.IQ3_XXS,
        Type.IQ3_S: quants.IQ3_S,
    }
    traits = kinds[type]
    traits.init_grid()
    values = traits.grid.reshape(traits.grid_shape)
    codes = np.searchsorted(np.array(traits.grid_map, np.float32), values).astype(np.uint32)
    if type in (Type.IQ1_S, Type.IQ1_M):
        codes += _FIRST_CODE_OF_IQ1
    words = (codes << 4 * np.arange(codes.shape[1], dtype=np.uint32)).sum(1)
    return words.astype("<u4" if codes.shape[1] == 8 else "<u2")


def _read_iq1_s(blocks: np.ndarray) -> _Block:
    """Read d 2 | low bits of places 32 | their high bits, scales and signs 16."""
    rest = blocks[:, 34:].copy().view("<u2")
    high = (rest[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1)
    signs = np.repeat(np.where(rest >> 15, 255, 0), 4, 1)
    return blocks[:, :2].copy(), rest >> 12 & 7, blocks[:, 2:34] | high << 8, signs


def _read_iq1_m(blocks: np.ndarray) -> _Block:
    """Read low bits of places 32 | high bits and signs 16 | scales 8, which have parts of d."""
    rest = blocks[:, 48:].copy().view("<u2")
    d = (rest >> 12 << np.array([0, 4, 8, 12], np.uint16)).sum(1, dtype=np.uint16)
    scales = (rest[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1)
    high = _halves(blocks[:, 32:48]).astype(np.uint16)
    places = blocks[:, :32] | (high & 7) << 8
    return d[:, None].view(np.uint8), scales, places, np.where(high & 8, 255, 0)


def _read_iq2_xxs(blocks: np.ndarray) -> _Block:
    """Read d 2 | 8 times: places 4, signs and a scale 4."""
    words = blocks[:, 2:].copy().view("<u4").reshape(len(blocks), 8, 2)
    places = words[:, :, 0].copy().view(np.uint8).reshape(len(blocks), -1)
    return blocks[:, :2].copy(), words[:, :, 1] >> 28, places, _four_signs(words[:, :, 1])


def _read_iq2_xs(blocks: np.ndarray) -> _Block:
    """Read d 2 | places with signs 64 | scales 8."""
    words = blocks[:, 2:66].copy().view("<u2")
    return blocks[:, :2].copy(), _halves(blocks[:, 66:]), words & 511, _signs()[words >> 9]


def _read_iq2_s(blocks: np.ndarray) -> _Block:
    """Read d 2 | low bits of places 32 | signs 32 | high bits of places 8 | scales 8."""
    high = blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    places = blocks[:, 2:34] | high.reshape(len(blocks), -1).astype(np.uint16) << 8
    return blocks[:, :2].copy(), _halves(blocks[:, 74:]), places, blocks[:, 34:66]


def _read_iq3_xxs(blocks: np.ndarray) -> _Block:
    """Read d 2 | places 64 | signs and scales 32."""
    words = blocks[:, 66:].copy().view("<u4")
    return blocks[:, :2].copy(), words >> 28, blocks[:, 2:66], _four_signs(words)


def _read_iq3_s(blocks: np.ndarray) -> _Block:
    """Read d 2 | low bits of places 64 | their high bits 8 | signs 32 | scales 4."""
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    places = blocks[:, 2:66] | high << 8
    return blocks[:, :2].copy(), _halves(blocks[:, 106:]), places, blocks[:, 74:106]


_READERS: Mapping[Type, Callable[[np.ndarray], _Block]] = {
    Type.IQ1_S: _read_iq1_s,
    Type.IQ1_M: _read_iq1_m,
    Type.IQ2_XXS: _read_iq2_xxs,
    Type.IQ2_XS: _read_iq2_xs,
    Type.IQ2_S: _read_iq2_s,
    Type.IQ3_XXS: _read_iq3_xxs,
    Type.IQ3_S: _read_iq3_s,
}


def _halves(packed: np.ndarray) -> np.ndarray:
    """Return the halves [n, 2 b] of bytes [n, b], the low one first."""
    return np.stack([packed & 15, packed >> 4], 2).reshape(len(packed), -1)


def _four_signs(words: np.ndarray) -> np.ndarray:
    """Return the signs [n, 4 w] of words [n, w], which have 7 bits for each 8 weights."""
    sevens = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    return _signs()[sevens.reshape(len(words), -1)]


def _signs() -> np.ndarray:
    """Return 8 signs for each 7 bits. The last one makes the number of negative ones even."""
    return np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)
