"""Making and checking slot records: wire rows in, bytes of the table out. No state, no lock."""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from cenote.api.rows import (
    EXTENTS_PER_OBJECT_MAX,
    KEY_BYTES_MAX,
    KEY_INLINE_BYTES,
    SEAL,
    SLOT,
)

from .ranges import RangeSet
from .slot_format import (
    BODY_AT,
    CHECKED_BYTES,
    INVENTORY_BLOCKS,
    KEY_AT,
    RECORD_BLOCKS,
    RECORD_INVENTORY_BLOCKS,
    SEAL_BLOCKS,
    SLOT_BYTES,
    SLOT_FORMAT,
    SLOT_HEAD,
    SLOT_MAGIC,
    SLOT_RECORD,
    STATE_CLEARED,
    STATE_SEALED,
)

Rows = NDArray[np.void]
Flags = NDArray[np.bool_]

SEAL_ROW: Final = Struct("<4xI5Q16xHHHBBBB2x")
"""slot, offset, length, seq, checksum, object size, extent index, extent count, key length, shard
index, shard count, replica, flags."""


def _at(name: str) -> int:
    fields = SLOT_RECORD.fields
    assert fields is not None
    return fields[name][1]


_CRC: Final = Struct("<Q")
_SLOT: Final = Struct("<I")
_PLACE: Final = Struct("<IQQ")
"""slot, offset, length."""
_WHOLE: Final = Struct("<HH")
"""extent index, extent count."""
_EXTENT_INDEX_AT: Final = _at("extent_index")
_REPLICA_AT: Final = _at("replica")
_ZEROS: Final = bytes(SLOT_BYTES)

_ROW_WORDS: Final = np.dtype(
    {
        "names": ["columns", "rest"],
        "formats": [("<u8", 6), "V12"],
        "offsets": [0, SEAL.itemsize - 12],
        "itemsize": SEAL.itemsize,
    }
)
"""SEAL rows as numbers (segment and slot, offset, length, seq, checksum, object size), and what all
of a batch mostly have in common: see `_REST`."""
_REST: Final = Struct("<HHHBB4x")
"""extent index, extent count, key length, shard index, shard count."""
_SLOT_SHIFT: Final = 32
_NEXT_SLOT: Final = np.uint64(1 << _SLOT_SHIFT)

# Row L keeps the first L of 64 bytes.
_KEY_MASKS: Final = np.tri(KEY_INLINE_BYTES + 1, KEY_INLINE_BYTES, -1, np.uint8) * np.uint8(255)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where extents may lie. Bytes."""

    unit_bytes: int
    limit_bytes: int
    retired: RangeSet


@dataclass(frozen=True, slots=True)
class SealRun:
    """What `run_of` found."""

    slot: int
    """The first of them."""
    seq_min: int
    keys_at: int
    """Where the first key begins."""
    key_length: int


# ---- columns --------------------------------------------------------------------------------


def slot_of(record: bytes) -> int:
    """The number of the slot that a record belongs to."""
    slot: int = _SLOT.unpack_from(record, BODY_AT)[0]
    return slot


def malformed_rows(
    rows: Rows, key_starts: NDArray[np.int64], keys_bytes: int, bounds: Bounds
) -> Flags:
    """Which SEAL rows can't be right, whatever the table holds (slot numbers are not looked at)."""
    offset, length = rows["offset"], rows["length"]
    limit = np.uint64(bounds.limit_bytes)
    bad: Flags = (offset & np.uint64(bounds.unit_bytes - 1)) != 0
    bad |= offset >= limit
    # A length of 0 wraps to the largest number, hence is bad, too.
    bad |= (length - np.uint64(1)) >= (limit - offset)
    bad |= rows["object_size"] == 0
    count = rows["extent_count"]
    bad |= rows["extent_index"] >= count
    bad |= count > EXTENTS_PER_OBJECT_MAX
    key_length = rows["key_length"]
    bad |= (key_length - np.uint16(1)) >= KEY_BYTES_MAX
    bad |= key_starts < 0
    bad |= key_starts + key_length > keys_bytes
    bad |= rows["shard_index"] >= np.maximum(rows["shard_count"], 1)
    if bounds.retired:
        sound = ~bad
        bad[sound] |= bounds.retired.overlapping(offset[sound], length[sound])
    return bad


def run_of(
    rows: Rows, key_starts: NDArray[np.int64], keys_bytes: int, bounds: Bounds
) -> SealRun | None:
    """Where SEAL rows are alike but for place, version and contents, are of slots that follow each
    other, with keys that do, and nothing about any of them is malformed: as nearly all batches.

    A few looks at all columns at once, instead of some at each. None: look closer.
    """
    count, words = len(rows), rows.view(_ROW_WORDS)
    rest, columns = words["rest"], words["columns"]
    places = columns[:, 0]
    if np.count_nonzero(rest != rest[0]) or np.count_nonzero(
        places[1:] - places[:-1] != _NEXT_SLOT
    ):
        return None
    index, extents, key_length, shard, shards = _REST.unpack_from(rest[0].tobytes())
    first, low, low_length, seq_min, _, low_size = np.minimum.reduce(columns).tolist()
    _, high, high_length, _, _, _ = np.maximum.reduce(columns).tolist()
    keys_at = int(key_starts[0])
    limit = bounds.limit_bytes
    if (
        not index < extents <= EXTENTS_PER_OBJECT_MAX
        or not 0 < key_length <= KEY_BYTES_MAX
        or shard >= max(shards, 1)
        or not low_length
        or not low_size
        or high + high_length > limit
        or int(np.bitwise_or.reduce(columns[:, 1])) & (bounds.unit_bytes - 1)
        or (bounds.retired and bounds.retired.overlaps(low, high + high_length - low))
        or keys_at < 0
        or keys_at + count * key_length > keys_bytes
        or np.count_nonzero(key_starts[1:] - key_starts[:-1] != key_length)
    ):
        return None
    return SealRun(first >> _SLOT_SHIFT, seq_min, keys_at, key_length)


def build_run(head: bytes, rows: Rows, keys: memoryview, run: SealRun) -> NDArray[np.void]:
    """`build_records` of such rows."""
    count, length = len(rows), run.key_length
    inline = min(length, KEY_INLINE_BYTES)
    memory = np.zeros((count, SLOT_BYTES), np.uint8)
    memory[:, :BODY_AT] = np.frombuffer(head, np.uint8)
    sent = rows.view(np.uint8).reshape(count, SEAL.itemsize)
    memory[:, BODY_AT : BODY_AT + SEAL.itemsize - 4] = sent[:, 4:]
    texts = np.frombuffer(keys, np.uint8, count * length, run.keys_at).reshape(count, length)
    memory[:, KEY_AT : KEY_AT + inline] = texts[:, :inline]
    records = memory.reshape(-1).view(RECORD_BLOCKS)
    write_checksums(records)
    return records


def build_records(
    head: bytes, rows: Rows, keys: memoryview, key_starts: NDArray[np.int64]
) -> NDArray[np.void]:
    """Finished records (RECORD_BLOCKS) for sound SEAL rows; `head` is a packed SLOT_HEAD."""
    n = len(rows)
    records = np.zeros(n, RECORD_BLOCKS)
    records["head"] = np.void(head)
    records["body"] = rows.view(SEAL_BLOCKS)["body"]
    padded = b"".join((keys, _ZEROS[:KEY_INLINE_BYTES]))
    inline = windows(padded, KEY_INLINE_BYTES)[key_starts]
    texts: NDArray[np.uint8] = inline.view(np.uint8).reshape(n, KEY_INLINE_BYTES)
    lengths = rows["key_length"]
    if np.count_nonzero(lengths < KEY_INLINE_BYTES):
        texts &= _KEY_MASKS[np.minimum(lengths, KEY_INLINE_BYTES)]
    records["key"] = texts.view(f"V{KEY_INLINE_BYTES}").reshape(n)
    write_checksums(records)
    return records


def windows(memory: bytes | memoryview, length: int) -> NDArray[np.void]:
    """The `length` bytes from every position of `memory` on, as overlapping elements of one view.

    A gather or scatter by position then moves pieces of memory without a Python step for each.
    """
    return np.ndarray(len(memory) - length + 1, f"V{length}", memory, strides=(1,))


def write_checksums(records: NDArray[np.void]) -> None:
    """Fill the `crc` of records (RECORD_BLOCKS), in place."""
    bodies = records["checked"].tolist()
    records["crc"] = np.fromiter(map(xxh3_64_intdigest, bodies), np.uint64, len(bodies))


def inventory_rows(records: NDArray[np.void], segment_index: int) -> NDArray[np.void]:
    """`rows.SLOT` for sealed records (SLOT_RECORD) of the segment at that position."""
    rows = np.zeros(len(records), SLOT)
    target, source = rows.view(INVENTORY_BLOCKS), records.view(RECORD_INVENTORY_BLOCKS)
    for piece in ("what", "which", "when"):
        target[piece] = source[piece]
    rows["segment_index"] = segment_index
    return rows


def taken(records: NDArray[np.void], which: Flags | NDArray[np.intp]) -> NDArray[np.void]:
    """`records[which]` (SLOT_RECORD), many times faster: NumPy copies structures field by field."""
    return records.view(f"V{SLOT_BYTES}")[which].view(SLOT_RECORD)


def joined(blocks: list[NDArray[np.void]]) -> NDArray[np.void]:
    """Several arrays of SLOT_RECORD as one."""
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate([b.view(f"V{SLOT_BYTES}") for b in blocks]).view(SLOT_RECORD)


def sort_out(block: NDArray[np.void], first_slot: int) -> tuple[Flags, Flags]:
    """Which records of a piece of the table (SLOT_RECORD) are sealed, and which are broken.

    `block[0]` is slot `first_slot`; the block is contiguous. Broken: neither untouched (all zero)
    nor a whole valid record.
    """
    n = len(block)
    broken = np.zeros(n, np.bool_)
    if not np.bitwise_or.reduce(block.view(np.uint64)):
        return broken, broken
    numbers = np.arange(first_slot, first_slot + n, dtype=np.uint32)
    state = block["state"]
    sealed: Flags = state == STATE_SEALED
    whole = (block["magic"] == SLOT_MAGIC) & (block["format"] == SLOT_FORMAT)
    whole &= block["slot"] == numbers
    whole &= sealed | (state == STATE_CLEARED)
    if whole.all():
        whole = _are_checked(block)
    elif whole.any():
        candidates = np.flatnonzero(whole)
        whole[candidates] = _are_checked(taken(block, candidates))
    others = np.flatnonzero(~whole)
    if len(others):
        words = taken(block, others).view(np.uint64).reshape(-1, SLOT_BYTES // 8)
        broken[others] = np.bitwise_or.reduce(words, axis=1) != 0
    return whole & sealed, broken


def _are_checked(block: NDArray[np.void]) -> Flags:
    """Which records have the checksum that they should have."""
    blocks = block.view(RECORD_BLOCKS)
    bodies = blocks["checked"].tolist()
    right: Flags = blocks["crc"] == np.fromiter(
        map(xxh3_64_intdigest, bodies), np.uint64, len(bodies)
    )
    return right


# ---- one row --------------------------------------------------------------------------------


def is_malformed(fields: tuple[int, ...], key_start: int, keys_bytes: int, bounds: Bounds) -> bool:
    """`malformed_rows` for the unpacked SEAL_ROW of one row."""
    _, offset, length, _, _, size, index, count, key_length, shard, shards, _, _ = fields
    limit = bounds.limit_bytes
    return (
        offset & (bounds.unit_bytes - 1) != 0
        or offset >= limit
        or not 0 < length <= limit - offset
        or size == 0
        or not index < count <= EXTENTS_PER_OBJECT_MAX
        or not 0 < key_length <= KEY_BYTES_MAX
        or key_start < 0
        or key_start + key_length > keys_bytes
        or shard >= max(shards, 1)
        or (bool(bounds.retired) and bounds.retired.overlaps(offset, length))
    )


def build_record(head: bytes, row: bytes, key: memoryview) -> bytes:
    """The finished record of one sound SEAL row, given as bytes."""
    gap = _ZEROS[: KEY_AT - BODY_AT - SEAL.itemsize + 4]
    checked = b"".join((head, row[4:], gap, key[:KEY_INLINE_BYTES]))
    checked = checked.ljust(CHECKED_BYTES, b"\0")
    return checked + _CRC.pack(xxh3_64_intdigest(checked))


def moved_record(record: bytes, slot: int, offset: int, length: int, replica: int) -> bytes:
    """The record of a copy, in one piece, of what a sealed record names."""
    moved = bytearray(record)
    _PLACE.pack_into(moved, BODY_AT, slot, offset, length)
    _WHOLE.pack_into(moved, _EXTENT_INDEX_AT, 0, 1)
    moved[_REPLICA_AT] = replica
    _CRC.pack_into(moved, CHECKED_BYTES, xxh3_64_intdigest(memoryview(moved)[:CHECKED_BYTES]))
    return bytes(moved)


def sealed_head(epoch: int, namespace_id: int, generation: int) -> bytes:
    """The head of sealed records."""
    return SLOT_HEAD.pack(SLOT_MAGIC, SLOT_FORMAT, STATE_SEALED, 0, epoch, namespace_id, generation)


assert SLOT_RECORD.itemsize == CHECKED_BYTES + _CRC.size
assert (_at("slot"), _at("offset"), _at("length")) == (BODY_AT, BODY_AT + 4, BODY_AT + 12)
assert _at("extent_count") == _EXTENT_INDEX_AT + 2
