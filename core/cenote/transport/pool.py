"""Several connections of one session to one daemon, shared by the threads of a process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from struct import Struct
from time import monotonic
from typing import Final, final

import numpy as np

from cenote.api.contents import TICKET_BYTES
from cenote.api.errors import ClientClosed, DeadlineExceeded, InvalidArgument, ProtocolError
from cenote.api.rows import SEAL
from cenote.security.tls import Tls
from cenote.v1 import store_pb2

from . import wire
from .access import Access
from .base import SealBatch, SessionIdentity, U8Array
from .connection import SMALL_BYTES, DataConnection
from .memory_access import MEMORY
from .opening import Target, connect, greet, shake_hands
from .proofs import ProofBatch

__all__ = ["ConnectionPool", "PooledMessages", "hello_for"]

TRUSTED_IDLE_S: Final = 0.05
CLOSE_WAIT_S: Final = 0.9
_SEAL_ROWS_MAX: Final = 2_048
_SEAL_HEAD: Final = Struct(wire.REQUEST.format + wire.SEAL_PREFIX.format[1:])


def hello_for(
    identity: SessionIdentity,
    epoch: int,
    *,
    writer: bool,
    want_descriptors: bool = False,
    wants_claims: bool = False,
    has_head: bool = False,
    wants_staging: bool = False,
) -> store_pb2.DataHelloRequest:
    """What a session says first on a data connection."""
    return store_pb2.DataHelloRequest(
        session_id=identity.session_id,
        epoch=epoch,
        boot_id=identity.boot_id,
        process_id=identity.process_id,
        writer=writer,
        want_descriptors=want_descriptors,
        wants_claims=wants_claims,
        has_head=has_head,
        ticket=identity.access.ticket,
        wants_staging=wants_staging,
    )


@final
class ConnectionPool:
    """At most `limit` connections; a call takes one and gives it back, or discards it.

    The last one given back is taken first. One that was idle for more than TRUSTED_IDLE_S is looked
    at before it is used, since the daemon may have been restarted. A request is never sent twice by
    itself: bytes of the first may still be on their way into a segment. `on_closed` is told of each
    connection that was closed. `access` has the session's ticket of now.
    """

    def __init__(
        self,
        target: Target,
        name: str,
        hello: store_pb2.DataHelloRequest,
        limit: int,
        spin_s: float = 0.0,
        on_greeted: Callable[[store_pb2.DataHelloResponse], None] | None = None,
        on_closed: Callable[[DataConnection], None] | None = None,
        access: Access | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self.name = name
        self._target = target
        self._hello = hello
        self._access = access
        self._limit = limit
        self._spin_s = spin_s
        self._on_greeted = on_greeted
        self._on_closed = on_closed
        self._idle: list[DataConnection] = []
        self._all: set[DataConnection] = set()
        self._opening = 0
        self._waiting = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False

    @property
    def address(self) -> str:
        """Where the daemon listens, for people."""
        if isinstance(self._target, str):
            return self._target
        host, port = self._target[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def access(self) -> Access | None:
        """What the session may show its daemon."""
        return self._access

    @property
    def hello(self) -> store_pb2.DataHelloRequest:
        """What new connections say first."""
        return self._hello

    def take(self, deadline: float, now: float) -> DataConnection:
        """A connection on which a call until `deadline` has begun.

        Raises a connection's and a hello's errors, and DeadlineExceeded where none becomes free.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._take_other(deadline)
            now = monotonic()
        else:
            if now - connection.begun_at > TRUSTED_IDLE_S and not connection.is_quiet():
                self.discard(connection)
                return self.take(deadline, now)
        try:
            connection.begin(deadline, now)
        except DeadlineExceeded:
            self.give_back(connection)
            raise
        return connection

    def give_back(self, connection: DataConnection) -> None:
        """The call ended well, all of its replies have been received."""
        # Append first, then look: whoever waits or closes does it the other way round.
        self._idle.append(connection)
        if self._waiting or self._closed:
            self._tell()

    def discard(self, connection: DataConnection) -> None:
        """Close a connection on which something went wrong."""
        self._close_one(connection)
        with self._lock:
            self._all.discard(connection)
            self._changed.notify_all()

    def _tell(self) -> None:
        with self._lock:
            if self._closed:
                self._close_idle()
            self._changed.notify_all()

    def _close_idle(self) -> None:
        while self._idle:
            connection = self._idle.pop()
            self._close_one(connection)
            self._all.discard(connection)

    def _close_one(self, connection: DataConnection) -> None:
        connection.close()
        if self._on_closed is not None:
            self._on_closed(connection)

    def _take_other(self, deadline: float) -> DataConnection:
        with self._lock:
            self._waiting += 1
            try:
                while True:
                    if self._closed:
                        raise ClientClosed(f"the channel to {self.name} is closed")
                    if self._idle:
                        with contextlib.suppress(IndexError):
                            return self._idle.pop()
                    if len(self._all) + self._opening < self._limit:
                        break
                    left_s = deadline - monotonic()
                    if left_s <= 0:
                        raise DeadlineExceeded(
                            f"all {self._limit} connections to {self.name} were in use"
                        )
                    self._changed.wait(left_s)
                self._opening += 1
            finally:
                self._waiting -= 1
        return self._open(deadline)

    def _open(self, deadline: float) -> DataConnection:
        try:
            connection = connect(self._target, self.name, deadline, self._spin_s)
        except BaseException:  # whatever it was, another thread may try
            with self._lock:
                self._opening -= 1
                self._changed.notify_all()
            raise
        with self._lock:
            self._opening -= 1
            self._all.add(connection)  # so that `close` can interrupt the hello
            if self._closed:
                connection.shut_down()
        try:
            shake_hands(connection, self._target, deadline, self._tls)
            hello = self._hello
            if self._access is not None and self._access.ticket != hello.ticket:
                # The one of before is worth nothing once its key was replaced.
                hello = store_pb2.DataHelloRequest()
                hello.CopyFrom(self._hello)
                hello.ticket = self._access.ticket
                self._hello = hello
            response, _ = greet(connection, hello)
            if self._on_greeted is not None:
                self._on_greeted(response)
        except BaseException:  # whatever it was, nobody may use this connection
            self.discard(connection)
            raise
        return connection

    def close(self) -> None:
        """Interrupt calls under way and wait until they have left (CLOSE_WAIT_S at most)."""
        with self._lock:
            self._closed = True
            self._close_idle()
            for connection in self._all:
                connection.shut_down()
            self._changed.notify_all()
            end = monotonic() + CLOSE_WAIT_S
            while self._all or self._opening:
                left_s = end - monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    break

    # ---- seals ------------------------------------------------------------------------------

    def seal(self, batch: SealBatch, deadline_s: float) -> U8Array:
        """Have the daemon write the batch's slots: a status for each row.

        Raises StaleEpoch, InvalidArgument (no whole rows) and a connection's errors.
        """
        count = len(batch.rows) // wire.SEAL_ROW_BYTES
        if not batch.rows:
            return np.empty(0, np.uint8)
        now = monotonic()
        connection = self.take(now + deadline_s, now)
        try:
            if count <= _SEAL_ROWS_MAX:
                statuses = self._seal_rows(connection, batch, count, batch.rows, batch.keys)
            else:
                statuses = self._seal_slices(connection, batch, count)
        except BaseException:  # whatever it was, a reply may still be on its way
            self.discard(connection)
            raise
        self.give_back(connection)
        return statuses

    def _seal_slices(self, connection: DataConnection, batch: SealBatch, count: int) -> U8Array:
        lengths = np.frombuffer(batch.rows, SEAL, count)["key_length"]
        starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        rows, keys = memoryview(batch.rows), memoryview(batch.keys)
        parts = []
        for first in range(0, count, _SEAL_ROWS_MAX):
            last = min(count, first + _SEAL_ROWS_MAX)
            some_rows = rows[first * wire.SEAL_ROW_BYTES : last * wire.SEAL_ROW_BYTES]
            some_keys = keys[starts[first] : starts[last]]
            parts.append(self._seal_rows(connection, batch, last - first, some_rows, some_keys))
        return np.concatenate(parts)

    def _seal_rows(
        self,
        connection: DataConnection,
        batch: SealBatch,
        count: int,
        rows: bytes | memoryview,
        keys: bytes | memoryview,
    ) -> U8Array:
        if count * wire.SEAL_ROW_BYTES != len(rows):
            raise InvalidArgument(f"{len(rows)} bytes are no SEAL rows")
        call_id = connection.call_id = connection.call_id + 1 & 0xFFFF_FFFF
        length = wire.SEAL_PREFIX.size + len(rows) + len(keys)
        head = _SEAL_HEAD.pack(
            wire.OP_SEAL, 0, 0, count, call_id, batch.epoch, 0, length,
            batch.namespace_id, batch.generation,
        )  # fmt: skip
        size = len(head) + len(rows) + len(keys)
        if size <= SMALL_BYTES:
            out = connection.out_address
            MEMORY[out : out + size] = b"".join((head, rows, keys))
            connection.send(out, size)
        else:
            connection.send_views([head, rows, keys])
        _, statuses = connection.receive_reply(wire.OP_SEAL, call_id, count)
        return np.frombuffer(statuses, np.uint8)

    # ---- proofs -----------------------------------------------------------------------------

    def prove(self, batch: ProofBatch, deadline_s: float) -> tuple[U8Array, bytes]:
        """See `Channel.prove`. Raises as `seal` does."""
        count = len(batch.rows) // wire.PROOF_ROW_BYTES
        if count * wire.PROOF_ROW_BYTES != len(batch.rows) or not 0 < count <= wire.ITEMS_MAX:
            raise InvalidArgument(f"{len(batch.rows)} bytes are no PROOF rows")
        now = monotonic()
        connection = self.take(now + deadline_s, now)
        try:
            call_id = connection.call_id = connection.call_id + 1 & 0xFFFF_FFFF
            length = len(batch.rows)
            head = wire.REQUEST.pack(wire.OP_PROVE, 0, 0, count, call_id, 0, batch.grant_id, length)
            connection.send_views([head, batch.rows])
            length, statuses = connection.receive_reply(wire.OP_PROVE, call_id, count)
            if length != count * TICKET_BYTES:
                raise ProtocolError(f"{connection.name} sent {length} bytes of tickets")
            tickets = bytearray(length)
            connection.receive_view(memoryview(tickets))
        except BaseException:  # whatever it was, the rest of the reply may still be on its way
            self.discard(connection)
            raise
        self.give_back(connection)
        return np.frombuffer(statuses, np.uint8), bytes(tickets)


class PooledMessages:
    """The calls of a channel that are messages to the daemon, whatever its bytes go over."""

    _pool: ConnectionPool

    def seal(self, batch: SealBatch, deadline_s: float) -> U8Array:
        """See `Channel.seal`."""
        return self._pool.seal(batch, deadline_s)

    def prove(self, batch: ProofBatch, deadline_s: float) -> tuple[U8Array, bytes]:
        """See `Channel.prove`."""
        return self._pool.prove(batch, deadline_s)
