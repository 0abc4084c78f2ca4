"""A copy that the master ordered, and what a daemon finds of its source and makes of its target."""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import COPY, CopyStatus

from .device import BLOCK_BYTES
from .segment import Segment
from .segments import LocalSegments
from .slot_format import BODY_AT
from .slot_records import moved_record

__all__ = ["Copy", "find", "has_bytes", "has_twin", "unpack_copies"]

_ROW: Final = Struct("<4Q6I")
"""COPY."""
_FOUND: Final = Struct(f"<{BODY_AT}x4xQQ8xQQ16xHH")
"""Of a record: offset, length, checksum, object size, extent index, extent count."""

assert _ROW.size == COPY.itemsize


@dataclass(slots=True, eq=False)
class Copy:
    copy_id: int
    epoch: int
    """Of the leader that planned it."""
    sources: list[tuple[int, int, int, int]]
    """(segment id, slot, epoch, seq) of each extent."""
    segment_id: int
    """Of the target, as the next four."""
    slot: int
    offset: int
    length: int
    replica: int
    status: int = CopyStatus.DONE
    record: bytes = b""
    """Of the target, once the source was found; so are the rest."""
    size_bytes: int = 0
    """Payload, and a long key behind it."""
    payload_bytes: int = 0
    checksum: int = 0
    parts: list[tuple[int, int]] = field(default_factory=list)
    """(address, length) of each extent."""
    is_aligned: bool = False
    """Whether a device can take all of it from where it is; what follows it up to the next block
    is memory, too."""
    twin: tuple[int, int, int] | None = None
    """(slot, epoch, seq) of what has the same bytes in the target's place, so that only a slot is
    to be made."""

    @property
    def written_bytes(self) -> int:
        """Of its payload, at most."""
        return self.length if self.twin is None else 0


def unpack_copies(rows: NDArray[np.void], epoch: int) -> list[Copy]:
    """Copies of COPY rows."""
    copies: list[Copy] = []
    last_id = -1
    for row in _ROW.iter_unpack(rows.tobytes()):
        copy_id, seq, offset, length, version, source, source_slot, target, slot, replica = row
        if copy_id != last_id:
            copies.append(Copy(copy_id, epoch, [], target, slot, offset, length, replica))
            last_id = copy_id
        if source == target:
            copies[-1].twin = source_slot, version, seq
        else:
            copies[-1].sources.append((source, source_slot, version, seq))
    return copies


def has_twin(target: Segment, one: Copy) -> bool:
    """Whether the slot that is said to tell so tells that what was found of the source lies in the
    target's place. To be asked just before the target's slot is made."""
    assert one.twin is not None
    return has_bytes(target, one.twin, one.offset, one.payload_bytes, one.checksum)


def has_bytes(
    target: Segment, twin: tuple[int, int, int], offset: int, payload_bytes: int, checksum: int
) -> bool:
    """Whether a slot (number, epoch, seq) tells of bytes of this length and checksum, from `offset`
    on and in one piece."""
    record = target.record(*twin)
    if record is None:
        return False
    at, _, found, size, index, count = _FOUND.unpack_from(record)
    return (at, found, size, index, count) == (offset, checksum, payload_bytes, 0, 1)


def find(segments: LocalSegments, one: Copy, memory_align: int) -> bool:
    """Look the source's slots up, and make the target's record. False with a status where that
    can't be."""
    target = segments.by_id(one.segment_id)
    if target is None or target.failed:
        one.status = CopyStatus.FAILED
        return False
    first = b""
    size = 0
    aligned = True
    for index, (segment_id, slot, epoch, seq) in enumerate(one.sources):
        segment = segments.by_id(segment_id)
        record = None if segment is None else segment.table.record(slot, epoch, seq)
        if segment is None or record is None:
            one.status = CopyStatus.SOURCE_CHANGED
            return False
        offset, length, checksum, object_size, number, count = _FOUND.unpack_from(record)
        if number != index or count != len(one.sources):
            one.status = CopyStatus.FAILED
            return False
        if not index:
            first, one.checksum, one.payload_bytes = record, checksum, object_size
        # Only the last part may end within a block.
        aligned = aligned and not size % BLOCK_BYTES
        aligned = aligned and not (segment.address + offset) % memory_align
        aligned = aligned and offset + length + -length % BLOCK_BYTES <= segment.ready_bytes
        size += length
        one.parts.append((segment.address + offset, length))
    fits = size <= one.length and one.offset + one.length <= target.ready_bytes
    if not fits or size < one.payload_bytes:
        one.status = CopyStatus.FAILED
        return False
    one.size_bytes, one.is_aligned = size, aligned
    one.record = moved_record(first, one.slot, one.offset, size, one.replica)
    return True
