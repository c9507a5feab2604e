"""The pool's threads: how many do the jobs on a machine with other work."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch

from forerun.api.decoder import Decoder
from forerun.backends import prepare
from forerun.backends.stored import store
from forerun.csrc.build import HERE
from forerun.csrc.library import library, spread
from forerun.methods import AR
from tests.support.compiling import DRIVERS
from tests.support.families import tiny
from tests.support.native import native_settings
from tests.support.serving import until

restored = pytest.fixture(autouse=True)(native_settings)

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


def tasks() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def test_workers_stay_on_the_cores_of_their_node_and_give_the_same_tokens() -> None:
    usable = sorted(os.sched_getaffinity(0))
    nodes = [usable[:1], usable[1:] or usable]
    torch.set_num_threads(4)

    def generated() -> list[int]:
        decoder = Decoder(prepare(store(tiny("llama"), "int4")), method=AR())
        return decoder.generate([3, 5, 7], max_new_tokens=12, ignore_eos=True).tokens

    def places() -> list[set[int]]:
        return [os.sched_getaffinity(task) for task in sorted(tasks() - others)]

    expected = generated()
    try:
        library().fr_threads(1)  # ends the workers
        others = tasks()
        spread(library(), [usable])
        assert generated() == expected
        assert places() == [set(usable)] * 3
        library().fr_threads(1)
        spread(library(), nodes)
        assert generated() == expected
        # The second of four threads belongs to the first node, as the caller does.
        until(lambda: places() == [set(nodes[0]), set(nodes[1]), set(nodes[1])])
        library().fr_threads(1)
        # A node with three of four cores gets three of four threads.
        spread(library(), [nodes[0], nodes[1][:1] * 3])
        assert generated() == expected
        until(lambda: places() == [set(nodes[1][:1])] * 3)
    finally:
        numbers = (ctypes.c_int32 * 1)(0)
        assert library().fr_nodes(numbers, numbers, 1) == 1
    assert library().fr_nodes(numbers, numbers, 0) == 0
