"""What goes from memory to SSD, and back: planned with every tick, carried out by the daemons.

    demotion    the coldest objects of a memory that fills up get a copy on the SSD of their node,
                before it is their turn to be evicted; that then costs their place in memory alone
                (`demotion`)
    eviction    of an SSD: the coldest of what is nowhere else (`ssd_room`)
    promotion   of what was read from the SSD for the second time since it was in memory last

None of it is ever waited for. A put that finds memory full evicts, copied or not: an SSD that is
slower than what is put keeps less. What is under way at one time is bounded; a daemon with a limit
on its writes reports later, and gets the next copies later.
"""

from __future__ import annotations

import numpy as np

from cenote.api.rows import COPY, UNIT_BYTES

from .copies import CopyRow, begin_copy, order_copies, rows_of_version
from .demotion import budget_of, demote, memory_of, note_allowances
from .eviction import evict
from .object_columns import COPYING, PARTIAL, TOUCHED
from .pool import Pool, Rows
from .quotas import may_go
from .segments import DRAM, Segment
from .spans import SEGMENT_MASK, pack_span, segments_of
from .twins import Sharing, find_twin
from .victims import evictable_mask

__all__ = [
    "is_tiered",
    "note_cached_reads",
    "note_chain",
    "note_reuse",
    "note_touches",
    "plan_copies",
    "want",
]

PROMOTIONS_PER_TICK = 32
"""A tick holds requests up for so long: about 100 us each."""
PROMOTED_SHARE_MAX = 0.25
"""Of a node's memory that copies may be under way for when promotions, which take some of it, are
ordered."""
VICTIMS_MORE = 256
_PROMOTIONS_MAX = 4_096


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
        pool.tiers.cold, pool.tiers.disk_nodes = {}, ()
        return
    note_allowances(pool, disks)
    if pool.tiers.wanted:
        nodes = (pool.nodes.by_id[node_id] for node_id in disks)
        _promote(pool, {n.node_id: budget_of(pool, n, now_s, PROMOTED_SHARE_MAX) for n in nodes})
    demote(pool, disks, now_s)


# ---- promotion ------------------------------------------------------------------------------


def _promote(pool: Pool, budgets: dict[int, int]) -> None:
    wanted = pool.tiers.wanted[:PROMOTIONS_PER_TICK]
    del pool.tiers.wanted[:PROMOTIONS_PER_TICK]
    orders: dict[int, list[CopyRow]] = {}
    pairs = np.array(list(dict.fromkeys(wanted)), np.uint64)
    rows = rows_of_version(pool, pairs[:, 0].astype(np.int64), pairs[:, 1])
    if len(rows):
        _make_room_for(pool, rows, budgets)
        begun = []
        for row in rows.tolist():
            ordered = _promote_one(pool, row, budgets)
            if ordered is not None:
                begun.append(row)
                orders.setdefault(ordered[0], []).extend(ordered[1])
        # Else what is promoted for a hint would be the first to leave memory for the next ones.
        if begun:
            pool.policy.touch(pool.stamp, np.array(begun, np.int64), True)
    for node_id, parts in orders.items():
        order_copies(pool, pool.nodes.by_id[node_id], np.array(parts, COPY))


def _promote_one(pool: Pool, row: int, budgets: dict[int, int]) -> tuple[int, list[CopyRow]] | None:
    if int(pool.state[row]) & COPYING:
        return None
    _, spans = pool.spans_of(np.array([row]))
    if len(spans) != 1 or not pool.segments.on_ssd[segments_of(spans)][0]:
        return None
    node = pool.segments.by_id[int(segments_of(spans)[0])].node
    record = pool.record_of(row)
    units = -(-(record[0] + record[6]) // UNIT_BYTES)
    if node.node_id not in budgets:
        return None
    if budgets[node.node_id] <= 0:
        want(pool, np.array([row]))  # once more, when some of what is under way has ended
        return None
    source, memory = pool.objects.extents_of_one(row), memory_of(pool, node)
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
    ordered = begin_copy(pool, row, digest, segment, source, span, twin, is_promotion=True)
    return node.node_id, ordered


def _take_in_memory(memory: list[Segment], units: int) -> tuple[Segment, int, int, int] | None:
    """(segment, slot, offset, units) of one extent, where the most room is; None without any."""
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
        memory = memory_of(pool, node)
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
        cold = pool.policy.coldest(pool.stamp[:end], copied, len(rows) + VICTIMS_MORE)
        if not len(cold):
            continue
        counts, spans = pool.spans_of(cold)
        has_copy = np.zeros(len(cold), np.bool_)
        owner = np.repeat(np.arange(len(cold)), counts)
        has_copy[owner[pool.segments.on_ssd[segments_of(spans)]]] = True
        cold = cold[has_copy]
        sums = np.cumsum(pool.extent_words.take(cold * 4 + 3), dtype=np.int64)
        evict(pool, cold[: int(np.searchsorted(sums, missing)) + 1], DRAM)
