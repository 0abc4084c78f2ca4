"""Segments: their space, their slot numbers, and the columns by segment id that batches consult."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import ResourceUnavailable
from cenote.api.rows import UNIT_BYTES

from .allocator import SegmentAllocator
from .effects import SegmentKnown, SlotsGrown
from .nodes import Node, NodeState
from .slots import SlotNumbers
from .spans import SEGMENT_MASK, Spans, by_segment, joined_runs, leaders_of

__all__ = ["DRAM", "GROW_ALWAYS", "NO_SLOT", "Segment", "Segments"]

DRAM = 1
"""A segment's tier, as in common.proto."""
SEGMENT_IDS_MAX = SEGMENT_MASK
GROW_ALWAYS = 1 << 62
NO_SLOT = (1 << 32) - 1
"""Slot number of an extent that has none: nothing will be sealed there."""
_PIECE_UNITS_MIN = 64
"""4 KiB: shorter pieces cost a reader more than they are worth."""


class Segment:
    """One incarnation of one daemon's range of memory.

    `allocator` is None until its node attached in this epoch: then it is built from the extents
    that the object table holds, so what was freed before needs no record. Offsets and lengths are
    in 64-byte units, whatever the segment's own unit is (a multiple of 64 bytes).
    """

    __slots__ = (
        "align_units",
        "allocator",
        "copied",
        "grow_below",
        "grow_bytes",
        "incarnation",
        "index",
        "is_new",
        "met_epoch",
        "node",
        "ready_units",
        "retired",
        "retired_units",
        "segment_id",
        "shared",
        "shared_units",
        "size_bytes",
        "slots",
        "tier",
        "unit_bytes",
    )

    def __init__(self, known: SegmentKnown, node: Node, grow_bytes: int) -> None:
        self.segment_id = known.segment_id
        self.node = node
        self.index = known.index
        self.tier = known.tier
        self.incarnation = known.incarnation
        self.size_bytes = known.size_bytes
        self.unit_bytes = known.unit_bytes
        self.align_units = max(1, known.unit_bytes // UNIT_BYTES)
        self.slots = SlotNumbers(known.slots)
        self.allocator: SegmentAllocator | None = None
        self.ready_units = 0
        self.retired: list[tuple[int, int]] = []
        self.retired_units = 0
        self.grow_bytes = grow_bytes
        self.grow_below = GROW_ALWAYS
        """Growing is of use only when fewer slots than this are free: there was no room before."""
        self.met_epoch = 0
        """The last one that its daemon attached to. What it has of earlier ones and the table does
        not was refused then, or has gone since: its space may be another's."""
        self.is_new = False
        """Met first in this epoch: no lease of an earlier one can be on it."""
        self.shared: dict[int, int] = {}
        """By offset: how many hold this extent beside the first one (content dedup). Space is free
        when nobody holds it any more; each holder has a slot of its own."""
        self.shared_units = 0
        """What they would take, had each an extent of its own."""
        self.copied: dict[int, tuple[int, int, int]] = {}
        """By offset of such an extent: a version that lay there and was copied (`twins`)."""

    def known(self) -> SegmentKnown:
        """What SegmentKnown says of it now; growth of its slot table follows as SlotsGrown."""
        return SegmentKnown(
            self.segment_id,
            self.node.node_id,
            self.index,
            self.tier,
            self.incarnation,
            self.size_bytes,
            self.unit_bytes,
            self.slots.total,
        )

    @property
    def free_units(self) -> int:
        return 0 if self.allocator is None else self.allocator.free_units

    @property
    def capacity_units(self) -> int:
        """What objects can use; nothing is known of that before the daemon attached."""
        return max(0, self.ready_units - self.retired_units)

    @property
    def used_units(self) -> int:
        return self.capacity_units - self.free_units if self.allocator is not None else 0

    @property
    def largest_free_units(self) -> int:
        return 0 if self.allocator is None else self.allocator.largest_free_units

    @property
    def free_runs(self) -> int:
        return 0 if self.allocator is None else self.allocator.free_runs

    def grow(self, ready_units: int) -> bool:
        """More of it is backed now. False when it is not more."""
        if self.allocator is None or ready_units <= self.ready_units:
            return False
        self.allocator.grow(ready_units - self.ready_units)
        self.ready_units = ready_units
        return True

    @property
    def is_usable(self) -> bool:
        """Whether space in it may be granted, evicted and reused now."""
        return (
            self.allocator is not None and self.node.state == NodeState.ALIVE and self.node.attached
        )

    def round_up(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        align = self.align_units
        return lengths if align == 1 else (lengths + (align - 1)) // align * align

    # ---- space ------------------------------------------------------------------------------

    def take_run(
        self, lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.integer], NDArray[np.uint32], NDArray[np.int64]] | None:
        """One extent for each length, back to back where there is room for it, or None.

        Returns (offsets, slot numbers, lengths as given).
        """
        allocator = self.allocator
        if allocator is None or self.slots.free < len(lengths):
            return None
        lengths = self.round_up(lengths)
        ends = lengths.cumsum()
        start = allocator.allocate(int(ends[-1]))
        if start >= 0:
            ends -= lengths
            ends += start
            offsets: NDArray[np.int64] | None = ends
        else:
            offsets = allocator.allocate_many(lengths)
        if offsets is None:
            return None
        slots = self.slots.take(len(lengths))
        assert slots is not None
        return offsets, slots, lengths

    def take_one(self, length: int) -> tuple[int, int, int] | None:
        """(offset, slot number, length as given) of one extent, or None."""
        allocator = self.allocator
        if allocator is None:
            return None
        if self.align_units != 1:
            length = -(-length // self.align_units) * self.align_units
        offset = allocator.allocate(length)
        if offset < 0:
            return None
        slot = self.slots.take_one()
        if slot < 0:
            allocator.free(offset, length)
            return None
        return offset, slot, length

    def take_pieces(self, length: int, pieces_max: int) -> list[tuple[int, int, int]] | None:
        """Several extents that add up to at least `length`: (offset, slot number, length) each."""
        allocator = self.allocator
        if allocator is None or pieces_max < 1 or self.slots.free < 1:
            return None
        align = self.align_units
        length = -(-length // align) * align
        smallest = max(_PIECE_UNITS_MIN, align)
        pieces = allocator.allocate_pieces(length, min(pieces_max, self.slots.free), smallest)
        if pieces is None:
            return None
        return [(offset, self.slots.take_one(), units) for offset, units in pieces]

    def give(self, spans: Spans, number: int = 0) -> None:
        """Spans of this segment are free again, and held back under a `number` that is not 0."""
        allocator = self.allocator
        if allocator is None:
            return
        if len(spans) == 1 and not number:
            _, slot, offset, length = spans[0].tolist()
            self.give_space(offset, length)
            if slot != NO_SLOT:
                self.slots.give_one(slot)
            return
        slots = spans[:, 1]
        if self.shared:
            spans = spans[[not self._unshare(*place) for place in spans[:, 2:4].tolist()]]
        for freed in spans[:, 2].tolist() if self.copied else ():
            self.copied.pop(freed, None)
        offsets, lengths = spans[:, 2].astype(np.int64), spans[:, 3].astype(np.int64)
        if number and len(spans):
            allocator.hold(number, offsets, lengths)
        elif len(spans):
            allocator.free_bulk(offsets, lengths)
        if int(slots.max()) == NO_SLOT:
            slots = slots[slots != NO_SLOT]
        self.slots.give(slots)

    def give_one(self, slot: int, offset: int, length: int) -> None:
        if self.allocator is not None:
            self.allocator.free(offset, length)
            self.slots.give_one(slot)

    def claim(self, offset: int, length: int) -> bool:
        """Take just this space, its slot number left aside. False if taken, or out of range."""
        allocator = self.allocator
        return (
            allocator is not None
            and offset + length <= self.ready_units
            and allocator.allocate_at(offset, length)
        )

    def claim_free(self, offset: int, end: int) -> list[tuple[int, int]]:
        """Take whatever is free in [offset, end): (offset, length) of each piece."""
        allocator = self.allocator
        return [] if allocator is None else allocator.allocate_between(offset, end)

    def give_space(self, offset: int, length: int) -> None:
        """Undo `claim`, or `share`."""
        if self.allocator is not None and not (self.shared and self._unshare(offset, length)):
            self.allocator.free(offset, length)
            self.copied.pop(offset, None)

    def share(self, offset: int, length: int) -> None:
        """One more holds this extent, all of it, which is taken."""
        self.shared[offset] = self.shared.get(offset, 0) + 1
        self.shared_units += length

    def _unshare(self, offset: int, length: int) -> bool:
        """One less holds this extent; False where nobody else does."""
        others = self.shared.get(offset, 0)
        if not others:
            return False
        self.shared_units -= length
        if others == 1:
            del self.shared[offset]
        else:
            self.shared[offset] = others - 1
        return True

    def build(
        self,
        ready_units: int,
        spans: Spans,
        order: Callable[[], NDArray[np.int64]],
        contents: Callable[[], NDArray[np.uint64]],
    ) -> list[int]:
        """Make the allocator, with these spans taken.

        Returns the positions of those that can't be: out of range, in a range that was given up for
        slots (a journal that lost its end knows of neither that nor of their removal before), or
        over others that come earlier in `order`, which is only asked for where it matters. Their
        owners must go. Spans of the same place share it where their `contents` (uint64[n, 2]: size
        and checksum of the objects) are the same.
        """
        self.ready_units = ready_units
        self.slots = SlotNumbers(self.slots.total)
        self.allocator = allocator = self._empty_allocator()
        self.shared, self.shared_units, self.copied = {}, 0, {}
        refused: list[int] = []
        runs, leaders = joined_runs(spans, ready_units), np.arange(len(spans))
        if runs is None:
            leaders = leaders_of(spans, contents())
            runs = joined_runs(spans[np.unique(leaders)], ready_units)
        if runs is not None:
            if all(allocator.allocate_at(o, n) for o, n in runs):
                self.slots.claim(spans[:, 1])
                for place in spans[leaders != np.arange(len(spans)), 2:4].tolist():
                    self.share(*place)
                return refused
            self.allocator = allocator = self._empty_allocator()
        places = spans[:, 2:4].tolist()
        taken: dict[int, bool] = {}
        """By leader: whether its place could be taken."""
        for i in order().tolist():
            offset, length = places[i]
            leader = int(leaders[i])
            if leader not in taken:
                fits = offset + length <= ready_units
                taken[leader] = fits and allocator.allocate_at(offset, length)
            elif taken[leader]:
                self.share(offset, length)
            if not taken[leader]:
                refused.append(i)
        self.slots.claim(np.delete(spans[:, 1], refused))
        return refused

    def _empty_allocator(self) -> SegmentAllocator:
        allocator = SegmentAllocator(self.ready_units)
        for offset, length in self.retired:
            allocator.retire(offset, length)
        return allocator

    # ---- slot table growth --------------------------------------------------------------------

    def wants_slots(self) -> bool:
        """Whether the slot table should grow before it runs out."""
        slots = self.slots
        free = slots.free
        if free > self.grow_below:
            return False
        return free < min(1024, max(64, slots.total >> 1)) or free < slots.used >> 3

    def grow_slots(self, bytes_max: int, slot_bytes: int) -> SlotsGrown | None:
        """Give a data range up for slots; None when there is no room for that.

        Steps double from one to the next, up to a 16th of the segment. There are never more slots
        than units: the smallest object needs one of each.
        """
        allocator = self.allocator
        if allocator is None:
            return None
        page = max(4096, self.unit_bytes)
        step = min(self.grow_bytes, max(page, self.ready_units * UNIT_BYTES >> 4))
        while step >= page:
            units = step // page * page // UNIT_BYTES
            slots = self.slots.total + units * UNIT_BYTES // slot_bytes
            if slots <= self.capacity_units - units:
                offset = allocator.retire_last(units)
                if offset >= 0:
                    break
            step >>= 1
        else:
            # Not again for every put: when half of what is left is used up, or at the next tick.
            self.grow_below = self.slots.free >> 1
            return None
        self.grow_below = GROW_ALWAYS
        self.grow_bytes = min(step * 2, bytes_max)
        grown = SlotsGrown(self.segment_id, offset, units, slots)
        self.note_growth(grown)
        return grown

    def note_growth(self, grown: SlotsGrown) -> None:
        """A range was given up; known ones are ignored."""
        span = (grown.offset_units, grown.length_units)
        if span not in self.retired:
            self.retired.append(span)
            self.retired_units += grown.length_units
        self.slots.total = max(self.slots.total, grown.slots)


class Segments:
    """All segments that are not gone. Columns are indexed by segment id; ids are never reused."""

    __slots__ = (
        "_holding",
        "_ids_max",
        "all_attached",
        "all_readable",
        "all_verified",
        "attached",
        "by_id",
        "by_incarnation",
        "drops",
        "freed",
        "freed_number",
        "has_ssd",
        "kept_units",
        "on_ssd",
        "readable",
        "shut",
        "verified",
    )

    def __init__(self) -> None:
        self.by_id: dict[int, Segment] = {}
        self.by_incarnation: dict[bytes, Segment] = {}
        self._ids_max = 0
        self.freed: list[Spans] | None = None
        """What `give` was given since it was last taken; None where nobody wants to know, and
        nothing is held back."""
        self.freed_number = 0
        """Rises with each of them."""
        self._holding: set[int] = set()
        """Segments that hold something back."""
        self.kept_units = 0
        """Given, and not free for that, since others hold it, too; since the start."""
        self.drops = 0
        """How many have gone: grants made before the last one may have lost extents."""
        self.shut: set[int] = set()
        """In these nothing is committed any more: their nodes are drained."""
        self.readable: NDArray[np.bool_] = np.zeros(SEGMENT_IDS_MAX + 1, np.bool_)
        """Whether lookups may point at it: its node is alive as far as is known."""
        self.all_readable = True
        """No segment is unreadable, so that batches need not look."""
        self.verified: NDArray[np.bool_] = np.ones(SEGMENT_IDS_MAX + 1, np.bool_)
        """Whether a lease proves what is read in it."""
        self.all_verified = True
        self.attached: NDArray[np.bool_] = np.zeros(SEGMENT_IDS_MAX + 1, np.bool_)
        """Whether its daemon has attached to this epoch: until then, what the journal says is there
        may be decided and not sealed, and will be dropped."""
        self.all_attached = True
        self.on_ssd: NDArray[np.bool_] = np.zeros(SEGMENT_IDS_MAX + 1, np.bool_)
        self.has_ssd = False
        """Whether any segment is on an SSD: else batches need not look."""

    def new_id(self) -> int:
        """Raises ResourceUnavailable when all numbers were used."""
        if self._ids_max >= SEGMENT_IDS_MAX:
            raise ResourceUnavailable(
                f"{SEGMENT_IDS_MAX} segments have come and gone",
                remedy="start a new cluster with an empty metadata directory",
            )
        return self._ids_max + 1

    def apply(self, known: SegmentKnown, node: Node, grow_bytes: int) -> Segment:
        segment = self.by_id.get(known.segment_id)
        if segment is None:
            segment = Segment(known, node, grow_bytes)
            self.by_id[known.segment_id] = segment
            self.by_incarnation[known.incarnation] = segment
            node.segment_ids.append(known.segment_id)
            self._ids_max = max(self._ids_max, known.segment_id)
            self.refresh_readable()
        return segment

    def drop(self, segment_id: int) -> Segment | None:
        segment = self.by_id.pop(segment_id, None)
        if segment is not None:
            self.drops += 1
            del self.by_incarnation[segment.incarnation]
            segment.node.segment_ids.remove(segment_id)
            self.refresh_readable()
        return segment

    @property
    def memory_units(self) -> int:
        """What objects can use in memory, drained nodes left aside."""
        found = (s for s in self.by_id.values() if s.tier == DRAM and not s.node.drained)
        return sum(segment.capacity_units for segment in found)

    def refresh_readable(self) -> None:
        """After a node's state or the set of segments changed."""
        self.readable[:] = False
        self.verified[:] = True
        self.attached[:] = False
        self.on_ssd[:] = False
        self.has_ssd = False
        self.all_readable = self.all_verified = self.all_attached = True
        for segment_id, segment in self.by_id.items():
            node, readable = segment.node, segment.node.is_readable
            self.readable[segment_id] = readable
            self.all_readable &= readable
            self.attached[segment_id] = node.attached
            self.all_attached &= node.attached
            if segment.tier != DRAM:
                self.on_ssd[segment_id] = self.has_ssd = True
            # Before it attaches: the journal may have lost who was given what lies there.
            if (readable and not node.attached) or segment.index in node.unverified:
                self.verified[segment_id] = self.all_verified = False

    def give(self, spans: Spans) -> None:
        """Free spans of any segments; those of segments that are gone are forgotten."""
        number = 0
        if self.freed is not None and len(spans):
            self.freed.append(spans)
            self.freed_number = number = self.freed_number + 1
        for segment_id, part in by_segment(spans):
            segment = self.by_id.get(segment_id)
            if segment is not None:
                shared_units = segment.shared_units
                segment.give(part, number)
                self.kept_units += shared_units - segment.shared_units
                if number:
                    self._holding.add(segment_id)

    def release(self, number: int) -> None:
        """Hold back no longer what was freed up to this number."""
        for segment_id in list(self._holding):
            segment = self.by_id.get(segment_id)
            allocator = None if segment is None else segment.allocator
            if allocator is None or not allocator.release(number):
                self._holding.discard(segment_id)
