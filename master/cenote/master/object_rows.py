"""Reading the object table a batch of rows at a time, as plain words instead of named fields."""

from __future__ import annotations

from struct import Struct

import numpy as np
from numpy.typing import NDArray

from .extents import EXTENT, EXTENT_FORMAT
from .heat_samples import Heat
from .objects import LIVE, REMOVED, ObjectTable
from .segments import Segments
from .spans import NO_SPANS, SEGMENT_MASK, Spans, from_extents, segments_of

__all__ = ["INCARNATION_MASK", "RECORD_WORDS", "ObjectRows", "Rows"]

INCARNATION_MASK = np.uint64(0xFFFF)
"""Of the last word of an object's record: whose it is."""
RECORD_WORDS = 5
_EXTENT_BYTES = EXTENT.itemsize
_unpack_extent = Struct(EXTENT_FORMAT).unpack_from

Rows = NDArray[np.int64]


class ObjectRows:
    """Views of the table's columns, and what is often asked of some rows (int64, none -1)."""

    def __init__(self, objects: ObjectTable, segments: Segments) -> None:
        self.objects = objects
        self.segments = segments
        self.heat = Heat()
        # Whole reservations of the table's columns: they stay valid however it grows.
        self.record_flat = objects._record.view(np.uint64)
        self.owner_flat = self.record_flat.view(np.uint16)[(RECORD_WORDS - 1) * 4 :]
        """Whose each row is, at every 20th place."""
        self.extent_flat = objects._extent.view(np.uint64)
        self.extent_pairs = self.extent_flat.reshape(-1, 2)
        self.extent_words = self.extent_flat.view(np.uint32)
        self.digest_column = objects._digest
        self.stamp = objects._stamp
        self.state = objects._state
        self.lease_count = objects._lease_count
        self.pin = objects._pin
        self.stamp_words = memoryview(self.stamp.data)
        self.lease_words = memoryview(self.lease_count.data)
        self.state_bytes = memoryview(self.state.data)
        self.record_of = objects.record_of_one
        self._extent_bytes = objects._extent_view
        self.pinned_bytes = 0
        self.pinned_objects = 0

    def extent_of(self, row: int) -> tuple[int, ...]:
        """The first extent's fields."""
        return _unpack_extent(self._extent_bytes, row * _EXTENT_BYTES)

    def is_readable(self, row: int) -> bool:
        """`readable_rows` for one."""
        return self.segments.all_readable or bool(self.readable_rows(np.array([row]))[0])

    def is_settled(self, row: int) -> bool:
        """Whether one can be read and is known to be sealed; False where that takes a closer look,
        as while daemons have not attached."""
        return self.segments.all_attached and self.is_readable(row)

    def records_of(self, rows: Rows) -> NDArray[np.uint64]:
        """The records as words, uint64[n, 5].

        Size, checksum, seq, epoch | first extra extent << 32,
        incarnation | tail bytes << 16 | extents << 32 | replicas << 48 | shards << 56.
        """
        return self.objects.records_of(rows).view(np.uint64).reshape(-1, RECORD_WORDS)

    def note_heat(self, rows: Rows) -> None:
        """These were read."""
        chosen = self.heat.choose(rows)
        if len(chosen):
            self.heat.note(chosen, self.seqs_of(chosen))

    def digests_of(self, rows: Rows) -> NDArray[np.uint64]:
        return self.digest_column.take(rows).view(np.uint64).reshape(-1, 2)

    def seqs_of(self, rows: Rows) -> NDArray[np.uint64]:
        return self.record_flat.take(rows * RECORD_WORDS + 2)

    def sizes_of(self, rows: Rows) -> NDArray[np.uint64]:
        return self.record_flat.take(rows * RECORD_WORDS)

    def incarnations_of(self, rows: Rows) -> NDArray[np.int64]:
        tail = self.record_flat.take(rows * RECORD_WORDS + 4)
        return (tail & INCARNATION_MASK).astype(np.int64)

    def spans_of(self, rows: Rows) -> tuple[NDArray[np.int64], Spans]:
        """(extents of each row, all of them)."""
        counts, extents = self.objects.extents_of(rows)
        return counts, from_extents(extents)

    def readable_rows(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows have a whole replica on nodes that are not dead."""
        if self.segments.all_readable:
            return np.ones(len(rows), np.bool_)
        return self._rows_in(rows, self.segments.readable)

    def settled_rows(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows have a whole replica on nodes that attached to this epoch: these are sealed,
        or on their way. Of the others the journal tells, and not whether they were sealed."""
        if self.segments.all_attached:
            return np.ones(len(rows), np.bool_)
        return self._rows_in(rows, self.segments.attached)

    def _rows_in(self, rows: Rows, segments: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which rows have a whole replica in these segments, a mask by id."""
        words = self.record_flat.take(rows * RECORD_WORDS + 4)
        there: NDArray[np.bool_] = segments[
            self.extent_flat.take(rows * 2) & np.uint64(SEGMENT_MASK)
        ]
        several = np.flatnonzero(((words >> np.uint64(32)) & np.uint64(0xFFFF)) != 1)
        if len(several):
            counts, spans = self.spans_of(rows[several])
            there[several] = self._has_whole_replica(counts, spans, segments)
        return there

    def verified_rows(self, rows: Rows) -> NDArray[np.bool_]:
        """Of which rows a lease proves every replica."""
        counts, spans = self.spans_of(rows)
        proven = self.segments.verified[segments_of(spans)]
        found = np.ones(len(rows), np.bool_)
        found[np.repeat(np.arange(len(rows)), counts)[~proven]] = False
        return found

    @staticmethod
    def _has_whole_replica(
        counts: NDArray[np.int64], spans: Spans, segments: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        owner = np.repeat(np.arange(len(counts)), counts)
        replica = (spans[:, 0] >> 16) & 0xFF
        pair = owner * 256 + replica
        up = segments[segments_of(spans)]
        pairs, at = np.unique(pair, return_inverse=True)
        whole = np.ones(len(pairs), np.bool_)
        whole[at[~up]] = False
        found = np.zeros(len(counts), np.bool_)
        found[pairs[whole] // 256] = True
        return found

    def are_there(self, digests: NDArray[np.uint64], seqs: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of these objects are LIVE in these versions."""
        return self.objects.rows_match(self.objects.lookup(digests), seqs)

    def rows_in_segment(self, segment_id: int) -> tuple[Rows, Spans]:
        """(row of each extent in the segment, those extents), REMOVED rows included."""
        objects = self.objects
        used = (objects.state & (LIVE | REMOVED)) != 0
        single = np.flatnonzero(used & (objects.segment == segment_id) & (objects.extents == 1))
        spans = from_extents(objects.extents_of(single)[1]) if len(single) else NO_SPANS
        several = np.flatnonzero(used & (objects.extents > 1))
        if not len(several):
            return single, spans
        counts, more = self.spans_of(several)
        here = segments_of(more) == segment_id
        rows = np.concatenate((single, np.repeat(several, counts)[here]))
        return rows, np.concatenate((spans, more[here]))

    def units_of_rows(self, rows: Rows) -> NDArray[np.int64]:
        counts, spans = self.spans_of(rows)
        ends = np.cumsum(counts)
        sums: NDArray[np.int64] = np.add.reduceat(spans[:, 3].astype(np.int64), ends - counts)
        return sums

    def clear_pins(self, rows: Rows) -> Rows:
        """Take the pins off rows; returns those that had one."""
        pinned: Rows = rows[self.pin.take(rows) != 0]
        if len(pinned):
            self.pin[pinned] = 0
            self.pinned_objects -= len(pinned)
            self.pinned_bytes -= int(self.sizes_of(pinned).sum())
        return pinned

    def ssd_units_of(self, counts: NDArray[np.int64], spans: Spans) -> NDArray[np.int64]:
        """Units on SSDs of each of some objects, of which these are all extents."""
        lengths = np.where(self.segments.on_ssd[segments_of(spans)], spans[:, 3], 0)
        starts = np.cumsum(counts) - counts
        sums: NDArray[np.int64] = np.add.reduceat(lengths.astype(np.int64), starts)
        return sums
