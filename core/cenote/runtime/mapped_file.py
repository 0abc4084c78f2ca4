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

__all__ = ["HUGE_PAGE_BYTES", "MappedFile", "collapse"]

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


def collapse(address: int, size_bytes: int) -> bool:
    """Put huge pages behind what of a mapping can have them; contents stay as they are. False where
    the kernel can't, now or ever, which costs only time."""
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    last = (address + size_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if last <= first:
        return True
    while _madvise(first, last - first, _MADV_COLLAPSE):
        if ctypes.get_errno() != errno.EINTR:
            return False
    return True
