"""Memory for keys and values, which on a CPU is taken from the system page by page as it is written."""

from __future__ import annotations

import mmap
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

MAPPED = 2**20  # bytes of a buffer, addresses included, from which it is a mapping
PAGE = mmap.PAGESIZE
COUNTED = "2\n"  # of overcommit_memory: addresses count as memory, used or not
# Python 3.13 has this constant's name. The number is that of the machines for which addresses are reserved.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
MACHINES = ("x86_64", "aarch64")

Shape = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Buffer:
    """Keys, values, or both of one layer.

    Attributes:
        whole: [rows, groups, positions, D], with all that is reserved.
        pages: the mapping behind it, or None.
    """

    whole: Tensor
    pages: mmap.mmap | None = None

    def holds(self, rows: int, positions: int) -> bool:
        """Return whether it has so many rows and positions."""
        return rows <= self.whole.shape[0] and positions <= self.whole.shape[2]

    def first(self, rows: int, positions: int) -> Tensor:
        """Return a view of its first rows and positions."""
        return self.whole[:rows, :, :positions]

    @property
    def is_releasable(self) -> bool:
        """Return whether `release` can be called: rows are whole pages, and Linux reads released ones as zeros."""
        return self.pages is not None and can_reserve() and self._row_bytes % PAGE == 0

    def release(self, row: int) -> None:
        """Give a row's memory back to the system. Its entries are zeros afterwards."""
        self._release(row * self._row_bytes, self._row_bytes)

    def take(self, row: int, source: Buffer, other: int, length: int) -> None:
        """Copy the first `length` positions of another buffer's row, of which nothing is left there if it can be
        released. Where groups are whole pages, only one group's entries take memory twice at a time.
        """
        size = source.whole.stride(1) * source.whole.element_size()
        by_group = source.is_releasable and size % PAGE == 0
        for group in range(self.whole.shape[1]):
            self.whole[row, group, :length] = source.whole[other, group, :length]
            if by_group:
                source._release(other * source._row_bytes + group * size, size)
        if source.is_releasable and not by_group:
            source.release(other)

    def _release(self, start: int, size: int) -> None:
        assert self.pages is not None
        self.pages.madvise(mmap.MADV_DONTNEED, start, size)

    @property
    def _row_bytes(self) -> int:
        return self.whole.stride(0) * self.whole.element_size()


def new_buffer(like: Tensor, shape: Shape, reserved: Shape) -> Buffer:
    """Return zeros [rows, groups, positions, D] of the dtype and device of `like`. Where addresses cost nothing, they
    have the shape `reserved`, within which they can grow, else `shape`. Raises MemoryError or torch.OutOfMemoryError.
    """
    if like.device.type == "cpu" and can_reserve() and _bytes(like, reserved) >= MAPPED:
        with suppress(MemoryError):  # not so many addresses: the smaller shape may do
            return _mapped(like, reserved)
    # torch.zeros would write every page. The system zeroes these pages when they are first used.
    if like.device.type == "cpu" and hasattr(mmap, "MAP_PRIVATE") and _bytes(like, shape) >= MAPPED:
        return _mapped(like, shape)
    return Buffer(like.new_zeros(shape))


@cache
def can_reserve() -> bool:
    """Return whether addresses cost nothing as long as nothing is written there."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return False
    with suppress(OSError):
        if Path("/proc/sys/vm/overcommit_memory").read_text() == COUNTED:
            return False
    import resource  # of Unix alone

    limits = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return all(limit == resource.RLIM_INFINITY for limit in limits)


def _mapped(like: Tensor, shape: Shape) -> Buffer:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if can_reserve():
        flags |= NO_RESERVE
    try:
        pages = mmap.mmap(-1, _bytes(like, shape), flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no {_bytes(like, shape)} bytes for keys and values: {error}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a system without huge pages
            # A huge page would take 2 MiB for the first entry of each row and group.
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return Buffer(torch.frombuffer(pages, dtype=like.dtype).view(shape), pages)


def _bytes(like: Tensor, shape: Shape) -> int:
    return prod(shape) * like.element_size()
