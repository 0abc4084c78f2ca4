"""One data connection as the daemon serves it: requests in, segment memory in and out.

A thread with a blocking socket. Bytes go between socket and segment without a buffer in between; a
request is judged whole before the first byte moves. Whatever a client sends or fails to send ends
in an answer, or in this connection's end; nothing of it can take memory or the thread for ever:
numbers are bounded, and so is every wait but the one for the next request.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    CenoteError,
    GrantRevoked,
    InternalError,
    InvalidArgument,
    PermissionDenied,
    ProtocolError,
    ResourceUnavailable,
    StaleEpoch,
    StaleLocation,
    Unavailable,
)
from cenote.api.rows import EXTENT, PROOF
from cenote.runtime.log import get_logger
from cenote.runtime.metrics import Histogram
from cenote.transport import wire
from cenote.transport.item_stream import move_items
from cenote.transport.memory_access import MEMORY

from .checkpoint import DENIED, Checkpoint
from .claims import ClaimFile
from .disk_reads import send_items
from .gate import Gate
from .offering import answer_with_descriptors
from .partial_writes import drain, drain_stale, receive_some
from .proofs import prove_rows
from .rdma_host import HostedLane, RdmaHost
from .segment import SegmentSet, seal_rows
from .served_socket import STEP_BYTES, Gone, ServedSocket
from .serving import (
    TIMED_MASK,
    ConnectionCounters,
    ServingLimits,
    TlsPort,
    check_count,
    epoch_error,
    grant_error,
    introduction,
    judged,
    located,
    seals_in,
)
from .sessions import SessionTable
from .slot_reads import records_of
from .ssd import DISK_ADDRESS
from .staged_reads import send_staged

__all__ = ["ServedConnection"]

_INVALID: Final = InvalidArgument.code
_VOID: Final = GrantRevoked.code
_NO_EPOCH: Final = 1 << 32
_MSG_MORE: Final = socket.MSG_MORE

_log = get_logger("cenote.store.data")


@final
class ServedConnection:
    """See the module. `run` is the thread's function; the rest may be called from any thread."""

    def __init__(
        self,
        sock: socket.socket,
        segments: SegmentSet,
        sessions: SessionTable,
        claims: ClaimFile,
        limits: ServingLimits,
        gate: Gate | None,
        server_version: str,
        on_end: Callable[[ServedConnection], None],
        rdma: RdmaHost | None = None,
        times: Mapping[int, Histogram] | None = None,
        tls: TlsPort | None = None,
    ) -> None:
        self._tls = tls
        self.counters = ConnectionCounters()
        self._times = times or {}
        self._io = ServedSocket(sock, limits.spin_s)
        self.is_unix = sock.family == socket.AF_UNIX
        self._segments = segments
        self._sessions = sessions
        self._claims = claims
        self._limits = limits
        self._checkpoint = None if gate is None else Checkpoint(gate, segments, sock)
        """None where all may do all."""
        seal = partial(seal_rows, segments)
        self._seal_rows = seal if self._checkpoint is None else self._checkpoint.seal_rows
        self._server_version = server_version
        self._on_end = on_end
        self._session_id = b""
        self._head = memoryview(bytearray(wire.HEAD_BYTES))
        self._tail = self._head[wire.REQUEST_BYTES :]
        self._op = self._call_id = 0
        self._changing = threading.Lock()
        """Held while bytes of this connection may reach a segment."""
        self._changing_epoch = _NO_EPOCH
        self._writer = False
        self._rdma = rdma
        self._lane: HostedLane | None = None if rdma is None else rdma.new_lane()

    # ---- from other threads -----------------------------------------------------------------

    def revoke(self) -> None:
        self._io.revoke()
        if self._lane is not None:
            self._lane.end()

    def supersede(self, epoch: int) -> None:
        if self._lane is not None and self._lane.end_older(epoch):
            self._io.supersede()

    def writes_of_older(self, epoch: int) -> bool:
        # Set before the lock is taken, at most to what the daemon followed then: who knows of a
        # newer epoch may write under an older grant.
        return self._changing.locked() and self._changing_epoch < epoch

    def wait_quiet(self, timeout_s: float) -> bool:
        if not self._changing.acquire(timeout=timeout_s):
            return False
        self._changing.release()
        return self._lane is None or not self._io.revoked or self._lane.is_quiet

    def shut_down(self) -> None:
        """Make the thread end, wherever it is."""
        self._io.shut_down()

    # ---- the thread -------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the client or the server closes."""
        greeted = False
        try:
            self._greet()
            greeted = True
            while True:
                self._serve_next()
        except Gone:
            pass
        except CenoteError as error:
            if self._checkpoint is not None:
                self._checkpoint.note(error)
            self._refuse(error, greeted)
        except OSError as error:
            _log.debug("data connection broke", error=error)
        except Exception as error:  # a bug must cost this connection, not the daemon
            _log.error("data connection failed", error=repr(error))
            self._refuse(InternalError(f"the data server failed: {error!r}"), greeted)
        finally:
            if self._lane is None or self._lane.close():  # else its session is not to seem cut off
                self._sessions.leave(self._session_id, self)
            with contextlib.suppress(OSError):
                self._io.sock.close()
            self._on_end(self)

    def _refuse(self, error: CenoteError, greeted: bool) -> None:
        """Say why; the caller closes."""
        self.counters.errors += 1
        if greeted:
            text = wire.encode_error(error)
            self._io.send_last(self._reply(error.code, 0, len(text)) + text)
        else:
            self._io.send_last(wire.encode_hello_error(error))

    # ---- hello ------------------------------------------------------------------------------

    def _greet(self) -> None:
        self._io.set_timeouts(self._limits.hello_timeout_s)
        if self._tls is not None:
            self._io.begin_tls(self._tls, self._limits.hello_timeout_s)
            if self._checkpoint is not None:
                self._checkpoint.sock = self._io.sock
        hello = self._io.receive_hello()
        may_write = self._checkpoint is None or self._checkpoint.admit(hello)
        if hello.want_descriptors and not self.is_unix:
            raise InvalidArgument("descriptors are passed over the Unix socket only")
        self._sessions.admit(hello.session_id, self)
        self._session_id = hello.session_id
        self._writer = hello.writer and may_write
        self._io.set_timeouts(self._limits.stall_timeout_s)
        segments = list(self._segments.all())
        if hello.want_descriptors:
            offered = [s for s in segments if s.fd >= 0 or s.disk is not None]
            with self._changing:
                self._io.stop_if_revoked()
                answer_with_descriptors(
                    self._io, self._segments, offered, hello, self._claims, self._server_version
                )
        else:
            greeting = introduction(self._segments, segments, self._server_version)
            self._io.send_bytes(wire.encode_hello_reply(greeting))

    # ---- requests ---------------------------------------------------------------------------

    def _serve_next(self) -> None:
        head = self._head
        # A refusal between two requests belongs to none.
        self._op = self._call_id = 0
        if not self._io.await_request(head):
            return
        self.counters.requests += 1
        if self.counters.requests & TIMED_MASK:
            self._serve(head)
            return
        began_s = time.perf_counter()
        self._serve(head)
        if self._op in self._times:
            self._times[self._op].observe(time.perf_counter() - began_s)

    def _serve(self, head: memoryview) -> None:
        request = wire.REQUEST_ONE.unpack(head)
        (op, _, _, count, call_id, epoch, grant_id, body, segment, _, offset, length) = request
        self._op, self._call_id = op, call_id
        if self._checkpoint is not None and op > wire.OP_PING:
            self._checkpoint.check_operation(op)
        if op == wire.OP_READ:
            if count == 1 and body == wire.EXTENT_BYTES:
                self._read_one(segment, offset, length)
                return
            check_count(count, body == count * wire.EXTENT_BYTES)
            self._read(self._io.receive_rows(self._tail, count))
        elif op == wire.OP_WRITE:
            check_count(count, body >= count * wire.EXTENT_BYTES)
            if not self._writer:
                raise PermissionDenied("this connection is not one that writes")
            payload = body - count * wire.EXTENT_BYTES
            if count == 1:
                self._write_one(segment, offset, length, payload, epoch, grant_id)
            else:
                self._write(self._io.receive_rows(self._tail, count), payload, epoch, grant_id)
        elif op == wire.OP_SEAL:
            least = wire.SEAL_PREFIX.size + count * wire.SEAL_ROW_BYTES
            check_count(count, least <= body <= wire.SEAL_BYTES_MAX)
            self._seal(count, body, epoch)
        elif op == wire.OP_PROVE:
            check_count(count, body == count * wire.PROOF_ROW_BYTES)
            self._prove(count, body, grant_id)
        elif op == wire.OP_PING:
            check_count(1, body == wire.BODY_BYTES_MIN)
            self._answer_one(0)
        elif op == wire.OP_GRANT:
            check_count(count, body <= wire.GRANT_BYTES_MAX)
            view = self._io.receive_body(self._tail, body)
            if self._checkpoint is not None:
                self._checkpoint.show_grant(view, count, grant_id)
            self._answer_one(0)
        elif op == wire.OP_SLOTS:
            check_count(count, body == count * wire.SLOT_WANTED_BYTES)
            self._answer_rows(*records_of(self._segments, self._io.receive_body(self._tail, body)))
        elif op == wire.OP_STAGED:
            check_count(count, body == count * wire.EXTENT_BYTES)
            self._read_staged(self._io.receive_rows(self._tail, count), grant_id)
        elif op == wire.OP_RDMA:
            check_count(count, count == 1 and body <= wire.RDMA_BYTES_MAX)
            self._serve_lane(body)
        else:
            raise ProtocolError(f"operation {op} is unknown")

    def _reply(self, code: int, count: int, length: int) -> bytes:
        return wire.REPLY.pack(
            self._op, 0, code, count, self._call_id, self._segments.epoch, length
        )

    def _answer_rows(self, statuses: bytes, more: bytes = b"") -> None:
        head = self._reply(0, len(statuses), len(statuses) + len(more))
        self._io.send_bytes(head + statuses + more)

    def _answer_one(self, status: int) -> None:
        self._io.sock.send(
            wire.REPLY_ONE.pack(self._op, 0, 0, 1, self._call_id, self._segments.epoch, 1, status)
        )

    # ---- reads ------------------------------------------------------------------------------

    def _read_one(self, segment_id: int, offset: int, length: int) -> None:
        segment, status = judged(self._segments, segment_id, offset, length)
        if segment is None or status:
            self._answer_one(status)
            return
        checkpoint = self._checkpoint
        if checkpoint is not None and not checkpoint.may_read(segment, offset, length):
            self._answer_one(DENIED)
            return
        if segment.disk is not None:
            self._read(np.array([(segment_id, 0, offset, length)], EXTENT))
            return
        head = wire.REPLY_ONE.pack(
            wire.OP_READ, 0, 0, 1, self._call_id, self._segments.epoch, length + 1, 0
        )
        start = segment.address + offset
        step = min(length, STEP_BYTES)
        sent = self._io.sock.sendmsg([head, MEMORY[start : start + step]]) - len(head)
        if sent < 0:
            raise Gone
        if sent < length:
            self._io.send(start + sent, length - sent)
        self.counters.read_bytes += length

    def _read(self, rows: NDArray[np.void]) -> None:
        statuses, addresses, lengths = located(self._segments, rows)
        if self._checkpoint is not None:
            self._checkpoint.deny_reads(rows, statuses)
        good = statuses == 0
        if not good.all():
            addresses, lengths = addresses[good], lengths[good]
        total = int(lengths.sum())
        head = self._reply(0, len(rows), len(rows) + total) + statuses.tobytes()
        if not total:
            self._io.send_bytes(head)
            return
        self._io.send_bytes(head, socket.MSG_MORE)
        disk = self._segments.disk
        if disk is None or int(addresses.max()) < DISK_ADDRESS:
            move_items(self._io.send, self._io.send_views, addresses, lengths, None, STEP_BYTES)
        else:
            stall_s = self._limits.stall_timeout_s
            send_items(disk, self._io, addresses.tolist(), lengths.tolist(), stall_s)
        self.counters.read_bytes += total

    def _read_staged(self, rows: NDArray[np.void], staging_id: int) -> None:
        statuses, addresses, lengths = located(self._segments, rows)
        statuses[(statuses == 0) & (addresses < DISK_ADDRESS)] = _INVALID
        disk, good = self._segments.disk, statuses == 0
        total = int(lengths[good].sum())
        head = self._reply(0, len(rows), len(rows) + total) + statuses.tobytes()
        if not total:
            self._io.send_bytes(head)
            return
        if disk is None or disk.staging.staging_id != staging_id:
            self._answer_error(StaleLocation("this staging memory is gone: the daemon began anew"))
            return
        places = addresses[good].tolist(), lengths[good].tolist()
        send_staged(disk, self._io, head, *places, self._limits.stall_timeout_s)
        self.counters.read_bytes += total

    # ---- changes ----------------------------------------------------------------------------

    def _answer_error(self, error: CenoteError) -> None:
        text = wire.encode_error(error)
        self._io.send_bytes(self._reply(error.code, 0, len(text)) + text)

    def _write_one(
        self,
        segment_id: int,
        offset: int,
        length: int,
        payload: int,
        epoch: int,
        grant_id: int,
    ) -> None:
        if length != payload:
            raise ProtocolError(f"a write of {length} bytes with a payload of {payload}")
        segment, status = judged(self._segments, segment_id, offset, length)
        if segment is not None and segment.disk is not None:
            status = _INVALID  # nobody writes there but the daemon
        self._changing_epoch = min(epoch, self._segments.epoch)
        with self._changing:
            self._io.stop_if_revoked()
            stale = epoch < self._segments.epoch
            if stale:
                drain_stale(self._io, payload, epoch_error(epoch, self._segments.epoch))
            elif grant_id < self._segments.first_grant_id:
                status = _VOID
                drain_stale(self._io, payload, grant_error(grant_id))
            elif segment is None:
                drain(self._io, payload, StaleLocation(f"there is no segment {segment_id}"))
            elif status:
                drain(self._io, payload, InvalidArgument("the extent lies outside of its segment"))
            elif self._checkpoint is not None and not self._checkpoint.may_write_one(
                grant_id, segment_id, offset, length
            ):
                status = DENIED
                drain(self._io, payload, self._checkpoint.denied(f"a write under grant {grant_id}"))
            else:
                self._io.receive(segment.address + offset, length)
                self.counters.written_bytes += length
        if stale:
            self._answer_error(epoch_error(epoch, self._segments.epoch))
        else:
            self._answer_one(status)

    def _write(self, rows: NDArray[np.void], payload: int, epoch: int, grant_id: int) -> None:
        statuses, addresses, lengths = located(self._segments, rows)
        if int(lengths.max()) > wire.ITEM_BYTES_MAX or int(lengths.sum()) != payload:
            raise ProtocolError(f"a write whose payload of {payload} bytes is not that of its rows")
        statuses[addresses >= DISK_ADDRESS] = _INVALID  # nobody writes there but the daemon
        self._changing_epoch = min(epoch, self._segments.epoch)
        with self._changing:
            self._io.stop_if_revoked()
            stale = epoch < self._segments.epoch
            if stale:
                drain_stale(self._io, payload, epoch_error(epoch, self._segments.epoch))
            elif grant_id < self._segments.first_grant_id:
                statuses[:] = _VOID
                drain_stale(self._io, payload, grant_error(grant_id))
            elif self._checkpoint is not None and not self._checkpoint.may_write(
                grant_id, rows[statuses == 0]
            ):
                statuses[statuses == 0] = DENIED
                drain(self._io, payload, self._checkpoint.denied(f"writes under grant {grant_id}"))
            elif not statuses.any():
                move_items(
                    self._io.receive, self._io.receive_views, addresses, lengths, None, STEP_BYTES
                )
                self.counters.written_bytes += payload
            else:
                received = receive_some(self._io, statuses == 0, addresses, lengths)
                self.counters.written_bytes += received
        if stale:
            self._answer_error(epoch_error(epoch, self._segments.epoch))
        else:
            self._answer_rows(statuses.tobytes())

    def _serve_lane(self, body: int) -> None:
        request = wire.decode_rdma_request(self._io.receive_body(self._tail, body))
        if self._rdma is None or self._lane is None:
            raise Unavailable("this daemon does not serve RDMA", remedy="see its log, and --rdma")
        self._io.stop_if_revoked()
        try:
            reply = self._rdma.answer(self._lane, self._session_id, self._writer, request)
        except (StaleEpoch, ResourceUnavailable, Unavailable) as error:
            self._answer_error(error)
            return
        data = reply.SerializeToString()
        self._io.send_bytes(self._reply(0, 1, 1 + len(data)) + b"\x00" + data)

    def _seal(self, count: int, body: int, epoch: int) -> None:
        view = self._io.receive_body(self._tail, body)
        namespace_id, generation, rows, keys, key_starts = seals_in(view, count)
        self._changing_epoch = epoch
        with self._changing:
            self._io.stop_if_revoked()
            stale = epoch < self._segments.epoch
            if not stale:
                head = (epoch, namespace_id, generation)
                statuses = self._seal_rows(head, rows, keys, key_starts)
        if stale:
            self._answer_error(epoch_error(epoch, self._segments.epoch))
            return
        self.counters.seals += count
        self._answer_rows(statuses.tobytes())

    def _prove(self, count: int, body: int, grant_id: int) -> None:
        rows = np.frombuffer(self._io.receive_body(self._tail, body), PROOF, count)
        self._io.stop_if_revoked()
        self._answer_rows(*prove_rows(self._segments, grant_id, rows))
