"""Nodes that are to be left: what they hold is copied to others, planned with every tick.

    drain     a person says so. What has no replica elsewhere moves, the hottest first; what the
              others have no room for, and is colder than all that they hold, is evicted. A drained
              node holds nothing, and nothing is committed there any more.
    repair    a node fell silent. What has another replica gets a new one elsewhere in place of the
              one that can't be reached; what has none waits for the node.

What a node holds is looked up in the object table, again and again until nothing is found: what was
on its way there when it began is found, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from cenote.api.errors import InvalidArgument, ResourceUnavailable

from .effects import GoneReason, NodeDrains
from .move_tables import Cause, Task
from .moves import NEVER_SEALED_S, Extent, Targets, data_address, leave
from .nodes import Node, NodeState
from .object_columns import COPYING, UNSEALED
from .objects import LIVE
from .pool import Pool, Rows
from .spans import distinct
from .task_commands import Drain, DrainReply
from .twins import Sharing

__all__ = ["drain", "end_task", "plan_evacuations", "remaining_bytes", "tasks_of_nodes"]

CANDIDATES_MAX = 16_384
LOOK_S = 0.2
"""How often what a node holds is looked for, and longer for each million objects: that reads whole
columns."""
LOOK_DONE_S = 1.0
_PINNED_STAMP = 1 << 63
"""What is pinned is hotter than anything that is not."""


class _Outcome(Enum):
    ORDERED = auto()
    SETTLED = auto()
    """Nothing needs to be copied, or can be."""
    LATER = auto()
    """Enough is under way."""


def drain(pool: Pool, command: Drain, now_s: float) -> DrainReply:
    """Leave a node, or with `cancel` take it up again.

    Raises InvalidArgument (there is no such node), ResourceUnavailable (no other node could take
    what it holds).
    """
    node = pool.nodes.by_id.get(command.node_id)
    if node is None:
        raise InvalidArgument(
            f"there is no node {command.node_id}", remedy="`cenote nodes` lists them"
        )
    if command.cancel:
        _take_up(pool, node)
        return DrainReply(remaining_bytes(pool, node))
    if not node.draining:
        others = [s for s in pool.segments.by_id.values() if s.is_usable and s.node is not node]
        if not others:
            raise ResourceUnavailable(
                f"no other node could take what {node.name!r} holds",
                remedy="start another store daemon first; to restart this one needs no drain",
            )
        node.draining = True
        if node.state == NodeState.ALIVE:
            node.state = NodeState.DRAINING
        pool.segments.refresh_readable()
        pool.view_changed()
    node.drain_bandwidth = command.bandwidth
    pool.effects.append(NodeDrains(node.node_id, True, command.bandwidth))
    pool.moves.tasks.pop((Cause.REPAIR, node.node_id), None)
    pool.moves.task(Cause.DRAIN, node.node_id, now_s).bandwidth = command.bandwidth
    return DrainReply(remaining_bytes(pool, node))


def _take_up(pool: Pool, node: Node) -> None:
    pool.moves.tasks.pop((Cause.DRAIN, node.node_id), None)
    if not node.draining:
        return
    node.draining = node.drained = False
    pool.effects.append(NodeDrains(node.node_id, False, 0))
    pool.segments.shut.difference_update(node.segment_ids)
    if node.state == NodeState.DRAINING:
        node.state = NodeState.ALIVE
    pool.segments.refresh_readable()
    pool.view_changed()


def remaining_bytes(pool: Pool, node: Node) -> int:
    """Payload of the objects that have something on a node."""
    return int(pool.sizes_of(_rows_on(pool, node)).sum())


def _rows_on(pool: Pool, node: Node) -> Rows:
    """LIVE rows of living namespaces with anything on a node, each once."""
    parts = [pool.rows_in_segment(segment_id)[0] for segment_id in node.segment_ids]
    if not parts:
        return np.zeros(0, np.int64)
    rows = distinct(np.concatenate(parts))
    live = (pool.state.take(rows) & LIVE) != 0
    live &= pool.namespaces.alive[pool.incarnations_of(rows)]
    found: Rows = rows[live]
    return found


# ---- planning --------------------------------------------------------------------------------


def plan_evacuations(
    pool: Pool, tasks: Sequence[Task], targets: Targets, most: int, now_s: float
) -> int:
    """One tick's worth; how many objects were looked at."""
    left = most
    for task in tasks:
        left -= _plan_one(pool, task, pool.nodes.by_id[task.node_id], targets, left, now_s)
    return most - left


def tasks_of_nodes(pool: Pool, now_s: float) -> list[Task]:
    """Those of nodes that are to be left now."""
    moves, after_s = pool.moves, pool.config.repair_after_s
    found: list[Task] = []
    for node in pool.nodes.by_id.values():
        if node.draining:
            found.append(moves.task(Cause.DRAIN, node.node_id, now_s))
            found[-1].bandwidth = node.drain_bandwidth
        elif node.state == NodeState.DEAD and node.segment_ids and now_s - node.heard_s >= after_s:
            found.append(moves.task(Cause.REPAIR, node.node_id, now_s))
        elif (Cause.REPAIR, node.node_id) in moves.tasks:
            end_task(moves.tasks[Cause.REPAIR, node.node_id], now_s)
    return found


def end_task(task: Task, now_s: float) -> None:
    """Nothing is left of it for now."""
    if not task.done:
        task.done, task.ended_s = True, now_s
        task.remaining = task.remaining_bytes = task.waiting = 0
        task.rows, task.at = task.rows[:0], 0


def _plan_one(pool: Pool, task: Task, node: Node, targets: Targets, most: int, now_s: float) -> int:
    """Order what may be ordered; how many objects were looked at."""
    if task.at >= len(task.rows):
        if now_s < task.look_at_s or node.drained:
            return 0
        _look(pool, task, node, now_s)
    if now_s < task.retry_at_s or not len(targets) or not targets.has_budget:
        return 0
    if task.cause is Cause.DRAIN and node.is_readable and not data_address(node):
        task.note = "its daemon tells no TCP address"
        return 0
    looked = 0
    while looked < most and task.at < len(task.rows) and task.allow(now_s):
        row = int(task.rows[task.at])
        if pool.objects.rows_match(task.rows[task.at : task.at + 1], task.seqs[task.at :][:1])[0]:
            if _move(pool, task, node, row, targets) is _Outcome.LATER:
                break
            looked += 1
        task.at += 1
    return looked


def _look(pool: Pool, task: Task, node: Node, now_s: float) -> None:
    """What the node holds now, the hottest first."""
    rows = _rows_on(pool, node)
    if not node.is_readable:
        # What is there alone waits for the node.
        rows = rows[pool.readable_rows(rows)] if len(rows) else rows
    task.remaining = len(rows)
    task.remaining_bytes = int(pool.sizes_of(rows).sum())
    task.waiting = int(np.count_nonzero(pool.lease_count.take(rows)))
    task.at = 0
    if not len(rows):
        task.rows = rows
        if task.cause is Cause.DRAIN and node.is_readable:
            _note_drained(pool, task, node, now_s)
        elif task.cause is Cause.REPAIR:
            end_task(task, now_s)
        task.look_at_s = now_s + LOOK_DONE_S
        return
    task.done = False
    task.look_at_s = now_s + LOOK_S * (1 + pool.objects.live_count / 1e6)
    stamps = pool.stamp.take(rows)
    stamps = np.where(pool.pin.take(rows) != 0, np.uint64(_PINNED_STAMP), stamps)
    rows = rows[np.argsort(stamps, kind="stable")[::-1][:CANDIDATES_MAX]]
    task.rows = rows[(pool.state.take(rows) & np.uint8(COPYING)) == 0]
    task.seqs = pool.seqs_of(task.rows)
    waits = 0 < task.waiting == task.remaining
    task.note = f"waits for the leases of {task.waiting} objects" if waits else ""


def _note_drained(pool: Pool, task: Task, node: Node, now_s: float) -> None:
    """Nothing is there: from now on nothing is committed there either. A writer that was given
    space there is told so, and puts elsewhere."""
    if not pool.segments.shut.issuperset(node.segment_ids):
        pool.segments.shut.update(node.segment_ids)
        pool.segments.drops += 1  # grants made before are looked at closely
    if not node.drained:
        node.drained = True
        pool.view_changed()
    task.note = ""
    end_task(task, now_s)


def _move(pool: Pool, task: Task, node: Node, row: int, targets: Targets) -> _Outcome:
    """What becomes of one object with something on a node that is to be left."""
    if int(pool.state[row]) & COPYING:
        return _Outcome.SETTLED
    digest = tuple(pool.digests_of(np.array([row]))[0].tolist())
    if digest in pool.moves.superseded:
        return _Outcome.SETTLED
    replicas: dict[int, list[Extent]] = {}
    for extent in pool.objects.extents_of_one(row):
        replicas.setdefault(extent[1], []).append(extent)
    going, kept, source = _sort_out(pool, node, replicas)
    if not going:
        return _Outcome.SETTLED
    by_id, on_ssd = pool.segments.by_id, pool.segments.on_ssd
    in_memory = [n for n in going if not on_ssd[replicas[n][0][0]]]
    number = in_memory[0] if in_memory else going[0]
    kept_in_memory = [n for n in kept if not on_ssd[replicas[n][0][0]]]
    if kept_in_memory and not in_memory:
        return _drop(pool, task, row, number)  # one in memory elsewhere is worth more
    if source is None:
        return _Outcome.SETTLED
    owners = [by_id[e[0]].node for n in kept for e in replicas[n]]
    eligible = targets.eligible(
        {n.node_id for n in owners} | {node.node_id}, {n.domain for n in owners}
    )
    others = bool(kept)
    if in_memory and not kept_in_memory and pool.pin[row]:
        # It stays in memory: also where its copy is on the SSD.
        others, eligible = False, eligible or targets.eligible({node.node_id}, ())
    if not eligible and others:
        return _drop(pool, task, row, number) if node.is_readable else _Outcome.SETTLED
    if not eligible:
        return _Outcome.SETTLED
    usable = targets.within_budget(eligible)
    if not usable:
        return _Outcome.LATER
    twin = targets.find_twin(row, replicas[source], usable)
    if twin is Sharing.PENDING:
        return _Outcome.SETTLED  # for now
    units = -(-(pool.record_of(row)[0] + pool.record_of(row)[6]) // 64)
    stamp = _PINNED_STAMP if pool.pin[row] else int(pool.stamp[row])
    has_disks = targets.have_free_disks(eligible)
    if twin is not None:
        place = twin.hold()
    elif has_disks:
        place = targets.take_from_copied(usable, units)
    else:
        place = targets.take(usable, units) or targets.make_room(usable, units, stamp)
    if place is not None:
        targets.order(row, replicas[source], place, task, number, twin)
        return _Outcome.ORDERED
    if has_disks:
        return _Outcome.LATER  # copies to SSD are being made, which make room in memory
    if not node.is_readable:
        return _Outcome.SETTLED
    return _no_room(pool, task, row, number, has_others=others)


def _sort_out(
    pool: Pool, node: Node, replicas: dict[int, list[Extent]]
) -> tuple[list[int], list[int], int | None]:
    """(replicas with anything on this node, those on nodes that stay, the one to be copied)."""
    by_id, readable, on_ssd = pool.segments.by_id, pool.segments.readable, pool.segments.on_ssd
    going: list[int] = []
    kept: list[int] = []
    sources: list[tuple[bool, bool, int]] = []
    for number, extents in replicas.items():
        owners = [by_id[e[0]].node for e in extents if e[0] in by_id]
        whole = len(owners) == len(extents)
        if any(owner is node for owner in owners):
            going.append(number)
        if not whole or not all(readable[e[0]] for e in extents):
            continue
        is_here = number in going
        if not is_here and not any(owner.draining for owner in owners):
            kept.append(number)
        sources.append((bool(on_ssd[extents[0][0]]), not is_here, number))
    return going, kept, min(sources)[2] if sources else None


def _drop(pool: Pool, task: Task, row: int, number: int) -> _Outcome:
    """There are others. Its writer may be sealing it, and have this one alone sealed in the end, so
    it stays for as long as that may go on."""
    if int(pool.state[row]) & UNSEALED:
        low, high = pool.digests_of(np.array([row]))[0].tolist()
        known = pool.moves.failures_of((low, high), int(pool.record_of(row)[2]), pool.now_s)
        if pool.now_s - known.first_s <= NEVER_SEALED_S:
            return _Outcome.SETTLED
    task.dropped += 1
    leave(pool, row, number)
    return _Outcome.SETTLED


def _no_room(pool: Pool, task: Task, row: int, number: int, *, has_others: bool) -> _Outcome:
    """The others are full of what is hotter."""
    if has_others:
        return _drop(pool, task, row, number)
    if pool.pin[row]:
        task.note = "the other nodes have no room left for what is pinned"
    elif not pool.lease_count[row]:
        task.evicted += 1
        pool.counters.evicted += 1
        pool.counters.evicted_bytes += int(pool.record_of(row)[0])
        leave(pool, row, number, GoneReason.EVICTED)
    return _Outcome.SETTLED
