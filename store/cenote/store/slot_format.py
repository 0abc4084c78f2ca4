"""What a segment's table file looks like: a header, then one record of 192 bytes for each slot.

    0         header copy A (8 KiB)      the valid copy with the higher sequence number counts:
    8 KiB     header copy B (8 KiB)      a daemon killed while it writes one still has the other
    16 KiB    slot 0, slot 1, ...        192 bytes each

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
SLOT_FORMAT: Final = 1

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
        ("length", "<u8"),  # granted bytes: payload, and behind it a key too long for `key`
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
        ("key", f"V{KEY_INLINE_BYTES}"),  # the key, zero-padded; or BLAKE2b-256 of a longer one
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
    for name, (dtype, *_) in slot.items():
        own = "body_reserved" if name == "reserved" else name
        if name != "segment_index" and fields[own][0] != dtype:
            raise RuntimeError(f"rows.SLOT and the slot record differ in {name}")


_check_layouts()

# ---- header ---------------------------------------------------------------------------------

HEADER_COPY_BYTES: Final = 8192
HEADER_BYTES: Final = 2 * HEADER_COPY_BYTES
HEADER_FORMAT: Final = 1
_HEADER_MAGIC: Final = b"CENOTESG"
_HEADER: Final = Struct("<8sIIQ16s16s16sIIQQQQIIIII4x")
_RANGE: Final = Struct("<QQ")
_CRC: Final = Struct("<Q")
RETIRED_RANGES_MAX: Final = (HEADER_COPY_BYTES - _HEADER.size - _CRC.size) // _RANGE.size


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
    retired: tuple[tuple[int, int], ...] = ()
    """Data ranges given up for the table, as sorted, disjoint (offset, length)."""

    def next(self, **changes: object) -> TableHeader:
        """The header that follows this one, with `changes`."""
        return replace(self, sequence=self.sequence + 1, **changes)  # type: ignore[arg-type]

    def pack(self) -> bytes:
        """One header copy of HEADER_COPY_BYTES. Raises ValueError for too many retired ranges."""
        if len(self.retired) > RETIRED_RANGES_MAX:
            raise ValueError(f"more than {RETIRED_RANGES_MAX} retired ranges")
        body = _HEADER.pack(
            _HEADER_MAGIC,
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
            len(self.retired),
            0,
        ) + b"".join(_RANGE.pack(*r) for r in self.retired)
        padded = body.ljust(HEADER_COPY_BYTES - _CRC.size, b"\0")
        return padded + _CRC.pack(xxh3_64_intdigest(padded))


def unpack_header(copies: bytes) -> TableHeader | None:
    """The valid header of HEADER_BYTES with the highest sequence number, or None."""
    found = [
        header
        for at in range(0, HEADER_BYTES, HEADER_COPY_BYTES)
        if (header := _unpack_copy(copies[at : at + HEADER_COPY_BYTES])) is not None
    ]
    return max(found, key=lambda header: header.sequence, default=None)


def _unpack_copy(copy: bytes) -> TableHeader | None:
    if len(copy) != HEADER_COPY_BYTES:
        return None
    checked = copy[: -_CRC.size]
    if _CRC.unpack_from(copy, len(checked))[0] != xxh3_64_intdigest(checked):
        return None
    magic, format_, slot_bytes, sequence, incarnation, boot_id, node_uuid, *rest = (
        _HEADER.unpack_from(checked)
    )
    if (magic, format_, slot_bytes) != (_HEADER_MAGIC, HEADER_FORMAT, SLOT_BYTES):
        return None
    index, unit_bytes, data_bytes, inode, ready_bytes, slots, last_epoch, *rest = rest
    node_id, segment_id, retired_count, _ = rest
    if retired_count > RETIRED_RANGES_MAX:
        return None
    ranges_end = _HEADER.size + retired_count * _RANGE.size
    retired = tuple(_RANGE.iter_unpack(checked[_HEADER.size : ranges_end]))
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
        retired=retired,
    )


def table_file_bytes(slots: int, page_bytes: int = 4096) -> int:
    """Size of a table file for so many slots, a whole number of pages."""
    return -(-(HEADER_BYTES + slots * SLOT_BYTES) // page_bytes) * page_bytes


def slots_in(file_bytes: int) -> int:
    """How many slots a table file of that size has room for."""
    return max(0, file_bytes - HEADER_BYTES) // SLOT_BYTES


def boot_id_bytes(boot_id: str) -> bytes:
    """The 16 bytes of a boot id in its usual text form. Raises ValueError for other text."""
    return uuid.UUID(boot_id).bytes
