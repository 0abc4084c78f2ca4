"""Keys that lie behind their payloads: what of them goes where.

A key of over 64 bytes is written by whoever writes the payload, under the same grant, to the end of
each replica. So an extent may hold payload, payload and key, or (part of) the key alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import UNIT_BYTES
from cenote.runtime.memory import address_of

from .pieces import Items, Pieces, Placement, Rows, cut_items
from .steps import Part

__all__ = [
    "STAGED_BYTES_MAX",
    "STAGING_BYTES_MAX",
    "KeyTails",
    "Members",
    "can_stage",
    "cut_tails",
    "items_of_replica",
    "join_neighbours",
    "join_part",
    "staged_stride",
]

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

STAGED_BYTES_MAX: Final = 1 << 10
"""Larger payloads of a batch are not copied to stand before their keys: a copy of 512 bytes takes
0.4 us with all that belongs to it, one of 4 KiB (out of the cache, in pages that are new) 3, an
item of the key's own less than 1."""
STAGING_BYTES_MAX: Final = 1 << 20
"""Of a whole batch: what is copied is read again, so it should still be in the cache."""


class KeyTails:
    """Keys of a batch in one piece of memory; objects without a tail have a length of 0."""

    __slots__ = ("addresses", "blob", "lengths")

    def __init__(self, keys: Sequence[bytes], lengths: I64) -> None:
        self.blob = b"".join(keys)
        """Keeps the addresses valid."""
        self.lengths = lengths
        sizes = np.fromiter(map(len, keys), np.int64, len(keys))
        starts = np.cumsum(sizes) - sizes
        self.addresses: U64 = starts.astype(np.uint64) + np.uint64(address_of(self.blob))


def staged_stride(length: int) -> int:
    """Bytes from one staged object to the next: extents of a batch lie as far apart."""
    return -(-length // UNIT_BYTES) * UNIT_BYTES


def can_stage(sizes: I64, tails: I64, pieces: Pieces) -> bool:
    """Whether all of a batch is alike, and small enough to be copied."""
    size, tail = int(sizes[0]), int(tails[0])
    return (
        pieces.starts is None
        and tail > 0
        and size <= STAGED_BYTES_MAX
        and len(sizes) * staged_stride(size + tail) <= STAGING_BYTES_MAX
        and not np.count_nonzero(sizes != size)
        and not np.count_nonzero(tails != tail)
    )


def cut_tails(extents: Rows, owner: I64, start: I64, sizes: I64, tails: KeyTails) -> Items:
    """The items of the keys behind one copy of each payload; arguments as for `cut_items`.

    `tails` are of the same objects as `sizes`, in order.
    """
    begin = sizes[owner]
    first = np.maximum(start, begin)
    end = np.minimum(start + extents["length"].astype(np.int64), begin + tails.lengths[owner])
    kept = np.flatnonzero(end > first)
    rows = extents[kept]
    owner, first = owner[kept], first[kept]
    rows["offset"] += (first - start[kept]).astype(np.uint64)
    rows["length"] = end[kept] - first
    addresses = tails.addresses[owner] + (first - begin[kept]).astype(np.uint64)
    return Items(rows, addresses, owner, kept, whole=False)


def items_of_replica(
    placement: Placement, replica: int, sizes: I64, pieces: Pieces, tails: KeyTails | None
) -> Items:
    """What one replica of every object takes: `extent` and `owner` are of the placement.

    `sizes` and `pieces` are of its objects; `tails`: keys to write behind them.
    """
    if placement.single:
        place = placement.extents, placement.owner, placement.start
        items = cut_items(*place, sizes, pieces)
        return items if tails is None else items.followed_by(cut_tails(*place, sizes, tails))
    select = np.flatnonzero(placement.replica == replica)
    extents, start = placement.extents[select], placement.start[select]
    owner = placement.owner[select]
    rows = np.unique(owner)
    if len(rows) == len(sizes):
        items = cut_items(extents, owner, start, sizes, pieces)
    else:
        numbers = np.searchsorted(rows, owner)
        items = cut_items(extents, numbers, start, sizes[rows], pieces.take(rows))
        items.owner = rows[items.owner]
    if tails is not None:
        items = items.followed_by(cut_tails(extents, owner, start, sizes, tails))
    items.extent = select[items.extent]
    return items


def join_neighbours(extents: Rows, addresses: U64) -> tuple[Rows, U64, I64] | None:
    """Items of one length that follow each other in the pool and here, as one item for each run.

    Returns the joined items and how many each stands for; None where there is nothing to join. What
    lies between two extents (less than a unit) is written, too: it belongs to the first of them.
    """
    if len(extents) < 2:
        return None
    length = int(extents["length"][0])
    stride = np.uint64(staged_stride(length))
    offsets, segments = extents["offset"], extents["segment"]
    breaks = offsets[1:] - offsets[:-1] != stride
    breaks |= addresses[1:] - addresses[:-1] != stride
    breaks |= segments[1:] != segments[:-1]
    if not np.count_nonzero(breaks):
        rows = extents[:1].copy()
        rows["length"] = (len(extents) - 1) * int(stride) + length
        return rows, addresses[:1], np.array([len(extents)])
    seams = np.flatnonzero(breaks) + 1
    if len(seams) == len(extents) - 1:
        return None
    edges = np.concatenate((np.zeros(1, np.int64), seams, np.array([len(extents)])))
    firsts = edges[:-1]
    counts = edges[1:] - firsts
    rows = extents[firsts]
    rows["length"] = (counts - 1) * int(stride) + length
    return rows, addresses[firsts], counts


class Members:
    """What one part of a transfer consists of."""

    __slots__ = ("counts", "extents", "hashed", "where")

    def __init__(self, extents: I64, where: I64 | None, hashed: bool) -> None:
        self.extents = extents
        """Per item: its extent."""
        self.where = where
        """Which of the replica's items they are; None: all."""
        self.hashed = hashed
        self.counts: I64 | None = None
        """How many items each joined one stands for."""


def join_part(part: Part) -> I64 | None:
    """Make neighbours one item; how many each stands for."""
    joined = join_neighbours(part.extents, part.addresses)
    if joined is None:
        return None
    part.extents, part.addresses, counts = joined
    return counts
