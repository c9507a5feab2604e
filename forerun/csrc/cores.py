"""How many cores there are, how many threads compute when nobody says so, and nodes of memory.

Needs no torch.

Linux tells of its cores in files. macOS and Windows are left to torch, which counts cores itself.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from forerun.control_groups import group_folders, system_text

# Environment variables by which a user chooses the number of threads of torch.
CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")
# A core with less than this share of the largest core's capacity is an efficiency core. Threads
# share a job evenly at first, so such a core would keep the others waiting. The share is our own
# choice: it lies between the middle and the small cores of ARM.
MIN_CAPACITY = 0.5
ROOT = Path("/")


def default_threads() -> int | None:
    """Return the number of threads to compute with, or None to leave it to torch.

    It is None if the user has chosen a number by the environment, and where cores are unknown.
    """
    if any(name in os.environ for name in CHOSEN_BY):
        return None
    return physical_cores()


def usable_cores(root: Path = ROOT) -> int:
    """Return how many cores this process may use. Hyperthreads and efficiency cores count too.

    The limit of a control group counts as in `physical_cores`, and so does `root`.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    return _limited(cores, root)


def physical_cores(root: Path = ROOT) -> int | None:
    """Return the number of fast physical cores that this process may use, or None if unknown.

    Hyperthreads of one core count once, because both wait for the same memory and the same units.
    The limit of a control group counts too; of a fraction of a core nothing is left, because other
    threads would wait for the one that the system stops. `root` is where /proc and /sys are.
    """
    if sys.platform != "linux" or not hasattr(os, "sched_getaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    cores = _fast({cpu: _siblings(cpu, root) for cpu in allowed}, root)
    return None if cores is None else _limited(len(cores), root)


def memory_nodes(root: Path = ROOT) -> list[frozenset[int]]:
    """Return the CPUs that this process may use of each node of memory, or [] if there is one.

    It is also [] where nodes are unknown, and if some CPU is of none. `root` is where /sys is.
    """
    if sys.platform != "linux" or not hasattr(os, "sched_getaffinity"):
        return []
    allowed = os.sched_getaffinity(0)
    folder = root / "sys/devices/system/node"
    online = sorted(_cpus(system_text(folder / "online")))
    nodes = [_cpus(system_text(folder / f"node{node}/cpulist")) & allowed for node in online]
    used = [node for node in nodes if node]
    is_known = sum(map(len, used)) == len(allowed) and frozenset().union(*used) == allowed
    return used if is_known and len(used) > 1 else []


def _limited(cores: int, root: Path) -> int:
    """Return how many of so many cores the process's control groups leave it."""
    quota = _quota(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def _siblings(cpu: int, root: Path) -> frozenset[int]:
    """Return the hyperthreads of a CPU's core, or none if they are unknown."""
    return _cpus(
        system_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    )


def _fast(siblings: dict[int, frozenset[int]], root: Path) -> set[frozenset[int]] | None:
    """Return the cores without efficiency cores, or None if a CPU's core is unknown.

    Intel's kernels list the efficiency cores, ARM's give each core a capacity.
    """
    if not all(siblings.values()):
        return None
    slow = _cpus(system_text(root / "sys/devices/cpu_atom/cpus"))
    capacities = {cpu: _capacity(cpu, root) for cpu in siblings}
    smallest = MIN_CAPACITY * max(capacities.values(), default=0)
    fast = [cpu for cpu in siblings if cpu not in slow and capacities[cpu] >= smallest]
    return {siblings[cpu] for cpu in fast or siblings}


def _capacity(cpu: int, root: Path) -> int:
    text = system_text(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity").strip()
    return int(text) if text.isdecimal() else 0


def _quota(root: Path) -> float | None:
    """Return the cores that the process's control groups leave it at a time, or None.

    Each group may have a limit: version 2 in cpu.max, version 1 in two files.
    """
    limits = [
        limit for folder in group_folders("cpu", root) if (limit := _limit_of(folder)) is not None
    ]
    return min(limits, default=None)


def _limit_of(folder: Path) -> float | None:
    limit = system_text(folder / "cpu.max").split()
    if not limit:
        limit = [system_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(limit) != 2 or not all(part.isdecimal() and int(part) for part in limit):
        return None  # no limit is written as "max" or -1
    return int(limit[0]) / int(limit[1])


def _cpus(text: str) -> frozenset[int]:
    """Return the CPUs of a list such as "0-3,8"."""
    cpus: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
