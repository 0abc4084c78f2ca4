"""A segment's table file, mapped: its header, the ranges given up, and the memory of its slots."""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

from cenote.api.errors import ResourceUnavailable
from cenote.runtime.memory import PAGE_BYTES, allocate_file

from .slot_format import (
    HEADER_BYTES,
    HEADER_COPY_BYTES,
    RANGE_BYTES,
    RANGES_MAX,
    SLOT_BYTES,
    SLOTS_AT,
    TableHeader,
    pack_range,
    table_file_bytes,
    unpack_header,
    unpack_ranges,
)

__all__ = ["Survivor", "TableFile", "read_table"]


@dataclass(frozen=True, slots=True)
class Survivor:
    """What a table file of an earlier life says about its segment."""

    header: TableHeader
    retired: tuple[tuple[int, int], ...]
    """Data ranges given up for slots, (offset, length), as they came."""


def read_table(path: Path) -> Survivor | None:
    """What the table file at `path` says; None where there is none or it is damaged.

    Raises OSError where the file can't be read for another reason.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        header = unpack_header(os.pread(fd, HEADER_BYTES, 0))
        if header is None:
            return None
        size = header.retired_count * RANGE_BYTES
        packed = os.pread(fd, size, HEADER_BYTES) if size else b""
        retired = unpack_ranges(packed) if len(packed) == size else None
        return None if retired is None else Survivor(header, tuple(retired))
    finally:
        os.close(fd)


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@final
class TableFile:
    """An open table file. Not thread-safe: its segment has the lock."""

    def __init__(self, path: Path, header: TableHeader) -> None:
        """Open the table file at `path`, or make it where there is none, and write `header`.

        The file becomes as large as the header's slots need, and those are fully allocated. Raises
        ResourceUnavailable where there is too little memory, OSError.
        """
        self._path = path
        self._name = f"the slot table {path}"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.header = header
        try:
            # What is there is backed already, and there may be no memory left to ask for.
            if not os.fstat(self._fd).st_size:
                allocate_file(self._fd, 0, HEADER_BYTES, name=self._name)
            self._ranges_end = HEADER_BYTES + _pages(header.retired_count * RANGE_BYTES)
            self._map = self._mapped(header.slots)
        except BaseException:
            os.close(self._fd)
            raise
        self._write_header(header)

    def _mapped(self, slots: int) -> mmap.mmap:
        size = table_file_bytes(slots, PAGE_BYTES)
        have = max(SLOTS_AT, os.fstat(self._fd).st_size)
        if have < size:
            allocate_file(self._fd, have, size - have, name=self._name)
        return mmap.mmap(self._fd, max(have, size))

    def slots_memory(self) -> memoryview:
        """The memory of all slots that the table has."""
        end = SLOTS_AT + self.header.slots * SLOT_BYTES
        return memoryview(self._map)[SLOTS_AT:end]

    def update(self, **changes: object) -> TableHeader:
        """Write the header with these fields changed."""
        header = self.header.next(**changes)
        self._write_header(header)
        return header

    def _write_header(self, header: TableHeader) -> None:
        # The copies take turns: one of them is whole at any moment.
        at = header.sequence % 2 * HEADER_COPY_BYTES
        self._map[at : at + HEADER_COPY_BYTES] = header.pack()
        self.header = header

    def retire(self, offset: int, length: int, slots: int) -> None:
        """Note that a data range is given up, so that there are `slots` in all.

        Raises ValueError where no more ranges can be noted, ResourceUnavailable.
        """
        count = self.header.retired_count
        if count >= RANGES_MAX:
            raise ValueError(f"{RANGES_MAX} ranges were given up already")
        at = HEADER_BYTES + count * RANGE_BYTES
        self._back_ranges(at + RANGE_BYTES)
        self._map[at : at + RANGE_BYTES] = pack_range(offset, length)
        self.update(retired_count=count + 1, slots=slots)

    def back_next_range(self) -> None:
        """See to it that `retire` needs no memory the next time, when there may be none.

        Raises ResourceUnavailable.
        """
        self._back_ranges(HEADER_BYTES + (self.header.retired_count + 1) * RANGE_BYTES)

    def _back_ranges(self, end: int) -> None:
        if end <= self._ranges_end:
            return
        try:
            # Not by allocate_file, which refuses where there is no room, also for a page that an
            # earlier life has backed already.
            os.posix_fallocate(self._fd, self._ranges_end, PAGE_BYTES)
        except OSError as error:
            raise ResourceUnavailable(
                f"can't get a page for {self._name}: {error.strerror}"
            ) from error
        self._ranges_end += PAGE_BYTES

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
