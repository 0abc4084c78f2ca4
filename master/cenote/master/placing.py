"""From lengths to extents: how one PutStart's keys are laid out, and what makes room for them.

A batch is cut into runs of about 1 MiB; a run lies in one segment and is one request to its
allocator. A run that finds no room is halved after eviction made some, down to single objects;
those may be cut in pieces (where free space is in small holes), and striped over segments (where
one is too small).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import EXTENTS_PER_OBJECT_MAX, UNIT_BYTES, PutStatus

from .eviction import evict_nearby, make_room, make_room_in
from .placement import Entry, Wanted
from .pool import Pool
from .segments import Segment
from .slot_growth import ensure_slots
from .spans import NO_SPANS, SEGMENT_MASK, Spans, units_of

__all__ = ["Placed", "place"]

_PIECES_FEW = 8
_EVICTED_FOR_MAX = 16
"""Keys of a batch that room is made for at once."""
_HARD_TRIES = 5
_STRIPE_SEGMENTS_MAX = 24

Lengths = NDArray[np.int64]


@dataclass(slots=True)
class Placed:
    """Of m keys: `status` uint8[m], None if all were granted; of the granted ones the rest.

    `counts` and `replicas` are None when every key was granted one extent.
    """

    status: NDArray[np.uint8] | None
    counts: NDArray[np.uint16] | None
    replicas: NDArray[np.uint8] | None
    spans: Spans
    units: int
    """Of all spans."""
    segments: list[Segment]
    """Where they lie."""


class _Batch:
    """Work in progress. `grid` holds keys with one extent per replica, `odd` all others."""

    __slots__ = (
        "evictions_left",
        "grid",
        "lengths",
        "min_replicas",
        "odd",
        "pool",
        "refused",
        "replicas",
        "rest",
        "status",
        "used",
        "wanted",
    )

    def __init__(
        self, pool: Pool, lengths: Lengths, replicas: int, min_replicas: int, wanted: Wanted
    ) -> None:
        self.pool = pool
        self.lengths = lengths
        self.replicas = replicas
        self.min_replicas = min_replicas
        self.wanted = wanted
        self.evictions_left = 0
        """How often the present pick may still evict where it is somebody's turn."""
        self.refused = False
        self.rest = 0
        """Units of one replica of the keys that are to be placed yet."""
        self.used: set[int] = set()
        """Ids of segments that were given from."""
        self.status = np.full(len(lengths), PutStatus.GRANTED, np.uint8)
        self.grid = np.empty((len(lengths), replicas, 4), np.uint32)
        self.odd: dict[int, tuple[int, list[tuple[int, int, int, int]]]] = {}
        """Key -> (replicas, spans)."""


def place(pool: Pool, lengths: Lengths, replicas: int, min_replicas: int, wanted: Wanted) -> Placed:
    """Place keys of `lengths` units (int64[m], m >= 1) with up to `replicas` replicas each."""
    placement = pool.placement
    if placement.stale:
        placement.redeal()
    m = len(lengths)
    domains = placement.domains_for(wanted)
    if domains < min_replicas:
        there = len({s.node.domain for s in _alive_segments(pool, wanted)}) >= min_replicas
        return _refused(m, PutStatus.NOT_YET if there else PutStatus.REPLICAS_UNAVAILABLE)
    if domains < replicas and pool.now_s < pool.gathering_until_s:
        # The tenure has just begun: more daemons attach in a moment, and more copies can be had.
        there = len({s.node.domain for s in _alive_segments(pool, wanted)}) > domains
        if there:
            return _refused(m, PutStatus.NOT_YET)
    # A run is a small part of a segment, so that it neither fills nor empties one.
    run_units = min(pool.config.run_bytes // UNIT_BYTES, max(1, placement.smallest_units >> 6))
    ends = lengths.cumsum()
    total = int(ends[-1])
    is_one_run = total <= run_units + (run_units >> 1)
    if is_one_run and replicas == 1 and wanted.is_plain:
        placed = _place_plain(pool, lengths, wanted)
        if placed is not None:
            return placed
    batch = _Batch(pool, lengths, min(replicas, domains), min_replicas, wanted)
    batch.rest = total
    if is_one_run:
        _place_run(batch, 0, m, True)
    else:
        numbers = (ends - lengths) // run_units
        cuts = (np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()
        start = 0
        for stop in [*cuts, m]:
            _place_run(batch, start, stop, True)
            start = stop
    return _assemble(batch)


def _place_plain(pool: Pool, lengths: Lengths, wanted: Wanted) -> Placed | None:
    """The usual case: one run, one replica, room in the segment whose turn it is; else None."""
    entry = pool.placement.first(wanted.tier)
    if entry is None:
        return None
    segment = entry.segment
    m = len(lengths)
    if segment.slots.free < m:
        ensure_slots(pool, segment, m)
    taken = segment.take_run(lengths)
    if taken is None:
        return None
    spans = np.empty((m, 4), np.uint32)
    spans[:, 0] = segment.segment_id
    spans[:, 1], spans[:, 2], spans[:, 3] = taken[1], taken[0], taken[2]
    units = int(taken[2].sum())
    pool.placement.charge_first(entry, units)
    return Placed(None, None, None, spans, units, [segment])


def _alive_segments(pool: Pool, wanted: Wanted) -> list[Segment]:
    """Also those in which nothing may be reused yet, shortly after a restart of the master."""
    return [
        segment
        for segment in pool.segments.by_id.values()
        if segment.tier == wanted.tier
        and segment.node.is_readable
        and not segment.node.draining
        and segment.node.node_id not in wanted.avoid_node_ids
    ]


def _refused(m: int, status: PutStatus) -> Placed:
    return Placed(np.full(m, status, np.uint8), None, None, NO_SPANS, 0, [])


def _place_run(batch: _Batch, start: int, stop: int, may_evict: bool) -> None:
    """Keys [start, stop) in one segment per replica; halves where that fails."""
    if stop - start == 1:
        _place_object(batch, start)
        batch.rest -= int(batch.lengths[start])
        return
    lengths = batch.lengths[start:stop]
    total = int(lengths.sum())
    if _try_run(batch, start, stop, lengths, total):
        return
    if (
        may_evict
        and make_room(batch.pool, _wanted_at_once(batch, total), batch.wanted.tier)
        and _try_run(batch, start, stop, lengths, total)
    ):
        return
    middle = (start + stop) // 2
    _place_run(batch, start, middle, False)
    _place_run(batch, middle, stop, False)


def _try_run(batch: _Batch, start: int, stop: int, lengths: Lengths, total: int) -> bool:
    got: list[tuple[NDArray[np.integer], NDArray[np.uint32], Lengths]] = []

    def try_entry(entry: Entry) -> bool:
        segment = entry.segment
        ensure_slots(batch.pool, segment, len(lengths))
        taken = segment.take_run(lengths)
        if taken is None and _evict_here(batch, segment, total):
            taken = segment.take_run(lengths)
        if taken is None:
            return False
        got.append(taken)
        return True

    batch.evictions_left = batch.replicas
    picked = batch.pool.placement.pick(batch.replicas, batch.wanted, total, try_entry)
    for replica, (entry, (offsets, slots, units)) in enumerate(zip(picked, got, strict=True)):
        batch.used.add(entry.segment.segment_id)
        cells = batch.grid[start:stop, replica]
        cells[:, 0] = entry.segment.segment_id | replica << 16
        cells[:, 1] = slots
        cells[:, 2] = offsets
        cells[:, 3] = units
    if len(picked) == batch.replicas:
        batch.rest -= total
        return True
    for entry, (offsets, slots, units) in zip(picked, got, strict=True):
        spans = np.empty((stop - start, 4), np.uint32)
        spans[:, 1], spans[:, 2], spans[:, 3] = slots, offsets, units
        entry.segment.give(spans)
        batch.pool.placement.note_back(entry, total)
    return False


def _evict_here(batch: _Batch, segment: Segment, units: int) -> bool:
    """Whether room was made in a segment whose turn it is. Going on to the next one instead would
    send to a fresh node whatever is put faster than eviction ahead of need makes room."""
    if not batch.evictions_left:
        return False
    batch.evictions_left -= 1
    return make_room_in(batch.pool, segment, units, _wanted_at_once(batch, units))


def _wanted_at_once(batch: _Batch, units: int) -> int:
    """Room for what the whole batch needs yet: to evict for each run by itself takes longer. Where
    there are quotas each is to have its own."""
    return units if batch.pool.quotas.active else max(units, batch.rest)


# ---- single objects -------------------------------------------------------------------------


def _place_object(batch: _Batch, at: int) -> None:
    """One key by every means there is; else says why not."""
    pool, wanted = batch.pool, batch.wanted
    length = int(batch.lengths[at])
    if batch.replicas == 1 and wanted.is_plain and _place_first(batch, at, length):
        return
    if length > pool.placement.capacity_for(wanted):
        batch.status[at] = PutStatus.TOO_LARGE
        batch.refused = True
        return
    found: list[tuple[Segment, list[tuple[int, int, int]]]] = []
    fits_one = length <= pool.placement.largest_for(wanted)
    for attempt in range(_HARD_TRIES if fits_one else 0):
        found += _pick_object(batch, length, len(found), found, _pieces_max(attempt))
        if len(found) == batch.replicas:
            break
        # The keys that follow will need room as well: evicting for each by itself takes longer.
        rest = 0 if attempt else int(batch.lengths[at : at + _EVICTED_FOR_MAX].sum())
        if not make_room(pool, max(rest, length << max(0, attempt - 1)), wanted.tier):
            break
    if fits_one and len(found) < batch.replicas:
        found += _pick_object(batch, length, len(found), found, EXTENTS_PER_OBJECT_MAX)
    if fits_one and len(found) < batch.replicas:
        found += _pick_nearby(batch, length, found)
    if len(found) < batch.min_replicas and batch.min_replicas == 1:
        striped = _stripe(batch, length)
        if striped:
            batch.odd[at] = (1, striped)
            return
    _settle_object(batch, at, found)


def _place_first(batch: _Batch, at: int, length: int) -> bool:
    """The usual case: one replica, and room for it in the segment whose turn it is."""
    entry = batch.pool.placement.first(batch.wanted.tier)
    taken = None if entry is None else entry.segment.take_one(length)
    if entry is None or taken is None:
        return False
    offset, slot, units = taken
    segment_id = entry.segment.segment_id
    batch.pool.placement.charge_first(entry, units)
    batch.used.add(segment_id)
    batch.grid[at, 0] = (segment_id, slot, offset, units)
    return True


def _pieces_max(attempt: int) -> int:
    """Few pieces first: rather evict a little than scatter an object."""
    return _PIECES_FEW if attempt < 2 else EXTENTS_PER_OBJECT_MAX


def _pick_object(
    batch: _Batch,
    length: int,
    have: int,
    found: list[tuple[Segment, list[tuple[int, int, int]]]],
    pieces_max: int,
) -> list[tuple[Segment, list[tuple[int, int, int]]]]:
    got: list[tuple[Segment, list[tuple[int, int, int]]]] = []
    taken_domains = {segment.node.domain for segment, _ in found}
    pieces_max = min(pieces_max, EXTENTS_PER_OBJECT_MAX // batch.replicas)

    def try_entry(entry: Entry) -> bool:
        segment = entry.segment
        if segment.node.domain in taken_domains:
            return False
        ensure_slots(batch.pool, segment, 1)
        one = segment.take_one(length)
        if one is None and segment.free_units < length and _evict_here(batch, segment, length):
            one = segment.take_one(length)
        if one is not None:
            got.append((segment, [one]))
            return True
        if segment.free_units < length:
            return False
        pieces = segment.take_pieces(length, pieces_max)
        if pieces is None:
            return False
        got.append((segment, pieces))
        return True

    batch.evictions_left = batch.replicas
    batch.pool.placement.pick(batch.replicas - have, batch.wanted, length, try_entry)
    return got


def _pick_nearby(
    batch: _Batch, length: int, found: list[tuple[Segment, list[tuple[int, int, int]]]]
) -> list[tuple[Segment, list[tuple[int, int, int]]]]:
    """Evict what lies in one neighbourhood, so that its free space becomes one piece."""
    got: list[tuple[Segment, list[tuple[int, int, int]]]] = []
    taken_domains = {segment.node.domain for segment, _ in found}

    def try_entry(entry: Entry) -> bool:
        segment = entry.segment
        if segment.node.domain in taken_domains or not evict_nearby(batch.pool, segment, length):
            return False
        one = segment.take_one(length)
        if one is None:
            return False
        got.append((segment, [one]))
        return True

    batch.pool.placement.pick(batch.replicas - len(found), batch.wanted, length, try_entry)
    return got


def _stripe(batch: _Batch, length: int) -> list[tuple[int, int, int, int]]:
    """One replica over several segments; empty when even that fails.

    Each gives a share of its free space: else some would be full then, and evict for their reserve,
    which might hit this very object. What can't be had that way comes from wherever there is any.
    """
    pool, wanted = batch.pool, batch.wanted
    for attempt in range(_HARD_TRIES):
        spans: list[tuple[int, int, int, int]] = []
        entries = pool.placement.eligible(wanted)
        entries.sort(key=lambda e: (-e.segment.free_units, e.segment.segment_id))
        segments = [entry.segment for entry in entries]
        left = _stripe_shares(_enough_for_stripes(segments, length), length, spans)
        for number, segment in enumerate(segments):
            if left > 0:
                # Leave a piece for each of those that follow.
                pieces_max = EXTENTS_PER_OBJECT_MAX - len(spans) - (len(segments) - number - 1)
                left -= _stripe_piece(segment, left, max(1, pieces_max), spans)
        if left <= 0:
            return spans
        for segment_id, slot, offset, units in spans:
            pool.segments.by_id[segment_id].give_one(slot, offset, units)
        if not make_room(pool, length << attempt, wanted.tier):
            return []
    return []


def _enough_for_stripes(segments: list[Segment], length: int) -> list[Segment]:
    """The first segments that have twice the room together, or all that there may be."""
    free = 0
    for number, segment in enumerate(segments[:_STRIPE_SEGMENTS_MAX]):
        free += segment.free_units
        if free >= 2 * length:
            return segments[: number + 1]
    return segments[:_STRIPE_SEGMENTS_MAX]


def _stripe_shares(
    segments: list[Segment], length: int, spans: list[tuple[int, int, int, int]]
) -> int:
    """Take a share of the free space of each; the units that are still missing."""
    left, free = length, sum(segment.free_units for segment in segments)
    pieces_max = EXTENTS_PER_OBJECT_MAX // 2 // max(1, len(segments))
    for segment in segments:
        if left <= 0 or free <= 0:
            break
        share = -(-left * segment.free_units // free)
        free -= segment.free_units
        left -= _stripe_piece(segment, min(share, left), max(1, pieces_max), spans)
    return left


def _stripe_piece(
    segment: Segment, length: int, pieces_max: int, spans: list[tuple[int, int, int, int]]
) -> int:
    """Take up to `length` units of one segment; how many it gave."""
    want = min(length, segment.free_units)
    pieces_max = min(pieces_max, EXTENTS_PER_OBJECT_MAX - len(spans))
    while want >= segment.align_units and pieces_max > 0:
        pieces = segment.take_pieces(want, pieces_max)
        if pieces is not None:
            spans += [(segment.segment_id, slot, offset, n) for offset, slot, n in pieces]
            return sum(n for _, _, n in pieces)
        want //= 2
    return 0


def _settle_object(
    batch: _Batch, at: int, found: list[tuple[Segment, list[tuple[int, int, int]]]]
) -> None:
    if len(found) < batch.min_replicas:
        for segment, pieces in found:
            for offset, slot, units in pieces:
                segment.give_one(slot, offset, units)
        batch.status[at] = PutStatus.NO_SPACE
        batch.refused = True
        return
    if len(found) == batch.replicas and all(len(pieces) == 1 for _, pieces in found):
        for replica, (segment, pieces) in enumerate(found):
            offset, slot, units = pieces[0]
            batch.used.add(segment.segment_id)
            batch.grid[at, replica] = (segment.segment_id | replica << 16, slot, offset, units)
        return
    batch.odd[at] = (
        len(found),
        [
            (segment.segment_id | replica << 16, slot, offset, units)
            for replica, (segment, pieces) in enumerate(found)
            for offset, slot, units in pieces
        ],
    )


def _assemble(batch: _Batch) -> Placed:
    """Put the keys' extents together, in their order."""
    status, replicas = batch.status, batch.replicas
    counts: NDArray[np.uint16] | None = None
    copies: NDArray[np.uint8] | None = None
    whole = not batch.refused
    granted = None if whole else status == PutStatus.GRANTED
    if batch.odd:
        counts, copies, spans = _assemble_odd(batch)
    else:
        grid = batch.grid if granted is None else batch.grid[granted]
        spans = grid.reshape(-1, 4)
        if replicas > 1:
            counts = np.full(len(grid), replicas, np.uint16)
            copies = np.full(len(grid), replicas, np.uint8)
    by_id = batch.pool.segments.by_id
    segments = [by_id[i] for i in batch.used if i in by_id]
    found = None if whole else status
    return Placed(found, counts, copies, spans, units_of(spans), segments)


def _assemble_odd(batch: _Batch) -> tuple[NDArray[np.uint16], NDArray[np.uint8], Spans]:
    """(extents of each granted key, replicas of each, all extents); some keys are in pieces."""
    granted = batch.status == PutStatus.GRANTED
    replicas = batch.replicas
    counts = np.full(len(granted), replicas, np.uint16)
    copies = np.full(len(granted), replicas, np.uint8)
    for at, (number, pieces) in batch.odd.items():
        counts[at], copies[at] = len(pieces), number
        batch.pool.counters.put_striped += len(pieces) > number
        batch.used.update(word & SEGMENT_MASK for word, *_ in pieces)
    counts[~granted] = 0
    ends = np.cumsum(counts, dtype=np.int64)
    starts = ends - counts
    spans = np.empty((int(ends[-1]), 4), np.uint32)
    regular = granted.copy()
    regular[list(batch.odd)] = False
    where = starts[regular][:, None] + np.arange(replicas)
    spans[where.reshape(-1)] = batch.grid[regular].reshape(-1, 4)
    for at, (_, pieces) in batch.odd.items():
        spans[starts[at] : ends[at]] = pieces
    return counts[granted], copies[granted], spans
