"""Spare extents: space granted ahead of need, so that a small put is one request less.

A writer that puts one small object after the other asks for spare extents with one of its
PutStarts. They are a grant like any other (of its session, its epoch, fenced in the same way) whose
entries belong to no key yet. PutCommit names the keys of those that were written meanwhile: whether
a key exists is found out then, instead of before the payload moved.

Spares are never worth an eviction: what is given is a small part of what lies free.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import InvalidArgument
from cenote.api.rows import UNIT_BYTES

from .commands import CommitSpare, Digests, PutCommit, PutCommitReply, PutStart, SpareNames
from .commits import DECIDED, ONE_COUNT, ONE_REPLICA, commit_many, end_grant
from .effects import PLACED, Stored
from .grants import Grant
from .namespaces import Namespace
from .object_columns import UNSEALED
from .pool import Pool
from .sampling import note, note_one
from .sealing import note_decided
from .sessions import Session
from .slot_growth import grow_slots
from .spans import extent_rows, to_placed

__all__ = ["commit_one_spare", "commit_spares", "grant_spares"]

SPARE_BYTES_MAX: Final = 256 << 10
"""Of one extent: with larger objects a request less is nothing that anybody would notice."""
SPARES_MAX: Final = 4096
"""In one grant."""
_UNIT: Final = np.uint64(UNIT_BYTES - 1)
_UNIT_SHIFT: Final = np.uint64(UNIT_BYTES.bit_length() - 1)
_WORDS: Final = Struct("<QQ")
_COLUMNS: Final = Struct("<QQQH2xIIIIB3x")


def grant_spares(
    pool: Pool, command: PutStart, session: Session, namespace: Namespace, now_s: float
) -> tuple[int, bytes]:
    """(grant id, packed EXTENT rows) of what there is to spare for the session; (0, b"") if none.

    All of them lie in the segment whose turn it is.
    """
    nothing = 0, b""
    placement = pool.placement
    if (
        not 0 < command.spare_bytes <= SPARE_BYTES_MAX
        or len(session.grants) >= pool.config.session_grants_max
    ):
        return nothing
    if pool.placement_dirty:  # the put itself had a slot table grow, or the like
        pool.refresh_placement(now_s)
    elif placement.stale:
        placement.redeal()
    entry = None if pool.nodes.suspects else placement.first(command.tier or 1)
    if entry is None:
        return nothing
    segment, config = entry.segment, pool.config
    units = -(-command.spare_bytes // UNIT_BYTES)
    taken_units = -(-units // segment.align_units) * segment.align_units
    room = min(
        int(segment.free_units * config.spares_free_share_max),
        int(placement.smallest_units * config.spares_share_max),
        (pool.session_cap_units - session.granted_units) // 2,
    )
    rows = config.objects_max - pool.objects.used_rows - pool.grants.keys
    count = min(
        command.spare_count,
        SPARES_MAX,
        room // taken_units,
        segment.slots.free // 2,
        rows // 2,
    )
    if count < 1:
        return nothing
    taken = segment.take_run(np.full(count, units, np.int64))
    if taken is None:
        return nothing
    spans = np.empty((count, 4), np.uint32)
    spans[:, 0] = segment.segment_id
    spans[:, 1], spans[:, 2], spans[:, 3] = taken[1], taken[0], taken[2]
    total = int(taken[2].sum())
    placement.charge_first(entry, total)
    if segment.wants_slots():
        grow_slots(pool, segment)
    grant = Grant(
        pool.grants.new_id(),
        session.session_id,
        namespace,
        count,
        None,
        np.zeros((count, 2), np.uint64),
        np.zeros(count, np.uint64),
        np.zeros(count, np.uint16),
        np.zeros(count, np.uint64),
        None,
        None,
        spans,
        namespace.durability,
        0.0,
        total,
        pool.segments.drops,
        -1,
        spare_units=units,
    )
    pool.register_grant(session, grant)
    lengths = np.full(count, command.spare_bytes, np.int64)
    return grant.grant_id, extent_rows(spans, lengths, None, None)


def commit_spares(
    pool: Pool, command: PutCommit, session: Session, grant: Grant, now_s: float
) -> PutCommitReply:
    """Decide what was written to spare extents. Raises InvalidArgument, having changed nothing."""
    names, indexes = command.names, command.indexes
    assert names is not None
    namespace = pool.namespaces.check(names.namespace_id, names.generation)
    _check(names, indexes, grant, namespace)
    assert indexes is not None
    reply = _commit_run(pool, command, session, grant, names)
    if reply is not None:
        return reply
    entries = grant.entries_at(indexes)
    known = entries >= 0
    _name(pool, grant, entries[known], names, known)
    if not _has_repeats(names.digests):
        return commit_many(pool, command, session, grant, now_s)
    # A key that stands earlier in the batch exists by the time it comes again.
    first = pool.last_seq + 1
    statuses = b""
    for i in range(len(indexes)):
        one = PutCommit(
            command.session_id, command.request_id, grant.grant_id, indexes[i : i + 1],
            command.checksums[i : i + 1], command.failed_replicas,
        )  # fmt: skip
        pool.last_seq = first + i - 1
        statuses += commit_many(
            pool, one, session, session.grants.get(grant.grant_id), now_s
        ).statuses
    pool.last_seq = first + len(indexes) - 1
    return PutCommitReply(statuses, pool.epoch, first, grant.durability)


def _check(
    names: SpareNames, indexes: NDArray[np.uint32] | None, grant: Grant, namespace: Namespace
) -> None:
    if not grant.spare_units:
        raise InvalidArgument("names go with a grant of spare extents; this one's keys are known")
    if indexes is None or len(indexes) != len(names.digests):
        raise InvalidArgument("a commit of spare extents says which: one index for each name")
    if namespace is not grant.namespace:
        raise InvalidArgument("these spare extents were granted for another namespace")
    sizes, tails = names.sizes, names.tail_lengths
    if len(sizes) == 1:
        size = int(sizes[0])
        lengths = size + (0 if tails is None else int(tails[0]))
        fits = size > 0 and -(-lengths // UNIT_BYTES) == grant.spare_units
    else:
        both = sizes if tails is None else sizes + tails
        units = (both + _UNIT) >> _UNIT_SHIFT
        fits = not np.count_nonzero(units != grant.spare_units) and bool(sizes.min() > 0)
    if not fits:
        raise InvalidArgument(
            f"an object does not fit its spare extent of {grant.spare_units * UNIT_BYTES} bytes",
            remedy="ask for extents of its size",
        )


def _has_repeats(digests: Digests) -> bool:
    low = np.sort(digests[:, 0])
    return bool(np.count_nonzero(low[1:] == low[:-1]))


def _name(
    pool: Pool,
    grant: Grant,
    entries: NDArray[np.int64],
    names: SpareNames,
    known: NDArray[np.bool_],
) -> None:
    """Make entries what they would be, had they been granted under their keys."""
    grant.digests[entries] = names.digests[known]
    grant.sizes[entries] = names.sizes[known]
    grant.tails[entries] = 0 if names.tail_lengths is None else names.tail_lengths[known]
    grant.stamps[entries] = pool.policy.admit(grant.digests[entries], names.chain)
    note(pool, grant.digests[entries], grant.namespace.incarnation)


def commit_one_spare(
    pool: Pool, command: CommitSpare, session: Session, grant: Grant
) -> PutCommitReply | None:
    """The plain case of one object: its key is free, its extent is there and fits. None = go the
    long way."""
    at = command.position
    low, high = _WORDS.unpack(command.digest)
    size, tail = command.size, command.tail
    namespace = grant.namespace
    if (
        not grant.spare_units
        or at >= grant.batch
        or (grant.pending is not None and not grant.pending[at])
        or grant.drops != pool.segments.drops
        or namespace.namespace_id != command.namespace_id
        or namespace.generation != command.generation
        or namespace is not pool.namespaces.by_id.get(namespace.namespace_id)
        or size <= 0
        or -(-(size + tail) // UNIT_BYTES) != grant.spare_units
        or pool.objects.lookup_one(low, high) > 0
    ):
        return None
    word, slot, offset, units = grant.spans[at].tolist()
    seq = pool.last_seq + 1
    row = pool.objects.insert_one(
        low,
        high,
        size_bytes=size,
        checksum=command.checksum,
        seq=seq,
        epoch=pool.epoch,
        namespace=namespace.incarnation,
        stamp=pool.policy.admit_one(low),
        segment=word & 0xFFFF,
        slot=slot,
        offset_units=offset,
        length_units=units,
        tail_bytes=tail,
        flags=UNSEALED,
    )
    note_decided(session, command.request_id, row, seq)
    if not low & pool.sample_mask:
        note_one(pool, low, namespace.incarnation)
    pool.last_seq = seq
    pool.links += 1
    namespaces = pool.namespaces
    namespaces.objects[namespace.incarnation] += 1
    namespaces.units[namespace.incarnation] += units
    pool.counters.committed += 1
    pool.counters.committed_bytes += size
    columns = _COLUMNS.pack(
        size, command.checksum, seq, tail, word & 0xFFFF, slot, offset, units, 0
    )
    pool.effects.append(
        Stored(
            namespace.namespace_id,
            namespace.generation,
            pool.epoch,
            np.frombuffer(command.digest, np.uint64).reshape(1, 2),
            np.frombuffer(columns, np.uint64, 1, 0),
            np.frombuffer(columns, np.uint64, 1, 8),
            np.frombuffer(columns, np.uint64, 1, 16),
            np.frombuffer(columns, np.uint16, 1, 24),
            ONE_COUNT,
            ONE_REPLICA,
            np.frombuffer(columns, PLACED, 1, 28),
        )
    )
    pool.settle_one(session, grant, at, units)
    if not grant.units:
        end_grant(pool, session, grant)
    return PutCommitReply(DECIDED, pool.epoch, seq, grant.durability)


def _commit_run(
    pool: Pool, command: PutCommit, session: Session, grant: Grant, names: SpareNames
) -> PutCommitReply | None:
    """Neighbours, all pending, all under keys that are free. None = go the long way."""
    indexes = command.indexes
    assert indexes is not None
    n = len(indexes)
    first = int(indexes[0])
    if (
        first + n > grant.batch
        or indexes.tobytes() != np.arange(first, first + n, dtype=np.uint32).tobytes()
        or (grant.pending is not None and np.count_nonzero(grant.pending[first : first + n]) != n)
        or command.failed_replicas is not None
        or grant.drops != pool.segments.drops
        or _has_repeats(names.digests)
    ):
        return None
    vacancies = pool.objects.vacancies(names.digests)
    if vacancies is None and int(pool.objects.lookup(names.digests).max()) >= 0:
        return None
    spans = grant.spans[first : first + n]
    units = n * int(spans[0, 3])
    seq = pool.last_seq + 1
    effect = Stored(
        grant.namespace.namespace_id,
        grant.namespace.generation,
        pool.epoch,
        names.digests,
        names.sizes,
        command.checksums,
        np.arange(seq, seq + n, dtype=np.uint64),
        np.zeros(n, np.uint16) if names.tail_lengths is None else names.tail_lengths,
        np.ones(n, np.uint16),
        np.ones(n, np.uint8),
        to_placed(spans),
    )
    stamps = pool.policy.admit(names.digests, names.chain)
    rows = pool.link(grant.namespace, effect, stamps, spans, units, vacancies, flags=UNSEALED)
    note_decided(session, command.request_id, rows, effect.seqs)
    if names.chain and pool.keeps_links:
        pool.objects.link_chain(rows)
    note(pool, names.digests, grant.namespace.incarnation)
    pool.last_seq += n
    pool.counters.committed += n
    pool.counters.committed_bytes += int(names.sizes.sum())
    pool.effects.append(effect)
    pool.settle_grant(session, grant, np.arange(first, first + n), units)
    if not grant.units:
        end_grant(pool, session, grant)
    return PutCommitReply(DECIDED * n, pool.epoch, seq, grant.durability)
