"""What goes from memory to SSD, and back: planned with every tick, carried out by the daemons.

    demotion    the coldest objects of a memory that fills up get a copy on the SSD of their node,
                before it is their turn to be evicted; that then costs their place in memory alone
    eviction    of an SSD: the coldest of what is nowhere else
    promotion   of what was read from the SSD for the second time since it was in memory last

None of it is ever waited for. A put that finds memory full evicts, copied or not: an SSD that is
slower than what is put keeps less. What is under way at one time is bounded; a daemon with a limit
on its writes reports later, and gets the next copies later.

"Coldest" is by the age of stamps here, whatever the policy: `EvictionPolicy.victims` takes it that
those it names go, and moves others along its queues.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import UNIT_BYTES
from cenote.policy.lru import oldest_first

from .copies import CopyRow, order_copies, rows_of_version
from .decisions import Why
from .eviction import evict, evict_nearby, reserve_units
from .nodes import Node
from .object_columns import COPIED, COPYING, PARTIAL, TOUCHED, UNCOPYABLE
from .objects import LIVE
from .pool import Pool, Rows
from .quotas import lowest_of, may_go
from .segments import DRAM, Segment
from .spans import SEGMENT_MASK, Spans, pack_span, segments_of
from .tier_tables import Copy
from .twins import Sharing, Twin, find_twin, note_known, note_ordered
from .victims import evictable_mask
from .write_budgets import is_declined, is_worth_it, note_allowances

__all__ = [
    "is_tiered",
    "note_cached_reads",
    "note_chain",
    "note_reuse",
    "note_touches",
    "plan_copies",
    "want",
]

COPIES_PER_TICK = 256
PROMOTIONS_PER_TICK = 32
"""A tick holds requests up for so long: about 12 us for each of the former, 100 for the latter."""
CANDIDATES_MAX = 16_384
CANDIDATES_S_MIN, CANDIDATES_ROW_S = 0.01, 50e-9
"""How often the coldest objects are looked for: that reads whole columns, so it depends on how long
they are."""
SSD_VICTIMS = 4_096
_PROMOTIONS_MAX = 4_096
_ROOM_TRIES = 4
_UNWANTED = UNCOPYABLE | PARTIAL
_SSD_REPLICA_MIN = 1
"""Numbers of replicas on an SSD; 0 is for one in memory."""
Target: TypeAlias = tuple[Segment, int, int, int]
"""One extent that was taken: segment, slot, offset, units."""


def note_chain(pool: Pool, rows: Rows) -> None:
    """These are blocks of one chain, in order. A last one that is shorter than the one before it is
    a prompt's partial tail: the next prompt has a whole block in its place, so that it is not worth
    a write."""
    if pool.segments.has_ssd and len(rows) > 1:
        before, last = pool.sizes_of(rows[-2:]).tolist()
        if last < before:
            pool.state[rows[-1]] |= np.uint8(PARTIAL)


def note_touches(pool: Pool, rows: Rows) -> None:
    """Objects that are on an SSD alone were asked for."""
    seen = (pool.state.take(rows) & TOUCHED) != 0
    pool.state[rows] |= np.uint8(TOUCHED)
    again = rows[seen]
    wanted = pool.tiers.wanted
    if len(again) and len(wanted) < _PROMOTIONS_MAX:
        pairs = zip(again.tolist(), pool.seqs_of(again).tolist(), strict=True)
        wanted.extend(list(pairs)[: _PROMOTIONS_MAX - len(wanted)])


def note_reuse(pool: Pool, rows: Rows) -> None:
    """These were read, or put once more. Where a device's writes have a budget it is remembered of
    what is in memory: that is the better worth a write."""
    if pool.tiers.has_budgets:
        on_ssd = pool.segments.on_ssd[pool.extent_words.take(rows * 4) & SEGMENT_MASK]
        pool.state[rows[~on_ssd]] |= np.uint8(TOUCHED)


def note_cached_reads(pool: Pool, rows: Rows) -> None:
    """These were read from locations that readers remembered."""
    if pool.segments.has_ssd:
        note_reuse(pool, rows)
        cold = rows[pool.segments.on_ssd[pool.extent_words.take(rows * 4) & SEGMENT_MASK]]
        if len(cold):
            note_touches(pool, cold)


def is_tiered(pool: Pool, row: int, extents: int) -> bool:
    """Whether a row that is read may be on an SSD. Notes its use, as `note_reuse`."""
    if pool.segments.on_ssd[pool.extent_of(row)[0]]:
        return True
    if pool.tiers.has_budgets:
        pool.state[row] |= np.uint8(TOUCHED)
    return extents > 1


def want(pool: Pool, rows: Rows) -> None:
    """These will be read soon: what of it is on an SSD alone is promoted, in this order."""
    wanted = pool.tiers.wanted
    room = _PROMOTIONS_MAX - len(wanted)
    on_ssd = pool.segments.on_ssd[pool.extent_words.take(rows * 4) & SEGMENT_MASK]
    cold = rows[on_ssd][: max(0, room)]
    wanted.extend(zip(cold.tolist(), pool.seqs_of(cold).tolist(), strict=True))


def plan_copies(pool: Pool, now_s: float) -> None:
    """One tick's worth. Bounded."""
    if not pool.segments.has_ssd:
        return
    disks: dict[int, list[Segment]] = {}
    for segment in pool.segments.by_id.values():
        if segment.tier != DRAM and segment.is_usable:
            disks.setdefault(segment.node.node_id, []).append(segment)
    if not disks:
        return
    budgets = {node_id: _budget(pool, node_id, now_s) for node_id in disks}
    note_allowances(pool, disks)
    if pool.tiers.wanted:
        _promote(pool, budgets)
    _demote(pool, disks, budgets, now_s)


def _budget(pool: Pool, node_id: int, now_s: float) -> int:
    """Units that may be ordered for a node now."""
    if pool.copies.retry_at_s.get(node_id, 0.0) > now_s:
        return 0
    node = pool.nodes.by_id[node_id]
    memory = sum(s.capacity_units for s in _memory_of(pool, node))
    most = min(pool.config.copying_bytes_max // UNIT_BYTES, memory >> 2)
    return most - pool.copies.units_by_node.get(node_id, 0)


def _memory_of(pool: Pool, node: Node) -> list[Segment]:
    segments = (pool.segments.by_id[i] for i in node.segment_ids)
    return [s for s in segments if s.tier == DRAM and s.is_usable]


# ---- demotion -------------------------------------------------------------------------------


def _demote(
    pool: Pool, disks: dict[int, list[Segment]], budgets: dict[int, int], now_s: float
) -> None:
    tiers = pool.tiers
    if tiers.at >= len(tiers.rows):
        rest_s = max(CANDIDATES_S_MIN, CANDIDATES_ROW_S * pool.objects.high_water)
        if now_s - tiers.looked_at_s < rest_s:
            return
        tiers.looked_at_s = now_s
        _look_for_cold(pool, disks)
    orders: dict[int, list[CopyRow]] = {}
    left = COPIES_PER_TICK
    while tiers.at < len(tiers.rows) and left and any(b > 0 for b in budgets.values()):
        some = slice(tiers.at, tiers.at + left)
        rows, stamps = tiers.rows[some], tiers.stamps[some]
        tiers.at += len(rows)
        rows = rows[pool.stamp.take(rows) == stamps]
        for row, words in zip(rows.tolist(), pool.digests_of(rows).tolist(), strict=True):
            ordered = _demote_one(pool, row, words, disks, budgets)
            if ordered is not None:
                orders.setdefault(ordered[0], []).extend(ordered[1])
                left -= 1
    for node_id, parts in orders.items():
        order_copies(pool, pool.nodes.by_id[node_id], parts)


def _look_for_cold(pool: Pool, disks: dict[int, list[Segment]]) -> None:
    """Fill the queue with the coldest objects of memory that have no copy on an SSD: of so much of
    what is used as there would be if only a share of memory were free."""
    tiers = pool.tiers
    tiers.rows, tiers.at, tiers.cold_until = tiers.rows[:0], 0, 0
    column = np.zeros(len(pool.segments.readable), np.bool_)
    capacity = used = 0
    for node_id in disks:
        for segment in _memory_of(pool, pool.nodes.by_id[node_id]):
            column[segment.segment_id] = True
            capacity += segment.capacity_units
            used += segment.used_units
    wanted = used - int(capacity * (1 - pool.config.demote_share))
    if wanted <= 0:
        return
    end = pool.objects.high_water
    mask = evictable_mask(pool, column)
    # As many as have so much of it, if they are of the usual size.
    count = min(-(-wanted * int(np.count_nonzero(mask)) // max(1, used)), CANDIDATES_MAX)
    rows = oldest_first(pool.stamp[:end], np.flatnonzero(mask), count)
    if not len(rows):
        return
    counts, spans = pool.spans_of(rows)
    has_copy = np.zeros(len(rows), np.bool_)
    owner = np.repeat(np.arange(len(rows)), counts)
    has_copy[owner[pool.segments.on_ssd[segments_of(spans)]]] = True
    pool.state[rows[has_copy]] |= np.uint8(COPIED)
    if any(segment.shared for segment in pool.segments.by_id.values()):
        note_known(pool, rows, has_copy)
    tiers.cold_until = int(pool.stamp[rows[-1]])
    has_copy |= (pool.state.take(rows) & np.uint8(COPYING | _UNWANTED)) != 0
    if tiers.has_budgets:
        has_copy |= is_declined(pool, rows)
    tiers.rows = rows[~has_copy]
    tiers.stamps = pool.stamp.take(tiers.rows)


def _demote_one(
    pool: Pool,
    row: int,
    digest: list[int],
    disks: dict[int, list[Segment]],
    budgets: dict[int, int],
) -> tuple[int, list[CopyRow]] | None:
    """(node, COPY rows) where a copy of it could be ordered."""
    state = int(pool.state[row])
    if not state & LIVE or state & (COPYING | _UNWANTED):
        return None
    extents = pool.objects.extents_of_one(row)
    by_id, on_ssd = pool.segments.by_id, pool.segments.on_ssd
    replicas = sorted({extent[1] for extent in extents})
    if any(extent[0] not in by_id or on_ssd[extent[0]] for extent in extents):
        return None
    for number in replicas:
        here = [extent for extent in extents if extent[1] == number]
        nodes = {by_id[extent[0]].node.node_id for extent in here}
        node_id = nodes.pop()
        # Of one that is striped over nodes, none of them has it whole.
        if nodes or budgets.get(node_id, 0) <= 0:
            continue
        twin = find_twin(pool, row, here, disks[node_id].__contains__)
        if twin is Sharing.PENDING:
            continue
        units = sum(extent[5] for extent in here) if twin is None else 0
        if not is_worth_it(pool, node_id, units, was_reused=bool(state & TOUCHED)):
            # Not for the next ones either, most likely: to be looked for anew, without such.
            budgets[node_id], pool.tiers.at = 0, len(pool.tiers.rows)
            continue
        if twin is not None:
            target = twin.hold()
        else:
            owner = int(pool.incarnations_of(np.array([row]))[0])
            target = _take_on_ssd(pool, disks[node_id], units, owner)
        if target is None:
            budgets[node_id] = 0  # not for another one either, in this tick
            continue
        segment, slot, offset, length = target
        free = next(n for n in range(_SSD_REPLICA_MIN, 256) if n not in replicas)
        span = pack_span(segment.segment_id, free, slot, offset, length)
        budgets[node_id] -= length
        return node_id, _order(pool, row, digest, segment, here, span, twin, is_promotion=False)
    return None


def _order(
    pool: Pool,
    row: int,
    digest: list[int],
    target: Segment,
    source: list[tuple[int, ...]],
    span: Spans,
    twin: Twin | None,
    *,
    is_promotion: bool,
) -> list[CopyRow]:
    """Note the copy of these extents (the fields of EXTENT rows); its COPY rows."""
    record = pool.record_of(row)
    copy_id = pool.copies.new_id()
    low, high = digest
    one = Copy(copy_id, target.node, low, high, record[3], record[2], target, span, is_promotion)
    pool.copies.add(one)
    note_ordered(pool, source, one, twin)
    pool.state[row] |= np.uint8(COPYING)
    word, slot, offset, length = span[0].tolist()
    place = offset * UNIT_BYTES, length * UNIT_BYTES
    to = word & SEGMENT_MASK, slot, word >> 16 & 0xFF
    versions = [(record[2], record[3], e[0], e[3]) for e in source]
    if twin is not None:  # a piece that is in the target already
        versions.append((twin.seq, twin.epoch, twin.segment.segment_id, twin.slot))
    return [(copy_id, seq, *place, epoch, *of, *to) for seq, epoch, *of in versions]


# ---- room on the SSD ------------------------------------------------------------------------


def _take_on_ssd(
    pool: Pool, segments: Iterable[Segment], units: int, incarnation: int
) -> Target | None:
    """One extent, where the most room is; None without any."""
    if not pool.quotas.active:
        return _take_anywhere(pool, segments, units)
    pool.quotas.begin_claim(incarnation, units, 0, on_ssd=True)
    try:
        return _take_anywhere(pool, segments, units)
    finally:
        pool.quotas.end_claim()


def _take_anywhere(pool: Pool, segments: Iterable[Segment], units: int) -> Target | None:
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
        rows, stamps = pool.tiers.victims.get(segment.segment_id, (pool.tiers.rows[:0], None))
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


# ---- promotion ------------------------------------------------------------------------------


def _promote(pool: Pool, budgets: dict[int, int]) -> None:
    wanted = pool.tiers.wanted[:PROMOTIONS_PER_TICK]
    del pool.tiers.wanted[:PROMOTIONS_PER_TICK]
    orders: dict[int, list[CopyRow]] = {}
    pairs = np.array(list(dict.fromkeys(wanted)), np.uint64)
    rows = rows_of_version(pool, pairs[:, 0].astype(np.int64), pairs[:, 1])
    if len(rows):
        _make_room_for(pool, rows, budgets)
        for row in rows.tolist():
            ordered = _promote_one(pool, row, budgets)
            if ordered is not None:
                orders.setdefault(ordered[0], []).extend(ordered[1])
    for node_id, parts in orders.items():
        order_copies(pool, pool.nodes.by_id[node_id], parts)


def _promote_one(pool: Pool, row: int, budgets: dict[int, int]) -> tuple[int, list[CopyRow]] | None:
    if int(pool.state[row]) & COPYING:
        return None
    _, spans = pool.spans_of(np.array([row]))
    if len(spans) != 1 or not pool.segments.on_ssd[segments_of(spans)][0]:
        return None
    node = pool.segments.by_id[int(segments_of(spans)[0])].node
    record = pool.record_of(row)
    units = -(-(record[0] + record[6]) // UNIT_BYTES)
    if budgets.get(node.node_id, 0) <= 0:
        return None
    source, memory = pool.objects.extents_of_one(row), _memory_of(pool, node)
    twin = find_twin(pool, row, source, memory.__contains__)
    if twin is Sharing.PENDING:
        want(pool, np.array([row]))  # once more
        return None
    target = _take_in_memory(memory, units) if twin is None else twin.hold()
    if target is None:
        return None
    segment, slot, offset, length = target
    number = int(spans[0, 0]) >> 16 & 0xFF
    span = pack_span(segment.segment_id, 1 if number == 0 else 0, slot, offset, length)
    budgets[node.node_id] -= length
    digest = pool.digests_of(np.array([row]))[0].tolist()
    return node.node_id, _order(pool, row, digest, segment, source, span, twin, is_promotion=True)


def _take_in_memory(memory: list[Segment], units: int) -> Target | None:
    for segment in sorted(memory, key=lambda s: -s.free_units):
        taken = segment.take_one(units)
        if taken is not None:
            return segment, taken[1], taken[0], taken[2]
    return None


def _make_room_for(pool: Pool, rows: Rows, budgets: dict[int, int]) -> None:
    """Have memory give up what has a copy on an SSD, coldest first: a promotion costs no object.

    As much as these rows need, and what may be ordered for each node.
    """
    ids = pool.extent_words.take(rows * 4) & SEGMENT_MASK
    units = pool.extent_words.take(rows * 4 + 3).astype(np.int64)
    for node_id, budget in budgets.items():
        node = pool.nodes.by_id[node_id]
        memory = _memory_of(pool, node)
        here = np.isin(ids, node.segment_ids)
        most = int(units[here].max(initial=0))
        # One more than fits: free space may be in pieces.
        missing = min(int(units[here].sum()), max(0, budget)) + most
        missing -= sum(s.free_units for s in memory)
        if missing <= 0 or not memory or budget <= 0 or not here.any():
            continue
        column = np.zeros(len(pool.segments.readable), np.bool_)
        column[[s.segment_id for s in memory]] = True
        end = pool.objects.high_water
        mask = evictable_mask(pool, column) & (pool.objects.extents > 1)
        copied = np.flatnonzero(mask)
        if pool.quotas.active:
            # Out of memory, too, goes nothing that is kept; but who gets room may give its own.
            own = np.isin(pool.incarnations_of(copied), pool.incarnations_of(rows))
            copied = copied[own | may_go(pool, copied, on_ssd=False)]
        cold = oldest_first(pool.stamp[:end], copied, len(rows) + COPIES_PER_TICK)
        if not len(cold):
            continue
        counts, spans = pool.spans_of(cold)
        has_copy = np.zeros(len(cold), np.bool_)
        owner = np.repeat(np.arange(len(cold)), counts)
        has_copy[owner[pool.segments.on_ssd[segments_of(spans)]]] = True
        cold = cold[has_copy]
        sums = np.cumsum(pool.extent_words.take(cold * 4 + 3), dtype=np.int64)
        evict(pool, cold[: int(np.searchsorted(sums, missing)) + 1], DRAM)
