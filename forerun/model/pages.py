"""Moving memory from one address to another without a copy, on Linux."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from functools import cache
from typing import Any

MACHINES = ("x86_64", "aarch64")  # for which the numbers below hold
# Flags of `mremap`, for which Python has no names. With DONT_UNMAP, which Linux has since 5.7, the
# old addresses stay and are zeros when they are next read.
MAY_MOVE = 1
FIXED = 2
DONT_UNMAP = 4
MAP_FIXED = 0x10
# Python 3.13 has a name for this flag.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def move(source: int, target: int, size: int) -> bool:
    """Move `size` bytes from the address `source` to `target`. Zeros stay behind.

    Both must be whole pages of private mappings that no file backs, and must not overlap. A page
    takes some nanoseconds, because only its entry in the page table changes.

    Returns:
        Whether they were moved. If not, `source` is as it was, and `target` may be zeros.
    """
    libc = _libc()
    if libc is None:
        return False
    flags = MAY_MOVE | FIXED | DONT_UNMAP
    if libc.mremap(source, size, size, flags, target) == target:
        return True
    # A call that fails may have removed what was at `target` before. Linux looks at its limits
    # before that, so that this hardly ever happens.
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED | NO_RESERVE
    if libc.mmap(target, size, protection, flags, -1, 0) != target:
        raise MemoryError(f"cannot get {size} bytes for keys and values")
    return False


@cache
def can_move() -> bool:
    """Return whether this system moves pages."""
    if _libc() is None:
        return False
    size = mmap.PAGESIZE
    with mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages[:1] = b"a"
        view = ctypes.c_char.from_buffer(pages)
        start = ctypes.addressof(view)
        has_moved = move(start, start + size, size) and pages[size : size + 1] == b"a"
        del view  # because a mapping with views cannot be closed
        return has_moved


@cache
def _libc() -> Any:
    """Return the C library with the types of `mremap` and `mmap`; None on other systems."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return None
    libc = ctypes.CDLL(None)
    address = ctypes.c_void_p
    size = ctypes.c_size_t
    libc.mremap.restype = address
    libc.mremap.argtypes = [address, size, size, ctypes.c_int, address]
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return libc
