"""Matrices in the blocks of a GGUF file, packed for products of a few rows (`forerun/csrc`).

The weights' values are the file's own. Inputs of a product are rounded to 8 bits in blocks of 32, as in llama.cpp.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from forerun.backends.kernels import MatrixArgument, library

# In the order of the library's `fr_format`.
FORMATS = (
    *(Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0),
    *(Type.F16, Type.BF16, Type.F32, Type.Q3_K, Type.Q2_K),
)
STORED = {4: Type.Q4_1, 8: Type.Q8_0}  # what float weights are quantised to, by bits


class Rows:
    """A matrix's rows as they are in a file: what is looked up, and not multiplied.

    Attributes:
        rows: [outputs, bytes of a row] uint8, which may be mapped from the file.
    """

    def __init__(self, rows: np.ndarray, type: Type) -> None:
        block, size = GGML_QUANT_SIZES[type]
        self.rows, self.type = rows, type
        self.out, self.inputs = len(rows), rows.shape[1] // size * block

    @classmethod
    def quantised(cls, weight: Tensor, type: Type) -> Rows:
        """Round float weights [out, in] to a format."""
        return cls(quants.quantize(weight.detach().float().numpy(), type).view(np.uint8), type)

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes)

    def chosen(self, outputs: Sequence[int]) -> Rows:
        """Return the rows of these outputs."""
        return Rows(self.rows[np.asarray(outputs, dtype=np.int64)], self.type)

    def floats(self, outputs: Sequence[int] | None = None) -> Tensor:
        """Return the values [n, in] of these rows, or of all."""
        rows = self.rows if outputs is None else self.rows[np.asarray(outputs, dtype=np.int64)]
        return torch.from_numpy(quants.dequantize(np.ascontiguousarray(rows), self.type))


class Panels:
    """A matrix packed in panels of 8 outputs.

    Attributes:
        type: the format of the file that it comes from.
        argument: for the library.
        nbytes: of the panels.
    """

    def __init__(self, rows: Rows) -> None:
        """Raises ValueError for a number of inputs that the format does not have."""
        found, layout = library(), ctypes.c_int32()
        assert found is not None
        self.type, self.out, self.inputs = rows.type, rows.out, rows.inputs
        number = FORMATS.index(rows.type)
        self.nbytes = found.fr_panel_bytes(number, self.out, self.inputs, ctypes.byref(layout))
        if not self.nbytes:
            raise ValueError(f"{rows.type.name} has no rows of {rows.inputs} inputs")
        self._memory = _pages(self.nbytes)
        address = self._memory.ctypes.data
        raw = np.ascontiguousarray(rows.rows)
        if found.fr_pack_all(number, raw.ctypes.data, raw.nbytes, self.out, self.inputs, address):
            raise ValueError(f"a matrix [{self.out}, {self.inputs}] of {rows.type.name} does not fit its bytes")
        self.argument = MatrixArgument(layout.value, self.out, self.inputs, address)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [n, out] float32 with [n, in]."""
        x = x.float().contiguous()
        assert x.shape[1] == self.inputs
        found: Any = library()
        out = torch.empty(len(x), self.out)
        checked(found.fr_multiply(ctypes.byref(self.argument), x.data_ptr(), len(x), out.data_ptr()))
        return out

    def floats(self) -> Tensor:
        """Return the values [out, in]."""
        found: Any = library()
        out = torch.empty(self.out, self.inputs)
        for output, row in enumerate(out):
            checked(found.fr_unpack(ctypes.byref(self.argument), output, row.data_ptr()))
        return out


def checked(code: int) -> int:
    """Return what a function of the library returned; raise for sizes that it refused and for memory that it lacks."""
    if code == -2:
        raise MemoryError("no memory for a forward")
    if code < 0:
        raise RuntimeError("the C library was given sizes that do not fit")
    return code


def _pages(size: int) -> np.ndarray:
    """Return zeroed bytes in large pages, if the system has them: fewer of them are looked up."""
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)
