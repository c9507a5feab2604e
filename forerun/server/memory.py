"""How much memory keys and values may take where nobody has said it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

SHARE = 0.5  # of what is free: while buffers grow, the old ones and the new ones are there


def default_kv_memory(device: torch.device) -> int | None:
    """Return bytes for keys and values on a device that has its models already; None where nothing is known."""
    free = free_memory(device)
    return None if free is None else max(1, int(SHARE * free))


def free_memory(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return the bytes that a device has left, on a CPU within the limit of the control group; None if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    found = [_available(root), _left_in_group(root)]
    known = [each for each in found if each is not None]
    return min(known) if known else _physical()


def _available(root: Path) -> int | None:
    match = re.search(r"^MemAvailable: +(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return None if match is None else 1024 * int(match[1])


def _left_in_group(root: Path) -> int | None:
    """As a container sees its own group (version 2). Pages of files that nobody uses are given back when needed."""
    group = root / "sys/fs/cgroup"
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    if not (limit.isdecimal() and used.isdecimal()):  # no group, or "max"
        return None
    match = re.search(r"^inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
    return max(0, int(limit) - int(used) + (0 if match is None else int(match[1])))


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
