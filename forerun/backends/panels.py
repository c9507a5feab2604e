"""Matrices in the blocks of a GGUF file, packed for products with a few rows (`forerun/csrc`).

The weights keep the file's values. The inputs of a product are rounded to 8 bits in blocks of 32,
as in llama.cpp.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from torch import Tensor
from torch.nn import functional

from forerun.csrc.library import MatrixArgument, checked, library, run
from forerun.zoo.formats import (
    LIBRARY_FORMATS,
    WeightType,
    WideType,
    block_sizes,
    format_number,
)
from forerun.zoo.wide_rows import wide_values

FLOAT_FORMATS = {torch.float32: Type.F32, torch.bfloat16: Type.BF16, torch.float16: Type.F16}
BLOCK_INPUTS = 32  # inputs that share a scale, in the formats that float weights are rounded to
_DENSE_ROWS = 4096  # rows that `Dense` converts to floats at a time

Product = Callable[[Tensor], Tensor]


class RawMatrix:
    """A matrix as it is in a file, for looking up rows and not for products.

    Attributes:
        rows: [outputs, bytes of a row] uint8, perhaps mapped from the file, or wide rows.
        type: the weight format.
        out, inputs: the sizes.
    """

    def __init__(self, rows: np.ndarray, type: WeightType) -> None:
        block_inputs, block_bytes = block_sizes(type)
        self.rows = rows
        self.type = type
        self.out = len(rows)
        self.inputs = rows.shape[1] // block_bytes * block_inputs

    @classmethod
    def quantised(cls, weight: Tensor, type: Type) -> RawMatrix:
        """Round float weights [out, in] to a format."""
        return cls(quants.quantize(weight.detach().float().numpy(), type).view(np.uint8), type)

    @classmethod
    def plain(cls, weight: Tensor) -> RawMatrix:
        """Wrap float weights [out, in] on a CPU. They are not copied if they are contiguous."""
        rows = weight.detach().contiguous().view(torch.uint8).numpy()
        return cls(rows, FLOAT_FORMATS[weight.dtype])

    @property
    def nbytes(self) -> int:
        """The number of bytes of the rows."""
        return int(self.rows.nbytes)

    @property
    def content(self) -> np.ndarray:
        """All bytes of the weights, contiguous."""
        return np.ascontiguousarray(self.rows)

    def chosen(self, outputs: Sequence[int]) -> RawMatrix:
        """Return a matrix of these rows."""
        return RawMatrix(self.rows[np.asarray(outputs, dtype=np.int64)], self.type)

    def floats(self, outputs: Sequence[int] | None = None) -> Tensor:
        """Return the values [n, in] of these rows, or of all."""
        rows = self.rows if outputs is None else self.rows[np.asarray(outputs, dtype=np.int64)]
        if isinstance(self.type, WideType):
            return torch.from_numpy(wide_values(rows, self.type))
        return torch.from_numpy(quants.dequantize(np.ascontiguousarray(rows), self.type))


class PackedMatrix:
    """A matrix packed for the library, in panels of 16 outputs.

    Attributes:
        type: the weight format in the file.
        out, inputs: the sizes.
        argument: the matrix for the C library.
        nbytes: the number of bytes of the panels.
    """

    def __init__(self, raw: RawMatrix) -> None:
        """Pack a matrix.

        Raises:
            ValueError: the format's blocks do not divide the number of inputs, or the matrix has
                fewer bytes than its sizes need.
        """
        functions = library()
        assert functions is not None
        self.type = raw.type
        self.out = raw.out
        self.inputs = raw.inputs
        number = format_number(raw.type)
        layout = ctypes.c_int32()
        self.nbytes = functions.fr_panel_bytes(number, self.out, self.inputs, ctypes.byref(layout))
        if not self.nbytes:
            raise ValueError(f"{raw.type.name} has no rows of {raw.inputs} inputs")
        self._panels = _zeroed(self.nbytes)
        address = self._panels.ctypes.data
        rows = raw.content
        sizes = rows.nbytes, self.out, self.inputs
        functions.fr_threads(torch.get_num_threads())
        if functions.fr_pack_all(number, rows.ctypes.data, *sizes, address):
            raise ValueError(
                f"a matrix [{self.out}, {self.inputs}] of {raw.type.name} does not fit its bytes"
            )
        self.argument = MatrixArgument(layout.value, self.out, self.inputs, address)

    @property
    def content(self) -> np.ndarray:
        """All bytes of the weights, contiguous."""
        return self._panels

    def __deepcopy__(self, memo: object) -> PackedMatrix:
        return self  # because nothing changes it

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [n, out] float32 with [n, in]."""
        x = x.float().contiguous()
        assert x.shape[1] == self.inputs
        out = torch.empty(len(x), self.out)
        run("fr_multiply", ctypes.byref(self.argument), x.data_ptr(), len(x), out.data_ptr())
        return out

    def floats(self, outputs: Sequence[int] | None = None) -> Tensor:
        """Return the values [n, in] of these outputs, or of all."""
        functions: Any = library()
        chosen = range(self.out) if outputs is None else outputs
        values = torch.empty(len(chosen), self.inputs)
        for output, row in zip(chosen, values, strict=True):
            checked(functions.fr_unpack(ctypes.byref(self.argument), output, row.data_ptr()))
        return values


class Dense:
    """A matrix in torch's floats, if the library is missing or does not support its size.

    Attributes:
        type: the weight format in the file.
        out, inputs: the sizes.
        weight: [out, in] floats.
    """

    def __init__(self, raw: RawMatrix, dtype: torch.dtype) -> None:
        self.type = raw.type
        self.out = raw.out
        self.inputs = raw.inputs
        self.weight = torch.empty(raw.out, raw.inputs, dtype=dtype)
        for start in range(0, raw.out, _DENSE_ROWS):
            end = min(start + _DENSE_ROWS, raw.out)
            self.weight[start:end] = raw.floats(range(start, end))

    @property
    def content(self) -> np.ndarray:
        """All bytes of the weights, contiguous."""
        return self.weight.contiguous().view(torch.uint8).numpy()

    @property
    def nbytes(self) -> int:
        """The number of bytes of the weight."""
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [n, out] float32 with [n, in]."""
        return functional.linear(x.to(self.weight.dtype), self.weight).float()

    def floats(self, outputs: Sequence[int] | None = None) -> Tensor:
        """Return the values [n, in] of these outputs, or of all."""
        return (self.weight if outputs is None else self.weight[list(outputs)]).float()


def pack(raw: RawMatrix, is_head: bool = False) -> PackedMatrix | Dense:
    """Return a matrix for products in C if the library supports it, else for products in torch.

    In torch the weights of layers are bfloat16. Those of an LM head are float32, because logits in
    bfloat16 would have ties.
    """
    is_known = isinstance(raw.type, WideType) or raw.type in LIBRARY_FORMATS
    functions = library() if is_known else None
    if functions is not None:
        number = format_number(raw.type)
        if functions.fr_panel_bytes(number, raw.out, raw.inputs, None):
            return PackedMatrix(raw)
    return Dense(raw, torch.float32 if is_head or raw.type == Type.F32 else torch.bfloat16)


def quantise(weight: Tensor, type: Type, is_head: bool = False) -> PackedMatrix | Dense:
    """Return float weights [out, in] rounded to a format, for products."""
    return pack(RawMatrix.quantised(weight, type), is_head)


def product(weight: Tensor, bias: Tensor | None = None, in_8_bits: bool = False) -> Product:
    """Return the function x [n, in] -> x @ weight.T + bias [n, out] for a weight [out, in].

    Args:
        weight: the matrix.
        bias: [out], or None.
        in_8_bits: round the weight to 8 bits, if it is on a CPU, the C library is there and blocks
            divide its inputs. Outputs are float32 then. This is for drafts, which may round.
    """
    is_rounded = (
        in_8_bits
        and weight.device.type == "cpu"
        and weight.shape[1] % BLOCK_INPUTS == 0
        and library() is not None
    )
    if is_rounded:
        packed = quantise(weight, Type.Q8_0)
        return packed if bias is None else lambda x: packed(x) + bias
    fixed_weight = weight.detach()
    fixed_bias = None if bias is None else bias.detach()
    return lambda x: functional.linear(x, fixed_weight, fixed_bias)


def check_inputs(inputs: int, name: str) -> None:
    """Raise ValueError unless blocks divide a matrix's number of inputs."""
    if inputs % BLOCK_INPUTS:
        raise ValueError(
            f"{name} has {inputs} inputs, which blocks of {BLOCK_INPUTS} do not divide: "
            "choose bfloat16 weights"
        )


def _zeroed(size: int) -> np.ndarray:
    """Return zeroed bytes, in large pages if the system has them, which need fewer look-ups."""
    options: dict[str, int] = {}
    if hasattr(mmap, "MAP_PRIVATE"):
        # Shared mappings, the default, seldom get large pages.
        options["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, size, **options)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)
