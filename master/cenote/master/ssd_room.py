"""Room on an SSD for copies: free space, or that of the coldest of what is nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cenote.policy.lru import oldest_first

from .decisions import Why
from .eviction import evict, evict_nearby, reserve_units
from .objects import LIVE
from .pool import Pool, Rows
from .quotas import KEPT, lowest_of, may_go
from .segments import Segment
from .spans import SEGMENT_MASK
from .victims import evictable_mask, spare_what_is_within

__all__ = ["RUN_SHARE_MAX", "Run", "take_on_ssd", "take_run_on_ssd"]

SSD_VICTIMS = 4_096
RUN_SHARE_MAX = 16
"""A run takes so small a part of a segment at most, since something may have to go for it."""
_ROOM_TRIES = 4
_STEP_MIN, _STEP_MAX = 64, 512
"""Of a queue of victims what is looked at together."""
_QUEUES_MAX = 256
_AHEAD = 16
"""Times what is needed, as far as the reserve goes."""
_NOBODY: Rows = np.zeros(0, np.int64)


class Run(NamedTuple):
    """Room for some of a batch, in its order: one extent for each."""

    chosen: Rows
    """Which of the batch."""
    segment: Segment
    offsets: NDArray[np.integer]
    slots: NDArray[np.uint32]
    units: NDArray[np.int64]
    """As given: rounded up."""


def take_run_on_ssd(
    pool: Pool, segments: Sequence[Segment], units: NDArray[np.int64], owners: Rows
) -> Run | None:
    """Room for as many as possible of these, side by side as far as there is such room: what is
    written together, and will be read together, lies together. None where that can't be had at
    once.

    `owners`: incarnations; they only matter where there are quotas. Then room is made for those of
    one namespace at a time, for as much as it is within its quota with or, where that is nothing,
    for all; those without quotas are alike. First of what nobody keeps: should that come to its
    end, the first ones have it, whosever they are, as if each had asked by itself.
    """
    everything = np.arange(len(units))
    quotas = pool.quotas
    if not quotas.active:
        return _make_run(pool, segments, everything, units)
    run = _take_first(segments, everything, units)
    if run is not None:
        return run
    has_limit = quotas.has_limit(pool.namespaces)
    owner = int(owners[0])
    if not has_limit[owner]:
        mine = np.flatnonzero(~has_limit[owners])
        return _make_run_of(pool, segments, mine, units)
    mine = np.flatnonzero(owners == owner)
    before = segments[0].round_up(units[mine])
    before = np.cumsum(before) - before
    over, _ = quotas.excess(pool, on_ssd=True)
    within = int(np.searchsorted(before + units[mine], -over[owner], "right"))
    mine = mine[: within or len(mine)]
    wanted = int(before[len(mine) - 1] + units[mine[-1]])
    quotas.begin_claim(owner, wanted, 0, on_ssd=True)
    try:
        return _make_run_of(pool, segments, mine, units)
    finally:
        quotas.end_claim()


def _make_run_of(
    pool: Pool, segments: Iterable[Segment], mine: Rows, units: NDArray[np.int64]
) -> Run | None:
    """Room for these of a batch, whose namespace claims it; or for whoever is first, as far as
    there is some without anything that is kept."""
    run = _make_run(pool, segments, mine, units[mine], kept=False)
    if run is None:
        run = _take_first(segments, np.arange(len(units)), units)
    return _make_run(pool, segments, mine, units[mine]) if run is None else run


def _take_first(segments: Iterable[Segment], chosen: Rows, units: NDArray[np.int64]) -> Run | None:
    """Of these the first ones that there is room for without anything going."""
    segment = max(segments, key=lambda s: s.free_units)
    ends = np.cumsum(segment.round_up(units))
    count = int(np.searchsorted(ends, segment.free_units, "right"))
    count = min(count, segment.slots.free)
    while count:
        taken = segment.take_run(units[:count])
        if taken is not None:
            return Run(chosen[:count], segment, *taken)
        count //= 4  # there is room, in pieces
    return None


def _make_run(
    pool: Pool,
    segments: Iterable[Segment],
    chosen: Rows,
    units: NDArray[np.int64],
    *,
    kept: bool = True,
) -> Run | None:
    """Room for all of these. Not `kept`: of nothing that quotas keep."""
    for segment in sorted(segments, key=lambda s: -s.free_units):
        total = int(segment.round_up(units).sum())
        if total > segment.capacity_units // RUN_SHARE_MAX:
            continue
        for attempt in range(_ROOM_TRIES):
            taken = segment.take_run(units)
            if taken is not None:
                return Run(chosen, segment, *taken)
            missing = total - segment.free_units
            if missing <= 0:  # there is room, in pieces
                missing = total << attempt
            # Where there are quotas nothing ahead of need: it would be anybody's.
            ahead = 0 if pool.quotas.active else _AHEAD * total << attempt
            if not _evict_on_ssd(pool, segment, missing, ahead, kept=kept):
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
            if not _evict_on_ssd(pool, segment, units << attempt, _AHEAD * units << attempt):
                break
        if segment.free_units >= units and evict_nearby(pool, segment, -(-units // 64) * 64):
            taken = segment.take_one(units)
            if taken is not None:
                return segment, taken[1], taken[0], taken[2]
    return None


# ---- what goes ------------------------------------------------------------------------------


def _evict_on_ssd(
    pool: Pool, segment: Segment, units: int, ahead: int, *, kept: bool = True
) -> bool:
    """Evict the coldest of what is on this segment and not in memory, up to `ahead` units before
    they are needed; whether anything was. Not `kept`: nothing that quotas keep."""
    ahead = min(reserve_units(pool, segment.capacity_units), ahead)
    quotas = pool.quotas
    if not quotas.active:
        return _evict_coldest(pool, segment, max(units, ahead), kept) > 0
    freed = _evict_coldest(pool, segment, units, kept)
    # Ahead of need nothing that is kept, and of who asks itself a small part.
    ahead = min(ahead, units + quotas.claim_ssd_units_max(pool.namespaces) // 64)
    if 0 < freed < ahead:
        freed += _evict_queued(pool, segment, ahead - freed, kept=False)
    return freed > 0


def _evict_coldest(pool: Pool, segment: Segment, goal: int, kept: bool) -> int:
    """At least so many units, if there is that much; returns how many."""
    fruitless = -1.0, 0, b""
    if pool.quotas.active:
        ranks = pool.quotas.ranks(pool, on_ssd=True)
        may = ranks < (pool.quotas.reach(ranks, on_ssd=True) if kept else KEPT)
        fruitless = pool.now_s, segment.segment_id, may.tobytes()
        # Whole columns are not read for what can't be there, or was not a moment ago.
        if (
            fruitless == pool.tiers.fruitless
            or not pool.namespaces.ssd_units[: len(may)][may].any()
        ):
            return 0
    freed = _evict_queued(pool, segment, goal, kept=kept)
    if freed < goal:
        _look_for_victims(pool, segment)
        freed += _evict_queued(pool, segment, goal - freed, kept=kept)
    if not freed:
        pool.tiers.fruitless = fruitless
    return freed


def _evict_queued(pool: Pool, segment: Segment, goal: int, *, kept: bool) -> int:
    """Of what is queued as much, at least, or all; returns the units. Not `kept`: none of what
    quotas keep."""
    key = _queue_of(pool, segment)
    rows, stamps = pool.tiers.victims.get(key, (_NOBODY, None))
    at = freed = 0
    while at < len(rows) and freed < goal:
        assert stamps is not None
        size = int(pool.extent_words[rows[at] * 4 + 3])
        step = min(max((goal - freed) // max(1, size), _STEP_MIN), _STEP_MAX)
        part = rows[at : at + step]
        good = (pool.stamp.take(part) == stamps[at : at + step]) & _is_there(pool, part, segment)
        if pool.quotas.active and good.any():
            good &= may_go(pool, part, on_ssd=True, kept=kept)
            spare_what_is_within(pool, part, pool.incarnations_of(part), good, on_ssd=True)
            if not good.any():
                break  # they are not for whoever asks now
        part = part[good]
        sums = np.cumsum(pool.extent_words.take(part * 4 + 3), dtype=np.int64)
        enough = int(np.searchsorted(sums, goal - freed)) + 1
        taken = min(enough, len(part))
        freed += evict(pool, part[:taken], segment.tier, Why.SSD_FULL) if taken else 0
        at += step if taken == len(part) else int(np.flatnonzero(good)[taken])
    if stamps is not None:
        pool.tiers.victims[key] = (rows[at:], stamps[at:])
    return freed


def _queue_of(pool: Pool, segment: Segment) -> tuple[int, int]:
    """(segment, incarnation) of a queue of victims: that of 0 but for who is beyond its quota by
    what it asks for alone, and so gives its own: what others keep would be in its way."""
    is_beyond = pool.quotas.active and pool.quotas.is_beyond_by_claim(pool)
    return segment.segment_id, pool.quotas.claim.incarnation if is_beyond else 0


def _look_for_victims(pool: Pool, segment: Segment) -> None:
    column = np.zeros(len(pool.segments.readable), np.bool_)
    column[segment.segment_id] = True
    end = pool.objects.high_water
    here = lowest_of(pool, np.flatnonzero(evictable_mask(pool, column)), on_ssd=True)
    rows = oldest_first(pool.stamp[:end], here, SSD_VICTIMS)
    victims = pool.tiers.victims
    if len(victims) >= _QUEUES_MAX:
        victims.clear()
    victims[_queue_of(pool, segment)] = (rows, pool.stamp.take(rows))


def _is_there(pool: Pool, rows: Rows, segment: Segment) -> NDArray[np.bool_]:
    good: NDArray[np.bool_] = (pool.state.take(rows) & LIVE) != 0
    good &= pool.lease_count.take(rows) == 0
    good &= pool.pin.take(rows) == 0
    good &= pool.extent_words.take(rows * 4) & SEGMENT_MASK == segment.segment_id
    return good
