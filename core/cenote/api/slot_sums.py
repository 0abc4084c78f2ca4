"""Whether a slot table and an object table agree, in 12 bytes for a block of slot numbers.

A daemon sums up what it has sealed, block by block; the master does the same with what its table
has there. Where both are equal, the same slots hold the same versions at the same places, and no
row of the inventory need be sent. `docs/internals/protocol.md` gives the hash for other languages.

A sum is one of 64-bit hashes, modulo 2**64: equal by chance once in 2**64 blocks that differ. The
count is there because the master's side must notice two extents that claim one slot.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from .rows import SLOT_SUM

__all__ = ["add_sums", "slot_hashes", "sums_of_columns"]

U64 = NDArray[np.uint64]

_SEQ_FACTOR: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_PLACE_FACTOR: Final = np.uint64(0xC2B2_AE3D_27D4_EB4F)
_MIX_1: Final = np.uint64(0xBF58_476D_1CE4_E5B9)
_MIX_2: Final = np.uint64(0x94D0_49BB_1331_11EB)
_HALF: Final = np.uint64(32)
_REPLICA_SHIFT: Final = np.uint64(56)
_SHIFT_1: Final = np.uint64(30)
_SHIFT_2: Final = np.uint64(27)


def slot_hashes(slots: U64, epochs: U64, seqs: U64, offsets_bytes: U64, replicas: U64) -> U64:
    """One for each sealed extent; `epochs` and `replicas` may be overwritten."""
    hashes = seqs * _SEQ_FACTOR
    epochs <<= _HALF
    epochs |= slots
    epochs *= _PLACE_FACTOR
    hashes ^= epochs
    hashes ^= hashes >> _HALF
    hashes *= _MIX_1
    replicas <<= _REPLICA_SHIFT
    hashes += replicas
    hashes += offsets_bytes
    hashes ^= hashes >> _SHIFT_1
    hashes *= _MIX_1
    hashes ^= hashes >> _SHIFT_2
    hashes *= _MIX_2
    hashes ^= hashes >> _HALF
    return hashes


def sums_of_columns(
    hashes: U64, are_sealed: NDArray[np.bool_], slots_per_block: int
) -> NDArray[np.void]:
    """SLOT_SUM of slots in their order, from the beginning of a block on."""
    blocks = -(-len(hashes) // slots_per_block)
    padded = np.zeros(blocks * slots_per_block, np.uint64)
    padded[: len(hashes)] = hashes
    padded[: len(hashes)] *= are_sealed
    counted = np.zeros(len(padded), np.bool_)
    counted[: len(hashes)] = are_sealed
    sums = np.zeros(blocks, SLOT_SUM)
    sums["sum"] = padded.reshape(blocks, slots_per_block).sum(axis=1, dtype=np.uint64)
    sums["count"] = counted.reshape(blocks, slots_per_block).sum(axis=1)
    return sums


def add_sums(
    sums: NDArray[np.uint64], counts: NDArray[np.uint64], blocks: NDArray[np.int64], hashes: U64
) -> None:
    """Add extents to the sums and counts of their blocks, in place. Extents in any order."""
    np.add.at(sums, blocks, hashes)
    np.add.at(counts, blocks, np.uint64(1))
