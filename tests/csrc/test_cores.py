"""The number of threads by default: physical cores, without slow ones, within limits."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest

from forerun.csrc import cores
from forerun.csrc.cores import default_threads, memory_nodes, physical_cores, usable_cores

CPU = "sys/devices/system/cpu/cpu{}/{}"
PAIRS = {
    CPU.format(cpu, "topology/thread_siblings_list"): f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)
}
SINGLE = {CPU.format(cpu, "topology/thread_siblings_list"): f"{cpu}" for cpu in range(8)}
# {name: (files, CPUs that the process may use, threads)}.
MACHINES = {
    "hyperthreads": (PAIRS, range(8), 4),
    "some of them": (PAIRS, {1, 5, 2}, 2),
    "Intel's efficiency cores": (SINGLE | {"sys/devices/cpu_atom/cpus": "2-6,7\n"}, range(8), 2),
    "efficiency cores alone": (SINGLE | {"sys/devices/cpu_atom/cpus": "2-7\n"}, {4, 5, 6}, 3),
    "small cores of ARM": (
        SINGLE
        | {
            CPU.format(cpu, "cpu_capacity"): str((250, 250, 250, 250, 780, 780, 780, 1024)[cpu])
            for cpu in range(8)
        },
        range(8),
        4,
    ),
    "a group's limit": (
        PAIRS | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000"},
        range(8),
        2,
    ),
    "a limit below one core": (
        PAIRS | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000"},
        range(8),
        1,
    ),
    "no limit": (
        PAIRS | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000"},
        range(8),
        4,
    ),
    "a limit further out": (
        PAIRS
        | {
            "proc/self/cgroup": "0::/user/me\n",
            "sys/fs/cgroup/user/me/cpu.max": "800000 100000",
            "sys/fs/cgroup/user/cpu.max": "300000 100000",
        },
        range(8),
        3,
    ),
    "a limit of version 1": (
        PAIRS
        | {
            "proc/self/cgroup": "3:cpu,cpuacct:/job\n2:memory:/job\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        range(8),
        2,
    ),
    "unknown cores": (PAIRS, {0, 9}, None),
    "no files": ({}, range(8), None),
}


NODE = "sys/devices/system/node/{}"
TWO_NODES = {
    NODE.format("online"): "0-1\n",
    NODE.format("node0/cpulist"): "0-1,4-5\n",
    NODE.format("node1/cpulist"): "2-3,6-7\n",
}
# {name: (files, CPUs that the process may use, nodes)}.
MEMORIES: dict[str, tuple[dict[str, str], Collection[int], list[set[int]]]] = {
    "two": (TWO_NODES, range(8), [{0, 1, 4, 5}, {2, 3, 6, 7}]),
    "some CPUs of two": (TWO_NODES, {5, 6, 7}, [{5}, {6, 7}]),
    "one of two": (TWO_NODES, {0, 5}, []),
    "one": (
        {NODE.format("online"): "0\n", NODE.format("node0/cpulist"): "0-7\n"},
        range(8),
        [],
    ),
    "a third without CPUs": (
        TWO_NODES | {NODE.format("online"): "0-2\n", NODE.format("node2/cpulist"): "\n"},
        range(8),
        [{0, 1, 4, 5}, {2, 3, 6, 7}],
    ),
    "a CPU of no node": (TWO_NODES, range(9), []),
    "a CPU of two": (TWO_NODES | {NODE.format("node1/cpulist"): "1-3,6-7\n"}, range(8), []),
    "unknown": ({}, range(8), []),
}


def pretend(
    texts: dict[str, str], allowed: Collection[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make a folder the root of a Linux machine whose process may use some CPUs."""
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    monkeypatch.setattr(cores.sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)


@pytest.mark.parametrize("name", MEMORIES)
def test_nodes_of_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, allowed, nodes = MEMORIES[name]
    pretend(texts, allowed, tmp_path, monkeypatch)
    assert memory_nodes(tmp_path) == nodes
    monkeypatch.setattr(cores.sys, "platform", "win32")
    assert memory_nodes(tmp_path) == []


@pytest.mark.parametrize("name", MACHINES)
def test_machines(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, allowed, threads = MACHINES[name]
    pretend(texts, allowed, tmp_path, monkeypatch)
    assert physical_cores(tmp_path) == threads


def test_the_environment_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cores.CHOSEN_BY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cores, "physical_cores", lambda: 7)
    assert default_threads() == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert default_threads() is None


def test_hyperthreads_are_usable_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/\n")
    for text, count in (("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("x", 8)):
        (group / "cpu.max").write_text(f"{text}\n")
        assert usable_cores(tmp_path) == count
    assert usable_cores(tmp_path / "nowhere") == 8
