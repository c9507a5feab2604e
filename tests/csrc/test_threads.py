"""The pool's threads: how many do the jobs on a machine with other work."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forerun.csrc.build import HERE
from forerun.csrc.library import library
from tests.support.compiling import DRIVERS

DRIVER = DRIVERS / "pool.c"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["-Wall", "-Wextra", "-Werror"], ["-fsanitize=thread", "-g"]])
def test_threads_become_fewer_while_jobs_wait_and_come_back(
    tmp_path: Path, flags: list[str]
) -> None:
    """The driver makes up time and cores, and includes the source."""
    program = str(tmp_path / "pool")
    command = [
        "cc",
        "-std=gnu11",
        "-O1",
        *flags,
        f"-I{HERE}",
        str(DRIVER),
        str(HERE / "system.c"),
        "-o",
        program,
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert not done.returncode and not done.stderr, done.stderr


def test_the_number_of_active_threads_can_be_asked() -> None:
    before = library().fr_threads(0)
    try:
        for count in (3, 1, 2):
            assert library().fr_threads(count) == count
            assert library().fr_active_threads() == count
    finally:
        library().fr_threads(before)
