"""PutStart: which keys exist, which get space to write into, and why others don't."""

from __future__ import annotations

from struct import Struct

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

from .aliases import grant_aliases
from .commands import PutStart, PutStartReply
from .decisions import Fate
from .digest_checks import check_digests
from .eviction import make_rows
from .grants import Grant
from .lookups import hits
from .namespaces import Namespace
from .placement import Wanted
from .placing import Placed, place
from .pool import Pool, Rows
from .sampling import note, note_one
from .sealing import is_known, seals_of, unsealed_rows
from .segments import DRAM
from .sessions import Session
from .slot_growth import grow_slots
from .spans import extent_rows
from .tiers import note_reuse

__all__ = ["start_puts"]

_UNIT_BITS = UNIT_BYTES.bit_length() - 1
_ONE = np.uint64(1)
_SIZE_MAX = np.uint64(1 << 46)
_SPAN = Struct("<IIII")
_EXISTS_ROW = PUT_STRUCT.pack(PutStatus.EXISTS, 0, 0, 0)
_GRANTED_ROW = PUT_STRUCT.pack(PutStatus.GRANTED, 1, 1, 0)
_NO_TAIL = np.zeros(1, np.uint16)
_NO_TAIL.flags.writeable = False


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
    if command.tier not in (0, DRAM):
        raise InvalidArgument(
            "objects are put into memory; daemons copy them to their SSDs",
            remedy="put without a tier",
        )
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


def start_puts(
    pool: Pool, command: PutStart, session: Session, namespace: Namespace, now_s: float
) -> PutStartReply:
    """Decide about each key; grant space for those that are new."""
    if (
        len(command.digests) == 1
        and command.replicas <= 1
        and command.min_replicas <= 1
        and not pool.nodes.suspects
        and command.contents is None
    ):
        reply = _put_start_one(pool, command, session, namespace, now_s)
        if reply is not None:
            return reply
    return _put_start_many(pool, command, session, namespace, now_s)


# ---- one key --------------------------------------------------------------------------------


def _put_start_one(
    pool: Pool, command: PutStart, session: Session, namespace: Namespace, now_s: float
) -> PutStartReply | None:
    """The plain case: one key, one replica, room at hand. None = go the long way."""
    low, high = command.digests[0].tolist()
    row = pool.objects.lookup_one(low, high)
    if row > 0:
        if pool.record_of(row)[5] != namespace.incarnation or not is_known(pool, row):
            return None
        pool.policy.touch_one(pool.stamp_words, row)
        if pool.tiers.has_budgets:
            note_reuse(pool, np.array([row]))
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
    size, tails, placement = int(command.sizes[0]), command.tail_lengths, pool.placement
    length = size + (int(tails[0]) if tails is not None else 0)
    units = (length + UNIT_BYTES - 1) // UNIT_BYTES
    if (
        not 0 < size < _SIZE_MAX
        or pool.placement_dirty
        or placement.stale
        or session.granted_units + units > pool.session_cap_units
        or pool.objects.used_rows + pool.grants.keys >= pool.config.objects_max
    ):
        return None
    entry = placement.first(command.tier or 1)
    taken = None if entry is None else entry.segment.take_one(units)
    if entry is None or taken is None:
        return None
    segment = entry.segment
    offset, slot, units = taken
    placement.charge_first(entry, units)
    if segment.wants_slots():
        grow_slots(pool, segment)
    pool.counters.put_keys += 1
    pool.counters.put_granted += 1
    grant = Grant(
        pool.grants.new_id(),
        session.session_id,
        namespace,
        1,
        None,
        command.digests,
        command.sizes,
        _NO_TAIL if tails is None else tails,
        pool.policy.admit(command.digests, False),
        None,
        None,
        np.frombuffer(_SPAN.pack(segment.segment_id, slot, offset, units), np.uint32).reshape(1, 4),
        max(command.durability, namespace.durability),
        command.ttl_ms / 1000,
        units,
        pool.segments.drops,
        pool.links,
    )
    if not low & pool.sample_mask:
        note_one(pool, low, namespace.incarnation)
    pool.register_grant(session, grant)
    extents = EXTENT_STRUCT.pack(segment.segment_id, slot, offset * UNIT_BYTES, length)
    return PutStartReply(_GRANTED_ROW, extents, grant.grant_id, pool.view_version)


# ---- batches --------------------------------------------------------------------------------


def _put_start_many(
    pool: Pool, command: PutStart, session: Session, namespace: Namespace, now_s: float
) -> PutStartReply:
    """Any batch. Work goes on with the keys that are left (`todo`: their positions, None = all)."""
    n = len(command.digests)
    _check(pool, command, session, n)
    pool.counters.put_keys += n
    links = pool.links
    puts = np.zeros(n, PUT)
    rows = pool.objects.lookup(command.digests)
    present = hits(pool, rows, namespace.incarnation)
    todo = _touch_present(pool, command, rows, present)
    unsealed = b""
    if todo is not None:
        unsealed = _withhold(pool, rows, present, puts)
    reply = PutStartReply(b"", b"", 0, pool.view_version, unsealed=unsealed)
    if command.contents is not None:
        todo = grant_aliases(pool, command, session, namespace, todo, puts, reply)
    left = rows if todo is None else rows.take(todo)
    if len(left) and int(left.max()) >= 0:
        links = -1  # hidden objects stand where these will: commit has to look again
    keys = _Keys(command, todo)
    if pool.quotas.active:
        units = int(keys.units.sum()) * max(1, command.replicas)
        pool.quotas.begin_claim(namespace.incarnation, units, len(keys.units))
    try:
        refused = _refusals(pool, session, keys)
        if refused is not None:
            at = np.arange(n) if todo is None else todo
            puts["status"][at] = refused
            todo = at[refused == 0]
            keys = _Keys(command, todo)
        if not len(keys.units):
            _count(pool, command, 0, present, puts)
            reply.puts = puts.tobytes()
            return reply
        replicas = max(1, command.replicas), max(1, command.min_replicas)
        placed = place(pool, keys.units, *replicas, _wanted(pool, command, session, now_s))
    finally:
        pool.quotas.end_claim()
    if placed.status is not None:
        at = np.arange(n) if todo is None else todo
        puts["status"][at] = placed.status
        todo = at[placed.status == PutStatus.GRANTED]
        keys = _Keys(command, todo)
    granted = len(keys.units)
    _fill_puts(puts, todo, placed)
    _count(pool, command, granted, present, puts)
    reply.puts = puts.tobytes()
    if not granted:
        return reply
    grant = _grant(pool, command, session, namespace, todo, keys, placed, links)
    for segment in placed.segments:
        if segment.wants_slots():
            grow_slots(pool, segment)
    reply.grant_id = grant.grant_id
    reply.extents = extent_rows(placed.spans, keys.lengths, placed.counts, placed.replicas)
    return reply


class _Keys:
    """Columns of the keys at some positions of a batch (None = all)."""

    __slots__ = ("digests", "lengths", "sizes", "tails", "units")

    def __init__(self, command: PutStart, positions: NDArray[np.int64] | None) -> None:
        digests, sizes, tails = command.digests, command.sizes, command.tail_lengths
        if positions is not None:
            digests = digests.take(positions, axis=0)
            sizes = sizes.take(positions)
            tails = None if tails is None else tails.take(positions)
        self.digests = digests
        self.sizes = sizes
        self.lengths = sizes.astype(np.int64)
        if tails is None:
            self.tails = np.zeros(len(sizes), np.uint16)
        else:
            self.tails = tails
            self.lengths += tails
        self.units = (self.lengths + (UNIT_BYTES - 1)) >> _UNIT_BITS


def _contents(command: PutStart, positions: NDArray[np.int64] | None) -> NDArray[np.uint64] | None:
    contents = command.contents
    return contents if contents is None or positions is None else contents[positions]


def _touch_present(
    pool: Pool, command: PutStart, rows: Rows, present: NDArray[np.bool_]
) -> NDArray[np.int64] | None:
    """What exists is touched; positions of the other keys, None = all."""
    count = int(np.count_nonzero(present))
    if not count:
        return None
    pool.counters.put_exists += count
    known = rows[present]
    pool.policy.touch(pool.stamp, known, command.chain)
    note_reuse(pool, known)
    return (~present).nonzero()[0]


def _withhold(pool: Pool, rows: Rows, present: NDArray[np.bool_], puts: NDArray[np.void]) -> bytes:
    """Say of nothing that it exists that may be lost in a moment, since that would acknowledge it:
    what its writer decided and may not have lived to seal, and what is known from the journal alone
    and may be dropped when its daemon attaches. The SEAL rows of the former; of the latter the
    writer is to ask again.
    """
    at = np.flatnonzero(present)
    if not pool.segments.all_attached:
        settled = pool.settled_rows(rows[at])
        puts["status"][at[~settled]] = PutStatus.NOT_YET
        at = at[settled]
    at = at[unsealed_rows(pool, rows[at])]
    if not len(at):
        return b""
    counts, seals = seals_of(pool, rows[at])
    puts["status"][at] = PutStatus.UNSEALED
    puts["extents"][at] = counts
    return seals.tobytes()


def _refusals(pool: Pool, session: Session, keys: _Keys) -> NDArray[np.uint8] | None:
    """PutStatus of keys that no room would help, 0 for the others; None = there are none.

    Sizes out of range, keys that stand earlier in the batch, the session's quota, a full table.
    """
    n = len(keys.units)
    if not n:
        return None
    status: NDArray[np.uint8] | None = None
    bad = keys.sizes - _ONE >= _SIZE_MAX - _ONE  # 0 wraps to the largest number
    low = keys.digests[:, 0].copy()
    low.sort()
    if np.count_nonzero(bad) or np.count_nonzero(low[1:] == low[:-1]):
        status = np.where(bad, np.uint8(PutStatus.INVALID), np.uint8(0))
        _mark_repeats(keys.digests, status)
    room = pool.session_cap_units - session.granted_units
    if len(session.grants) >= pool.config.session_grants_max:
        room = 0
    if status is not None or int(keys.units.sum()) > room:
        status = _over_quota(session, keys.units, room, status)
    rows = make_rows(pool, n)
    if rows < n:
        status = np.zeros(n, np.uint8) if status is None else status
        status[(status == 0) & (np.cumsum(status == 0) > rows)] = PutStatus.NO_SPACE
    return status if status is not None and np.count_nonzero(status) else None


def _mark_repeats(digests: NDArray[np.uint64], status: NDArray[np.uint8]) -> None:
    seen: set[tuple[int, int]] = set()
    for at, (a, b) in enumerate(digests.tolist()):
        if status[at]:
            continue
        if (a, b) in seen:
            status[at] = PutStatus.DUPLICATE_IN_BATCH
        seen.add((a, b))


def _over_quota(
    session: Session,
    units: NDArray[np.int64],
    room: int,
    status: NDArray[np.uint8] | None,
) -> NDArray[np.uint8]:
    """What one session may have granted and undecided is bounded, in bytes and in grants.

    One object is always let through where nothing (but spare extents) is granted: it is the
    allocator's to refuse.
    """
    status = np.zeros(len(units), np.uint8) if status is None else status
    fine = (status == 0).nonzero()[0]
    over = np.cumsum(units[fine]) > max(room, 0)
    if len(over) and all(grant.spare_units for grant in session.grants.values()):
        over[0] = False
    status[fine[over]] = PutStatus.QUOTA_EXCEEDED
    return status


def _fill_puts(puts: NDArray[np.void], todo: NDArray[np.int64] | None, placed: Placed) -> None:
    """Status and counts of the granted keys."""
    counts = 1 if placed.counts is None else placed.counts
    replicas = 1 if placed.replicas is None else placed.replicas
    if todo is None:
        puts["status"] = PutStatus.GRANTED
        puts["replicas"] = replicas
        puts["extents"] = counts
    else:
        puts["status"][todo] = PutStatus.GRANTED
        puts["replicas"][todo] = replicas
        puts["extents"][todo] = counts


def _count(
    pool: Pool, command: PutStart, granted: int, present: NDArray[np.bool_], puts: NDArray[np.void]
) -> None:
    counters, n = pool.counters, len(puts)
    counters.put_granted += granted
    if granted == n:
        return
    aliases = int(np.count_nonzero(puts["status"] == PutStatus.DEDUPLICATED))
    counters.put_granted += aliases
    refused = n - granted - aliases - int(np.count_nonzero(present))
    roomless = puts["status"] == PutStatus.NO_SPACE
    no_space = int(np.count_nonzero(roomless))
    if no_space:
        pool.decisions.note(Fate.REFUSED, 0, command.digests[roomless], pool.now_s)
    counters.put_no_space += no_space
    counters.put_refused += refused - no_space


def _grant(
    pool: Pool,
    command: PutStart,
    session: Session,
    namespace: Namespace,
    positions: NDArray[np.int64] | None,
    keys: _Keys,
    placed: Placed,
    links: int,
) -> Grant:
    units = placed.units
    grant = Grant(
        pool.grants.new_id(),
        session.session_id,
        namespace,
        len(command.digests),
        positions,
        keys.digests,
        keys.sizes,
        keys.tails,
        pool.policy.admit(keys.digests, command.chain),
        placed.counts,
        placed.replicas,
        placed.spans,
        max(command.durability, namespace.durability),
        command.ttl_ms / 1000,
        units,
        pool.segments.drops,
        links,
        chain=command.chain,
        contents=_contents(command, positions),
    )
    note(pool, keys.digests, namespace.incarnation)
    pool.register_grant(session, grant)
    return grant
