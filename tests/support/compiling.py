"""Programs in C that are linked with the library, for this processor or for aarch64."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from forerun.csrc.build import HERE, build

DRIVERS = Path(__file__).parents[1] / "csrc" / "drivers"
CROSS = "aarch64-linux-gnu-gcc"
QEMU = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
LACKS_CROSS = not (shutil.which(CROSS) and shutil.which("qemu-aarch64"))
needs_cross = pytest.mark.skipif(
    LACKS_CROSS, reason="needs a cross compiler for aarch64 and qemu-user"
)


def compiled(
    folder: Path, driver: str, compiler: str, machine: str, flags: Sequence[str] = ()
) -> str:
    build(folder / "libforerun.so", compiler, machine, tuple(flags))
    source = DRIVERS / f"{driver}.c"
    program = folder / "driver"
    link = [str(folder / "libforerun.so"), "-Wl,-rpath,$ORIGIN"]
    subprocess.run(
        [compiler, "-O1", *flags, f"-I{HERE}", str(source), "-o", str(program), *link], check=True
    )
    return str(program)
