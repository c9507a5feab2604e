"""Time products with all matrices of a GGUF file: ms and GB/s for each variant and number of rows.

The least of many short runs.  Threads do not wait for each other between matrices.

python benchmarks/kernels/products.py FILE [--variants avx2,avxvnni] [--rows 1,2,4,8,16] [--threads 2] [--tensor output]
"""

from __future__ import annotations

import argparse
import ctypes
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from forerun.csrc.build import VARIANT_FLAGS, build

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
]
PANEL = 16  # outputs


class Matrix(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("layout", "outputs", "inputs")] + [
        ("panels", ctypes.c_void_p)
    ]


def aligned(size: int) -> np.ndarray:
    room = np.zeros(size + 64, dtype=np.uint8)
    return room[-room.ctypes.data % 64 :][:size]


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def processor() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else "unknown"


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
    library = ctypes.CDLL(args.library or str(build(Path(tempfile.mkdtemp()) / "forerun.so")))
    library.fr_panel_bytes.restype = library.fr_record_bytes.restype = ctypes.c_size_t
    counts = [int(n) for n in args.rows.split(",")]
    pool = ThreadPoolExecutor(args.threads)

    tensors = [
        t for t in GGUFReader(args.file).tensors if len(t.shape) == 2 and args.tensor in t.name
    ]
    if any(t.name == "output.weight" for t in tensors):
        tensors = [t for t in tensors if t.name != "token_embd.weight"]
    matrices, owners, began = [], [], time.perf_counter()
    for t in tensors:
        inputs, outputs = map(int, t.shape)
        layout, number = ctypes.c_int32(), FORMATS.index(t.tensor_type.name)
        panels = aligned(library.fr_panel_bytes(number, outputs, inputs, ctypes.byref(layout)))
        count = -(-outputs // PANEL)
        ends = [count * i // args.threads for i in range(args.threads + 1)]
        size = ctypes.c_size_t(t.data.nbytes)
        pack = partial(
            library.fr_pack, number, pointer(t.data), size, outputs, inputs, pointer(panels)
        )
        assert not any(pool.map(pack, ends[:-1], ends[1:]))
        matrices.append(Matrix(layout.value, outputs, inputs, panels.ctypes.data))
        owners.append(panels)
    packing, total = time.perf_counter() - began, sum(p.nbytes for p in owners)
    print(
        f"{processor()}, {args.threads} threads; {len(matrices)} matrices, {total / 1e9:.3f} GB in panels",
        end="",
    )
    print(
        f" ({total / sum(t.n_bytes for t in tensors):.3f} of the file's), packed in {packing:.1f} s"
    )

    def reading(part: int) -> None:
        for p in owners:
            half = len(p) // args.threads
            p[part * half : (part + 1) * half].view(np.uint64 if half % 8 == 0 else np.uint8).max()

    limit = min(timed(pool, reading, args.threads) for _ in range(5))
    print(f"reading alone (numpy): {limit * 1e3:.1f} ms, {total / limit / 1e9:.1f} GB/s")

    most = max(counts)
    widest, outputs = max(m.inputs for m in matrices), max(m.outputs for m in matrices)
    x = np.random.default_rng(0).standard_normal((most, widest), dtype=np.float32)
    out = np.zeros((most, outputs), dtype=np.float32)
    records = {
        (m.inputs, n): aligned(library.fr_record_bytes(m.inputs, n))
        for m in matrices
        for n in counts
    }
    for name in (
        args.variants.split(",")
        if args.variants
        else dict.fromkeys(v for table in VARIANT_FLAGS.values() for v in table)
    ):
        if library.fr_select(name.encode()) < 0:
            continue
        for (inputs, n), record in records.items():
            library.fr_quantise(
                pointer(x), n, widest, inputs, pointer(record), 0, (inputs + 255) // 256
            )
        best = dict.fromkeys(counts, float("inf"))
        end = time.perf_counter() + args.seconds
        while time.perf_counter() < end:
            for n in counts:
                tasks = [(m, pointer(records[m.inputs, n])) for m in matrices]

                def part(i: int, n: int = n, tasks: list = tasks) -> None:
                    for m, record in tasks:
                        count = -(-m.outputs // PANEL)
                        first, last = count * i // args.threads, count * (i + 1) // args.threads
                        library.fr_product(
                            ctypes.byref(m),
                            pointer(x),
                            widest,
                            record,
                            n,
                            pointer(out),
                            outputs,
                            first,
                            last,
                        )

                best[n] = min(best[n], timed(pool, part, args.threads))
        cells = [f"{n}: {t * 1e3:6.1f} ({t / best[counts[0]]:.2f}x)" for n, t in best.items()]
        print(
            f"{name:11s} {total / best[counts[0]] / 1e9:5.1f} GB/s  ms by rows  " + "  ".join(cells)
        )


def timed(pool: ThreadPoolExecutor, part: Callable[[int], None], threads: int) -> float:
    """Seconds of the slowest thread, without the time that other processes had its core."""

    def clocked(i: int) -> float:
        began = time.thread_time()
        part(i)
        return time.thread_time() - began

    return max(pool.map(clocked, range(threads)))


if __name__ == "__main__":
    main()
