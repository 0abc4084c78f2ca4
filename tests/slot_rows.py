"""SEAL rows and slot tables for the store's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import SEAL, SLOT_REF
from cenote.store.slot_format import SLOT_BYTES
from cenote.store.slots import SlotTable

__all__ = ["Sealed", "refs", "seal", "seal_arguments", "table"]


@dataclass(frozen=True, slots=True)
class Sealed:
    """One row to seal, in values that a test likes to vary."""

    slot: int
    seq: int = 1
    offset: int = 0
    length: int = 100
    key: bytes = b"key"
    checksum: int = 7
    object_size: int = 100
    digest: bytes = bytes(range(16))
    extent_index: int = 0
    extent_count: int = 1
    shard_index: int = 0
    shard_count: int = 0
    replica: int = 0
    flags: int = 0


def table(
    slots: int = 16, data_bytes: int = 1 << 16, *, memory: bytearray | None = None
) -> tuple[SlotTable, bytearray, bytearray]:
    """A slot table in ordinary memory: the table, its memory, its data area."""
    memory = bytearray(slots * SLOT_BYTES) if memory is None else memory
    data = bytearray(data_bytes)
    made = SlotTable(memoryview(memory), memoryview(data), unit_bytes=64, limit_bytes=data_bytes)
    return made, memory, data


def seal_arguments(
    rows: Sequence[Sealed], segment: int = 1
) -> tuple[NDArray[np.void], memoryview, NDArray[np.int64]]:
    """The rows, keys and key starts that `Segment.seal` takes."""
    packed = np.zeros(len(rows), SEAL)
    for i, row in enumerate(rows):
        for name in SEAL.names or ():
            if hasattr(row, name):
                packed[name][i] = getattr(row, name)
        packed["digest"][i] = np.void(row.digest)
        packed["key_length"][i] = len(row.key)
    packed["segment"] = segment
    lengths = np.array([len(row.key) for row in rows], np.int64)
    starts = np.cumsum(lengths) - lengths
    return packed, memoryview(b"".join(row.key for row in rows)), starts


def seal(
    target: SlotTable,
    *rows: Sealed,
    epoch: int = 1,
    namespace_id: int = 5,
    generation: int = 3,
) -> list[int]:
    """Seal the rows as one batch; their statuses."""
    statuses = target.seal(epoch, namespace_id, generation, *seal_arguments(rows))
    return [int(status) for status in statuses]


def refs(*versions: tuple[int, int, int], segment_index: int = 0) -> NDArray[np.void]:
    """SLOT_REF rows of (slot, epoch, seq)."""
    packed = np.zeros(len(versions), SLOT_REF)
    for i, (slot, epoch, seq) in enumerate(versions):
        packed[i] = (segment_index, slot, epoch, seq)
    return packed
