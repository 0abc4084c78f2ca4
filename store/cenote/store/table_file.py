"""A segment's table file, mapped: its header, and the memory of its slots."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import final

from cenote.runtime.memory import allocate_file

from .slot_format import (
    HEADER_BYTES,
    HEADER_COPY_BYTES,
    SLOT_BYTES,
    TableHeader,
    table_file_bytes,
    unpack_header,
)

__all__ = ["TableFile", "read_header"]


def read_header(path: Path) -> TableHeader | None:
    """The header of the table file at `path`; None where there is no such file or no valid header.

    Raises OSError where the file can't be read for another reason.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(fd).st_size < HEADER_BYTES:
            return None
        return unpack_header(os.pread(fd, HEADER_BYTES, 0))
    finally:
        os.close(fd)


@final
class TableFile:
    """An open table file. Not thread-safe: its segment has the lock."""

    def __init__(self, path: Path, header: TableHeader, *, granule_bytes: int) -> None:
        """Open the table file at `path`, or make it where there is none, and write `header`.

        `granule_bytes` is the file system's page size. The file becomes as large as the header's
        slots need and is fully allocated. Raises ResourceUnavailable where there is too little
        memory, OSError.
        """
        self._path = path
        self._granule_bytes = granule_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.header = header
        try:
            self._map = self._mapped(header.slots)
        except BaseException:
            os.close(self._fd)
            raise
        self._write_header(header)

    def _mapped(self, slots: int) -> mmap.mmap:
        size = table_file_bytes(slots, self._granule_bytes)
        have = os.fstat(self._fd).st_size
        if have < size:
            allocate_file(self._fd, have, size - have, name=f"the slot table {self._path}")
        return mmap.mmap(self._fd, max(have, size))

    def slots_memory(self) -> memoryview:
        """The memory of all slots that the table has."""
        end = HEADER_BYTES + self.header.slots * SLOT_BYTES
        return memoryview(self._map)[HEADER_BYTES:end]

    def update(self, **changes: object) -> TableHeader:
        """Write the header with these fields changed. Raises ValueError for too many ranges."""
        header = self.header.next(**changes)
        self._write_header(header)
        return header

    def _write_header(self, header: TableHeader) -> None:
        # The copies take turns: one of them is whole at any moment.
        at = header.sequence % 2 * HEADER_COPY_BYTES
        self._map[at : at + HEADER_COPY_BYTES] = header.pack()
        self.header = header

    def extend(self) -> memoryview:
        """Make the file as large as the header's slots need; returns the memory of all slots.

        Memory given out before stays valid: both are views of the same file. Raises
        ResourceUnavailable; the file is then as it was, or larger.
        """
        self._map = self._mapped(self.header.slots)
        return self.slots_memory()

    def close(self) -> None:
        """Give up the descriptor, and the mapping unless somebody has memory of it still."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(BufferError):
            self._map.close()
