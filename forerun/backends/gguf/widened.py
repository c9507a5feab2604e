"""Formats of four bits whose codes stand for a table of numbers, widened exactly to Q8_0.

A code becomes the number of the table, and a block keeps its scale, so no weight changes. A matrix
takes twice the bytes.
"""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type

# The numbers of each format's codes.
_NUMBERS = {Type.IQ4_NL: quants.IQ4_NL.kvalues, Type.MXFP4: quants.MXFP4.kvalues}
_CODES = 16  # bytes of a block, with two codes each
_EXPONENT_OF_ONE = 128  # of MXFP4's scales, for numbers that are twice those of the format
# The exponents of float16, whose smallest numbers have fewer digits.
_EXPONENTS = range(-24, 16)


def is_widened(type: Type) -> bool:
    """Return whether a format can be widened exactly."""
    return type in _NUMBERS


def widen(rows: np.ndarray, type: Type) -> np.ndarray:
    """Return rows [n, bytes] of a format as rows of Q8_0.

    Raises:
        ValueError: a scale is no float16.
    """
    block_bytes = GGML_QUANT_SIZES[type][1]
    blocks = rows.reshape(-1, block_bytes)
    scales = blocks[:, :-_CODES]
    packed = blocks[:, -_CODES:]
    codes = np.concatenate([packed & 15, packed >> 4], 1)
    numbers = np.array(_NUMBERS[type], np.int8)[codes]
    if type == Type.MXFP4:
        scales = _float16_powers(scales[:, 0], numbers)
    widened = np.concatenate([scales, numbers.view(np.uint8)], 1)
    return widened.reshape(len(rows), -1)


def _float16_powers(exponents: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return MXFP4's scales, which are powers of two, in float16 [n, 2 bytes]."""
    powers = exponents.astype(np.int32) - _EXPONENT_OF_ONE
    powers[~numbers.any(1)] = 0  # a block of zeros may have any scale
    if powers.min() < _EXPONENTS.start or powers.max() >= _EXPONENTS.stop:
        raise ValueError("it has scales that are no float16")
    return np.exp2(powers).astype(np.float16).view(np.uint8).reshape(-1, 2)
