"""Records of slots for other daemons: whoever copies an object needs its key, which the master does
not know, and its checksum."""

from __future__ import annotations

import numpy as np

from cenote.api.errors import StaleLocation
from cenote.api.rows import SLOT_WANTED
from cenote.transport import wire

from .segment import SegmentSet
from .slot_format import SLOT_BYTES

__all__ = ["records_of"]

assert SLOT_BYTES == wire.SLOT_RECORD_BYTES
assert SLOT_WANTED.itemsize == wire.SLOT_WANTED_BYTES


def records_of(segments: SegmentSet, packed: memoryview) -> tuple[bytes, bytes]:
    """(a status for each SLOT_WANTED row, records of those whose slot holds that version)."""
    rows = np.frombuffer(packed, SLOT_WANTED)
    statuses = bytearray(len(rows))
    records: list[bytes] = []
    for at, (segment_id, slot, epoch, _, seq) in enumerate(rows.tolist()):
        segment = segments.by_id(segment_id)
        record = None if segment is None else segment.record(slot, epoch, seq)
        if record is None:
            statuses[at] = StaleLocation.code
        else:
            records.append(record)
    return bytes(statuses), b"".join(records)
