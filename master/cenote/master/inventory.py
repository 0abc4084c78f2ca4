"""What a daemon's slot tables say, against what the object table says.

Pure comparison: which extents of the table are confirmed, and which slots nobody knows, gathered by
version into replicas that could be adopted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import SLOT, UNIT_BYTES

from .spans import Spans

__all__ = ["Found", "FoundReplica", "confirm", "gather"]

Slots = NDArray[np.void]
Slot: TypeAlias = dict[str, int]
"""The fields of one slot but for its digest."""


def confirm(
    spans: Spans,
    epochs: NDArray[np.uint64],
    seqs: NDArray[np.uint64],
    slots: Slots,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(which extents are sealed as the table has them, which slots the table knows).

    `spans`, `epochs`, `seqs`: the table's extents in one segment; `slots`: that segment's
    inventory.
    """
    sealed = np.zeros(len(spans), np.bool_)
    known = np.zeros(len(slots), np.bool_)
    if not len(spans) or not len(slots):
        return sealed, known
    numbers, order = np.ascontiguousarray(slots["slot"]), None
    if np.count_nonzero(numbers[1:] <= numbers[:-1]):  # daemons tell them in order
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
    at = np.searchsorted(numbers, spans[:, 1])
    at[at == len(numbers)] = 0
    sealed = numbers.take(at) == spans[:, 1]
    if order is not None:
        at = order[at]
    # Column by column: rows of 88 bytes that are gathered whole take three times as long.
    sealed &= slots["seq"].take(at) == seqs
    sealed &= slots["epoch"].take(at) == epochs
    sealed &= slots["offset"].take(at) == spans[:, 2].astype(np.uint64) * UNIT_BYTES
    sealed &= slots["replica"].take(at) == (spans[:, 0] >> 16) & 0xFF
    known[at[sealed]] = True
    return sealed, known


@dataclass(slots=True)
class FoundReplica:
    """Extents of one replica, by their index: (position in the inventory, slot)."""

    extents: dict[int, tuple[int, Slot]] = field(default_factory=dict)

    def is_whole(self) -> bool:
        some = next(iter(self.extents.values()))[1]
        count = some["extent_count"]
        if sorted(self.extents) != list(range(count)):
            return False
        size = some["object_size"]
        held = 0
        for _, slot in self.extents.values():
            if slot["extent_count"] != count or slot["object_size"] != size:
                return False
            if slot["offset"] % UNIT_BYTES or not slot["length"]:
                return False
            held += slot["length"]
        return held >= size > 0


@dataclass(slots=True)
class Found:
    """One version of one object, as it was found in slots."""

    epoch: int
    seq: int
    namespace_id: int
    generation: int
    digest: bytes
    size: int
    checksum: int
    key_length: int
    replicas: dict[int, FoundReplica] = field(default_factory=dict)
    clashes: bool = False
    """Slots of this version contradict each other."""


def gather(slots: Slots, at: NDArray[np.int64]) -> list[Found]:
    """The slots at these positions by version, oldest first. Slots of shards are left out."""
    names = [name for name in SLOT.names or () if name not in ("digest", "reserved", "flags")]
    columns = {name: slots[name][at].tolist() for name in names}
    digests = np.ascontiguousarray(slots["digest"][at]).tobytes()
    found: dict[tuple[int, int], Found] = {}
    for i, position in enumerate(at.tolist()):
        slot: Slot = {name: column[i] for name, column in columns.items()}
        if slot["shard_count"] > 1:
            continue
        version = (slot["epoch"], slot["seq"])
        digest = digests[16 * i : 16 * i + 16]
        entry = found.get(version)
        if entry is None:
            entry = found[version] = Found(
                *version,
                slot["namespace_id"],
                slot["generation"],
                digest,
                slot["object_size"],
                slot["checksum"],
                slot["key_length"],
            )
        replica = entry.replicas.setdefault(slot["replica"], FoundReplica())
        if (
            slot["extent_index"] in replica.extents
            or digest != entry.digest
            or slot["checksum"] != entry.checksum
            or slot["object_size"] != entry.size
        ):
            entry.clashes = True
        replica.extents[slot["extent_index"]] = (position, slot)
    return [found[version] for version in sorted(found)]
