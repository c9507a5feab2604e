"""Matrices in the blocks of a GGUF file, packed for products of a few rows (`forerun/csrc`).

The weights keep the file's values. A product's inputs are rounded to 8 bits in blocks of 32, as in llama.cpp.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from torch.nn import functional

from forerun.csrc.library import MatrixArgument, checked, library, run

# In the order of the library's `fr_format`.
FORMATS = (
    *(Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0),
    *(Type.F16, Type.BF16, Type.F32, Type.Q3_K, Type.Q2_K),
)
PLAIN = {torch.float32: Type.F32, torch.bfloat16: Type.BF16, torch.float16: Type.F16}
_STEP = 4096  # rows that are de-quantised at a time
BLOCK = 32  # inputs that share a scale, in the formats that float weights are quantised to


class Rows:
    """A matrix's rows as in a file, for looking up and not for products.

    Attributes:
        rows: [outputs, bytes of a row] uint8, perhaps mapped from the file.
    """

    def __init__(self, rows: np.ndarray, type: Type) -> None:
        block, size = GGML_QUANT_SIZES[type]
        self.rows, self.type = rows, type
        self.out, self.inputs = len(rows), rows.shape[1] // size * block

    @classmethod
    def quantised(cls, weight: Tensor, type: Type) -> Rows:
        """Round float weights [out, in] to a format."""
        return cls(quants.quantize(weight.detach().float().numpy(), type).view(np.uint8), type)

    @classmethod
    def plain(cls, weight: Tensor) -> Rows:
        """Return float weights [out, in] on a CPU as they are, not copied if they are contiguous."""
        return cls(weight.detach().contiguous().view(torch.uint8).numpy(), PLAIN[weight.dtype])

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes)

    @property
    def content(self) -> np.ndarray:
        """Return all bytes of the weights, contiguous."""
        return np.ascontiguousarray(self.rows)

    def chosen(self, outputs: Sequence[int]) -> Rows:
        """Return the rows of these outputs."""
        return Rows(self.rows[np.asarray(outputs, dtype=np.int64)], self.type)

    def floats(self, outputs: Sequence[int] | None = None) -> Tensor:
        """Return the values [n, in] of these rows, or of all."""
        rows = self.rows if outputs is None else self.rows[np.asarray(outputs, dtype=np.int64)]
        return torch.from_numpy(quants.dequantize(np.ascontiguousarray(rows), self.type))


class Panels:
    """A matrix packed in panels of 16 outputs.

    Attributes:
        type: the weight format in the file.
        argument: the matrix for the C library.
        nbytes: size of the panels.
    """

    def __init__(self, rows: Rows) -> None:
        """Pack rows. Raises ValueError for a number of inputs that the format's blocks do not divide."""
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
        found.fr_threads(torch.get_num_threads())
        if found.fr_pack_all(number, raw.ctypes.data, raw.nbytes, self.out, self.inputs, address):
            raise ValueError(
                f"a matrix [{self.out}, {self.inputs}] of {rows.type.name} does not fit its bytes"
            )
        self.argument = MatrixArgument(layout.value, self.out, self.inputs, address)

    @property
    def content(self) -> np.ndarray:
        """Return all bytes of the weights, contiguous."""
        return self._memory

    def __deepcopy__(self, memo: object) -> Panels:
        return self  # nothing changes it

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [n, out] float32 with [n, in]."""
        x = x.float().contiguous()
        assert x.shape[1] == self.inputs
        out = torch.empty(len(x), self.out)
        run("fr_multiply", ctypes.byref(self.argument), x.data_ptr(), len(x), out.data_ptr())
        return out

    def floats(self, outputs: Sequence[int] | None = None) -> Tensor:
        """Return the values [n, in] of these outputs, or of all."""
        found: Any = library()
        chosen = range(self.out) if outputs is None else outputs
        values = torch.empty(len(chosen), self.inputs)
        for output, row in zip(chosen, values, strict=True):
            checked(found.fr_unpack(ctypes.byref(self.argument), output, row.data_ptr()))
        return values


class Dense:
    """A matrix in torch's floats, if the library is missing or does not support its size.

    Layers are rounded to bfloat16. An LM head stays in float32, as bfloat16 logits would have ties.
    """

    def __init__(self, rows: Rows, dtype: torch.dtype) -> None:
        self.type, self.out, self.inputs = rows.type, rows.out, rows.inputs
        self.weight = torch.empty(rows.out, rows.inputs, dtype=dtype)
        for start in range(0, rows.out, _STEP):
            self.weight[start : start + _STEP] = rows.floats(
                range(start, min(start + _STEP, rows.out))
            )

    @property
    def content(self) -> np.ndarray:
        """Return all bytes of the weights, contiguous."""
        return self.weight.contiguous().view(torch.uint8).numpy()

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [n, out] float32 with [n, in]."""
        return functional.linear(x.to(self.weight.dtype), self.weight).float()

    def floats(self, outputs: Sequence[int] | None = None) -> Tensor:
        """Return the values [n, in] of these outputs, or of all."""
        return (self.weight if outputs is None else self.weight[list(outputs)]).float()


def pack(rows: Rows, is_head: bool = False) -> Panels | Dense:
    """Return rows for products in C if possible, else in torch."""
    found = library() if rows.type in FORMATS else None
    if found is not None and found.fr_panel_bytes(
        FORMATS.index(rows.type), rows.out, rows.inputs, None
    ):
        return Panels(rows)
    return Dense(rows, torch.float32 if is_head or rows.type == Type.F32 else torch.bfloat16)


def quantise(weight: Tensor, type: Type, is_head: bool = False) -> Panels | Dense:
    """Return float weights [out, in] rounded to a format, for products."""
    return pack(Rows.quantised(weight, type), is_head)


Product = Callable[[Tensor], Tensor]


def product(weight: Tensor, bias: Tensor | None = None, few: bool = False) -> Product:
    """Return the function x [n, in] -> x @ weight.T + bias [n, out] for a weight [out, in].

    With `few`, for drafts, which may round, the weight is kept in 8 bits if it is on a CPU, the C library is there and
    blocks divide its inputs. Outputs are float32 then.
    """
    if not few or weight.device.type != "cpu" or weight.shape[1] % BLOCK or library() is None:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        return lambda x: functional.linear(x, weight, bias)
    packed = quantise(weight, Type.Q8_0)
    return packed if bias is None else lambda x: packed(x) + bias


def check_inputs(inputs: int, name: str) -> None:
    """Raise ValueError unless blocks divide a matrix's number of inputs."""
    if inputs % BLOCK:
        raise ValueError(
            f"{name} has {inputs} inputs, which blocks of {BLOCK} do not divide: choose bfloat16 weights"
        )


def _pages(size: int) -> np.ndarray:
    """Return zeroed bytes, in large pages if the system has them, which need fewer look-ups."""
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    )
    pages = mmap.mmap(-1, size, **private)  # shared mappings seldom get large pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)
