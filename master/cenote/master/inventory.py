"""What a daemon's slot tables say, against what the object table says.

Pure comparison: which extents of the table are confirmed, and which slots nobody knows, gathered by
version into replicas that could be adopted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import SLOT, UNIT_BYTES

from .spans import Spans

__all__ = ["Found", "FoundReplica", "confirm", "gather"]

Slots = NDArray[np.void]


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
    order = np.argsort(slots["slot"], kind="stable")
    numbers = slots["slot"][order]
    at = np.searchsorted(numbers, spans[:, 1])
    at[at == len(numbers)] = 0
    at = order[at]
    mine = slots[at]
    sealed = (
        (mine["slot"] == spans[:, 1])
        & (mine["seq"] == seqs)
        & (mine["epoch"] == epochs)
        & (mine["offset"] == spans[:, 2].astype(np.uint64) * UNIT_BYTES)
        & (mine["replica"] == (spans[:, 0] >> 16) & 0xFF)
    )
    known[at[sealed]] = True
    return sealed, known


@dataclass(slots=True)
class FoundReplica:
    """Extents of one replica, by their index: (segment id, slot row)."""

    extents: dict[int, tuple[int, np.void]] = field(default_factory=dict)

    def is_whole(self) -> bool:
        some = next(iter(self.extents.values()))[1]
        count = int(some["extent_count"])
        if sorted(self.extents) != list(range(count)):
            return False
        size = int(some["object_size"])
        held = 0
        for _, slot in self.extents.values():
            if int(slot["extent_count"]) != count or int(slot["object_size"]) != size:
                return False
            if int(slot["offset"]) % UNIT_BYTES or not int(slot["length"]):
                return False
            held += int(slot["length"])
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


def gather(slots: Slots, segment_ids: NDArray[np.int64]) -> list[Found]:
    """Slots by version, oldest first. `segment_ids`: where each slot lies."""
    if slots.dtype != SLOT:
        raise TypeError(f"an inventory has {SLOT}, not {slots.dtype}")
    found: dict[tuple[int, int], Found] = {}
    for slot, segment_id in zip(slots, segment_ids.tolist(), strict=True):
        version = (int(slot["epoch"]), int(slot["seq"]))
        digest = slot["digest"].tobytes()
        entry = found.get(version)
        if entry is None:
            entry = found[version] = Found(
                *version,
                int(slot["namespace_id"]),
                int(slot["generation"]),
                digest,
                int(slot["object_size"]),
                int(slot["checksum"]),
                int(slot["key_length"]),
            )
        replica = entry.replicas.setdefault(int(slot["replica"]), FoundReplica())
        index = int(slot["extent_index"])
        if (
            index in replica.extents
            or digest != entry.digest
            or int(slot["checksum"]) != entry.checksum
            or int(slot["object_size"]) != entry.size
        ):
            entry.clashes = True
        replica.extents[index] = (segment_id, slot)
    return [found[version] for version in sorted(found)]
