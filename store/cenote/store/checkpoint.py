"""What a data connection asks of the gate, and says to the log, where credentials are asked for."""

from __future__ import annotations

import socket
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError, PermissionDenied, ProtocolError, Unavailable
from cenote.api.rows import EXTENT
from cenote.security.refusals import is_refusal
from cenote.security.tls_socket import TlsSocket
from cenote.transport import wire
from cenote.v1 import store_pb2

from .gate import Gate, Pass
from .segment import Segment, SegmentSet, seal_rows
from .serving import peer_name

__all__ = ["DENIED", "Checkpoint"]

DENIED: Final = PermissionDenied.code
_FOR_MAPPERS: Final = {
    wire.OP_RDMA: "RDMA",
    wire.OP_STAGED: "reading staging memory",
    wire.OP_PROVE: "deduplication",
}


@final
class Checkpoint:
    """Of one connection; its thread's."""

    def __init__(self, gate: Gate, segments: SegmentSet, sock: socket.socket | TlsSocket) -> None:
        self._gate = gate
        self._segments = segments
        self.sock = sock
        self._port = "unix" if sock.family == socket.AF_UNIX else "tcp"
        self._pass: Pass | None = None

    @property
    def _session(self) -> Pass:
        assert self._pass is not None, "nothing is served before a hello"
        return self._pass

    def admit(self, hello: store_pb2.DataHelloRequest) -> bool:
        """Whether the connection may write. Raises Unauthenticated, PermissionDenied, and
        Unavailable where it can't be told yet."""
        try:
            session = self._pass = self._gate.admit(hello.ticket, hello.session_id)
        except Unavailable as error:
            self._gate.refusals.note(self._port, error, peer_name(self.sock))
            raise
        if hello.want_descriptors:
            self.need_mapping("mapping memory")
            if hello.writer and not session.may_write:
                raise PermissionDenied(f"token {session.holder} may not write")
        return session.may_write

    # ---- refusals -----------------------------------------------------------------------------

    def note(self, error: CenoteError) -> None:
        """The connection, or a request, ends with this."""
        if is_refusal(error):
            who = "" if self._pass is None else f"{self._pass.holder} at "
            self._gate.refusals.note(self._port, error, who + peer_name(self.sock))

    def denied(self, what: str) -> PermissionDenied:
        """An error for `what`, which was noted."""
        error = PermissionDenied(what)
        self.note(error)
        return error

    def need_mapping(self, what: str) -> None:
        """Raises PermissionDenied where the session may not map memory."""
        if not self._session.may_map:
            raise PermissionDenied(
                f"{what} is not for token {self._session.holder}, which has not all namespaces",
                remedy="go over TCP, as clients do by themselves",
            )

    def check_operation(self, op: int) -> None:
        """Raises PermissionDenied for what is not for everybody, whatever it is about."""
        if op == wire.OP_SLOTS and not self._session.is_store:
            raise PermissionDenied("only store daemons copy slots")
        if op in _FOR_MAPPERS:
            self.need_mapping(_FOR_MAPPERS[op])

    # ---- requests -----------------------------------------------------------------------------

    def may_read(self, segment: Segment, offset: int, length: int) -> bool:
        """Whether one extent may be read; it is noted where not."""
        if self._session.may_read(segment, offset, length):
            return True
        self.denied("a read of what is not this token's")
        return False

    def deny_reads(self, rows: NDArray[np.void], statuses: NDArray[np.uint8]) -> None:
        """Set the status of EXTENT rows that may not be read."""
        if self._session.deny_reads(rows, statuses, self._segments):
            self.denied("reads of what is not this token's")

    def may_write(self, grant_id: int, rows: NDArray[np.void]) -> bool:
        """Whether these EXTENT rows are of a grant that this session has shown."""
        return not len(rows) or self._session.may_write_at(grant_id, rows)

    def may_write_one(self, grant_id: int, segment_id: int, offset: int, length: int) -> bool:
        """The same for one."""
        return self._session.may_write_one(grant_id, segment_id, offset, length)

    def show_grant(self, view: memoryview, count: int, grant_id: int) -> None:
        """The body of a request GRANT. Raises ProtocolError, PermissionDenied, GrantRevoked."""
        namespace_id, proofs = wire.GRANT_PREFIX.unpack_from(view)
        first = wire.GRANT_PREFIX.size + proofs
        if len(view) != first + count * wire.EXTENT_BYTES:
            raise ProtocolError(f"a grant of {count} extents in {len(view)} bytes")
        session = self._session
        if not session.may_write or not session.covers(namespace_id):
            raise PermissionDenied(f"token {session.holder} may not write there")
        rows = np.frombuffer(view, EXTENT, count, first)
        packed = bytes(view[wire.GRANT_PREFIX.size : first])
        self._gate.prove(session.session_id, grant_id, namespace_id, rows, packed)

    def seal_rows(
        self,
        head: tuple[int, int, int],
        rows: NDArray[np.void],
        keys: memoryview,
        key_starts: NDArray[np.int64],
    ) -> NDArray[np.uint8]:
        """`segment.seal_rows` for those rows that this session may have sealed."""
        may = self._session.may_seal(head[1], rows)
        statuses = np.full(len(rows), DENIED, np.uint8)
        if may.any():
            some = seal_rows(self._segments, head, rows[may], keys, key_starts[may])
            statuses[may] = some
            self._gate.sealed(head[1], rows[may][some == 0])
        if not may.all():
            self.denied("seals of what was not written under a grant of that namespace")
        return statuses
