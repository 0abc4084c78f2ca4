"""Evening out: objects move from nodes that are fuller than the mean to those that are emptier.

A fresh node in a pool gets only its share of what is new (`placement`), so it fills slowly; this
gives it its share of what is there. The coldest move: they are read least, and wherever they lie
they are as old as before. Nothing is evicted for it, and it ends by itself.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cenote.api.errors import InvalidArgument

from .move_tables import Cause, Task
from .moves import Extent, Targets
from .object_columns import COPYING
from .objects import LIVE
from .pool import Pool, Rows
from .segments import DRAM, Segment
from .task_commands import Rebalance
from .twins import Sharing

__all__ = ["plan_rebalance", "rebalance"]

TOLERANCE: Final = 0.02
"""Of its capacity: how far a node may be from the mean."""
CANDIDATES_MAX: Final = 4_096
LOOK_S: Final = 0.2
_SPARE_FACTOR: Final = 3


def rebalance(pool: Pool, command: Rebalance, now_s: float) -> None:
    """Begin, change the bandwidth of what is under way, or end it.

    Raises InvalidArgument where nothing is to be ended.
    """
    key = Cause.REBALANCE, 0
    known = pool.moves.tasks.get(key)
    if command.cancel:
        if known is None or known.done:
            raise InvalidArgument("nothing is being rebalanced", remedy="see `cenote tasks`")
        del pool.moves.tasks[key]
        return
    if known is None or known.done:
        known = pool.moves.tasks[key] = Task(Cause.REBALANCE, 0, now_s)
    known.bandwidth = command.bandwidth


def plan_rebalance(pool: Pool, targets: Targets, most: int, now_s: float) -> int:
    """One tick's worth; how many objects were looked at."""
    task = pool.moves.tasks.get((Cause.REBALANCE, 0))
    if task is None or task.done or now_s < task.retry_at_s:
        return 0
    shares = _shares(pool)
    mean = shares.pop(0, 0.0)
    if task.at >= len(task.rows):
        if now_s < task.look_at_s:
            return 0
        task.look_at_s = now_s + LOOK_S
        if not _look(pool, task, shares, mean, now_s):
            return 0
    receivers = [
        s for s in targets.within_budget(targets.eligible((), ())) if shares[s.node.node_id] < mean
    ]
    looked = 0
    while receivers and looked < most and task.at < len(task.rows) and task.allow(now_s):
        row, here = int(task.rows[task.at]), slice(task.at, task.at + 1)
        task.at += 1
        looked += 1
        if pool.objects.rows_match(task.rows[here], task.seqs[here])[0]:
            _move(pool, task, row, targets, receivers)
            receivers = targets.within_budget(receivers)
    return looked


def _shares(pool: Pool) -> dict[int, float]:
    """How full each node's memory is; 0: the mean."""
    used: dict[int, int] = {}
    capacity: dict[int, int] = {}
    for entry in pool.placement.entries:
        segment, node_id = entry.segment, entry.segment.node.node_id
        used[node_id] = used.get(node_id, 0) + segment.used_units
        capacity[node_id] = capacity.get(node_id, 0) + segment.capacity_units
    shares = {node_id: used[node_id] / max(1, capacity[node_id]) for node_id in used}
    shares[0] = sum(used.values()) / max(1, sum(capacity.values()))
    return shares


def _look(pool: Pool, task: Task, shares: dict[int, float], mean: float, now_s: float) -> bool:
    """The coldest of what is too much on nodes that are too full; False where there are none."""
    under_way = any(
        one.move is not None and one.move.task is task for one in pool.copies.by_id.values()
    )
    full = [node_id for node_id, share in shares.items() if share > mean + TOLERANCE]
    task.remaining_bytes = sum(int((shares[i] - mean) * _capacity(pool, i)) * 64 for i in full)
    if under_way:
        return False  # what moves is counted where it is and where it goes
    if not full or (len(task.rows) and not task.ordered):
        # Even, or as even as objects of that size can be.
        task.done, task.ended_s, task.remaining_bytes = True, now_s, 0
        task.rows, task.at = task.rows[:0], 0
        return False
    task.ordered = 0
    rows, seqs = [], []
    task.excess = {i: int((shares[i] - mean) * _capacity(pool, i)) for i in full}
    for node_id in full:
        for segment in _memory(pool, node_id):
            part = task.excess[node_id] * segment.capacity_units / max(1, _capacity(pool, node_id))
            # More than that: of some there may be a replica already where they could go.
            some = _coldest(pool, segment, int(part) * _SPARE_FACTOR)
            rows.append(some)
            seqs.append(pool.seqs_of(some))
    task.rows, task.seqs, task.at = np.concatenate(rows), np.concatenate(seqs), 0
    return bool(len(task.rows))


def _memory(pool: Pool, node_id: int) -> list[Segment]:
    found = (entry.segment for entry in pool.placement.entries)
    return [s for s in found if s.node.node_id == node_id and s.tier == DRAM]


def _capacity(pool: Pool, node_id: int) -> int:
    return sum(segment.capacity_units for segment in _memory(pool, node_id))


def _coldest(pool: Pool, segment: Segment, units: int) -> Rows:
    """Rows of so many units in a segment, not leased, and not being copied."""
    rows, spans = pool.rows_in_segment(segment.segment_id)
    good = (pool.state.take(rows) & np.uint8(LIVE | COPYING)) == LIVE
    good &= pool.lease_count.take(rows) == 0
    rows, spans = rows[good], spans[good]
    order = np.argsort(pool.stamp.take(rows), kind="stable")[:CANDIDATES_MAX]
    sums = np.cumsum(spans[order, 3], dtype=np.int64)
    found: Rows = rows[order[: int(np.searchsorted(sums, units))]]
    return found


def _move(pool: Pool, task: Task, row: int, targets: Targets, receivers: list[Segment]) -> None:
    """One object, where one of its replicas is better off elsewhere."""
    if int(pool.state[row]) & COPYING or pool.lease_count[row]:
        return
    by_id = pool.segments.by_id
    replicas: dict[int, list[Extent]] = {}
    for extent in pool.objects.extents_of_one(row):
        replicas.setdefault(extent[1], []).append(extent)
    receiving = {segment.node.node_id for segment in receivers}
    for number, extents in replicas.items():
        owners = {by_id[e[0]].node.node_id for e in extents if e[0] in by_id}
        if len(owners) != 1 or owners & receiving or by_id[extents[0][0]].tier != DRAM:
            continue
        (owner,) = owners
        units = sum(e[5] for e in extents)
        if task.excess.get(owner, 0) < units:
            continue
        others = [
            by_id[e[0]].node
            for n, more in replicas.items()
            for e in more
            if n != number and e[0] in by_id
        ]
        ids, domains = {n.node_id for n in others} | owners, {n.domain for n in others}
        able = [s for s in receivers if s.node.node_id not in ids and s.node.domain not in domains]
        twin = targets.find_twin(row, extents, able)
        if twin is Sharing.PENDING:
            return
        place = targets.take(able, units, spares_reserve=True) if twin is None else twin.hold()
        if place is not None:
            targets.order(row, extents, place, task, number, twin)
            task.excess[owner] -= units
            task.ordered += 1
            return
