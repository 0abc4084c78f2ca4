"""Objects that the journal missed, taken in from slot tables.

Newest first: where extents overlap, the higher version has overwritten the others. A version enters
the table with those of its replicas that are whole on the daemon that attaches; another daemon may
bring more of them later.

Likewise copies that it missed, of objects that it knows: `regain`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import KEY_INLINE_BYTES, UNIT_BYTES

from .effects import GoneReason, ReplicasChanged, Stored
from .inventory import Found, Slot, gather
from .objects import LIVE
from .pool import Pool, Rows
from .segments import DRAM, Segment
from .spans import Spans, distinct, segments_of, to_placed, units_of

__all__ = ["Adoption", "adopt", "regain"]

_EPOCH_MASK = np.uint64(0xFFFF_FFFF)


@dataclass(slots=True)
class Adoption:
    """One attach's work: what was taken so far."""

    pool: Pool
    by_index: dict[int, Segment]
    """Segments that are met first in this epoch; of others nothing is taken in."""
    slots: NDArray[np.void]
    """All of the daemon's."""
    known: NDArray[np.bool_]
    """Which of them the table knows, or has taken in as other replicas of what it knew."""
    spare: tuple[Rows, NDArray[np.int64]] | None = None
    """Of other slots on SSDs those that have a version of the table: (rows, rising; positions)."""
    numbers: dict[int, list[int]] = field(default_factory=dict)
    """Segment id -> slot numbers taken."""
    news: dict[tuple[int, int, int], list[tuple[Found, Spans, int]]] = field(default_factory=dict)
    """(namespace, generation, epoch) -> objects to enter the table: (it, extents, replicas)."""
    digests: set[bytes] = field(default_factory=set)
    overwritten: list[tuple[Segment, int, int]] = field(default_factory=list)
    """Space of what can't be adopted: (segment, offset, units). Nothing older is whole there."""
    claimed: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    """(segment id, offset) of what was taken -> (units, size, checksum of the object)."""
    repeated: set[tuple[int, int, int, int]] = field(default_factory=set)
    """(segment index, offset, size, checksum) of what several versions say: they are the same bytes
    in one place (content dedup), and none has overwritten another there."""
    regained: set[tuple[int, int]] = field(default_factory=set)
    """(segment id, offset) of what was found again on SSDs: nothing that is taken in later says
    otherwise of these places."""
    older: dict[int, _Held] = field(default_factory=dict)
    """By segment id."""


class _Held(NamedTuple):
    """What the table had in a segment before, by where it starts."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    spans: Spans
    rows: Rows
    seqs: NDArray[np.uint64]


def adopt(work: Adoption) -> tuple[int, NDArray[np.bool_]]:
    """Take in slots that the table does not know, and that are newer than the journal.

    Returns (how many objects, which of all slots are to be cleared).
    """
    pool, slots = work.pool, work.slots
    adopted = 0
    clear = ~work.known
    at = _newer_slots(work)
    versions = gather(slots, at) if len(at) else []
    _note_repeated(work, versions)
    for found in reversed(versions):
        positions = _adopt_one(work, found)
        adopted += len(positions) > 0
        clear[positions] = False
        _keep_off(work, found, positions)
    for segment, offset, units in work.overwritten:
        segment.give_space(offset, units)
    for segment_id, numbers in work.numbers.items():
        pool.segments.by_id[segment_id].slots.claim(np.array(numbers, np.uint32))
    # Oldest first, so that what was stored last is touched last.
    for place in sorted(work.news):
        _store(pool, place, work.news[place][::-1])
    return adopted, clear & ~work.known


def _newer_slots(work: Adoption) -> NDArray[np.int64]:
    """Positions of those slots that the table does not know, and may not have heard of."""
    at = np.flatnonzero(~work.known)
    newer = _newer(work.pool, list(work.by_index.values()), work.slots[at])
    return at[newer]


def _note_repeated(work: Adoption, versions: list[Found]) -> None:
    seen = set[tuple[int, int, int, int]]()
    for found in versions:
        for replica in found.replicas.values():
            for _, slot in replica.extents.values():
                place = _place(found, slot)
                (work.repeated if place in seen else seen).add(place)


def _place(found: Found, slot: Slot) -> tuple[int, int, int, int]:
    return slot["segment_index"], slot["offset"], found.size, found.checksum


def _newer(pool: Pool, segments: list[Segment], slots: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which slots of these segments are above the last seq that the journal has of their epoch,
    and were not there to be taken in before."""
    newer = np.zeros(len(slots), np.bool_)
    if not pool.adoption_open:
        return newer
    for epoch in distinct(slots["epoch"]).tolist():
        newest = pool.adoption.newest_of(epoch)
        if pool.adoption.floor <= epoch < pool.epoch:
            newer |= (slots["epoch"] == epoch) & (slots["seq"].astype(np.int64) > newest)
    unmet = np.zeros(len(slots), np.bool_)
    for segment in segments:
        here = slots["segment_index"] == segment.index
        unmet |= here & (slots["epoch"] >= segment.met_epoch)
    return newer & unmet


def _adopt_one(work: Adoption, found: Found) -> list[int]:
    """One version: positions of the slots that entered the table, none if it can't be adopted."""
    pool = work.pool
    namespace = pool.namespaces.by_id.get(found.namespace_id)
    if (
        namespace is None
        or namespace.generation != found.generation
        or found.clashes
        or found.digest in work.digests
        or not pool.adoption.may_adopt(found.epoch, found.seq, found.digest)
    ):
        return []
    row = pool.objects.lookup_one(*np.frombuffer(found.digest, np.uint64).tolist())
    if row > 0:
        record = pool.record_of(row)
        if (record[3], record[2]) > (found.epoch, found.seq):
            return []
        if (record[3], record[2]) < (found.epoch, found.seq):
            pool.unlink(np.array([row]), GoneReason.LOST)
            row = -1
        elif (record[0], record[1]) != (found.size, found.checksum):
            return []  # what one daemon says of this version contradicts another
    added, replicas, positions = _take(work, found, _numbers_of(pool, row))
    if not replicas:
        return []
    if row > 0:
        _add_replicas(pool, row, added, replicas)
    else:
        work.digests.add(found.digest)
        place = (found.namespace_id, found.generation, found.epoch)
        work.news.setdefault(place, []).append((found, added, replicas))
    return positions


def _take(
    work: Adoption, found: Found, held: set[int], *, displaces: bool = True
) -> tuple[Spans, int, list[int]]:
    """Take the space of all replicas that are whole and have other numbers than those that are
    held: (extents, how many replicas, positions of their slots)."""
    spans: list[tuple[int, int, int, int]] = []
    positions: list[int] = []
    replicas = 0
    for number in _by_tier(work, found, held):
        replica = found.replicas[number]
        taken = _claim(work, found, number, displaces=displaces) if replica.is_whole() else []
        if taken:
            spans += taken
            replicas += 1
            positions += [position for position, _ in replica.extents.values()]
    for word, slot, _, _ in spans:
        work.numbers.setdefault(word & 0xFFFF, []).append(slot)
    return np.array(spans, np.uint32).reshape(-1, 4), replicas, positions


def _numbers_of(pool: Pool, row: int) -> set[int]:
    """The replicas that the table has of this row, if it is one."""
    if row <= 0:
        return set()
    words = pool.spans_of(np.array([row]))[1][:, 0]
    return set(((words >> 16) & 0xFF).tolist())


def _by_tier(work: Adoption, found: Found, held: set[int]) -> list[int]:
    """Numbers of replicas that may enter the table, those in memory first.

    Not those that the table has: a number may have been given anew, to a copy on an SSD, while the
    slot of the evicted replica that had it is still there. Nor what lies on two tiers, as no
    replica does.
    """
    places = []
    for number, replica in found.replicas.items():
        slots = [slot for _, slot in replica.extents.values()]
        tiers = {work.by_index[int(slot["segment_index"])].tier for slot in slots}
        if number not in held and len(tiers) == 1:
            places.append((tiers.pop() != DRAM, number))
    return [number for _, number in sorted(places)]


def _keep_off(work: Adoption, found: Found, adopted: list[int]) -> None:
    """What lies where a version was written that is not adopted has been overwritten by it."""
    taken = set(adopted)
    for replica in found.replicas.values():
        for position, slot in replica.extents.values():
            segment = work.by_index.get(int(slot["segment_index"]))
            if position in taken or segment is None or _place(found, slot) in work.repeated:
                continue
            start, units = _extent_of(segment, slot)
            pieces = segment.claim_free(start, start + units)
            work.overwritten += [(segment, *piece) for piece in pieces]


def _extent_of(segment: Segment, slot: Slot) -> tuple[int, int]:
    """(offset, units) that were taken for what a slot tells of, as space of its segment is: a slot
    has the length of its bytes, and what comes next on an SSD begins with a block."""
    align = segment.align_units
    units = -(-int(slot["length"]) // UNIT_BYTES)
    return int(slot["offset"]) // UNIT_BYTES, -(-units // align) * align


def _claim(
    work: Adoption, found: Found, replica: int, *, displaces: bool
) -> list[tuple[int, int, int, int]]:
    """Take the space of one replica's extents; nothing when some of it is a newer object's, or
    (unless it `displaces` these) an older one's."""
    extents = found.replicas[replica].extents
    spans: list[tuple[int, int, int, int]] = []
    for index in range(len(extents)):
        _, slot = extents[index]
        segment = work.by_index[int(slot["segment_index"])]
        offset, units = _extent_of(segment, slot)
        if (
            not segment.claim(offset, units)
            and not _share(work, found, segment, offset, units)
            and not (
                displaces
                and _displace(work, found, segment, offset, units)
                and segment.claim(offset, units)
            )
        ):
            for word, _, at, length in spans:
                work.pool.segments.by_id[word & 0xFFFF].give_space(at, length)
            return []
        work.claimed[segment.segment_id, offset] = units, found.size, found.checksum
        spans.append((segment.segment_id | replica << 16, int(slot["slot"]), offset, units))
    return spans


def _share(work: Adoption, found: Found, segment: Segment, offset: int, units: int) -> bool:
    """Hold this extent with whoever has it, where that is another object of the same bytes."""
    content = found.size, found.checksum
    held = work.claimed.get((segment.segment_id, offset))
    if held is None:
        pool = work.pool
        known = _known_in(work, segment)
        at = slice(*np.searchsorted(known.starts, [offset, offset + 1]).tolist())
        same = _are_there(pool, known, at) & (known.ends[at] == offset + units)
        same &= (pool.state.take(known.rows[at]) & LIVE) != 0
        records = pool.records_of(known.rows[at])[same]
        held = (units, *records[0, :2].tolist()) if len(records) else None
    if held != (units, *content):
        return False
    segment.share(offset, units)
    return True


def _known_in(work: Adoption, segment: Segment) -> _Held:
    """What the table had in a segment."""
    pool = work.pool
    known = work.older.get(segment.segment_id)
    if known is None:
        rows, spans = pool.rows_in_segment(segment.segment_id)
        order = np.argsort(spans[:, 2], kind="stable")
        rows, spans = rows[order], spans[order]
        starts = spans[:, 2].astype(np.int64)
        known = _Held(starts, starts + spans[:, 3], spans, rows, pool.seqs_of(rows))
        work.older[segment.segment_id] = known
    return known


def _are_there(pool: Pool, known: _Held, at: slice) -> NDArray[np.bool_]:
    """Whether what the table had there still is there, and has not been displaced."""
    rows, spans = known.rows[at], known.spans[at]
    same = np.flatnonzero(pool.seqs_of(rows) == known.seqs[at])
    counts, present = pool.spans_of(rows[same])
    owner = np.repeat(same, counts)
    there = np.zeros(len(rows), np.bool_)
    there[owner[(present == spans[owner]).all(axis=1)]] = True
    return there


def _displace(work: Adoption, found: Found, segment: Segment, offset: int, units: int) -> bool:
    """Drop replicas of older objects that this version has overwritten. False if something there
    must stay."""
    pool, known = work.pool, _known_in(work, segment)
    part = slice(
        int(np.searchsorted(known.ends, offset, "right")),
        int(np.searchsorted(known.starts, offset + units)),
    )
    rows, spans = known.rows[part], known.spans[part]
    if not len(rows) or not _are_there(pool, known, part).all():
        return False
    records = pool.records_of(rows)
    epochs = records[:, 3] & _EPOCH_MASK
    older = (epochs < found.epoch) | ((epochs == found.epoch) & (records[:, 2] < found.seq))
    free = (pool.lease_count.take(rows) == 0) & ((pool.state.take(rows) & LIVE) != 0)
    found_now = [(segment.segment_id, start) in work.regained for start in spans[:, 2].tolist()]
    if not (older & free).all() or any(found_now):
        return False
    regain(work, rows, spans)
    pool.drop_replicas(rows, spans, GoneReason.LOST)
    return True


def regain(work: Adoption, rows: Rows, lost: Spans) -> None:
    """Before these extents are dropped (each of a row): of what would be nowhere then a slot on an
    SSD of this node may tell, that the table does not know. It is a replica of the same object.

    The journal has lost that the object was copied there and left memory, or it was not told of it.
    A version is never given twice, and the object lives, so that nobody has removed it. Nobody is
    given a lease on what is on an SSD: should the slot be stale, and its place others' by now,
    readers find that by the checksum. Where a slot that may be adopted says so it is not taken.
    """
    pool = work.pool
    if work.spare is None:
        work.spare = _spare_slots(work)
    theirs, positions = work.spare
    some = np.searchsorted(theirs, rows) < np.searchsorted(theirs, rows, "right")
    wanted = _left_nowhere(work, rows[some], lost[some]) if some.any() else rows[:0]
    if not len(wanted):
        return
    starts, ends = np.searchsorted(theirs, wanted), np.searchsorted(theirs, wanted, "right")
    at = np.concatenate([positions[i:j] for i, j in zip(starts, ends, strict=True)])
    for found in reversed(gather(work.slots, np.sort(at))):
        row = pool.objects.lookup_one(*np.frombuffer(found.digest, np.uint64).tolist())
        record = pool.record_of(row)
        if found.clashes or (record[0], record[1]) != (found.size, found.checksum):
            continue  # what is said of this version contradicts the table
        added, replicas, taken = _take(work, found, _numbers_of(pool, row), displaces=False)
        if replicas:
            _add_replicas(pool, row, added, replicas)
            work.known[taken] = True
            places = zip(segments_of(added).tolist(), added[:, 2].tolist(), strict=True)
            work.regained.update(places)


def _spare_slots(work: Adoption) -> tuple[Rows, NDArray[np.int64]]:
    pool, slots = work.pool, work.slots
    on_ssd = [index for index, segment in work.by_index.items() if segment.tier != DRAM]
    at = np.flatnonzero(np.isin(slots["segment_index"], on_ssd) & ~work.known)
    digests = np.ascontiguousarray(slots["digest"][at]).view(np.uint64).reshape(-1, 2)
    rows = np.maximum(pool.objects.lookup(digests), 0)
    records = pool.records_of(rows)
    same = (rows > 0) & ((pool.state.take(rows) & LIVE) != 0)
    same &= records[:, 2] == slots["seq"][at]
    same &= (records[:, 3] & _EPOCH_MASK) == slots["epoch"][at]
    rows, at = rows[same], at[same]
    if not len(at):
        return rows, at
    kept = ~_are_overlapped(work, slots[at], slots[_newer_slots(work)])
    rows, at = rows[kept], at[kept]
    order = np.argsort(rows, kind="stable")
    return rows[order], at[order]


def _are_overlapped(
    work: Adoption, slots: NDArray[np.void], others: NDArray[np.void]
) -> NDArray[np.bool_]:
    """Where others say that other bytes lie than these slots do."""
    overlapped = np.zeros(len(slots), np.bool_)
    others = others[~np.isin(_contents(others), _contents(slots))]
    for index in distinct(slots["segment_index"]).tolist():
        segment = work.by_index[index]
        here, there = slots["segment_index"] == index, others["segment_index"] == index
        starts, ends = _places_of(segment, others[there])
        order = np.argsort(starts, kind="stable")
        ends = np.r_[np.int64(0), np.maximum.accumulate(ends[order])]
        first, last = _places_of(segment, slots[here])
        overlapped[here] = ends[np.searchsorted(starts[order], last)] > first
    return overlapped


def _places_of(
    segment: Segment, slots: NDArray[np.void]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the extents of these slots begin and end, in units: as `_extent_of`."""
    starts = (slots["offset"] // np.uint64(UNIT_BYTES)).astype(np.int64)
    units = -(-slots["length"].astype(np.int64) // UNIT_BYTES)
    return starts, starts + segment.round_up(units)


def _contents(slots: NDArray[np.void]) -> NDArray[np.uint64]:
    """A number for the bytes that each slot tells of, and where they lie."""
    numbers = slots["checksum"].astype(np.uint64)
    for name in ("segment_index", "offset", "object_size"):
        numbers = numbers * np.uint64(0x9E37_79B9_7F4A_7C15) + slots[name].astype(np.uint64)
    return numbers


def _left_nowhere(work: Adoption, rows: Rows, lost: Spans) -> Rows:
    """Which of these rows have no replica without one of these extents, as far as is known: what
    the table has on other nodes may be as wrong, before their daemons have attached."""
    pool = work.pool
    unique = distinct(rows)
    counts, spans = pool.spans_of(unique)
    owner = np.repeat(np.arange(len(unique)), counts)
    pairs = owner * 256 + ((spans[:, 0] >> 16) & 0xFF)
    going = np.searchsorted(unique, rows) * 256 + ((lost[:, 0] >> 16) & 0xFF)
    here = [segment.segment_id for segment in work.by_index.values()]
    sure = pool.segments.attached[segments_of(spans)] | np.isin(segments_of(spans), here)
    stays = sure & ~np.isin(pairs, going)
    nowhere: Rows = unique[np.bincount(owner[stays], minlength=len(unique)) == 0]
    return nowhere


def _store(pool: Pool, place: tuple[int, int, int], news: list[tuple[Found, Spans, int]]) -> None:
    namespace_id, generation, epoch = place
    spans = np.concatenate([part for _, part, _ in news])
    tails = [f.key_length if f.key_length > KEY_INLINE_BYTES else 0 for f, _, _ in news]
    effect = Stored(
        namespace_id,
        generation,
        epoch,
        np.frombuffer(b"".join(f.digest for f, _, _ in news), np.uint64).reshape(-1, 2),
        np.array([f.size for f, _, _ in news], np.uint64),
        np.array([f.checksum for f, _, _ in news], np.uint64),
        np.array([f.seq for f, _, _ in news], np.uint64),
        np.array(tails, np.uint16),
        np.array([len(part) for _, part, _ in news], np.uint16),
        np.array([replicas for *_, replicas in news], np.uint8),
        to_placed(spans),
    )
    stamps = pool.policy.restored(len(news))
    pool.link(pool.namespaces.by_id[namespace_id], effect, stamps, spans, units_of(spans))
    pool.effects.append(effect)


def _add_replicas(pool: Pool, row: int, added: Spans, replicas: int) -> None:
    """Another node brings more replicas of an object that was adopted before."""
    rows = np.array([row])
    counts, spans = pool.spans_of(rows)
    merged = np.concatenate((spans, added))
    by_id = pool.segments.by_id
    on_ssd = np.array([by_id[i].tier != DRAM for i in segments_of(merged).tolist()])
    # What is in memory comes first: the first extent tells on which tier an object is.
    order = np.lexsort(((merged[:, 0] >> 16) & 0xFF, on_ssd))
    merged = np.ascontiguousarray(merged[order])
    total = np.array([pool.record_of(row)[8] + replicas], np.uint8)
    pool.set_spans(rows, counts + len(added), merged, total)
    pool.effects.append(
        ReplicasChanged(
            pool.digests_of(rows),
            pool.seqs_of(rows),
            np.array([len(merged)], np.uint16),
            total,
            to_placed(merged),
        )
    )
