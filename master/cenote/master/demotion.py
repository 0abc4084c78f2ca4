"""Copies from memory to SSD: which objects get one, and when that is ordered.

With every tick, and with each heartbeat that tells of copies that have ended: a device that is fast
is given the next ones at once, and not when a tick comes. Between two ticks no more is ordered than
`COPIES_PER_TICK`, for all nodes together, since it holds requests up.

The coldest objects are looked for in whole columns, for all nodes at once, and then wait in a queue
for each node. Most of them are of one kind (one extent, in memory), and are ordered as a batch that
takes one run of the device.

"Coldest" is what the eviction policy in force says (`EvictionPolicy.coldest`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import COPY, UNIT_BYTES
from cenote.policy.endurance import count_admitted, is_admitted, is_spared

from .copies import CopyRow, begin_copy, order_copies
from .nodes import Node
from .object_columns import COPIED, COPYING, PARTIAL, TOUCHED, UNCOPYABLE
from .objects import LIVE
from .pool import Pool, Rows
from .segments import DRAM, Segment
from .spans import SEGMENT_MASK, Spans, pack_span, segments_of
from .ssd_room import RUN_SHARE_MAX, Run, take_on_ssd, take_run_on_ssd
from .tier_tables import ColdQueue, Copy, source_of
from .twins import Sharing, are_shared, find_twin, may_have_twins, note_known
from .victims import evictable_mask

__all__ = ["budget_of", "demote", "demote_more", "memory_of", "note_allowances"]

COPIES_PER_TICK = 2_048
"""Some 3 us each, of those that are ordered as a batch."""
COPIES_AT_ONCE = 1024
"""For one node, some 1.5 ms. A daemon tells of copies every 5 to 20 ms; until the answer comes the
device has what was ordered before. With 256 one of 64 KiB blocks was idle half of the time."""
ODD_COPIES_AT_ONCE = 128
"""Of those that are not: some 12 us each."""
DEMOTED_SHARE_MAX = 0.5
"""Of a node's memory that is on its way to its SSD at once: a copy counts after two flushes, and
until then the device is to have something to write."""
CANDIDATES_MAX = 16_384
CANDIDATES_S_MIN, CANDIDATES_ROW_S = 0.01, 50e-9
"""How often the coldest objects are looked for: that reads whole columns, so it depends on how long
they are."""
REFUSED_ROW_S = 500e-9
"""The same, where there are none but those that no room could be made for: others that have become
cold since are found as late."""
SIZE_GUESSES = 4
"""How often more of them are looked for, where the coldest are smaller than the others are."""
_BLOCK_BYTES = 4_096
"""Of an SSD."""
_UNWANTED = UNCOPYABLE | PARTIAL
_SSD_REPLICA_MIN = 1
"""Numbers of replicas on an SSD; 0 is for one in memory."""
_EPOCH_MASK = np.uint64(0xFFFF_FFFF)

Disks = dict[int, list[Segment]]
"""Node id -> its segments on SSDs that may be written to."""


def memory_of(pool: Pool, node: Node) -> list[Segment]:
    """A node's segments in memory that are in use."""
    segments = (pool.segments.by_id[i] for i in node.segment_ids)
    return [s for s in segments if s.tier == DRAM and s.is_usable]


def budget_of(pool: Pool, node: Node, now_s: float, share: float = DEMOTED_SHARE_MAX) -> int:
    """Units that may be ordered for a node now: `share` of its memory may be under way at once."""
    if pool.copies.retry_at_s.get(node.node_id, 0.0) > now_s:
        return 0
    memory = sum(s.capacity_units for s in memory_of(pool, node))
    most = min(pool.config.copying_bytes_max // UNIT_BYTES, int(memory * share))
    return most - pool.copies.units_by_node.get(node.node_id, 0)


def note_allowances(pool: Pool, disks: Iterable[int]) -> None:
    """What devices whose writes have a budget may be written in this tick."""
    allowances = {}
    for node_id in disks:
        counters = pool.nodes.by_id[node_id].counters
        if counters.ssd_write_budget_bytes:
            # Copies under way may be charged there already, or not.
            under_way = pool.copies.units_by_node.get(node_id, 0) * UNIT_BYTES
            allowances[node_id] = counters.ssd_write_allowance_bytes - under_way
    pool.tiers.allowances = allowances
    pool.tiers.has_budgets = bool(allowances)


# ---- turns ----------------------------------------------------------------------------------


def demote(pool: Pool, disks: Disks, now_s: float) -> None:
    """A tick's worth."""
    tiers, by_id = pool.tiers, pool.nodes.by_id
    budgets = {node_id: budget_of(pool, by_id[node_id], now_s) for node_id in disks}
    tiers.left, tiers.disk_nodes = COPIES_PER_TICK, tuple(disks)
    if any(budgets[node_id] > 0 and tiers.is_idle(node_id) for node_id in disks):
        _look_if_due(pool, now_s)
    for node_id, segments in disks.items():
        _demote_of(pool, by_id[node_id], segments, budgets[node_id])


def demote_more(pool: Pool, node: Node, now_s: float) -> None:
    """Some copies of this node have ended: order the next ones."""
    # Where writes have a budget, ticks are soon enough.
    if node.node_id not in pool.tiers.disk_nodes or node.counters.ssd_write_budget_bytes:
        return
    here = (pool.segments.by_id[i] for i in node.segment_ids)
    segments = [s for s in here if s.tier != DRAM and s.is_usable]
    budget = budget_of(pool, node, now_s)
    if not segments or budget <= 0:
        return
    if pool.tiers.is_idle(node.node_id):
        _look_if_due(pool, now_s)
    _demote_of(pool, node, segments, budget)


def _demote_of(pool: Pool, node: Node, segments: list[Segment], budget: int) -> None:
    """Of this node's queue as much as its budget takes, and the bounds."""
    queue = pool.tiers.cold.get(node.node_id)
    if queue is None:
        return
    turn = _Turn(pool, node, segments, budget)
    while turn.goes_on and not queue.is_empty:
        rows, stamps, is_plain = _next_of(pool, node, queue, turn)
        if not len(rows):
            continue
        # As many as are of one kind.
        alike = int(np.argmax(is_plain != is_plain[0])) or len(rows)
        left = np.ones(len(rows), np.bool_)
        if is_plain[0]:
            left[turn.order_plain(rows[:alike])] = False
        if left.all():
            left[: turn.order_odd(rows[:alike])] = False
        queue.put_back(rows[left], stamps[left])
    if turn.is_declined:
        queue.clear()
    elif turn.passed and not turn.count and not _is_due(pool, pool.now_s, REFUSED_ROW_S):
        # Nobody's turn came after theirs: else they would be looked for all the time.
        rows = np.concatenate(turn.passed)
        queue.put_back(rows, pool.stamp.take(rows))
    turn.send()


def _next_of(
    pool: Pool, node: Node, queue: ColdQueue, turn: _Turn
) -> tuple[Rows, NDArray[np.uint64], NDArray[np.bool_]]:
    """The next ones of a queue, as far as they still are to be copied: rows, stamps, and whether
    each has one extent, in this node's memory, that no other holds."""
    rows, stamps = queue.take(turn.left)
    states = pool.state.take(rows)
    good = (pool.stamp.take(rows) == stamps) & ((states & np.uint8(LIVE)) != 0)
    good &= (states & np.uint8(COPYING | _UNWANTED)) == 0
    if turn.refused:
        refused = good & np.isin(pool.incarnations_of(rows), list(turn.refused))
        turn.passed.append(rows[refused])
        good &= ~refused
    rows, stamps = rows[good], stamps[good]
    segments = pool.extent_words.take(rows * 4) & SEGMENT_MASK
    is_plain = np.isin(segments, node.segment_ids) & ~pool.segments.on_ssd[segments]
    is_plain &= pool.objects.extents[rows] == 1
    if may_have_twins(pool, node):
        is_plain &= ~are_shared(pool, rows)
    return rows, stamps, is_plain


class _Turn:
    """What is ordered for one node at one time."""

    __slots__ = (
        "_budget",
        "_node",
        "_odd_left",
        "_orders",
        "_pool",
        "_segments",
        "is_declined",
        "passed",
        "refused",
    )

    def __init__(self, pool: Pool, node: Node, segments: list[Segment], budget: int) -> None:
        self._pool = pool
        self._node = node
        self._segments = segments
        self._budget = budget
        self._odd_left = ODD_COPIES_AT_ONCE
        self._orders: list[NDArray[np.void]] = []
        self.is_declined = False
        """The next one is not worth a write, and nor are those behind it, most likely: they are to
        be looked for anew, without such."""
        self.refused: set[int] = set()
        """Incarnations that no room can be made for, for the sake of others' quotas: these keep
        nobody waiting who has a right to some."""
        self.passed: list[Rows] = []
        """What was passed over for that."""

    @property
    def count(self) -> int:
        return sum(len(o) for o in self._orders)

    @property
    def left(self) -> int:
        """How many may still be ordered."""
        return min(self._pool.tiers.left, COPIES_AT_ONCE - self.count)

    @property
    def goes_on(self) -> bool:
        return self._budget > 0 and self._odd_left > 0 and self.left > 0

    def send(self) -> None:
        """Tell the node."""
        if self._orders:
            order_copies(self._pool, self._node, np.concatenate(self._orders))

    def _note(self, ordered: NDArray[np.void], copies: int, units: int) -> None:
        self._orders.append(ordered)
        self._budget -= units
        self._pool.tiers.left -= copies

    def order_plain(self, rows: Rows) -> Rows:
        """Of objects with one extent, in memory, as many as there is room for at once: which of
        them."""
        pool, node = self._pool, self._node
        units = pool.extent_words.take(rows * 4 + 3).astype(np.int64)
        sums = np.cumsum(self._segments[0].round_up(units))
        most = max(s.capacity_units for s in self._segments) // RUN_SHARE_MAX
        within = int(np.searchsorted(sums, self._budget)) + 1
        count = min(within, int(np.searchsorted(sums, most, "right")), len(rows))
        charges = None
        if node.node_id in pool.tiers.allowances:
            charges = _charge_of(units)
            count = min(count, _count_worth_it(pool, node, rows, charges))
        if not count:
            return rows[:0]
        owners = pool.incarnations_of(rows)
        run = take_run_on_ssd(pool, self._segments, units[:count], owners[:count])
        if run is None:
            return rows[:0]
        self._begin(rows[run.chosen], owners[run.chosen].tolist(), run)
        if charges is not None:
            pool.tiers.allowances[node.node_id] -= int(charges[run.chosen].sum())
        return run.chosen

    def _begin(self, rows: Rows, owners: list[int], run: Run) -> None:
        """Note the copies of these, to the room that was taken for them, and order them."""
        pool, segment, count = self._pool, run.segment, len(rows)
        spans = np.empty((count, 4), np.uint32)
        sources = pool.extent_words.reshape(-1, 4)[rows]
        replica = np.where((sources[:, 0] >> 16) & 0xFF == _SSD_REPLICA_MIN, 2, _SSD_REPLICA_MIN)
        spans[:, 0] = segment.segment_id | replica << 16
        spans[:, 1], spans[:, 2], spans[:, 3] = run.slots, run.offsets, run.units
        ids, records = pool.copies.new_ids(count), pool.records_of(rows)
        ordered = np.zeros(count, COPY)
        ordered["copy_id"] = np.arange(ids, ids + count, dtype=np.uint64)
        ordered["source_seq"] = records[:, 2]
        ordered["source_epoch"] = epochs = (records[:, 3] & _EPOCH_MASK).astype(np.uint32)
        ordered["source_segment"] = sources[:, 0] & SEGMENT_MASK
        ordered["source_slot"] = sources[:, 1]
        ordered["target_offset"] = spans[:, 2].astype(np.uint64) * np.uint64(UNIT_BYTES)
        ordered["target_length"] = spans[:, 3].astype(np.uint64) * np.uint64(UNIT_BYTES)
        ordered["target_segment"], ordered["target_slot"] = segment.segment_id, run.slots
        ordered["target_replica"] = replica
        pool.state[rows] |= np.uint8(COPYING)
        node, add = segment.node, pool.copies.add
        left_by = source_of(ordered["source_segment"], sources[:, 1]).tolist()
        versions = zip(epochs.tolist(), records[:, 2].tolist(), owners, left_by, strict=True)
        words = pool.digests_of(rows).tolist()
        for i, ((low, high), version) in enumerate(zip(words, versions, strict=True)):
            epoch, seq, owner, source = version
            span = spans[i : i + 1]
            where = ids + i, node, low, high, epoch, seq, segment, span, False
            add(Copy(*where, owner, source=source))
        self._note(ordered, count, int(run.units.sum()))

    def order_odd(self, rows: Rows) -> int:
        """Of any objects, one by one; how many were seen to, the first ones."""
        pool = self._pool
        rows = rows[: self._odd_left]
        orders: list[CopyRow] = []
        copies, spent, seen = 0, 0, 0
        for row, words in zip(rows.tolist(), pool.digests_of(rows).tolist(), strict=True):
            if spent >= self._budget:
                break
            refused = len(self.refused)
            units, parts = self._order_one(row, words)
            if units < 0:
                self._budget = 0  # not for another one either, now
                break
            seen += 1
            if len(self.refused) > refused:
                break  # more of them are not tried
            if parts:
                orders += parts
                copies, spent = copies + 1, spent + units
        self._odd_left -= seen
        if orders:
            self._note(np.array(orders, COPY), copies, spent)
        return seen

    def _order_one(self, row: int, digest: list[int]) -> tuple[int, list[CopyRow]]:
        """(units, COPY rows), without any where it is to have no copy on this node; units are below
        0 where there is no room, or it is not worth a write now."""
        pool, node = self._pool, self._node
        extents = pool.objects.extents_of_one(row)
        by_id, on_ssd = pool.segments.by_id, pool.segments.on_ssd
        replicas = sorted({extent[1] for extent in extents})
        if any(extent[0] not in by_id or on_ssd[extent[0]] for extent in extents):
            return 0, []
        for number in replicas:
            here = [extent for extent in extents if extent[1] == number]
            # Of one that is striped over nodes, none of them has it whole.
            if any(by_id[extent[0]].node is not node for extent in here):
                continue
            twin = find_twin(pool, row, here, self._segments.__contains__)
            if twin is Sharing.PENDING:
                continue  # it is looked for again
            units = sum(extent[5] for extent in here) if twin is None else 0
            charge = _charge_if_worth_it(
                pool, node, units, was_reused=bool(pool.state[row] & TOUCHED)
            )
            if charge < 0:
                self.is_declined = True
                return -1, []
            if twin is not None:
                target = twin.hold()
            else:
                owner = int(pool.incarnations_of(np.array([row]))[0])
                target = take_on_ssd(pool, self._segments, units, owner)
                if target is None and pool.quotas.active:
                    self.refused.update(pool.quotas.alike(pool.namespaces, owner))
                    self.passed.append(np.array([row]))
                    return 0, []
            if target is None:
                return -1, []
            if charge:
                pool.tiers.allowances[node.node_id] -= charge
            segment, slot, offset, length = target
            free = next(n for n in range(_SSD_REPLICA_MIN, 256) if n not in replicas)
            span = pack_span(segment.segment_id, free, slot, offset, length)
            parts = begin_copy(pool, row, digest, segment, here, span, twin, is_promotion=False)
            return units and length, parts
        return 0, []


def _charge_of(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes that copies of so many units are written as: the last block is filled up, and a page of
    slots is written with it."""
    return (-(-units * UNIT_BYTES // _BLOCK_BYTES) + 1) * _BLOCK_BYTES


def _charge_if_worth_it(pool: Pool, node: Node, units: int, *, was_reused: bool) -> int:
    """Bytes that a copy of so many units is charged to the budget of a node's device, 0 where it
    has none; below 0 where it is not worth that."""
    allowance = pool.tiers.allowances.get(node.node_id)
    if allowance is None:
        return 0
    charge = int(_charge_of(np.array(units)))
    budget = node.counters.ssd_write_budget_bytes
    return charge if is_admitted(charge, budget, allowance, was_reused=was_reused) else -1


def _count_worth_it(pool: Pool, node: Node, rows: Rows, charges: NDArray[np.int64]) -> int:
    """How many of these, in their order."""
    allowance, budget = pool.tiers.allowances[node.node_id], node.counters.ssd_write_budget_bytes
    return count_admitted(charges, budget, allowance, (pool.state.take(rows) & TOUCHED) != 0)


# ---- what is cold ---------------------------------------------------------------------------


def _is_due(pool: Pool, now_s: float, row_s: float) -> bool:
    # Policies with several queues take twice as long to say what is coldest.
    row_s *= 1 if pool.policy.by_age else 2
    rest_s = max(CANDIDATES_S_MIN, row_s * pool.objects.high_water)
    return now_s - pool.tiers.looked_at_s >= rest_s


def _look_if_due(pool: Pool, now_s: float) -> None:
    if _is_due(pool, now_s, CANDIDATES_ROW_S):
        pool.tiers.looked_at_s = now_s
        _look_for_cold(pool, pool.tiers.disk_nodes)


def _look_for_cold(pool: Pool, node_ids: tuple[int, ...]) -> None:
    """Fill the queues with the coldest objects of memory that have no copy on an SSD: of so much of
    what is used as there would be if only a share of memory were free."""
    tiers = pool.tiers
    tiers.cold, tiers.cold_until = {}, 0
    column = np.zeros(len(pool.segments.readable), np.bool_)
    capacity = used = 0
    for node_id in node_ids:
        for segment in memory_of(pool, pool.nodes.by_id[node_id]):
            column[segment.segment_id] = True
            capacity += segment.capacity_units
            used += segment.used_units
    wanted = used - int(capacity * (1 - pool.config.demote_share))
    if wanted <= 0:
        return
    rows, counts, spans = _coldest(pool, column, wanted / max(1, used), wanted)
    if not len(rows):
        return
    has_copy = np.zeros(len(rows), np.bool_)
    owner = np.repeat(np.arange(len(rows)), counts)
    has_copy[owner[pool.segments.on_ssd[segments_of(spans)]]] = True
    pool.state[rows[has_copy]] |= np.uint8(COPIED)
    if any(may_have_twins(pool, pool.nodes.by_id[node_id]) for node_id in node_ids):
        note_known(pool, rows, has_copy)
    tiers.cold_until = int(pool.stamp[rows[-1]])
    has_copy |= (pool.state.take(rows) & np.uint8(COPYING | _UNWANTED)) != 0
    if tiers.has_budgets:
        has_copy |= _is_declined(pool, rows)
    _queue_up(pool, node_ids, rows[~has_copy])


def _coldest(
    pool: Pool, column: NDArray[np.bool_], share: float, wanted: int
) -> tuple[Rows, NDArray[np.int64], Spans]:
    """The coldest objects that have `wanted` units (a `share` of what is used) of the segments that
    the column names, the coldest first: (rows, extents of each, all of these)."""
    end = pool.objects.high_water
    positions = np.flatnonzero(evictable_mask(pool, column))
    most = min(len(positions), CANDIDATES_MAX)
    # As many as that are if they are of the usual size.
    count = min(most, math.ceil(share * len(positions)))
    for _ in range(SIZE_GUESSES):
        rows = pool.policy.coldest(pool.stamp[:end], positions, count)
        counts, spans = pool.spans_of(rows)
        units = np.where(column[segments_of(spans)], spans[:, 3], 0).astype(np.int64)
        found = int(units.sum())
        if found >= wanted or len(rows) >= most:
            break
        count = min(most, max(2 * len(rows), math.ceil(len(rows) * wanted / max(1, found))))
    if found > wanted and not any(may_have_twins(pool, node) for node in pool.nodes.by_id.values()):
        last = int(np.searchsorted(np.cumsum(units), wanted))
        kept = int(np.searchsorted(np.cumsum(counts), last, "right")) + 1
        rows, counts = rows[:kept], counts[:kept]
        spans = spans[: int(counts.sum())]
    return rows, counts, spans


def _queue_up(pool: Pool, node_ids: tuple[int, ...], rows: Rows) -> None:
    """These are to be copied, each to the SSD of a node that has it."""
    tiers = pool.tiers
    if len(node_ids) == 1:
        tiers.cold = {node_id: ColdQueue(rows, pool.stamp.take(rows)) for node_id in node_ids}
        return
    counts, spans = pool.spans_of(rows)
    nodes = np.zeros(len(pool.segments.readable), np.int64)
    for node_id in node_ids:
        nodes[pool.nodes.by_id[node_id].segment_ids] = node_id
    # Of its extents the first on such a node.
    owner, where = np.repeat(np.arange(len(rows)), counts), nodes[segments_of(spans)]
    first = np.zeros(len(rows), np.int64)
    first[owner[where > 0][::-1]] = where[where > 0][::-1]
    order = np.argsort(first, kind="stable")
    begins = np.searchsorted(first[order], node_ids, "left")
    ends = np.searchsorted(first[order], node_ids, "right")
    for node_id, begin, end in zip(node_ids, begins.tolist(), ends.tolist(), strict=True):
        mine = rows[order[begin:end]]
        tiers.cold[node_id] = ColdQueue(mine, pool.stamp.take(mine))


def _is_declined(pool: Pool, rows: Rows) -> NDArray[np.bool_]:
    """Which of them are not worth a write now: on a node that spares its device, and not asked for
    since they were put."""
    spared = np.zeros(len(pool.segments.readable), np.bool_)
    for node_id, allowance in pool.tiers.allowances.items():
        node = pool.nodes.by_id[node_id]
        spared[node.segment_ids] = is_spared(node.counters.ssd_write_budget_bytes, allowance)
    declined: NDArray[np.bool_] = spared[pool.extent_words.take(rows * 4) & SEGMENT_MASK]
    declined &= (pool.state.take(rows) & TOUCHED) == 0
    return declined
