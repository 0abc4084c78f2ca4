"""One blocking connection of the lane's client: the hottest code of the SDK. Not thread-safe.

How a call spends its time (64 bytes over a Unix socket, two cores): 3 µs in Python, 10 µs in the
kernel, and up to 60 µs waiting for the other core to wake up. Hence three decisions:

- Sending and receiving go through `ctypes.PyDLL`, which keeps the GIL. The calls never block (the
  socket is non-blocking), and `socket.send` would release the GIL around them: with another Python
  thread busy, each release costs up to a switch interval (5 ms) until we get it back. Measured
  beside a spinning thread: p90 10 µs instead of 5,200 µs. Only waiting (`poll`) releases it.
- Before it waits, a call may look for the reply `spin_polls` times: a reply that comes within about
  30 µs is taken without a sleep and the wake-up it needs. Where replies take longer, looking is in
  vain, so after each miss it is skipped for a while.
- Deadlines are poll timeouts, which Python recomputes after signals; SO_RCVTIMEO starts anew with
  every signal. One `poll` more than a blocking `recv` costs about 1 µs, and only when we wait.

A connection that failed in the middle of a call can't be used again: the late reply would be read
as the reply to the next call. `clean` is true when the stream is between two frames.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from cenote.api.errors import ClientClosed, DeadlineExceeded, ProtocolError, Unavailable
from cenote.runtime.scheduling import CONTENTION, SLEEPERS, STEP_CONTENDED_S

from .address import Address
from .frames import (
    BODY_BYTES_MAX_DEFAULT,
    CALL_ID_MAX,
    ERROR,
    HEADER,
    HEADER_BYTES,
    HELLO,
    HELLO_REPLY,
    KIND_NAMES,
    REPLY,
    REQUEST,
    FrameParser,
    check_header,
    decode_error,
    pack_frame,
    pack_hello,
    parse_hello_reply,
)
from .lane_connect import Cancelled, connect_socket, unreachable

__all__ = ["LaneSocket", "NotSent"]

_now_s = time.monotonic  # not the lane's clock, which a test may hold still
_RECV_BYTES = 64 << 10
_SCATTER_FROM_BYTES = 64 << 10  # larger bodies are not copied behind their header
_BYTES_A_POLL_BITS = 2  # a poll takes 0.5 µs, a server about 2 µs for a key, which has 16 bytes
_LONGER_MAX = 4  # times as long as for a short request
_SKIP_MAX = 15  # calls that don't spin after spinning was in vain again and again
_WAIT_MS_MAX = 60_000.0

_libc = ctypes.PyDLL(None)
_send = _libc.send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t
_recv = _libc.recv
_recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_recv.restype = ctypes.c_ssize_t
_step_aside = _libc.sched_yield  # whoever is to answer may need this very core
_step_aside.argtypes = ()
# Arguments made once: converting Python ints anew in each call costs 0.3 µs.
_SEND_FLAGS = ctypes.c_int(getattr(socket, "MSG_NOSIGNAL", 0))
_RECV_FLAGS = ctypes.c_int(0)
_RECV_SIZE = ctypes.c_size_t(_RECV_BYTES)


class NotSent(Exception):
    """Not a byte of the request left: it may be sent on another connection."""


class LaneSocket:
    """A connected lane after hello. One thread at a time; `interrupt` from any."""

    __slots__ = (
        "_address_in_memory",
        "_buffer",
        "_c_fd",
        "_c_size",
        "_call_id",
        "_clock",
        "_lock",
        "_misses",
        "_poll",
        "_skip",
        "_sock",
        "_spin_polls",
        "_until_s",
        "_view",
        "address",
        "body_bytes_max",
        "clean",
        "generation",
        "hello_reply",
        "protocol_version",
        "used_s",
    )

    def __init__(
        self,
        sock: socket.socket,
        address: Address,
        *,
        spin_polls: int,
        clock: Callable[[], float],
        body_bytes_max: int = BODY_BYTES_MAX_DEFAULT,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.address = address
        self.body_bytes_max = body_bytes_max
        self._spin_polls = spin_polls
        self._skip = 0  # calls that still do not spin
        self._misses = 0  # in a row
        self._clock = clock
        self._call_id = 0
        self._until_s = 0.0
        self._buffer = bytearray(_RECV_BYTES)
        self._view = memoryview(self._buffer)
        self._c_fd = ctypes.c_int(sock.fileno())
        self._c_size = ctypes.c_size_t(0)
        in_memory = (ctypes.c_char * _RECV_BYTES).from_buffer(self._buffer)
        self._address_in_memory = ctypes.c_void_p(ctypes.addressof(in_memory))
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._lock = threading.Lock()  # of close against interrupt: never on the hot path
        self.clean = True
        self.generation = 0  # the pool's
        self.used_s = 0.0  # the pool's
        self.protocol_version = 0
        self.hello_reply = b""

    @classmethod
    def open(
        cls,
        address: Address,
        hello: bytes,
        until_s: float,
        *,
        spin_polls: int,
        clock: Callable[[], float],
        cancelled: Cancelled,
        body_bytes_max: int = BODY_BYTES_MAX_DEFAULT,
    ) -> LaneSocket:
        """Connect and exchange hello until `until_s` (on `clock`).

        Raises Unavailable, DeadlineExceeded, ClientClosed, ProtocolError, or what the server's
        hello handler raised.
        """
        sock = connect_socket(address, until_s, clock, cancelled)
        made = cls(sock, address, spin_polls=spin_polls, clock=clock, body_bytes_max=body_bytes_max)
        try:
            made.say_hello(hello, until_s, cancelled)
        except BaseException:
            made.close()
            raise
        return made

    def say_hello(self, hello: bytes, until_s: float, cancelled: Cancelled) -> None:
        """Greet the server. Raises as `open` does."""
        self._until_s = until_s
        self.clean = False
        frame = pack_frame(HELLO, self._next_call_id(), body=pack_hello(hello))
        try:
            self._send_rest(frame, 0)
        except NotSent as error:  # the server died since it took the connection
            raise unreachable(self.address, error) from error
        while not self._poll.poll(min(50.0, self._left_ms())):
            if cancelled():
                raise ClientClosed()
        body = self._receive(HELLO_REPLY, self._call_id, 0)
        self.protocol_version, self.hello_reply = parse_hello_reply(body)

    # --- one call -------------------------------------------------------------------------------

    def call(self, method: int, body: bytes, deadline_ms: int, until_s: float) -> bytes:
        """Send one request, wait for its reply's body. `until_s` is on the clock.

        Raises NotSent, Unavailable, DeadlineExceeded, ProtocolError or what the server raised;
        `clean` tells whether the connection can be used again. `deadline_ms` is what is left now.
        """
        self._until_s = until_s
        self._call_id = call_id = self._call_id + 1 if self._call_id < CALL_ID_MAX else 1
        self.clean = False
        size = len(body)
        if size < _SCATTER_FROM_BYTES:
            frame = HEADER.pack(size, call_id, method, REQUEST, 0, deadline_ms) + body
            size += HEADER_BYTES
            self._c_size.value = size
            sent = _send(self._c_fd, frame, self._c_size, _SEND_FLAGS)
            if sent != size:
                self._send_rest(frame, max(sent, 0))
        else:
            self._send_large(HEADER.pack(size, call_id, method, REQUEST, 0, deadline_ms), body)
        got = self._spin(size) if self._spin_polls else -1
        if got < 0:
            self._poll.poll(deadline_ms if deadline_ms < _WAIT_MS_MAX else _WAIT_MS_MAX)
            got = _recv(self._c_fd, self._address_in_memory, _RECV_SIZE, _RECV_FLAGS)
        if got >= HEADER_BYTES:
            length, got_id, _, kind, flags, _ = HEADER.unpack_from(self._buffer)
            if got_id == call_id and kind == REPLY and length == got - HEADER_BYTES and not flags:
                self.clean = True
                return bytes(self._view[HEADER_BYTES:got])
        return self._receive(REPLY, call_id, got)

    def _spin(self, size: int) -> int:
        """Look for bytes without waiting; the count, 0 at the stream's end, -1 if none came.

        The longer the request of `size` bytes, the longer the server works on it.
        """
        if self._skip:
            self._skip -= 1
            return -1
        before_s = _now_s()
        if before_s < CONTENTION.until_s or threading.get_ident() in SLEEPERS:
            return -1
        polls = self._spin_polls
        for _ in range(polls + min(size >> _BYTES_A_POLL_BITS, _LONGER_MAX * polls)):
            got: int = _recv(self._c_fd, self._address_in_memory, _RECV_SIZE, _RECV_FLAGS)
            if got >= 0:
                self._misses = 0
                return got
            _step_aside()
            after_s = _now_s()
            if after_s - before_s > STEP_CONTENDED_S:
                CONTENTION.note(after_s)
                return -1  # the wait that follows returns at once where the reply has come
            before_s = after_s
        # The first miss in a row has no consequence, then 1, 2, 4, 8, 15 calls don't spin.
        self._misses = min(self._misses + 1, 6)
        self._skip = min((1 << self._misses) >> 2, _SKIP_MAX)
        return -1

    # --- for the pipeline -----------------------------------------------------------------------

    def begin(self, until_s: float, calls: int) -> int:
        """Start `calls` pipelined calls; the first one's id, the others' follow it."""
        self._until_s = until_s
        self.clean = False
        if self._call_id + calls > CALL_ID_MAX:
            self._call_id = 0
        first = self._call_id + 1
        self._call_id += calls
        return first

    def send_now(self, data: memoryview, begun: bool) -> int:
        """Send what fits without waiting. Raises NotSent (not `begun`) or Unavailable."""
        return self._send_some([data], begun)

    def recv_now(self) -> bytes | None:
        """What is there, or None. Raises Unavailable at the stream's end."""
        got = _recv(self._c_fd, self._address_in_memory, _RECV_SIZE, _RECV_FLAGS)
        if got > 0:
            return bytes(self._view[:got])
        if got == 0:
            raise self._lost("the server closed the connection")
        return None  # nothing yet, or an error, after which the next call finds the stream's end

    def wait(self, events: int) -> None:
        """Wait for a `select.poll` event. Raises DeadlineExceeded."""
        if events == select.POLLIN:
            self._poll.poll(self._left_ms())
            return
        self._poll.modify(self._c_fd.value, events)
        try:
            self._poll.poll(self._left_ms())
        finally:
            self._poll.modify(self._c_fd.value, select.POLLIN)

    def broken_protocol(self, what: str) -> ProtocolError:
        """The error for a server that sent `what`."""
        error = ProtocolError(f"{self.address} sent {what}")
        error.maybe_executed = True
        return error

    # --- slow paths -----------------------------------------------------------------------------

    def _next_call_id(self) -> int:
        self._call_id = self._call_id + 1 if self._call_id < CALL_ID_MAX else 1
        return self._call_id

    def _left_ms(self) -> float:
        """Milliseconds until the deadline, for a poll. Raises DeadlineExceeded."""
        left_ms = (self._until_s - self._clock()) * 1000
        if left_ms <= 0:
            late = DeadlineExceeded(f"no reply from {self.address} within the deadline")
            late.maybe_executed = True
            raise late
        return min(left_ms, _WAIT_MS_MAX)

    def _send_rest(self, frame: bytes, sent: int) -> None:
        view = memoryview(frame)
        while sent < len(view):
            count = self._send_some([view[sent:]], sent > 0)
            sent += count
            if not count:
                self.wait(select.POLLOUT)

    def _send_large(self, header: bytes, body: bytes) -> None:
        count = self._send_some([header, body], False)
        while not count:
            self.wait(select.POLLOUT)
            count = self._send_some([header, body], False)
        if count < HEADER_BYTES:
            self._send_rest(header + body, count)
        else:
            view = memoryview(body)
            sent = count - HEADER_BYTES
            while sent < len(view):
                self.wait(select.POLLOUT)
                sent += self._send_some([view[sent:]], True)

    def _send_some(self, parts: Sequence[bytes | memoryview], begun: bool) -> int:
        """Send what fits now; 0 when nothing does. Raises NotSent or Unavailable."""
        try:
            return self._sock.sendmsg(parts, (), _SEND_FLAGS.value)
        except BlockingIOError:
            return 0
        except OSError as error:
            if begun:
                # The server may have said why before it hung up.
                self._raise_last_words()
                raise self._lost(error) from error
            raise NotSent(str(error)) from error

    def _receive(self, wanted: int, call_id: int, have: int) -> bytes:
        """The body of the frame whose first `have` bytes are in the buffer, or is still to come.

        `have` may be 0 or less: nothing yet, or the stream's end, which is found out here. Sets
        `clean` where another call may follow.
        """
        buffer, view = self._buffer, self._view
        have = max(have, 0)
        while have < HEADER_BYTES:
            have += self._receive_into(view[have:])
        length, got_id, _, kind, flags, word = HEADER.unpack_from(buffer)
        try:
            check_header(length, kind, flags, self.body_bytes_max, bytes(view[:HEADER_BYTES]))
        except ProtocolError as wrong:
            wrong.maybe_executed = True
            raise
        end = HEADER_BYTES + length
        if end <= _RECV_BYTES:
            while have < end:
                have += self._receive_into(view[have:])
            body = bytes(view[HEADER_BYTES:end])
        else:
            whole = bytearray(length)
            target = memoryview(whole)
            filled = have - HEADER_BYTES
            target[:filled] = view[HEADER_BYTES:have]
            while filled < length:
                filled += self._receive_into(target[filled:])
            body = bytes(whole)
            have = end
        if kind == ERROR:
            error = decode_error(word, body)
            # An error with id 0 is about the connection, which the server closes.
            own = got_id == call_id and not isinstance(error, ProtocolError)
            self.clean = own and have == end
            raise error
        if kind != wanted:
            raise self.broken_protocol(f"{KIND_NAMES[kind]} frame instead of {KIND_NAMES[wanted]}")
        if got_id != call_id:
            raise self.broken_protocol(f"a reply to call {got_id} while {call_id} is waiting")
        # What comes behind the only reply that is due can only be why the server hangs up.
        self.clean = have == end
        return body

    def _receive_into(self, target: memoryview) -> int:
        """At least one byte, waiting for it. Raises Unavailable at the stream's end."""
        while True:
            try:
                count = self._sock.recv_into(target)
            except BlockingIOError:
                self.wait(select.POLLIN)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if not count:
                raise self._lost("the server closed the connection")
            return count

    def _raise_last_words(self) -> None:
        """Raise the ERROR frame that a server sent before it closed, if there is one."""
        parser = FrameParser(self.body_bytes_max)
        try:
            parser.feed(self._sock.recv(_RECV_BYTES))
            frame = parser.next()
        except (OSError, ProtocolError):
            return
        if frame is not None and frame[0] == ERROR:
            raise decode_error(frame[3], frame[4])

    def _lost(self, why: object) -> Unavailable:
        error = Unavailable(
            f"the connection to {self.address} broke before the reply: {why}",
            remedy="send the request again if it may be executed twice or carries an id",
        )
        error.maybe_executed = True
        return error

    # --- the pool's side ------------------------------------------------------------------------

    def usable(self) -> bool:
        """False when the server closed this idle connection or sent what nobody asked for."""
        try:
            self._sock.recv_into(self._view)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def interrupt(self) -> None:
        """Make a call that waits in another thread end, with Unavailable."""
        with self._lock:
            if self._sock.fileno() >= 0:
                with contextlib.suppress(OSError):  # the peer was faster
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Only the thread that uses it may do this."""
        with self._lock:
            self._c_fd.value = -1
            self._sock.close()

    def close_in_child(self) -> None:
        """After a fork: the lock may be held by a thread that does not exist here."""
        self._sock.close()
