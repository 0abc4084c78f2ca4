"""Who goes next: a bounded queue of the coldest objects, checked again when their turn comes.

Selecting victims reads whole columns, so it is done for many at once: a 64th of the objects, in
the order the policy gives. Until its turn an object may be touched, leased, pinned, removed, or
moved to another row; its stamp then differs, or its state says so, and it is passed over.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .objects import LIVE
from .pool import COPIED, PARTIAL, UNCOPYABLE, Pool, Rows
from .segments import DRAM
from .spans import SEGMENT_MASK

__all__ = ["evictable_mask", "next_victims"]

_QUEUE_SHARE = 64
_QUEUE_MAX = 16_384
_TAKE_MIN = 8
_TAKE_MAX = 2048


def evictable_mask(pool: Pool, low: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """bool by row: LIVE, no lease, no pin, and its first extent in a segment of `low` (by id)."""
    end = pool.objects.high_water
    mask = (pool.state[:end] & LIVE).view(np.bool_)
    mask &= pool.lease_count[:end] == 0
    if pool.pinned_objects:
        mask &= pool.pin[:end] == 0
    if low is not None:
        mask &= low[pool.objects.segment]
    return mask


def next_victims(pool: Pool, units: int, low: NDArray[np.bool_] | None) -> Rows:
    """Rows to evict next, coldest first, of about `units` together; empty when there is nothing.

    `low`: segments (by id) to choose from; None = all.
    """
    if not _covers(pool.victim_low, low):
        _fill(pool, low)
    for _ in range(2):
        while pool.victim_at < len(pool.victim_rows):
            rows = _take(pool, units, low)
            if len(rows):
                return rows
        _fill(pool, low)
        if not len(pool.victim_rows):
            break
    return pool.victim_rows[:0]


def _covers(queued: NDArray[np.bool_] | None, low: NDArray[np.bool_] | None) -> bool:
    """Whether a queue filled from the segments `queued` has the coldest objects of those of `low`.

    One that was filled when only some segments were low on space would empty these for others.
    """
    if queued is None or queued is low:
        return True
    return low is not None and not bool((low & ~queued).any())


def _take(pool: Pool, units: int, low: NDArray[np.bool_] | None) -> Rows:
    count = min(max(units // max(1, pool.mean_units) + 1, _TAKE_MIN), _TAKE_MAX)
    at = pool.victim_at
    rows = pool.victim_rows[at : at + count]
    pool.victim_at = at + len(rows)
    good = pool.stamp.take(rows) == pool.victim_stamps[at : at + count]
    good &= (pool.state.take(rows) & LIVE) != 0
    good &= pool.lease_count.take(rows) == 0
    good &= pool.pin.take(rows) == 0
    if low is not None:
        good &= low.take(pool.extent_words.take(rows * 4) & SEGMENT_MASK)
    positions = np.flatnonzero(good)
    rows = rows[positions]
    if len(rows) > 1:
        sizes = pool.extent_words.take(rows * 4 + 3)
        enough = int(np.searchsorted(np.cumsum(sizes, dtype=np.int64), units)) + 1
        if enough < len(rows):
            # The rest keeps its place in the queue.
            pool.victim_at = at + int(positions[enough])
            rows = rows[:enough]
    return rows


def _without_loss(pool: Pool, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of these, the ones that are cold and have a copy on an SSD, or are to have none: only where
    there are no such does an object go before it was copied.

    For as long as the devices keep up, a cold object without a copy will have one in a moment.
    """
    end = len(mask)
    good = (pool.state[:end] & np.uint8(COPIED | PARTIAL | UNCOPYABLE)) != 0
    good &= pool.stamp[:end] <= np.uint64(pool.tiers.cold_until)
    copied_from = np.zeros(len(pool.segments.readable), np.bool_)
    nodes = [s.node for s in pool.segments.by_id.values() if s.tier != DRAM and s.is_usable]
    for node in nodes:
        copied_from[node.segment_ids] = True
    good |= ~copied_from[pool.objects.segment]
    good &= mask
    return good if good.any() else mask


def _fill(pool: Pool, low: NDArray[np.bool_] | None) -> None:
    policy = pool.policy
    count = min(max(pool.objects.live_count // _QUEUE_SHARE, policy.victims_at_once), _QUEUE_MAX)
    end = pool.objects.high_water
    links = pool.objects.links if policy.chained else None
    mask = evictable_mask(pool, low)
    if pool.segments.has_ssd:
        mask = _without_loss(pool, mask)
    rows = policy.victims(pool.stamp[:end], mask, count, links)
    pool.victim_rows = rows
    pool.victim_stamps = pool.stamp.take(rows)
    pool.victim_at = 0
    pool.victim_low = low
