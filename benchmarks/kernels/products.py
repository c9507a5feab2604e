"""Time products with all matrices of a GGUF file: ms and GB/s for each variant and number of rows.

    python benchmarks/kernels/products.py FILE [--variants avx2,avxvnni] [--rows 1,2,4,8,16]
        [--threads 2] [--tensor output]

A time is the least of many short runs. Threads do not wait for each other between matrices.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from forerun.csrc.build import VARIANT_FLAGS, build

# In the order of the C library's numbers.
FORMATS = [
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "F16",
    "BF16",
    "F32",
    "Q3_K",
    "Q2_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
]
PANEL = 16  # outputs
BLOCK = 256  # inputs that are quantised together
ALIGNMENT = 64  # bytes


class Matrix(ctypes.Structure):
    _fields_ = [
        ("layout", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("panels", ctypes.c_void_p),
    ]


def aligned(size: int) -> np.ndarray:
    """Return so many bytes that begin at a multiple of the alignment."""
    room = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    return room[-room.ctypes.data % ALIGNMENT :][:size]


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def processor() -> str:
    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return name[1] if name else "unknown"


class Products:
    """The packed matrices of a file, and threads that multiply with them.

    Attributes:
        library: the C library.
        threads: how many.
        matrices: their shapes and packed weights.
        panels: the bytes of the packed weights.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library = library
        self.threads = threads
        self.matrices: list[Matrix] = []
        self.panels: list[np.ndarray] = []
        self._pool = ThreadPoolExecutor(threads)

    @property
    def total_bytes(self) -> int:
        return sum(panels.nbytes for panels in self.panels)

    def pack(self, tensor: Any) -> None:
        """Pack a matrix of the file, in threads."""
        inputs, outputs = map(int, tensor.shape)
        layout = ctypes.c_int32()
        number = FORMATS.index(tensor.tensor_type.name)
        size = self.library.fr_panel_bytes(number, outputs, inputs, ctypes.byref(layout))
        panels = aligned(size)
        pack = partial(
            self.library.fr_pack,
            number,
            pointer(tensor.data),
            ctypes.c_size_t(tensor.data.nbytes),
            outputs,
            inputs,
            pointer(panels),
        )
        ends = [self._share(outputs, thread) for thread in range(self.threads + 1)]
        assert not any(self._pool.map(pack, ends[:-1], ends[1:]))
        self.matrices.append(Matrix(layout.value, outputs, inputs, panels.ctypes.data))
        self.panels.append(panels)

    def _share(self, outputs: int, thread: int) -> int:
        """Return the first panel of a thread."""
        return -(-outputs // PANEL) * thread // self.threads

    def time(self, part: Callable[[int], None]) -> float:
        """Return the seconds of the slowest thread.

        The time that other processes had its core does not count.
        """

        def clocked(thread: int) -> float:
            started_at = time.thread_time()
            part(thread)
            return time.thread_time() - started_at

        return max(self._pool.map(clocked, range(self.threads)))

    def time_reading(self) -> float:
        """Return the seconds of reading all packed weights with numpy."""

        def read(thread: int) -> None:
            for panels in self.panels:
                share = len(panels) // self.threads
                numbers = panels[thread * share : (thread + 1) * share]
                numbers.view(np.uint64 if share % 8 == 0 else np.uint8).max()

        return min(self.time(read) for _ in range(5))

    def time_rows(self, counts: list[int], seconds: float) -> dict[int, float]:
        """Return the least seconds of all products, by the number of rows.

        The variant that was selected last is measured, for so many seconds.
        """
        widest = max(matrix.inputs for matrix in self.matrices)
        rng = np.random.default_rng(0)
        x = rng.standard_normal((max(counts), widest), dtype=np.float32)
        parts = {count: self._part(x, count) for count in counts}
        best = dict.fromkeys(counts, float("inf"))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for count, part in parts.items():
                best[count] = min(best[count], self.time(part))
        return best

    def _part(self, x: np.ndarray, rows: int) -> Callable[[int], None]:
        """Return a function that computes a thread's share of all products of some rows."""
        widest = x.shape[1]
        most_outputs = max(matrix.outputs for matrix in self.matrices)
        out = np.zeros((rows, most_outputs), dtype=np.float32)
        records = {}
        for inputs in {matrix.inputs for matrix in self.matrices}:
            record = aligned(self.library.fr_record_bytes(inputs, rows))
            blocks = (inputs + BLOCK - 1) // BLOCK
            self.library.fr_quantise(pointer(x), rows, widest, inputs, pointer(record), 0, blocks)
            records[inputs] = record
        # Pointers are made here, because that would take time of the threads. The list keeps the
        # records alive.
        tasks = []
        for matrix in self.matrices:
            record = records[matrix.inputs]
            tasks.append((matrix, record, pointer(record)))

        def part(thread: int) -> None:
            for matrix, _, record_address in tasks:
                self.library.fr_product(
                    ctypes.byref(matrix),
                    pointer(x),
                    widest,
                    record_address,
                    rows,
                    pointer(out),
                    most_outputs,
                    self._share(matrix.outputs, thread),
                    self._share(matrix.outputs, thread + 1),
                )

        return part


def matrices_of(file: str, name: str) -> list[Any]:
    """Return the matrices of a file whose names contain `name`.

    The embedding is left out if the file has an output matrix, because it is not multiplied then.
    """
    tensors = [
        tensor
        for tensor in GGUFReader(file).tensors
        if len(tensor.shape) == 2 and name in tensor.name
    ]
    if any(tensor.name == "output.weight" for tensor in tensors):
        tensors = [tensor for tensor in tensors if tensor.name != "token_embd.weight"]
    return tensors


def load_library(path: str) -> ctypes.CDLL:
    """Return the library at a path, or one that is built now."""
    library = ctypes.CDLL(path or str(build(Path(tempfile.mkdtemp()) / "forerun.so")))
    library.fr_panel_bytes.restype = ctypes.c_size_t
    library.fr_record_bytes.restype = ctypes.c_size_t
    return library


def all_variants() -> Iterator[str]:
    """Yield the names of the variants of all architectures, each once."""
    yield from dict.fromkeys(name for variants in VARIANT_FLAGS.values() for name in variants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--variants", default="")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4, help="for each variant")
    parser.add_argument("--tensor", default="", help="only names that this is part of")
    parser.add_argument("--library", default="", help="one that is built already")
    args = parser.parse_args()
    products = Products(load_library(args.library), args.threads)
    counts = [int(count) for count in args.rows.split(",")]
    tensors = matrices_of(args.file, args.tensor)
    started_at = time.perf_counter()
    for tensor in tensors:
        products.pack(tensor)
    packing = time.perf_counter() - started_at
    total = products.total_bytes
    print(
        f"{processor()}, {args.threads} threads; {len(tensors)} matrices, {total / 1e9:.3f} GB in "
        f"panels ({total / sum(tensor.n_bytes for tensor in tensors):.3f} of the file's), packed "
        f"in {packing:.1f} s"
    )
    limit = products.time_reading()
    print(f"reading alone (numpy): {limit * 1e3:.1f} ms, {total / limit / 1e9:.1f} GB/s")
    for name in args.variants.split(",") if args.variants else all_variants():
        if products.library.fr_select(name.encode()) < 0:
            continue
        best = products.time_rows(counts, args.seconds)
        first = best[counts[0]]
        cells = [f"{n}: {taken * 1e3:6.1f} ({taken / first:.2f}x)" for n, taken in best.items()]
        print(f"{name:11s} {total / first / 1e9:5.1f} GB/s  ms by rows  {'  '.join(cells)}")


if __name__ == "__main__":
    main()
