"""What a daemon's memory and a master's state say, for the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cenote.store.slot_format import SLOT_BYTES, SLOT_RECORD, STATE_SEALED

if TYPE_CHECKING:
    from cenote.master.pool import Pool
    from sim.stores import SegmentFile

__all__ = ["is_intact", "is_sealed", "known_versions"]


def is_sealed(file: SegmentFile, slot: int, version: tuple[int, int]) -> bool:
    if slot >= file.slots:
        return False
    record = np.frombuffer(file.table, SLOT_RECORD, 1, slot * SLOT_BYTES)[0]
    return bool(
        record["state"] == STATE_SEALED and (int(record["epoch"]), int(record["seq"])) == version
    )


def is_intact(
    value: bytes, placed: list[tuple[SegmentFile, int, int]], version: tuple[int, int]
) -> bool:
    """Whether all bytes of an object are where its slots say."""
    for file, slot, _ in placed:
        if not is_sealed(file, slot, version):
            continue
        record = np.frombuffer(file.table, SLOT_RECORD, 1, slot * SLOT_BYTES)[0]
        if int(record["extent_count"]) == 1:
            start = int(record["offset"])
            if file.data[start : start + len(value)].tobytes() != value:
                return False
    return True


def known_versions(pool: Pool) -> set[tuple[int, int]]:
    """(epoch, seq) of all that a master has."""
    records = pool.records_of(pool.objects.live_rows(0, pool.objects.high_water)[0])
    epochs = (records[:, 3] & np.uint64(0xFFFF_FFFF)).tolist()
    return set(zip(epochs, records[:, 2].tolist(), strict=True))
