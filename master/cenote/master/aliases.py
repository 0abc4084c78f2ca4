"""Content dedup: a second copy of bytes costs a reference, no transfer and no space.

PutStart comes with content digests. Where an object of the namespace was put with the same one
(`blobs`), its extents are granted once more: `Segment.share` counts who holds them, and each holder
has a slot of its own, so that lookups, eviction, removal, restarts and takeovers know nothing of
all this. Who is the first is of no account either: space is free when its last holder is gone.

A digest proves nothing: whoever has heard it can say it. So a commit of aliases takes a ticket for
each (`cenote.api.contents`): the writer shows the daemon that has the bytes, by a digest of them
that is seeded with the grant, that it has the same ones, and the daemon says so. Without a ticket
nothing is decided: such a writer has learned that the pool holds what it claimed, and no more.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cenote.api.contents import TICKET_BYTES, ticket_of
from cenote.api.rows import UNIT_BYTES, PutStatus

from .commands import PutCommit, PutCommitReply, PutStart, PutStartReply
from .commits import commit_many, give_up
from .dedup_domains import members_of
from .grants import Grant
from .namespaces import Namespace
from .objects import LIVE
from .pool import Pool, Rows
from .sampling import note
from .segments import DRAM, Segment
from .sessions import Session
from .slot_growth import grow_slots
from .spans import extent_rows
from .twins import note_copied

__all__ = ["commit_aliases", "grant_aliases"]

Positions = NDArray[np.int64]
Extents = list[tuple[Segment, int, int]]
"""Offset and length in units, of one replica each."""


class _Held(NamedTuple):
    """Bytes that are there."""

    checksum: int
    extents: Extents
    foreign: bool
    """They are another namespace's."""


def grant_aliases(
    pool: Pool,
    command: PutStart,
    session: Session,
    namespace: Namespace,
    todo: Positions | None,
    puts: NDArray[np.void],
    reply: PutStartReply,
) -> Positions | None:
    """Grant what others hold already, for keys at these positions (None = all); the other ones.

    Fills `puts` and the reply's aliases.
    """
    contents = command.contents
    assert contents is not None
    at = np.arange(len(command.digests)) if todo is None else todo
    found = _find_all(pool, command, session, namespace, at)
    if not found:
        return todo
    positions = np.array(list(found), np.int64)
    spans, counts = _take(pool, found)
    digests = np.ascontiguousarray(command.digests[positions])
    sizes = command.sizes[positions]
    several = bool((counts > 1).any())
    units = int(spans[:, 3].sum(dtype=np.int64))
    grant = Grant(
        pool.grants.new_id(),
        session.session_id,
        namespace,
        len(command.digests),
        positions,
        digests,
        sizes,
        np.zeros(len(positions), np.uint16),
        pool.policy.admit(digests, command.chain),
        counts.astype(np.uint16) if several else None,
        counts.astype(np.uint8) if several else None,
        spans,
        max(command.durability, namespace.durability),
        command.ttl_ms / 1000,
        units,
        pool.segments.drops,
        -1,
        chain=command.chain,
        contents=np.ascontiguousarray(contents[positions]),
        checksums=np.array([one.checksum for one in found.values()], np.uint64),
        foreign=np.array([one.foreign for one in found.values()], np.bool_),
    )
    assert grant.checksums is not None
    note(pool, digests, namespace.incarnation)
    pool.register_grant(session, grant)
    for segment in {id(s): s for one in found.values() for s, _, _ in one.extents}.values():
        if segment.wants_slots():
            grow_slots(pool, segment)
    puts["status"][positions] = PutStatus.DEDUPLICATED
    puts["replicas"][positions] = puts["extents"][positions] = counts
    lengths = sizes.astype(np.int64)
    reply.alias_grant_id = grant.grant_id
    reply.alias_extents = extent_rows(spans, lengths, grant.counts, grant.replicas)
    reply.alias_checksums = grant.checksums.tobytes()
    return np.setdiff1d(at, positions)


def _find_all(
    pool: Pool, command: PutStart, session: Session, namespace: Namespace, at: Positions
) -> dict[int, _Held]:
    """Position -> what holds its bytes; each with slots to spare."""
    found: dict[int, _Held] = {}
    contents, sizes, tails = command.contents, command.sizes, command.tail_lengths
    assert contents is not None
    if len(session.grants) >= pool.config.session_grants_max:
        return found
    room = pool.session_cap_units - session.granted_units
    rows = pool.config.objects_max - pool.objects.used_rows - pool.grants.keys
    avoided = set(pool.nodes.suspected_by(session.boot_id, pool.now_s))
    if command.avoid_node_ids is not None:
        avoided.update(command.avoid_node_ids.tolist())
    owners = _owners(pool, namespace)
    digests, seen, wanted_slots = command.digests.tolist(), set[tuple[int, ...]](), dict[int, int]()
    for position in at.tolist():
        key, content = tuple(digests[position]), contents[position].tolist()
        if key in seen or not any(content) or (tails is not None and tails[position]):
            continue
        seen.add(key)  # a key that comes again is decided by where it stands first
        wanted = int(sizes[position]), max(1, command.replicas)
        one = _holder(pool, owners, content, *wanted, avoided)
        if one is None:
            continue
        units = sum(length for _, _, length in one.extents)
        slots = dict(wanted_slots)
        for segment, _, _ in one.extents:
            slots[segment.segment_id] = slots.get(segment.segment_id, 0) + 1
        free = all(pool.segments.by_id[i].slots.free >= count for i, count in slots.items())
        if units > room or len(found) >= rows or not free:
            continue
        room -= units
        wanted_slots = slots
        found[position] = one
    return found


def _holder(
    pool: Pool,
    owners: dict[int, bool],
    content: list[int],
    size: int,
    replicas: int,
    avoided: set[int],
) -> _Held | None:
    """An object of these bytes, of one of these namespaces."""
    for low, high, seq in pool.blobs.find(*content):
        row = pool.objects.lookup_one(low, high)
        if row <= 0 or not pool.state_bytes[row] & LIVE:
            continue
        held_size, checksum, held_seq, _, _, owner, tail, count, held, _ = pool.record_of(row)
        if (held_size, held_seq) != (size, seq) or owner not in owners or tail or count != held:
            continue
        extents: Extents = []
        for segment_id, _, _, _, offset, length in pool.objects.extents_of_one(row):
            segment = pool.segments.by_id.get(segment_id)
            if (
                segment is not None
                and _is_of_use(pool, segment)
                and segment.node.node_id not in avoided
            ):
                extents.append((segment, offset, length))
        if len(extents) >= replicas:
            note_copied(pool, row, extents)
            return _Held(checksum, extents, owners[owner])
    return None


def _is_of_use(pool: Pool, segment: Segment) -> bool:
    """Whether what lies there may be held by others, too."""
    return (
        segment.is_usable
        and segment.tier == DRAM
        and segment.segment_id not in pool.segments.shut
        and bool(segment.node.ticket_key)
    )


def _take(pool: Pool, found: dict[int, _Held]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """(the extents, each shared and with a slot of its own; how many each object has)."""
    spans = []
    for one in found.values():
        for replica, (segment, offset, length) in enumerate(one.extents):
            segment.share(offset, length)
            slot = segment.slots.take_one()
            spans.append((segment.segment_id | replica << 16, slot, offset, length))
    counts = np.array([len(one.extents) for one in found.values()], np.int64)
    return np.array(spans, np.uint32), counts


def commit_aliases(
    pool: Pool, command: PutCommit, session: Session, grant: Grant, now_s: float
) -> PutCommitReply:
    """`commit_grant` of aliases: decides those for which a daemon gave a ticket."""
    indexes, tickets = command.indexes, command.tickets
    n = len(command.checksums)
    entries = grant.all_entries() if indexes is None else grant.entries_at(indexes)
    if len(entries) == n:
        good = _are_proven(pool, grant, entries, tickets)
        bad = entries[~good & (entries >= 0)]
        if len(bad):
            pool.counters.dedup_unproven += len(bad)
            give_up(pool, session, grant, bad, free=True)
        assert grant.checksums is not None
        # What lies there is what counts, whatever the writer says.
        checksums = np.where(entries >= 0, grant.checksums[entries], command.checksums)
        if indexes is None:
            assert grant.positions is not None
            indexes = grant.positions[entries].astype(np.uint32)
        command = PutCommit(
            command.session_id,
            command.request_id,
            command.grant_id,
            indexes,
            checksums,
            command.failed_replicas,
            sealed_through=command.sealed_through,
        )
    return commit_many(pool, command, session, grant, now_s)


def _are_proven(
    pool: Pool, grant: Grant, entries: Rows, tickets: bytes | None
) -> NDArray[np.bool_]:
    proven = np.zeros(len(entries), np.bool_)
    if tickets is None or len(tickets) != TICKET_BYTES * len(entries):
        return proven
    for i, entry in enumerate(entries.tolist()):
        if entry < 0:
            continue
        word, _, offset, _ = grant.spans_of(np.array([entry]))[0].tolist()
        segment = pool.segments.by_id.get(word & 0xFFFF)
        if segment is None or not segment.node.ticket_key:
            continue
        shown = tickets[i * TICKET_BYTES : (i + 1) * TICKET_BYTES]
        place = segment.segment_id, offset * UNIT_BYTES, int(grant.sizes[entry])
        key, is_foreign = segment.node.ticket_key, grant.foreign is None or grant.foreign[entry]
        for strong in (True,) if is_foreign else (False, True):
            due = ticket_of(key, grant.grant_id, *place, strong=strong)
            proven[i] |= compare_digest(due, shown)
    return proven


def _owners(pool: Pool, namespace: Namespace) -> dict[int, bool]:
    """Incarnations of namespaces whose bytes this one may refer to, and whether it is another."""
    owners = {namespace.incarnation: False}
    for name in members_of(pool.config.dedup_domains, namespace.name):
        other = pool.namespaces.by_name.get(name)
        if other is not None:
            owners[other.incarnation] = True
    return owners
