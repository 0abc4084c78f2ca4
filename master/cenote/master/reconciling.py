"""What the object table has on a node, and what that node's slot tables say: made to agree.

Extents that are not sealed are dropped, and so is all that lies in segments that are gone; of what
is left each segment's allocator is made. SSDs come first: where an object would be lost, since it
is not in memory any more, a slot on the SSD may tell that it had been copied (`adopting.regain`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import UNIT_BYTES

from .adopting import Adoption, regain
from .commands import Attach, SegmentReport
from .effects import GoneReason
from .inventory import confirm
from .node_ops import lose_segment
from .nodes import Node
from .objects import LIVE
from .pool import NO_SEGMENT, Pool, Rows
from .segments import DRAM, Segment
from .spans import NO_SPANS, SEGMENT_MASK, Spans, distinct
from .summed import are_told, tells_of

__all__ = ["make_usable", "reconcile"]


def reconcile(
    work: Adoption,
    node: Node,
    command: Attach,
    segments: list[Segment],
    *,
    same_process: bool,
) -> int:
    """Make the table agree with what is told of these segments, in the order of the reports, and
    the segments usable. Returns how many objects were lost; which slots the table knows is noted.

    Nothing is dropped where the same process in the same epoch has not sealed it yet: that is on
    its way.
    """
    pool = work.pool
    pairs = list(zip(segments, command.segments, strict=True))
    on_ssd = [pair for pair in pairs if pair[0].tier != DRAM]
    in_memory = [pair for pair in pairs if pair[0].tier == DRAM]
    dropped = 0
    for some in (on_ssd, in_memory):
        for segment, report in some:
            rows, spans = _unsealed(work, segment, command, report)
            if len(rows) and not same_process:
                if segment.tier == DRAM:
                    regain(work, rows, spans)
                dropped += pool.drop_replicas(rows, spans, GoneReason.LOST)
            make_usable(pool, segment, report)
        if some is on_ssd:
            _lose_others(work, node, segments, may_regain=not same_process)
    return dropped


def _lose_others(work: Adoption, node: Node, segments: list[Segment], *, may_regain: bool) -> None:
    """What this node had in segments that it does not have any more."""
    pool = work.pool
    for segment_id in [i for i in node.segment_ids if pool.segments.by_id[i] not in segments]:
        if may_regain and pool.segments.by_id[segment_id].tier == DRAM:
            rows, spans = pool.rows_in_segment(segment_id)
            live = (pool.state.take(rows) & LIVE) != 0
            regain(work, rows[live], spans[live])
        lose_segment(pool, segment_id)


def _unsealed(
    work: Adoption, segment: Segment, command: Attach, report: SegmentReport
) -> tuple[Rows, Spans]:
    """What the table has in this segment and the inventory does not: (rows, extents). Notes which
    slots the table knows."""
    pool, inventory = work.pool, work.slots
    here = np.flatnonzero(inventory["segment_index"] == report.index)
    slots = inventory if len(here) == len(inventory) else inventory[here]
    if not tells_of(command, report):
        return np.zeros(0, np.int64), NO_SPANS  # all blocks' sums agree: all of it is sealed
    rows, spans = pool.rows_in_segment(segment.segment_id)
    wanted = (pool.state.take(rows) & LIVE) != 0
    wanted &= are_told(command, report, spans[:, 1])
    rows, spans = rows[wanted], spans[wanted]
    records = pool.records_of(rows)
    sealed, known = confirm(spans, records[:, 3] & np.uint64(0xFFFF_FFFF), records[:, 2], slots)
    work.known[here] = known
    return rows[~sealed], spans[~sealed]


def make_usable(pool: Pool, segment: Segment, report: SegmentReport) -> None:
    ready_units = report.ready_bytes // UNIT_BYTES
    if segment.allocator is not None:
        segment.grow(ready_units)
        return
    rows, spans = pool.rows_in_segment(segment.segment_id)

    def newest_first() -> NDArray[np.int64]:
        # Where two overlap, the higher version has overwritten the other.
        records = pool.records_of(rows)
        epochs = records[:, 3] & np.uint64(0xFFFF_FFFF)
        return np.lexsort((records[:, 2], epochs))[::-1]

    def contents() -> NDArray[np.uint64]:
        return np.ascontiguousarray(pool.records_of(rows)[:, :2])

    refused = segment.build(ready_units, spans, newest_first, contents)
    if len(refused):
        lost, parts = rows[refused], spans[refused]
        live = (pool.state.take(lost) & LIVE) != 0
        _drop_overlapping(pool, segment, lost[live], parts[live])


def _drop_overlapping(pool: Pool, segment: Segment, rows: Rows, spans: Spans) -> None:
    """Extents that the allocator could not take: others lie there, which are newer.

    Their space is not theirs to free, so they are cut out of the allocator's sight first.
    """
    for row in distinct(rows).tolist():
        one = np.array([row])
        _, all_spans = pool.spans_of(one)
        refused = spans[rows == row]
        others = all_spans[~(all_spans[:, None] == refused[None]).all(axis=2).any(axis=1)]
        pool.segments.give(others)
        segment_less = all_spans.copy()
        segment_less[:, 0] = (segment_less[:, 0] & ~np.uint32(SEGMENT_MASK)) | NO_SEGMENT
        pool.set_spans(
            one,
            np.array([len(all_spans)]),
            segment_less,
            np.array([pool.record_of(row)[8]], np.uint8),
        )
        pool.unlink(one, GoneReason.LOST)
