"""The default memory for keys and values."""

from __future__ import annotations

import re
from pathlib import Path

import torch

SHARE = 0.5  # of the free memory: while buffers grow, the old ones and the new ones exist together


def default_kv_memory(device: torch.device) -> int | None:
    """Return bytes for keys and values on a device that has its models already; None if nothing is known."""
    free = free_memory(device)
    return None if free is None else max(1, int(SHARE * free))


def free_memory(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return the free bytes of a device, on a CPU within the limit of the control group; None if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    found = re.search(r"^MemAvailable: +(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    known = [1024 * int(found[1])] if found else []
    group = root / "sys/fs/cgroup"  # version 2, as a container sees its own group
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():  # there is a group, and its limit is not "max"
        unused_files = re.search(
            r"^inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE
        )
        known.append(max(0, int(limit) - int(used) + (int(unused_files[1]) if unused_files else 0)))
    return min(known, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
