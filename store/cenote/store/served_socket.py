"""The daemon's end of a data connection: bytes, with a bound on every wait.

Waits are bounded by the kernel (SO_RCVTIMEO, SO_SNDTIMEO), so that a receive with MSG_WAITALL is
one call. A client that does not fill a step in time is closed: it can't hold the thread for ever,
nor by sending a byte now and then.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from time import monotonic
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    DeadlineExceeded,
    GrantRevoked,
    ProtocolError,
    StaleEpoch,
    TlsFailed,
)
from cenote.api.rows import EXTENT
from cenote.runtime.scheduling import CONTENTION, STEP_CONTENDED_S
from cenote.security.tls_errors import wants_tls
from cenote.security.tls_socket import TlsSocket, begin_tls, looks_like_tls
from cenote.transport import wire
from cenote.transport.connection import timeval
from cenote.transport.gil import step_aside
from cenote.transport.memory_access import MEMORY
from cenote.v1 import store_pb2

from .serving import TlsPort, peer_name

__all__ = ["STEP_BYTES", "Gone", "ServedSocket"]

STEP_BYTES: Final = 1 << 20
_LINGER_S: Final = 0.3
_LINGER_BYTES_MAX: Final = 8 << 20
_FIRST_BYTES: Final = 3
_WAITALL: Final = socket.MSG_WAITALL
_SPINNING: Final = threading.Lock()
# Bytes that nobody wants, of all connections at once.
_WASTE: Final = memoryview(bytearray(STEP_BYTES))


class Gone(Exception):
    """The client closed, or the server did: nobody to answer."""


@final
class ServedSocket:
    """A connected socket. `revoke` and `shut_down` may be called from any thread.

    Raises `Gone`, OSError (it broke, or the client does not take what it asked for),
    DeadlineExceeded (too slow in the middle of something), GrantRevoked (after `revoke`),
    StaleEpoch (after `supersede`).
    """

    def __init__(self, sock: socket.socket, spin_s: float) -> None:
        self.sock: socket.socket | TlsSocket = sock
        self.revoked = False
        self.superseded = False
        self.closing = False
        self._spin_s = spin_s
        self._hot = False
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def begin_tls(self, port: TlsPort, limit_s: float) -> None:
        """Before anything else: shake hands. Raises TlsFailed, DeadlineExceeded, Gone."""

        def check() -> None:
            if self.closing:
                raise Gone

        raw = self.sock
        assert isinstance(raw, socket.socket)
        peer = peer_name(raw)
        until_s = monotonic() + limit_s
        try:
            first = raw.recv(_FIRST_BYTES, socket.MSG_PEEK | _WAITALL)
            if len(first) < _FIRST_BYTES:
                raise Gone
            if not looks_like_tls(first):
                raise wants_tls()
            self.sock = begin_tls(
                raw, port.tls, "the client", until_s, server_side=True, check=check
            )
        except BlockingIOError:
            raise Gone from None
        except TlsFailed as error:
            port.refusals.note("tcp", error, peer)
            raise
        self._poll = select.poll()
        self._poll.register(self.sock, select.POLLIN)
        self.set_timeouts(limit_s)

    # ---- from other threads -----------------------------------------------------------------

    def revoke(self) -> None:
        """End what is being received. The thread can still tell the client why."""
        self.revoked = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RD)

    def supersede(self) -> None:
        """As `revoke`, for a connection whose client is to make another."""
        self.superseded = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RD)

    def shut_down(self) -> None:
        """End the thread, wherever it is."""
        self.closing = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    # ---- receiving --------------------------------------------------------------------------

    def set_timeouts(self, seconds: float) -> None:
        """How long a step may take."""
        value = timeval(seconds)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def stop_if_revoked(self) -> None:
        if self.revoked:
            raise GrantRevoked(
                "the daemon cut this connection off: its session ended, or another leader took over"
            )
        if self.superseded:
            raise StaleEpoch("another leader took over", remedy="connect again")

    def await_request(self, head: memoryview) -> bool:
        """Fill `head` with the beginning of a request. False where none came in the time of a step.

        Where requests follow each other closely, look for the next one for a while before sleeping:
        to be woken takes longer than a small read. One thread at a time does so (it costs a core),
        and each look gives up the GIL.
        """
        begun = monotonic()
        if self._hot and begun >= CONTENTION.until_s and _SPINNING.acquire(blocking=False):
            try:
                ready = self._poll.poll
                end = begun + self._spin_s
                now = begun
                while not ready(0):
                    before, now = now, monotonic()
                    if now - before > STEP_CONTENDED_S:
                        CONTENTION.note(now)
                        break
                    if now > end:
                        self._hot = False
                        break
                    step_aside()
            finally:
                _SPINNING.release()
        try:
            got = self.sock.recv_into(head)
        except BlockingIOError:
            if self.closing:
                raise Gone from None
            self.stop_if_revoked()
            return False
        if not self._hot:
            self._hot = monotonic() - begun < 2 * self._spin_s
        if got != len(head):
            self._receive_rest(head, got)
        self.stop_if_revoked()
        return True

    def _receive_rest(self, head: memoryview, got: int) -> None:
        """What is missing in `head`: the header; then what goes with it, unless the header says
        that less follows than does in any request. There is no waiting for that: it is refused.
        """
        if not got:
            self._cut_short(got)
        if got < wire.REQUEST_BYTES:
            self.receive_view(head[got : wire.REQUEST_BYTES])
            got = wire.REQUEST_BYTES
        if wire.REQUEST.unpack_from(head)[-1] >= wire.BODY_BYTES_MIN:
            if got < len(head):
                self.receive_view(head[got:])
        else:
            head[wire.REQUEST_BYTES :] = bytes(len(head) - wire.REQUEST_BYTES)

    def receive_view(self, view: memoryview) -> None:
        """Fill the view, of at most a step."""
        try:
            got = self.sock.recv_into(view, len(view), _WAITALL)
        except BlockingIOError:
            got = -1
        if got != len(view):
            self._cut_short(got)

    def _cut_short(self, got: int) -> None:
        """A receive brought less than the whole: closed, revoked, or too slow."""
        self.stop_if_revoked()
        if self.closing or not got:
            raise Gone
        try:
            if not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise Gone
        except BlockingIOError:
            pass  # neither closed nor anything new: it was slow
        raise DeadlineExceeded(
            "the client was too slow in the middle of a request", remedy="send it again"
        )

    def receive(self, address: int, length: int) -> None:
        """Bytes to an address."""
        for start in range(address, address + length, STEP_BYTES):
            step = min(STEP_BYTES, address + length - start)
            self.receive_view(MEMORY[start : start + step])
            self.stop_if_revoked()

    def receive_views(self, views: list[memoryview]) -> None:
        """Fill up to 1024 views of a step in all."""
        wanted = sum(map(len, views))
        try:
            got = self.sock.recvmsg_into(views, 0, _WAITALL)[0]
        except BlockingIOError:
            got = -1
        if got != wanted:
            self._cut_short(got)
        self.stop_if_revoked()

    def receive_some(self, most: int) -> int:
        """How many of at most so many bytes came, one at least; what they are is of no account."""
        try:
            got = self.sock.recv_into(_WASTE, most)
        except BlockingIOError:
            got = -1
        if got <= 0:
            self._cut_short(got)
        self.stop_if_revoked()
        return got

    def drain(self, length: int) -> None:
        """Receive bytes that have no place."""
        for start in range(0, length, STEP_BYTES):
            self.receive_view(_WASTE[: min(STEP_BYTES, length - start)])
            self.stop_if_revoked()

    # ---- sending ----------------------------------------------------------------------------

    def send_bytes(self, data: bytes | memoryview, flags: int = 0) -> None:
        """All of the data."""
        view = memoryview(data)
        while len(view):
            view = view[self.sock.send(view, flags) :]

    def send_descriptors(self, data: bytes, descriptors: list[int]) -> None:
        """All of the data, with descriptors beside it as `wire` says."""
        chunk = descriptors[: wire.DESCRIPTORS_PER_MESSAGE]
        unix = self.sock
        assert isinstance(unix, socket.socket)
        sent = socket.send_fds(unix, [data], chunk)
        self.send_bytes(data[sent:])
        for first in range(len(chunk), len(descriptors), wire.DESCRIPTORS_PER_MESSAGE):
            chunk = descriptors[first : first + wire.DESCRIPTORS_PER_MESSAGE]
            socket.send_fds(unix, [b"\x00"], chunk)

    def send(self, address: int, length: int) -> None:
        """The bytes at an address."""
        end = address + length
        while address < end:
            address += self.sock.send(MEMORY[address : min(end, address + STEP_BYTES)])

    def send_views(self, views: list[memoryview]) -> None:
        """Up to 1024 views."""
        sent = self.sock.sendmsg(views)
        for view in views:
            if sent < len(view):
                self.send_bytes(view[sent:])
                sent = 0
            else:
                sent -= len(view)

    def receive_hello(self) -> store_pb2.DataHelloRequest:
        """What a client says first. Raises ProtocolError and ProtocolVersionMismatch."""
        head = bytearray(wire.HELLO.size)
        self.receive_view(memoryview(head))
        body = bytearray(wire.hello_length(head))
        if body:
            self.receive_view(memoryview(body))
        return wire.decode_hello(body)

    def receive_body(self, begin: memoryview, length: int) -> memoryview:
        """A body that begins with what came beside its header.

        Raises ProtocolError where it claims to be shorter than any is.
        """
        if length < len(begin):
            raise ProtocolError(f"a body of {length} bytes; none has less than {len(begin)}")
        view = memoryview(bytearray(length))
        view[: len(begin)] = begin
        if length > len(begin):
            self.receive_view(view[len(begin) :])
        return view

    def receive_rows(self, begin: memoryview, count: int) -> NDArray[np.void]:
        """So many EXTENT rows, of which the first came beside the header."""
        rows = np.empty(count, EXTENT)
        raw = rows.view(np.uint8).data
        raw[: len(begin)] = begin
        if count > 1:
            self.receive_view(raw[len(begin) :])
        return rows

    def send_last(self, data: bytes) -> None:
        """Say something before closing, in a way that lets the client read it.

        What the client sent already must be read, or closing resets the connection and the answer
        may be lost.
        """
        with contextlib.suppress(OSError):
            self.send_bytes(data)
            self.sock.shutdown(socket.SHUT_WR)
            end = monotonic() + _LINGER_S
            self.set_timeouts(_LINGER_S)
            left = _LINGER_BYTES_MAX
            while left > 0 and monotonic() < end and not self.closing:
                got = self.sock.recv_into(_WASTE)
                if not got:
                    return
                left -= got
