"""The object table's layout: which columns an object's row has, and views of them.

    digest    16   who it is: XXH3-128 of the key, seeded by the namespace
    record    40   size, checksum, version (epoch, seq), namespace, counts: one gather for a reply
    extent    16   where its first extent lies; further ones are chained (`extents.ExtraExtents`)
    stamp      8   }
    state      1   } what eviction scans, each a column of its own
    lease_count 4  }
    pin        4   }
    parent     4   what stands before it in its chain; no memory where no policy asks for it

Fields that are wanted together lie together (a row of `record` or `extent` is one gather and about
one cache line), fields that are scanned lie apart.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from .columns import Reservation, RowSpace
from .extents import EXTENT, EXTENT_FORMAT, ExtraExtents
from .index import DigestIndex

__all__ = ["EXTENT", "FREE", "LIVE", "RECORD", "REMOVED", "ObjectColumns"]

FREE: Final = 0
LIVE: Final = 1
REMOVED: Final = 2

RECORD = np.dtype(
    [
        ("size_bytes", "<u8"),
        ("checksum", "<u8"),
        ("seq", "<u8"),
        ("epoch", "<u4"),
        ("first_extra", "<u4"),
        ("namespace", "<u2"),
        ("tail_bytes", "<u2"),
        ("extents", "<u2"),
        ("replicas", "u1"),
        ("shards", "u1"),
    ]
)
"""What a reply needs of an object, 40 bytes."""
RECORD_STRUCT = struct.Struct("<QQQIIHHHBB")
RECORD_ITEM = np.dtype((np.void, RECORD.itemsize))
EXTENT_STRUCT = struct.Struct(EXTENT_FORMAT)

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


class ObjectColumns:
    """Columns as attributes: NumPy views of rows [0, high_water), writable.

    FREE rows are included; their other columns are meaningless but for seq, which is 0. A view
    shows the rows there were when it was taken: take it anew for each use. Row 0 is never used.
    """

    def __init__(self, max_rows: int) -> None:
        capacity = -(-(max_rows + 1) // 64) * 64
        digest = Reservation(np.complex128, capacity)
        record = Reservation(RECORD, capacity)
        extent = Reservation(np.complex128, capacity)
        stamp = Reservation(np.uint64, capacity)
        state = Reservation(np.uint8, capacity)
        lease_count = Reservation(np.uint32, capacity)
        pin = Reservation(np.uint32, capacity)
        parent = Reservation(np.uint32, capacity)
        columns = [digest, record, extent, stamp, lease_count, pin, parent]
        self._space = RowSpace(state, columns, capacity)
        self._index = DigestIndex(digest, capacity)
        self._extras = ExtraExtents(2 * capacity)
        # NumPy moves complex128 and plain voids several times faster than structured rows.
        self._digest = digest.array.view(np.complex128)
        self._record: npt.NDArray[np.void] = record.array.view(RECORD)
        self._record_items: npt.NDArray[np.void] = record.array.view(RECORD_ITEM)
        self._seq = self._record["seq"]
        self._extent_counts = self._record["extents"]
        self._first_extra = self._record["first_extra"]
        self._extent = extent.array.view(np.complex128)
        self._extent_rows: npt.NDArray[np.void] = extent.array.view(EXTENT)
        self._stamp = stamp.array.view(np.uint64)
        self._state = state.array.view(np.uint8)
        self._lease_count = lease_count.array.view(np.uint32)
        self._pin = pin.array.view(np.uint32)
        self._has_links = False
        """Whether any was ever written to `parent`, the last column."""
        self.parent: U32 = parent.array.view(np.uint32)
        """`parent_mark` of the key before it in its chain, 0 where none is known; all rows."""
        # The same memory for single objects: a memoryview's item costs a third of NumPy's.
        self._digest_words = digest.view.cast("Q")
        self._record_view, self._extent_view = record.view, extent.view
        self._stamp_words, self._lease_words = stamp.view.cast("Q"), lease_count.view.cast("I")
        self._state_view, self._pin_words = state.view, pin.view.cast("I")

    @property
    def digests(self) -> U64:
        """uint64[:, 2]."""
        return self._digest[: self._space.high_water].view(np.uint64).reshape(-1, 2)

    @property
    def stamp(self) -> U64:
        """When it was last used: the caller's clock or counter."""
        return self._stamp[: self._space.high_water]

    @property
    def state(self) -> U8:
        """FREE, or LIVE or REMOVED with the caller's flags."""
        return self._state[: self._space.high_water]

    @property
    def lease_count(self) -> U32:
        """Running leases."""
        return self._lease_count[: self._space.high_water]

    @property
    def pin(self) -> U32:
        """Not 0: not to be evicted."""
        return self._pin[: self._space.high_water]

    @property
    def size_bytes(self) -> U64:
        """Payload size."""
        return self._record["size_bytes"][: self._space.high_water]

    @property
    def checksum(self) -> U64:
        """XXH3-64 of the payload."""
        return self._record["checksum"][: self._space.high_water]

    @property
    def seq(self) -> U64:
        """Second half of the version."""
        return self._record["seq"][: self._space.high_water]

    @property
    def epoch(self) -> U32:
        """First half of the version."""
        return self._record["epoch"][: self._space.high_water]

    @property
    def namespace(self) -> U16:
        """Index of the namespace incarnation."""
        return self._record["namespace"][: self._space.high_water]

    @property
    def tail_bytes(self) -> U16:
        """Length of the key kept behind the payload, or 0."""
        return self._record["tail_bytes"][: self._space.high_water]

    @property
    def extents(self) -> U16:
        """Extents in all."""
        return self._record["extents"][: self._space.high_water]

    @property
    def replicas(self) -> U8:
        """Replicas in all."""
        return self._record["replicas"][: self._space.high_water]

    @property
    def shards(self) -> U8:
        """Shards that make the object complete, or 0."""
        return self._record["shards"][: self._space.high_water]

    @property
    def segment(self) -> U16:
        """Segment of the first extent."""
        return self._extent_rows["segment"][: self._space.high_water]

    @property
    def slot(self) -> U32:
        """Slot of the first extent."""
        return self._extent_rows["slot"][: self._space.high_water]

    @property
    def offset_units(self) -> U32:
        """Where the first extent starts."""
        return self._extent_rows["offset_units"][: self._space.high_water]

    @property
    def length_units(self) -> U32:
        """How long the first extent is."""
        return self._extent_rows["length_units"][: self._space.high_water]

    @property
    def live_count(self) -> int:
        """LIVE objects."""
        return self._index.count

    @property
    def used_rows(self) -> int:
        """LIVE and REMOVED rows."""
        return self._space.used_rows

    @property
    def extra_extents(self) -> int:
        """Extents beyond each object's first."""
        return self._extras.count

    @property
    def high_water(self) -> int:
        """No row from here on is used."""
        return self._space.high_water

    def memory_bytes(self) -> int:
        """Resident bytes of the table, estimated from the pages that were touched."""
        unused = 0 if self._has_links else self._space.high_water * self.parent.itemsize
        return (
            self._space.memory_bytes - unused + self._index.memory_bytes + self._extras.memory_bytes
        )
