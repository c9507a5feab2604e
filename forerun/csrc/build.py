"""Compile the C library, with one variant for each instruction set."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
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
    "aarch64": {
        "plain": [],
        "neon": ["-march=armv8.2-a+dotprod"],
        "i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
    },
}
MACHINE_ALIASES = {"AMD64": "x86_64", "arm64": "aarch64", "ARM64": "aarch64"}
EPOCH = 315532800  # the time of all that is built: 1980, the first year that a wheel can have
# {system, as `sys.platform`: flags of the linker}.
LINKED = {
    "linux": ["-lm", "-lpthread"],
    # Else the library would hold the path where it was linked.
    "darwin": ["-Wl,-install_name,@rpath/_forerun.so"],
    "win32": ["-lapi-ms-win-core-synch-l1-2-0"],
}
_INCLUDED = ("products.c", "vector_ops.c", "attention.c")  # each variant's file includes these


@dataclass(frozen=True)
class Platform:
    """What a wheel is for.

    Attributes:
        system: the system, as `sys.platform` names it.
        machine: the processor, as in `VARIANT_FLAGS`.
        target: both and the oldest version of the system, as Zig's compiler names them.
    """

    system: str
    machine: str
    target: str


# {a wheel's tag: what it is for}.
PLATFORMS = {
    "manylinux_2_17_x86_64": Platform("linux", "x86_64", "x86_64-linux-gnu.2.17"),
    "manylinux_2_17_aarch64": Platform("linux", "aarch64", "aarch64-linux-gnu.2.17"),
    "musllinux_1_2_x86_64": Platform("linux", "x86_64", "x86_64-linux-musl"),
    "musllinux_1_2_aarch64": Platform("linux", "aarch64", "aarch64-linux-musl"),
    "macosx_11_0_x86_64": Platform("darwin", "x86_64", "x86_64-macos.11.0"),
    "macosx_11_0_arm64": Platform("darwin", "aarch64", "aarch64-macos.11.0"),
    "win_amd64": Platform("win32", "x86_64", "x86_64-windows-gnu"),
    "win_arm64": Platform("win32", "aarch64", "aarch64-windows-gnu"),
}


def library_name(system: str) -> str:
    """Return the library's file name on a system, as `sys.platform` names it."""
    return "_forerun.dll" if system == "win32" else "_forerun.so"


LIBRARY = library_name(sys.platform)
# Zig's C compiler, which the package `ziglang` brings. It compiles for all PLATFORMS.
ZIG = shlex.join([sys.executable, "-m", "ziglang", "cc"])


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
    system: str = sys.platform,
) -> Path:
    """Compile every source and link the shared library `target`.

    The same sources, flags and compiler give the same bytes.

    Args:
        target: the file to make, in a folder that exists.
        compiler: the command of a C compiler, perhaps with flags.
        machine: the processor to compile for, as `platform.machine()` names it; "" for this one.
        extra: further flags for the compiler and the linker.
        system: the system to compile for, as `sys.platform` names it.

    Raises:
        OSError: there is no such compiler.
        RuntimeError: the compiler failed; the error holds its messages.
    """
    machine = machine or platform.machine()
    machine = MACHINE_ALIASES.get(machine, machine)
    command = shlex.split(compiler, posix=os.name == "posix")
    identity = f'-DFORERUN_BUILD="{build_id(command, machine, extra)}"'
    # Compile in the target's folder, because a file can be renamed only within its file system.
    with tempfile.TemporaryDirectory(prefix=f"{target.stem}-", dir=target.parent) as folder:
        objects = []
        commands = []
        for name, variant_flags in sources(machine).items():
            made = str(Path(folder, Path(name).stem + ".o"))
            flags = [*_spelled(variant_flags, command), *extra]
            if name == "select.c":
                flags.append(identity)
            objects.append(made)
            commands.append([*command, *COMMON, *flags, "-c", str(HERE / name), "-o", made])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))  # raises the first error
        linked = Path(folder, library_name(system))
        libraries = LINKED.get(system, LINKED["linux"])
        _run([*command, "-shared", *extra, *objects, "-o", str(linked), *libraries])
        install(linked, target)
    return target


def build_for(tag: str, target: Path) -> Path:
    """Build the library for a platform of `PLATFORMS` with Zig's compiler, as `build` does."""
    chosen = PLATFORMS[tag]
    return build(target, ZIG, chosen.machine, ("-target", chosen.target, "-s"), chosen.system)


def _spelled(flags: list[str], command: list[str]) -> list[str]:
    """Return flags as a compiler spells them: Zig's has no -march."""
    if "ziglang" not in command:
        return flags
    return [flag.replace("-march=armv8.2-a", "-mcpu=generic+v8_2a") for flag in flags]


def install(built: Path, target: Path) -> None:
    """Rename a library in the target's folder to the target.

    The old file must not be overwritten. A process that has loaded it would find the new bytes in
    its memory, as code and tables, in the middle of a forward. After a rename the process keeps the
    old file, which lives on without a name. Windows refuses that, but lets a loaded library have
    another name.
    """
    try:
        built.replace(target)
    except PermissionError:
        target.replace(target.with_name(f"{target.name}.{os.getpid()}.old"))
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


def build_id(command: list[str], machine: str, extra: tuple[str, ...]) -> str:
    """Return what identifies a build.

    It is `sources_id`, "-", and a hash of `sources_id`, the machine, the flags and the compiler's
    version: its first line, because clang's others say where it is installed.
    """
    version = subprocess.run([*command, "--version"], capture_output=True).stdout
    origin = sources_id() or ""
    parts = [part.encode() for part in (origin, machine, *extra)]
    return f"{origin}-{_hash([*parts, *version.splitlines()[:1]])}"


def build_of(library: bytes) -> str | None:
    """Return the `build_id` in the bytes of a library, or None if it has none."""
    mark = re.search(rb"forerun-build:([0-9a-f]*-[0-9a-f]+)\0", library)
    return None if mark is None else mark[1].decode()


def _hash(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # With the lengths, bytes that move from one part to the next change the hash.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> None:
    # Libraries of Windows hold a time, so that the same sources would give other bytes.
    environment = {"SOURCE_DATE_EPOCH": str(EPOCH)} | os.environ
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.stderr:
        print(done.stderr, file=sys.stderr)
    if done.returncode:
        shown = " ".join([command[0], *command[-3:]])
        raise RuntimeError(f"{shown} failed:\n{done.stderr}")


if __name__ == "__main__":
    flags = tuple(os.environ.get("CFLAGS", "").split())
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / LIBRARY, extra=flags))
