"""The default memory for keys and values."""

from __future__ import annotations

import re
from pathlib import Path

import torch

# The other half is needed because old and new buffers exist together while a buffer grows, and for
# all that is not keys and values of the target.
KV_MEMORY_SHARE = 0.5  # of the free memory


def default_kv_memory(device: torch.device, share: float = 1.0) -> int | None:
    """Return the bytes for keys and values on a device that has its models already.

    None if the free memory of the device is unknown. `share` is that of one engine of several.
    """
    free = free_memory(device)
    return None if free is None else max(1, int(share * KV_MEMORY_SHARE * free))


def free_memory(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return the free bytes of a device, or None if they are unknown.

    On a CPU the result also keeps within the limit of the process's control group. `root` is where
    /proc and /sys are mounted.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    bounds = [_available_memory(root), _control_group_memory(root)]
    return min((bound for bound in bounds if bound is not None), default=None)


def _available_memory(root: Path) -> int | None:
    available = re.search(r"^MemAvailable: +(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return 1024 * int(available[1]) if available else None


def _control_group_memory(root: Path) -> int | None:
    """Return the bytes that a control group (version 2) leaves, as a container sees its own group.

    None if there is no group, or if it has no limit, which is written as "max".
    """
    group = root / "sys/fs/cgroup"
    limit = _read(group / "memory.max").strip()
    used = _read(group / "memory.current").strip()
    if not (limit.isdecimal() and used.isdecimal()):
        return None
    inactive = re.search(r"^inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
    reclaimable = int(inactive[1]) if inactive else 0  # cached files that the kernel can drop
    return max(0, int(limit) - int(used) + reclaimable)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
