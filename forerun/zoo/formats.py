"""The weight formats of matrices that the C library supports, and their bytes. Needs no torch."""

from __future__ import annotations

from enum import Enum

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from forerun.csrc.library import library

# In the order of the library's `fr_format`.
LIBRARY_FORMATS = (
    Type.Q4_K,
    Type.Q5_K,
    Type.Q6_K,
    Type.Q4_0,
    Type.Q4_1,
    Type.Q5_0,
    Type.Q5_1,
    Type.Q8_0,
    Type.F16,
    Type.BF16,
    Type.F32,
    Type.Q3_K,
    Type.Q2_K,
    Type.IQ4_NL,
    Type.IQ4_XS,
    Type.MXFP4,
)
# The library has these behind the formats of files: wide rows by their numbers of codes.
_NUMBERS_OF_IQ1_IQ2 = len(LIBRARY_FORMATS)
_NUMBERS_OF_IQ3_XXS = _NUMBERS_OF_IQ1_IQ2 + 1
_NUMBERS_OF_IQ3_S = _NUMBERS_OF_IQ1_IQ2 + 2
WIDE_BLOCK_BYTES = 146  # of 256 weights


class WideType(Enum):
    """Formats of files whose matrices are kept in wide rows (`forerun.zoo.wide_rows`)."""

    IQ1_S = "IQ1_S"
    IQ1_M = "IQ1_M"
    IQ2_XXS = "IQ2_XXS"
    IQ2_XS = "IQ2_XS"
    IQ2_S = "IQ2_S"
    IQ3_XXS = "IQ3_XXS"
    IQ3_S = "IQ3_S"


WeightType = Type | WideType
# The formats of files that the library supports in wide rows, which hold the same values.
WIDENED: dict[Type, WeightType] = {
    Type.TQ1_0: Type.Q4_0,
    Type.TQ2_0: Type.Q4_0,
    **{Type[wide.name]: wide for wide in WideType},
}


def format_number(type: WeightType) -> int:
    """Return the library's number of a weight format (`fr_format`)."""
    if isinstance(type, Type):
        return LIBRARY_FORMATS.index(type)
    if type == WideType.IQ3_XXS:
        return _NUMBERS_OF_IQ3_XXS
    return _NUMBERS_OF_IQ3_S if type == WideType.IQ3_S else _NUMBERS_OF_IQ1_IQ2


def loaded_type(type: Type) -> WeightType:
    """Return the format in which a matrix of a file is kept: 8 bits if C lacks the file's own."""
    return type if type in LIBRARY_FORMATS else WIDENED.get(type, Type.Q8_0)


def block_sizes(type: WeightType) -> tuple[int, int]:
    """Return the inputs and the bytes of a block of a row."""
    return (256, WIDE_BLOCK_BYTES) if isinstance(type, WideType) else GGML_QUANT_SIZES[type]


def row_bytes(type: WeightType, inputs: int) -> int:
    """Return the bytes of a row as files have it, or of a wide row."""
    block_inputs, block_bytes = block_sizes(type)
    return inputs // block_inputs * block_bytes


def packed_bytes(type: WeightType, outputs: int, inputs: int) -> int:
    """Return the bytes of a matrix that is packed for C, or 0 if it cannot be packed."""
    functions = library()
    if functions is None:
        return 0
    return int(functions.fr_panel_bytes(format_number(type), outputs, inputs, None))


def product_bytes(type: WeightType, outputs: int, inputs: int, is_head: bool = False) -> int:
    """Return the bytes of a matrix for products: packed for C, or in the floats of torch.

    Args:
        type: one that `loaded_type` returns.
        outputs: their number.
        inputs: their number.
        is_head: whether it is an LM head, which torch computes in float32.
    """
    packed = packed_bytes(type, outputs, inputs)
    is_float32 = is_head or type == Type.F32
    return packed or outputs * inputs * (4 if is_float32 else 2)
