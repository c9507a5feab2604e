"""Programs in C that are linked with the library, for this processor or for aarch64."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from forerun.csrc.build import HERE, build

DRIVERS = Path(__file__).parents[1] / "csrc" / "drivers"
CROSS = "aarch64-linux-gnu-gcc"
QEMU = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
LACKS_CROSS = not (shutil.which(CROSS) and shutil.which("qemu-aarch64"))
# Flags of a build that a compiler makes in a tenth of the time. Without inlining it does not see
# that numbers are set before they are used.
UNINLINED = ("-DFR_INLINE=static inline", "-Wno-maybe-uninitialized")
needs_cross = pytest.mark.skipif(
    LACKS_CROSS, reason="needs a cross compiler for aarch64 and qemu-user"
)


def cross_library(folder: Path) -> Path:
    """Return a library for aarch64 without warnings, which the first test that asks builds.

    `folder` is the same for all processes of a run, because a build takes seconds. A wheel's flags
    would make it a minute; `.ci/wheels` compares the libraries for aarch64 that have these.
    """
    target = folder / "library-aarch64" / "libforerun.so"
    target.parent.mkdir(exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():
            build(target, CROSS, "aarch64", ("-Werror", "-O2", *UNINLINED))
    return target


def compiled(
    folder: Path, driver: str, compiler: str, library: Path, flags: Sequence[str] = ()
) -> str:
    """Compile a driver and link it with a library. Return the path of the program."""
    program = folder / "driver"
    source = str(DRIVERS / f"{driver}.c")
    command = [compiler, "-O1", *flags, f"-I{HERE}", source, "-o", str(program), str(library)]
    subprocess.run(command, check=True)
    return str(program)
