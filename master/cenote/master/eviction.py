"""Making room: on demand, ahead of need, in one neighbourhood, and out of namespaces that were
reset.

The policy says who is coldest (`victims`); this says how much must go and from where. As long as
some segments have plenty of room and others none (a fresh node in a full pool), only objects of the
latter are chosen, so that the full ones keep taking their share of what is new.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import UNIT_BYTES

from .decisions import Why
from .effects import GoneReason
from .object_columns import TOUCHED, UNCOPYABLE
from .objects import LIVE
from .pool import Pool, Rows
from .quotas import may_go
from .segments import DRAM, Segment
from .spans import Spans, distinct, segments_of, units_of
from .victims import next_victims

__all__ = ["evict_ahead", "evict_nearby", "make_room", "make_room_in", "make_rows", "sweep"]

_LOW_RESERVES = 3
"""A segment is low on space below this many times its reserve."""
_BATCH_BYTES_MAX = 4 << 20
_ROUNDS_MAX = 64
_STEP_SHIFT = 5
"""Of the smallest segment a 32nd goes at once, where several are low."""
_WINDOWS_MAX = 8


def reserve_units(pool: Pool, capacity_units: int) -> int:
    config = pool.config
    reserve = min(capacity_units * UNIT_BYTES * config.reserve_share, config.reserve_bytes_max)
    return int(reserve) // UNIT_BYTES


def _low_segments(pool: Pool, units: int) -> tuple[list[Segment], NDArray[np.bool_] | None]:
    """Usable segments that are low on space (all if none is), also as a column by id.

    The column is None when it would be true for every segment there is.
    """
    usable = [entry.segment for entry in pool.placement.entries]
    low = [
        s
        for s in usable
        if s.free_units < max(_LOW_RESERVES * reserve_units(pool, s.capacity_units), 2 * units)
        or not s.slots.free
    ] or usable
    if len(low) == len(pool.segments.by_id):
        return low, None
    column = np.zeros(len(pool.segments.readable), np.bool_)
    column[[s.segment_id for s in low]] = True
    return low, column


def make_room(pool: Pool, units: int, tier: int) -> bool:
    """Evict about `units` (rather more), coldest first. False when nothing could be evicted."""
    low, column = _low_segments(pool, units)
    if not low:
        return False
    spare = reserve_units(pool, sum(s.capacity_units for s in low)) >> 2
    goal = max(units, min(spare, _BATCH_BYTES_MAX // UNIT_BYTES))
    freed = sweep(pool, pool.config.tick_sweep_rows_max) if pool.sweep_at else 0
    gone = pool.counters.evicted
    rows_max = pool.config.tick_evict_rows_max * _ROUNDS_MAX
    if not pool.quotas.active:
        freed += _evict(pool, goal - freed, column, rows_max, Why.ON_DEMAND)
    else:
        freed += _evict(pool, units - freed, column, rows_max, Why.ON_DEMAND)
        # Beyond what is needed nothing that is kept, and of who asks itself a small part.
        more = min(goal, units + pool.quotas.claim_units_max(pool.namespaces) // 64)
        if 0 < freed < more:
            freed += _evict(pool, more - freed, column, rows_max, Why.ON_DEMAND, kept=False)
    pool.counters.evictions_on_demand += pool.counters.evicted - gone
    return freed > 0


def make_room_in(pool: Pool, segment: Segment, units: int, wanted: int) -> bool:
    """Evict until this segment, where it is one of those low on space, has `units` free.

    The coldest of all low segments go first, so that age decides and not the place; hence as much
    may go as they all would need. `wanted`: what is needed in a moment, these units included; what
    there is nowhere room for has to come from them, and is evicted together. False where it has
    plenty, or nothing could be evicted.
    """
    low, column = _low_segments(pool, units)
    if (column is None and len(low) == 1) or segment not in low:
        return False  # the only one is as good as any, and `make_room` knows how much it needs
    missing = wanted - sum(entry.segment.free_units for entry in pool.placement.entries)
    if len(low) > 1:  # what is coldest may all lie in the smallest, which is not to be emptied
        missing = min(missing, pool.placement.smallest_units >> _STEP_SHIFT)
    step = max(units, missing)
    left = max(step, units * len(low) * 2)
    gone = pool.counters.evicted
    while segment.free_units < units and left > 0:
        rows_max = pool.config.tick_evict_rows_max
        if not _evict(pool, step, column, rows_max, Why.ON_DEMAND, kept=False):
            break
        left -= step
        step = max(1, min(left, units))
    pool.counters.evictions_on_demand += pool.counters.evicted - gone
    return segment.free_units >= units


def make_rows(pool: Pool, wanted: int) -> int:
    """Rows for new objects, at most `wanted`; evicts when the table is full."""
    room = pool.config.objects_max - pool.objects.used_rows - pool.grants.keys
    for _ in range(_ROUNDS_MAX):
        if room >= wanted:
            break
        rows = next_victims(pool, (wanted - room) * max(1, pool.mean_units), None)
        if not len(rows):
            break
        evict(pool, rows[: wanted - room], why=Why.TABLE_FULL)
        room = pool.config.objects_max - pool.objects.used_rows - pool.grants.keys
    return max(0, min(room, wanted))


def _evict(
    pool: Pool,
    units: int,
    column: NDArray[np.bool_] | None,
    rows_max: int,
    why: Why,
    *,
    kept: bool = True,
) -> int:
    """`kept`: also what quotas keep for others, where who claims room is within its own."""
    freed = 0
    while freed < units and rows_max > 0:
        rows = next_victims(pool, units - freed, column, kept=kept)
        if not len(rows):
            break
        rows_max -= len(rows)
        freed += evict(pool, rows, DRAM, why)
    return freed


def evict(pool: Pool, rows: Rows, tier: int = 0, why: Why = Why.NONE) -> int:
    """These go; with a `tier`, from there alone. Returns the units that became free."""
    counters = pool.counters
    freed = 0
    if tier and pool.segments.has_ssd:
        rows, freed = _leave_elsewhere(pool, rows, tier)
    if pool.policy.remembers and len(rows):
        pool.policy.evicted(pool.digests_of(rows), pool.stamp.take(rows))
    if len(rows):
        middle = int(pool.stamp[rows[len(rows) >> 1]])
        counters.evicted_age_s.observe_many(pool.idle_s(middle, pool.now_s), len(rows))
    counters.evicted += len(rows)
    counters.evicted_bytes += int(pool.sizes_of(rows).sum())
    return freed + pool.unlink(rows, GoneReason.EVICTED, why)


def _leave_elsewhere(pool: Pool, rows: Rows, tier: int) -> tuple[Rows, int]:
    """Drop replicas on this tier of rows that have others elsewhere: (the other rows, units)."""
    counts, spans = pool.spans_of(rows)
    here = pool.segments.on_ssd[segments_of(spans)] == (tier != DRAM)
    owner = np.repeat(np.arange(len(rows)), counts)
    both = np.zeros(len(rows), np.bool_)
    both[owner[~here]] = True
    if not both.any():
        return rows, 0
    dropped = here & both[owner]
    kept_units = pool.segments.kept_units
    pool.drop_replicas(rows[owner[dropped]], spans[dropped], GoneReason.EVICTED)
    kept_units = pool.segments.kept_units - kept_units
    pool.state[rows[both]] &= ~np.uint8(TOUCHED | UNCOPYABLE)
    if tier == DRAM:
        pool.counters.evicted_to_ssd += int(np.count_nonzero(both))
    return rows[~both], units_of(spans[dropped]) - kept_units


def evict_ahead(pool: Pool) -> int:
    """Keep the reserve free, so that puts find room at once. Bounded; returns objects evicted."""
    if not len(pool.placement):
        return 0
    low, column = _low_segments(pool, pool.ahead_units // (2 * len(pool.placement)))
    if len(low) == len(pool.placement) and all(
        s.free_units >= _LOW_RESERVES * reserve_units(pool, s.capacity_units) for s in low
    ):
        return 0
    target = reserve_units(pool, sum(s.capacity_units for s in low))
    missing = max(target, pool.ahead_units) - sum(s.free_units for s in low)
    gone = pool.counters.evicted
    if missing > 0:
        _evict(pool, missing, column, pool.config.tick_evict_rows_max, Why.AHEAD)
        pool.counters.evictions_ahead += pool.counters.evicted - gone
    return pool.counters.evicted - gone


def sweep(pool: Pool, rows_max: int) -> int:
    """Remove objects of namespaces' dead generations, one bounded stretch; returns units freed.

    `pool.sweep_at` is where to go on, 0 when all are gone.
    """
    if not pool.sweep_at:
        return 0
    rows, following = pool.objects.live_rows(pool.sweep_at, rows_max)
    stale = rows[~pool.namespaces.alive[pool.incarnations_of(rows)]]
    pool.counters.swept += len(stale)
    freed = pool.unlink(stale, GoneReason.RESET)
    if not following and pool.namespaces.stale_objects:
        following = 1
    pool.sweep_at = following
    return freed


def evict_nearby(pool: Pool, segment: Segment, length: int) -> bool:
    """Evict what lies between free ranges of one neighbourhood, to make one range of `length`.

    Of all such windows the one is chosen whose most recently used object is coldest. False when
    each holds something that can't go.
    """
    allocator = segment.allocator
    if allocator is None:
        return False
    rows, spans = pool.rows_in_segment(segment.segment_id)
    movable = (pool.state.take(rows) & LIVE) != 0
    movable &= pool.lease_count.take(rows) == 0
    movable &= pool.pin.take(rows) == 0
    movable &= may_go(pool, rows, on_ssd=segment.tier != DRAM)
    rows, spans = rows[movable], spans[movable]
    listed = np.arange(len(rows))
    if segment.shared:
        rows, spans, listed = _with_all_holders(pool, segment, rows, spans)
    if not len(rows):
        return False
    starts = spans[:, 2].astype(np.int64)
    window = allocator.find_window(
        length,
        starts[listed],
        spans[listed, 3].astype(np.int64),
        pool.stamp.take(rows[listed]),
    )
    if window is None:
        return False
    victims = distinct(rows[(starts >= window[0]) & (starts < window[1])])
    pool.counters.evictions_nearby += len(victims)
    evict(pool, victims, segment.tier, Why.NEARBY)
    return True


def _with_all_holders(
    pool: Pool, segment: Segment, rows: Rows, spans: Spans
) -> tuple[Rows, Spans, Rows]:
    """Of these, those whose space is free once they go: (rows, spans, for each place the position
    of the most recently used of its holders)."""
    offsets, group, counts = np.unique(spans[:, 2], return_inverse=True, return_counts=True)
    holders = [segment.shared.get(offset, 0) + 1 for offset in offsets.tolist()]
    whole = (counts == holders)[group.reshape(-1)]
    rows, spans = rows[whole], spans[whole]
    hottest = np.argsort(pool.stamp.take(rows), kind="stable")[::-1]
    return rows, spans, hottest[np.unique(spans[hottest, 2], return_index=True)[1]]
