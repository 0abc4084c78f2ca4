"""One key, the usual case: the plan behind `put` and `put_from`; see `singles` for how.

    spare extents at hand? --- no --> put_start --> EXISTS
        | yes                            |
        +--------------> payload --> commit --> seal

What does not go this way ends as `_Undone`, and is begun anew by the general plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final

import numpy as np

from cenote.api.errors import (
    BufferInUse,
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    GrantRevoked,
    InternalError,
    SessionUnknown,
    StaleEpoch,
    StaleLocation,
    Unavailable,
    error_from_code,
)
from cenote.api.rows import (
    EXTENT_STRUCT,
    KEY_INLINE_BYTES,
    PUT_STRUCT,
    CommitStatus,
    PutStatus,
)
from cenote.api.types import PutStatus as Outcome
from cenote.api.types import Sameness
from cenote.transport.base import ItemStatus, SealBatch
from cenote.v1 import master_pb2 as pb

from .asking import hidden_after_report
from .budgets import (
    SEAL_ATTEMPTS_MAX,
    SEAL_FAILURES_MAX,
    attempt_budget_s,
    backoff_s,
    node_failed,
    seal_budget_s,
)
from .grants import Grant
from .options import PutOptions
from .outcomes import PutOutcome
from .pieces import Pieces
from .singles import ask_packed
from .space import varint
from .spares import SpareRun, units_of
from .state import Call
from .steps import Checksum, MoveOne, Pause, Plan, RefreshView, Reopen, SealPart, Seals
from .writes import put_objects

__all__ = ["put_single"]

_U64: Final = Struct("<Q")
_U32: Final = Struct("<I")
_U16: Final = Struct("<H")
SEAL_STRUCT: Final = Struct("<IIQQQQQ16sHHHBBBBH")

SinglePut = tuple[int, int]
"""(api.types.PutStatus, Sameness)."""


@dataclass(slots=True)
class _Undone:
    """A put that the general plan is to begin anew."""

    error: CenoteError | None
    decided: tuple[int, int] | None = None
    """(epoch, seq), where it was decided all the same, but is not sealed."""
    sameness: int = Sameness.UNKNOWN
    """With what another writer had decided, and not sealed yet."""


class _Place:
    """Where the object is to lie, and by what right."""

    __slots__ = ("epoch", "grant", "grant_id", "node", "offset", "run", "segment", "slot")

    def __init__(
        self,
        grant: Grant,
        epoch: int,
        node: int | None,
        extent: tuple[int, int, int, int],
        run: SpareRun | None,
    ) -> None:
        self.grant = grant
        self.grant_id = grant.grant_id
        self.epoch = epoch
        self.node = node
        self.segment, self.slot, self.offset, _ = extent
        self.run = run


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
        tail = key if len(key) > KEY_INLINE_BYTES else b""
        units = units_of(size + len(tail))
        place = _spare_place(call, units, options)
        if place is None:
            status = extent_count = 0
            try:
                started = yield from _start(call, key, digest, size, units, options)
                status, _, extent_count, _ = PUT_STRUCT.unpack(started.puts)
            except GrantRevoked as error:  # the answer got lost, and is forgotten by now
                undone, status = _Undone(error), -1
            if status == PutStatus.EXISTS:
                call.space.spares.note_existed()
                call.space.counters.existed += 1
                return Outcome.EXISTED, Sameness.UNKNOWN
            if started is not None and status == PutStatus.GRANTED and extent_count == 1:
                place = _granted_place(call, started)
        if place is not None:
            done = yield from _store(call, key, digest, address, size, tail, place)
            if not isinstance(done, _Undone):
                return done
            if place.run is not None:
                call.space.spares.give_up()
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
        sameness=undone.sameness,
        last=undone.error,
    )
    if outcome.codes[0]:
        raise outcome.errors[int(outcome.codes[0])]
    return int(outcome.statuses[0]), int(outcome.sameness[0])


def _spare_place(call: Call, units: int, options: PutOptions) -> _Place | None:
    """An extent that was granted ahead, if there is one."""
    state, spares = call.state, call.space.spares
    if not spares.held or not options.takes_spares():
        return None
    home = call.namespace_id, call.generation
    run = spares.take(units, 1, state.limits.epoch, state.session_id, home, state.now())
    if run is None:
        return None
    spare = run.grant
    grant = Grant(spare.grant_id, spare.session_id, indexes=_U32.pack(run.start))
    call.grants[run] = grant
    extent = spare.extent(run.start)
    node = state.peers.node_by_segment.get(extent[0])
    if node in state.suspects:
        spares.give_up()
        return None  # given back at the end of the call
    return _Place(grant, spare.epoch, node, extent, run)


def _granted_place(call: Call, started: pb.PutStartResponse) -> _Place:
    extent = EXTENT_STRUCT.unpack(started.extents)
    # Given back at the end if it is still there.
    grant = call.grants[started.grant_id] = Grant(started.grant_id, call.state.session_id)
    node = call.state.peers.node_by_segment.get(extent[0])
    return _Place(grant, started.epoch, node, extent, None)


def _start(
    call: Call, key: bytes, digest: bytes, size: int, units: int, options: PutOptions
) -> Plan[pb.PutStartResponse]:
    state = call.state
    session_id = state.session_id
    news = state.packed_piggyback(call.space)
    parts = [call.key_head, digest, b"\x12\x08", _U64.pack(size)]
    if len(key) > KEY_INLINE_BYTES:
        parts += (b"\x1a\x02", _U16.pack(len(key)))
    parts += (state.put_tail(options), b"\x38", varint(call.asks()))
    if news:
        parts += (b"\x42", varint(len(news)), news)
    spares = call.space.spares
    ask = spares.wanted(units, 1)
    # Not in a session that has just been replaced: it may be either one that the tail names.
    if ask and options.takes_spares() and state.session_id is session_id:
        spare_bytes = size + (len(key) if len(key) > KEY_INLINE_BYTES else 0)
        parts += (b"\x60", varint(ask), b"\x68", varint(spare_bytes))
    else:
        ask = 0
    body = b"".join(parts)
    reply = yield from ask_packed(call, "put_start", body, pb.PutStartRequest, pb.PutStartResponse)
    call.unanswered = 0
    call.started(reply)
    if ask:
        call.keep_spares(reply, session_id, 1)
    if len(reply.puts) != PUT_STRUCT.size:
        raise InternalError(f"put_start answered {len(reply.puts)} bytes for one key")
    return reply


def _store(
    call: Call, key: bytes, digest: bytes, address: int, size: int, tail: bytes, place: _Place
) -> Plan[SinglePut | _Undone]:
    """Payload, commit and seal."""
    node, grant = place.node, place.grant
    if node is None:
        yield RefreshView(call.remaining_s())
        return _Undone(None)
    others = call.has_other_nodes()
    remaining_s = call.remaining_s()
    if remaining_s <= 0:
        raise DeadlineExceeded("the deadline passed before the bytes were sent")
    budget_s = attempt_budget_s(remaining_s, size, alternatives=others, last=not others)
    write = MoveOne(
        node,
        place.segment,
        place.offset,
        size,
        address,
        budget_s,
        Checksum.ALWAYS,
        place.grant_id,
        tail,
    )
    grant.moving = (write,)
    try:
        item, checksum, _ = yield write
    except (BufferInUse, ClientClosed):
        raise
    except CenoteError as error:
        if isinstance(error, GrantRevoked):
            yield Reopen(call.remaining_s(), session_too=True, cut_session_id=grant.session_id)
        elif node_failed(error):
            call.node_failed(node, error, until_s=call.end_s - remaining_s + budget_s)
        elif not isinstance(error, StaleEpoch | StaleLocation | SessionUnknown):
            raise
        return _Undone(error)
    if item:
        return _Undone(error_from_code(item, f"node {node} did not take the bytes"))
    grant.moving = ()
    return (yield from _commit(call, key, digest, size, tail, checksum, node, place))


def _commit(
    call: Call,
    key: bytes,
    digest: bytes,
    size: int,
    tail: bytes,
    checksum: int,
    node: int,
    place: _Place,
) -> Plan[SinglePut | _Undone]:
    state, space = call.state, call.space
    body = _packed_commit(call, digest, size, tail, checksum, place)
    try:
        reply = yield from ask_packed(
            call, "put_commit", body, pb.PutCommitRequest, pb.PutCommitResponse
        )
    except GrantRevoked as error:
        return _Undone(error)
    call.grants.pop(place.grant_id if place.run is None else place.run, None)
    status = reply.statuses[0] if reply.statuses else CommitStatus.NOT_GRANTED
    if status == CommitStatus.EXISTS_SAME or status == CommitStatus.EXISTS_DIFFERENT:
        call.sealed()
        space.spares.note_existed()
        space.counters.existed += 1
        same = status == CommitStatus.EXISTS_SAME
        return Outcome.EXISTED, Sameness.SAME if same else Sameness.DIFFERENT
    if status == CommitStatus.UNSEALED_SAME or status == CommitStatus.UNSEALED_DIFFERENT:
        call.sealed()
        same = status == CommitStatus.UNSEALED_SAME
        return _Undone(None, sameness=Sameness.SAME if same else Sameness.DIFFERENT)
    if status != CommitStatus.DECIDED:
        call.sealed()
        return _Undone(GrantRevoked("the grant ended before the put was committed"))
    row = SEAL_STRUCT.pack(
        place.segment, place.slot, place.offset, size + len(tail), reply.seq_first, checksum, size,
        digest, 0, 1, len(key), 0, 0, 0, 0, 0,
    )  # fmt: skip
    batch = SealBatch(reply.epoch, call.namespace_id, call.generation, row, key)
    refusal = yield from _seal(call, node, batch)
    if refusal is not None:
        call.lose_commit()
        return _Undone(refusal, decided=(reply.epoch, reply.seq_first))
    call.sealed()
    if state.suspects:
        state.trust(node)
    space.spares.note_stored(1, state.now())
    space.counters.stored += 1
    space.counters.written_bytes += size
    return Outcome.STORED, Sameness.UNKNOWN


def _packed_commit(
    call: Call, digest: bytes, size: int, tail: bytes, checksum: int, place: _Place
) -> bytes:
    """A PutCommitRequest."""
    state = call.state
    session_id = state.session_id if place.run is None else place.run.grant.session_id
    request_id, through = call.commits(session_id)
    common = b"".join(
        (b"\x1a\x08", _U64.pack(checksum), b"\x28", varint(request_id), b"\x50", varint(through))
    )
    if place.run is None:
        return b"".join(
            (b"\x08", varint(place.grant_id), b"\x22\x10", session_id, b"\x38",
             varint(place.epoch), common)
        )  # fmt: skip
    names = call.key_head + digest + b"\x12\x08" + _U64.pack(size)
    if tail:
        names += b"\x1a\x02" + _U16.pack(len(tail))
    return b"".join(
        (place.run.grant.commit_head, common, b"\x12\x04", place.grant.indexes, b"\x4a",
         varint(len(names)), names)
    )  # fmt: skip


def _seal(call: Call, node: int, batch: SealBatch) -> Plan[CenoteError | None]:
    """Why the daemon did not write the slot, in time; None where it did."""
    session_id = call.state.session_id
    failures = 0
    for attempt in range(1, SEAL_ATTEMPTS_MAX + 1):
        remaining_s = call.remaining_s()
        budget_s = seal_budget_s(remaining_s, 1, failures)
        part = SealPart(node, batch, budget_s)
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
            call.node_failed(node, error, until_s=call.end_s - remaining_s + budget_s)
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
