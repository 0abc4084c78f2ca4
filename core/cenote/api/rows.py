"""Packed rows: the columns that travel inside messages instead of one message per key.

All are little-endian, unaligned NumPy structured types; `docs/internals/protocol.md` gives the
layouts as tables for other languages. A batch of n keys is `n * ITEMSIZE` bytes and is read with
`np.frombuffer(data, ROW)` without a copy. The scalar `struct.Struct` beside each type serves n = 1,
where NumPy costs more than the work itself.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import numpy as np

from .codes import Code

DIGEST_BYTES: Final = 16
UNIT_BYTES: Final = 64
"""Allocation unit of DRAM segments; every extent starts and ends on a multiple of its segment's."""
KEY_BYTES_MAX: Final = 512
KEY_INLINE_BYTES: Final = 64
"""Longer keys are stored behind the payload; the slot then holds their beginning only."""
EXTENTS_PER_OBJECT_MAX: Final = 64


class ObjectStatus(Code):
    """Status of an OBJECT row."""

    MISS = 0
    LEASED = 1
    UNLEASED = 2
    """Present, but no lease was given (not asked for, or the leased share is used up)."""


class PutStatus(Code):
    """Status of a PUT row."""

    EXISTS = 0
    DEDUPLICATED = 1
    GRANTED = 2
    NO_SPACE = 3
    TOO_LARGE = 4
    REPLICAS_UNAVAILABLE = 5
    QUOTA_EXCEEDED = 6
    DUPLICATE_IN_BATCH = 7
    """The same key stands earlier in this very batch; that position decides."""
    INVALID = 8
    NOT_YET = 9
    """There will be room in a moment: a master that has just begun to lead waits for its daemons,
    and until nobody can hold a lease of the time before. Or the key is known, but not yet whether
    it was sealed: its daemon has not attached yet."""
    UNSEALED = 10
    """Another writer had it decided, and nobody said yet that it is sealed: it may have died.
    Whoever wants it there seals it, says so with the next PutStart, and learns that it exists."""


class CommitStatus(Code):
    """One byte for each committed key."""

    DECIDED = 1
    EXISTS_SAME = 2
    """Another writer was first, with the same size and checksum."""
    EXISTS_DIFFERENT = 3
    NOT_GRANTED = 4
    """No such grant (any more): revoked, aborted, or decided before."""
    UNSEALED_SAME = 5
    """As EXISTS_SAME, of an object that PutStart would call UNSEALED: begin anew."""
    UNSEALED_DIFFERENT = 6


EXTENT = np.dtype([("segment", "<u4"), ("slot", "<u4"), ("offset", "<u8"), ("length", "<u8")])
"""One contiguous piece. `offset` and `length` in bytes. `slot`: in a grant the slot number in the
segment's table; in a location the replica number. Lengths of a location add up to the object's
size (per replica); lengths of a grant add up to payload plus key tail."""
EXTENT_STRUCT: Final = Struct("<IIQQ")

OBJECT = np.dtype(
    [
        ("size", "<u8"),
        ("checksum", "<u8"),
        ("seq", "<u8"),
        ("epoch", "<u4"),
        ("extents", "<u2"),
        ("replicas", "u1"),
        ("status", "u1"),
    ]
)
"""One looked-up key. `extents`: EXTENT rows that follow for it, over all `replicas`.
`checksum`: XXH3-64 of the payload."""
OBJECT_STRUCT: Final = Struct("<QQQIHBB")

PUT = np.dtype([("status", "u1"), ("replicas", "u1"), ("extents", "<u2"), ("reserved", "<u4")])
"""Answer to one key of a PutStart; `extents` EXTENT rows follow for it where it is GRANTED, as many
SEAL rows where it is UNSEALED."""
PUT_STRUCT: Final = Struct("<BBHI")

SEAL = np.dtype(
    [
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("seq", "<u8"),
        ("checksum", "<u8"),
        ("object_size", "<u8"),
        ("digest", "V16"),
        ("extent_index", "<u2"),
        ("extent_count", "<u2"),
        ("key_length", "<u2"),
        ("shard_index", "u1"),
        ("shard_count", "u1"),
        ("replica", "u1"),
        ("flags", "u1"),
        ("reserved", "<u2"),
    ]
)
"""One extent to seal. `length` is the extent's granted length. Header of the seal message: epoch,
namespace id, generation. The keys follow the rows back to back, one for each row."""

SLOT = np.dtype(
    [
        ("segment_index", "<u4"),
        ("slot", "<u4"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("seq", "<u8"),
        ("checksum", "<u8"),
        ("object_size", "<u8"),
        ("digest", "V16"),
        ("epoch", "<u4"),
        ("namespace_id", "<u4"),
        ("generation", "<u4"),
        ("extent_index", "<u2"),
        ("extent_count", "<u2"),
        ("key_length", "<u2"),
        ("shard_index", "u1"),
        ("shard_count", "u1"),
        ("replica", "u1"),
        ("flags", "u1"),
        ("reserved", "<u2"),
    ]
)
"""One sealed slot in a daemon's inventory (attach)."""

SLOT_SUM = np.dtype([("sum", "<u8"), ("count", "<u4")])
"""What a block of slot numbers holds: see `slot_sums`."""

BLOCK = np.dtype([("segment_index", "<u4"), ("block", "<u4")])
"""One block of slot numbers of a segment; of how many, the message says."""

SLOT_REF = np.dtype([("segment_index", "<u4"), ("slot", "<u4"), ("epoch", "<u4"), ("seq", "<u8")])
"""A slot and the version it must still hold."""

COPY = np.dtype(
    [
        ("copy_id", "<u8"),
        ("source_seq", "<u8"),
        ("target_offset", "<u8"),
        ("target_length", "<u8"),
        ("source_epoch", "<u4"),
        ("source_segment", "<u4"),
        ("source_slot", "<u4"),
        ("target_segment", "<u4"),
        ("target_slot", "<u4"),
        ("target_replica", "<u4"),
    ]
)
"""A piece of a replica that a daemon is to copy to another of its segments. Rows of one `copy_id`
follow each other in the order of the source's extents; they name the same target, one extent of
bytes that takes them all. The source's slot must still hold that version. A last row whose source
is in the target's segment names a slot that has the same bytes in the very place of the target:
then only the target's slot is made, if that slot says so."""

COPIED = np.dtype([("copy_id", "<u8"), ("status", "<u4"), ("reserved", "<u4")])
"""What became of a copy: a CopyStatus."""


PULL = np.dtype(
    [
        ("copy_id", "<u8"),
        ("source_seq", "<u8"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("source_epoch", "<u4"),
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("replica", "<u2"),
        ("kind", "<u2"),
    ]
)
"""A piece of a replica that a daemon is to fetch from others. Rows of one `copy_id` follow each
other: the source's extents in their order (segment and slot say where; the slot must still hold
that version), and the one extent of this daemon's that takes all of it (PULL_TARGET; offset, length
and replica are the target's). A PULL_TWIN row names a slot of the target's segment, of another
version, that has the same bytes in that very place: nothing is fetched, if that slot says so."""
PULL_SOURCE: Final = 0
PULL_TARGET: Final = 1
PULL_TWIN: Final = 2
"""Kinds of PULL rows."""

SLOT_WANTED = np.dtype(
    [
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("epoch", "<u4"),
        ("reserved", "<u4"),
        ("seq", "<u8"),
    ]
)
"""A slot whose record is asked for, and the version that it must still hold."""


PROOF = np.dtype(
    [
        ("segment", "<u4"),
        ("kind", "<u4"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("proof", "V16"),
    ]
)
"""Bytes at a daemon, and that the asker has the same (`cenote.api.contents`). PROOF_FAST: XXH3-128
of them, canonical byte order, with the id of a grant as its seed. PROOF_STRONG: BLAKE2b of 16
bytes, whose key is that id (u64)."""
PROOF_FAST: Final = 0
PROOF_STRONG: Final = 1


class CopyStatus(Code):
    """Status of a COPIED row."""

    DONE = 0
    """Sealed, and flushed where it is on an SSD."""
    SOURCE_CHANGED = 1
    """The source is not that version any more, or its bytes are not what was sealed."""
    FAILED = 2
    """The device failed, or the copy was given up: another epoch began."""
    NO_SOURCE = 3
    """The daemon that has the source answers, and its slot does not hold that version: it was never
    sealed, or not yet."""
    UNREACHABLE = 4
    """The daemon that has the source does not answer."""


CLAIM = np.dtype(
    [
        ("session_id", "V16"),
        ("segment_index", "<u4"),
        ("is_view", "<u4"),
        ("offset", "<u8"),
        ("length", "<u8"),
    ]
)
"""A range that a session of an older epoch, or of an earlier daemon, may still be writing into, or
looking at in place."""
