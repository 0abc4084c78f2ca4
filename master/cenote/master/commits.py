"""PutCommit and PutAbort: the decision, and how a grant ends.

First commit wins. A decision is a version (epoch, seq): the key at position i of the request gets
seq_first + i. Extents of losers and of aborted entries are free at once, since their writer says by
this very call that it is done with them; where it can't say so (`unfenced`) they are quarantined.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import InvalidArgument
from cenote.api.rows import CommitStatus

from .commands import PutAbort, PutCommit, PutCommitReply
from .damage import drop_unsealed
from .effects import PLACED, Digested, GoneReason, Stored
from .grants import Grant
from .lifetimes import note_lifetimes
from .lookups import hits
from .object_columns import UNSEALED
from .pool import Pool, Rows
from .sealing import note_decided, unsealed_rows
from .sessions import Session
from .spans import Spans, by_segment, distinct, segments_of, to_placed, units_of
from .tiers import note_chain

__all__ = [
    "DECIDED",
    "ONE_COUNT",
    "ONE_REPLICA",
    "commit_grant",
    "commit_many",
    "end_grant",
    "put_abort",
    "quarantine",
]

_PLACED = Struct("<IIIIB3x")
DECIDED = bytes((CommitStatus.DECIDED,))
_TO_UNSEALED = np.uint8(CommitStatus.UNSEALED_SAME - CommitStatus.EXISTS_SAME)
ONE_COUNT = np.ones(1, np.uint16)
ONE_REPLICA = np.ones(1, np.uint8)
ONE_COUNT.flags.writeable = ONE_REPLICA.flags.writeable = False


def commit_grant(
    pool: Pool, command: PutCommit, session: Session, grant: Grant | None, now_s: float
) -> PutCommitReply:
    """Decide granted keys, in order."""
    reply = None
    if grant is not None:
        plain = _commit_one if len(grant) == 1 and len(command.checksums) == 1 else _commit_whole
        reply = plain(pool, command, session, grant, now_s)
    return commit_many(pool, command, session, grant, now_s) if reply is None else reply


def _commit_one(
    pool: Pool, command: PutCommit, session: Session, grant: Grant, now_s: float
) -> PutCommitReply | None:
    """The plain case: a grant of one extent, its key still free. None = go the long way."""
    spans, namespace = grant.spans, grant.namespace
    low, high = grant.digests[0].tolist()
    if (
        len(spans) != 1
        or grant.pending is not None
        or (command.indexes is not None and (len(command.indexes) != 1 or grant.batch != 1))
        or (command.indexes is not None and command.indexes[0] != 0)
        or grant.ttl_s
        or grant.contents is not None
        or grant.drops != pool.segments.drops
        or command.failed_replicas is not None
        or namespace is not pool.namespaces.by_id.get(namespace.namespace_id)
        or (grant.links != pool.links and pool.objects.lookup_one(low, high) > 0)
    ):
        return None
    word, slot, offset, units = spans[0].tolist()
    seq = pool.last_seq + 1
    size = int(grant.sizes[0])
    checksums = command.checksums
    row = pool.objects.insert_one(
        low,
        high,
        size_bytes=size,
        checksum=int(checksums[0]),
        seq=seq,
        epoch=pool.epoch,
        namespace=namespace.incarnation,
        stamp=int(grant.stamps[0]),
        segment=word & 0xFFFF,
        slot=slot,
        offset_units=offset,
        length_units=units,
        tail_bytes=int(grant.tails[0]),
        flags=UNSEALED,
    )
    note_decided(session, command.request_id, row, seq)
    pool.last_seq = seq
    pool.links += 1
    namespaces = pool.namespaces
    namespaces.objects[namespace.incarnation] += 1
    namespaces.units[namespace.incarnation] += units
    counters = pool.counters
    counters.committed += 1
    counters.committed_bytes += size
    pool.effects.append(
        Stored(
            namespace.namespace_id,
            namespace.generation,
            pool.epoch,
            grant.digests,
            grant.sizes,
            checksums,
            np.array((seq,), np.uint64),
            grant.tails,
            ONE_COUNT,
            ONE_REPLICA,
            np.frombuffer(_PLACED.pack(word & 0xFFFF, slot, offset, units, 0), PLACED),
        )
    )
    end_grant(pool, session, grant)
    return PutCommitReply(DECIDED, pool.epoch, seq, grant.durability)


def _commit_whole(
    pool: Pool, command: PutCommit, session: Session, grant: Grant, now_s: float
) -> PutCommitReply | None:
    """All of a grant at once, and all its keys are still free. None = go the long way."""
    namespace = grant.namespace
    n = len(grant)
    if (
        command.indexes is not None
        or grant.pending is not None
        or len(command.checksums) != n
        or grant.contents is not None
        or command.failed_replicas is not None
        or grant.drops != pool.segments.drops
        or namespace is not pool.namespaces.by_id.get(namespace.namespace_id)
    ):
        return None
    vacancies = pool.objects.vacancies(grant.digests)
    if (
        vacancies is None
        and grant.links != pool.links
        and int(pool.objects.lookup(grant.digests).max()) >= 0
    ):
        return None
    first = pool.last_seq + 1
    seqs = np.arange(first, first + n, dtype=np.uint64)
    effect = Stored(
        namespace.namespace_id,
        namespace.generation,
        pool.epoch,
        grant.digests,
        grant.sizes,
        command.checksums,
        seqs,
        grant.tails,
        np.ones(n, np.uint16) if grant.counts is None else grant.counts,
        np.ones(n, np.uint8) if grant.replicas is None else grant.replicas,
        to_placed(grant.spans),
    )
    rows = pool.link(
        namespace, effect, grant.stamps, grant.spans, grant.units, vacancies, flags=UNSEALED
    )
    note_decided(session, command.request_id, rows, seqs)
    if grant.chain:
        note_chain(pool, rows)
        if pool.keeps_links:
            pool.objects.link_chain(rows, grant.positions)
    pool.last_seq += n
    _note_decided(pool, grant, effect, now_s)
    end_grant(pool, session, grant)
    return PutCommitReply(DECIDED * n, pool.epoch, first, grant.durability)


def _note_decided(pool: Pool, grant: Grant, effect: Stored, now_s: float) -> None:
    pool.counters.committed += len(effect.digests)
    pool.counters.committed_bytes += int(effect.sizes.sum())
    pool.effects.append(effect)
    if grant.ttl_s:
        note_lifetimes(pool, effect, grant.ttl_s, now_s)


def commit_many(
    pool: Pool, command: PutCommit, session: Session, grant: Grant | None, now_s: float
) -> PutCommitReply:
    """`commit_grant` for whatever may have become of the keys and extents since."""
    indexes, checksums = command.indexes, command.checksums
    n = len(checksums)
    if indexes is not None and len(indexes) != n:
        raise InvalidArgument(f"{len(indexes)} positions, but {n} checksums")
    first = pool.last_seq + 1
    if grant is None:
        pool.counters.commit_not_granted += n
        return PutCommitReply(bytes([CommitStatus.NOT_GRANTED]) * n, pool.epoch, first, 0)
    if indexes is not None:
        entries = grant.entries_at(indexes)
    else:
        entries = grant.all_entries()
        if len(entries) != n:
            raise InvalidArgument(f"{n} checksums for {len(entries)} granted keys")
    namespace = grant.namespace
    if namespace is not pool.namespaces.by_id.get(namespace.namespace_id):
        # Reset since: nothing of the old generation is stored any more.
        everything = grant.all_entries()
        give_up(pool, session, grant, everything, free=True, failed=command.failed_replicas)
        end_grant(pool, session, grant)
        pool.counters.commit_not_granted += n
        return PutCommitReply(bytes([CommitStatus.NOT_GRANTED]) * n, pool.epoch, first, 0)
    status = np.full(n, CommitStatus.DECIDED, np.uint8)
    at = np.arange(n)
    if (entries < 0).any():
        status[entries < 0] = CommitStatus.NOT_GRANTED
        pool.counters.commit_not_granted += int(np.count_nonzero(entries < 0))
        at = np.flatnonzero(entries >= 0)
        entries = entries[at]
    if len(entries):
        at, entries = _resolve_conflicts(pool, session, grant, at, entries, command, status)
    if len(entries):
        parts, whole = _parts(pool, session, grant, entries, command.failed_replicas)
        if not whole.all():
            status[at[~whole]] = CommitStatus.NOT_GRANTED
            pool.counters.commit_not_granted += int(np.count_nonzero(~whole))
            at = at[whole]
        seqs = (first + at).astype(np.uint64)
        _decide(pool, session, grant, parts, checksums[at], seqs, command.request_id, now_s)
        pool.last_seq += n
    if not grant.pending_count:
        end_grant(pool, session, grant)
    return PutCommitReply(status.tobytes(), pool.epoch, first, grant.durability)


def _resolve_conflicts(
    pool: Pool,
    session: Session,
    grant: Grant,
    at: Rows,
    entries: Rows,
    command: PutCommit,
    status: NDArray[np.uint8],
) -> tuple[Rows, Rows]:
    """Keys that another writer committed first keep their object; returns what is left to decide.

    An object that can't be read (all its nodes are dead), or of a dead generation, gives way.
    """
    rows = pool.objects.lookup(grant.digests[entries])
    if not (rows >= 0).any():
        return at, entries
    taken = hits(pool, rows, grant.namespace.incarnation)
    hidden = rows[(rows >= 0) & ~taken]
    if len(hidden):
        pool.unlink(hidden, GoneReason.LOST)
    if not taken.any():
        return at, entries
    lost = entries[taken]
    there = pool.records_of(rows[taken])
    same = (there[:, 0] == grant.sizes[lost]) & (there[:, 1] == command.checksums[at[taken]])
    status[at[taken]] = np.where(same, CommitStatus.EXISTS_SAME, CommitStatus.EXISTS_DIFFERENT)
    status[at[taken][unsealed_rows(pool, rows[taken])]] += _TO_UNSEALED
    if not pool.segments.all_attached:
        # Known from the journal alone, it may be dropped in a moment: to say that it exists would
        # acknowledge it (as in `puts`). The writer starts anew, and is to ask again there.
        status[at[taken][~pool.settled_rows(rows[taken])]] = CommitStatus.NOT_GRANTED
    pool.counters.commit_lost += len(lost)
    give_up(pool, session, grant, lost, free=True, failed=command.failed_replicas)
    return at[~taken], entries[~taken]


@dataclass(slots=True)
class _Parts:
    """What is committed: entries of the grant, and the extents that each really has."""

    entries: Rows
    spans: Spans
    counts: NDArray[np.uint16]
    replicas: NDArray[np.uint8]


def _parts(
    pool: Pool,
    session: Session,
    grant: Grant,
    entries: Rows,
    failed: NDArray[np.uint32] | None,
) -> tuple[_Parts, NDArray[np.bool_]]:
    """(the parts, which of `entries` have any): without what is lost, or was not written.

    A replica counts if its segments are all there and its writer wrote it. Other extents of a lost
    replica are free (the writer is done with it); those it failed to write are quarantined.
    """
    n = len(entries)
    spans = grant.spans if grant.is_whole(entries) else grant.spans_of(entries)
    counts = np.ones(n, np.uint16) if grant.counts is None else grant.counts[entries]
    replicas = np.ones(n, np.uint8) if grant.replicas is None else grant.replicas[entries]
    everything = np.ones(n, np.bool_)
    has_failed = failed is not None and len(failed) > 0
    if grant.drops == pool.segments.drops and not has_failed:
        return _Parts(entries, spans, counts, replicas), everything
    owner = np.repeat(np.arange(n), counts)
    pairs = owner * 256 + ((spans[:, 0] >> 16) & 0xFF)
    unwritten = _unwritten(grant, entries, pairs, failed)
    lost = ~np.isin(segments_of(spans), list(pool.segments.by_id.keys() - pool.segments.shut))
    lost = np.isin(pairs, pairs[lost]) & ~unwritten
    pool.segments.give(spans[lost])
    quarantine(pool, session.session_id, spans[unwritten])
    stays = ~lost & ~unwritten
    kept = np.bincount(owner[stays], minlength=n)
    copies = np.bincount(distinct(pairs[stays]) // 256, minlength=n)
    whole = kept > 0
    gone = entries[~whole]
    pool.settle_grant(session, grant, gone, 0)
    pool.settle_grant(session, grant, gone[:0], units_of(spans[~stays]))
    parts = _Parts(
        entries[whole],
        spans[stays],
        kept[whole].astype(np.uint16),
        copies[whole].astype(np.uint8),
    )
    return parts, whole


def _unwritten(
    grant: Grant, entries: Rows, pairs: Rows, failed: NDArray[np.uint32] | None
) -> NDArray[np.bool_]:
    """Which extents belong to replicas that their writer failed to write, and may still reach.

    `pairs`: of each extent, 256 times its key's place in `entries`, plus its replica.
    """
    if failed is None or not len(failed) or not len(entries):
        return np.zeros(len(pairs), np.bool_)
    positions, back = np.unique(failed[:, 0], return_inverse=True)
    at = grant.entries_at(positions)[back]
    order = np.argsort(entries)
    place = np.searchsorted(entries[order], at)
    place[place == len(entries)] = 0
    place = order[place]
    hit = entries[place] == at
    return np.isin(pairs, (place * 256 + failed[:, 1])[hit])


def _decide(
    pool: Pool,
    session: Session,
    grant: Grant,
    parts: _Parts,
    checksums: NDArray[np.uint64],
    seqs: NDArray[np.uint64],
    request_id: int,
    now_s: float,
) -> None:
    entries = parts.entries
    n = len(entries)
    if not n:
        return
    whole = grant.is_whole(entries)
    effect = Stored(
        grant.namespace.namespace_id,
        grant.namespace.generation,
        pool.epoch,
        grant.digests if whole else grant.digests[entries],
        grant.sizes if whole else grant.sizes[entries],
        checksums,
        seqs,
        grant.tails if whole else grant.tails[entries],
        parts.counts,
        parts.replicas,
        to_placed(parts.spans),
    )
    units = units_of(parts.spans)
    stamps = grant.stamps[entries]
    rows = pool.link(grant.namespace, effect, stamps, parts.spans, units, flags=UNSEALED)
    note_decided(session, request_id, rows, seqs)
    if grant.chain:
        positions = entries if grant.positions is None else grant.positions[entries]
        order = np.argsort(positions)
        note_chain(pool, rows[order])
        if pool.keeps_links:
            pool.objects.link_chain(rows[order], positions[order])
    _note_decided(pool, grant, effect, now_s)
    if grant.contents is not None:
        _note_contents(pool, grant, effect, grant.contents[entries])
    pool.settle_grant(session, grant, entries, units)


def _note_contents(pool: Pool, grant: Grant, effect: Stored, contents: NDArray[np.uint64]) -> None:
    """What was put with content digests can be found by them; see `aliases`."""
    if grant.checksums is not None:
        pool.counters.dedup_puts += len(contents)
        pool.counters.dedup_bytes += int(effect.sizes.sum())
    plain = effect.tails == 0
    contents = np.ascontiguousarray(contents[plain])
    digests, seqs = np.ascontiguousarray(effect.digests[plain]), effect.seqs[plain]
    pool.blobs.add(contents, digests, seqs)
    pool.effects.append(Digested(digests, seqs, contents))


def give_up(
    pool: Pool,
    session: Session,
    grant: Grant,
    entries: Rows,
    *,
    free: bool,
    failed: NDArray[np.uint32] | None = None,
) -> None:
    """Pending entries are not written any more; their extents are freed, or quarantined: all of
    them, or with `free` those of `failed` replicas."""
    spans = grant.spans_of(entries)
    stays = np.full(len(spans), not free)
    if free and failed is not None:
        counts = 1 if grant.counts is None else grant.counts[entries]
        owner = np.repeat(np.arange(len(entries)), counts)
        pairs = owner * 256 + ((spans[:, 0] >> 16) & 0xFF)
        stays = _unwritten(grant, entries, pairs, failed)
    pool.segments.give(spans[~stays])
    quarantine(pool, session.session_id, spans[stays])
    pool.settle_grant(session, grant, entries, units_of(spans))


def end_grant(pool: Pool, session: Session | None, grant: Grant, *, free: bool = False) -> None:
    """The grant is over. `free`: so are its pending extents; else there are none."""
    if free and grant.pending_count:
        pool.segments.give(grant.pending_spans())
    if session is not None:
        session.granted_units -= grant.units
        del session.grants[grant.grant_id]
    pool.grants.drop(grant)


def quarantine(pool: Pool, session_id: bytes, spans: Spans) -> None:
    """Their writer may still be writing: free when each one's daemon has cut it off."""
    for segment_id, part in by_segment(spans):
        segment = pool.segments.by_id.get(segment_id)
        if segment is not None:
            pool.orphans.add(session_id, segment.node.node_id, part)
            pool.cut_off(segment.node, session_id)


def put_abort(pool: Pool, command: PutAbort, now_s: float) -> None:
    """The writer gives granted keys up; an unknown grant is fine (it ended before)."""
    session = pool.sessions.get(command.session_id)
    session.expires_s = now_s + pool.config.session_ttl_s
    if command.unsealed is not None:
        drop_unsealed(pool, command)
    grant = session.grants.get(command.grant_id)
    if grant is None:
        return
    if command.indexes is None:
        entries = grant.all_entries()
    else:
        entries = grant.entries_at(command.indexes)
        entries = entries[entries >= 0]
    pool.counters.aborted += len(entries)
    if len(entries):
        give_up(pool, session, grant, entries, free=not command.unfenced)
    if not grant.pending_count:
        end_grant(pool, session, grant)
