"""The weight formats of matrices that the C library supports, and their bytes. Needs no torch."""

from __future__ import annotations

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


def format_number(type: Type) -> int:
    """Return the library's number of a weight format (`fr_format`)."""
    return LIBRARY_FORMATS.index(type)


def loaded_type(type: Type) -> Type:
    """Return the format in which a matrix of a file is kept: 8 bits if C lacks the file's own."""
    return type if type in LIBRARY_FORMATS else Type.Q8_0


def row_bytes(type: Type, inputs: int) -> int:
    """Return the bytes of a row as files have it."""
    block_inputs, block_bytes = GGML_QUANT_SIZES[type]
    return inputs // block_inputs * block_bytes


def product_bytes(type: Type, outputs: int, inputs: int, is_head: bool = False) -> int:
    """Return the bytes of a matrix for products: packed for C, or in the floats of torch.

    Args:
        type: one of LIBRARY_FORMATS.
        outputs: their number.
        inputs: their number.
        is_head: whether it is an LM head, which torch computes in float32.
    """
    functions = library()
    packed = 0
    if functions is not None:
        packed = int(functions.fr_panel_bytes(format_number(type), outputs, inputs, None))
    is_float32 = is_head or type == Type.F32
    return packed or outputs * inputs * (4 if is_float32 else 2)
