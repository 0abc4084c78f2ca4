"""Pieces of memory on GPUs, and what of them is copied to and from host memory in one turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import InvalidBuffer
from cenote.runtime.units import format_size

from .pieces import Pieces

__all__ = ["ON_HOST", "CopyRows", "Devices", "rows_of", "staged_pieces", "turns_of"]

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

ON_HOST: Final = -1
"""Instead of a device's number: ordinary memory."""


@dataclass(slots=True)
class Devices:
    """Of each piece of a batch, in the order of `Pieces.addresses`."""

    numbers: I64
    """Which GPU, ON_HOST: none."""
    streams: I64
    """What its owner works on it with: see `DeviceMemory`."""
    direct: bool = False
    """All of it is known to NICs, which may read and write it by themselves."""


@dataclass(slots=True)
class CopyRows:
    """Copies between pieces and staging memory, one after the other in both."""

    pieces: U64
    """Addresses, on the devices of `numbers`."""
    staged: U64
    """Addresses here."""
    lengths: U64
    numbers: I64
    streams: I64

    def __len__(self) -> int:
        return len(self.lengths)


def turns_of(sizes: U64, area_bytes: int) -> list[tuple[int, int]]:
    """Cut a batch into runs of neighbours that fit into one staging area each: (first, last + 1).

    Raises InvalidBuffer naming the position of an object that does not.
    """
    if not len(sizes):
        return []
    if int(sizes.max()) > area_bytes:
        at = int(np.argmax(sizes > np.uint64(area_bytes)))
        raise InvalidBuffer(
            f"buffer {at} of {format_size(int(sizes[at]))} on a GPU is more than can be staged at"
            f" once ({format_size(area_bytes)})",
            remedy="raise device_staging_bytes (four objects have room in it), or put it in parts",
        )
    ends = np.cumsum(sizes, dtype=np.uint64)
    turns: list[tuple[int, int]] = []
    first, before = 0, 0
    while first < len(sizes):
        last = int(np.searchsorted(ends, np.uint64(before + area_bytes), side="right"))
        turns.append((first, last))
        first, before = last, int(ends[last - 1])
    return turns


def staged_pieces(sizes: U64, address: int, keeper: object) -> Pieces:
    """Objects of these sizes back to back from `address` on."""
    ends = np.cumsum(sizes, dtype=np.uint64)
    return Pieces(ends - sizes + np.uint64(address), sizes, None, [keeper])


def rows_of(
    pieces: Pieces, devices: Devices, objects: I64, staged: Pieces, first: int, sizes: U64
) -> CopyRows:
    """What is copied for some of a turn's objects.

    `objects`: their positions in the batch, whose pieces are `pieces`; `staged` holds the turn,
    which begins with object `first`; `sizes`: how many bytes of each of `objects`.
    """
    at = staged.addresses[objects - first]
    if pieces.starts is None:
        which, lengths, starts = objects, sizes, at
    else:
        heads = pieces.starts[objects]
        counts = pieces.starts[objects + 1] - heads
        owner = np.repeat(np.arange(len(objects)), counts)
        run = np.cumsum(counts) - counts
        which = np.arange(len(owner)) - np.repeat(run, counts) + np.repeat(heads, counts)
        long = pieces.lengths[which]
        ends = np.cumsum(long, dtype=np.uint64)
        before = ends - long
        within = before - (before[run] if len(run) else before)[owner]
        limit = sizes[owner]
        lengths = np.minimum(long, limit - np.minimum(within, limit))
        starts = at[owner] + within
        used = lengths > 0
        which, lengths, starts = which[used], lengths[used], starts[used]
    return _merged(
        CopyRows(
            pieces.addresses[which], starts, lengths, devices.numbers[which], devices.streams[which]
        )
    )


def _merged(rows: CopyRows) -> CopyRows:
    """Neighbours on both sides become one copy."""
    if len(rows) < 2:
        return rows
    breaks = rows.pieces[:-1] + rows.lengths[:-1] != rows.pieces[1:]
    breaks |= rows.staged[:-1] + rows.lengths[:-1] != rows.staged[1:]
    breaks |= rows.numbers[:-1] != rows.numbers[1:]
    breaks |= rows.streams[:-1] != rows.streams[1:]
    firsts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(breaks) + 1))
    lengths = np.add.reduceat(rows.lengths, firsts)
    return CopyRows(
        rows.pieces[firsts],
        rows.staged[firsts],
        lengths,
        rows.numbers[firsts],
        rows.streams[firsts],
    )
