"""Files in memory, mapped so that huge pages can lie behind them.

A huge page of a file is one entry of a page table only where the address is as far from a multiple
of its size as the place in the file is; the kernel puts a mapping anywhere. With 4 KiB pages a
block of 2.5 MiB is 640 entries: as many faults at the first touch, and as many looks whenever a
device or a NIC is to read it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import Any, Final, final

__all__ = ["HUGE_PAGE_BYTES", "MappedFile", "collapse", "collapse_error", "huge_part"]

HUGE_PAGE_BYTES: Final = 2 << 20
_MADV_COLLAPSE: Final = 25  # since Linux 6.1
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10

_libc: Final = ctypes.CDLL(None, use_errno=True)
_mmap: Final[Any] = _libc.mmap
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_mmap.restype = ctypes.c_void_p
_munmap: Final[Any] = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise: Final[Any] = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


@final
class MappedFile:
    """`size_bytes` of a file from `offset` on. The descriptor may be closed afterwards; the mapping
    goes with the last view of it."""

    __slots__ = ("__weakref__", "_owner", "address", "memory")

    def __init__(
        self, descriptor: int, size_bytes: int, *, writable: bool = True, offset: int = 0
    ) -> None:
        """Raises OSError."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _aligned(descriptor, size_bytes, protection, offset)
        self.address = address
        self._owner = (ctypes.c_char * size_bytes).from_address(address)
        # At the interpreter's end views may still be in use: the kernel unmaps then.
        weakref.finalize(self._owner, _munmap, address, size_bytes).atexit = False
        self.memory = memoryview(self._owner).cast("B")
        """All of it."""


def _aligned(descriptor: int, size_bytes: int, protection: int, offset: int) -> int:
    wanted = offset % HUGE_PAGE_BYTES
    if size_bytes < HUGE_PAGE_BYTES:
        return _map(None, size_bytes, protection, mmap.MAP_SHARED, descriptor, offset)
    room = size_bytes + HUGE_PAGE_BYTES
    try:
        start = _map(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    except OSError:  # of virtual memory: the mapping itself may be possible yet
        return _map(None, size_bytes, protection, mmap.MAP_SHARED, descriptor, offset)
    address = start + (wanted - start) % HUGE_PAGE_BYTES
    fixed = mmap.MAP_SHARED | _MAP_FIXED
    try:
        _map(address, size_bytes, protection, fixed, descriptor, offset)
    except OSError:
        _munmap(start, room)
        raise
    if address > start:
        _munmap(start, address - start)
    end = address + -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if start + room > end:
        _munmap(end, start + room - end)
    return address


def _map(
    place: int | None, size_bytes: int, protection: int, flags: int, descriptor: int, offset: int
) -> int:
    address = _mmap(place, size_bytes, protection, flags, descriptor, offset)
    if address == _MAP_FAILED or address is None:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address)


def huge_part(address: int, size_bytes: int) -> int:
    """How many bytes of a mapping's range whole huge pages could lie behind."""
    first, last = _whole(address, size_bytes)
    return last - first


def collapse(address: int, size_bytes: int) -> int:
    """Put huge pages behind what of a mapping can have them; contents stay as they are. Returns
    behind how many bytes they lie now: fewer than `huge_part` where the kernel can't, now or ever,
    which costs only time."""
    first, last = _whole(address, size_bytes)
    if first == last:
        return 0
    error = collapse_error(first, last - first)
    if not error:
        return last - first
    if error == errno.EINVAL or last - first == HUGE_PAGE_BYTES:  # no such thing here
        return 0
    # It went on behind what it had no memory for, and does not say what that was.
    pages = range(first, last, HUGE_PAGE_BYTES)
    return HUGE_PAGE_BYTES * sum(not collapse_error(page, HUGE_PAGE_BYTES) for page in pages)


def _whole(address: int, size_bytes: int) -> tuple[int, int]:
    """Where the first whole huge page in a range begins, and where the last one ends."""
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return first, max(first, (address + size_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)


def collapse_error(address: int, size_bytes: int) -> int:
    """0 where huge pages lie behind all of these whole ones now, else why not (errno)."""
    while _madvise(address, size_bytes, _MADV_COLLAPSE):
        if (error := ctypes.get_errno()) != errno.EINTR:
            return error
    return 0
