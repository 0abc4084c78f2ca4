"""A device that fails on order: the seam below `cenote.store.disk_io`."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence

from cenote.store.device import Device
from cenote.transport.memory_access import MEMORY

__all__ = ["FaultyDevice"]

Fault = Callable[[int, int], OSError | None]


class FaultyDevice:
    """`inner`, with faults. A fault is asked (offset, length) and gives the error, or None."""

    def __init__(self, inner: Device) -> None:
        self._inner = inner
        self.name = inner.name
        self.size_bytes = inner.size_bytes
        self.memory_align = inner.memory_align
        self.on_read: Fault = no_fault
        self.on_write: Fault = no_fault
        self.flush_error: OSError | None = None
        self.torn_bytes: int | None = None
        """A write that fails leaves its first so many bytes on the device."""
        self.flushed_before: list[tuple[int, int]] = []
        """Writes that a flush followed, in order: (offset, length)."""
        self._unflushed: list[tuple[int, int]] = []
        self.hang = threading.Event()
        self.hang.set()

    def read(self, address: int, length: int, offset: int) -> None:
        self.hang.wait(30)
        error = self.on_read(offset, length)
        if error is not None:
            raise error
        self._inner.read(address, length, offset)

    def write(self, parts: Sequence[tuple[int, int]], offset: int) -> None:
        self.hang.wait(30)
        length = sum(length for _, length in parts)
        error = self.on_write(offset, length)
        if error is not None:
            if self.torn_bytes:
                whole = b"".join(MEMORY[address : address + size] for address, size in parts)
                page = whole[: self.torn_bytes]
                with open(self.name, "r+b") as file:
                    file.seek(offset)
                    file.write(page)
            raise error
        self._inner.write(parts, offset)
        self._unflushed.append((offset, length))

    def flush(self) -> None:
        if self.flush_error is not None:
            raise self.flush_error
        self._inner.flush()
        self.flushed_before += self._unflushed
        self._unflushed = []

    def close(self) -> None:
        self._inner.close()


def no_fault(_offset: int, _length: int) -> OSError | None:
    return None


def io_error(_offset: int, _length: int) -> OSError | None:
    return OSError(errno.EIO, "injected")
