"""Memory for keys and values.

On a CPU it is taken from the system page by page, as it is written.
"""

from __future__ import annotations

import mmap
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from forerun.model.pages import MACHINES, NO_RESERVE, can_move, move

MAPPED = 2**20  # bytes of a buffer, addresses included, from which it is a mapping
PAGE = mmap.PAGESIZE
COUNTED = "2\n"  # the content of overcommit_memory if addresses count as memory, used or not
MOVED_PAGES = 2**18  # bytes of entries from which their pages move, because fewer are soon copied

Shape = Sequence[int]  # rows, groups, positions, D


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
        """Move the first `length` positions of another buffer's row here, and release that row.

        The source stays as it is if it is not releasable. The pages of a long row move without a
        copy; the last one may also hold entries behind these positions. Else the entries are
        copied. If the source's groups are whole pages, each is then released once it is copied, so
        that only one group's entries take memory twice at a time.
        """
        if self._move_pages(row, source, source_row, length):
            return
        by_group = source.is_releasable and source._group_bytes % PAGE == 0
        for group in range(self.whole.shape[1]):
            self.whole[row, group, :length] = source.whole[source_row, group, :length]
            if by_group:
                start = source_row * source._row_bytes + group * source._group_bytes
                source._release(start, source._group_bytes)
        if source.is_releasable and not by_group:
            source.release(source_row)

    def _move_pages(self, row: int, source: Buffer, source_row: int, length: int) -> bool:
        """Move a whole row of another buffer here, and return whether that was possible."""
        is_long = self._row_bytes // self.whole.shape[2] * length >= MOVED_PAGES
        is_alike = self.whole.shape[1:] == source.whole.shape[1:]
        is_releasable = self.is_releasable and source.is_releasable
        has_pages = is_releasable and self._group_bytes % PAGE == 0
        if not (is_long and is_alike and has_pages and can_move()):
            return False
        if not move(source._address(source_row), self._address(row), self._row_bytes):
            return False
        # Nobody would count what the source held behind these positions.
        used = self._group_bytes // self.whole.shape[2] * length
        used = -(-used // PAGE) * PAGE
        if used < self._group_bytes:
            for group in range(self.whole.shape[1]):
                start = row * self._row_bytes + group * self._group_bytes
                self._release(start + used, self._group_bytes - used)
        return True

    def of_one_row(self) -> Buffer:
        """Return an empty buffer for one row, to which `take` can move one. Raises MemoryError."""
        return _mapped(self.whole, (1, *self.whole.shape[1:]))

    def _release(self, start: int, size: int) -> None:
        assert self.pages is not None
        self.pages.madvise(mmap.MADV_DONTNEED, start, size)

    def _address(self, row: int) -> int:
        return self.whole.data_ptr() + row * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.whole.stride(0) * self.whole.element_size()

    @property
    def _group_bytes(self) -> int:
        return self.whole.stride(1) * self.whole.element_size()


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
