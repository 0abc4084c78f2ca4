"""The daemon's data server: TCP for clients elsewhere, a Unix socket for those on this host.

A thread per connection, blocking (see `served_connection`): measured against an event loop it
moves blocks faster, and engines hold a few connections each. Their number is bounded; one more is
told so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
from dataclasses import dataclass
from time import monotonic
from typing import Final, final

from cenote.api.errors import InternalError, InvalidArgument, ResourceUnavailable
from cenote.runtime.log import get_logger
from cenote.transport import wire
from cenote.transport.connection import enlarge_buffers

from .claims import ClaimFile
from .gate import Gate
from .rdma_host import RdmaHost
from .segment import SegmentSet
from .served_connection import ServedConnection
from .serving import ConnectionCounters, ServingLimits, TlsPort, served_times
from .sessions import SessionTable

__all__ = ["DataCounters", "DataServer"]

_BACKLOG: Final = 256
_STACK_BYTES: Final = 512 << 10
_KEEPALIVE_IDLE_S: Final = 10
_KEEPALIVE_INTERVAL_S: Final = 5
_KEEPALIVE_PROBES: Final = 3
_ACCEPT_RETRY_S: Final = 0.1

_log = get_logger("cenote.store.data")


@dataclass(frozen=True, slots=True)
class DataCounters:
    """Totals since the start, and the connections open now."""

    read_bytes: int
    written_bytes: int
    seals: int
    connections: int
    accepted: int
    refused: int
    requests: int = 0
    errors: int = 0
    """Connections ended by a refusal."""
    unix_read_bytes: int = 0
    """Of those read, over the Unix socket: by clients on this host, of what they can't map."""
    unix_written_bytes: int = 0


@final
class DataServer:
    """Serves the segments' bytes until `close`.

    `tcp` is (host, port), port 0 for any; `unix_path` is made, and removed by `close`. `gate`, if
    any, asks each connection who it is. `claims`: pages for writers over shared memory, by
    default in this process alone. `rdma`: who serves what RDMA clients ask for. `tls`: over TCP
    nothing but TLS is spoken.
    Raises ResourceUnavailable where an address is taken.
    """

    def __init__(
        self,
        segments: SegmentSet,
        sessions: SessionTable,
        *,
        tcp: tuple[str, int] | None = None,
        unix_path: str | None = None,
        unix_mode: int = 0o600,
        gate: Gate | None = None,
        connections_max: int = 256,
        limits: ServingLimits | None = None,
        server_version: str = "",
        claims: ClaimFile | None = None,
        rdma: RdmaHost | None = None,
        tls: TlsPort | None = None,
    ) -> None:
        self._tls = tls
        if tcp is None and unix_path is None:
            raise InvalidArgument("a data server needs a TCP address or a Unix socket path")
        self._segments = segments
        self._sessions = sessions
        self.rdma = rdma
        """Who answers what RDMA clients ask for over connections that begin from now on."""
        self._gate = gate
        self._connections_max = connections_max
        self._limits = limits or ServingLimits()
        self._server_version = server_version
        self._lock = threading.Lock()
        self._threads: dict[ServedConnection, threading.Thread] = {}
        self._ended = {is_unix: ConnectionCounters() for is_unix in (False, True)}
        self.times = served_times()
        """By operation of the wire."""
        self._accepted = 0
        self._refused = 0
        self._closing = threading.Event()
        self._acceptors: list[threading.Thread] = []
        self._listeners: list[socket.socket] = []
        self._unix_path = unix_path
        self.tcp_address: tuple[str, int] | None = None
        """(host, port) as bound."""
        try:
            if tcp is not None:
                listener = _listen_tcp(*tcp)
                self._listeners.append(listener)
                self.tcp_address = listener.getsockname()[:2]
            if unix_path is not None:
                self._listeners.append(_listen_unix(unix_path, unix_mode))
            self._owns_claims = claims is None
            self._claims = ClaimFile.in_memory() if claims is None else claims
        except BaseException:  # whatever it was, no listener may stay open
            self._close_listeners()
            raise

    @property
    def unix_path(self) -> str | None:
        return self._unix_path

    def start(self) -> None:
        """Begin to accept. Connections made since the constructor are waiting in the backlog."""
        for listener in self._listeners:
            thread = threading.Thread(
                target=self._accept, args=(listener,), name="cenote-data-accept", daemon=True
            )
            thread.start()
            self._acceptors.append(thread)

    def counters(self) -> DataCounters:
        """What was served so far."""
        with self._lock:
            unix, total = ConnectionCounters(), ConnectionCounters()
            unix.add(self._ended[True])
            total.add(self._ended[False])
            for connection in self._threads:
                (unix if connection.is_unix else total).add(connection.counters)
            total.add(unix)
            return DataCounters(
                read_bytes=total.read_bytes,
                written_bytes=total.written_bytes,
                seals=total.seals,
                connections=len(self._threads),
                accepted=self._accepted,
                refused=self._refused,
                requests=total.requests,
                errors=total.errors,
                unix_read_bytes=unix.read_bytes,
                unix_written_bytes=unix.written_bytes,
            )

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop accepting, end all connections, and wait until their threads are out.

        Raises InternalError where a thread is not out in time: bytes may still reach a segment.
        """
        deadline = monotonic() + timeout_s
        self._closing.set()
        self._close_listeners()
        for thread in self._acceptors:
            thread.join(max(0.0, deadline - monotonic()))
        with self._lock:
            threads = dict(self._threads)
        for connection in threads:
            connection.shut_down()
        for thread in threads.values():
            thread.join(max(0.0, deadline - monotonic()))
        if self._owns_claims:
            self._claims.close()
        left = sum(thread.is_alive() for thread in [*self._acceptors, *threads.values()])
        if left:
            raise InternalError(f"{left} threads of the data server did not end in {timeout_s} s")

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
            if listener.family == socket.AF_UNIX and self._unix_path is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._unix_path)
            if not self._acceptors:
                listener.close()

    # ---- accepting --------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        # Affects threads that are started from now on, anywhere in the process: they are lazily
        # backed, and half a MiB is plenty for Python code that does not recurse.
        threading.stack_size(_STACK_BYTES)
        with listener:
            while not self._closing.is_set():
                try:
                    sock, _ = listener.accept()
                except OSError as error:
                    if self._closing.is_set():
                        return
                    # Out of descriptors or memory, or the client is gone already: others may come.
                    _log.warning("can't accept a data connection", error=error)
                    self._closing.wait(_ACCEPT_RETRY_S)
                    continue
                self._take_in(sock)

    def _take_in(self, sock: socket.socket) -> None:
        with self._lock:
            self._accepted += 1
            full = len(self._threads) >= self._connections_max
            self._refused += full
        if full or self._closing.is_set():
            self._turn_away(sock)
            return
        try:
            _prepare(sock)
            connection = ServedConnection(
                sock,
                self._segments,
                self._sessions,
                self._claims,
                self._limits,
                self._gate,
                self._server_version,
                self._forget,
                self.rdma,
                self.times,
                self._tls if sock.family != socket.AF_UNIX else None,
            )
            thread = threading.Thread(target=connection.run, name="cenote-data", daemon=True)
            with self._lock:
                self._threads[connection] = thread
            thread.start()
        except (OSError, RuntimeError) as error:  # gone already; or no thread can be had
            _log.warning("can't serve a data connection", error=error)
            with self._lock:
                self._threads = {c: t for c, t in self._threads.items() if t.ident is not None}
            sock.close()
        if self._closing.is_set():
            # `close` may have missed it.
            with self._lock:
                every = list(self._threads)
            for connection in every:
                connection.shut_down()

    def _turn_away(self, sock: socket.socket) -> None:
        error = ResourceUnavailable(
            f"the daemon serves {self._connections_max} data connections, not more",
            remedy="close clients that are not used, or raise the daemon's connections_max",
        )
        with sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.send(wire.encode_hello_error(error))
            sock.shutdown(socket.SHUT_WR)

    def _forget(self, connection: ServedConnection) -> None:
        with self._lock:
            self._threads.pop(connection, None)
            self._ended[connection.is_unix].add(connection.counters)


def _prepare(sock: socket.socket) -> None:
    sock.settimeout(None)
    enlarge_buffers(sock)
    if sock.family != socket.AF_UNIX:
        tcp = socket.IPPROTO_TCP
        sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
        # A peer that lost power must not hold a thread for ever.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(tcp, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        sock.setsockopt(tcp, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
        sock.setsockopt(tcp, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)


def _listen_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.settimeout(None)
        enlarge_buffers(listener)  # accepted sockets have the windows of their listener
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = "write an address of this host (--listen)"
        else:
            remedy = "is another daemon running there? choose another port"
        raise ResourceUnavailable(
            f"can't listen on {host}:{port}: {error}", remedy=remedy
        ) from error
    return listener


def _listen_unix(path: str, mode: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.settimeout(None)
        _remove_dead_socket(path)
        listener.bind(path)
        os.chmod(path, mode)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ResourceUnavailable(
            f"can't listen on the Unix socket {path}: {error}",
            remedy="choose another path; it has at most 107 bytes",
        ) from error
    return listener


def _remove_dead_socket(path: str) -> None:
    """Remove what a daemon that was killed left behind. Raises OSError where one listens."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
