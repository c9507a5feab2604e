"""Compile the C library, with one variant for each instruction set."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "_forerun.so"
COMMON = [
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]
COMMON += ["-fvisibility=default", "-Wall", "-Wextra", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx512vnni"]
# {machine: {variant: its own flags}}.
VARIANTS = {
    "x86_64": {
        "plain": [],
        "avx2": AVX2,
        "avxvnni": [*AVX2, "-mavxvnni"],
        "avx512vnni": [*AVX2, *AVX512],
    },
    "aarch64": {"plain": [], "neon": ["-march=armv8.2-a+dotprod"]},
}
MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}


def sources(machine: str) -> dict[str, list[str]]:
    """Return {source file: its own flags}."""
    variants = VARIANTS.get(machine, {"plain": []})
    own = {f"variant_{name}.c": flags for name, flags in variants.items()}
    parts = ("products.c", "vector_ops.c", "attention.c")  # included by each variant
    names = [path.name for path in HERE.glob("*.c")]
    shared = sorted(name for name in names if not name.startswith("variant_") and name not in parts)
    return {**own, **{name: [] for name in shared}}


def build(
    target: Path,
    compiler: str = os.environ.get("CC", "cc"),
    machine: str = "",
    extra: tuple[str, ...] = (),
) -> Path:
    """Compile every source and link the shared library `target`.

    The same sources, flags and compiler give the same bytes. Raises RuntimeError with the
    compiler's messages.
    """
    machine = machine or platform.machine()
    machine = MACHINES.get(machine, machine)
    identity = f'-DFORERUN_BUILD="{build_id(compiler, machine, extra)}"'
    # In the target's folder, because a file gets a new name only within its file system.
    with tempfile.TemporaryDirectory(prefix=f"{target.stem}-", dir=target.parent) as folder:
        objects, commands = [], []
        for name, flags in sources(machine).items():
            objects.append(str(Path(folder, Path(name).stem + ".o")))
            own = [*flags, identity] if name == "select.c" else flags
            command = [compiler, *COMMON, *own, *extra, "-c", str(HERE / name)]
            commands.append([*command, "-o", objects[-1]])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))  # raises the first error
        linked = Path(folder, LIBRARY)
        _run([compiler, "-shared", *extra, *objects, "-o", str(linked), "-lm", "-lpthread"])
        install(linked, target)
    return target


def install(built: Path, target: Path) -> None:
    """Give a library in the target's folder the target's name.

    A process that runs the old library goes on with it, because its file lives on without a name.
    Bytes that were written over the old file would appear in the memory of that process, as code
    and tables in the midst of a forward.
    """
    os.replace(built, target)


def sources_id(folder: Path = HERE) -> str | None:
    """Return a hash of the sources in a folder and of their flags; None without sources."""
    sources = [path for path in folder.iterdir() if path.suffix in (".c", ".h")]
    if not sources:
        return None
    flags = folder / "build.py"  # this file, which holds them
    files = sorted([*sources, flags])
    return _hash([part for path in files for part in (path.name.encode(), path.read_bytes())])


def build_id(compiler: str, machine: str, extra: tuple[str, ...]) -> str:
    """Return what identifies a build: `sources_id`, "-", and a hash of it, the machine, the flags
    and the compiler."""
    version = subprocess.run([compiler, "--version"], capture_output=True).stdout
    origin = sources_id() or ""
    parts = [part.encode() for part in (origin, machine, compiler, *extra)]
    return f"{origin}-{_hash([*parts, version])}"


def build_of(path: Path) -> str | None:
    """Return the `build_id` of a library's file, without loading it; None if it has none."""
    mark = re.search(rb"forerun-build:([0-9a-f]*-[0-9a-f]+)\0", path.read_bytes())
    return None if mark is None else mark[1].decode()


def _hash(parts: list[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))  # so that no byte passes from part to part
        whole.update(part)
    return whole.hexdigest()[:16]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.stderr:
        print(done.stderr, file=sys.stderr)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:1] + command[-3:])} failed:\n{done.stderr}")


if __name__ == "__main__":
    flags = tuple(os.environ.get("CFLAGS", "").split())
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / LIBRARY, extra=flags))
