"""Plans of the calls that move no bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from cenote.api.errors import CenoteError, NamespaceReset
from cenote.api.keys import digest_keys, split_digests
from cenote.api.types import MatchResult
from cenote.v1 import master_pb2 as pb

from .asking import ask_master
from .state import Call
from .steps import AskMany, Plan

__all__ = ["exists", "match", "pin", "remove", "unpin"]

SLICE_KEYS: Final = 4096
"""Longer batches are cut into slices of this size, so that the master's other callers get their
turn. Shorter slices (so that client and master work at the same time) were measured to be slower:
512 keys take 190 us as one request, 330 us as two, 420 us as four."""

Bools = NDArray[np.bool_]


def exists(call: Call, keys: Sequence[bytes]) -> Plan[Bools]:
    """bool[n]: which keys are present."""
    count = len(keys)
    per_slice = min(SLICE_KEYS, call.state.limits.batch_keys_max)
    if count <= per_slice:
        if not count:
            return np.zeros(0, np.bool_)
        request = _exists_request(call, keys)
        reply = yield from ask_master(call, "exists", request, pb.ExistsResponse)
        if reply.past_tenure:
            call.state.doubt_leader()
        return _bools(reply.present)
    slices = [keys[first : first + per_slice] for first in range(0, count, per_slice)]
    make: list[Callable[[], Message]] = [partial(_exists_request, call, part) for part in slices]
    replies = yield AskMany("exists", make, call.remaining_s())
    found = []
    for part, answer in zip(slices, replies, strict=True):
        if isinstance(answer, NamespaceReset):
            raise answer
        if isinstance(answer, CenoteError):  # once more, with all that `ask_master` can do
            request = _exists_request(call, part)
            answer = yield from ask_master(call, "exists", request, pb.ExistsResponse)
        if answer.past_tenure:
            call.state.doubt_leader()
        found.append(answer.present)
    return _bools(b"".join(found))


def _exists_request(call: Call, keys: Sequence[bytes]) -> pb.ExistsRequest:
    return pb.ExistsRequest(
        keys=call.key_batch(digest_keys(keys, call.space.seed)),
        piggyback=call.state.piggyback(call.space),
    )


def match(call: Call, keys: Sequence[bytes], *, will_read: bool) -> Plan[MatchResult]:
    """Presence of each key of a prefix chain, and how many from the first on."""
    present = []
    prefix_keys = 0
    per_slice = call.state.limits.batch_keys_max
    for first in range(0, len(keys), per_slice):
        part = keys[first : first + per_slice]
        request = pb.MatchRequest(
            keys=call.key_batch(digest_keys(part, call.space.seed)),
            piggyback=call.state.piggyback(call.space),
            will_read=will_read,
        )
        reply = yield from ask_master(call, "match", request, pb.MatchResponse)
        if reply.past_tenure:
            call.state.doubt_leader()
        if prefix_keys == first:
            prefix_keys += reply.prefix_keys
        bitmap = np.frombuffer(reply.presence_bitmap, np.uint8)
        present.append(np.unpackbits(bitmap, count=len(part), bitorder="little").view(np.bool_))
    return MatchResult(prefix_keys, np.concatenate(present) if present else np.zeros(0, np.bool_))


def remove(call: Call, keys: Sequence[bytes]) -> Plan[Bools]:
    """bool[n]: which keys were there and are removed."""
    removed = []
    for part in _slices(call, keys):
        digests = digest_keys(part, call.space.seed)
        request = pb.RemoveRequest(
            keys=call.key_batch(digests),
            session_id=call.state.session_id,
            request_id=next(call.state.request_ids),
            credentials=call.state.credentials,
            piggyback=call.state.piggyback(call.space),
        )
        try:
            reply = yield from ask_master(call, "remove", request, pb.RemoveResponse)
        finally:  # not before it: another thread's read may learn of them once more meanwhile
            for digest in split_digests(digests):
                call.space.locations.forget(digest)
        removed.append(reply.removed)
    return _bools(b"".join(removed))


def pin(call: Call, keys: Sequence[bytes], ttl_ms: int) -> Plan[Bools]:
    """bool[n]: which keys are there and pinned now; `ttl_ms` 0: until unpinned."""
    pinned = []
    for part in _slices(call, keys):
        request = pb.PinRequest(
            keys=call.key_batch(digest_keys(part, call.space.seed)),
            ttl_ms=ttl_ms,
            credentials=call.state.credentials,
        )
        reply = yield from ask_master(call, "pin", request, pb.PinResponse)
        pinned.append(reply.pinned)
    return _bools(b"".join(pinned))


def unpin(call: Call, keys: Sequence[bytes]) -> Plan[Bools]:
    """bool[n]: which keys were pinned."""
    unpinned = []
    for part in _slices(call, keys):
        request = pb.UnpinRequest(
            keys=call.key_batch(digest_keys(part, call.space.seed)),
            credentials=call.state.credentials,
        )
        reply = yield from ask_master(call, "unpin", request, pb.UnpinResponse)
        unpinned.append(reply.unpinned)
    return _bools(b"".join(unpinned))


def _slices(call: Call, keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    per_slice = call.state.limits.batch_keys_max
    return [keys[first : first + per_slice] for first in range(0, len(keys), per_slice)]


def _bools(raw: bytes) -> Bools:
    """Not uint8 as they come: Python's sum() of such an array overflows at 256."""
    there: Bools = np.frombuffer(raw, np.uint8) != 0
    return there
