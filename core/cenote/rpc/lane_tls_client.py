"""The lane's blocking client over TLS: the same calls, through the library that enciphers.

Without TLS a call goes straight to the kernel (`lane_socket`), which no library between can do; so
this is a class of its own, and a client without TLS never comes here.
"""

from __future__ import annotations

import ctypes
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final, final

from cenote.api.errors import ClientClosed, Unavailable
from cenote.runtime.scheduling import CONTENTION, STEP_CONTENDED_S
from cenote.security.tls import Tls
from cenote.security.tls_errors import tls_failed
from cenote.security.tls_socket import begin_tls

from .address import Address
from .frames import BODY_BYTES_MAX_DEFAULT, HEADER, REPLY, REQUEST
from .lane_connect import Cancelled, connect_socket
from .lane_socket import LaneSocket

__all__ = ["TlsLaneSocket", "open_lane"]

_now_s = time.monotonic
_libc: Final = ctypes.PyDLL(None)
_recv: Final = _libc.recv
_recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_recv.restype = ctypes.c_ssize_t
_step_aside: Final = _libc.sched_yield
_ONE: Final = ctypes.c_size_t(1)
_LOOK: Final = ctypes.c_int(socket.MSG_PEEK | socket.MSG_DONTWAIT)


def open_lane(
    address: Address,
    hello: bytes,
    until_s: float,
    *,
    spin_polls: int,
    clock: Callable[[], float],
    cancelled: Cancelled,
    body_bytes_max: int = BODY_BYTES_MAX_DEFAULT,
    tls: Tls | None = None,
) -> LaneSocket:
    """`LaneSocket.open`, over TLS where `tls` says how; Unix sockets never are. Raises TlsFailed
    besides."""
    if tls is None or address.path:
        return LaneSocket.open(
            address,
            hello,
            until_s,
            spin_polls=spin_polls,
            clock=clock,
            cancelled=cancelled,
            body_bytes_max=body_bytes_max,
        )

    def check() -> None:
        if cancelled():
            raise ClientClosed("the client was closed while it was connecting")

    sock = connect_socket(address, until_s, clock, cancelled)
    try:
        wrapped = begin_tls(
            sock, tls, str(address), until_s, host=address.host, clock=clock, check=check
        )
    except BaseException:
        sock.close()
        raise
    made = TlsLaneSocket(
        wrapped,  # type: ignore[arg-type]  # it has what a lane uses of a socket
        address,
        spin_polls=spin_polls,
        clock=clock,
        body_bytes_max=body_bytes_max,
    )
    made.tls = tls
    try:
        made.say_hello(hello, until_s, cancelled)
    except BaseException:
        made.close()
        raise
    return made


@final
class TlsLaneSocket(LaneSocket):
    """A LaneSocket on a TlsSocket."""

    __slots__ = ("tls",)

    tls: Tls

    def call(self, method: int, body: bytes, deadline_ms: int, until_s: float) -> bytes:
        """See `LaneSocket.call`."""
        self._until_s = until_s
        call_id = self._next_call_id()
        self.clean = False
        frame = HEADER.pack(len(body), call_id, method, REQUEST, 0, deadline_ms) + body
        self._send_rest(frame, 0)
        if self._spin_polls:
            self._spin(len(frame))
        return self._receive(REPLY, call_id, 0)

    def _spin(self, size: int) -> int:
        """Look for bytes without waiting, as `LaneSocket` does; what they are is not known yet."""
        if self._skip:
            self._skip -= 1
            return -1
        before_s = _now_s()
        if before_s < CONTENTION.until_s:
            return -1
        for _ in range(self._spin_polls):
            if _recv(self._c_fd, self._address_in_memory, _ONE, _LOOK) >= 0:
                self._misses = 0
                return -1
            _step_aside()
            after_s = _now_s()
            if after_s - before_s > STEP_CONTENDED_S:
                CONTENTION.note(after_s)
                return -1
            before_s = after_s
        self._misses = min(self._misses + 1, 6)
        self._skip = min((1 << self._misses) >> 2, 15)
        return -1

    def recv_now(self) -> bytes | None:
        """See `LaneSocket.recv_now`."""
        try:
            got = self._sock.recv_into(self._view)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lost(error) from error
        if not got:
            raise self._lost("the server closed the connection")
        return bytes(self._view[:got])

    def _lost(self, why: object) -> Unavailable:
        # In TLS 1.3 a server judges our certificate when our side of the handshake is done.
        if isinstance(why, ssl.SSLError):
            failed = tls_failed(why, self.address, self.tls.files)
            failed.maybe_executed = True
            return failed
        return super()._lost(why)
