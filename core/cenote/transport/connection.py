"""The client's end of a data connection: a blocking socket whose every wait ends by a deadline.

A socket with a Python timeout returns from a MSG_WAITALL receive with whatever there is, which
costs dozens of calls per block. So these are blocking sockets, and the kernel bounds the wait
(SO_RCVTIMEO, SO_SNDTIMEO: one receive waits no longer in all, however the bytes trickle). Setting
them costs more than a microsecond each, so it is done only where the setting is longer than what
the call has left, give or take SLACK_S, and the clock is looked at after each step. Calls usually
have the same deadline and set nothing.

A connection belongs to one call at a time. When that fails for whatever reason the socket is closed
before the error is raised: then nothing can arrive in the call's memory any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from time import monotonic
from typing import Final, NoReturn, final

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    ProtocolError,
    Unavailable,
)
from cenote.runtime.scheduling import CONTENTION, STEP_CONTENDED_S
from cenote.security.tls_errors import tls_failed
from cenote.security.tls_socket import TlsSocket

from . import wire
from .gil import HELD_BYTES_MAX, RELEASES, held_poll, held_recv, held_send, step_aside
from .memory_access import MEMORY

__all__ = [
    "DataConnection",
    "enlarge_buffers",
    "timeval",
]

SLACK_S: Final = 0.04
STEP_BYTES: Final = 1 << 20
COSTLY_STEP_BYTES: Final = 32 << 20
"""The usual step is the fastest; each gives up the GIL once, so where that is costly, fewer do."""
SMALL_BYTES: Final = 32 << 10
OUT_BYTES: Final = 64 << 10
"""Small messages are put together in a buffer of each connection and sent in one call."""
SEALS_AT_ONCE_MAX: Final = 1024
"""Whose statuses are received with the head of the answer."""
_HEAD_BYTES: Final = wire.REPLY_ONE.size
SPIN_ITEM_S: Final = 2e-6
SPIN_LONGER_S_MAX: Final = 500e-6
SPINS_IN_VAIN_MAX: Final = 4
SPINS_SKIPPED: Final = 32
BUFFER_BYTES: Final = 4 << 20
_TIMEVAL: Final = Struct("@ll")
_WAITALL: Final = socket.MSG_WAITALL
_DONTWAIT: Final = int(socket.MSG_DONTWAIT)
_DONTWAIT_NOSIGNAL: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_SOL: Final = socket.SOL_SOCKET


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def timeval(seconds: float) -> bytes:
    """A `struct timeval`. Never zero, which would mean for ever."""
    micros = max(1_000, round(seconds * 1e6))
    return _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)


def enlarge_buffers(sock: socket.socket) -> None:
    """Socket buffers of 4 MiB where the system allows it; else leave them to the kernel.

    A smaller buffer that was asked for would also switch off the kernel's own adaptation.
    """
    for option, limit in ((socket.SO_RCVBUF, "rmem_max"), (socket.SO_SNDBUF, "wmem_max")):
        try:
            allowed = int(Path("/proc/sys/net/core", limit).read_text())
        except (OSError, ValueError):  # not visible in this container
            continue
        if allowed >= BUFFER_BYTES:
            sock.setsockopt(_SOL, option, BUFFER_BYTES)


@final
class DataConnection:
    """A greeted socket. `begin` starts a call; all other methods are within its deadline.

    Raises `Unavailable` (the peer is gone), `DeadlineExceeded`, `ClientClosed` (closed by another
    thread), `ProtocolError`. After any error the connection must be discarded.
    """

    __slots__ = (
        "_deadline",
        "_fd",
        "_look_at",
        "_out",
        "_poll_address",
        "_poll_fd",
        "_reply",
        "_reply_address",
        "_spins_in_vain",
        "_spins_to_skip",
        "_timeout_s",
        "begun_at",
        "call_id",
        "closing",
        "name",
        "out_address",
        "sock",
        "spin_s",
    )

    def __init__(self, sock: socket.socket, name: str, spin_s: float = 0.0) -> None:
        self.sock: socket.socket | TlsSocket = sock
        self.name = name
        self.spin_s = spin_s
        self._spins_in_vain = 0
        self._spins_to_skip = 0
        self.call_id = 0
        self.closing = False
        self.begun_at = 0.0
        self._out = (ctypes.c_char * OUT_BYTES)()
        self.out_address = ctypes.addressof(self._out)
        self._fd = sock.fileno()
        self._deadline = 0.0
        self._look_at = 0.0
        self._timeout_s = float("inf")
        reply = (ctypes.c_char * (_HEAD_BYTES + SEALS_AT_ONCE_MAX))()
        self._reply = memoryview(reply).cast("B")
        self._reply_address = ctypes.addressof(reply)
        self._poll_fd = _PollFd(sock.fileno(), select.POLLIN, 0)
        self._poll_address = ctypes.addressof(self._poll_fd)

    def put_on_tls(self, sock: TlsSocket) -> None:
        """From now on over TLS, before the first byte of ours. What is received and sent past the
        socket, straight from the kernel, finds nothing then."""
        self.sock = sock
        if self.closing:  # `shut_down` may have missed it
            raise ClientClosed("the channel was closed during the call")
        self._fd = -1
        self._poll_fd.fd = sock.fileno()
        self._timeout_s = float("inf")

    # ---- deadline ---------------------------------------------------------------------------

    def begin(self, deadline: float, now: float) -> None:
        """Start a call that ends by `deadline`; both on the monotonic clock."""
        self._deadline = deadline
        self.begun_at = now
        self._look_at = now + SLACK_S
        if self._timeout_s > deadline - now + SLACK_S:
            self._arm(now)

    def _arm(self, now: float) -> None:
        """Let the kernel's timeouts end with the deadline."""
        left_s = self._deadline - now
        if left_s <= 0:
            self._too_late()
        value = timeval(left_s)
        self.sock.setsockopt(_SOL, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(_SOL, socket.SO_SNDTIMEO, value)
        self._timeout_s = left_s

    def look_at_clock(self) -> None:
        """To be called between the steps of a long transfer."""
        now = monotonic()
        if now > self._look_at:
            self._look_at = now + SLACK_S
            if self._timeout_s > self._deadline - now + SLACK_S:
                self._arm(now)

    def stalled(self) -> None:
        """A kernel timeout ended: raise, or go on where the setting was an earlier call's."""
        now = monotonic()
        if now >= self._deadline - 0.002:
            self._too_late()
        self._arm(now)

    def _too_late(self) -> NoReturn:
        if self.closing:
            raise ClientClosed("the channel was closed during the call")
        raise DeadlineExceeded(f"{self.name} did not finish before the deadline")

    def lost(self, why: object) -> NoReturn:
        """The socket broke: by us, or by the other side."""
        if self.closing:
            raise ClientClosed("the channel was closed during the call")
        if isinstance(why, ssl.SSLError):
            raise tls_failed(why, self.name, None)
        raise Unavailable(f"the connection to {self.name} broke: {why}")

    # ---- bytes ------------------------------------------------------------------------------

    def receive(self, address: int, length: int) -> None:
        """Exactly `length` bytes to an address."""
        end = address + length
        begun = monotonic()
        if begun > self._look_at:  # the kernel bounds each receive, not their sum
            self.look_at_clock()
        step_max = STEP_BYTES
        if length <= SMALL_BYTES or RELEASES.keeps(begun):
            address += self._receive_held(address, min(length, HELD_BYTES_MAX))
            step_max = COSTLY_STEP_BYTES
        elif RELEASES.cost_too_much(begun):
            step_max = COSTLY_STEP_BYTES
        while address < end:
            step = min(step_max, end - address)
            try:
                got = self.sock.recv_into(MEMORY[address : address + step], step, _WAITALL)
            except BlockingIOError:
                self.stalled()
                continue
            except OSError as error:
                self.lost(error)
            if not got:
                self.lost("it was closed")
            address += got
            RELEASES.note(begun, length)
            if address < end:
                self.look_at_clock()
                begun = monotonic()

    def _receive_held(self, address: int, length: int) -> int:
        """What has arrived already, without giving up the GIL."""
        received = 0
        while received < length:
            got = held_recv(self._fd, address + received, length - received, _DONTWAIT)
            if got <= 0:  # nothing yet, or an error that the next call will show
                break
            received += got
        return received

    def receive_view(self, view: memoryview) -> None:
        """Exactly as many bytes as the view has."""
        while len(view):
            try:
                got = self.sock.recv_into(view, len(view), _WAITALL)
            except BlockingIOError:
                self.stalled()
                continue
            except OSError as error:
                self.lost(error)
            if not got:
                self.lost("it was closed")
            if got == len(view):
                return
            view = view[got:]
            self.look_at_clock()

    def receive_views(self, views: list[memoryview]) -> None:
        """Exactly as many bytes as all the views have together, at most 1024 views."""
        while views:
            try:
                got = self.sock.recvmsg_into(views, 0, _WAITALL)[0]
            except BlockingIOError:
                self.stalled()
                continue
            except OSError as error:
                self.lost(error)
            if not got:
                self.lost("it was closed")
            views = _behind(views, got)
            self.look_at_clock()

    def send(self, address: int, length: int) -> None:
        """The bytes at an address."""
        end = address + length
        begun = monotonic()
        if begun > self._look_at:
            self.look_at_clock()
        step_max = STEP_BYTES
        if length <= SMALL_BYTES or RELEASES.keeps(begun):
            step = min(length, HELD_BYTES_MAX)
            address += max(0, held_send(self._fd, address, step, _DONTWAIT_NOSIGNAL))
            step_max = COSTLY_STEP_BYTES
        elif RELEASES.cost_too_much(begun):
            step_max = COSTLY_STEP_BYTES
        while address < end:
            step = min(step_max, end - address)
            try:
                sent = self.sock.send(MEMORY[address : address + step])
            except BlockingIOError:
                self.stalled()
                continue
            except OSError as error:
                self.explain(error)
            address += sent
            RELEASES.note(begun, sent)
            if address < end:
                self.look_at_clock()
                begun = monotonic()

    def send_views(self, views: Sequence[bytes | memoryview], flags: int = 0) -> None:
        """All the bytes of the views, at most 1024 of them."""
        while views:
            try:
                sent = self.sock.sendmsg(views, (), flags)
            except BlockingIOError:
                self.stalled()
                continue
            except OSError as error:
                self.explain(error)
            views = _behind([memoryview(view) for view in views], sent)
            if views:
                self.look_at_clock()

    # ---- replies ----------------------------------------------------------------------------

    def receive_reply(self, op: int, call_id: int, count: int) -> tuple[int, bytearray]:
        """The next reply: bytes of payload that follow, and `count` (at least 1) statuses.

        Raises the error that the reply carries instead.
        """
        if self.spin_s:
            self.spin(count)
        # With the first status, so that one call takes all that a reply to one item has. Of seals
        # with all of them: one is asked for at a time, so that nothing can follow its answer.
        reply = self._reply
        more = count - 1 if op == wire.OP_SEAL and count <= SEALS_AT_ONCE_MAX else 0
        got = held_recv(self._fd, self._reply_address, _HEAD_BYTES + more, _DONTWAIT)
        if got < _HEAD_BYTES:
            self.receive_view(reply[max(0, got) : _HEAD_BYTES])
        rest = reply[_HEAD_BYTES : max(got, _HEAD_BYTES)]
        got_op, _, code, items, got_id, _, length, status = wire.REPLY_ONE.unpack_from(reply)
        if not 0 < length <= wire.REPLY_BYTES_MAX:
            raise ProtocolError(f"{self.name} answered with something that is no reply")
        if code and got_op in (op, wire.OP_NONE):
            raise self._refusal(code, length, status, rest)
        if code or got_op != op or got_id != call_id:
            raise ProtocolError(f"{self.name} answered another request than was sent")
        if items != count or length < count:
            raise ProtocolError(f"{self.name} answered for {items} items of {count}")
        statuses = bytearray(count)
        statuses[0] = status
        behind = 1 + len(rest)
        statuses[1:behind] = rest
        if behind < count:
            self.receive_view(memoryview(statuses)[behind:])
        return length - count, statuses

    def spin(self, count: int = 1) -> None:
        """Look for the reply for `spin_s`, and longer for many items, before the caller sleeps
        until it comes.

        To sleep and be woken costs 20 to 80 µs (more in virtual machines), and more processor time
        than this. The GIL is kept: to give it up and wait for it again each time could take 5 ms.
        Where it was in vain several times, the next calls do without.
        """
        if self._spins_to_skip:
            self._spins_to_skip -= 1
            return
        address = self._poll_address
        if held_poll(address, 1, 0):
            return
        now = monotonic()
        if now < CONTENTION.until_s:
            return
        end = now + self.spin_s + min(count * SPIN_ITEM_S, SPIN_LONGER_S_MAX)
        while not held_poll(address, 1, 0):
            before, now = now, monotonic()
            if now - before > STEP_CONTENDED_S:
                CONTENTION.note(now)
                return
            if now > end:
                self._spins_in_vain += 1
                if self._spins_in_vain >= SPINS_IN_VAIN_MAX:
                    self._spins_in_vain = 0
                    self._spins_to_skip = SPINS_SKIPPED
                return
            step_aside()
        self._spins_in_vain = 0

    def _refusal(self, code: int, length: int, first: int, rest: memoryview) -> CenoteError:
        """The error in an answer, of whose text the `first` byte and the `rest` are here."""
        if not len(rest) < length <= wire.TEXT_BYTES_MAX:
            raise ProtocolError(f"{self.name} sent an error text of {length} bytes")
        text = bytearray(length)
        text[0] = first
        text[1 : 1 + len(rest)] = rest
        self.receive_view(memoryview(text)[1 + len(rest) :])
        return wire.decode_error(code, bytes(text))

    def explain(self, error: OSError) -> NoReturn:
        """Sending failed: the daemon may have said why before it closed."""
        reply = bytearray(wire.REPLY_BYTES)
        with contextlib.suppress(OSError):
            while self.sock.recv_into(reply, 0, socket.MSG_DONTWAIT) == wire.REPLY_BYTES:
                _, _, code, _, _, _, length = wire.REPLY.unpack(reply)
                if length > wire.TEXT_BYTES_MAX:
                    break
                body = self.sock.recv(length, socket.MSG_DONTWAIT) if length else b""
                if code:
                    raise wire.decode_error(code, body)
        self.lost(error)

    def receive_farewell(self, deadline: float, now: float) -> NoReturn:
        """The daemon said or did something that nobody asked for: raise what it was."""
        try:
            self.begin(deadline, now)
        except OSError as error:  # another thread closed it just now
            self.lost(error)
        self.receive_reply(wire.OP_NONE, 0, 1)
        raise ProtocolError(f"{self.name} sent something that nobody asked for")

    # ---- life -------------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Whether an idle connection is still good: nothing arrived, it was not closed."""
        return not held_poll(self._poll_address, 1, 0)

    def shut_down(self) -> None:
        """Wake whoever waits on the socket; from any thread."""
        self.closing = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Afterwards nothing can arrive any more."""
        self.closing = True
        self._poll_fd.fd = self._fd = -1  # the number may soon be another file's
        with contextlib.suppress(OSError):
            self.sock.close()


def _behind(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the views after their first `done` bytes."""
    for position, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[position + 1 :]]
        done -= len(view)
    return []
