"""Copies of objects that hold the same bytes (content dedup) go to the same place.

Several objects may hold one extent (`aliases`). When one of them has been copied to another tier or
node, the others' copies hold the first one's extent there, each with a slot of its own: nothing is
transferred, and no space taken. What a daemon is told then is whose slot in the target tells of
these bytes, the **twin**; it makes the other's slot if that is so.

    first of a place    copied, and noted in `Segment.copied` of where it lay
    others meanwhile    wait: they are looked for again
    others afterwards   share the first one's extent, if it still is that version and is there

A note holds for as long as its place is not free: until then whoever has it has these bytes. It is
a hint for all the rest: lost with a leader, and forgotten when a daemon says that it was not so.
Then bytes are copied once more, as those of any other object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .nodes import Node
from .object_columns import COPYING
from .objects import LIVE
from .pool import Pool, Rows
from .segments import Segment
from .spans import SEGMENT_MASK
from .tier_tables import Copy

__all__ = [
    "Sharing",
    "Twin",
    "are_shared",
    "find_twin",
    "forget_twins",
    "may_have_twins",
    "note_copied",
    "note_known",
    "note_ordered",
]

Extent = tuple[int, ...]
"""Segment, replica, shard, slot, offset, length; the latter in units."""
_NOBODY = 0, 0, 0
_KNOWN_MAX = 256
"""A bound on what one look notes; the next one notes more."""


class Twin(NamedTuple):
    """An extent that has the bytes, and the slot of an object that tells so."""

    segment: Segment
    slot: int
    epoch: int
    seq: int
    offset: int
    length: int

    def hold(self) -> tuple[Segment, int, int, int] | None:
        """One more holds it, with a slot of its own: (segment, slot, offset, length), as a place
        that was taken. None without a slot."""
        slot = self.segment.slots.take_one()
        if slot < 0:
            return None
        self.segment.share(self.offset, self.length)
        return self.segment, slot, self.offset, self.length


class Sharing(Enum):
    """Why there is no twin."""

    PENDING = "one that has the same bytes is being copied"


def may_have_twins(pool: Pool, node: Node) -> bool:
    """Whether anything in this node's segments is held by several."""
    segments = (pool.segments.by_id[i] for i in node.segment_ids)
    return any(segment.shared or segment.copied for segment in segments)


def are_shared(pool: Pool, rows: Rows) -> NDArray[np.bool_]:
    """Of which of these objects the first extent is held by others, too, or was."""
    shared = np.zeros(len(rows), np.bool_)
    words = pool.extent_words
    ids = (words.take(rows * 4) & np.uint32(SEGMENT_MASK)).tolist()
    offsets = words.take(rows * 4 + 2).tolist()
    for i, (segment_id, offset) in enumerate(zip(ids, offsets, strict=True)):
        segment = pool.segments.by_id.get(segment_id)
        if segment is not None:
            shared[i] = offset in segment.shared or offset in segment.copied
    return shared


def note_ordered(pool: Pool, source: Sequence[Extent], one: Copy, twin: Twin | None) -> None:
    """A copy of these extents of an object was ordered: those who hold the same bytes may share it.
    With a `twin` it is one that shares."""
    segment_id, offset = source[0][0], source[0][4]
    segment = pool.segments.by_id.get(segment_id)
    if segment is None or len(source) != 1:
        return
    if twin is not None:
        one.shares = segment_id, offset
    elif offset in segment.shared or offset in segment.copied:
        segment.copied[offset] = one.low, one.high, one.seq


def note_copied(pool: Pool, row: int, extents: Sequence[tuple[Segment, int, int]]) -> None:
    """Others are about to share these extents of an object: (segment, offset, length) each. It may
    have a copy, or one under way."""
    held, state = int(pool.objects.extents[row]), int(pool.state[row])
    if held > len(extents) or state & COPYING:
        low, high = pool.digests_of(np.array([row]))[0].tolist()
        for segment, offset, _ in extents:
            segment.copied[offset] = low, high, int(pool.record_of(row)[2])


def note_known(pool: Pool, rows: Rows, has_copy: NDArray[np.bool_]) -> None:
    """Which of these objects in memory have a copy. Another leader may have ordered it, and others
    of them hold the same bytes."""
    if has_copy.all() or not has_copy.any():
        return
    words = pool.extent_words
    segments = words.take(rows * 4) & np.uint32(SEGMENT_MASK)
    places = segments.astype(np.int64) << 32 | words.take(rows * 4 + 2)
    known = np.flatnonzero(has_copy)[np.isin(places[has_copy], places[~has_copy])]
    for row in rows[known[:_KNOWN_MAX]].tolist():
        segment_id, _, _, _, offset, _ = pool.objects.extents_of_one(row)[0]
        segment = pool.segments.by_id.get(segment_id)
        if segment is not None and offset in segment.shared and offset not in segment.copied:
            low, high = pool.digests_of(np.array([row]))[0].tolist()
            segment.copied[offset] = low, high, int(pool.record_of(row)[2])


def forget_twins(pool: Pool, place: tuple[int, int]) -> None:
    """What was noted of (segment, offset) was not so: the next copy is one of bytes."""
    segment = pool.segments.by_id.get(place[0])
    if segment is not None and place[1] in segment.copied:
        segment.copied[place[1]] = _NOBODY


def find_twin(
    pool: Pool, row: int, source: Sequence[Extent], is_good: Callable[[Segment], bool]
) -> Twin | Literal[Sharing.PENDING] | None:
    """Where a copy of these extents of an object has its bytes already, in a segment that is good
    for it; PENDING where it will have soon."""
    segment = pool.segments.by_id.get(source[0][0])
    if segment is None or not segment.copied or len(source) != 1:
        return None
    noted = segment.copied.get(source[0][4])
    if noted is None:
        return None
    low, high, seq = noted
    other = pool.objects.lookup_one(low, high)
    if other <= 0 or other == row or not int(pool.state[other]) & LIVE:
        return None
    # Size, checksum, version; keys that lie behind their payloads are not shared.
    theirs, ours = pool.record_of(other), pool.record_of(row)
    if theirs[2] != seq or theirs[:2] != ours[:2] or theirs[6] or ours[6]:
        return None
    extents = pool.objects.extents_of_one(other)
    replicas = [extent[1] for extent in extents]
    for segment_id, replica, _, slot, offset, length in extents:
        target = pool.segments.by_id.get(segment_id)
        if target is not None and replicas.count(replica) == 1 and is_good(target):
            return Twin(target, slot, theirs[3], seq, offset, length)
    return Sharing.PENDING if int(pool.state[other]) & COPYING else None
