"""Copies between tiers that daemons were told to make: what is held for each, and how it ends.

A copy takes space in its target's segment, as a grant does, from its plan to its end. Its source is
not held: the object may be evicted, removed or replaced meanwhile, and its bytes overwritten, which
the daemon notices by their checksum. What comes of it is told with a heartbeat:

    planned --(done, and that version still lives)--> one more replica
        |----(anything else)-------------------------> (free)
        |----(a new process of the daemon attached)--> (free): the earlier one is gone
        +----(the target's segment is gone)----------> nothing is left to free

Only the state of this tenure knows of copies under way. Another leader finds none, and its daemons
let none of an earlier tenure land.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import CopyStatus

from .commands import Instruction
from .effects import GoneReason, ReplicasChanged
from .nodes import Node
from .objects import LIVE
from .pool import COPYING, UNCOPYABLE, Pool, Rows
from .spans import segments_of, to_placed
from .tier_tables import Copy

__all__ = ["abandon_copies", "end_copies", "forget_copies", "order_copies", "rows_of_version"]

RETRY_S = 1.0
"""After a device failed: how long no copies are planned for its node."""


def order_copies(pool: Pool, node: Node, rows: list[NDArray[np.void]]) -> None:
    """Tell the node (COPY rows)."""
    if rows:
        pool.instruct(node, Instruction(0, copies=np.concatenate(rows)))


def end_copies(pool: Pool, node: Node, copied: NDArray[np.void], now_s: float) -> None:
    """What a daemon tells of copies; those that are not known (any more) are ignored."""
    copies = pool.copies
    for copy_id, status, _ in copied.tolist():
        one = copies.by_id.get(copy_id)
        if one is None or one.node is not node:
            continue
        copies.pop(copy_id)
        row = _row_of(pool, one)
        if status == CopyStatus.FAILED:
            copies.retry_at_s[node.node_id] = now_s + RETRY_S
        if row and status == CopyStatus.DONE and _link(pool, one, row):
            continue
        one.target.give(one.span)
        if status != CopyStatus.DONE:
            pool.counters.copies_failed += 1
        if row and status == CopyStatus.SOURCE_CHANGED:
            _note_bad_source(pool, one, row)


def _row_of(pool: Pool, one: Copy) -> int:
    """The row of its object, not marked as being copied any more; 0 where that version is gone."""
    row = pool.objects.lookup_one(one.low, one.high)
    if row <= 0:
        return 0
    record = pool.record_of(row)
    if (record[3], record[2]) != (one.epoch, one.seq) or not pool.state[row] & LIVE:
        return 0
    pool.state[row] &= ~np.uint8(COPYING)
    return row if pool.namespaces.alive[record[5]] else 0


def _link(pool: Pool, one: Copy, row: int) -> bool:
    """The object has one replica more; False where it can't have this one."""
    segment_id = int(one.span[0, 0]) & 0xFFFF
    if segment_id not in pool.segments.by_id:
        return True  # gone with its segment: nothing is to be freed
    rows = np.array([row])
    counts, spans = pool.spans_of(rows)
    if ((spans[:, 0] >> 16) & 0xFF == one.replica).any():
        return False
    # What is in memory comes first: the first extent tells on which tier an object is.
    order = (one.span, spans) if one.is_promotion else (spans, one.span)
    merged = np.ascontiguousarray(np.concatenate(order))
    replicas = np.array([pool.record_of(row)[8] + 1], np.uint8)
    pool.set_spans(rows, counts + 1, merged, replicas)
    pool.effects.append(
        ReplicasChanged(
            pool.digests_of(rows),
            pool.seqs_of(rows),
            np.array([len(merged)], np.uint16),
            replicas,
            to_placed(merged),
        )
    )
    counters, size = pool.counters, int(pool.sizes_of(rows)[0])
    if one.is_promotion:
        counters.promoted += 1
        counters.promoted_bytes += size
    else:
        counters.demoted += 1
        counters.demoted_bytes += size
    return True


def _note_bad_source(pool: Pool, one: Copy, row: int) -> None:
    """The bytes of a living object are not what was sealed. On an SSD they go; what is in memory is
    left to those who verify it, and not copied again."""
    if not one.is_promotion:
        pool.state[row] |= np.uint8(UNCOPYABLE)
        return
    rows = np.array([row])
    counts, spans = pool.spans_of(rows)
    here = pool.segments.on_ssd[segments_of(spans)]
    here &= np.isin(segments_of(spans), one.node.segment_ids)
    pool.counters.damaged += int(here.any())
    pool.drop_replicas(np.repeat(rows, counts)[here], spans[here], GoneReason.LOST)


def abandon_copies(pool: Pool, node: Node) -> None:
    """Another process of this node's daemon attaches: the one before writes nothing any more."""
    for one in [one for one in pool.copies.by_id.values() if one.node is node]:
        pool.copies.pop(one.copy_id)
        _row_of(pool, one)
        segment_id = int(one.span[0, 0]) & 0xFFFF
        if pool.segments.by_id.get(segment_id) is one.target:
            one.target.give(one.span)


def forget_copies(pool: Pool, segment_id: int) -> None:
    """The segment is gone, and with it the space that copies to it held."""
    targets = pool.copies.by_id.values()
    for one in [one for one in targets if one.target.segment_id == segment_id]:
        pool.copies.pop(one.copy_id)
        _row_of(pool, one)


def rows_of_version(pool: Pool, rows: Rows, seqs: NDArray[np.uint64]) -> Rows:
    """Those rows that still are the objects they were."""
    return rows[pool.objects.rows_match(rows, seqs)]
