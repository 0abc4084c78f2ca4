"""What connections are served with, what is counted of each, and what changes are refused with."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import InvalidArgument, ProtocolError, StaleEpoch, StaleLocation
from cenote.api.rows import SEAL
from cenote.runtime.metrics import Histogram
from cenote.security.refusals import Refusals
from cenote.security.tls import Tls
from cenote.security.tls_socket import TlsSocket
from cenote.transport import wire
from cenote.transport.base import U8Array, U64Array
from cenote.transport.memory_access import locate
from cenote.v1 import common_pb2, store_pb2

from .segment import Segment, SegmentSet

__all__ = [
    "SERVED",
    "TIMED_MASK",
    "ConnectionCounters",
    "ServingLimits",
    "TlsPort",
    "check_count",
    "epoch_error",
    "grant_error",
    "introduction",
    "judged",
    "located",
    "peer_name",
    "seals_in",
    "served_times",
]

_UCRED: Final = Struct("3i")
_FIRST: Final = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """How long a client may keep a thread waiting in the middle of something."""

    hello_timeout_s: float = 5.0
    stall_timeout_s: float = 10.0
    """For each MiB of a request or reply: slower clients are closed."""
    spin_s: float = 50e-6
    """How long a thread looks for a hot connection's next request before it sleeps; 0: never."""


_STALE: Final = StaleLocation.code
_INVALID: Final = InvalidArgument.code
SERVED: Final = {wire.OP_READ: "read", wire.OP_WRITE: "write", wire.OP_SEAL: "seal"}
"""Operations whose time is taken."""
TIMED_MASK: Final = 15
"""Of one request of sixteen."""


@dataclass(slots=True)
class ConnectionCounters:
    """What went over a connection; written by its thread alone."""

    read_bytes: int = 0
    written_bytes: int = 0
    seals: int = 0
    requests: int = 0
    errors: int = 0
    """Connections ended by a refusal."""

    def add(self, other: ConnectionCounters) -> None:
        """Those of a connection that has ended."""
        self.read_bytes += other.read_bytes
        self.written_bytes += other.written_bytes
        self.seals += other.seals
        self.requests += other.requests
        self.errors += other.errors


def served_times() -> dict[int, Histogram]:
    """By operation, how long a request was served, its bytes included. All connections of a server
    write to the same ones: under the interpreter lock no count is lost."""
    return {operation: Histogram() for operation in SERVED}


def introduction(
    daemon: SegmentSet, segments: Sequence[Segment], server_version: str
) -> store_pb2.DataHelloResponse:
    """What a hello is answered with; `segments`: those that it is about, whose descriptors the
    client can have, and those on an SSD."""
    reply = store_pb2.DataHelloResponse(
        epoch=daemon.epoch, node_id=daemon.node_id, server_version=server_version
    )
    for segment in segments:
        told = reply.segments if segment.disk is None else reply.disk_segments
        told.append(
            store_pb2.SharedSegment(
                segment_id=segment.segment_id,
                size_bytes=segment.size_bytes,
                incarnation=segment.incarnation,
                tier=cast("common_pb2.Tier", segment.tier),
                ready_bytes=segment.ready_bytes,
                index=segment.index,
            )
        )
    return reply


def judged(
    segments: SegmentSet, segment_id: int, offset: int, length: int
) -> tuple[Segment | None, int]:
    """(its segment, the status of one item as a request names it)."""
    segment = segments.by_id(segment_id)
    if segment is None:
        return None, _STALE
    if not length or offset + length > segment.ready_bytes:
        return segment, _INVALID
    return segment, 0


def located(segments: SegmentSet, rows: NDArray[np.void]) -> tuple[U8Array, U64Array, U64Array]:
    """Judge each row: statuses, addresses (of good ones), lengths."""

    def find(segment_id: int) -> tuple[int, int] | None:
        segment = segments.by_id(segment_id)
        return None if segment is None else (segment.address, segment.ready_bytes)

    return locate(rows, find)


def check_count(count: int, body_fits: bool) -> None:
    """Raises ProtocolError for a request of too many items, or none, or another length."""
    if not 0 < count <= wire.ITEMS_MAX or not body_fits:
        raise ProtocolError(
            f"a request of {count} items (1 to {wire.ITEMS_MAX}) whose length does not fit"
        )


def epoch_error(epoch: int, followed: int) -> StaleEpoch:
    """For a change of an epoch before the one that this daemon follows."""
    return StaleEpoch(
        f"a change of epoch {epoch}; this daemon follows epoch {followed}",
        remedy="ask the master again",
    )


def grant_error(grant_id: int) -> StaleLocation:
    """For a write under a grant that is not valid (any more)."""
    return StaleLocation(
        f"grant {grant_id} was made before this daemon attached to its master, if it has"
    )


class TlsPort(NamedTuple):
    """A port that speaks nothing but TLS."""

    tls: Tls
    refusals: Refusals


def peer_name(sock: socket.socket | TlsSocket) -> str:
    """Who is at the other end, for the log."""
    try:
        if isinstance(sock, socket.socket) and sock.family == socket.AF_UNIX:
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            pid, uid, _ = _UCRED.unpack(raw)
            return f"unix:pid={pid},uid={uid}"
        host, port = sock.getpeername()[:2]
    except OSError:
        return "?"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def seals_in(
    view: memoryview, count: int
) -> tuple[int, int, NDArray[np.void], memoryview, NDArray[np.int64]]:
    """The body of a request SEAL: namespace id, generation, SEAL rows, keys, where each begins.

    Raises ProtocolError.
    """
    namespace_id, generation = wire.SEAL_PREFIX.unpack_from(view)
    rows = np.frombuffer(view, SEAL, count, wire.SEAL_PREFIX.size)
    keys = view[wire.SEAL_PREFIX.size + count * wire.SEAL_ROW_BYTES :]
    key_lengths = rows["key_length"]
    if count == 1:
        keys_bytes, key_starts = int(key_lengths[0]), _FIRST
    else:
        key_ends = np.cumsum(key_lengths, dtype=np.int64)
        keys_bytes, key_starts = int(key_ends[-1]), key_ends - key_lengths
    if keys_bytes != len(keys):
        raise ProtocolError(f"{len(keys)} bytes of keys for {keys_bytes}")
    return namespace_id, generation, rows, keys, key_starts
