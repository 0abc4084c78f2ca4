"""Who may be touching this daemon's segments, and how that is ended.

A session writes over sockets, or into segments that it has mapped.

*Sockets.* Each connection is served by one thread, which holds the connection's lock whenever bytes
may go from the socket to a segment. `cut` marks the connection as revoked, wakes the thread, and
takes the lock: once it has it, no byte of that connection can land any more.

*Mappings.* A stopped process can't be told anything, so that it has no mapping any more must be
seen from outside, also by a daemon that was restarted and has never met it. Therefore every
descriptor that leaves this daemon is opened for that session alone and carries a read lock ("open
file description lock") on one byte whose position is made of the session id. The kernel drops the
lock when the last descriptor *and mapping* of it is gone, in whichever process; it lies at the file
itself, so that any daemon that opened the segment can ask for it. No process ids, hence no trouble
with reuse, containers or forked children.

A session that still has a mapping when it is cut is *quarantined* until the lock is gone: `poll`.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from time import monotonic
from typing import Final, Protocol, final

from cenote.api.errors import GrantRevoked, InvalidArgument, ResourceUnavailable

from .segment import Segment, SegmentSet

__all__ = ["SESSION_ID_BYTES", "SessionConnection", "SessionTable", "is_mapped", "open_marked"]

SESSION_ID_BYTES: Final = 16
_REFUSED_MAX: Final = 65_536  # session ids are never used again; older ones fall out
_FLOCK: Final = Struct("@hhqqi0q")
"""struct flock: type, whence, start, length, process id (0)."""


class SessionConnection(Protocol):
    """What this module needs of a connection."""

    def revoke(self) -> None:
        """Let no further request begin, and wake a receive under way. Does not wait."""
        ...

    def supersede(self, epoch: int) -> None:
        """End what lands without this daemon's help and began before this epoch: when this returns,
        nothing of it does any more. The client makes another connection."""
        ...

    def writes_of_older(self, epoch: int) -> bool:
        """Whether a change of an epoch before this one may be under way."""
        ...

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until no byte of a request that began before can reach a segment."""
        ...


def _lock_position(session_id: bytes) -> int:
    return int.from_bytes(session_id[:8], "little") >> 2  # file offsets are signed


def open_marked(segment: Segment, session_id: bytes, *, writable: bool) -> int:
    """A new descriptor of the segment's data for one session; the caller closes or passes it.

    Raises ResourceUnavailable.
    """
    flags = os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY)
    try:
        descriptor = os.open(f"/proc/self/fd/{segment.fd}", flags)
    except OSError as error:
        raise ResourceUnavailable(
            f"segment {segment.segment_id} can't be opened for a client: {error}",
            remedy="raise the daemon's limit of open files (ulimit -n), and mount /proc",
        ) from error
    wanted = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _lock_position(session_id), 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
    except OSError as error:
        os.close(descriptor)
        raise ResourceUnavailable(
            f"segment {segment.segment_id} can't be marked as mapped: {error}"
        ) from error
    return descriptor


def is_mapped(segment: Segment, session_id: bytes) -> bool:
    """Whether the session (or a forked child) holds a descriptor or mapping of the segment."""
    if segment.fd < 0:
        return False
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _lock_position(session_id), 1, 0)
    answer = fcntl.fcntl(segment.fd, fcntl.F_OFD_GETLK, asked)
    return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK


@final
class SessionTable:
    """The sessions of this daemon's data connections; safe from several threads."""

    def __init__(self, segments: SegmentSet) -> None:
        self._segments = segments
        self._lock = threading.Lock()
        self._connections: dict[bytes, list[SessionConnection]] = {}
        self._refused: dict[bytes, None] = {}
        self._quarantined: dict[bytes, list[SessionConnection]] = {}
        self.on_cut: Callable[[bytes], None] = lambda _: None
        """Gets each session that is never let in again."""

    # ---- connections ------------------------------------------------------------------------

    def admit(self, session_id: bytes, connection: SessionConnection) -> None:
        """Count a connection to its session until `leave`.

        Raises InvalidArgument (no session id) and GrantRevoked (the session was cut off).
        """
        if len(session_id) != SESSION_ID_BYTES:
            raise InvalidArgument(f"a session id has {SESSION_ID_BYTES} bytes")
        with self._lock:
            if session_id in self._refused:
                raise GrantRevoked(
                    "this session was cut off", remedy="open a new session with the master"
                )
            self._connections.setdefault(session_id, []).append(connection)

    def leave(self, session_id: bytes, connection: SessionConnection) -> None:
        """The connection is closed and its thread out of every segment."""
        with self._lock:
            connections = self._connections.get(session_id)
            if connections is None or connection not in connections:
                return
            connections.remove(connection)
            if not connections:
                del self._connections[session_id]

    def session_count(self) -> int:
        """Sessions that have a connection now."""
        return len(self._connections)

    # ---- ending writers ---------------------------------------------------------------------

    def cut(
        self, session_ids: Sequence[bytes], timeout_s: float = 1.0
    ) -> tuple[list[bytes], list[bytes]]:
        """End these sessions here, for good: (cut, quarantined).

        Of a cut session no byte can reach a segment any more, and it can't read through a mapping.
        A quarantined one still may; `poll` tells when not. Unknown sessions may have been another
        daemon process's, so their mappings count, too. Takes `timeout_s` at most.
        """
        deadline = monotonic() + timeout_s
        with self._lock:
            for session_id in session_ids:
                self._refused[session_id] = None
            while len(self._refused) > _REFUSED_MAX:
                del self._refused[next(iter(self._refused))]
            found = {s: list(self._connections.get(s, ())) for s in session_ids}
        for session_id, connections in found.items():
            self.on_cut(session_id)
            for connection in connections:
                connection.revoke()
        cut, quarantined = [], []
        for session_id, connections in found.items():
            if self._is_out(session_id, connections, deadline):
                cut.append(session_id)
            else:
                quarantined.append(session_id)
        with self._lock:
            for session_id in cut:
                self._quarantined.pop(session_id, None)
            for session_id in quarantined:
                self._quarantined[session_id] = found[session_id]
        return cut, quarantined

    def poll(self) -> list[bytes]:
        """Quarantined sessions that are cut by now; each is told once."""
        with self._lock:
            waiting = list(self._quarantined.items())
        out = [s for s, connections in waiting if self._is_out(s, connections, 0.0)]
        with self._lock:
            return [s for s in out if self._quarantined.pop(s, None) is not None]

    def quarantined(self) -> list[bytes]:
        """Sessions that were to be cut and may still touch a segment."""
        with self._lock:
            return list(self._quarantined)

    def end_older_writes(self, epoch: int, timeout_s: float = 1.0) -> bool:
        """Make sure that no change of an epoch before this one is under way on any connection.

        To be called after `segments.epoch` was raised to it: requests that come later are refused
        by themselves. Returns False where a thread did not leave in time; its connection is
        revoked. Mapped writers are not seen here.
        """
        deadline = monotonic() + timeout_s
        with self._lock:
            every = [c for connections in self._connections.values() for c in connections]
        for connection in every:
            connection.supersede(epoch)
        older = [connection for connection in every if connection.writes_of_older(epoch)]
        for connection in older:
            connection.revoke()
        return all(c.wait_quiet(max(0.0, deadline - monotonic())) for c in older)

    def _is_out(
        self, session_id: bytes, connections: Iterable[SessionConnection], deadline: float
    ) -> bool:
        for connection in connections:
            if not connection.wait_quiet(max(0.0, deadline - monotonic())):
                return False
        return not any(is_mapped(segment, session_id) for segment in self._segments.all())
