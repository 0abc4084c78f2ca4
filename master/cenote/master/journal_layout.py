"""Layout of the journal's entries: what encoder and decoder have in common.

An entry is a head and, for a batch of objects, its columns one behind the other.
docs/internals/journal.md has the same as tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final, TypeAlias

from cenote.api.errors import ResourceUnavailable

from .effects import PLACED, DurableEffect

PAYLOAD_BYTES_MAX: Final = 65_480
"""Of one entry: a record of 64 KiB less the headers of record and entry."""
MERGED_ROWS_MAX: Final = 16_384
"""Rows of neighbouring entries that a reader joins into one effect."""


class JournalCorrupt(ResourceUnavailable):
    """The journal or snapshot holds bytes that we did not write, or lacks some that we did."""

    default_remedy = (
        "restore the metadata directory from a copy, or move all of it away: the pool is rebuilt "
        "from what its store daemons hold"
    )


class SchemaUnknown(JournalCorrupt):
    """Another release wrote this journal."""

    default_remedy = "start the cenote release that wrote it"


@dataclass(slots=True)
class SnapshotEnd:
    """Last entry of a snapshot: it stands for the journal up to and including `covers`."""

    covers: int
    """Number of the last journal entry that the snapshot includes."""
    epoch: int
    """Highest epoch among what it includes."""


Entry: TypeAlias = DurableEffect | SnapshotEnd

KIND_STORED: Final = 1
KIND_GONE: Final = 2
KIND_REPLICAS: Final = 3
KIND_NAMESPACE: Final = 4
KIND_NODE: Final = 5
KIND_SEGMENT: Final = 6
KIND_GROWN: Final = 7
KIND_SEGMENT_GONE: Final = 8
KIND_PINNED: Final = 9
KIND_EPOCH: Final = 10
KIND_SERVES: Final = 12
KIND_POOL: Final = 14
KIND_SEGMENT_MET: Final = 15
KIND_EXPIRES: Final = 16
KIND_QUOTA: Final = 17
KIND_DRAINS: Final = 20
KIND_NAMESPACE_GONE: Final = 21
KIND_CONFIGURED: Final = 22
KIND_DIGESTED: Final = 23
KIND_SNAPSHOT_END: Final = 255

STORED: Final = Struct("<IIIII")  # namespace, generation, epoch, objects, extents
GONE: Final = Struct("<III")  # namespace, reason, objects
REPLICAS: Final = Struct("<II")  # objects, extents
PINNED: Final = Struct("<IIII")  # namespace, pinned, ttl_ms, objects
DIGESTED: Final = Struct("<II")  # 0, objects
EXPIRES: Final = Struct("<QII")  # until (unix, ms), ttl_ms, objects
NAMESPACE: Final = Struct("<IIQIII")  # id, generation, seed, durability, lengths of 2 texts
NAMESPACE_GONE: Final = Struct("<I")
CONFIGURED: Final = Struct("<I")  # values
CONFIGURED_VALUE: Final = Struct("<dI")  # value, length of its name
QUOTA: Final = Struct("<IIQQQ")  # namespace, priority, dram, ssd, objects
NODE: Final = Struct("<IIIII")  # id, lengths of 4 texts
SERVES: Final = Struct("<II")  # node, endpoints
ENDPOINT: Final = Struct("<III")  # kind, lengths of 2 texts
SEGMENT: Final = Struct("<IIIIQIII")  # id, node, index, tier, size, unit, slots, length of a text
GROWN: Final = Struct("<IIII")  # segment, offset, length, slots
SEGMENT_GONE: Final = Struct("<I")
SEGMENT_MET: Final = Struct("<II")  # segment, epoch
DRAINS: Final = Struct("<IIQ")  # node, whether, bandwidth
EPOCH: Final = Struct("<IIQ")  # epoch, 0, last seq
POOL: Final = Struct("<IIII")  # rebuilt epoch, adopt below, length of id, ancestors
POOL_ID_BYTES: Final = 16
END: Final = Struct("<QII")  # covers, epoch, 0

# Bytes of one object in each column, in the order in which the columns lie in an entry.
# stored: digest, size, checksum, seq, tail, extent count, replicas
STORED_WIDTHS: Final = (16, 8, 8, 8, 2, 2, 1)
REPLICAS_WIDTHS: Final = (16, 8, 2, 1)  # digest, seq, extents, replicas
GONE_WIDTHS: Final = (16, 8)  # digest, seq
PINNED_WIDTHS: Final = (16,)  # digest
EXPIRES_WIDTHS: Final = (16, 8)  # digest, seq
DIGESTED_WIDTHS: Final = (16, 8, 16)  # digest, seq, content digest
STORED_ROW_BYTES: Final = sum(STORED_WIDTHS)
REPLICAS_ROW_BYTES: Final = sum(REPLICAS_WIDTHS)
EXTENT_BYTES: Final = PLACED.itemsize
HEAD_BYTES_MAX: Final = 20
