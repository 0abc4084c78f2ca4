"""One key, the usual case: the plans behind `get`, `get_into`, `put` and `exists`.

They do what `reads`, `writes` and `lookups` do for n = 1 without a NumPy array, since making one
costs more than the key's whole work: requests are put together from ready bytes (a protobuf message
may be given in several pieces, which the reader merges), rows are unpacked by `struct`. Whatever is
unusual (several extents, a failed node, a race lost) is left to the general plans, which are handed
what is known so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final, TypeVar

import numpy as np
from google.protobuf.message import Message

from cenote.api.errors import (
    BufferInUse,
    CenoteError,
    ClientClosed,
    GrantRevoked,
    InternalError,
    InvalidBuffer,
    NamespaceReset,
    SessionUnknown,
    StaleEpoch,
    StaleLocation,
    Unavailable,
    error_from_code,
)
from cenote.api.rows import (
    EXTENT,
    EXTENT_STRUCT,
    KEY_INLINE_BYTES,
    OBJECT,
    OBJECT_STRUCT,
    PUT_STRUCT,
    CommitStatus,
    ObjectStatus,
    PutStatus,
)
from cenote.api.types import GetStatus, Sameness
from cenote.api.types import PutStatus as Outcome
from cenote.client.locations import LOCATION_STRUCT
from cenote.transport.base import ItemStatus, SealBatch
from cenote.v1 import master_pb2 as pb

from .asking import ask_master, hidden_after_report
from .budgets import (
    LEASE_SHARE,
    SEAL_ATTEMPTS_MAX,
    SEAL_FAILURES_MAX,
    attempt_budget_s,
    backoff_s,
    lease_ttl_ms,
    node_failed,
    seal_budget_s,
    transfer_s,
)
from .fetches import Located
from .pieces import Pieces
from .reads import CACHED_BYTES_MAX, ReadOptions, read_objects
from .state import Call, Grant, LeaseHold, PutOptions, varint
from .steps import (
    AllocateOne,
    AskRaw,
    Checksum,
    MoveOne,
    Pause,
    Plan,
    RefreshView,
    Reopen,
    SealPart,
    Seals,
)
from .writes import PutOutcome, put_objects

__all__ = ["exists_single", "put_single", "read_single"]

M = TypeVar("M", bound=Message)

_U64: Final = Struct("<Q")
_U16: Final = Struct("<H")
_OBJECT_BYTES: Final = OBJECT_STRUCT.size
_EXTENT_BYTES: Final = EXTENT_STRUCT.size
SEAL_STRUCT: Final = Struct("<IIQQQQQ16sHHHBBBBH")

UNLEASED_BYTES_MAX: Final = 64 << 10
"""Smaller objects are read without a lease and proven by their checksum: hashing 4 KiB takes
0.2 us, giving a lease 14. Should the object be evicted meanwhile, it is asked for again."""

SingleRead = tuple[int, bytes | None]
"""(size or -1 for a miss, the value where memory was allocated for it)."""

MISS: Final[SingleRead] = (-1, None)


def exists_single(call: Call, digest: bytes) -> Plan[bool]:
    """Whether the key is present."""
    news = call.state.packed_piggyback(call.space)
    body = call.key_head + digest
    if news:
        body += b"\x12" + varint(len(news)) + news
    reply = yield from _ask(call, "exists", body, pb.ExistsRequest, pb.ExistsResponse)
    return reply.present == b"\x01"


def _ask(
    call: Call, method: str, body: bytes, request_type: type[Message], reply_type: type[M]
) -> Plan[M]:
    """Send ready bytes; where that fails, whatever `ask_master` does about it."""
    try:
        reply: M = yield AskRaw(method, body, call.remaining_s())
        return reply
    except NamespaceReset:
        raise
    except CenoteError:
        if call.remaining_s() <= 0:
            raise
        # The same request, with the same id: if it was executed, this asks for its reply.
        return (yield from ask_master(call, method, request_type.FromString(body), reply_type))


# ---- reads -----------------------------------------------------------------------------------


def read_single(
    call: Call, digest: bytes, address: int, length: int, keeper: object, verify: str
) -> Plan[SingleRead]:
    """Read one object to `address` (0: into new `bytes`), where `length` bytes have room."""
    state = call.state
    if call.avoid:
        return (yield from _read_generally(call, digest, address, length, keeper, verify))
    news = state.packed_piggyback(call.space)
    asked_s = call.now()
    if 0 < (length or call.space.size_seen) <= UNLEASED_BYTES_MAX and verify != "lease":
        ttl_ms = 0
    else:
        ttl_ms = lease_ttl_ms(call.deadline_s, state.limits.lease_ttl_max_ms)
    body = call.key_head + digest + state.acquire_tail(ttl_ms)
    if news:
        body += b"\x1a" + varint(len(news)) + news
    reply = yield from _ask(call, "acquire", body, pb.AcquireRequest, pb.AcquireResponse)
    state.see_view(reply.view_version)
    row = reply.objects
    if len(row) != _OBJECT_BYTES or row[31] == ObjectStatus.MISS:
        state.counters.misses += 1
        return MISS
    lease = reply.lease
    lease_id = lease.lease_id
    hold = None
    if lease_id:
        hold = LeaseHold(lease_id, lease.ttl_ms, asked_s + LEASE_SHARE * lease.ttl_ms / 1000)
    try:
        found = yield from _read_row(
            call, digest, row, reply.extents, hold, asked_s, address, length, verify
        )
        if found is None:
            if hold is not None and hold.end_s < call.end_s:
                state.holds[lease_id] = hold  # renewed while this call runs
                state.wake()
            first = Located(
                np.zeros(1, np.int64),
                np.frombuffer(row, OBJECT),
                np.frombuffer(reply.extents, EXTENT),
                hold,
                asked_s=asked_s,
            )
            found = yield from _read_generally(call, digest, address, length, keeper, verify, first)
    finally:
        if lease_id:
            state.holds.pop(lease_id, None)
            state.release(lease_id)
    return found


def _read_row(
    call: Call,
    digest: bytes,
    row: bytes,
    extents: bytes,
    hold: LeaseHold | None,
    asked_s: float,
    address: int,
    length: int,
    verify: str,
) -> Plan[SingleRead | None]:
    """Read the only or first replica; None where that is not simple or did not succeed."""
    size, checksum, _, _, extent_count, replicas, status = OBJECT_STRUCT.unpack(row)
    if extent_count != replicas or len(extents) < _EXTENT_BYTES:
        return None
    segment, _, offset, extent_length = EXTENT_STRUCT.unpack_from(extents)
    state = call.state
    node = state.peers.node_by_segment.get(segment)
    if node is None or extent_length != size:
        return None
    if hold is None or status != ObjectStatus.LEASED or verify == "checksum":
        mode = Checksum.ALWAYS
    else:
        mode = Checksum.NEVER if verify == "lease" else Checksum.UNLESS_LEASED
        if hold.end_s < min(call.end_s, call.now() + transfer_s(size)):
            return None  # it is to be renewed meanwhile
    value = None
    if not address:
        value, address = yield AllocateOne(size)
    elif size > length:
        raise InvalidBuffer(
            f"the buffer has {length} bytes, the object has {size}",
            remedy="pass a buffer that is large enough",
        )
    budget_s = attempt_budget_s(call.remaining_s(), size, alternatives=replicas > 1)
    try:
        item, got, by_lease = yield MoveOne(node, segment, offset, size, address, budget_s, mode)
    except (BufferInUse, ClientClosed):
        raise
    except CenoteError as error:
        if node_failed(error):
            call.node_failed(node, error, alone=replicas == 1)
        return None
    if item:
        return None
    if by_lease:
        if hold is None or call.now() > hold.end_s:
            return None
    elif got != checksum:
        return None
    counters = state.counters
    counters.hits += 1
    counters.read_bytes += size
    call.space.size_seen = size
    if state.suspects:
        state.trust(node)
    if size <= CACHED_BYTES_MAX or node not in state.lease_proven:
        end_s = asked_s + state.limits.location_ttl_s
        location = LOCATION_STRUCT.pack(end_s, offset, size, checksum, segment, node)
        call.space.locations.store(digest, location)
    return size, value


def _read_generally(
    call: Call,
    digest: bytes,
    address: int,
    length: int,
    keeper: object,
    verify: str,
    first: Located | None = None,
) -> Plan[SingleRead]:
    pieces = None
    if address:
        pieces = Pieces(
            np.array([address], np.uint64), np.array([length], np.uint64), None, [keeper]
        )
    outcome = yield from read_objects(call, digest, pieces, ReadOptions(verify=verify, first=first))
    status = outcome.statuses[0]
    if status == GetStatus.HIT:
        return int(outcome.sizes[0]), None if outcome.values is None else outcome.values[0]
    if status == GetStatus.FAILED:
        raise outcome.errors[int(outcome.codes[0])]
    return MISS


# ---- writes ----------------------------------------------------------------------------------

SinglePut = tuple[int, int]
"""(api.types.PutStatus, Sameness)."""


@dataclass(slots=True)
class _Undone:
    """A put that the general plan is to begin anew."""

    error: CenoteError | None
    decided: bool = False
    """It was decided all the same, but is not sealed."""


def put_single(
    call: Call,
    key: bytes,
    digest: bytes,
    address: int,
    size: int,
    keeper: object,
    options: PutOptions,
) -> Plan[SinglePut]:
    """Put `size` bytes at `address` under `key`. Raises the key's error."""
    started: pb.PutStartResponse | None = None
    undone = _Undone(None)
    if not call.avoid:
        started = yield from _start(call, key, digest, size, options)
        status, _, extent_count, _ = PUT_STRUCT.unpack(started.puts)
        if status == PutStatus.EXISTS:
            call.state.counters.existed += 1
            return Outcome.EXISTED, Sameness.UNKNOWN
        if status == PutStatus.GRANTED and extent_count == 1:
            extent = EXTENT_STRUCT.unpack(started.extents)
            done = yield from _store(call, key, digest, address, size, started, extent)
            if not isinstance(done, _Undone):
                return done
            started, undone = None, done
    pieces = Pieces(np.array([address], np.uint64), np.array([size], np.uint64), None, [keeper])
    outcome: PutOutcome = yield from put_objects(
        call,
        [key],
        digest,
        pieces,
        options,
        started=started,
        decided=undone.decided,
        last=undone.error,
    )
    if outcome.codes[0]:
        raise outcome.errors[int(outcome.codes[0])]
    return int(outcome.statuses[0]), int(outcome.sameness[0])


def _start(
    call: Call, key: bytes, digest: bytes, size: int, options: PutOptions
) -> Plan[pb.PutStartResponse]:
    state = call.state
    news = state.packed_piggyback(call.space)
    parts = [call.key_head, digest, b"\x12\x08", _U64.pack(size)]
    if len(key) > KEY_INLINE_BYTES:
        parts += (b"\x1a\x02", _U16.pack(len(key)))
    parts += (state.put_tail(options), b"\x38", varint(call.asks()))
    if news:
        parts += (b"\x42", varint(len(news)), news)
    body = b"".join(parts)
    reply = yield from _ask(call, "put_start", body, pb.PutStartRequest, pb.PutStartResponse)
    call.unanswered = 0
    state.see_view(reply.view_version)
    if len(reply.puts) != PUT_STRUCT.size:
        raise InternalError(f"put_start answered {len(reply.puts)} bytes for one key")
    return reply


def _store(
    call: Call,
    key: bytes,
    digest: bytes,
    address: int,
    size: int,
    started: pb.PutStartResponse,
    extent: tuple[int, int, int, int],
) -> Plan[SinglePut | _Undone]:
    """Payload, commit and seal."""
    state = call.state
    grant_id = started.grant_id
    # Given back at the end if it is still there.
    grant = call.grants[grant_id] = Grant(grant_id, state.session_id)
    segment, _, offset, _ = extent
    node = state.peers.node_by_segment.get(segment)
    if node is None:
        yield RefreshView(call.remaining_s())
        return _Undone(None)
    others = call.has_other_nodes()
    budget_s = attempt_budget_s(call.remaining_s(), size, alternatives=others, last=not others)
    tail = key if len(key) > KEY_INLINE_BYTES else b""
    write = MoveOne(node, segment, offset, size, address, budget_s, Checksum.ALWAYS, grant_id, tail)
    grant.moving = (write,)
    try:
        item, checksum, _ = yield write
    except (BufferInUse, ClientClosed):
        raise
    except CenoteError as error:
        if isinstance(error, GrantRevoked):
            yield Reopen(call.remaining_s(), session_too=True, cut_session_id=grant.session_id)
        elif node_failed(error):
            call.node_failed(node, error)
        elif not isinstance(error, StaleEpoch | StaleLocation | SessionUnknown):
            raise
        return _Undone(error)
    if item:
        return _Undone(error_from_code(item, f"node {node} did not take the bytes"))
    grant.moving = ()
    return (yield from _commit(call, key, digest, size, node, extent, checksum, started))


def _commit(
    call: Call,
    key: bytes,
    digest: bytes,
    size: int,
    node: int,
    extent: tuple[int, int, int, int],
    checksum: int,
    started: pb.PutStartResponse,
) -> Plan[SinglePut | _Undone]:
    state, space = call.state, call.space
    request = pb.PutCommitRequest(
        grant_id=started.grant_id,
        checksums=_U64.pack(checksum),
        session_id=state.session_id,
        request_id=next(state.request_ids),
        epoch=started.epoch,
    )
    try:
        reply = yield from ask_master(call, "put_commit", request, pb.PutCommitResponse)
    except GrantRevoked as error:
        return _Undone(error)
    call.grants.pop(started.grant_id, None)
    status = reply.statuses[0] if reply.statuses else CommitStatus.NOT_GRANTED
    if status == CommitStatus.EXISTS_SAME or status == CommitStatus.EXISTS_DIFFERENT:
        state.counters.existed += 1
        same = status == CommitStatus.EXISTS_SAME
        return Outcome.EXISTED, Sameness.SAME if same else Sameness.DIFFERENT
    if status != CommitStatus.DECIDED:
        return _Undone(GrantRevoked("the grant ended before the put was committed"))
    segment, slot, offset, length = extent
    row = SEAL_STRUCT.pack(
        segment, slot, offset, length, reply.seq_first, checksum, size, digest,
        0, 1, len(key), 0, 0, 0, 0, 0,
    )  # fmt: skip
    batch = SealBatch(reply.epoch, space.namespace_id, call.generation, row, key)
    refusal = yield from _seal(call, node, batch)
    if refusal is not None:
        return _Undone(refusal, decided=True)
    if state.suspects:
        state.trust(node)
    state.counters.stored += 1
    state.counters.written_bytes += size
    return Outcome.STORED, Sameness.UNKNOWN


def _seal(call: Call, node: int, batch: SealBatch) -> Plan[CenoteError | None]:
    """Why the daemon did not write the slot, in time; None where it did."""
    session_id = call.state.session_id
    failures = 0
    for attempt in range(1, SEAL_ATTEMPTS_MAX + 1):
        part = SealPart(node, batch, seal_budget_s(call.remaining_s(), 1, failures))
        yield Seals([part])
        error = part.error
        if error is not None:
            failures += 1
            if isinstance(error, ClientClosed):
                raise error
            if isinstance(error, GrantRevoked) and failures == 1:
                # Cut off: the decision stands, so it is sealed in another session.
                yield Reopen(call.remaining_s(), session_too=True, cut_session_id=session_id)
                continue
            if not node_failed(error):
                return error
            call.node_failed(node, error)
            if failures == SEAL_FAILURES_MAX or call.remaining_s() <= 0:
                return error
            if node in call.stalled and (yield from hidden_after_report(call, {node})):
                return error
            continue
        assert part.statuses is not None
        status = int(part.statuses[0])
        if status == ItemStatus.OK:
            return None
        if status != Unavailable.code:
            return error_from_code(status, f"node {node} refused to seal")
        pause_s = backoff_s(attempt)
        if call.remaining_s() <= pause_s:
            break
        yield Pause(pause_s)
    return Unavailable(f"the slot table of node {node} did not grow in time", remedy="put again")
