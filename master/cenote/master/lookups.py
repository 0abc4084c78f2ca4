"""Exists, acquire, release, touch: what readers ask.

Each has a scalar path for one key, where NumPy costs more than the work, and a batch path of a
fixed number of gathers. A row's incarnation must equal the request's: row 0 stands for "absent"
and belongs to no incarnation, so that one comparison decides about both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import EXTENT_STRUCT, OBJECT_STRUCT, UNIT_BYTES, ObjectStatus

from .commands import Acquire, AcquireReply, Digests, Exists, Piggyback, Release, Touch
from .leases import Lease
from .pool import RECORD_WORDS, Pool, Rows
from .sampling import note, note_one
from .segments import DRAM
from .sessions import Session
from .spans import SEGMENT_MASK, Spans
from .tenure import check_tenure
from .tier_reads import lease_hot, single_extents, told_of
from .tiers import is_tiered, note_cached_reads, note_chain, note_reuse

__all__ = [
    "acquire",
    "end_leases",
    "exists",
    "hits",
    "hold_key",
    "lease_ttl_s",
    "piggyback",
    "release",
    "touch",
]

_OWNER_STRIDE = RECORD_WORDS * 4
_LOW = np.uint64(0xFFFF_FFFF)
_SEGMENT = np.uint64(SEGMENT_MASK)
_REPLICA = np.uint64(0xFF_0000)
_REPLICA_SHIFT = np.uint64(16)
_UNIT_SHIFT = np.uint64(UNIT_BYTES.bit_length() - 1)
_COUNTS_MASK = np.uint64(0x00FF_FFFF_0000_0000)
"""Extents and replicas, in the last word of a record as in that of a reply's row."""
_ONE_EACH = np.uint64(1 << 32 | 1 << 48)
_ZERO, _ONE = np.uint64(0), np.uint32(1)
_NOTHING = bytes(OBJECT_STRUCT.size)
_PRESENT = np.ones(1, np.uint8)
_ABSENT = np.zeros(1, np.uint8)
_PRESENT.flags.writeable = _ABSENT.flags.writeable = False
_REPLICAS_ALL = 255


def exists(pool: Pool, command: Exists, now_s: float) -> NDArray[np.uint8]:
    """uint8[n]: 1 where present. No lease, no touch."""
    incarnation = pool.namespaces.check(command.namespace_id, command.generation).incarnation
    digests = command.digests
    n = len(digests)
    counters = pool.counters
    counters.exists_keys += n
    if n == 1:
        row = pool.objects.lookup_one(*digests[0].tolist())
        if row > 0 and pool.record_of(row)[5] == incarnation and pool.is_readable(row):
            counters.exists_hits += 1
            return _PRESENT
        return _ABSENT
    rows = pool.objects.lookup(digests)
    present = hits(pool, rows, incarnation)
    counters.exists_hits += int(np.count_nonzero(present))
    return present.view(np.uint8)


def hits(pool: Pool, rows: Rows, incarnation: int) -> NDArray[np.bool_]:
    """Which rows (-1: absent) are objects of this incarnation that can be read now."""
    # An absent key (-1) is clipped to row 0, which is of no incarnation.
    owners = pool.owner_flat.take(rows * _OWNER_STRIDE, mode="clip")
    found: NDArray[np.bool_] = owners == incarnation
    if not pool.segments.all_readable:
        at = np.flatnonzero(found)
        found[at] = pool.readable_rows(rows[at])
    return found


def acquire(pool: Pool, command: Acquire, now_s: float) -> AcquireReply:
    """Where objects are, and the promise that they stay there for a while."""
    session = pool.sessions.get(command.session_id)
    if not command.hold or not command.request_id:
        return _acquire(pool, command, session, now_s)
    # No time ends a hold: a retry must get the same one, and what was cancelled none.
    key = hold_key(command.request_id)
    known = session.replies.get(key)
    if known is not None:
        assert isinstance(known[0], AcquireReply)
        return known[0]
    session.begin(command.request_id)
    reply = _acquire(pool, command, session, now_s)
    size = len(reply.objects) + len(reply.extents) + 200
    config = pool.config
    session.remember(
        key, reply, size, config.replies_per_session_max, config.reply_bytes_per_session_max
    )
    return reply


def hold_key(request_id: int) -> int:
    """Of the reply to an Acquire with `hold`; those of puts are not negative."""
    return ~request_id


def _acquire(pool: Pool, command: Acquire, session: Session, now_s: float) -> AcquireReply:
    incarnation = pool.namespaces.check(command.namespace_id, command.generation).incarnation
    digests = command.digests
    n = len(digests)
    if now_s >= pool.tenure_end_s:
        _without_leases(pool, command, now_s)
    pool.counters.acquired_keys += n
    pool.namespaces.asked[incarnation] += n
    session.expires_s = now_s + pool.config.session_ttl_s
    if pool.placement_dirty:
        pool.refresh_placement(now_s)
    if n == 1:
        return _acquire_one(pool, command, session, incarnation, now_s)
    rows = pool.objects.lookup(digests)
    found = hits(pool, rows, incarnation)
    if command.chain and not found.all():
        found[int(found.argmin()) :] = False
    at = np.flatnonzero(found)
    rows = rows if len(at) == n else rows[at]
    out = np.zeros((n, 4), np.uint64)
    if not len(at):
        return AcquireReply(out.tobytes(), b"", 0, 0, pool.view_version)
    records = pool.records_of(rows)
    pool.counters.acquired_hits += len(rows)
    pool.namespaces.found[incarnation] += len(rows)
    pool.policy.touch(pool.stamp, rows, command.chain)
    if command.chain and pool.keeps_links:
        pool.objects.link_chain(rows)
    note(pool, digests if len(at) == n else digests[at], incarnation)
    pool.note_heat(rows)
    note_reuse(pool, rows)
    last = records[:, 4] & _COUNTS_MASK
    if pool.segments.has_ssd:
        last, extents, (status, lease_id, ttl_ms) = _tiered(
            pool, command, session, rows, records, now_s
        )
    else:
        status, lease_id, ttl_ms = _lease(pool, command, session, rows, records[:, 0], now_s)
        if (last == _ONE_EACH).all():
            extents = _single_extents(pool, rows, records[:, 0])
        else:
            last, extents = _several_extents(
                pool, command, session, pool.spans_of(rows), records, now_s
            )
    records[:, 3] = (records[:, 3] & _LOW) | last | (status << np.uint64(56))
    if len(at) == n:
        out = records[:, :4]
    else:
        out[at] = records[:, :4]
    return AcquireReply(out.tobytes(), extents, lease_id, ttl_ms, pool.view_version)


def _tiered(
    pool: Pool,
    command: Acquire,
    session: Session,
    rows: Rows,
    records: NDArray[np.uint64],
    now_s: float,
) -> tuple[NDArray[np.uint64], bytes, tuple[NDArray[np.uint64], int, int]]:
    """(extents and replicas of each as in a record, EXTENT rows, status of each with the lease)
    where there are SSDs."""
    avoids = command.avoid_node_ids is not None and len(command.avoid_node_ids) > 0
    everything = avoids or bool(pool.nodes.suspects) or not pool.segments.all_readable
    told = told_of(pool, rows, everything=everything)
    sizes = records[:, 0]
    leased = lease_hot(
        told, rows, sizes, lambda some, s: _lease(pool, command, session, some, s, now_s)
    )
    if len(told.spans) == len(rows):
        return np.full(len(rows), _ONE_EACH), single_extents(told.spans, sizes), leased
    spans = (told.counts, told.spans)
    last, extents = _several_extents(pool, command, session, spans, records, now_s)
    return last, extents, leased


def _single_extents(pool: Pool, rows: Rows, sizes: NDArray[np.uint64]) -> bytes:
    """EXTENT rows of objects with one extent and one replica."""
    pairs = pool.extent_pairs.take(rows, axis=0)
    extents = np.empty((len(rows), 3), np.uint64)
    first = pairs[:, 0]
    extents[:, 0] = (first & _SEGMENT) | (first & _REPLICA) << _REPLICA_SHIFT
    extents[:, 1] = (pairs[:, 1] & _LOW) << _UNIT_SHIFT
    extents[:, 2] = sizes
    return extents.tobytes()


def _acquire_one(
    pool: Pool, command: Acquire, session: Session, incarnation: int, now_s: float
) -> AcquireReply:
    low, high = command.digests[0].tolist()
    row = pool.objects.lookup_one(low, high)
    if row <= 0:
        return AcquireReply(_NOTHING, b"", 0, 0, pool.view_version)
    size, checksum, seq, epoch, _, owner, _, extent_count, replica_count, _ = pool.record_of(row)
    if owner != incarnation or not pool.is_readable(row):
        return AcquireReply(_NOTHING, b"", 0, 0, pool.view_version)
    pool.counters.acquired_hits += 1
    pool.namespaces.found[incarnation] += 1
    pool.policy.touch_one(pool.stamp_words, row)
    if not low & pool.sample_mask:
        note_one(pool, low, incarnation)
    heat = pool.heat
    heat.left -= 1
    if not heat.left:
        heat.note_one(row, seq)
    if pool.segments.has_ssd and is_tiered(pool, row, extent_count):
        return _acquire_tiered(pool, command, session, row, now_s)
    status = lease_id = ttl_ms = 0
    if not command.lease:
        status = ObjectStatus.UNLEASED
    elif (
        command.hold
        or pool.leased_bytes + size > pool.lease_cap_bytes
        or not pool.segments.all_verified
    ):
        sizes = np.array([size], np.uint64)
        given, lease_id, ttl_ms = _lease(pool, command, session, np.array([row]), sizes, now_s)
        status = int(given[0])
    else:
        status = 1
        ttl_s = lease_ttl_s(pool, command.ttl_ms, now_s)
        ttl_ms = int(ttl_s * 1000)
        count = pool.lease_words[row]
        pool.lease_words[row] = count + 1
        if not count:
            pool.leased_bytes += size
        lease_id = _give(pool, session, row, now_s + ttl_s)
    if extent_count == 1:
        segment, replica, _, _, offset, _ = pool.extent_of(row)
        extents = EXTENT_STRUCT.pack(segment, replica, offset * UNIT_BYTES, size)
    else:
        rows = np.array([row])
        last, extents = _several_extents(
            pool, command, session, pool.spans_of(rows), pool.records_of(rows), now_s
        )
        extent_count, replica_count = int(last[0]) >> 32 & 0xFFFF, int(last[0]) >> 48
    objects = OBJECT_STRUCT.pack(size, checksum, seq, epoch, extent_count, replica_count, status)
    return AcquireReply(objects, extents, lease_id, ttl_ms, pool.view_version)


def _acquire_tiered(
    pool: Pool, command: Acquire, session: Session, row: int, now_s: float
) -> AcquireReply:
    """One that is on an SSD, or in several pieces where there are SSDs."""
    rows = np.array([row])
    records = pool.records_of(rows)
    last, extents, leased = _tiered(pool, command, session, rows, records, now_s)
    status, lease_id, ttl_ms = leased
    records[:, 3] = (records[:, 3] & _LOW) | last | (status << np.uint64(56))
    objects = records[:, :4].tobytes()
    return AcquireReply(objects, extents, lease_id, ttl_ms, pool.view_version)


def _without_leases(pool: Pool, command: Acquire, now_s: float) -> None:
    """Another master may lead: locations are told, which readers prove by checksum."""
    if command.hold:
        check_tenure(pool, now_s)
    command.lease = False


# ---- leases ---------------------------------------------------------------------------------


def lease_ttl_s(pool: Pool, ttl_ms: int, now_s: float) -> float:
    """No lease outlives the tenure."""
    config = pool.config
    ttl_s = min(ttl_ms / 1000, config.lease_ttl_max_s) if ttl_ms else config.lease_ttl_default_s
    return min(ttl_s, pool.tenure_end_s - now_s)


def _give(pool: Pool, session: Session, rows: int | Rows, deadline_s: float) -> int:
    lease = pool.leases.give(rows, deadline_s, session.session_id)
    session.leases.add(lease)
    pool.counters.leases_given += 1
    return lease.lease_id


def _lease(
    pool: Pool,
    command: Acquire,
    session: Session,
    rows: Rows,
    sizes: NDArray[np.uint64],
    now_s: float,
) -> tuple[NDArray[np.uint64], int, int]:
    """(status of each row, lease id, its ttl in ms): what of a batch may be leased, is."""
    n = len(rows)
    if not command.lease:
        return np.full(n, ObjectStatus.UNLEASED, np.uint64), 0, 0
    if not pool.segments.all_verified:
        proven = pool.verified_rows(rows)
        if not proven.all():
            status = np.full(n, ObjectStatus.UNLEASED, np.uint64)
            lease_id = ttl_ms = 0
            if proven.any():
                some = rows[proven], sizes[proven]
                status[proven], lease_id, ttl_ms = _lease_proven(
                    pool, command, session, *some, now_s
                )
            return status, lease_id, ttl_ms
    return _lease_proven(pool, command, session, rows, sizes, now_s)


def _lease_proven(
    pool: Pool,
    command: Acquire,
    session: Session,
    rows: Rows,
    sizes: NDArray[np.uint64],
    now_s: float,
) -> tuple[NDArray[np.uint64], int, int]:
    """`_lease` for rows of which a lease proves all replicas."""
    n = len(rows)
    inverse = None
    if n > 1 and _has_repeats(rows):
        rows, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
        sizes = sizes[first]
    status = np.full(len(rows), ObjectStatus.LEASED, np.uint64)
    counts = pool.lease_count.take(rows)
    # Only what is not leased yet adds to the leased bytes.
    adds = np.where(counts == 0, sizes, _ZERO)
    wanted = int(adds.sum())
    if pool.leased_bytes + wanted > pool.lease_cap_bytes:
        room = max(0, pool.lease_cap_bytes - pool.leased_bytes)
        fits = (adds == 0) | (np.cumsum(adds) <= np.uint64(room))
        status[~fits] = ObjectStatus.UNLEASED
        rows, counts, wanted = rows[fits], counts[fits], int(adds[fits].sum())
    if inverse is not None:
        status = status[inverse]
    lease_id, ttl_s = 0, 0.0
    if len(rows):
        pool.lease_count[rows] = counts + _ONE
        pool.leased_bytes += wanted
        ttl_s = 0.0 if command.hold else lease_ttl_s(pool, command.ttl_ms, now_s)
        lease_id = _give(pool, session, rows, now_s + ttl_s if ttl_s else float("inf"))
    if len(rows) < n:
        unleased = int(np.count_nonzero(status == ObjectStatus.UNLEASED))
        pool.counters.unleased_hits += unleased
    return status, lease_id, int(ttl_s * 1000)


def _has_repeats(rows: Rows) -> bool:
    ordered = np.sort(rows)
    return bool((ordered[1:] == ordered[:-1]).any())


def end_leases(pool: Pool, lease_ids: NDArray[np.uint64]) -> None:
    """Leases are not needed any more; unknown ones are ignored."""
    pop = pool.leases.by_id.pop
    for lease_id in lease_ids.tolist():
        lease: Lease | None = pop(lease_id, None)
        if lease is not None:
            pool.end_lease(lease)


# ---- replicas and stripes -------------------------------------------------------------------


def _several_extents(
    pool: Pool,
    command: Acquire,
    session: Session,
    found: tuple[NDArray[np.int64], Spans],
    records: NDArray[np.uint64],
    now_s: float,
) -> tuple[NDArray[np.uint64], bytes]:
    """(extents and replicas of each object as in its record, packed EXTENT rows): readable ones,
    best first. `found`: how many extents each has, and all of them.

    Same host first, then other nodes, then SSDs; nodes that this host suspects or the caller avoids
    last.
    """
    rank = _ranks(pool, command, session, now_s)
    # Of equally good replicas not everybody is told the same one first.
    turn = session.session_id[0] if session.session_id else 0
    counts, spans = found
    sizes = records[:, 0].tolist()
    replicas_max = command.replicas_max or _REPLICAS_ALL
    out: list[bytes] = []
    out_counts = np.zeros(len(counts), np.uint64)
    out_replicas = np.zeros(len(counts), np.uint64)
    at = 0
    flat = spans.tolist()
    for i, count in enumerate(counts.tolist()):
        pieces = flat[at : at + count]
        at += count
        by_replica: dict[int, list[list[int]]] = {}
        for piece in pieces:
            by_replica.setdefault((piece[0] >> 16) & 0xFF, []).append(piece)
        many = len(by_replica)
        order = sorted(
            (max(rank.get(piece[0] & SEGMENT_MASK, 9) for piece in part), (at_ + turn) % many, n)
            for at_, (n, part) in enumerate(by_replica.items())
        )
        for place, (badness, _, number) in enumerate(order[:replicas_max]):
            if badness >= 9 and place:
                break
            left = sizes[i]
            for word, _, offset, length in by_replica[number]:
                if not left:
                    break  # only the key's tail lies in the rest
                size = min(left, length * UNIT_BYTES)
                left -= size
                out.append(
                    EXTENT_STRUCT.pack(word & SEGMENT_MASK, number, offset * UNIT_BYTES, size)
                )
                out_counts[i] += 1
            out_replicas[i] += 1
    return out_counts << np.uint64(32) | out_replicas << np.uint64(48), b"".join(out)


def _ranks(pool: Pool, command: Acquire, session: Session, now_s: float) -> dict[int, int]:
    """How good each segment is for this reader: 0 same host .. 5 suspect; 9 when unreadable."""
    suspects = pool.nodes.suspected_by(session.boot_id, now_s)
    if command.avoid_node_ids is not None:
        suspects |= set(command.avoid_node_ids.tolist())
    ranks = {}
    for segment_id, segment in pool.segments.by_id.items():
        node = segment.node
        if not node.is_readable:
            ranks[segment_id] = 9
        elif node.node_id in suspects:
            ranks[segment_id] = 4 if segment.tier == DRAM else 5
        else:
            ranks[segment_id] = 0 if node.boot_id == session.boot_id and node.boot_id else 1
            ranks[segment_id] += 0 if segment.tier == DRAM else 2
    return ranks


# ---- touches --------------------------------------------------------------------------------


def touch_digests(pool: Pool, incarnation: int, digests: Digests, chain: bool) -> None:
    rows = pool.objects.lookup(digests)
    found = hits(pool, rows, incarnation)
    rows = rows[found]
    if len(rows):
        note(pool, digests[found], incarnation)
        pool.policy.touch(pool.stamp, rows, chain)
        if chain and pool.keeps_links:
            pool.objects.link_chain(rows)
        pool.note_heat(rows)
        pool.counters.touched_keys += len(rows)
        note_cached_reads(pool, rows)


def _order_chain(pool: Pool, incarnation: int, digests: Digests) -> None:
    """One chain, root first, of which some was put just now. Not a use."""
    rows = pool.objects.lookup(digests)
    found = hits(pool, rows, incarnation)
    pool.policy.order(pool.stamp, rows[found])
    end = len(found) if found.all() else int(found.argmin())
    note_chain(pool, rows[:end])
    if pool.keeps_links:
        pool.objects.link_chain(rows[:end])


def touch(pool: Pool, command: Touch, now_s: float) -> None:
    """Objects were read from cached locations."""
    incarnation = pool.namespaces.check(command.namespace_id, command.generation).incarnation
    touch_digests(pool, incarnation, command.digests, command.chain)


def release(pool: Pool, command: Release, now_s: float) -> None:
    """Leases are not needed any more."""
    end_leases(pool, command.lease_ids)


def piggyback(pool: Pool, news: Piggyback, now_s: float) -> None:
    """Released leases and touched keys; touches of a namespace that moved on are ignored."""
    if len(news.released_lease_ids):
        end_leases(pool, news.released_lease_ids)
    if not len(news.touched) and not len(news.touched_chain) and not len(news.chained):
        return
    namespace = pool.namespaces.by_id.get(news.namespace_id)
    if namespace is None or namespace.generation != news.generation:
        return
    if len(news.touched):
        touch_digests(pool, namespace.incarnation, news.touched, False)
    if len(news.touched_chain):
        touch_digests(pool, namespace.incarnation, news.touched_chain, True)
    if len(news.chained):
        _order_chain(pool, namespace.incarnation, news.chained)
