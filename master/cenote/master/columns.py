"""Columns that grow without copying and give memory back: reservations, and which rows are free.

A column is a private anonymous mapping of its largest size, made once. The kernel backs a page when
it is first written, so growing is free of copies and stalls, a NumPy view made once stays valid,
and `discard` hands the pages of a range back (they read as zeros from then on).

`RowSpace` says which rows of a table are taken. It hands out the lowest free ones, so that living
rows stay dense and what falls free gathers at the end, where it can be given back.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from cenote.api.errors import InternalError, ResourceUnavailable

__all__ = ["PAGE_BYTES", "RESERVED", "Reservation", "RowSpace"]

PAGE_BYTES = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000 if not hasattr(mmap, "MAP_NORESERVE") else int(mmap.MAP_NORESERVE)

Rows = npt.NDArray[np.int64]


class Reservation:
    """Room for `capacity` items of `dtype`, all zero, of which only touched pages take memory.

    `map` is the raw mapping, `array` a NumPy view of it and `view` a memoryview of bytes, each as
    long as the whole reservation.

    Raises ResourceUnavailable when the kernel refuses the address space.
    """

    __slots__ = ("array", "item_bytes", "map", "view")

    def __init__(self, dtype: npt.DTypeLike, capacity: int) -> None:
        self.item_bytes = np.dtype(dtype).itemsize
        size_bytes = max(capacity * self.item_bytes, PAGE_BYTES)
        try:
            self.map = mmap.mmap(
                -1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            )
        except OSError as error:
            raise ResourceUnavailable(
                f"can't reserve {size_bytes >> 20} MiB of address space for {capacity} objects:"
                f" {error.strerror}",
                remedy="lower the largest number of objects, raise `ulimit -v`,"
                " or set vm.overcommit_memory to 0 or 1",
            ) from error
        self.array: npt.NDArray[np.generic] = np.frombuffer(self.map, dtype=dtype, count=capacity)
        self.view = memoryview(self.map)

    def discard(self, start: int, stop: int) -> None:
        """Give back the whole pages within items [start, stop); they read as zeros afterwards."""
        first = -(-start * self.item_bytes // PAGE_BYTES) * PAGE_BYTES
        last = stop * self.item_bytes // PAGE_BYTES * PAGE_BYTES
        if last > first:
            self.map.madvise(mmap.MADV_DONTNEED, first, last - first)


RESERVED = 0x80
"""Mark of a free row that lies ready to be taken."""

_BLOCK_ROWS = 64
_BLOCK_SHIFT = 6
_SCAN_BLOCKS = 1 << 16
_COLLECT_ROWS_MIN = 1024
_READY_ROWS_MAX = 4096
_SPARE_ROWS = 4096
_ONE = np.uint8(1)


class RowSpace:
    """The free rows of a table with a mark column (uint8: 0 = free), the lowest first by and large.

    Free rows are counted in blocks of 64 rows. Up to 4,096 of them lie `ready` on a stack: what was
    given back last, and when there is none, what is collected from the lowest blocks that have
    some. So a table that replaces rows pays next to nothing for finding them, and one that has
    shrunk fills from its start. Taking the end of the table goes before searching far.

    Row 0 is never handed out. After `take` the caller must set the rows' marks to something other
    than 0 and RESERVED; `give` clears them. Rows in [1, high_water) are in use or free, those above
    were never used, or trimmed.
    """

    __slots__ = (
        "_counts",
        "_hint",
        "_mark",
        "_mark_blocks",
        "_mark_bytes",
        "_ready",
        "_ready_rows",
        "_ready_words",
        "_touched",
        "capacity",
        "columns",
        "free_rows",
        "high_water",
    )

    def __init__(self, mark: Reservation, columns: list[Reservation], capacity: int) -> None:
        """`mark` is a reservation of uint8 for `capacity` rows, a multiple of 64.

        `columns` are the table's others, an item a row: `trim` gives their ends back.
        """
        if capacity % _BLOCK_ROWS:
            raise ValueError(f"capacity {capacity} is not a multiple of {_BLOCK_ROWS}")
        self.capacity = capacity
        self._mark: npt.NDArray[np.uint8] = mark.array.view(np.uint8)
        self._mark_blocks = self._mark.reshape(-1, _BLOCK_ROWS)
        self._mark_bytes = mark.view
        counts = Reservation(np.uint8, capacity // _BLOCK_ROWS)
        self._counts: npt.NDArray[np.uint8] = counts.array.view(np.uint8)
        self.columns = [mark, *columns]
        self._ready: Rows = np.zeros(_READY_ROWS_MAX, np.int64)
        self._ready_words = self._ready.data
        self._ready_rows = 0
        self._hint = 0
        self._mark[0] = RESERVED
        self.free_rows = 0
        """Rows below high_water that are free, ready ones included."""
        self.high_water = self._touched = 1

    @property
    def used_rows(self) -> int:
        return self.high_water - 1 - self.free_rows

    def require(self, rows: int) -> None:
        """Raise ResourceUnavailable unless that many rows can be taken."""
        if rows > self.free_rows + self.capacity - self.high_water:
            raise ResourceUnavailable(
                f"the table is full: {self.used_rows} of {self.capacity - 1} rows are in use",
                remedy="raise the master's largest number of objects, or store larger ones",
            )

    # ---- taking and giving --------------------------------------------------------------------

    def take_one(self) -> int:
        """One free row. Raises ResourceUnavailable when all are in use."""
        if self.free_rows:
            if not self._ready_rows:
                self._lay_ready(self._collect(_COLLECT_ROWS_MIN)[::-1])
            self._ready_rows -= 1
            self.free_rows -= 1
            return self._ready_words[self._ready_rows]
        row = self.high_water
        if row >= self.capacity:
            self.require(1)
        self.high_water = row + 1
        return row

    def take(self, count: int) -> Rows:
        """`count` free rows. Raises ResourceUnavailable, having taken none, when fewer are left."""
        self.require(count)
        if not self.free_rows:
            return self._take_end(count)
        if count <= self._ready_rows:
            return self._take_ready(count)
        parts = [self._take_ready(self._ready_rows)]
        count -= len(parts[0])
        while count and self.free_rows:
            found = self._collect(max(count, _COLLECT_ROWS_MIN))
            self.free_rows -= min(len(found), count)
            parts.append(found[:count])
            self._lay_ready(found[count:][::-1])
            count -= len(parts[-1])
            # What a bounded search did not reach may stay where it is, unless it is the last.
            if count <= self.capacity - self.high_water:
                break
        if count:
            parts.append(self._take_end(count))
        return np.concatenate(parts)

    def _take_end(self, count: int) -> Rows:
        start = self.high_water
        self.high_water = start + count
        return np.arange(start, start + count)

    def _take_ready(self, count: int) -> Rows:
        stop = self._ready_rows
        self._ready_rows = stop - count
        self.free_rows -= count
        return self._ready[stop - count : stop].copy()

    def give_one(self, row: int) -> None:
        """Row is free again. It must be in use."""
        if self._ready_rows < _READY_ROWS_MAX:
            self._ready_words[self._ready_rows] = row
            self._ready_rows += 1
            self._mark_bytes[row] = RESERVED
            self.free_rows += 1
        else:
            self.give(np.array([row]))

    def give(self, rows: Rows) -> None:
        """Rows (distinct, in use) are free again."""
        self.free_rows += len(rows)
        if len(rows) <= _READY_ROWS_MAX - self._ready_rows:
            self._mark[rows] = RESERVED
            self._lay_ready(rows)
        else:
            self._count_free(rows)

    def _lay_ready(self, rows: Rows) -> None:
        """Rows, marked RESERVED and in `free_rows`, go on the stack."""
        self._ready[self._ready_rows : self._ready_rows + len(rows)] = rows
        self._ready_rows += len(rows)

    def _count_free(self, rows: Rows) -> None:
        """Rows, already in `free_rows`, become free ones that must be searched for."""
        self._mark[rows] = 0
        blocks = rows >> _BLOCK_SHIFT
        np.add.at(self._counts, blocks, _ONE)
        self._hint = min(self._hint, int(blocks.min()))

    def flush_ready(self) -> None:
        """Clear the stack, so that the lowest rows go first again."""
        if self._ready_rows:
            self._count_free(self._ready[: self._ready_rows])
            self._ready_rows = 0

    def take_below(self, count: int, limit: int) -> Rows:
        """Up to `count` of the lowest free rows, ascending, all below `limit`."""
        self.flush_ready()
        if not self.free_rows or not count:
            return np.zeros(0, np.int64)
        found = self._collect(count)
        taken = found[: min(count, int(np.searchsorted(found, limit)))]
        if len(taken) < len(found):
            self._count_free(found[len(taken) :])
        self.free_rows -= len(taken)
        return taken

    def _collect(self, want: int) -> Rows:
        """About `want` rows, ascending, of the lowest blocks with free ones, marked RESERVED.

        Bounded: at most 65,536 blocks with free rows are looked at. There must be free rows that
        aren't ready.
        """
        blocks_end = (self.high_water + _BLOCK_ROWS - 1) >> _BLOCK_SHIFT
        hint = self._hint
        while True:
            counts = self._counts[hint : min(hint + _SCAN_BLOCKS, blocks_end)]
            blocks = np.flatnonzero(counts != 0)
            if len(blocks):
                break
            hint += _SCAN_BLOCKS
            if hint >= blocks_end:
                raise InternalError(f"{self.free_rows} free rows are nowhere to be found")
        reached = np.cumsum(counts.take(blocks), dtype=np.int64)
        blocks = blocks[: int(np.searchsorted(reached, want)) + 1] + hint
        free = np.flatnonzero(self._mark_blocks.take(blocks, axis=0) == 0)
        found = (blocks.take(free >> _BLOCK_SHIFT) << _BLOCK_SHIFT) + (free & (_BLOCK_ROWS - 1))
        if int(found[-1]) >= self.high_water:
            found = found[found < self.high_water]
        self._mark[found] = RESERVED
        self._counts[blocks] = 0
        self._hint = int(blocks[-1])
        return found

    # ---- giving memory back ---------------------------------------------------------------------

    def trim(self, rows_max: int) -> int:
        """Lower high_water past free rows at the end, by at most `rows_max`; returns by how many.

        Also gives pages behind the end back, those of at most as many rows. They are kept while
        they are less than an eighth of the table, so that a table that breathes does not fault.
        """
        end = self.high_water
        self._touched = max(self._touched, end)
        new_end = end
        if self.free_rows:
            self.flush_ready()
            start = max(end - rows_max, 1)
            used = np.flatnonzero(self._mark[start:end])
            new_end = start + int(used[-1]) + 1 if len(used) else start
        if new_end < end:
            block = new_end >> _BLOCK_SHIFT
            first = block * _BLOCK_ROWS
            self._counts[block : (end >> _BLOCK_SHIFT) + 1] = 0
            self._counts[block] = (new_end - first) - np.count_nonzero(self._mark[first:new_end])
            self.high_water = new_end
            self.free_rows -= end - new_end
        if self.pages_to_give:
            # Steps meet at whole pages of every column, lest each leaves a page behind.
            first = max(new_end, (self._touched - rows_max) // PAGE_BYTES * PAGE_BYTES)
            stop = min(-(-self._touched // PAGE_BYTES) * PAGE_BYTES, self.capacity)
            for column in self.columns:
                column.discard(first, stop)
            self._touched = first
        return end - new_end

    @property
    def pages_to_give(self) -> bool:
        """Whether enough pages behind the end are held to be worth giving back by `trim`."""
        return self._touched - self.high_water > (self.high_water >> 3) + _SPARE_ROWS

    @property
    def memory_bytes(self) -> int:
        """Resident bytes of all columns, estimated: those of rows up to the last touched one."""
        rows = max(self._touched, self.high_water)
        return rows * sum(column.item_bytes for column in self.columns) + rows // _BLOCK_ROWS

    def check(self) -> None:
        """Raise AssertionError unless the counts agree with the marks (for tests; O(rows))."""
        end = self.high_water
        free = np.flatnonzero(self._mark[:end] == 0)
        ready = self._ready[: self._ready_rows]
        counts = np.bincount(free >> _BLOCK_SHIFT, minlength=-(-end // _BLOCK_ROWS))
        assert np.array_equal(counts, self._counts[: len(counts)])
        assert not self._counts[len(counts) :][:4096].any()
        assert self.free_rows == len(free) + len(ready)
        assert len(np.unique(ready)) == len(ready)
        assert (self._mark[ready] == RESERVED).all()
        assert np.count_nonzero(self._mark[:end] == RESERVED) == len(ready) + 1
        assert not self._mark[end : end + 4096].any()
        assert not len(free) or self._hint <= int(free[0]) >> _BLOCK_SHIFT
