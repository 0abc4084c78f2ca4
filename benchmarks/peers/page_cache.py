"""What of a directory's files lies in the page cache, and what processes had from the device.

A store that reads its files through the page cache is measured with memory that nobody gave it; one
that goes past it is not. So both are told: how much was cached before a case, and how many bytes
came from the device during it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def _files(directory: str) -> Iterator[tuple[int, int]]:
    """(descriptor, size) of each file that has any bytes."""
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            except OSError:
                continue  # it has gone, or is a socket
            try:
                size = os.fstat(fd).st_size
                if size:
                    yield fd, size
            finally:
                os.close(fd)


def cached_bytes(directory: str) -> tuple[int, int]:
    """(bytes of its files that the page cache has, bytes that they take on the device)."""
    cached = taken = 0
    for fd, size in _files(directory):
        taken += min(size, os.fstat(fd).st_blocks * 512)
        pages = -(-size // mmap.PAGESIZE)
        states = ctypes.create_string_buffer(pages)
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        try:
            if _libc.mincore(address, size, states):
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            _libc.munmap(address, size)
        cached += sum(byte & 1 for byte in states.raw) * mmap.PAGESIZE
    return cached, taken


def drop(directory: str) -> None:
    """Have the page cache forget these files; written first, or it would keep what is not."""
    for fd, _ in _files(directory):
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def device_bytes(pids: list[int]) -> int:
    """Bytes that these processes had read from devices so far."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/io") as file:
            total += next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
    return total
