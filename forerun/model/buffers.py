"""Memory for keys and values.

On a CPU it is taken from the system page by page, as it is written.
"""

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
COUNTED = "2\n"  # the content of overcommit_memory if addresses count as memory, used or not
# Python 3.13 has a name for this flag. The number holds for the MACHINES.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
MACHINES = ("x86_64", "aarch64")  # for which addresses are reserved

Shape = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Buffer:
    """Keys, values, or both of one layer.

    Attributes:
        whole: [rows, groups, positions, D], including all that is reserved.
        pages: the mapping that holds `whole`, or None.
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
        """Return whether `release` can be called.

        Rows must be whole pages, and the system must read released pages as zeros, as Linux does.
        """
        return self.pages is not None and can_reserve() and self._row_bytes % PAGE == 0

    def release(self, row: int) -> None:
        """Give a row's memory back to the system. Its entries are zeros afterwards."""
        self._release(row * self._row_bytes, self._row_bytes)

    def take(self, row: int, source: Buffer, source_row: int, length: int) -> None:
        """Copy the first `length` positions of another buffer's row, and release that row.

        The source stays as it is if it is not releasable. If its groups are whole pages, each is
        released once it is copied, so that only one group's entries take memory twice at a time.
        """
        group_bytes = source.whole.stride(1) * source.whole.element_size()
        by_group = source.is_releasable and group_bytes % PAGE == 0
        for group in range(self.whole.shape[1]):
            self.whole[row, group, :length] = source.whole[source_row, group, :length]
            if by_group:
                start = source_row * source._row_bytes + group * group_bytes
                source._release(start, group_bytes)
        if source.is_releasable and not by_group:
            source.release(source_row)

    def _release(self, start: int, size: int) -> None:
        assert self.pages is not None
        self.pages.madvise(mmap.MADV_DONTNEED, start, size)

    @property
    def _row_bytes(self) -> int:
        return self.whole.stride(0) * self.whole.element_size()


def new_buffer(like: Tensor, shape: Shape, reserved: Shape) -> Buffer:
    """Return a buffer of zeros.

    Raises MemoryError or torch.OutOfMemoryError.

    Args:
        like: has the dtype and device.
        shape: [rows, groups, positions, D] that are needed.
        reserved: the shape, at least as large, that the buffer has where unused addresses cost
            nothing.
    """
    if like.device.type == "cpu" and can_reserve() and _bytes(like, reserved) >= MAPPED:
        with suppress(MemoryError):  # too many addresses: the smaller shape may fit
            return _mapped(like, reserved)
    # torch.zeros would write every page. The system zeroes these pages when they are first used.
    if like.device.type == "cpu" and hasattr(mmap, "MAP_PRIVATE") and _bytes(like, shape) >= MAPPED:
        return _mapped(like, shape)
    return Buffer(like.new_zeros(shape))


@cache
def can_reserve() -> bool:
    """Return whether addresses cost nothing until something is written there."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return False
    with suppress(OSError):
        if Path("/proc/sys/vm/overcommit_memory").read_text(encoding="utf-8") == COUNTED:
            return False
    import resource  # which Windows lacks

    limits = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return all(limit == resource.RLIM_INFINITY for limit in limits)


def _mapped(like: Tensor, shape: Shape) -> Buffer:
    """Return a buffer that is a private mapping. Raises MemoryError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if can_reserve():
        flags |= NO_RESERVE
    try:
        pages = mmap.mmap(-1, _bytes(like, shape), flags=flags)
    except (OSError, OverflowError) as error:
        size = _bytes(like, shape)
        raise MemoryError(f"cannot get {size} bytes for keys and values: {error}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # Because a huge page would take 2 MiB for the first entry of each row and group. A system
        # without huge pages raises OSError.
        with suppress(OSError):
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return Buffer(torch.frombuffer(pages, dtype=like.dtype).view(shape), pages)


def _bytes(like: Tensor, shape: Shape) -> int:
    return prod(shape) * like.element_size()
