"""Sums of slot tables, against what the object table says is there.

Pure comparison. A block of slots whose sums agree holds just what the table has in it: no slot less
and none that the table does not know. So the inventory need only be of the others; which these are
is seen anew when it comes, in the same decision that goes through it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import InvalidArgument
from cenote.api.rows import BLOCK, SLOT_SUM, UNIT_BYTES
from cenote.api.slot_sums import add_sums, slot_hashes

from .commands import Attach, SegmentReport
from .object_rows import RECORD_WORDS
from .objects import LIVE
from .pool import Pool, Rows
from .spans import SEGMENT_MASK, Spans, segments_of

__all__ = ["are_told", "check_sums", "tells_of", "wanted_blocks"]

SLOTS_PER_BLOCK_MAX = 1 << 16
_STEP_ROWS = 16_384
"""Their columns fit the processor's cache."""
_EPOCH_MASK = np.uint64(0xFFFF_FFFF)
_REPLICA_MASK = np.uint64(0xFF)

Blocks = NDArray[np.void]


def check_sums(command: Attach) -> None:
    """Raises InvalidArgument where what is summed and what is told can't be right."""
    per_block = command.slots_per_block
    if not per_block:
        return
    if not 0 < per_block <= SLOTS_PER_BLOCK_MAX:
        raise InvalidArgument(f"sums of {per_block} slots each")
    blocks_of = {}
    for report in command.segments:
        blocks_of[report.index] = most = -(-report.slots // per_block)
        if len(_sums_of(report)) > most:
            raise InvalidArgument(
                f"segment {report.index}: {len(_sums_of(report))} sums, at most {most} are due"
            )
    told = _told(command)
    if len(told) > sum(blocks_of.values()):
        raise InvalidArgument("more blocks are told of than there are")
    if not np.isin(told["segment_index"], list(blocks_of)).all():
        raise InvalidArgument("a block of a segment that is not reported is told of")
    for index in blocks_of:
        slots = command.inventory["slot"][command.inventory["segment_index"] == index]
        blocks = told["block"][told["segment_index"] == index]
        if not np.isin(slots // np.uint32(per_block), blocks).all():
            raise InvalidArgument("the inventory has slots of blocks that are not told of")


def tells_of(command: Attach, report: SegmentReport) -> bool:
    """Whether the inventory tells of anything in this segment (be it that nothing is there)."""
    if not command.slots_per_block:
        return True
    return bool((_told(command)["segment_index"] == report.index).any())


def are_told(
    command: Attach, report: SegmentReport, slots: NDArray[np.uint32]
) -> NDArray[np.bool_]:
    """Of which slot numbers of this segment the inventory tells."""
    if not command.slots_per_block:
        return np.ones(len(slots), np.bool_)
    told = _told(command)
    here = told["block"][told["segment_index"] == report.index]
    beyond = -(-report.slots // command.slots_per_block)
    blocks = np.minimum(slots // np.uint32(command.slots_per_block), np.uint32(beyond))
    are: NDArray[np.bool_] = np.isin(blocks, here)
    return are


def wanted_blocks(pool: Pool, command: Attach) -> Blocks:
    """BLOCK rows: whose sums differ from the table's, and of which the inventory does not tell."""
    per_block = command.slots_per_block
    if not per_block:
        return np.zeros(0, BLOCK)
    theirs = [_sums_of(report) for report in command.segments]
    told = _told(command)
    ours = _table_sums(pool, command)
    wanted = []
    for report, (sums, counts), told_sums in zip(command.segments, ours, theirs, strict=True):
        differs = (sums != 0) | (counts != 0)
        n = min(len(told_sums), len(sums))
        differs[:n] = (sums[:n] != told_sums["sum"][:n]) | (counts[:n] != told_sums["count"][:n])
        blocks = told["block"][told["segment_index"] == report.index]
        differs[blocks[blocks < len(differs)]] = False
        rows = np.zeros(int(np.count_nonzero(differs)), BLOCK)
        rows["segment_index"], rows["block"] = report.index, np.flatnonzero(differs)
        wanted.append(rows)
    return np.concatenate(wanted) if wanted else np.zeros(0, BLOCK)


def _sums_of(report: SegmentReport) -> Blocks:
    return report.slot_sums if report.slot_sums is not None else np.zeros(0, SLOT_SUM)


def _told(command: Attach) -> Blocks:
    return command.told_blocks if command.told_blocks is not None else np.zeros(0, BLOCK)


def _table_sums(pool: Pool, command: Attach) -> list[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
    """(sums, counts) by block of what the table has in each reported segment.

    There are as many blocks as the daemon has slots, and one for all that lies beyond these.
    """
    per_block = np.int64(command.slots_per_block)
    first_of = np.full(SEGMENT_MASK + 1, -1, np.int64)
    last_of = first_of.copy()
    places, total = [], 0
    for report in command.segments:
        blocks = max(-(-report.slots // command.slots_per_block), len(_sums_of(report))) + 1
        segment = pool.segments.by_incarnation.get(report.incarnation)
        if segment is not None:
            first_of[segment.segment_id] = total
            last_of[segment.segment_id] = total + blocks - 1
        places.append((total, total + blocks))
        total += blocks
    sums, counts = np.zeros(total, np.uint64), np.zeros(total, np.uint64)
    objects = pool.objects
    for begin in range(0, objects.high_water, _STEP_ROWS):
        part = slice(begin, begin + _STEP_ROWS)
        live = (objects.state[part] & LIVE) != 0
        live &= (first_of[objects.segment[part]] >= 0) | (objects.extents[part] > 1)
        rows = np.flatnonzero(live) + begin
        if not len(rows):
            continue
        rows, spans = _extents_in(pool, rows, first_of)
        segments = segments_of(spans)
        at = np.minimum(first_of[segments] + spans[:, 1] // per_block, last_of[segments])
        add_sums(sums, counts, at, _hashes(pool, rows, spans))
    return [(sums[first:end], counts[first:end]) for first, end in places]


def _extents_in(pool: Pool, rows: Rows, first_of: NDArray[np.int64]) -> tuple[Rows, Spans]:
    """(row of each extent in the segments that have a place, those extents)."""
    counts, spans = pool.spans_of(rows)
    if len(spans) == len(rows):
        return rows, spans
    here = first_of[segments_of(spans)] >= 0
    return np.repeat(rows, counts)[here], spans[here]


def _hashes(pool: Pool, rows: Rows, spans: Spans) -> NDArray[np.uint64]:
    words = rows * RECORD_WORDS
    return slot_hashes(
        spans[:, 1].astype(np.uint64),
        pool.record_flat.take(words + 3) & _EPOCH_MASK,
        pool.record_flat.take(words + 2),
        spans[:, 2].astype(np.uint64) * np.uint64(UNIT_BYTES),
        (spans[:, 0].astype(np.uint64) >> np.uint64(16)) & _REPLICA_MASK,
    )
