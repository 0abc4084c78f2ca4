"""What a segment's table file looks like: a header, then one record of 192 bytes for each slot.

    0         header copy A (4 KiB)      the valid copy with the higher sequence number counts:
    4 KiB     header copy B (4 KiB)      a daemon killed while it writes one still has the other
    8 KiB     65,536 ranges, 24 bytes    data ranges given up for slots, as many as the header says;
                                         a hole in the file but for what is written
    SLOTS_AT  slot 0, slot 1, ...        192 bytes each

Only the owning daemon maps this file; clients map the data file beside it. Everything is
little-endian. A record carries a checksum over the rest of it, so a record that was written only in
part (the daemon was killed meanwhile) is recognised whatever part that was: no order of writes is
relied on. Bytes 20 to 92 of a record are bytes 4 to 76 of the SEAL row that made it, and bytes 4 to
64 and 76 to 88 of its inventory row, hence a batch is moved by a few strided copies.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from struct import Struct
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from cenote.api.rows import KEY_INLINE_BYTES, SEAL, SLOT

SLOT_BYTES: Final = 192
SLOT_MAGIC: Final = 0x544C5343
"""`CSLT` as it lies in the file."""
SLOT_FORMAT: Final = 2

STATE_FREE: Final = 0
STATE_SEALED: Final = 1
STATE_CLEARED: Final = 2
"""Was sealed and then cleared. The version stays, so that a late repeat of that seal is refused."""

SLOT_RECORD: Final = np.dtype(
    [
        # Head: 20 bytes, the same for all records of one seal.
        ("magic", "<u4"),  # SLOT_MAGIC
        ("format", "u1"),  # SLOT_FORMAT
        ("state", "u1"),  # STATE_*
        ("head_reserved", "<u2"),
        ("epoch", "<u4"),  # version: the leader's tenure ...
        ("namespace_id", "<u4"),
        ("generation", "<u4"),  # of the namespace; a reset raises it
        # Body: 72 bytes, as in the SEAL row.
        ("slot", "<u4"),  # its own number: a record in the wrong place is not valid
        ("offset", "<u8"),  # extent in the data file, bytes
        ("length", "<u8"),  # granted bytes: payload, behind it a key over 64 bytes
        ("seq", "<u8"),  # ... version: and the decision within it
        ("checksum", "<u8"),  # XXH3-64 of the object's payload
        ("object_size", "<u8"),  # bytes of the whole object (this shard of it)
        ("digest", "V16"),  # of the key, as the master knows it
        ("extent_index", "<u2"),  # this extent is number extent_index ...
        ("extent_count", "<u2"),  # ... of extent_count
        ("key_length", "<u2"),  # bytes of the whole key
        ("shard_index", "u1"),
        ("shard_count", "u1"),  # 0 and 1: not sharded
        ("replica", "u1"),
        ("flags", "u1"),
        ("body_reserved", "<u2"),
        ("blob_references", "<u4"),  # spare, for content dedup
        ("key", f"V{KEY_INLINE_BYTES}"),  # the key's first 64 bytes, zero-padded
        ("blob_digest", "V16"),  # spare, for content dedup
        ("spare", "V8"),
        ("crc", "<u8"),  # XXH3-64 of all bytes before it
    ]
)
CHECKED_BYTES: Final = SLOT_BYTES - 8
BODY_AT: Final = 20
KEY_AT: Final = 96

SLOT_HEAD: Final = Struct("<IBBHIII")
"""magic, format, state, reserved, epoch, namespace id, generation."""
SLOT_VERSION: Final = Struct("<4xBB2xI28xQ")
"""From a record: format, state, epoch, seq."""

# The same record seen as blocks of bytes, for copies that need no look inside.
RECORD_BLOCKS: Final = np.dtype(
    {
        "names": ["head", "body", "key", "checked", "crc", "all"],
        "formats": [
            "V20",
            "V72",
            f"V{KEY_INLINE_BYTES}",
            f"V{CHECKED_BYTES}",
            "<u8",
            f"V{SLOT_BYTES}",
        ],
        "offsets": [0, BODY_AT, KEY_AT, 0, CHECKED_BYTES, 0],
        "itemsize": SLOT_BYTES,
    }
)
SEAL_BLOCKS: Final = np.dtype(
    {"names": ["body"], "formats": ["V72"], "offsets": [4], "itemsize": SEAL.itemsize}
)

# What an inventory row and the record share: slot to digest, extent_index to flags, epoch and ids.
_INVENTORY_PIECES: Final = ("V60", "V10", "V12")
INVENTORY_BLOCKS: Final = np.dtype(
    {
        "names": ["what", "which", "when"],
        "formats": list(_INVENTORY_PIECES),
        "offsets": [4, 76, 64],
        "itemsize": SLOT.itemsize,
    }
)
RECORD_INVENTORY_BLOCKS: Final = np.dtype(
    {
        "names": ["what", "which", "when"],
        "formats": list(_INVENTORY_PIECES),
        "offsets": [BODY_AT, BODY_AT + 60, 8],
        "itemsize": SLOT_BYTES,
    }
)


def _check_layouts() -> None:
    """Fail at import where the rows of the wire and the record drifted apart."""
    fields = SLOT_RECORD.fields
    seal, slot = SEAL.fields, SLOT.fields
    assert fields is not None
    assert seal is not None
    assert slot is not None
    if SLOT_RECORD.itemsize != SLOT_BYTES or fields["key"][1] != KEY_AT:
        raise RuntimeError("the slot record does not have its size")
    for name, (dtype, offset, *_) in seal.items():
        own = "body_reserved" if name == "reserved" else name
        if name != "segment" and fields[own][:2] != (dtype, offset + BODY_AT - 4):
            raise RuntimeError(f"rows.SEAL and the slot record differ in {name}")
    for name, (dtype, offset, *_) in slot.items():
        shift = 56 if 64 <= offset < 76 else 4 - BODY_AT if offset < 64 else 76 - BODY_AT - 60
        own = "body_reserved" if name == "reserved" else name
        if name != "segment_index" and fields[own][:2] != (dtype, offset - shift):
            raise RuntimeError(f"rows.SLOT and the slot record differ in {name}")


_check_layouts()

# ---- header ---------------------------------------------------------------------------------

HEADER_COPY_BYTES: Final = 4096
HEADER_BYTES: Final = 2 * HEADER_COPY_BYTES
HEADER_FORMAT: Final = 2
"""A table of another format is void, and with it what its segment holds."""
HEADER_MAGIC: Final = b"CENOTESG"
_HEADER: Final = Struct("<8sIIQ16s16s16sIIQQQQIIIIQ")
_CRC: Final = Struct("<Q")

RANGES_MAX: Final = 65_536
"""Also the most that the master takes."""
RANGE_BYTES: Final = 24
_RANGE: Final = Struct("<QQ")

SLOTS_AT: Final = HEADER_BYTES + RANGES_MAX * RANGE_BYTES


@dataclass(frozen=True, slots=True)
class TableHeader:
    """What a segment knows of itself, apart from its slots. Sizes in bytes."""

    sequence: int
    """Rises with each write; the higher of two valid copies counts."""
    incarnation: bytes
    """16 random bytes, new whenever contents were lost."""
    boot_id: bytes
    """16 bytes; memory does not survive a boot, so another boot's header is void."""
    node_uuid: bytes
    """16 bytes that name the daemon this segment belongs to."""
    index: int
    """Position among the daemon's segments."""
    unit_bytes: int
    data_bytes: int
    """Size of the data file."""
    data_inode: int
    """Inode of the data file: one that was put in its place is not it."""
    ready_bytes: int
    """So much of the data file is backed by memory, from its beginning."""
    last_epoch: int
    """The latest tenure that the daemon followed: changes from older ones are refused for good."""
    slots: int
    """Slots that the table has, or is about to have after a growth was cut short."""
    node_id: int = 0
    """As the master knows the daemon; 0 before it was ever attached."""
    segment_id: int = 0
    """As the master knows this segment."""
    retired_count: int = 0
    """So many ranges of the data area were given up; those behind it were never made valid."""
    start_number: int = 0
    """Of the daemon that opened it last; see `node_files`."""

    def next(self, **changes: object) -> TableHeader:
        """The header that follows this one, with `changes`."""
        return replace(self, sequence=self.sequence + 1, **changes)  # type: ignore[arg-type]

    def pack(self) -> bytes:
        """One header copy of HEADER_COPY_BYTES."""
        body = _HEADER.pack(
            HEADER_MAGIC,
            HEADER_FORMAT,
            SLOT_BYTES,
            self.sequence,
            self.incarnation,
            self.boot_id,
            self.node_uuid,
            self.index,
            self.unit_bytes,
            self.data_bytes,
            self.data_inode,
            self.ready_bytes,
            self.slots,
            self.last_epoch,
            self.node_id,
            self.segment_id,
            self.retired_count,
            self.start_number,
        )
        return checked(body.ljust(HEADER_COPY_BYTES - _CRC.size, b"\0"))


def checked(body: bytes) -> bytes:
    """The bytes and their checksum."""
    return body + _CRC.pack(xxh3_64_intdigest(body))


def _is_whole(copy: bytes) -> bool:
    return checked(copy[: -_CRC.size]) == copy


def unpack_header(copies: bytes) -> TableHeader | None:
    """The valid header of HEADER_BYTES with the highest sequence number, or None."""
    found = [
        header
        for at in range(0, HEADER_BYTES, HEADER_COPY_BYTES)
        if (header := _unpack_copy(copies[at : at + HEADER_COPY_BYTES])) is not None
    ]
    return max(found, key=lambda header: header.sequence, default=None)


def _unpack_copy(copy: bytes) -> TableHeader | None:
    if len(copy) != HEADER_COPY_BYTES or not _is_whole(copy):
        return None
    magic, format_, slot_bytes, sequence, incarnation, boot_id, node_uuid, *rest = (
        _HEADER.unpack_from(copy)
    )
    if (magic, format_, slot_bytes) != (HEADER_MAGIC, HEADER_FORMAT, SLOT_BYTES):
        return None
    index, unit_bytes, data_bytes, inode, ready_bytes, slots, last_epoch, *rest = rest
    node_id, segment_id, retired_count, start_number = rest
    if retired_count > RANGES_MAX:
        return None
    return TableHeader(
        sequence=sequence,
        incarnation=incarnation,
        boot_id=boot_id,
        node_uuid=node_uuid,
        index=index,
        unit_bytes=unit_bytes,
        data_bytes=data_bytes,
        data_inode=inode,
        ready_bytes=ready_bytes,
        last_epoch=last_epoch,
        slots=slots,
        node_id=node_id,
        segment_id=segment_id,
        retired_count=retired_count,
        start_number=start_number,
    )


def pack_range(offset: int, length: int) -> bytes:
    """One data range that is given up, RANGE_BYTES."""
    return checked(_RANGE.pack(offset, length))


def unpack_ranges(packed: bytes) -> list[tuple[int, int]] | None:
    """(offset, length) of each range, or None where one is damaged or cut short."""
    if len(packed) % RANGE_BYTES:
        return None
    pieces = [packed[at : at + RANGE_BYTES] for at in range(0, len(packed), RANGE_BYTES)]
    if not all(map(_is_whole, pieces)):
        return None
    return [(offset, length) for offset, length in map(_RANGE.unpack_from, pieces)]


def _rounded_up(size_bytes: int, granule_bytes: int) -> int:
    return -(-size_bytes // granule_bytes) * granule_bytes


def table_file_bytes(slots: int, page_bytes: int = 4096) -> int:
    """Size of a table file for so many slots, holes included; a whole number of pages."""
    return _rounded_up(SLOTS_AT + slots * SLOT_BYTES, page_bytes)


def table_memory_bytes(slots: int, page_bytes: int = 4096) -> int:
    """Memory that such a file takes: its header, a page of ranges, and its slots."""
    fixed = _rounded_up(HEADER_BYTES, page_bytes) + page_bytes
    return fixed + table_file_bytes(slots, page_bytes) - SLOTS_AT // page_bytes * page_bytes


def slots_for(memory_bytes: int, page_bytes: int = 4096) -> int:
    """The most slots that a table file of at most so much memory has room for."""
    pages = (memory_bytes - table_memory_bytes(0, page_bytes)) // page_bytes * page_bytes
    spare = table_file_bytes(0, page_bytes) - SLOTS_AT
    return max(0, pages + spare) // SLOT_BYTES if pages >= 0 else 0


def boot_id_bytes(boot_id: str) -> bytes:
    """The 16 bytes of a boot id in its usual text form. Raises ValueError for other text."""
    return uuid.UUID(boot_id).bytes
