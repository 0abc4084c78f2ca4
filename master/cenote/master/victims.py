"""Who goes next: bounded queues of the coldest objects, checked again when their turn comes.

Selecting victims reads whole columns, so it is done for many at once: a 64th of the objects, in
the order the policy gives. Until its turn an object may be touched, leased, pinned, removed, or
moved to another row; its stamp then differs, or its state says so, and it is passed over.

Where namespaces have quotas there is a queue for each rank (`quotas`); the lowest that has anything
gives. Who is beyond a quota gives no more than brings it back, unless it is the one that asks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cenote.policy.endurance import is_spared

from .object_columns import COPIED, PARTIAL, UNCOPYABLE
from .objects import LIVE
from .pool import Pool, Rows
from .quotas import KEPT, Ranks
from .segments import DRAM
from .spans import SEGMENT_MASK, distinct

__all__ = ["evictable_mask", "next_victims", "spare_what_is_within"]

_QUEUE_SHARE = 64
_QUEUE_MAX = 16_384
_TAKE_MIN = 8
_TAKE_MAX = 2048
_MORE = 4
_LOSES_NOTHING = np.uint8(COPIED | PARTIAL | UNCOPYABLE)
_ALL_ALIKE = -1
"""The rank of everybody where nobody has a quota."""


@dataclass(slots=True, eq=False)
class _Queue:
    """Of one rank."""

    rank: int
    rows: Rows = field(default_factory=lambda: np.zeros(0, np.int64))
    stamps: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    at: int = 0
    low: NDArray[np.bool_] | None = None
    empty_for: tuple[float, bytes] = (-1.0, b"")
    """When it was filled last and nothing was found, and for which namespaces."""


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


def next_victims(
    pool: Pool, units: int, low: NDArray[np.bool_] | None, *, kept: bool = True
) -> Rows:
    """Rows to evict next, coldest first, of about `units` together; empty when there is nothing.

    `low`: segments (by id) to choose from; None = all. Where there are quotas, of the lowest rank
    that has some, and none of what is kept from whoever claims room now, or (not `kept`) at all.
    """
    if not pool.quotas.active:
        return _from_queue(pool, _queue(pool, _ALL_ALIKE), units, low, None)
    ranks = pool.quotas.ranks(pool)
    reach = pool.quotas.reach(ranks) if kept else KEPT
    count = len(ranks)
    for rank in np.unique(ranks[pool.namespaces.objects[:count] > 0]).tolist():
        if rank >= reach:
            break
        rows = _from_queue(pool, _queue(pool, rank), units, low, ranks)
        if len(rows):
            return rows
    return np.zeros(0, np.int64)


def _queue(pool: Pool, rank: int) -> _Queue:
    queue = pool.victim_queues.get(rank)
    if queue is None:
        queue = pool.victim_queues[rank] = _Queue(rank)
    return queue


def _from_queue(
    pool: Pool, queue: _Queue, units: int, low: NDArray[np.bool_] | None, ranks: Ranks | None
) -> Rows:
    if not _covers(queue.low, low):
        _fill(pool, queue, low, ranks)
    for _ in range(2):
        while queue.at < len(queue.rows):
            rows = _take(pool, queue, units, low, ranks)
            if len(rows):
                return rows
        _fill(pool, queue, low, ranks)
        if not len(queue.rows):
            break
    return queue.rows[:0]


def _covers(queued: NDArray[np.bool_] | None, low: NDArray[np.bool_] | None) -> bool:
    """Whether a queue filled from the segments `queued` has the coldest objects of those of `low`.

    One that was filled when only some segments were low on space would empty these for others.
    """
    if queued is None or queued is low:
        return True
    return low is not None and not bool((low & ~queued).any())


def _take(
    pool: Pool,
    queue: _Queue,
    units: int,
    low: NDArray[np.bool_] | None,
    ranks: Ranks | None,
) -> Rows:
    # The mean counts copies on SSDs, too, in larger units. What is too much keeps its place.
    more = _MORE if pool.segments.has_ssd else 1
    count = more * units // max(1, pool.mean_units) + 1
    count = min(max(count, _TAKE_MIN), _TAKE_MAX)
    at = queue.at
    rows = queue.rows[at : at + count]
    queue.at = at + len(rows)
    good = pool.stamp.take(rows) == queue.stamps[at : at + count]
    good &= (pool.state.take(rows) & LIVE) != 0
    good &= pool.lease_count.take(rows) == 0
    good &= pool.pin.take(rows) == 0
    if low is not None:
        good &= low.take(pool.extent_words.take(rows * 4) & SEGMENT_MASK)
    if ranks is not None:
        owners = pool.incarnations_of(rows)
        good &= ranks[owners] == queue.rank
        if queue.rank < KEPT:
            spare_what_is_within(pool, rows, owners, good, on_ssd=False)
    positions = np.flatnonzero(good)
    rows = rows[positions]
    if len(rows) > 1:
        sizes = pool.extent_words.take(rows * 4 + 3)
        enough = int(np.searchsorted(np.cumsum(sizes, dtype=np.int64), units)) + 1
        if enough < len(rows):
            # The rest keeps its place in the queue.
            queue.at = at + int(positions[enough])
            rows = rows[:enough]
    return rows


def spare_what_is_within(
    pool: Pool,
    rows: Rows,
    owners: NDArray[np.int64],
    good: NDArray[np.bool_],
    *,
    on_ssd: bool,
) -> None:
    """Of namespaces beyond their quotas, take out of `good` what would bring them within: all but
    the object that does. Not of the one that claims room: it is to make that itself."""
    over_units, over_objects = pool.quotas.excess(pool, on_ssd=on_ssd)
    claimant = pool.quotas.claim.incarnation
    for owner in distinct(owners[good]).tolist():
        units, objects = int(over_units[owner]), int(over_objects[owner])
        if owner == claimant or (units <= 0 and objects <= 0):
            continue  # no quota
        mine = np.flatnonzero(good & (owners == owner))
        sizes = pool.units_of_rows(rows[mine])
        before = np.cumsum(sizes) - sizes
        good[mine] = (before < units) | (np.arange(len(mine)) < objects)


def _chosen(pool: Pool, mask: NDArray[np.bool_], count: int) -> Rows:
    """Of these about so many, the coldest first. Where there are SSDs those that have a copy there,
    or are to have none: only where nothing cold has one does an object go before it was copied.

    For as long as the devices keep up, a cold object without a copy will have one in a moment.
    """
    policy, stamps = pool.policy, pool.stamp[: len(mask)]
    links = pool.objects.links if policy.chained else None
    if not pool.segments.has_ssd:
        return policy.victims(stamps, mask, count, links)
    copied_from = np.zeros(len(pool.segments.readable), np.bool_)
    nodes = [s.node for s in pool.segments.by_id.values() if s.tier != DRAM and s.is_usable]
    for node in nodes:
        # Where a device is spared, most of what has no copy is not going to have one.
        told = node.counters
        if not is_spared(told.ssd_write_budget_bytes, told.ssd_write_allowance_bytes):
            copied_from[node.segment_ids] = True
    if policy.by_age:
        good = (pool.state[: len(mask)] & _LOSES_NOTHING) != 0
        good &= stamps <= np.uint64(pool.tiers.cold_until)
        good |= ~copied_from[pool.objects.segment]
        good &= mask
        return policy.victims(stamps, good if good.any() else mask, count, links)
    # Others know by themselves how far what is cold reaches, if they are asked about all of it.
    for asked in (count, _MORE * count):
        rows = policy.victims(stamps, mask, asked, links)
        good = (pool.state.take(rows) & _LOSES_NOTHING) != 0
        good |= ~copied_from[pool.extent_words.take(rows * 4) & SEGMENT_MASK]
        if _MORE * np.count_nonzero(good) >= min(count, len(rows)):
            break
    return rows[good] if good.any() else rows[:count]


def _fill(pool: Pool, queue: _Queue, low: NDArray[np.bool_] | None, ranks: Ranks | None) -> None:
    queue.at, queue.low = 0, low
    queue.rows, queue.stamps = queue.rows[:0], queue.stamps[:0]
    members = b""
    if ranks is not None:
        # Nothing of this rank could go a moment ago: whole columns are not read for that again.
        members = (ranks == queue.rank).tobytes() + (b"" if low is None else low.tobytes())
        if queue.empty_for == (pool.now_s, members):
            return
    mask = evictable_mask(pool, low)
    if ranks is not None:
        mask &= (ranks == queue.rank)[pool.objects.namespace]
    at_once = pool.policy.victims_at_once
    count = min(max(pool.objects.live_count // _QUEUE_SHARE, at_once), _QUEUE_MAX)
    rows = _chosen(pool, mask, count)
    queue.rows = rows
    queue.stamps = pool.stamp.take(rows)
    queue.empty_for = (-1.0, b"") if len(rows) else (pool.now_s, members)
