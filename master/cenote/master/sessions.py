"""Sessions: who holds leases and grants, what was answered to them, and what dead ones leave
behind.

A session that falls silent leaves *orphans*: extents that its process may still be writing into and
rows that it may still be reading in place. No clock proves that it has stopped, so they wait until
the daemon of each extent reports the session as cut off (or the segment is gone).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import GrantRevoked, InvalidArgument, ResourceUnavailable, SessionUnknown

from .grants import Grant
from .leases import Lease
from .nodes import Node
from .spans import Spans, segments_of, units_of

__all__ = [
    "CANCELLED_MAX",
    "REQUESTS_SEEN",
    "Orphans",
    "Session",
    "Sessions",
    "claimer",
    "commit_key",
    "is_claimer",
    "start_key",
]

SESSION_ID_BYTES = 16
REQUESTS_SEEN = 2048
"""How far back it is known which requests of a session were decided."""
_SEEN_MASK = (1 << REQUESTS_SEEN) - 1
CANCELLED_MAX = 1024
"""Requests of a session that are refused if they are yet to come; the oldest are forgotten."""
_CLAIMS = b"claims"


def claimer(session_id: bytes) -> bytes:
    """The name under which `Orphans` keeps what a session claims under grants of an earlier tenure:
    apart from what it leaves behind in this one, which ends otherwise."""
    return session_id + _CLAIMS


def is_claimer(name: bytes) -> bool:
    return len(name) > SESSION_ID_BYTES


@dataclass(slots=True)
class Session:
    session_id: bytes
    client_name: str
    boot_id: str
    process_id: int
    observer: bool
    expires_s: float
    leases: set[Lease] = field(default_factory=set)
    grants: dict[int, Grant] = field(default_factory=dict)
    granted_units: int = 0
    replies: dict[int, tuple[object, int]] = field(default_factory=dict)
    """Request key -> (reply, its bytes), oldest first."""
    reply_bytes: int = 0
    cancelled: dict[int, None] = field(default_factory=dict)
    """Ids of requests whose answers nobody waits for any more, oldest first."""
    newest_request: int = 0
    decided: int = 0
    """Bit i: request `newest_request` - i gave something. REQUESTS_SEEN of them are kept."""
    sealed_through: int = 0
    """All that commits up to this request id decided is sealed; see `sealing`."""
    unsealed: dict[int, tuple[NDArray[np.int64] | int, NDArray[np.uint64] | int]] = field(
        default_factory=dict
    )
    """Request ids of later ones -> (rows, seqs) that they decided, oldest first."""

    def cancel(self, request_id: int) -> None:
        """Refuse a request that may still come."""
        self.cancelled[request_id] = None
        while len(self.cancelled) > CANCELLED_MAX:
            del self.cancelled[next(iter(self.cancelled))]

    def begin(self, request_id: int) -> None:
        """A request that gives something is about to be decided, for the only time.

        Raises GrantRevoked for one that was cancelled before it came, and for one whose reply is
        not kept any more: it came once more, late, and nobody would use what it was given then.
        """
        if request_id in self.cancelled:
            raise GrantRevoked(f"request {request_id} was cancelled by its own session")
        ahead = request_id - self.newest_request
        if ahead > 0:
            kept = self.decided << ahead if ahead < REQUESTS_SEEN else 0
            self.decided = kept & _SEEN_MASK | 1
            self.newest_request = request_id
            return
        bit = 1 << -ahead if -ahead < REQUESTS_SEEN else 0
        if not bit or self.decided & bit:
            raise GrantRevoked(
                f"request {request_id} was answered before, and the answer is not kept any more",
                remedy="ask anew",
            )
        self.decided |= bit

    def remember(self, key: int, reply: object, size: int, count_max: int, bytes_max: int) -> None:
        """Keep a reply for a retry of the same request; the oldest ones make room."""
        replies = self.replies
        replies[key] = (reply, size)
        self.reply_bytes += size
        while len(replies) > count_max or (self.reply_bytes > bytes_max and len(replies) > 1):
            self.reply_bytes -= replies.pop(next(iter(replies)))[1]


class Sessions:
    """Live sessions by id, and the order in which they run out."""

    __slots__ = ("_heap", "by_id")

    def __init__(self) -> None:
        self.by_id: dict[bytes, Session] = {}
        self._heap: list[tuple[float, bytes]] = []

    def get(self, session_id: bytes) -> Session:
        """Raises SessionUnknown."""
        session = self.by_id.get(session_id)
        if session is None:
            raise SessionUnknown(
                f"session {session_id.hex()[:16] or '(empty)'} is not known: it ran out, "
                "or the master restarted",
                remedy="say hello again",
            )
        return session

    def open(self, session: Session, sessions_max: int) -> Session:
        """Add a session, or bring a known one's facts up to date.

        Raises InvalidArgument (bad id), ResourceUnavailable (too many).
        """
        session_id = session.session_id
        if len(session_id) != SESSION_ID_BYTES:
            raise InvalidArgument(
                f"a session id has {SESSION_ID_BYTES} bytes, not {len(session_id)}"
            )
        known = self.by_id.get(session_id)
        if known is not None:
            known.client_name = session.client_name
            known.boot_id = session.boot_id
            known.process_id = session.process_id
            known.observer = session.observer
            known.expires_s = max(known.expires_s, session.expires_s)
            return known
        if len(self.by_id) >= sessions_max:
            raise ResourceUnavailable(
                f"{sessions_max} sessions are open", remedy="close clients that are not needed"
            )
        self.by_id[session_id] = session
        heappush(self._heap, (session.expires_s, session_id))
        return session

    def close(self, session_id: bytes) -> Session | None:
        session = self.by_id.pop(session_id, None)
        # One heap entry a session is left behind; when they are most of it, they are thrown out.
        if len(self._heap) > 64 + 2 * len(self.by_id):
            self._heap = [(s.expires_s, s.session_id) for s in self.by_id.values()]
            heapify(self._heap)
        return session

    def due(self, now_s: float, limit: int) -> list[Session]:
        """Take out up to `limit` sessions that ran out."""
        ended: list[Session] = []
        heap = self._heap
        while heap and heap[0][0] <= now_s and len(ended) < limit:
            _, session_id = heappop(heap)
            session = self.by_id.get(session_id)
            if session is None:
                continue
            if session.expires_s > now_s:
                heappush(heap, (session.expires_s, session_id))
            else:
                del self.by_id[session_id]
                ended.append(session)
        return ended


@dataclass(slots=True)
class _Orphan:
    extents: dict[int, list[Spans]] = field(default_factory=dict)
    """By node."""
    holds: dict[Lease, set[int]] = field(default_factory=dict)
    """Nodes that have not reported yet."""


class Orphans:
    """What cut-off sessions leave behind, by session and node."""

    __slots__ = ("_by_session", "units")

    def __init__(self) -> None:
        self._by_session: dict[bytes, _Orphan] = {}
        self.units = 0
        """Quarantined."""

    def __len__(self) -> int:
        return len(self._by_session)

    def __contains__(self, session_id: bytes) -> bool:
        return session_id in self._by_session

    def add(self, session_id: bytes, node_id: int, extents: Spans) -> None:
        orphan = self._by_session.setdefault(session_id, _Orphan())
        orphan.extents.setdefault(node_id, []).append(extents)
        self.units += units_of(extents)

    def add_hold(self, session_id: bytes, hold: Lease, node_ids: set[int]) -> None:
        self._by_session.setdefault(session_id, _Orphan()).holds[hold] = set(node_ids)

    def nodes_of(self, session_id: bytes) -> set[int]:
        """Nodes that have yet to report this session as cut."""
        orphan = self._by_session.get(session_id)
        if orphan is None:
            return set()
        return set(orphan.extents).union(*orphan.holds.values())

    def sessions_at(self, node_id: int) -> list[bytes]:
        """Sessions that this node has yet to report as cut."""
        return [s for s in self._by_session if node_id in self.nodes_of(s)]

    def cut(self, session_id: bytes, node_id: int) -> tuple[list[Spans], list[Lease]]:
        """The node says that the session can't touch its extents any more.

        Returns the extents to free and the holds that ended.
        """
        orphan = self._by_session.get(session_id)
        if orphan is None:
            return [], []
        extents = orphan.extents.pop(node_id, [])
        self.units -= sum(map(units_of, extents))
        ended = []
        for hold, waiting in list(orphan.holds.items()):
            waiting.discard(node_id)
            if not waiting:
                ended.append(hold)
                del orphan.holds[hold]
        if not orphan.extents and not orphan.holds:
            del self._by_session[session_id]
        return extents, ended

    def forget_segment(self, segment_id: int, node: Node) -> list[Lease]:
        """A segment is gone (it has left its node already): nothing in it has to wait any more.

        Returns the holds that ended with it.
        """
        ended: list[Lease] = []
        for session_id in list(self._by_session):
            orphan = self._by_session[session_id]
            left = []
            for spans in orphan.extents.pop(node.node_id, []):
                stays = spans[segments_of(spans) != segment_id]
                self.units -= units_of(spans) - units_of(stays)
                if len(stays):
                    left.append(stays)
            if left:
                orphan.extents[node.node_id] = left
            if not node.segment_ids:
                for hold, waiting in list(orphan.holds.items()):
                    waiting.discard(node.node_id)
                    if not waiting:
                        ended.append(hold)
                        del orphan.holds[hold]
            if not orphan.extents and not orphan.holds:
                del self._by_session[session_id]
        return ended


def start_key(request_id: int) -> int:
    """Where the reply to a PutStart is kept."""
    return request_id << 1


def commit_key(request_id: int) -> int:
    """Where the reply to a PutCommit is kept."""
    return request_id << 1 | 1
