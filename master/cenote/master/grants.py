"""Grants: what writers may fill, kept in the grant until it is decided.

A grant stands for one PutStart. Nothing of it is in the object table: a writer that dies leaves no
row behind. Its arrays have one entry for each granted position; `pending` says which are undecided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .namespaces import Namespace
from .spans import Spans, distinct, units_of

__all__ = ["Grant", "GrantTable", "Positions"]

Positions: TypeAlias = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Grant:
    grant_id: int
    session_id: bytes
    namespace: Namespace
    batch: int
    """Keys of the PutStart batch, granted or not."""
    positions: Positions | None
    """Granted positions of the batch, ascending; None = all of them."""
    digests: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    tails: NDArray[np.uint16]
    stamps: NDArray[np.uint64]
    counts: NDArray[np.uint16] | None
    """Extents of each; None = one each (and one replica each)."""
    replicas: NDArray[np.uint8] | None
    spans: Spans
    """All extents, object by object, replica by replica."""
    durability: int
    ttl_s: float
    units: int
    """Of what is pending."""
    drops: int
    """`Segments.drops` when it was made: if more are gone since, some extents may be."""
    links: int
    """`Pool.links` when none of its keys was there; -1 = some were. If nothing was linked since,
    none is there now."""
    spare_units: int = 0
    """Of each extent of a grant of spares, whose keys PutCommit names; 0 = the keys are known."""
    pending: NDArray[np.bool_] | None = None
    """None = all."""
    chain: bool = False
    """Its keys are blocks of one prefix chain, in order."""
    request_id: int = 0
    """Of the PutStart; 0 = it had none."""
    contents: NDArray[np.uint64] | None = None
    """uint64[n, 2]: content digests, zeros where there is none; None = none has one."""
    checksums: NDArray[np.uint64] | None = None
    """Of a grant of aliases: of the bytes that lie in its extents already. Nothing is written
    there; the extents are others', and shared."""
    foreign: NDArray[np.bool_] | None = None
    """Of a grant of aliases: which are of another namespace's bytes. These take a strong proof."""
    starts: Positions | None = None
    """First span of each; made when first needed."""

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def pending_count(self) -> int:
        return len(self.digests) if self.pending is None else int(np.count_nonzero(self.pending))

    def entries_at(self, indexes: NDArray[np.integer]) -> Positions:
        """Entries of batch positions; -1 where not granted, decided, out of range, or repeated."""
        at = indexes.astype(np.int64)
        if self.positions is None:
            entries = np.where(at < self.batch, at, -1)
        else:
            found = np.searchsorted(self.positions, at)
            found[found == len(self.positions)] = 0
            entries = np.where(self.positions[found] == at, found, -1)
        if self.pending is not None:
            entries[~self.pending[entries]] = -1
        if len(entries) > 1 and len(distinct(entries)) != len(entries):
            _, first = np.unique(entries, return_index=True)
            repeated = np.ones(len(entries), np.bool_)
            repeated[first] = False
            entries[repeated] = -1
        return entries

    def all_entries(self) -> Positions:
        """Entries that are pending."""
        if self.pending is None:
            return np.arange(len(self.digests))
        return np.flatnonzero(self.pending)

    def is_whole(self, entries: Positions) -> bool:
        """Whether these are all entries, in their order."""
        n = len(entries)
        return n == len(self.digests) and (n == 1 or bool((entries[1:] > entries[:-1]).all()))

    def spans_of(self, entries: Positions) -> Spans:
        """The extents of entries, one after the other."""
        if self.counts is None:
            return self.spans.take(entries, axis=0)
        if self.starts is None:
            ends = np.cumsum(self.counts, dtype=np.int64)
            self.starts = ends - self.counts
        counts = self.counts[entries].astype(np.int64)
        ends = np.cumsum(counts)
        within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        return self.spans.take(np.repeat(self.starts[entries], counts) + within, axis=0)

    def settle(self, entries: Positions) -> None:
        """Entries are decided or given up."""
        if self.pending is None:
            self.pending = np.ones(len(self.digests), np.bool_)
        self.pending[entries] = False

    def pending_spans(self) -> Spans:
        return self.spans if self.pending is None else self.spans_of(self.all_entries())


class GrantTable:
    """`first_id` carries the epoch in its high bits."""

    __slots__ = ("_next_id", "by_id", "keys", "units", "units_by_incarnation")

    def __init__(self, first_id: int) -> None:
        self.by_id: dict[int, Grant] = {}
        self._next_id = first_id
        self.units = 0
        """Granted and undecided."""
        self.keys = 0
        """Likewise."""
        self.units_by_incarnation: dict[int, int] = {}
        """The same units, by whose they are to be; none where it is 0."""

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def next_id(self) -> int:
        """All grants so far have lower ids."""
        return self._next_id

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def add(self, grant: Grant) -> None:
        self.by_id[grant.grant_id] = grant
        self._count(grant, grant.units)
        self.keys += len(grant)

    def _count(self, grant: Grant, units: int) -> None:
        self.units += units
        owner, owned = grant.namespace.incarnation, self.units_by_incarnation
        left = owned.get(owner, 0) + units
        if left:
            owned[owner] = left
        else:
            owned.pop(owner, None)

    def drop(self, grant: Grant) -> None:
        """The grant is over, whatever was pending."""
        del self.by_id[grant.grant_id]
        self._count(grant, -grant.units)
        self.keys -= grant.pending_count
        grant.units = 0

    def settle(self, grant: Grant, entries: Positions, units: int) -> None:
        """Entries of so many units are decided or given up."""
        grant.settle(entries)
        grant.units -= units
        self._count(grant, -units)
        self.keys -= len(entries)

    def settle_one(self, grant: Grant, entry: int, units: int) -> None:
        """`settle` for one entry."""
        if grant.pending is None:
            grant.pending = np.ones(len(grant), np.bool_)
        grant.pending[entry] = False
        grant.units -= units
        self._count(grant, -units)
        self.keys -= 1

    def recount(self) -> int:
        """Units by counting (for tests)."""
        return sum(units_of(grant.pending_spans()) for grant in self.by_id.values())
