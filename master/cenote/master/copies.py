"""Copies between tiers that daemons were told to make: what is held for each, and how it ends.

A copy takes space in its target's segment, as a grant does, from its plan to its end. Its source is
not held: the object may be evicted, removed or replaced meanwhile, and its bytes overwritten, which
the daemon notices by their checksum. (Not where they are the same again by then: so a copy from
memory counts only if its source has not left it.) What comes of it is told with a heartbeat:

    planned --(done, and that version still lives)--> one more replica
        |----(anything else)-------------------------> (free)
        |----(a new process of the daemon attached)--> (free): the earlier one is gone
        +----(the target's segment is gone)----------> nothing is left to free

Only the state of this tenure knows of copies under way. Another leader finds none, and its daemons
let none of an earlier tenure land.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import UNIT_BYTES, CopyStatus

from .effects import GoneReason, ReplicasChanged
from .instructions import Instruction
from .moves import settle_moves
from .nodes import Node
from .object_columns import COPIED, COPYING, UNCOPYABLE
from .objects import LIVE
from .pool import Pool, Rows
from .segments import Segment
from .spans import NO_SPANS, SEGMENT_MASK, Spans, segments_of, to_placed
from .tier_tables import NO_SOURCE, Copy, source_of
from .twins import Twin, forget_twins, note_ordered

__all__ = [
    "CopyRow",
    "abandon_copies",
    "begin_copy",
    "end_copies",
    "forget_copies",
    "order_copies",
    "rows_of_version",
]

_EPOCH_MASK = np.uint64(0xFFFF_FFFF)
CopyRow: TypeAlias = tuple[int, ...]
"""The fields of a COPY row."""
RETRY_S = 1.0
"""After a device failed: how long no copies are planned for its node."""


def order_copies(pool: Pool, node: Node, rows: NDArray[np.void]) -> None:
    """Tell the node: COPY rows."""
    if len(rows):
        pool.instruct(node, Instruction(0, copies=rows))


def begin_copy(
    pool: Pool,
    row: int,
    digest: list[int],
    target: Segment,
    source: list[tuple[int, ...]],
    span: Spans,
    twin: Twin | None = None,
    *,
    is_promotion: bool,
) -> list[CopyRow]:
    """Note the copy of these extents (the fields of EXTENT rows); its COPY rows. With a `twin` it
    takes a slot and no space."""
    record = pool.record_of(row)
    copy_id = pool.copies.new_ids(1)
    low, high = digest
    version, owner = (record[3], record[2]), record[5]
    is_demotion = not is_promotion and twin is None
    left_by = source[0][0] << 32 | source[0][3] if is_demotion else NO_SOURCE
    what = copy_id, target.node, low, high, *version
    one = Copy(*what, target, span, is_promotion, owner, source=left_by)
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


def end_copies(pool: Pool, node: Node, copied: NDArray[np.void], now_s: float) -> None:
    """What a daemon tells of copies; those that are not known (any more) are ignored."""
    copies = pool.copies
    ended: list[Copy] = []
    told: list[int] = []
    for copy_id, status, _ in copied.tolist():
        one = copies.by_id.get(copy_id)
        if one is not None and one.node is node:
            copies.pop(copy_id)
            ended.append(one)
            told.append(CopyStatus.FAILED if one.given_up else status)
    if not ended:
        return
    statuses = np.array(told)
    for one, status in zip(ended, told, strict=True):
        if one.shares is not None and status != CopyStatus.DONE:
            forget_twins(pool, one.shares)
        elif status == CopyStatus.FAILED and not one.given_up:
            copies.retry_at_s[node.node_id] = now_s + RETRY_S
    pool.counters.copies_failed += int(np.count_nonzero(statuses != CopyStatus.DONE))
    rows = _rows_of(pool, ended)
    spans = np.concatenate([one.span for one in ended])
    there = np.isin(segments_of(spans), list(pool.segments.by_id))
    linked = (rows > 0) & (statuses == CopyStatus.DONE) & there
    if linked.any():
        at = np.flatnonzero(linked)
        linked[at] = _link(pool, rows[at], spans[at], [ended[i] for i in at.tolist()])
    pool.segments.give(spans[~linked])
    for i in np.flatnonzero((rows > 0) & (statuses == CopyStatus.SOURCE_CHANGED)).tolist():
        if ended[i].move is None:
            _note_bad_source(pool, ended[i], int(rows[i]))
    if any(one.move is not None for one in ended):
        settle_moves(pool, ended, rows, linked, statuses, now_s)


def _rows_of(pool: Pool, copies: list[Copy]) -> Rows:
    """The row of each one's object, not marked as being copied any more; 0 where that version is
    gone."""
    digests = np.array([(one.low, one.high) for one in copies], np.uint64)
    rows: Rows = np.maximum(pool.objects.lookup(digests), 0)
    records = pool.records_of(rows)
    same = (rows > 0) & (records[:, 2] == np.array([one.seq for one in copies], np.uint64))
    same &= (records[:, 3] & _EPOCH_MASK) == np.array([one.epoch for one in copies], np.uint64)
    same &= (pool.state.take(rows) & LIVE) != 0
    rows[~same] = 0
    pool.state[rows[same]] &= ~np.uint8(COPYING)
    rows[~pool.namespaces.alive[pool.incarnations_of(rows)]] = 0
    return rows


def _link(pool: Pool, rows: Rows, added: Spans, copies: list[Copy]) -> NDArray[np.bool_]:
    """These objects (distinct) have one replica more each; False where one can't have it."""
    counts, spans = pool.spans_of(rows)
    owner = np.repeat(np.arange(len(rows)), counts)
    replica = (added[:, 0] >> 16) & 0xFF
    good = _have_stayed(copies, spans, owner)
    good[owner[((spans[:, 0] >> 16) & 0xFF) == replica[owner]]] = False
    if not good.all():
        if good.any():
            kept = [one for one, is_good in zip(copies, good.tolist(), strict=True) if is_good]
            _link(pool, rows[good], added[good], kept)
        return good
    promoted = np.array([one.is_promotion for one in copies], np.bool_)
    demoted = ~promoted & np.array([one.move is None for one in copies], np.bool_)
    # What is in memory comes first: the first extent tells on which tier an object is.
    keys = np.concatenate((3 * owner + 1, 3 * np.arange(len(rows)) + np.where(demoted, 2, 0)))
    order = np.argsort(keys, kind="stable")
    merged = np.ascontiguousarray(np.concatenate((spans, added))[order])
    replicas = (pool.records_of(rows)[:, 4] >> np.uint64(48)).astype(np.uint8) + np.uint8(1)
    pool.set_spans(rows, counts + 1, merged, replicas)
    pool.state[rows] |= np.uint8(COPIED)
    pool.effects.append(
        ReplicasChanged(
            pool.digests_of(rows),
            pool.seqs_of(rows),
            (counts + 1).astype(np.uint16),
            replicas,
            to_placed(merged),
        )
    )
    counters, sizes = pool.counters, pool.sizes_of(rows)
    counters.promoted += int(np.count_nonzero(promoted))
    counters.promoted_bytes += int(sizes[promoted].sum())
    counters.demoted += int(np.count_nonzero(demoted))
    counters.demoted_bytes += int(sizes[demoted].sum())
    return good


def _have_stayed(copies: list[Copy], spans: Spans, owner: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whose sources in memory these objects (`spans`, of which `owner` has each) still have. The
    place of another one may have been others' while the device took it from there, and the same
    bytes' again before the daemon looked at them (`copy_writer`)."""
    sources = np.array([one.source for one in copies], np.int64)
    stayed: NDArray[np.bool_] = sources == NO_SOURCE
    # Whatever is being copied gets no other replica meanwhile: what is there was there all along.
    stayed[owner[source_of(segments_of(spans), spans[:, 1]) == sources[owner]]] = True
    return stayed


def _note_bad_source(pool: Pool, one: Copy, row: int) -> None:
    """The bytes of a living object are not what was sealed. On an SSD they go; what is in memory is
    left to those who verify it, and not copied again (unless it has left that place)."""
    rows = np.array([row])
    counts, spans = pool.spans_of(rows)
    if not one.is_promotion:
        if _have_stayed([one], spans, np.zeros(len(spans), np.int64))[0]:
            pool.state[row] |= np.uint8(UNCOPYABLE)
        return
    here = pool.segments.on_ssd[segments_of(spans)]
    here &= np.isin(segments_of(spans), one.node.segment_ids)
    pool.counters.damaged += int(here.any())
    pool.drop_replicas(np.repeat(rows, counts)[here], spans[here], GoneReason.LOST)


def abandon_copies(pool: Pool, node: Node) -> None:
    """Another process of this node's daemon attaches: the one before writes nothing any more, and
    this one is not to begin with what the other was told."""
    node.forget_copies()
    pool.segments.give(_drop(pool, [o for o in pool.copies.by_id.values() if o.node is node]))


def forget_copies(pool: Pool, segment_id: int) -> None:
    """The segment is gone, and with it the space that copies to it held."""
    copies = pool.copies.by_id.values()
    _drop(pool, [one for one in copies if one.target.segment_id == segment_id])


def _drop(pool: Pool, copies: list[Copy]) -> Spans:
    """Copies that nothing comes of; the space that was held for them."""
    if not copies:
        return NO_SPANS
    for one in copies:
        pool.copies.pop(one.copy_id)
    _rows_of(pool, copies)
    return np.concatenate([one.span for one in copies])


def rows_of_version(pool: Pool, rows: Rows, seqs: NDArray[np.uint64]) -> Rows:
    """Those rows that still are the objects they were."""
    return rows[pool.objects.rows_match(rows, seqs)]
