"""Where an object's bytes lie, here and there, and how the two are cut to match.

An object of the pool is one or more *extents* (per replica), its local side one or more *pieces*.
A transfer takes *items*: runs that lie in one extent and in one piece. With one of each, which is
nearly always so, the items are the objects; otherwise both sides are laid out along one axis (all
objects of the batch, one after the other) and cut at every border of either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import ProtocolError

if TYPE_CHECKING:
    from .device_rows import Devices

__all__ = ["Items", "Pieces", "Placement", "cut_items", "place_replicas", "ranges"]

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Rows = NDArray[np.void]


@dataclass(slots=True)
class Pieces:
    """Local memory of a batch of objects."""

    addresses: U64
    lengths: U64
    starts: I64 | None
    """Pieces of object i are `starts[i]:starts[i + 1]`; None: exactly one each."""
    keepers: list[object] = field(default_factory=list, repr=False)
    """What keeps the memory valid."""
    devices: Devices | None = None
    """Where some of it lies on GPUs, which the processor must not touch."""

    def __len__(self) -> int:
        return len(self.addresses) if self.starts is None else len(self.starts) - 1

    def totals(self) -> U64:
        """Bytes per object."""
        if self.starts is None:
            return self.lengths
        ends = np.concatenate((np.zeros(1, np.uint64), np.cumsum(self.lengths, dtype=np.uint64)))
        totals: U64 = ends[self.starts[1:]] - ends[self.starts[:-1]]
        return totals

    def take(self, indexes: I64) -> Pieces:
        """The pieces of some of the objects, in that order."""
        if self.starts is None:
            return Pieces(self.addresses[indexes], self.lengths[indexes], None, self.keepers)
        first = self.starts[indexes]
        counts = self.starts[indexes + 1] - first
        rows = ranges(first, counts)
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        return Pieces(self.addresses[rows], self.lengths[rows], starts, self.keepers)


def ranges(first: I64, counts: I64) -> I64:
    """`first[0], first[0] + 1, ... ` (counts[0] of them), then those of the next, and so on."""
    total = int(counts.sum())
    ends = np.cumsum(counts)
    found: I64 = np.arange(total, dtype=np.int64) + np.repeat(first - (ends - counts), counts)
    return found


@dataclass(slots=True)
class Placement:
    """Extents of a batch of objects, with what follows from their order."""

    extents: Rows
    owner: I64
    """Per extent: its object's position."""
    replica: I64
    """Per extent: which of its object's replicas it belongs to, counted from 0."""
    start: I64
    """Per extent: its first byte's offset in the object (payload, then the key's tail)."""
    single: bool
    """One replica of one extent for each object."""


def place_replicas(extents: Rows, counts: I64, replicas: I64, sizes: I64) -> Placement:
    """Tell the replicas of a batch apart. `sizes`: what one replica's extents add up to.

    Raises ProtocolError where extents don't add up.
    """
    lengths = extents["length"].astype(np.int64)
    plain = np.count_nonzero(counts == 1) == np.count_nonzero(replicas == 1) == len(counts)
    if plain and len(extents) == len(counts):
        return place_single(extents, lengths, sizes)
    total = int(counts.sum())
    if total != len(extents) or (len(counts) and int(counts.min()) <= 0):
        raise ProtocolError(f"the master sent {len(extents)} extents where it counted {total}")
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    ends = np.cumsum(lengths)
    first = np.cumsum(counts) - counts
    before = ends - lengths
    along = before - before[first][owner]
    size = sizes[owner]
    replica = along // size
    start = along - replica * size
    sums = np.add.reduceat(lengths, first) if total else lengths
    whole = bool((start + lengths <= size).all()) and bool((lengths > 0).all())
    if not whole or not np.array_equal(sums, sizes * replicas):
        raise ProtocolError("the master sent extents that don't add up to their object's replicas")
    return Placement(extents, owner, replica, start, single=False)


def place_single(extents: Rows, lengths: I64, sizes: I64) -> Placement:
    """`place_replicas` for one replica of one extent each."""
    if np.count_nonzero(lengths != sizes):
        raise ProtocolError("the master sent extents that don't add up to their object")
    zeros = np.zeros(len(extents), np.int64)
    return Placement(extents, np.arange(len(extents), dtype=np.int64), zeros, zeros, single=True)


@dataclass(slots=True)
class Items:
    """What a transfer takes: one row for each run."""

    extents: Rows
    addresses: U64
    owner: I64
    """Per item: its object's position."""
    extent: I64
    """Per item: the position of the extent that it lies in."""
    whole: bool
    """Each object is one item."""

    def followed_by(self, more: Items) -> Items:
        """These items and then those; `whole` is of these."""
        if not len(more.owner):
            return self
        return Items(
            np.concatenate((self.extents, more.extents)),
            np.concatenate((self.addresses, more.addresses)),
            np.concatenate((self.owner, more.owner)),
            np.concatenate((self.extent, more.extent)),
            self.whole,
        )


def cut_items(extents: Rows, owner: I64, start: I64, sizes: I64, pieces: Pieces) -> Items:
    """The items of one copy of each object.

    `extents`, `owner`, `start`: of one replica for each object, in order; `sizes`: of the payloads
    (what an extent holds beyond is the key's tail and not ours to move). `pieces[i]` belongs to
    object i and has room for it.
    """
    if len(extents) == len(sizes) and pieces.starts is None:
        rows = extents.copy()
        rows["length"] = sizes
        return Items(rows, pieces.addresses, owner, np.arange(len(rows)), whole=True)
    base = np.cumsum(sizes) - sizes
    kept = np.flatnonzero(start < sizes[owner])
    extents, owner, start = extents[kept], owner[kept], start[kept]
    remote = base[owner] + start
    local, local_addresses = _pieces_along(pieces, sizes, base)
    cuts = np.union1d(remote, local)
    total = int(sizes.sum())
    lengths = np.diff(np.append(cuts, total))
    of_extent = np.searchsorted(remote, cuts, side="right") - 1
    of_piece = np.searchsorted(local, cuts, side="right") - 1
    rows = extents[of_extent]
    rows["offset"] += (cuts - remote[of_extent]).astype(np.uint64)
    rows["length"] = lengths
    addresses = local_addresses[of_piece] + (cuts - local[of_piece]).astype(np.uint64)
    item_owner = owner[of_extent]
    return Items(rows, addresses, item_owner, kept[of_extent], whole=len(rows) == len(sizes))


def _pieces_along(pieces: Pieces, sizes: I64, base: I64) -> tuple[I64, U64]:
    """Where pieces begin on the axis of all objects, and their addresses; unused ones left out."""
    if pieces.starts is None:
        return base, pieces.addresses
    lengths = pieces.lengths.astype(np.int64)
    counts = np.diff(pieces.starts)
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    ends = np.cumsum(lengths)
    before = ends - lengths
    within = before - before[pieces.starts[:-1]][owner]
    used = (within < sizes[owner]) & (lengths > 0)
    return (base[owner] + within)[used], pieces.addresses[used]
