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
    "-fvisibility=default",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx512vnni"]
# {machine: {variant: flags besides COMMON}}.
VARIANT_FLAGS = {
    "x86_64": {
        "plain": [],
        "avx2": AVX2,
        "avxvnni": [*AVX2, "-mavxvnni"],
        "avx512vnni": [*AVX2, *AVX512],
    },
    "aarch64": {"plain": [], "neon": ["-march=armv8.2-a+dotprod"]},
}
MACHINE_ALIASES = {"AMD64": "x86_64", "arm64": "aarch64"}
_INCLUDED = ("products.c", "vector_ops.c", "attention.c")  # each variant's file includes these


def sources(machine: str) -> dict[str, list[str]]:
    """Return {source file: flags besides COMMON}, the variants first."""
    variants = VARIANT_FLAGS.get(machine, {"plain": []})
    flags = {f"variant_{name}.c": variants[name] for name in variants}
    for name in sorted(path.name for path in HERE.glob("*.c")):
        if not name.startswith("variant_") and name not in _INCLUDED:
            flags[name] = []
    return flags


def build(
    target: Path,
    compiler: str = os.environ.get("CC", "cc"),
    machine: str = "",
    extra: tuple[str, ...] = (),
) -> Path:
    """Compile every source and link the shared library `target`.

    The same sources, flags and compiler give the same bytes.

    Args:
        target: the file to make, in a folder that exists.
        compiler: the command of a C compiler.
        machine: the processor to compile for, as `platform.machine()` names it; "" for this one.
        extra: further flags for the compiler and the linker.

    Raises:
        RuntimeError: the compiler failed; the error holds its messages.
    """
    machine = machine or platform.machine()
    machine = MACHINE_ALIASES.get(machine, machine)
    identity = f'-DFORERUN_BUILD="{build_id(compiler, machine, extra)}"'
    # Compile in the target's folder, because a file can be renamed only within its file system.
    with tempfile.TemporaryDirectory(prefix=f"{target.stem}-", dir=target.parent) as folder:
        objects = []
        commands = []
        for name, variant_flags in sources(machine).items():
            made = str(Path(folder, Path(name).stem + ".o"))
            flags = [*variant_flags, identity] if name == "select.c" else variant_flags
            command = [compiler, *COMMON, *flags, *extra, "-c", str(HERE / name), "-o", made]
            objects.append(made)
            commands.append(command)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))  # raises the first error
        linked = Path(folder, LIBRARY)
        _run([compiler, "-shared", *extra, *objects, "-o", str(linked), "-lm", "-lpthread"])
        install(linked, target)
    return target


def install(built: Path, target: Path) -> None:
    """Rename a library in the target's folder to the target.

    The old file must not be overwritten. A process that has loaded it would find the new bytes in
    its memory, as code and tables, in the middle of a forward. After a rename the process keeps the
    old file, which lives on without a name.
    """
    built.replace(target)


def sources_id(folder: Path = HERE) -> str | None:
    """Return a hash of the sources in a folder and of their flags, or None if it has no sources."""
    sources = [path for path in folder.iterdir() if path.suffix in (".c", ".h")]
    if not sources:
        return None
    flags = folder / "build.py"  # this file holds them
    parts = []
    for path in sorted([*sources, flags]):
        parts += [path.name.encode(), path.read_bytes()]
    return _hash(parts)


def build_id(compiler: str, machine: str, extra: tuple[str, ...]) -> str:
    """Return what identifies a build.

    It is `sources_id`, "-", and a hash of `sources_id`, the machine, the flags and the compiler.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True).stdout
    origin = sources_id() or ""
    parts = [part.encode() for part in (origin, machine, compiler, *extra)]
    return f"{origin}-{_hash([*parts, version])}"


def build_of(path: Path) -> str | None:
    """Return the `build_id` in a library's file, without loading it, or None if it has none."""
    mark = re.search(rb"forerun-build:([0-9a-f]*-[0-9a-f]+)\0", path.read_bytes())
    return None if mark is None else mark[1].decode()


def _hash(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # With the lengths, bytes that move from one part to the next change the hash.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.stderr:
        print(done.stderr, file=sys.stderr)
    if done.returncode:
        shown = " ".join([command[0], *command[-3:]])
        raise RuntimeError(f"{shown} failed:\n{done.stderr}")


if __name__ == "__main__":
    flags = tuple(os.environ.get("CFLAGS", "").split())
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / LIBRARY, extra=flags))
