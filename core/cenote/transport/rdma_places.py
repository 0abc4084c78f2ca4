"""What an RDMA call moves, as columns: where it lies here and there, cut and merged for the device.

Extents become pieces (each in one registration of the daemon), pieces become runs (neighbours on
both sides are one), and a run that is longer than the device's largest message becomes several.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import ProtocolError
from cenote.v1 import store_pb2

from .base import ExtentArray, U64Array

__all__ = ["NOWHERE", "IndexArray", "Pieces", "Places"]

IndexArray = NDArray[np.int64]
NOWHERE: Final = -1


@dataclass(frozen=True, slots=True)
class Pieces:
    """Columns: `lengths[i]` bytes between `local[i]` here and `remote[i]` there."""

    items: IndexArray
    """Which item of the batch it belongs to; rising."""
    local: U64Array
    remote: U64Array
    lengths: U64Array
    registrations: IndexArray
    """That `remote` lies in."""

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, chosen: slice | NDArray[np.bool_] | IndexArray) -> Pieces:
        return Pieces(
            self.items[chosen],
            self.local[chosen],
            self.remote[chosen],
            self.lengths[chosen],
            self.registrations[chosen],
        )

    def at(self, local: U64Array) -> Pieces:
        """The same, with other addresses here."""
        return Pieces(self.items, local, self.remote, self.lengths, self.registrations)

    def merged(self, regions: IndexArray) -> tuple[Pieces, IndexArray]:
        """Neighbours on both sides as one, and the local region of each. Raises nothing."""
        if len(self) < 2:
            return self, regions
        ends = self.lengths[:-1]
        breaks = (
            (self.local[:-1] + ends != self.local[1:])
            | (self.remote[:-1] + ends != self.remote[1:])
            | (self.registrations[:-1] != self.registrations[1:])
            | (regions[:-1] != regions[1:])
        )
        if breaks.all():
            return self, regions
        firsts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(breaks) + 1))
        runs = Pieces(
            self.items[firsts],
            self.local[firsts],
            self.remote[firsts],
            np.add.reduceat(self.lengths, firsts),
            self.registrations[firsts],
        )
        return runs, regions[firsts]

    def cut(self, bytes_max: int, regions: IndexArray) -> tuple[Pieces, IndexArray]:
        """None longer than `bytes_max`."""
        if not len(self) or int(self.lengths.max()) <= bytes_max:
            return self, regions
        most = np.uint64(bytes_max)
        counts = ((self.lengths + most - np.uint64(1)) // most).astype(np.int64)
        which = np.repeat(np.arange(len(self)), counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        starts = (np.arange(len(which)) - before).astype(np.uint64) * most
        pieces = Pieces(
            self.items[which],
            self.local[which] + starts,
            self.remote[which] + starts,
            np.minimum(self.lengths[which] - starts, most),
            self.registrations[which],
        )
        return pieces, regions[which]


@dataclass(frozen=True, slots=True)
class _Segment:
    offsets: U64Array
    ends: U64Array
    addresses: U64Array
    """Less the offsets: add an offset in the segment to get the daemon's address."""
    first: int
    """Number of its first registration."""
    offset_list: list[int]
    end_list: list[int]
    address_list: list[int]
    """The same as numbers, and the addresses of the registrations themselves."""


@final
class Places:
    """What a daemon said of its registrations. They are numbered by segment and offset."""

    def __init__(self, reply: store_pb2.RdmaReply) -> None:
        """Raises ProtocolError."""
        rows = sorted(reply.registrations, key=lambda row: (row.segment_id, row.offset))
        count = len(reply.devices)
        if any(len(row.remote_keys) != count or not row.length for row in rows):
            raise ProtocolError("the daemon's RDMA registrations are not what they should be")
        keys = np.array([list(row.remote_keys) for row in rows], np.uint64)
        keys = keys.reshape(len(rows), count)
        self.keys: dict[str, U64Array] = {
            name: np.ascontiguousarray(keys[:, i]) for i, name in enumerate(reply.devices)
        }
        """By the daemon's device: a key for each registration, 0 where it has none."""
        self.covered_bytes = sum(row.length for row in rows)
        self._segments: dict[int, _Segment] = {}
        first = 0
        for segment_id in dict.fromkeys(row.segment_id for row in rows):
            mine = [row for row in rows if row.segment_id == segment_id]
            offsets = np.array([row.offset for row in mine], np.uint64)
            lengths = np.array([row.length for row in mine], np.uint64)
            bases = np.array([row.address for row in mine], np.uint64) - offsets
            self._segments[segment_id] = _Segment(
                offsets,
                offsets + lengths,
                bases,
                first,
                [row.offset for row in mine],
                [row.offset + row.length for row in mine],
                [row.address for row in mine],
            )
            first += len(mine)

    def first_bytes(self, device: str) -> Pieces | None:
        """Some bytes that can be read over this device of the daemon; no address here yet."""
        keys = self.keys.get(device)
        segment = next(iter(self._segments.values()), None)
        if keys is None or segment is None or not keys[segment.first]:
            return None
        return Pieces(
            np.zeros(1, np.int64),
            np.zeros(1, np.uint64),
            segment.addresses[:1] + segment.offsets[:1],
            np.ones(1, np.uint64),
            np.array([segment.first], np.int64),
        )

    def find_one(self, segment_id: int, offset: int, length: int) -> tuple[int, int] | None:
        """(the daemon's address, registration) of one extent; None where it is not in one piece."""
        segment = self._segments.get(segment_id)
        if segment is None:
            return None
        at = bisect_right(segment.offset_list, offset) - 1
        if at < 0 or length <= 0 or offset + length > segment.end_list[at]:
            return None
        return segment.address_list[at] + offset - segment.offset_list[at], segment.first + at

    def find(self, extents: ExtentArray, addresses: U64Array) -> tuple[Pieces, NDArray[np.bool_]]:
        """Pieces of the extents that can be reached whole, and which these are (bool[n])."""
        ids, offsets = extents["segment"], extents["offset"]
        lengths = np.ascontiguousarray(extents["length"])
        one = self._segments.get(int(ids[0]))
        if one is not None and len(one.offset_list) == 1 and (ids == ids[0]).all():
            starts = np.ascontiguousarray(offsets)
            size = np.uint64(one.end_list[0])
            if one.offset_list[0] == 0 and _all_inside(starts, lengths, size):
                count = len(extents)
                pieces = Pieces(
                    np.arange(count),
                    addresses,
                    starts + one.addresses,
                    lengths,
                    np.full(count, one.first, np.int64),
                )
                return pieces, np.ones(count, np.bool_)
        registrations = np.full(len(extents), NOWHERE, np.int64)
        remote = np.zeros(len(extents), np.uint64)
        reachable = np.zeros(len(extents), np.bool_)
        crossing: list[int] = []
        for segment_id in set(ids.tolist()):
            segment = self._segments.get(segment_id)
            if segment is None:
                continue
            mine = np.flatnonzero(ids == segment_id)
            at = np.searchsorted(segment.offsets, offsets[mine], side="right") - 1
            inside = at >= 0
            mine, at = mine[inside], at[inside]
            starts, sizes, ends = offsets[mine], lengths[mine], segment.ends[at]
            begun = starts < ends
            fits = begun & (sizes > 0) & (sizes <= ends - np.minimum(starts, ends))
            registrations[mine] = at + segment.first
            remote[mine] = starts + segment.addresses[at]
            reachable[mine] = fits
            crossing += mine[begun & ~fits & (sizes > 0)].tolist()
        cut = [rows for i in crossing if (rows := self._across(extents, addresses, i))]
        kept = np.flatnonzero(reachable)
        pieces = Pieces(kept, addresses[kept], remote[kept], lengths[kept], registrations[kept])
        if not cut:
            return pieces, reachable
        reachable[[rows[0][0] for rows in cut]] = True
        return _joined(pieces, [row for rows in cut for row in rows]), reachable

    def _across(
        self, extents: ExtentArray, addresses: U64Array, item: int
    ) -> list[tuple[int, int, int, int, int]]:
        """Pieces of one extent over several registrations; none where part of it is not there."""
        segment_id, _, offset, length = extents[item].tolist()
        segment = self._segments[segment_id]
        at = int(np.searchsorted(segment.offsets, np.uint64(offset), side="right")) - 1
        rows = []
        local = int(addresses[item])
        while length:
            if at == len(segment.offsets) or int(segment.offsets[at]) > offset:
                return []
            size = min(length, int(segment.ends[at]) - offset)
            if size <= 0:
                return []
            address = (offset + int(segment.addresses[at])) & ((1 << 64) - 1)
            rows.append((item, local, address, size, at + segment.first))
            offset, local, length, at = offset + size, local + size, length - size, at + 1
        return rows


def _all_inside(starts: U64Array, lengths: U64Array, size: np.uint64) -> bool:
    """Whether all extents lie in the first `size` bytes; none of them is empty then."""
    if not lengths.min() or lengths.max() > size:
        return False
    return bool((starts <= size - lengths).all())


def _joined(pieces: Pieces, rows: list[tuple[int, int, int, int, int]]) -> Pieces:
    columns = list(zip(*rows, strict=True))
    together = Pieces(
        np.concatenate((pieces.items, np.array(columns[0], np.int64))),
        np.concatenate((pieces.local, np.array(columns[1], np.uint64))),
        np.concatenate((pieces.remote, np.array(columns[2], np.uint64))),
        np.concatenate((pieces.lengths, np.array(columns[3], np.uint64))),
        np.concatenate((pieces.registrations, np.array(columns[4], np.int64))),
    )
    return together[np.argsort(together.items, kind="stable")]
