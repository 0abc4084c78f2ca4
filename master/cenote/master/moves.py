"""Copies of objects from one node to another: where they go, what makes room, and how they end.

A copy takes its place on the node that is to have it, as those between tiers do (`copies`); that
node's daemon fetches the bytes from the one that has them, and reports. Then the object has one
replica more, and the one that was to go goes: at once, or when the last lease on it ends.

Nothing of a client's waits for a move. Room is made for it only by what is colder than what comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import (
    PULL,
    PULL_SOURCE,
    PULL_TARGET,
    PULL_TWIN,
    UNIT_BYTES,
    CopyStatus,
)
from cenote.policy.lru import oldest_first

from .decisions import Why
from .effects import GoneReason
from .eviction import evict, evict_nearby, reserve_units
from .instructions import Instruction
from .move_tables import NO_REPLICA, Cause, Move, Task
from .nodes import Node
from .object_columns import COPYING
from .objects import LIVE
from .pool import Pool, Rows
from .segments import DRAM, Segment
from .slot_growth import ensure_slots
from .spans import SEGMENT_MASK, pack_span, segments_of
from .tier_tables import Copy
from .twins import Sharing, Twin, find_twin, note_ordered
from .victims import evictable_mask

__all__ = [
    "Extent",
    "Targets",
    "data_address",
    "drop_superseded",
    "give_up_dead",
    "leave",
    "settle_moves",
]

Extent: TypeAlias = tuple[int, ...]
"""Segment, replica, shard, slot, offset, length; the latter in units."""
Place: TypeAlias = tuple[Segment, int, int, int]
"""Segment, slot, offset, length."""

TCP = 1
"""A transport kind, as in common.proto."""
RETRY_S = 1.0
_TRIED_MAX = 16
"""Segments that are looked at for one object."""
_VICTIMS = 4_096
_ROOM_ROUNDS = 5
_RESERVES = 4
"""A segment with less free than so many times its reserve evicts ahead of need."""
_DISK_FREE_PART = 50
"""An SSD with less than one in so many of its bytes free is full."""
_COPIED_AT_ONCE = 64
NEVER_SEALED_S = 10.0
_NEVER_SEALED_TIMES = 6
"""A source that was not there so often, for so long, was never sealed: its writer died."""
_REPAIR_TIMES = 5
"""How often a replica that was lost with its segment is tried to be made anew."""
_CHANGED_TIMES = 2
"""A source whose bytes were not what was sealed so often is damaged."""


class Targets:
    """Nodes that take something up in this tick, and what was ordered of them."""

    def __init__(self, pool: Pool, now_s: float) -> None:
        self._pool = pool
        self._segments = [entry.segment for entry in pool.placement.entries]
        self._budgets: dict[int, int] = {}
        retry = pool.copies.retry_at_s
        for segment in self._segments:
            node = segment.node.node_id
            self._budgets[node] = self._budgets.get(node, 0) + (segment.capacity_units >> 2)
        most = pool.config.copying_bytes_max // UNIT_BYTES
        for node, share in self._budgets.items():
            under_way = pool.copies.units_by_node.get(node, 0)
            self._budgets[node] = min(most, share) - under_way if retry.get(node, 0) <= now_s else 0
        self._orders: dict[int, list[tuple[int, ...]]] = {}
        self._sources: dict[int, set[int]] = {}
        self._nothing_copied = False

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def has_budget(self) -> bool:
        return any(left > 0 for left in self._budgets.values())

    def eligible(self, nodes: Collection[int], domains: Collection[str]) -> list[Segment]:
        """Segments on none of these nodes, in none of these failure domains."""
        return [
            s
            for s in self._segments
            if s.node.node_id not in nodes and s.node.domain not in domains
        ]

    def within_budget(self, segments: Sequence[Segment]) -> list[Segment]:
        return [s for s in segments if self._budgets.get(s.node.node_id, 0) > 0]

    def take(
        self, segments: Sequence[Segment], units: int, *, spares_reserve: bool = False
    ) -> Place | None:
        """Space in one of them, where the most of it is free; with `spares_reserve` so that nothing
        is evicted ahead of need because of it."""
        pool = self._pool
        if len(segments) > _TRIED_MAX:
            pool.moves.turn += 1
            at = pool.moves.turn % len(segments)
            segments = [*segments[at:], *segments[:at]][:_TRIED_MAX]
        for segment in sorted(segments, key=lambda s: -s.free_units / (s.capacity_units or 1)):
            spared = (
                _RESERVES * reserve_units(pool, segment.capacity_units) if spares_reserve else 0
            )
            if segment.free_units < units + spared:
                continue
            ensure_slots(pool, segment, 1)
            taken = segment.take_one(units)
            if taken is not None:
                offset, slot, length = taken
                return segment, slot, offset, length
        return None

    def make_room(self, segments: Sequence[Segment], units: int, stamp: int) -> Place | None:
        """Space in one of them, by evicting what is colder than `stamp`."""
        pool = self._pool
        for attempt in range(_ROOM_ROUNDS):
            if not self._evict_colder(units << attempt, stamp):
                break
            taken = self.take(segments, units)
            if taken is not None:
                return taken
        for segment in segments[:_TRIED_MAX]:
            # There is room, in pieces.
            if segment.free_units >= units and evict_nearby(pool, segment, -(-units // 64) * 64):
                return self.take([segment], units)
        return None

    def _evict_colder(self, units: int, stamp: int) -> bool:
        pool, moves = self._pool, self._pool.moves
        freed = 0
        for _ in range(2):
            while moves.victim_at < len(moves.victims) and freed < units:
                at = moves.victim_at
                rows, stamps = moves.victims[at : at + 16], moves.victim_stamps[at : at + 16]
                if int(stamps[0]) >= stamp:
                    return freed > 0
                good = (pool.stamp.take(rows) == stamps) & (stamps < stamp)
                good &= (pool.state.take(rows) & np.uint8(LIVE | COPYING)) == LIVE
                good &= (pool.lease_count.take(rows) == 0) & (pool.pin.take(rows) == 0)
                sums = np.cumsum(pool.extent_words.take(rows * 4 + 3) * good, dtype=np.int64)
                enough = int(np.searchsorted(sums, units - freed)) + 1
                good[enough:] = False
                moves.victim_at += min(enough, int(np.count_nonzero(stamps < stamp)))
                if good.any():
                    freed += evict(pool, rows[good], DRAM, Why.MOVED_IN)
            if freed >= units:
                break
            self._look_for_victims()
        return freed > 0

    def have_free_disks(self, segments: Sequence[Segment]) -> bool:
        """Whether what is in memory there could go to an SSD."""
        by_id = self._pool.segments.by_id
        if not self._pool.segments.has_ssd:
            return False
        nodes = {segment.node.node_id: segment.node for segment in segments}
        disks = [by_id[i] for node in nodes.values() for i in node.segment_ids]
        return any(
            s.tier != DRAM and s.is_usable and s.free_units * _DISK_FREE_PART > s.capacity_units
            for s in disks
        )

    def take_from_copied(self, segments: Sequence[Segment], units: int) -> Place | None:
        """Space in one of them that is free, or in place of what has a copy on an SSD: neither
        costs an object."""
        pool = self._pool
        taken = self.take(segments, units, spares_reserve=True)
        if taken is not None or self._nothing_copied:
            return taken
        column = np.zeros(len(pool.segments.readable), np.bool_)
        column[[s.segment_id for s in segments]] = True
        mask = evictable_mask(pool, column) & (pool.objects.extents > 1)
        mask &= (pool.state[: pool.objects.high_water] & np.uint8(COPYING)) == 0
        stamps = pool.stamp[: pool.objects.high_water]
        cold = pool.policy.coldest(stamps, np.flatnonzero(mask), _COPIED_AT_ONCE)
        if len(cold):
            counts, spans = pool.spans_of(cold)
            has_copy = np.zeros(len(cold), np.bool_)
            owner = np.repeat(np.arange(len(cold)), counts)
            has_copy[owner[pool.segments.on_ssd[segments_of(spans)]]] = True
            cold = cold[has_copy]
        if not len(cold):
            self._nothing_copied = True
            return None
        evict(pool, cold, DRAM, Why.MOVED_IN)
        return self.take(segments, units, spares_reserve=True)

    def _look_for_victims(self) -> None:
        pool, moves = self._pool, self._pool.moves
        column = np.zeros(len(pool.segments.readable), np.bool_)
        column[[s.segment_id for s in self._segments]] = True
        here = np.flatnonzero(evictable_mask(pool, column))
        moves.victims = oldest_first(pool.stamp[: pool.objects.high_water], here, _VICTIMS)
        moves.victim_stamps = pool.stamp.take(moves.victims)
        moves.victim_at = 0

    # ---- orders -------------------------------------------------------------------------------

    def find_twin(
        self, row: int, source: Sequence[Extent], segments: Sequence[Segment]
    ) -> Twin | Literal[Sharing.PENDING] | None:
        """Where one of these segments has the same bytes."""
        return find_twin(self._pool, row, source, segments.__contains__)

    def order(
        self,
        row: int,
        source: Sequence[Extent],
        place: Place,
        task: Task,
        leaves: int,
        twin: Twin | None = None,
    ) -> None:
        """Have a replica copied to a place that was taken for it, or is held with a `twin`."""
        pool = self._pool
        segment, slot, offset, length = place
        record = pool.record_of(row)
        seq, epoch = record[2], record[3]
        taken = {extent[1] for extent in pool.objects.extents_of_one(row)}
        number = next(n for n in range(NO_REPLICA) if n not in taken)
        low, high = pool.digests_of(np.array([row]))[0].tolist()
        span = pack_span(segment.segment_id, number, slot, offset, length)
        move = Move(task, source[0][1], leaves)
        copy_id = pool.copies.new_ids(1)
        node = segment.node
        one = Copy(copy_id, node, low, high, epoch, seq, segment, span, False, record[5], move)
        pool.copies.add(one)
        note_ordered(pool, source, one, twin)
        pool.state[row] |= np.uint8(COPYING)
        self._budgets[node.node_id] -= length
        task.charge(0 if twin is not None else length)
        orders = self._orders.setdefault(node.node_id, [])
        for extent in source:
            orders.append((copy_id, seq, 0, 0, epoch, extent[0], extent[3], 0, PULL_SOURCE))
        if twin is not None:
            has = twin.segment.segment_id, twin.slot
            orders.append((copy_id, twin.seq, 0, 0, twin.epoch, *has, 0, PULL_TWIN))
        at, size = offset * UNIT_BYTES, length * UNIT_BYTES
        orders.append(
            (copy_id, seq, at, size, epoch, segment.segment_id, slot, number, PULL_TARGET)
        )
        self._sources.setdefault(node.node_id, set()).update(extent[0] for extent in source)

    def send(self) -> None:
        """Tell the nodes what was ordered."""
        pool = self._pool
        for node_id, rows in self._orders.items():
            sources: dict[int, list[int]] = {}
            for segment_id in sorted(self._sources[node_id]):
                owner = pool.segments.by_id[segment_id].node
                sources.setdefault(owner.node_id, []).append(segment_id)
            told = [(data_address(pool.nodes.by_id[owner]), ids) for owner, ids in sources.items()]
            pool.instruct(
                pool.nodes.by_id[node_id], Instruction(0, pulls=(told, np.array(rows, PULL)))
            )
        self._orders, self._sources = {}, {}


def data_address(node: Node) -> str:
    """Where its data server listens; "" where that is not known."""
    return next((e.address for e in node.endpoints if e.kind == TCP), "")


# ---- how copies end --------------------------------------------------------------------------


def settle_moves(
    pool: Pool,
    ended: Sequence[Copy],
    rows: Rows,
    linked: NDArray[np.bool_],
    statuses: NDArray[np.int64],
    now_s: float,
) -> None:
    """Copies between nodes came to an end: which row each was of (0: that version is gone), and
    whether it has one replica more now."""
    for one, row, done, status in zip(
        ended, rows.tolist(), linked.tolist(), statuses.tolist(), strict=True
    ):
        move = one.move
        if move is None:
            continue
        task = move.task
        if done:
            task.moved += 1
            task.moved_bytes += int(pool.record_of(row)[0])
            pool.moves.failures.pop((one.low, one.high), None)
            if move.leaves != NO_REPLICA:
                leave(pool, row, move.leaves)
            elif task.cause is Cause.HOT:
                pool.heat.extra.setdefault((one.low, one.high), []).append(one.replica)
        elif row > 0 and status != CopyStatus.DONE:
            task.failed += 1
            _note_failure(pool, one, move, row, status, now_s)


def _note_failure(pool: Pool, one: Copy, move: Move, row: int, status: int, now_s: float) -> None:
    """A replica that turns out to be no source for anything goes, so that no drain waits for it."""
    known = pool.moves.failures_of((one.low, one.high), one.seq, now_s)
    known.times += 1
    if move.task.cause is Cause.REPAIR and not move.task.node_id and known.times < _REPAIR_TIMES:
        digest = np.array([(one.low, one.high)], np.uint64)
        pool.moves.short.append((digest, np.array([one.seq], np.uint64)))
    if status == CopyStatus.UNREACHABLE:
        move.task.retry_at_s = now_s + RETRY_S
        return
    known.not_there += status == CopyStatus.NO_SOURCE
    known.changed += status == CopyStatus.SOURCE_CHANGED
    never_sealed = known.not_there >= _NEVER_SEALED_TIMES and now_s - known.first_s > NEVER_SEALED_S
    damaged = known.changed >= _CHANGED_TIMES
    if never_sealed or damaged:
        pool.counters.damaged += damaged
        pool.moves.failures.pop((one.low, one.high), None)
        leave(pool, row, move.source)


def leave(pool: Pool, row: int, number: int, reason: GoneReason = GoneReason.LOST) -> None:
    """A replica of a LIVE row goes: at once, or when the last lease on it has ended."""
    rows = np.array([row])
    counts, spans = pool.spans_of(rows)
    here = ((spans[:, 0] >> 16) & 0xFF) == number
    if not here.any():
        return
    low, high = pool.digests_of(rows)[0].tolist()
    if pool.lease_count[row]:
        pool.moves.superseded[low, high] = (int(pool.record_of(row)[2]), number)
        return
    pool.drop_replicas(np.repeat(rows, counts)[here], spans[here], reason)


def drop_superseded(pool: Pool) -> None:
    """Those of which the last lease has ended. Bounded by how many are leased."""
    moves = pool.moves
    if not moves.superseded:
        return
    waiting = list(moves.superseded.items())
    digests = np.array([digest for digest, _ in waiting], np.uint64)
    rows = pool.objects.lookup(digests)
    for (digest, (seq, number)), row in zip(waiting, rows.tolist(), strict=True):
        if row <= 0 or int(pool.record_of(row)[2]) != seq:
            del moves.superseded[digest]
        elif not pool.lease_count[row]:
            del moves.superseded[digest]
            others = [e for e in pool.objects.extents_of_one(row) if e[1] != number]
            if any(pool.segments.readable[e[0] & SEGMENT_MASK] for e in others):
                leave(pool, row, number)


def give_up_dead(pool: Pool) -> None:
    """Copies to nodes that fell silent: their objects may be copied elsewhere. Their space stays
    theirs until the node says what came of them."""
    given_up = [
        one
        for one in pool.copies.by_id.values()
        if one.move is not None and not one.given_up and not one.node.is_readable
    ]
    if not given_up:
        return
    digests = np.array([(one.low, one.high) for one in given_up], np.uint64)
    for one, row in zip(given_up, pool.objects.lookup(digests).tolist(), strict=True):
        one.given_up = True
        if row > 0:
            pool.state[row] &= ~np.uint8(COPYING)
