"""Objects that the journal missed, taken in from slot tables.

Newest first: where extents overlap, the higher version has overwritten the others. A version enters
the table with those of its replicas that are whole on the daemon that attaches; another daemon may
bring more of them later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import KEY_INLINE_BYTES, UNIT_BYTES

from .effects import GoneReason, ReplicasChanged, Stored
from .inventory import Found, Slot, gather
from .objects import LIVE
from .pool import Pool, Rows
from .segments import DRAM, Segment
from .spans import Spans, distinct, segments_of, to_placed, units_of

__all__ = ["adopt"]

_EPOCH_MASK = np.uint64(0xFFFF_FFFF)


@dataclass(slots=True)
class _Adoption:
    """One attach's work: what was taken so far."""

    pool: Pool
    by_index: dict[int, Segment]
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
    older: dict[int, tuple[NDArray[np.int64], NDArray[np.int64], Rows, NDArray[np.uint64]]] = field(
        default_factory=dict
    )
    """Segment id -> starts, ends, rows, seqs of what the table had there, by start."""


def adopt(
    pool: Pool, segments: list[Segment], slots: NDArray[np.void]
) -> tuple[int, NDArray[np.bool_]]:
    """Take in slots (of these segments) that are newer than the journal.

    Returns (how many objects, which of the slots are to be cleared).
    """
    clear = np.ones(len(slots), np.bool_)
    newer = _newer(pool, segments, slots)
    at = np.flatnonzero(newer)
    if not len(at):
        return 0, clear
    work = _Adoption(pool, {segment.index: segment for segment in segments})
    adopted = 0
    versions = gather(slots, at)
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
    return adopted, clear


def _note_repeated(work: _Adoption, versions: list[Found]) -> None:
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


def _adopt_one(work: _Adoption, found: Found) -> list[int]:
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
    spans: list[tuple[int, int, int, int]] = []
    positions: list[int] = []
    replicas = 0
    for number in _by_tier(work, found, _numbers_of(pool, row)):
        replica = found.replicas[number]
        if replica.is_whole():
            taken = _claim(work, found, number)
            if taken:
                spans += taken
                replicas += 1
                positions += [position for position, _ in replica.extents.values()]
    if not replicas:
        return []
    for word, slot, _, _ in spans:
        work.numbers.setdefault(word & 0xFFFF, []).append(slot)
    added = np.array(spans, np.uint32)
    if row > 0:
        _add_replicas(pool, row, added, replicas)
    else:
        work.digests.add(found.digest)
        place = (found.namespace_id, found.generation, found.epoch)
        work.news.setdefault(place, []).append((found, added, replicas))
    return positions


def _numbers_of(pool: Pool, row: int) -> set[int]:
    """The replicas that the table has of this row, if it is one."""
    if row <= 0:
        return set()
    words = pool.spans_of(np.array([row]))[1][:, 0]
    return set(((words >> 16) & 0xFF).tolist())


def _by_tier(work: _Adoption, found: Found, held: set[int]) -> list[int]:
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


def _keep_off(work: _Adoption, found: Found, adopted: list[int]) -> None:
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


def _claim(work: _Adoption, found: Found, replica: int) -> list[tuple[int, int, int, int]]:
    """Take the space of one replica's extents; nothing when some of it is a newer object's."""
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
                _displace(work, found, segment, offset, units) and segment.claim(offset, units)
            )
        ):
            for word, _, at, length in spans:
                work.pool.segments.by_id[word & 0xFFFF].give_space(at, length)
            return []
        work.claimed[segment.segment_id, offset] = units, found.size, found.checksum
        spans.append((segment.segment_id | replica << 16, int(slot["slot"]), offset, units))
    return spans


def _share(work: _Adoption, found: Found, segment: Segment, offset: int, units: int) -> bool:
    """Hold this extent with whoever has it, where that is another object of the same bytes."""
    content = found.size, found.checksum
    held = work.claimed.get((segment.segment_id, offset))
    if held is None:
        pool = work.pool
        starts, ends, rows, seqs = _known_in(work, segment)
        at = slice(*np.searchsorted(starts, [offset, offset + 1]).tolist())
        same = (ends[at] == offset + units) & (pool.seqs_of(rows[at]) == seqs[at])
        same &= (pool.state.take(rows[at]) & LIVE) != 0
        records = pool.records_of(rows[at])[same]
        held = (units, *records[0, :2].tolist()) if len(records) else None
    if held != (units, *content):
        return False
    segment.share(offset, units)
    return True


def _known_in(
    work: _Adoption, segment: Segment
) -> tuple[NDArray[np.int64], NDArray[np.int64], Rows, NDArray[np.uint64]]:
    """What the table had in a segment: starts, ends, rows, seqs, by start."""
    pool = work.pool
    known = work.older.get(segment.segment_id)
    if known is None:
        rows, spans = pool.rows_in_segment(segment.segment_id)
        order = np.argsort(spans[:, 2], kind="stable")
        rows, spans = rows[order], spans[order]
        starts = spans[:, 2].astype(np.int64)
        known = (starts, starts + spans[:, 3], rows, pool.seqs_of(rows))
        work.older[segment.segment_id] = known
    return known


def _displace(work: _Adoption, found: Found, segment: Segment, offset: int, units: int) -> bool:
    """Drop older objects that this version has overwritten. False if something there must stay."""
    pool = work.pool
    starts, ends, rows, seqs = _known_in(work, segment)
    part = slice(
        int(np.searchsorted(ends, offset, "right")), int(np.searchsorted(starts, offset + units))
    )
    rows, same = distinct(rows[part]), pool.seqs_of(rows[part]) == seqs[part]
    records = pool.records_of(rows)
    epochs = records[:, 3] & _EPOCH_MASK
    older = (epochs < found.epoch) | ((epochs == found.epoch) & (records[:, 2] < found.seq))
    free = (pool.lease_count.take(rows) == 0) & ((pool.state.take(rows) & LIVE) != 0)
    if not len(rows) or not same.all() or not (older & free).all():
        return False
    pool.unlink(rows, GoneReason.LOST)
    return True


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
