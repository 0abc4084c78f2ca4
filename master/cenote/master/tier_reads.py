"""Where objects are when some lie on an SSD: in memory where they can be had there.

No lease is given on what is told to be on an SSD: a lease proves that space was not given to
others, and not what a device makes of the bytes in it. Without one, readers take the checksum,
which proves both. So what is in memory and has a copy on an SSD is told to be in memory alone, and
leased as anything else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import UNIT_BYTES, ObjectStatus

from .commands import Exists
from .pool import Pool, Rows
from .spans import Spans, segments_of
from .tiers import note_touches, want

__all__ = ["Told", "prefetch", "single_extents", "told_of"]

_UNIT_SHIFT = np.uint64(UNIT_BYTES.bit_length() - 1)


class Told:
    """What of some rows (LIVE) is told to a reader."""

    __slots__ = ("cold", "counts", "spans")

    def __init__(self, counts: NDArray[np.int64], spans: Spans, cold: NDArray[np.bool_]) -> None:
        self.counts = counts
        self.spans = spans
        self.cold = cold
        """Which rows have a replica on an SSD among these."""


def told_of(pool: Pool, rows: Rows, *, everything: bool) -> Told:
    """Replicas of rows. `everything`: also those on an SSD of what is in memory, since that one may
    be out of this reader's reach."""
    counts, spans = pool.spans_of(rows)
    on_ssd = pool.segments.on_ssd[segments_of(spans)]
    if not on_ssd.any():
        return Told(counts, spans, np.zeros(len(rows), np.bool_))
    owner = np.repeat(np.arange(len(rows)), counts)
    in_memory = np.zeros(len(rows), np.bool_)
    in_memory[owner[~on_ssd]] = True
    if not in_memory.all():
        note_touches(pool, rows[~in_memory])
        cold_hits = int(np.count_nonzero(~in_memory))
        pool.counters.acquired_hits_ssd += cold_hits
        pool.namespaces.found_ssd[pool.record_of(int(rows[0]))[5]] += cold_hits
    if everything:
        cold = np.zeros(len(rows), np.bool_)
        cold[owner[on_ssd]] = True
        return Told(counts, spans, cold)
    kept = ~on_ssd | ~in_memory[owner]
    counts = np.bincount(owner[kept], minlength=len(rows))
    return Told(counts, np.ascontiguousarray(spans[kept]), ~in_memory)


def single_extents(spans: Spans, sizes: NDArray[np.uint64]) -> bytes:
    """EXTENT rows of objects that are told to be in one piece each."""
    extents = np.empty((len(spans), 3), np.uint64)
    extents[:, 0] = spans[:, 0] & np.uint32(0xFFFF)
    extents[:, 0] |= (spans[:, 0] & np.uint32(0xFF_0000)).astype(np.uint64) << np.uint64(16)
    extents[:, 1] = spans[:, 2].astype(np.uint64) << _UNIT_SHIFT
    extents[:, 2] = sizes
    return extents.tobytes()


def lease_hot(
    told: Told,
    rows: Rows,
    sizes: NDArray[np.uint64],
    lease: Callable[[Rows, NDArray[np.uint64]], tuple[NDArray[np.uint64], int, int]],
) -> tuple[NDArray[np.uint64], int, int]:
    """(status of each row, lease id, its ttl in ms) where only some may be leased."""
    if not told.cold.any():
        return lease(rows, sizes)
    hot = ~told.cold
    status = np.full(len(rows), ObjectStatus.UNLEASED, np.uint64)
    lease_id = ttl_ms = 0
    if hot.any():
        status[hot], lease_id, ttl_ms = lease(rows[hot], sizes[hot])
    return status, lease_id, ttl_ms


def prefetch(pool: Pool, command: Exists) -> None:
    """Whoever asked whether these keys are there will read them soon. A hint: nothing waits."""
    if not pool.segments.has_ssd:
        return
    incarnation = pool.namespaces.check(command.namespace_id, command.generation).incarnation
    rows = pool.objects.lookup(command.digests)
    rows = rows[rows > 0]
    want(pool, rows[pool.incarnations_of(rows) == incarnation])
