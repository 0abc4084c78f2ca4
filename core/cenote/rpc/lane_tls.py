"""The lane's server over TLS: what stands between the event loop's transport and a connection.

The handshake is 0.3 to 2 ms of arithmetic. It runs in a few threads, so that thousands of clients
that connect anew after a failover delay no heartbeat; the loop only carries bytes. Handshakes under
way are bounded in time and number: where there are too many, the oldest that waits for its client
goes, and one that computes never does, so that those who say nothing can't keep out who speaks.

A connection is made once its handshake is done, on a transport that enciphers; it does not know of
TLS, but for `identities`. A client that comes without TLS is told so in a plain ERROR frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, final

from cenote.api.errors import CenoteError, TlsFailed, Unavailable
from cenote.security.tls import Tls, identities_of
from cenote.security.tls_errors import tls_failed, wants_tls
from cenote.security.tls_socket import looks_like_tls

from .frames import pack_error
from .lane_connection import LaneConnection, peer_name

if TYPE_CHECKING:
    from .lane_server import LaneServer

__all__ = ["Handshakes", "TlsAcceptor"]

_log = logging.getLogger(__name__)

_THREADS: Final = 2
_FIRST_BYTES: Final = 3
_EARLY_BYTES_MAX: Final = 256 << 10
_READ_BYTES: Final = 64 << 10


@final
class Handshakes:
    """Of one server: those under way, oldest first, and the threads that compute them."""

    def __init__(self, tls: Tls, handshakes_max: int) -> None:
        self.tls = tls
        self._max = handshakes_max
        self._under_way: dict[TlsAcceptor, None] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="cenote-tls")

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, acceptor: TlsAcceptor) -> bool:
        """Whether there is room for this one, also by ending another."""
        if len(self._under_way) >= self._max:
            oldest = next((one for one in self._under_way if not one.computing), None)
            if oldest is None:
                return False
            oldest.abort()
            self._under_way.pop(oldest, None)
        self._under_way[acceptor] = None
        return True

    def compute(self, handshake: ssl.SSLObject) -> asyncio.Future[None]:
        """One step of a handshake."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, handshake.do_handshake)

    def end(self, acceptor: TlsAcceptor) -> None:
        """It is done, or given up."""
        self._under_way.pop(acceptor, None)

    def close(self) -> None:
        """Give up what is under way."""
        for acceptor in list(self._under_way):
            acceptor.abort()
        self._threads.shutdown(wait=False, cancel_futures=True)


@final
class TlsAcceptor(asyncio.Protocol):
    """One accepted connection: first its handshake, then what it carries."""

    def __init__(self, server: LaneServer, handshakes: Handshakes) -> None:
        self._server = server
        self._handshakes = handshakes
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object: ssl.SSLObject | None = None
        self._early = bytearray()
        """What came while a step was computed, or before it is known to be TLS."""
        self._lane: LaneConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._ended = False
        self.computing = False

    # ---- transport callbacks ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if not self._handshakes.begin(self):
            self._server.stats.handshakes_refused += 1
            self.abort()
            return
        limit_s = self._server.limits.hello_timeout_s
        self._timer = self._loop.call_later(limit_s, self._late)

    def data_received(self, data: bytes) -> None:
        if self._lane is not None:
            self._incoming.write(data)
            if not self._paused:
                self._decipher()
            return
        if self._ended:
            return
        self._early += data
        if len(self._early) > _EARLY_BYTES_MAX:
            self._fail(TlsFailed(f"a handshake of more than {_EARLY_BYTES_MAX} bytes"))
        elif not self.computing:
            self._step()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._stop_waiting()
        self._transport = None
        if self._lane is not None:
            self._lane.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._lane is not None:
            self._lane.pause_writing()

    def resume_writing(self) -> None:
        if self._lane is not None:
            self._lane.resume_writing()

    # ---- the handshake ------------------------------------------------------------------------

    def _step(self) -> None:
        if self._object is None:
            if len(self._early) < _FIRST_BYTES:
                return
            if not looks_like_tls(self._early):
                self._fail(wants_tls(), plain=True)
                return
            try:
                context = self._handshakes.tls.server_context()
                self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
            except (CenoteError, ssl.SSLError) as error:
                _log.error("no TLS handshake can be begun", exc_info=error)
                self.abort()
                return
        if self._early:
            self._incoming.write(self._early)
            self._early.clear()
        self.computing = True
        self._handshakes.compute(self._object).add_done_callback(self._stepped)

    def _stepped(self, step: asyncio.Future[None]) -> None:
        self.computing = False
        error = None if step.cancelled() else step.exception()
        if self._ended or step.cancelled() or self._transport is None:
            return
        self._send_outgoing()
        if error is None:
            self._welcome()
        elif isinstance(error, ssl.SSLWantReadError):
            if self._early:
                self._step()
        else:
            self._fail(tls_failed(error, "the client", self._handshakes.tls.files))

    def _welcome(self) -> None:
        assert self._object is not None
        self._stop_waiting()
        lane = self._lane = LaneConnection(self._server)
        lane.over_tls = True
        lane.identities = identities_of(self._object.getpeercert())
        lane.connection_made(_Enciphering(self, self._object))
        if self._early:
            self._incoming.write(self._early)
            self._early.clear()
        self._decipher()

    def _late(self) -> None:
        self._server.stats.handshakes_failed += 1
        self.abort()

    def _fail(self, error: Unavailable, *, plain: bool = False) -> None:
        """Say why, and leave the client the time to read it."""
        self._server.stats.handshakes_failed += 1
        peer = peer_name(self._transport)
        self._ended = True
        self._early.clear()
        self._stop_waiting()
        self._server.handshake_failed(error, peer)
        if plain:
            self._transport.write(pack_error(0, error))
        self._transport.write_eof()
        self._timer = self._loop.call_later(self._server.limits.linger_s, self.abort)

    def _stop_waiting(self) -> None:
        self._handshakes.end(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def abort(self) -> None:
        """Close now."""
        self._ended = True
        if self._transport is not None:
            self._transport.abort()

    # ---- bytes --------------------------------------------------------------------------------

    def _decipher(self) -> None:
        """Hand on all that has come, in one piece: one whole request is the fast path."""
        assert self._object is not None
        assert self._lane is not None
        parts: list[bytes] = []
        try:
            while part := self._object.read(_READ_BYTES):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            _log.info("closing %s: %s", self._lane.peer, error)
            self.abort()
            return
        if parts:
            self._lane.data_received(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._outgoing.pending:  # an answer of TLS itself
            self._send_outgoing()

    def _send_outgoing(self) -> None:
        if self._transport is not None and self._outgoing.pending:
            self._transport.write(self._outgoing.read())

    def encipher(self, data: bytes) -> None:
        """Send; never waits, as a transport's `write`."""
        assert self._object is not None
        if self._transport is None:
            return
        view = memoryview(data)
        while len(view):
            view = view[self._object.write(view) :]
        self._transport.write(self._outgoing.read())

    def say_end(self) -> None:
        """Nothing more will be sent."""
        assert self._object is not None
        with contextlib.suppress(ssl.SSLError):  # the other side's end, which nobody waits for
            self._object.unwrap()
        self._send_outgoing()
        self._transport.write_eof()

    def pause(self, paused: bool) -> None:
        """Whether the connection wants no bytes now."""
        self._paused = paused
        if self._transport is None:
            return
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
            if self._incoming.pending:
                self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self._paused and self._transport is not None:
            self._decipher()

    @property
    def transport(self) -> Any:
        """Of the loop."""
        return self._transport


@final
class _Enciphering(asyncio.Transport):
    """What a connection takes for its transport."""

    def __init__(self, acceptor: TlsAcceptor, _object: ssl.SSLObject) -> None:
        super().__init__()
        self._acceptor = acceptor
        self._raw = acceptor.transport

    def write(self, data: Any) -> None:
        self._acceptor.encipher(data)

    def writelines(self, list_of_data: Any) -> None:
        self._acceptor.encipher(b"".join(list_of_data))

    def write_eof(self) -> None:
        self._acceptor.say_end()

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        self._acceptor.pause(True)

    def resume_reading(self) -> None:
        self._acceptor.pause(False)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_size(self) -> int:
        return int(self._raw.get_write_buffer_size())

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._raw.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return bool(self._raw.is_closing())

    def close(self) -> None:
        self._raw.close()

    def abort(self) -> None:
        self._raw.abort()
