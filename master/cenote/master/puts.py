"""PutStart: which keys exist, which get space to write into, and why others don't."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import InvalidArgument
from cenote.api.rows import (
    EXTENT_STRUCT,
    PUT,
    PUT_STRUCT,
    UNIT_BYTES,
    PutStatus,
)

from .commands import PutStart, PutStartReply
from .eviction import make_rows
from .grants import Grant
from .lookups import check_digests, hits
from .namespaces import Namespace
from .placement import Wanted
from .placing import place
from .pool import Pool
from .sessions import Session
from .slot_growth import grow_slots
from .spans import SEGMENT_MASK, Spans

__all__ = ["put_start", "reply_key"]

_START = 0
_UNIT_SHIFT = np.uint64(UNIT_BYTES.bit_length() - 1)
_SIZE_MAX = 1 << 46
_EXISTS_ROW = PUT_STRUCT.pack(PutStatus.EXISTS, 0, 0, 0)
_GRANTED_ROW = PUT_STRUCT.pack(PutStatus.GRANTED, 1, 1, 0)
_NO_TAIL = np.zeros(1, np.uint16)
_NO_TAIL.flags.writeable = False


def reply_key(request_id: int, kind: int) -> int:
    return request_id << 1 | kind


def put_start(pool: Pool, command: PutStart, now_s: float) -> PutStartReply:
    """Decide about each key; grant space for those that are new."""
    session = pool.sessions.get(command.session_id)
    session.expires_s = now_s + pool.config.session_ttl_s
    if command.request_id:
        known = session.replies.get(command.request_id << 1)
        if known is not None:
            assert isinstance(known[0], PutStartReply)
            return known[0]
    namespace = pool.namespaces.check(command.namespace_id, command.generation)
    if pool.placement_dirty:
        pool.refresh_placement(now_s)
    n = len(command.digests)
    if n == 1 and command.replicas <= 1 and command.min_replicas <= 1 and not pool.nodes.suspects:
        reply = _put_start_one(pool, command, session, namespace, now_s)
        if reply is None:
            reply = _put_start_many(pool, command, session, namespace, now_s)
    else:
        _check(pool, command, session, n)
        reply = _put_start_many(pool, command, session, namespace, now_s)
    if command.request_id:
        size = len(reply.puts) + len(reply.extents) + 200
        config = pool.config
        session.remember(
            command.request_id << 1,
            reply,
            size,
            config.replies_per_session_max,
            config.reply_bytes_per_session_max,
        )
    return reply


def _check(pool: Pool, command: PutStart, session: Session, n: int) -> None:
    check_digests(command.digests)
    if len(command.sizes) != n:
        raise InvalidArgument(f"{len(command.sizes)} sizes for {n} keys")
    if command.tail_lengths is not None and len(command.tail_lengths) != n:
        raise InvalidArgument(f"{len(command.tail_lengths)} tail lengths for {n} keys")
    if command.min_replicas > max(1, command.replicas):
        raise InvalidArgument(
            f"min_replicas {command.min_replicas} is above replicas {command.replicas}"
        )
    if command.replicas > 16:
        raise InvalidArgument(f"{command.replicas} replicas are wanted, 16 are the most")
    if command.shard_count > 1:
        raise InvalidArgument(
            "objects in shards are not supported yet",
            remedy="put each shard under a key of its own",
        )


def _wanted(pool: Pool, command: PutStart, session: Session, now_s: float) -> Wanted:
    failed: frozenset[int] = frozenset()
    if command.avoid_node_ids is not None and len(command.avoid_node_ids):
        failed = frozenset(command.avoid_node_ids.tolist())
    suspects = frozenset(pool.nodes.suspected_by(session.boot_id, now_s))
    local_boot_id = session.boot_id if command.local_first else ""
    wanted = Wanted(command.tier or 1, local_boot_id, failed | suspects)
    if suspects and pool.placement.domains_for(wanted) < max(1, command.min_replicas):
        # Suspected is not failed: a busy host may suspect all of its nodes, and puts have to go on.
        wanted.avoid_node_ids = failed
    return wanted


# ---- one key --------------------------------------------------------------------------------


def _put_start_one(
    pool: Pool, command: PutStart, session: Session, namespace: Namespace, now_s: float
) -> PutStartReply | None:
    """The plain case: one key, one replica, room at hand. None = go the long way."""
    low, high = command.digests[0].tolist()
    row = pool.objects.lookup_one(low, high)
    if row > 0:
        if pool.record_of(row)[5] != namespace.incarnation or not pool.is_readable(row):
            return None
        pool.stamp_words[row] = pool.policy.take(1)
        pool.counters.put_keys += 1
        pool.counters.put_exists += 1
        return PutStartReply(_EXISTS_ROW, b"", 0, pool.view_version)
    if (
        command.local_first
        or command.avoid_node_ids is not None
        or len(command.sizes) != 1
        or len(session.grants) >= pool.config.session_grants_max
    ):
        return None
    size = int(command.sizes[0])
    tails = command.tail_lengths
    length = size + (int(tails[0]) if tails is not None else 0)
    units = (length + UNIT_BYTES - 1) // UNIT_BYTES
    placement = pool.placement
    if (
        not 0 < size < _SIZE_MAX
        or pool.placement_dirty
        or placement.stale
        or session.granted_units + units > pool.session_cap_units
        or pool.objects.used_rows + pool.grants.keys >= pool.config.objects_max
    ):
        return None
    entry = placement.first(command.tier or 1)
    if entry is None:
        return None
    segment = entry.segment
    taken = segment.take_one(units)
    if taken is None:
        return None
    offset, slot, units = taken
    placement.charge_first(entry, units)
    if segment.wants_slots():
        grow_slots(pool, segment)
    pool.counters.put_keys += 1
    pool.counters.put_granted += 1
    spans = np.array([(segment.segment_id, slot, offset, units)], np.uint32)
    grant = _grant(
        pool,
        command,
        session,
        namespace,
        None,
        command.digests,
        command.sizes,
        _NO_TAIL if tails is None else tails,
        spans,
        units,
    )
    extents = EXTENT_STRUCT.pack(segment.segment_id, slot, offset * UNIT_BYTES, length)
    return PutStartReply(_GRANTED_ROW, extents, grant.grant_id, pool.view_version)


# ---- batches --------------------------------------------------------------------------------


def _put_start_many(
    pool: Pool, command: PutStart, session: Session, namespace: Namespace, now_s: float
) -> PutStartReply:
    n = len(command.digests)
    _check(pool, command, session, n)
    counters = pool.counters
    counters.put_keys += n
    digests = command.digests
    puts = np.zeros(n, PUT)
    rows = pool.objects.lookup(digests)
    present = hits(pool, rows, namespace.incarnation)
    todo = np.flatnonzero(~present)
    if len(todo) < n:
        known = rows[present]
        pool.stamp[known] = pool.policy.fresh(len(known), command.chain)
        counters.put_exists += len(known)
    if not len(todo):
        return PutStartReply(puts.tobytes(), b"", 0, pool.view_version)
    lengths = command.sizes.astype(np.int64)
    status = np.zeros(n, np.uint8)
    bad = (command.sizes == 0) | (command.sizes >= np.uint64(_SIZE_MAX))
    if command.tail_lengths is not None:
        lengths += command.tail_lengths
    units = (lengths + (UNIT_BYTES - 1)) // UNIT_BYTES
    if bad.any():
        status[bad & ~present] = PutStatus.INVALID
        todo = np.flatnonzero(~present & ~bad)
    todo = _without_repeats(digests, todo, status)
    todo = _within_quota(pool, session, units, todo, status)
    todo = _within_table(pool, todo, status)
    if len(todo):
        placed = place(
            pool,
            units[todo],
            max(1, command.replicas),
            max(1, command.min_replicas),
            _wanted(pool, command, session, now_s),
        )
        status[todo] = placed.status
        todo = todo[placed.status == PutStatus.GRANTED]
    puts["status"] = status
    _count(pool, status, present, len(todo))
    if not len(todo):
        return PutStartReply(puts.tobytes(), b"", 0, pool.view_version)
    everything = len(todo) == n
    tails = command.tail_lengths if command.tail_lengths is not None else np.zeros(n, np.uint16)
    if everything:
        puts["replicas"] = 1 if placed.replicas is None else placed.replicas
        puts["extents"] = 1 if placed.counts is None else placed.counts
    else:
        puts["replicas"][todo] = 1 if placed.replicas is None else placed.replicas
        puts["extents"][todo] = 1 if placed.counts is None else placed.counts
    grant = _grant(
        pool,
        command,
        session,
        namespace,
        None if everything else todo,
        digests if everything else digests[todo],
        command.sizes if everything else command.sizes[todo],
        tails if everything else tails[todo],
        placed.spans,
        int(placed.spans[:, 3].sum(dtype=np.int64)),
        placed.counts,
        placed.replicas,
    )
    _grow_where_wanted(pool, placed.spans)
    extents = _grant_extents(placed.spans, lengths[todo], placed.counts, placed.replicas)
    return PutStartReply(puts.tobytes(), extents, grant.grant_id, pool.view_version)


def _without_repeats(
    digests: NDArray[np.uint64], todo: NDArray[np.int64], status: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """Positions whose key stands earlier in the batch get DUPLICATE_IN_BATCH."""
    if len(todo) < 2:
        return todo
    low = np.sort(digests[todo, 0])
    if not (low[1:] == low[:-1]).any():
        return todo
    seen: set[tuple[int, int]] = set()
    keep = []
    for at, (a, b) in zip(todo.tolist(), digests[todo].tolist(), strict=True):
        if (a, b) in seen:
            status[at] = PutStatus.DUPLICATE_IN_BATCH
        else:
            seen.add((a, b))
            keep.append(at)
    return np.array(keep, np.int64)


def _within_quota(
    pool: Pool,
    session: Session,
    units: NDArray[np.int64],
    todo: NDArray[np.int64],
    status: NDArray[np.uint8],
) -> NDArray[np.int64]:
    """What one session may have granted and undecided is bounded, in bytes and in grants."""
    room = pool.session_cap_units - session.granted_units
    if len(session.grants) >= pool.config.session_grants_max:
        room = 0
    wanted = np.cumsum(units[todo])
    if not len(wanted) or int(wanted[-1]) <= room:
        return todo
    # One object is always let through where nothing is granted: it is the allocator's to refuse.
    fits = wanted <= max(room, 0)
    if not session.granted_units:
        fits[0] = True
    status[todo[~fits]] = PutStatus.QUOTA_EXCEEDED
    return todo[fits]


def _within_table(
    pool: Pool, todo: NDArray[np.int64], status: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """Objects have rows: when the table is full, the coldest make room for new ones."""
    room = make_rows(pool, len(todo))
    if room < len(todo):
        status[todo[room:]] = PutStatus.NO_SPACE
        return todo[:room]
    return todo


def _count(pool: Pool, status: NDArray[np.uint8], present: NDArray[np.bool_], granted: int) -> None:
    counters = pool.counters
    counters.put_granted += granted
    refused = len(status) - granted - int(np.count_nonzero(present))
    if refused:
        no_space = int(np.count_nonzero(status == PutStatus.NO_SPACE))
        counters.put_no_space += no_space
        counters.put_refused += refused - no_space


def _grant(
    pool: Pool,
    command: PutStart,
    session: Session,
    namespace: Namespace,
    positions: NDArray[np.int64] | None,
    digests: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    tails: NDArray[np.uint16],
    spans: Spans,
    units: int,
    counts: NDArray[np.uint16] | None = None,
    replicas: NDArray[np.uint8] | None = None,
) -> Grant:
    grant = Grant(
        pool.grants.new_id(),
        session.session_id,
        namespace,
        len(command.digests),
        positions,
        digests,
        sizes,
        tails,
        pool.policy.fresh(len(digests), command.chain),
        counts,
        replicas,
        spans,
        max(command.durability, namespace.durability),
        command.ttl_ms / 1000,
        units,
        pool.segments.drops,
    )
    pool.grants.add(grant)
    session.grants[grant.grant_id] = grant
    session.granted_units += units
    return grant


def _grow_where_wanted(pool: Pool, spans: Spans) -> None:
    for segment_id in np.unique(spans[:, 0] & SEGMENT_MASK).tolist():
        segment = pool.segments.by_id[segment_id]
        if segment.wants_slots():
            grow_slots(pool, segment)


def _grant_extents(
    spans: Spans,
    lengths: NDArray[np.int64],
    counts: NDArray[np.uint16] | None,
    replicas: NDArray[np.uint8] | None,
) -> bytes:
    """EXTENT rows of a grant; per replica their lengths add up to payload and key tail."""
    out = np.empty((len(spans), 3), np.uint64)
    words = out.view(np.uint32).reshape(-1, 6)
    words[:, 0] = spans[:, 0] & SEGMENT_MASK
    words[:, 1] = spans[:, 1]
    out[:, 1] = spans[:, 2]
    out[:, 1] <<= _UNIT_SHIFT
    if counts is None:
        out[:, 2] = lengths
        return out.tobytes()
    out[:, 2] = spans[:, 3]
    out[:, 2] <<= _UNIT_SHIFT
    if replicas is not None and (counts == replicas).all():
        out[:, 2] = np.repeat(lengths, counts)
        return out.tobytes()
    # The last extent of each replica is cut to what is left for it.
    owner = np.repeat(np.arange(len(counts)), counts)
    replica = (spans[:, 0] >> 16) & 0xFF
    key = owner * 256 + replica
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    last = np.r_[first[1:], len(key)] - 1
    sums = np.add.reduceat(out[:, 2], first).astype(np.int64)
    out[last, 2] -= (sums - lengths[owner[first]]).astype(np.uint64)
    return out.tobytes()
