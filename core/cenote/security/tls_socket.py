"""A connected socket with TLS on it, for code that was written for plain ones.

It has what our connections use of a socket, and means the same by it: a receive with MSG_WAITALL
fills its buffer, MSG_DONTWAIT never waits, SO_RCVTIMEO and SO_SNDTIMEO bound each wait, after which
comes BlockingIOError or less than was asked for; `shutdown` from another thread ends what waits.
So whoever has a plain socket pays nothing for this class, and does not know of it.

The socket below never blocks; waits are polls. (An `ssl.SSLSocket` that blocks does not see the
kernel's timeouts, and its `shutdown` would have a thread that is receiving go on *without* TLS.)
What is sent with MSG_MORE waits for what follows, so that a header gets no record of its own.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from struct import Struct
from time import monotonic
from typing import Any, Final, final

from cenote.api.errors import DeadlineExceeded

from .tls import Tls, identities_of
from .tls_errors import tls_failed

__all__ = ["TlsSocket", "begin_tls", "looks_like_tls"]

RECORD_BYTES: Final = 16 << 10
WRITE_BYTES: Final = 64 << 10
"""The library sends as many at once, or says that it sent none."""
_SLICE_S: Final = 0.05
_LINGER_S: Final = 0.3
_LINGER_BYTES_MAX: Final = 1 << 20
_HELD_BYTES_MAX: Final = 64 << 10
_TIMEVAL: Final = Struct("@ll")
_WAITALL: Final = int(socket.MSG_WAITALL)
_DONTWAIT: Final = int(socket.MSG_DONTWAIT)
_PEEK: Final = int(socket.MSG_PEEK)
_MORE: Final = int(socket.MSG_MORE)
_TLS_HANDSHAKE: Final = 0x16

_raw_shutdown: Final = socket.socket.shutdown
_raw_recv: Final = socket.socket.recv


def looks_like_tls(first: bytes | bytearray | memoryview) -> bool:
    """Whether a connection that begins with these (three at least) bytes begins with a TLS hello;
    none of cenote's own does."""
    return first[0] == _TLS_HANDSHAKE and first[1] == 3 and 1 <= first[2] <= 4


def begin_tls(
    sock: socket.socket,
    tls: Tls,
    peer: str,
    until_s: float,
    *,
    host: str = "",
    server_side: bool = False,
    clock: Callable[[], float] = monotonic,
    check: Callable[[], None] = lambda: None,
) -> TlsSocket:
    """Shake hands on a connected socket, until `until_s` on `clock`; `check` is called now and
    then, and may raise. `host`: what was connected to.

    Raises TlsFailed, DeadlineExceeded, ConfigError. The socket is the caller's to close then.
    """
    sock.setblocking(False)
    if server_side:
        context, name = tls.server_context(), None
    else:
        context, name = tls.client_context(), tls.server_name(host)
    wrapped: ssl.SSLSocket | None = None
    try:
        wrapped = context.wrap_socket(
            sock, server_side=server_side, do_handshake_on_connect=False, server_hostname=name
        )
        _shake(wrapped, until_s, peer, clock, check)
    except (OSError, ValueError) as error:
        if wrapped is not None:
            if server_side:
                _leave_time_to_read(wrapped)
            wrapped.close()
        raise tls_failed(error, peer, tls.files) from error
    except BaseException:  # whatever it was, wrap_socket took the descriptor away from `sock`
        if wrapped is not None:
            wrapped.close()
        raise
    return TlsSocket(wrapped)


def _leave_time_to_read(wrapped: ssl.SSLSocket) -> None:
    """What the client sent already has to be read, or closing resets the connection, and it never
    sees why: in TLS 1.3 it has more to say before it knows that its certificate is refused."""
    until_s = monotonic() + _LINGER_S
    left = _LINGER_BYTES_MAX
    poll = select.poll()
    poll.register(wrapped, select.POLLIN)
    with contextlib.suppress(OSError):
        _raw_shutdown(wrapped, socket.SHUT_WR)
        while left > 0 and (left_s := until_s - monotonic()) > 0 and poll.poll(left_s * 1000):
            got = len(_raw_recv(wrapped, RECORD_BYTES, _DONTWAIT))
            if not got:
                return
            left -= got


def _shake(
    wrapped: ssl.SSLSocket,
    until_s: float,
    peer: str,
    clock: Callable[[], float],
    check: Callable[[], None],
) -> None:
    poll = select.poll()
    while True:
        try:
            wrapped.do_handshake()
            return
        except ssl.SSLWantReadError:
            events = select.POLLIN
        except ssl.SSLWantWriteError:
            events = select.POLLOUT
        poll.register(wrapped, events)
        ready: Sequence[Any] = ()
        while not ready:
            check()
            left_s = until_s - clock()
            if left_s <= 0:
                raise DeadlineExceeded(f"{peer} did not finish the TLS handshake in time")
            ready = poll.poll(min(left_s, _SLICE_S) * 1000)


@final
class TlsSocket:
    """See the module's docstring. Its end raises what a plain socket's raises: OSError, or no
    bytes. One thread at a time, but for `shutdown`."""

    def __init__(self, wrapped: ssl.SSLSocket) -> None:
        self._ssl = wrapped
        self._read = wrapped.read
        self._write = wrapped.write
        self._blocking = True
        self._receive_s: float | None = None
        self._send_s: float | None = None
        self._held = b""
        """Sent with MSG_MORE: goes with what follows."""
        self._poll = select.poll()
        self._poll.register(wrapped, select.POLLIN)
        self.family = wrapped.family

    @property
    def identities(self) -> tuple[str, ...]:
        """Whom the other side's certificate is for, where it was asked for."""
        return identities_of(self._ssl.getpeercert())

    # ---- receiving ----------------------------------------------------------------------------

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As of a plain socket."""
        view = memoryview(buffer).cast("B")
        wanted = nbytes or len(view)
        got = 0
        until_s: float | None = None
        while got < wanted:
            try:
                count = self._read(wanted - got, view[got:wanted])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wait:
                if flags & _DONTWAIT or not self._blocking:
                    return _some(got)
                if until_s is None and self._receive_s is not None:
                    until_s = monotonic() + self._receive_s
                if not self._wait(wait, until_s):
                    return _some(got)
                continue
            except ssl.SSLEOFError:
                return got  # its frames say how long they are, so nothing can seem whole by it
            if not count:
                return got
            got += int(count)
            if not flags & _WAITALL:
                return got
        return got

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        """As of a plain socket; with MSG_PEEK it tells the end from bytes, not which these are."""
        if flags & _PEEK:
            return b"\x00" if self._ssl.pending() else _raw_recv(self._ssl, 1, _PEEK | _DONTWAIT)
        data = bytearray(nbytes)
        got = self.recv_into(data, nbytes, flags)
        return bytes(data[:got])

    def recvmsg(
        self, nbytes: int, _room: int = 0, flags: int = 0
    ) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        """As of a plain socket; nothing comes beside the bytes."""
        return self.recv(nbytes, flags & _DONTWAIT), [], 0, None

    def recvmsg_into(
        self, buffers: Sequence[Any], _room: int = 0, flags: int = 0
    ) -> tuple[int, list[tuple[int, int, bytes]], int, None]:
        """As of a plain socket."""
        total = 0
        for buffer in buffers:
            try:
                got = self.recv_into(buffer, 0, flags)
            except BlockingIOError:
                if not total:
                    raise
                break
            total += got
            if got < len(buffer):
                break
        return total, [], 0, None

    # ---- sending ------------------------------------------------------------------------------

    def send(self, data: Any, flags: int = 0) -> int:
        """As of a plain socket: all of it, where the time suffices."""
        view = memoryview(data).cast("B")
        if flags & _MORE and len(self._held) + len(view) <= _HELD_BYTES_MAX and self._blocking:
            self._held += bytes(view)
            return len(view)
        if self._held:
            held, self._held = self._held, b""
            joined = held + bytes(view[:RECORD_BYTES])
            try:
                sent = self._send_all(memoryview(joined), flags)
            except BlockingIOError:
                self._held = held  # the same again, where the caller tries again
                raise
            if sent < len(joined):
                # What a header announced did not leave whole: this connection is of no use.
                raise TimeoutError("the other side takes nothing")
            first = len(joined) - len(held)
            if first == len(view):
                return first
            try:
                return first + self._send_all(view[first:], flags)
            except BlockingIOError:
                return first
        return self._send_all(view, flags)

    def sendall(self, data: Any) -> None:
        """As of a plain socket."""
        view = memoryview(data).cast("B")
        while len(view):
            view = view[self.send(view) :]

    def sendmsg(self, buffers: Sequence[Any], _beside: Any = (), flags: int = 0) -> int:
        """As of a plain socket; small buffers share records."""
        if not self._blocking:  # again and again with the same beginning, until it has left
            return self.send(b"".join(buffers), flags)
        total = 0
        part: list[memoryview] = []
        part_bytes = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if part_bytes + len(view) <= RECORD_BYTES:
                part.append(view)
                part_bytes += len(view)
                continue
            try:
                if part:
                    total += self.send(b"".join(part), _MORE)
                    part, part_bytes = [], 0
                sent = self.send(view)
            except BlockingIOError:
                return _some(total)
            total += sent
            if sent < len(view):
                return total
        if part:
            try:
                total += self.send(b"".join(part), flags)
            except BlockingIOError:
                return _some(total)
        return total

    def _send_all(self, view: memoryview, flags: int) -> int:
        sent = 0
        until_s: float | None = None
        while sent < len(view):
            try:
                # What could not be sent has to be tried again with the same bytes, as many of them.
                sent += self._write(view[sent : sent + WRITE_BYTES])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wait:
                if flags & _DONTWAIT or not self._blocking:
                    return _some(sent)
                if until_s is None and self._send_s is not None:
                    until_s = monotonic() + self._send_s
                if not self._wait(wait, until_s):
                    return _some(sent)
        return sent

    def _wait(self, wait: ssl.SSLError, until_s: float | None) -> bool:
        """Until the socket can do what `wait` waits for; False where the time is over."""
        left_ms = None if until_s is None else (until_s - monotonic()) * 1000
        if left_ms is not None and left_ms <= 0:
            return False
        if isinstance(wait, ssl.SSLWantReadError):
            return bool(self._poll.poll(left_ms))
        self._poll.modify(self._ssl, select.POLLOUT)
        try:
            return bool(self._poll.poll(left_ms))
        finally:
            self._poll.modify(self._ssl, select.POLLIN)

    # ---- the rest -----------------------------------------------------------------------------

    def pending(self) -> int:
        """Bytes that have arrived and been deciphered already."""
        return self._ssl.pending()

    def setblocking(self, flag: bool) -> None:
        """As of a plain socket."""
        self._blocking = flag

    def settimeout(self, value: float | None) -> None:
        """As of a plain socket."""
        self._blocking = value != 0
        self._receive_s = self._send_s = value or None

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """As of a plain socket; the two timeouts are kept here."""
        if level == socket.SOL_SOCKET and option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            seconds, micros = _TIMEVAL.unpack(value)
            limit_s = seconds + micros / 1e6 or None
            if option == socket.SO_RCVTIMEO:
                self._receive_s = limit_s
            else:
                self._send_s = limit_s
            return
        self._ssl.setsockopt(level, option, value)

    def fileno(self) -> int:
        """As of a plain socket."""
        return self._ssl.fileno()

    def getpeername(self) -> Any:
        """As of a plain socket."""
        return self._ssl.getpeername()

    def shutdown(self, how: int) -> None:
        """As of a plain socket, from any thread."""
        _raw_shutdown(self._ssl, how)

    def close(self) -> None:
        """As of a plain socket."""
        with contextlib.suppress(OSError):
            self._ssl.close()


def _some(count: int) -> int:
    if not count:
        raise BlockingIOError
    return count
