"""SEAL rows: what each daemon is told of the extents that it is to seal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import SEAL

from .pieces import Placement

__all__ = ["alike_rows", "fill_rows", "seal_rows"]

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


def seal_rows(
    placement: Placement,
    extents: I64,
    seqs: U64,
    checksums: U64,
    sizes: I64,
    keys: Sequence[bytes],
    digests: bytes,
) -> NDArray[np.void]:
    """A row for each of these extents. `seqs` ... `digests` are of the placement's objects."""
    packed = np.frombuffer(digests, "V16")
    lengths = np.fromiter(map(len, keys), np.uint16, len(keys))
    rows = np.zeros(len(extents), SEAL)
    if placement.single and len(extents) == len(keys):
        _fill(rows, placement.extents, seqs, checksums, sizes, packed, lengths)
    else:
        owner = placement.owner[extents]
        _fill(
            rows,
            placement.extents[extents],
            seqs[owner],
            checksums[owner],
            sizes[owner],
            packed[owner],
            lengths[owner],
        )
    if placement.single:
        rows["extent_count"] = 1
        return rows
    rows["replica"] = placement.replica[extents]
    index, count = _extent_numbers(placement)
    rows["extent_index"] = index[extents]
    rows["extent_count"] = count[extents]
    return rows


def _fill(
    rows: NDArray[np.void],
    granted: NDArray[np.void],
    seqs: U64,
    checksums: U64,
    sizes: I64,
    digests: NDArray[np.void],
    key_lengths: NDArray[np.uint16],
) -> None:
    """The columns of SEAL rows that are not mostly zero."""
    for name in ("segment", "slot", "offset", "length"):
        rows[name] = granted[name]
    rows["seq"] = seqs
    rows["checksum"] = checksums
    rows["object_size"] = sizes
    rows["digest"] = digests
    rows["key_length"] = key_lengths


def alike_rows(
    extents: NDArray[np.void], length: int, size: int, key_length: int
) -> NDArray[np.void]:
    """Rows of objects that have one extent each and are as long as each other, but for what
    `fill_rows` fills in."""
    rows = np.zeros(len(extents), SEAL)
    for name in ("segment", "slot", "offset"):
        rows[name] = extents[name]
    rows["length"] = length
    rows["object_size"] = size
    rows["extent_count"] = 1
    rows["key_length"] = key_length
    return rows


def fill_rows(rows: NDArray[np.void], seq_first: int, checksums: U64, digests: bytes) -> None:
    """What such rows have of their own. Their seqs follow each other."""
    rows["seq"] = np.arange(seq_first, seq_first + len(rows), dtype=np.uint64)
    rows["checksum"] = checksums
    rows["digest"] = np.frombuffer(digests, "V16")


def _extent_numbers(placement: Placement) -> tuple[I64, I64]:
    """Per extent: its number within its replica, and how many that replica has."""
    first = placement.start == 0
    group = np.cumsum(first) - 1
    starts = np.flatnonzero(first)
    index: I64 = np.arange(len(first), dtype=np.int64) - starts[group]
    count: I64 = np.bincount(group)[group]
    return index, count
