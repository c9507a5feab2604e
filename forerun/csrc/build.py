"""Compile the C library, with one variant for each instruction set."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "_forerun.so"
COMMON = ["-std=gnu11", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
COMMON += ["-fvisibility=default", "-Wall", "-Wextra", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx512vnni"]
# {machine: {variant: its own flags}}.
VARIANTS = {
    "x86_64": {"plain": [], "avx2": AVX2, "avxvnni": [*AVX2, "-mavxvnni"], "avx512vnni": [*AVX2, *AVX512]},
    "aarch64": {"plain": [], "neon": ["-march=armv8.2-a+dotprod"]},
}
MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}


def sources(machine: str) -> dict[str, list[str]]:
    """Return {source file: its own flags}."""
    variants = VARIANTS.get(machine, {"plain": []})
    own = {f"variant_{name}.c": flags for name, flags in variants.items()}
    parts = ("products.c", "between.c", "attention.c")  # included by each variant
    names = [path.name for path in HERE.glob("*.c")]
    shared = sorted(name for name in names if not name.startswith("variant_") and name not in parts)
    return {**own, **{name: [] for name in shared}}


def build(
    target: Path, compiler: str = os.environ.get("CC", "cc"), machine: str = "", extra: tuple[str, ...] = ()
) -> Path:
    """Compile every source and link the shared library `target`. Raises RuntimeError with the compiler's messages."""
    machine = machine or platform.machine()
    machine = MACHINES.get(machine, machine)
    objects, commands = [], []
    for name, flags in sources(machine).items():
        objects.append(str(target.with_name(f"{target.stem}-{Path(name).stem}.o")))
        commands.append([compiler, *COMMON, *flags, *extra, "-c", str(HERE / name), "-o", objects[-1]])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))  # raises the first error
    _run([compiler, "-shared", *extra, *objects, "-o", str(target), "-lm", "-lpthread"])
    for name in objects:
        Path(name).unlink()
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.stderr:
        print(done.stderr, file=sys.stderr)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:1] + command[-3:])} failed:\n{done.stderr}")


if __name__ == "__main__":
    flags = tuple(os.environ.get("CFLAGS", "").split())
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / LIBRARY, extra=flags))
