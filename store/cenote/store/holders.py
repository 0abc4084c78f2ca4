"""Whose the bytes of each unit of the segments are: kept only where credentials are asked for.

A column of u32 for each segment, one number for each 64 bytes (4 KiB on an SSD), which names a
*holder*: a grant that was shown for these units, or the namespace that was sealed there last. So
what a session may touch is told by a comparison of some numbers, whatever pieces it asks for:

    show     a grant's units become that grant's: older grants are void there, and readers of what
             was there before read it no more, before the first byte of the new comes
    seal     they become the namespace's: the grant has ended

The column takes a sixteenth of the memory, as far as that is in use.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import GrantRevoked
from cenote.api.rows import EXTENT

from .segment import Segment, SegmentSet

__all__ = ["Holders"]

UNIT_BYTES: Final = 64
DISK_UNIT_BYTES: Final = 4096
GRANTS_MAX: Final = 65_536
"""Of which this daemon knows at once; who comes back to an older one is refused, and puts anew."""
SHOWN_MAX: Final = 16_384
"""Grants of a session that are remembered, so that none is shown twice."""
SESSIONS_MAX: Final = 16_384
_SLOT_BITS: Final = 32

Numbers = NDArray[np.uint32]


@dataclass(slots=True)
class Holder:
    namespace_id: int
    period: int
    """Of the keys, when it was made."""
    session_id: bytes = b""
    grant_id: int = 0
    """0: sealed."""
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of a grant: segment and slot -> first byte, end."""


@final
class Holders:
    """Safe from several threads."""

    def __init__(self, segments: SegmentSet) -> None:
        self._segments = segments
        self._lock = threading.Lock()
        self._columns: dict[int, tuple[int, Numbers]] = {}
        """By the segment's index: bytes of a unit, holders."""
        self._holders: dict[int, Holder] = {}
        self._next = 1
        self._grants: dict[tuple[bytes, int], int] = {}
        """Oldest first."""
        self._sealed: dict[tuple[int, int], int] = {}
        """(Namespace, period) -> holder."""
        self._shown: dict[bytes, dict[int, None]] = {}
        self._floors: dict[bytes, int] = {}
        """By session: grants up to this one may have been forgotten."""

    # ---- units --------------------------------------------------------------------------------

    def _column(self, segment: Segment) -> tuple[int, Numbers]:
        found = self._columns.get(segment.index)
        if found is None:
            unit = UNIT_BYTES if segment.disk is None else DISK_UNIT_BYTES
            column = np.zeros(-(-segment.size_bytes // unit), np.uint32)
            found = self._columns.setdefault(segment.index, (unit, column))
        return found

    def _units(self, segment: Segment, offset: int, length: int) -> Numbers:
        unit, column = self._column(segment)
        return column[offset // unit : -(-(offset + length) // unit)]

    def _runs(self, rows: NDArray[np.void]) -> Iterator[Numbers]:
        """The units of EXTENT rows; of neighbours in one piece."""
        if not len(rows):
            return
        offsets = rows["offset"].astype(np.int64)
        # Each begins a unit of its own, and has the rest of its last one.
        ends = offsets + -(-rows["length"].astype(np.int64) // UNIT_BYTES) * UNIT_BYTES
        ids = rows["segment"]
        order = np.lexsort((offsets, ids))
        offsets, ends, ids = offsets[order], ends[order], ids[order]
        first = np.flatnonzero(np.r_[True, (offsets[1:] != ends[:-1]) | (ids[1:] != ids[:-1])])
        last = np.r_[first[1:], len(rows)] - 1
        for begin, end in zip(first.tolist(), last.tolist(), strict=True):
            segment = self._segments.by_id(int(ids[begin]))
            if segment is not None:
                start = int(offsets[begin])
                yield self._units(segment, start, int(ends[end]) - start)

    # ---- grants -------------------------------------------------------------------------------

    def show(
        self,
        session_id: bytes,
        grant_id: int,
        namespace_id: int,
        rows: NDArray[np.void],
        period: int,
    ) -> None:
        """A session has proven a grant (EXTENT rows of segments here), signed in this period.

        Raises GrantRevoked where it is not the latest of its units.
        """
        with self._lock:
            shown = self._shown.setdefault(session_id, {})
            if len(self._shown) > SESSIONS_MAX:
                self._shown.pop(next(iter(self._shown)))
            if grant_id in shown:
                return
            if grant_id <= self._floors.get(session_id, 0):
                raise GrantRevoked(f"grant {grant_id} is too old")
            for units in self._runs(rows):
                for number in np.unique(units).tolist():
                    self._refuse_older(self._holders.get(number), grant_id, period)
            number = self._new(Holder(namespace_id, period, session_id, grant_id, _slots_of(rows)))
            self._grants[session_id, grant_id] = number
            for units in self._runs(rows):
                units[:] = number
            shown[grant_id] = None
            self._forget_some(session_id, shown)

    @staticmethod
    def _refuse_older(held: Holder | None, grant_id: int, period: int) -> None:
        if held is None:
            return
        if held.grant_id > grant_id if held.grant_id else held.period > period:
            raise GrantRevoked(f"grant {grant_id} was given up: its space is another's by now")

    def _new(self, holder: Holder) -> int:
        number = self._next
        self._next = number + 1 if number < 0xFFFF_FFFF else 1
        self._holders[number] = holder
        return number

    def _forget_some(self, session_id: bytes, shown: dict[int, None]) -> None:
        if len(shown) > SHOWN_MAX:
            oldest = min(shown)
            del shown[oldest]
            self._floors[session_id] = max(self._floors.get(session_id, 0), oldest)
        while len(self._grants) > GRANTS_MAX:
            self._holders.pop(self._grants.pop(next(iter(self._grants))), None)

    def forget_session(self, session_id: bytes) -> None:
        """It is cut off, and never comes back."""
        with self._lock:
            self._shown.pop(session_id, None)
            self._floors.pop(session_id, None)
            for key in [key for key in self._grants if key[0] == session_id]:
                self._holders.pop(self._grants.pop(key), None)

    def may_write(self, session_id: bytes, grant_id: int, rows: NDArray[np.void]) -> bool:
        """Whether all of these EXTENT rows are that grant's, still."""
        number = self._grants.get((session_id, grant_id))
        return number is not None and all((units == number).all() for units in self._runs(rows))

    def may_write_one(
        self, session_id: bytes, grant_id: int, segment: Segment, offset: int, length: int
    ) -> bool:
        """The same for one extent."""
        number = self._grants.get((session_id, grant_id))
        return number is not None and bool((self._units(segment, offset, length) == number).all())

    # ---- namespaces ---------------------------------------------------------------------------

    def namespaces_of(self, segment: Segment, offset: int, length: int) -> set[int]:
        """Those whose bytes lie here; 0 among them where that is not known."""
        return self._namespaces(self._units(segment, offset, length))

    def namespaces_in(self, rows: NDArray[np.void]) -> set[int]:
        """The same for all of these EXTENT rows; of segments that are not here nothing."""
        return {found for units in self._runs(rows) for found in self._namespaces(units)}

    def _namespaces(self, units: Numbers) -> set[int]:
        if not len(units):
            return {0}
        first = int(units[0])
        numbers = [first] if (units == first).all() else np.unique(units).tolist()
        return {
            0 if (held := self._holders.get(number)) is None else held.namespace_id
            for number in numbers
        }

    def may_seal(self, namespace_id: int, row: tuple[int, int, int, int]) -> bool:
        """Whether what is at (segment, slot, offset, length) was written as that namespace's, to be
        sealed in that slot; by whom does not matter."""
        segment_id, slot, offset, length = row
        segment = self._segments.by_id(segment_id)
        if segment is None:
            return True  # it is stale, as the segment says
        units = self._units(segment, offset, length)
        held = self._holders.get(int(units[0])) if len(units) else None
        if held is None or held.namespace_id != namespace_id or not (units == units[0]).all():
            return False
        if not held.grant_id:  # once more
            return segment.namespace_at(slot) == namespace_id
        granted = held.slots.get(segment_id << _SLOT_BITS | slot)
        return granted is not None and granted[0] == offset and offset + length <= granted[1]

    def sealed(
        self, segment: Segment, namespace_id: int, offset: int, length: int, period: int
    ) -> None:
        """A slot for this namespace says that these bytes are its."""
        key = namespace_id, period
        number = self._sealed.get(key)
        if number is None:
            with self._lock:
                number = self._sealed.get(key)
                if number is None:
                    number = self._sealed[key] = self._new(Holder(namespace_id, period))
        self._units(segment, offset, length)[:] = number


def _slots_of(rows: NDArray[np.void]) -> dict[int, tuple[int, int]]:
    assert rows.dtype == EXTENT
    found = {}
    for segment, slot, offset, length in rows.tolist():
        end = offset + -(-length // UNIT_BYTES) * UNIT_BYTES
        found[segment << _SLOT_BITS | slot] = (offset, end)
    return found
