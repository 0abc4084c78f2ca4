"""One key, the usual case: the plans behind `get`, `get_into` and `exists`.

They do what `reads`, `writes` and `lookups` do for n = 1 without a NumPy array, since making one
costs more than the key's whole work: requests are put together from ready bytes (a protobuf message
may be given in several pieces, which the reader merges), rows are unpacked by `struct`. Whatever is
unusual (several extents, a failed node, a race lost) is left to the general plans, which are handed
what is known so far.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, TypeVar

import numpy as np
from google.protobuf.message import Message

from cenote.api.errors import (
    BufferInUse,
    CenoteError,
    ClientClosed,
    InvalidBuffer,
    SessionUnknown,
)
from cenote.api.rows import (
    EXTENT,
    EXTENT_STRUCT,
    OBJECT,
    OBJECT_STRUCT,
    ObjectStatus,
)
from cenote.api.types import GetStatus
from cenote.client.locations import LOCATION_STRUCT
from cenote.v1 import master_pb2 as pb

from .alike import CACHED_BYTES_MAX
from .asking import ask_master, too_late
from .budgets import (
    LEASE_SHARE,
    ask_again,
    attempt_budget_s,
    lease_ttl_ms,
    node_failed,
    transfer_s,
)
from .counters import FETCH, LOOKUP, READ
from .fetches import Located
from .grants import LeaseHold
from .pieces import Pieces
from .reads import ReadOptions, read_objects
from .space import varint
from .state import Call
from .steps import (
    AllocateOne,
    AskRaw,
    Checksum,
    MoveOne,
    Plan,
)

__all__ = ["ask_packed", "exists_single", "read_single"]

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
    reply = yield from ask_packed(call, "exists", body, pb.ExistsRequest, pb.ExistsResponse)
    if reply.past_tenure:
        call.state.doubt_leader()
    return reply.present == b"\x01"


def ask_packed(
    call: Call, method: str, body: bytes, request_type: type[Message], reply_type: type[M]
) -> Plan[M]:
    """Send ready bytes; where that fails, whatever `ask_master` does about it."""
    try:
        reply: M = yield AskRaw(method, body, call.remaining_s())
        return reply
    except CenoteError as error:
        if not (ask_again(error) or isinstance(error, SessionUnknown)):
            raise
        if call.remaining_s() <= 0:
            raise too_late(method, error) from error
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
    try:
        reply = yield from ask_packed(call, "acquire", body, pb.AcquireRequest, pb.AcquireResponse)
    except CenoteError as error:
        call.space.counters.fail(READ, LOOKUP, error)
        raise
    state.see_view(reply.view_version)
    if reply.past_tenure:
        state.doubt_leader()
    row = reply.objects
    if len(row) != _OBJECT_BYTES or row[31] == ObjectStatus.MISS:
        call.space.counters.misses += 1
        return MISS
    lease = reply.lease
    lease_id = lease.lease_id
    hold = None
    if lease_id:
        hold = LeaseHold(lease_id, lease.ttl_ms, asked_s + LEASE_SHARE * lease.ttl_ms / 1000)
    try:
        try:
            found = yield from _read_row(
                call, digest, row, reply.extents, hold, asked_s, address, length, verify
            )
        except CenoteError as error:
            call.space.counters.fail(READ, FETCH, error)
            raise
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
        mode = Checksum.UNLESS_LEASED
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
    remaining_s = call.remaining_s()
    budget_s = attempt_budget_s(remaining_s, size, alternatives=replicas > 1)
    try:
        lease_id = 0 if hold is None else hold.lease_id
        item, got, by_lease = yield MoveOne(
            node, segment, offset, size, address, budget_s, mode, lease_id=lease_id
        )
    except (BufferInUse, ClientClosed):
        raise
    except CenoteError as error:
        if node_failed(error):
            until_s = call.end_s - remaining_s + budget_s
            call.node_failed(node, error, alone=replicas == 1, until_s=until_s)
        return None
    if item:
        return None
    if by_lease:
        if hold is None or call.now() > hold.end_s:
            return None
    elif got != checksum:
        return None
    counters = call.space.counters
    counters.hits += 1
    counters.ssd_hits += segment in state.peers.on_ssd
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
