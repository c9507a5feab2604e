"""What an engine may take of the memory: for keys and values, and for those of earlier texts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from forerun.api.build import draft_share
from forerun.api.decoder import Decoder
from forerun.api.options import DEFAULT_PREFIX_BYTES
from forerun.backends.held import held_bytes
from forerun.control_groups import group_folders, system_text

# The other half is needed because old and new buffers exist together while a buffer grows, and for
# all that is not keys and values of the target.
KV_MEMORY_SHARE = 0.5  # of the free memory that earlier texts leave
PREFIX_SHARE = 0.25  # of the free memory, at most
# The earlier texts of a model have room for so many tokens, or for a text as long as the context if
# that is shorter. Coding agents send prompts of 20,000 tokens with every request.
PREFIX_TOKENS = 2**15
# Files of a control group: its limit, what it uses, and, in memory.stat, the cached files of this
# that the kernel can drop. Those of version 2 come first.
GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class MemoryShare:
    """What one engine of several may take.

    Attributes:
        part: its part of the free memory.
        limit: bytes of which weights and earlier texts take that part; None for no limit.
    """

    part: float = 1.0
    limit: int | None = None


def weight_memory(decoder: Decoder) -> int:
    """Return the bytes that the weights of a decoder's models and trained layers take."""
    return held_bytes(decoder.target, decoder.draft, decoder.head, decoder.pre_verifier)


def prefix_memory(decoder: Decoder) -> int:
    """Return the bytes that the earlier texts of a decoder's models may take."""
    return round(_models_share(decoder) * decoder.options.prefix_limit)


def _models_share(decoder: Decoder) -> float:
    """Return the bytes of a position in all models that keep earlier texts, over the target's."""
    if decoder.draft is None:
        return 1.0
    return 1.0 + draft_share(decoder.target, decoder.draft)


def default_prefix_bytes(decoder: Decoder, share: MemoryShare) -> int:
    """Return the bytes for the earlier texts of a decoder's target, whose models are loaded."""
    target = decoder.target
    tokens = min(target.context or PREFIX_TOKENS, PREFIX_TOKENS)
    free = free_memory(target.device)
    if free is None:
        return DEFAULT_PREFIX_BYTES
    models = _models_share(decoder)
    bounds = [
        max(DEFAULT_PREFIX_BYTES, tokens * target.position_bytes),
        int(PREFIX_SHARE * share.part * free / models),
    ]
    if share.limit is not None:
        left = max(0, share.limit - weight_memory(decoder))
        bounds.append(int(min(left, PREFIX_SHARE * share.part * share.limit) / models))
    return min(bounds)


def default_kv_memory(decoder: Decoder, share: MemoryShare) -> int | None:
    """Return the bytes for keys and values of a decoder's target, whose models are loaded.

    None if the free memory of the device is unknown.
    """
    free = free_memory(decoder.target.device)
    if free is None:
        return None
    left = share.part * free
    # A user may allow earlier texts more than there is.
    left -= min(prefix_memory(decoder), left / 2)
    return max(1, int(KV_MEMORY_SHARE * left))


def free_memory(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return the free bytes of a device, or None if they are unknown.

    On a CPU the result also keeps within the limits of the process's control groups. `root` is
    where /proc and /sys are mounted.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    bounds = [_available_memory(root), _control_group_memory(root)]
    return min((bound for bound in bounds if bound is not None), default=None)


def _available_memory(root: Path) -> int | None:
    available = re.search(
        r"^MemAvailable: +(\d+) kB", system_text(root / "proc/meminfo"), re.MULTILINE
    )
    return 1024 * int(available[1]) if available else None


def _control_group_memory(root: Path) -> int | None:
    """Return the bytes that the process's control groups leave it, or None without a limit."""
    rooms = (_room(folder) for folder in group_folders("memory", root))
    return min((room for room in rooms if room is not None), default=None)


def _room(group: Path) -> int | None:
    """Return the bytes that a control group leaves, or None if it has no limit.

    No limit is written as "max" in version 2, and as a very large number in version 1.
    """
    for limit_name, used_name, cached_name in GROUP_FILES:
        limit = system_text(group / limit_name).strip()
        used = system_text(group / used_name).strip()
        if limit.isdecimal() and used.isdecimal():
            statistics = system_text(group / "memory.stat")
            cached = re.search(rf"^{cached_name} (\d+)", statistics, re.MULTILINE)
            return max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))
    return None
