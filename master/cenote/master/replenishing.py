"""Objects that lost a replica together with a segment get another one.

A daemon came back without its memory, or left for good: what it held and others hold, too, is noted
(`note_short`) and copied, a bounded number with every tick. Not journaled: a master that takes over
meanwhile does not know how many replicas there were.
"""

from __future__ import annotations

from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from .evacuation import end_task
from .move_tables import NO_REPLICA, Cause, Task
from .moves import Extent, Targets
from .object_columns import COPYING
from .objects import LIVE
from .pool import Pool
from .twins import Sharing

__all__ = ["plan_replenishing"]


class _Outcome(Enum):
    DONE = auto()
    AGAIN = auto()
    """It is being copied for another reason."""
    LATER = auto()
    """Enough is under way."""


def plan_replenishing(pool: Pool, targets: Targets, most: int, now_s: float) -> int:
    """One tick's worth; how many objects were looked at."""
    moves = pool.moves
    key = Cause.REPAIR, 0
    if not moves.short:
        task = moves.tasks.get(key)
        if task is not None and not task.done and not _is_under_way(pool, task):
            end_task(task, now_s)
        return 0
    task = moves.task(Cause.REPAIR, 0, now_s)
    task.done = False
    looked = 0
    while moves.short and looked < most and task.allow(now_s):
        digests, seqs = moves.short.pop(0)
        for at in range(len(seqs)):
            if looked >= most or not targets.has_budget:
                moves.short.insert(0, (digests[at:], seqs[at:]))
                break
            looked += 1
            outcome = _replenish(pool, task, digests[at : at + 1], int(seqs[at]), targets)
            if outcome is _Outcome.LATER:
                moves.short.insert(0, (digests[at:], seqs[at:]))
                break
            if outcome is _Outcome.AGAIN:
                moves.short.append((digests[at : at + 1], seqs[at : at + 1]))
        else:
            continue
        break
    task.remaining = sum(len(seqs) for _, seqs in moves.short)
    task.remaining_bytes = task.remaining * pool.mean_units * 64
    return looked


def _is_under_way(pool: Pool, task: Task) -> bool:
    return any(one.move is not None and one.move.task is task for one in pool.copies.by_id.values())


def _replenish(
    pool: Pool, task: Task, digest: NDArray[np.uint64], seq: int, targets: Targets
) -> _Outcome:
    row = int(pool.objects.lookup(digest)[0])
    if row <= 0 or int(pool.record_of(row)[2]) != seq or not int(pool.state[row]) & LIVE:
        return _Outcome.DONE
    if int(pool.state[row]) & COPYING:
        return _Outcome.AGAIN
    by_id, segments = pool.segments.by_id, pool.segments
    replicas: dict[int, list[Extent]] = {}
    for extent in pool.objects.extents_of_one(row):
        replicas.setdefault(extent[1], []).append(extent)
    whole = [
        extents
        for extents in replicas.values()
        if all(e[0] in by_id and segments.readable[e[0]] for e in extents)
    ]
    if not whole:
        return _Outcome.DONE
    owners = [by_id[e[0]].node for extents in replicas.values() for e in extents if e[0] in by_id]
    eligible = targets.eligible({n.node_id for n in owners}, {n.domain for n in owners})
    if not eligible:
        return _Outcome.DONE  # no other failure domain is left
    usable = targets.within_budget(eligible)
    if not usable:
        return _Outcome.LATER
    source = min(whole, key=lambda extents: bool(segments.on_ssd[extents[0][0]]))
    twin = targets.find_twin(row, source, usable)
    if twin is Sharing.PENDING:
        return _Outcome.AGAIN
    record = pool.record_of(row)
    units = -(-(record[0] + record[6]) // 64)
    if twin is not None:
        place = twin.hold()
    else:
        stamp = int(pool.stamp[row])
        place = targets.take(usable, units) or targets.make_room(usable, units, stamp)
    if place is not None:
        targets.order(row, source, place, task, NO_REPLICA, twin)
    return _Outcome.DONE
