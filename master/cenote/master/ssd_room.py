"""Room on an SSD for copies: free space, or that of the coldest of what is nowhere else."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from cenote.policy.lru import oldest_first

from .decisions import Why
from .eviction import evict, evict_nearby, reserve_units
from .objects import LIVE
from .pool import Pool, Rows
from .quotas import lowest_of, may_go
from .segments import Segment
from .spans import SEGMENT_MASK
from .victims import evictable_mask

__all__ = ["take_on_ssd", "take_run_on_ssd"]

SSD_VICTIMS = 4_096
RUN_SHARE_MAX = 16
"""A run takes so small a part of a segment at most, since something may have to go for it."""
_ROOM_TRIES = 4
_NOBODY: Rows = np.zeros(0, np.int64)


def take_run_on_ssd(
    pool: Pool, segments: Iterable[Segment], units: NDArray[np.int64]
) -> tuple[Segment, NDArray[np.integer], NDArray[np.uint32], NDArray[np.int64]] | None:
    """(segment, offsets, slots, units) of one extent for each, side by side as far as there is
    such room: what is written together, and will be read together, lies together.

    None where that can't be had at once. Not for pools with quotas: it does not ask whose it is.
    """
    total = int(units.sum())
    for segment in sorted(segments, key=lambda s: -s.free_units):
        if total > segment.capacity_units // RUN_SHARE_MAX:
            continue
        for attempt in range(_ROOM_TRIES):
            taken = segment.take_run(units)
            if taken is not None:
                return segment, *taken
            if not _evict_on_ssd(pool, segment, total << attempt):
                break
    return None


def take_on_ssd(
    pool: Pool, segments: Iterable[Segment], units: int, incarnation: int
) -> tuple[Segment, int, int, int] | None:
    """(segment, slot, offset, units) of one extent, where the most room is; None without any."""
    if not pool.quotas.active:
        return _take_anywhere(pool, segments, units)
    pool.quotas.begin_claim(incarnation, units, 0, on_ssd=True)
    try:
        return _take_anywhere(pool, segments, units)
    finally:
        pool.quotas.end_claim()


def _take_anywhere(
    pool: Pool, segments: Iterable[Segment], units: int
) -> tuple[Segment, int, int, int] | None:
    several = list(segments)
    if len(several) > 1:
        several.sort(key=lambda s: -s.free_units)
    for segment in several:
        for attempt in range(_ROOM_TRIES):
            taken = segment.take_one(units)
            if taken is not None:
                offset, slot, length = taken
                return segment, slot, offset, length
            if not _evict_on_ssd(pool, segment, units << attempt):
                break
        if segment.free_units >= units and evict_nearby(pool, segment, -(-units // 64) * 64):
            taken = segment.take_one(units)
            if taken is not None:
                return segment, taken[1], taken[0], taken[2]
    return None


def _evict_on_ssd(pool: Pool, segment: Segment, units: int) -> bool:
    """Evict the coldest of what is on this segment and not in memory; whether anything was."""
    goal = max(units, min(reserve_units(pool, segment.capacity_units), 16 * units))
    freed = 0
    for _ in range(2):
        rows, stamps = pool.tiers.victims.get(segment.segment_id, (_NOBODY, None))
        at = 0
        while at < len(rows) and freed < goal:
            part = rows[at : at + 64]
            assert stamps is not None
            good = (pool.stamp.take(part) == stamps[at : at + 64]) & _is_evictable(
                pool, part, segment
            )
            part = part[good]
            sums = np.cumsum(pool.extent_words.take(part * 4 + 3), dtype=np.int64)
            enough = int(np.searchsorted(sums, goal - freed)) + 1
            taken = min(enough, len(part))
            freed += evict(pool, part[:taken], segment.tier, Why.SSD_FULL) if taken else 0
            at += 64 if taken == len(part) else int(np.flatnonzero(good)[taken])
        if stamps is not None:
            pool.tiers.victims[segment.segment_id] = (rows[at:], stamps[at:])
        if freed >= goal:
            break
        _look_for_victims(pool, segment)
    return freed > 0


def _look_for_victims(pool: Pool, segment: Segment) -> None:
    column = np.zeros(len(pool.segments.readable), np.bool_)
    column[segment.segment_id] = True
    end = pool.objects.high_water
    here = lowest_of(pool, np.flatnonzero(evictable_mask(pool, column)), on_ssd=True)
    rows = oldest_first(pool.stamp[:end], here, SSD_VICTIMS)
    pool.tiers.victims[segment.segment_id] = (rows, pool.stamp.take(rows))


def _is_evictable(pool: Pool, rows: Rows, segment: Segment) -> NDArray[np.bool_]:
    good: NDArray[np.bool_] = (pool.state.take(rows) & LIVE) != 0
    good &= pool.lease_count.take(rows) == 0
    good &= pool.pin.take(rows) == 0
    good &= pool.extent_words.take(rows * 4) & SEGMENT_MASK == segment.segment_id
    good &= may_go(pool, rows, on_ssd=True)
    return good
