"""The object table: what the master knows of every object, in flat columns.

An object is a row. No Python object exists per row: 86 bytes of columns (`object_columns`) and
16 of index (`index`), about 100 bytes an object in all, and 21 for each extent beyond the first.

Columns are reservations of address space (`columns`), so growing copies nothing and what lies
behind the last row is given back. Free rows are used again first; when many are free `compact`
moves rows from the end into holes, a bounded number per call. So a row number is not an object's
identity: callers that keep one keep the seq with it and ask `rows_match`. A row with leases never
moves.

States: FREE, LIVE (in the index), REMOVED (out of the index, its extents still held because a lease
runs). Bits 0x04 to 0x40 are the caller's; 0x80 is a free row that the table has picked for its next
insertions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cenote.api.errors import InternalError
from cenote.policy.base import Links
from cenote.policy.chains import parent_mark

from .index import Vacancies
from .object_columns import (
    EXTENT,
    EXTENT_STRUCT,
    FREE,
    LIVE,
    RECORD,
    RECORD_ITEM,
    RECORD_STRUCT,
    REMOVED,
    ObjectColumns,
)

__all__ = ["EXTENT", "FREE", "LIVE", "RECORD", "REMOVED", "ObjectTable"]

_RECORD_BYTES = RECORD.itemsize
_EXTENT_BYTES = EXTENT.itemsize
_pack_record, _unpack_record = RECORD_STRUCT.pack_into, RECORD_STRUCT.unpack_from
_pack_extent, _unpack_extent = EXTENT_STRUCT.pack_into, EXTENT_STRUCT.unpack_from
_FIRST_EXTRA = RECORD.names.index("first_extra") if RECORD.names else 0
_NO_RECORD = bytes(_RECORD_BYTES)
_LEASE_ONE = np.uint32(1)

Digests = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
Extents = npt.NDArray[np.void]
Records = npt.NDArray[np.void]
Counts = npt.NDArray[np.int64]
Column = npt.ArrayLike
"""An array of n, or one value for all n."""


class ObjectTable(ObjectColumns):
    """Objects by digest. Rows are int64 arrays, digests uint64[n, 2], C-contiguous."""

    def __init__(self, max_rows: int = 1 << 27, *, checked: bool = False) -> None:
        """Address space for `max_rows` objects and twice as many further extents; no memory yet.

        `checked` verifies what callers guarantee (absent, distinct), at several times the cost.
        Raises ResourceUnavailable when the kernel refuses the address space.
        """
        super().__init__(max_rows)
        self._checked = checked

    # ---- lookups ------------------------------------------------------------------------------

    def lookup(self, digests: Digests) -> Rows:
        """Rows of digests, -1 where absent. A digest may come several times."""
        return self._index.find(digests)

    def vacancies(self, digests: Digests) -> Vacancies | None:
        """What `insert` of these can use, if they are all absent; None where one may be there."""
        return self._index.vacancies(digests)

    def lookup_one(self, low: int, high: int) -> int:
        """Row of the digest with these two words, or -1."""
        return self._index.find_one(low, high)

    def rows_match(self, rows: Rows, seqs: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which (row, seq) handles still mean a LIVE object."""
        known = (rows > 0) & (rows < self._space.high_water)
        at = np.where(known, rows, 0)
        matches: npt.NDArray[np.bool_] = self._seq[at] == seqs
        matches &= known
        matches &= (self._state.take(at) & LIVE) != 0
        return matches

    def seqs_match(self, rows: Rows, seqs: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which rows, that once held objects of these seqs, still do: LIVE, or REMOVED. (A row that
        was freed, or given back behind the last one, has a seq of 0.)"""
        same: npt.NDArray[np.bool_] = self._seq[rows] == seqs  # `take` would copy the column
        return same

    def records_of(self, rows: Rows) -> Records:
        """Copies of the records (RECORD) of rows."""
        return self._record_items.take(rows).view(RECORD)

    def record_of_one(self, row: int) -> tuple[int, ...]:
        """The fields of one RECORD, in its order."""
        return _unpack_record(self._record_view, row * _RECORD_BYTES)

    def extents_of(self, rows: Rows) -> tuple[Counts, Extents]:
        """How many extents each row has, and all of them (EXTENT), row by row, in their order."""
        counts = self._extent_counts[rows].astype(np.int64)
        if not np.count_nonzero(counts != 1):
            return counts, self._extent.take(rows).view(EXTENT)
        ends = np.cumsum(counts)
        starts = ends - counts
        out = np.empty(int(ends[-1]), np.complex128)
        out[starts] = self._extent.take(rows)
        several = np.flatnonzero(counts > 1)
        self._extras.fill(out, starts[several] + 1, self._first_extra[rows[several]])
        return counts, out.view(EXTENT)

    def extents_of_one(self, row: int) -> list[tuple[int, ...]]:
        """The extents of one row, each the fields of an EXTENT."""
        found = [_unpack_extent(self._extent_view, row * _EXTENT_BYTES)]
        node = int(self._first_extra[row])
        if node:
            view = self._extras.view
            found += [_unpack_extent(view, _EXTENT_BYTES * n) for n in self._extras.chain(node)]
        return found

    def live_rows(self, start: int, rows_max: int) -> tuple[Rows, int]:
        """LIVE rows among the `rows_max` ones from `start` on, and where to go on (0: at the end).

        Rows that `compact` moves meanwhile may be missed or seen twice: hold it off while a
        snapshot is under way.
        """
        stop = min(start + rows_max, self._space.high_water)
        rows = np.flatnonzero(self._state[start:stop] & LIVE) + start
        return rows, stop if stop < self._space.high_water else 0

    # ---- inserting ----------------------------------------------------------------------------

    def insert(
        self,
        digests: Digests,
        *,
        size_bytes: Column,
        checksum: Column,
        seq: Column,
        epoch: Column,
        namespace: Column,
        stamp: Column,
        extents: Extents,
        counts: Counts | None = None,
        tail_bytes: Column | None = None,
        replicas: Column = 1,
        shards: Column | None = None,
        flags: int = 0,
        vacancies: Vacancies | None = None,
    ) -> Rows:
        """Insert objects that are absent and distinct (the caller has looked them up); LIVE.

        `extents` is an EXTENT array: one a digest, or with `counts` (int64[n], each >= 1) that many
        for each, one object after the other. `flags` are state bits of the caller's; `vacancies`
        what was found of these digests. Returns rows.
        Raises ResourceUnavailable, having changed nothing, when the table is full.
        """
        n = len(digests)
        firsts: npt.NDArray[np.complex128] = extents.view(np.complex128)
        if self._checked:
            self._check_new(digests, len(extents), counts)
        record = np.zeros(n, RECORD)
        record["size_bytes"] = size_bytes
        record["checksum"] = checksum
        record["seq"] = seq
        record["epoch"] = epoch
        record["namespace"] = namespace
        record["extents"] = 1 if counts is None else counts
        record["replicas"] = replicas
        if tail_bytes is not None:
            record["tail_bytes"] = tail_bytes
        if shards is not None:
            record["shards"] = shards
        self._space.require(n)
        if counts is not None:
            self._extras.require(len(firsts) - n)
            firsts, record["first_extra"] = self._chain(counts, firsts)
        dense = not self._space.free_rows
        rows = self._space.take(n)
        at = slice(int(rows[0]), int(rows[0]) + n) if dense and n else rows
        self._digest[at] = digests.view(np.complex128).reshape(n)
        self._record_items[at] = record.view(RECORD_ITEM)
        self._extent[at] = firsts
        self._stamp[at] = stamp
        self._state[at] = LIVE | flags
        self._index.add(digests, rows, vacancies)
        return rows

    def _chain(
        self, counts: Counts, extents: npt.NDArray[np.complex128]
    ) -> tuple[npt.NDArray[np.complex128], npt.NDArray[np.uint32]]:
        """Each object's first extent, and the chain made of its others."""
        first = np.cumsum(counts) - counts
        others = np.ones(len(extents), np.bool_)
        others[first] = False
        return extents[first], self._extras.add(counts - 1, extents[others])

    def _check_new(self, digests: Digests, extents: int, counts: Counts | None) -> None:
        if len(np.unique(digests, axis=0)) != len(digests) or (self.lookup(digests) >= 0).any():
            raise InternalError("a digest to insert is in the table, or comes twice")
        if extents != (len(digests) if counts is None else int(counts.sum())):
            raise InternalError(f"{extents} extents for {len(digests)} objects")
        if counts is not None and len(counts) and int(counts.min()) < 1:
            raise InternalError("an object without an extent")

    def insert_one(
        self,
        low: int,
        high: int,
        *,
        size_bytes: int,
        checksum: int,
        seq: int,
        epoch: int,
        namespace: int,
        stamp: int,
        segment: int,
        slot: int,
        offset_units: int,
        length_units: int,
        replica: int = 0,
        shard: int = 0,
        tail_bytes: int = 0,
        replicas: int = 1,
        shards: int = 0,
        flags: int = 0,
    ) -> int:
        """`insert` for one object of one extent. Returns its row."""
        if self._checked and self.lookup_one(low, high) >= 0:
            raise InternalError("the digest to insert is in the table")
        row = self._space.take_one()
        words = self._digest_words
        words[2 * row] = low
        words[2 * row + 1] = high
        _pack_record(
            self._record_view, row * _RECORD_BYTES,
            size_bytes, checksum, seq, epoch, 0, namespace, tail_bytes, 1, replicas, shards,
        )  # fmt: skip
        _pack_extent(
            self._extent_view, row * _EXTENT_BYTES,
            segment, replica, shard, slot, offset_units, length_units,
        )  # fmt: skip
        self._stamp_words[row] = stamp
        self._state_view[row] = LIVE | flags
        self._index.add_one(low, high, row)
        return row

    # ---- changing and removing ----------------------------------------------------------------

    def set_extents(self, rows: Rows, counts: Counts, extents: Extents, replicas: Column) -> None:
        """Replace the extents of rows (distinct): `counts` (each >= 1) of `extents` for each.

        Raises ResourceUnavailable, having changed nothing, when no room for extents is left.
        """
        self._extras.require(len(extents) - len(rows))
        self._drop_extras(rows)
        firsts, chains = self._chain(counts, extents.view(np.complex128))
        self._extent[rows] = firsts
        self._first_extra[rows] = chains
        self._extent_counts[rows] = counts
        self._record["replicas"][rows] = replicas

    def lease(self, rows: Rows) -> None:
        """One more lease on each row; a row that comes twice gets two."""
        np.add.at(self._lease_count, rows, _LEASE_ONE)

    def unlease(self, rows: Rows) -> Rows:
        """One lease less on each row. Returns the REMOVED rows without any: free them now.

        Raises InternalError, having changed nothing, when a row has fewer leases than it comes.
        """
        np.subtract.at(self._lease_count, rows, _LEASE_ONE)
        left = self._lease_count.take(rows)
        if np.count_nonzero(left > np.uint32(0x8000_0000)):
            np.add.at(self._lease_count, rows, _LEASE_ONE)
            raise InternalError("a lease was released twice")
        over = rows[(left == 0) & ((self._state.take(rows) & REMOVED) != 0)]
        return np.unique(over) if len(over) > 1 else over

    def unlink(self, rows: Rows) -> None:
        """LIVE rows (distinct) leave the index: REMOVED, unfindable, their extents still held.

        Raises InternalError, having changed nothing, when one isn't LIVE.
        """
        states = self._state.take(rows)
        if np.count_nonzero(states & LIVE) != len(rows):
            raise InternalError("a row to unlink is not live")
        if self._checked:
            self._check_distinct(rows)
        self._index.remove(rows)
        self._state[rows] = states ^ (LIVE | REMOVED)

    def free(self, rows: Rows) -> None:
        """REMOVED rows (distinct, without leases) may be used anew; so may their extents' nodes.

        Raises InternalError, having changed nothing, when one isn't REMOVED or has a lease.
        """
        removed = self._state.take(rows) & REMOVED
        if np.count_nonzero(removed) != len(rows):
            raise InternalError("a row to free is not removed")
        if np.count_nonzero(self._lease_count.take(rows)):
            raise InternalError("a row to free is leased")
        if self._checked:
            self._check_distinct(rows)
        self._drop_extras(rows)
        self._seq[rows] = 0
        self._first_extra[rows] = 0
        self._pin[rows] = 0
        self._space.give(rows)

    def unlink_one(self, row: int) -> None:
        """`unlink` for one."""
        state = self._state_view[row]
        if not state & LIVE:
            raise InternalError("a row to unlink is not live")
        self._index.remove_one(row)
        self._state_view[row] = state ^ (LIVE | REMOVED)

    def free_one(self, row: int) -> None:
        """`free` for one."""
        if not self._state_view[row] & REMOVED:
            raise InternalError("a row to free is not removed")
        if self._lease_words[row]:
            raise InternalError("a row to free is leased")
        node = _unpack_record(self._record_view, row * _RECORD_BYTES)[_FIRST_EXTRA]
        if node:
            self._extras.drop(np.array([node]))
        self._record_view[row * _RECORD_BYTES : (row + 1) * _RECORD_BYTES] = _NO_RECORD
        self._pin_words[row] = 0
        self._space.give_one(row)

    def _drop_extras(self, rows: Rows) -> None:
        if self._extras.count:
            firsts = self._first_extra[rows]
            self._extras.drop(firsts[firsts != 0])

    @staticmethod
    def _check_distinct(rows: Rows) -> None:
        if len(np.unique(rows)) != len(rows):
            raise InternalError("a row comes twice")

    # ---- chains ---------------------------------------------------------------------------------

    @property
    def links(self) -> Links:
        """Of rows [0, high_water)."""
        return Links(self.digests[:, 0], self.parent[: self._space.high_water])

    def link_chain(self, rows: Rows, positions: Rows | None = None) -> None:
        """These LIVE rows are blocks of one prefix chain, in order: at these positions of it,
        ascending; None = one after the other."""
        before, after = rows[:-1], rows[1:]
        if positions is not None:
            next_to = positions[1:] - positions[:-1] == 1
            before, after = before[next_to], after[next_to]
        if len(after):
            self._has_links = True
            words = self._digest[before].view(np.uint64)[::2]
            self.parent[after] = parent_mark(words)

    # ---- giving memory back -------------------------------------------------------------------

    def compact(self, rows_max: int = 4096) -> tuple[Rows, Rows]:
        """One bounded step of giving memory back; cheap when there is nothing to do.

        Cuts free rows off the end; when more than a quarter are free, moves up to `rows_max` rows
        from the end into the lowest holes. Returns (old rows, new rows) of what moved. Rows with
        leases and REMOVED ones stay where they are.
        """
        space = self._space
        none = np.zeros(0, np.int64)
        self._extras.compact(self._first_extra[: space.high_water], 4 * rows_max)
        if space.free_rows * 8 < space.high_water and not space.pages_to_give:
            return none, none
        space.trim(16 * rows_max)
        if space.free_rows < 64 or space.free_rows * 4 < space.high_water:
            return none, none
        end = space.high_water
        start = max(1, end - 4 * rows_max)
        movable = (self._state[start:end] & LIVE).astype(np.bool_)
        movable &= self._lease_count[start:end] == 0
        old = np.flatnonzero(movable)[: -rows_max - 1 : -1] + start
        new = space.take_below(len(old), end)
        old = old[: len(new)]
        # Sources descend and holes ascend: those that would move up are a tail of both.
        keep = int(np.count_nonzero(new < old))
        space.give(new[keep:])
        old, new = old[:keep], new[:keep]
        self._index.move(old, new)
        for column in space.columns[: None if self._has_links else -1]:
            column.array[new] = column.array.take(old)
        self._seq[old] = 0
        self._first_extra[old] = 0
        self._pin[old] = 0
        if self._has_links:
            self.parent[old] = 0
        space.give(old)
        space.trim(16 * rows_max)
        return old, new

    def check(self) -> None:
        """Raise AssertionError unless all structures agree (for tests; O(rows))."""
        end = self._space.high_water
        self._space.check()
        self._index.check()
        live = np.flatnonzero(self._state[:end] & LIVE)
        assert len(live) == self._index.count
        assert np.array_equal(self.lookup(self.digests[live]), live)
        used = (self._state[:end] & (LIVE | REMOVED)) != 0
        assert self._space.used_rows == np.count_nonzero(used)
        assert not self._seq[:end][~used].any()
        self._extras.check(self._first_extra[:end])
        assert (
            int((self._extent_counts[:end][used].astype(np.int64) - 1).sum()) == self._extras.count
        )
