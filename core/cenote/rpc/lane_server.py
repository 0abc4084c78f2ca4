"""The lane's server: listens on TCP and Unix sockets, admits connections, ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import time
from collections.abc import Callable

from cenote.api.errors import CenoteError, ResourceUnavailable, Unavailable
from cenote.security.tls import Tls

from .address import UNIX_PATH_BYTES_MAX
from .lane_connection import Dispatch, HelloHandler, LaneConnection
from .lane_limits import LaneLimits, LaneStats
from .lane_output import ReplyBody
from .lane_tls import Handshakes, TlsAcceptor
from .loop_spinner import LoopSpinner

__all__ = ["Dispatch", "HelloHandler", "LaneConnection", "LaneLimits", "LaneServer", "ReplyBody"]

_log = logging.getLogger(__name__)

_BACKLOG = 512
_REFUSED_MAX = 64  # refused connections that may linger to read why; further ones are just closed
# A client host that vanished without a word frees its connection after about two minutes.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class LaneServer:
    """Serves requests of the lane on any number of listening sockets of the running loop.

    `dispatch(connection, method, body, deadline_ms)` gets every request, on the loop. It returns
    the reply's body at once (bytes, or a list of bytes that are written one after the other), or
    an awaitable of it, whose reply is sent when it is done while later requests are served. A
    CenoteError becomes an ERROR frame; any other exception is a bug: logged, InternalError.

    `hello(connection, payload)` gets the opaque part of the client's hello and returns the opaque
    part of the reply (or an awaitable); a CenoteError refuses the client.

    `before_flush()` runs once per batch of replies before they are written, `after_flush()` once
    they are on their way. `on_connect` and
    `on_disconnect` are called for each admitted connection (before its hello).
    """

    def __init__(
        self,
        dispatch: Dispatch,
        hello: HelloHandler,
        *,
        limits: LaneLimits | None = None,
        before_flush: Callable[[], None] | None = None,
        after_flush: Callable[[], None] | None = None,
        on_connect: Callable[[LaneConnection], None] | None = None,
        on_disconnect: Callable[[LaneConnection], None] | None = None,
    ) -> None:
        self.dispatch = dispatch
        self.hello = hello
        self.limits = limits = limits or LaneLimits()
        self.before_flush = before_flush
        self.after_flush = after_flush
        self.stats = LaneStats()
        self.partial_bytes = 0  # held in unfinished frames of all connections
        self.connections: set[LaneConnection] = set()  # admitted
        self.tasks: set[asyncio.Future[ReplyBody] | asyncio.Future[bytes]] = set()
        self.handshakes: Handshakes | None = None
        self.on_handshake_failed: Callable[[Unavailable, str], None] | None = None
        self._refused: set[LaneConnection] = set()
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._listeners: list[asyncio.AbstractServer] = []
        self._unix_files: list[tuple[str, int, int]] = []  # path, device, inode
        self._closing = False
        self._changed = asyncio.Event()
        self.spinner = LoopSpinner(limits.spin_s, self.stats)

    # --- listening ------------------------------------------------------------------------------

    async def listen_tcp(
        self, host: str = "127.0.0.1", port: int = 0, *, tls: Tls | None = None
    ) -> tuple[str, int]:
        """Listen on one TCP address; port 0 takes a free one. Returns (host, port) as bound.
        With `tls`, who does not speak it is refused.

        Raises ResourceUnavailable when the address can't be had.
        """
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except OSError as error:
            raise ResourceUnavailable(
                f"can't resolve the listen address {host!r}: {error}"
            ) from error
        family, kind, proto, _, bind_to = found[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _inherited_tcp_options(sock)
            sock.bind(bind_to)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            in_use = error.errno == errno.EADDRINUSE
            raise ResourceUnavailable(
                f"can't listen on tcp://{host}:{port}: {error.strerror}",
                remedy="stop the other program or choose another port" if in_use else "",
            ) from error
        bound = sock.getsockname()
        await self._serve_on(sock, tls)
        return str(bound[0]), int(bound[1])

    async def listen_unix(self, path: str, mode: int = 0o600) -> None:
        """Listen on a Unix socket file; one whose owner is dead is replaced.

        Raises ResourceUnavailable when the path can't be had or a live process serves it.
        """
        sock, where = _bind_unix(path, mode)
        self._unix_files.append(where)
        await self._serve_on(sock)

    async def _serve_on(self, sock: socket.socket, tls: Tls | None = None) -> None:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            listener = await loop.create_unix_server(
                lambda: LaneConnection(self), sock=sock, backlog=_BACKLOG
            )
        elif tls is not None:
            handshakes = self.handshakes = Handshakes(tls, self.limits.handshakes_max)
            listener = await loop.create_server(
                lambda: TlsAcceptor(self, handshakes), sock=sock, backlog=_BACKLOG
            )
        else:
            listener = await loop.create_server(
                lambda: LaneConnection(self), sock=sock, backlog=_BACKLOG
            )
        self._listeners.append(listener)

    # --- connections ----------------------------------------------------------------------------

    def admit(self, connection: LaneConnection) -> CenoteError | None:
        """Called by a new connection: None, or why it is refused."""
        limit = self.limits.connections_max
        refusal: CenoteError | None = None
        if self._closing:
            refusal = Unavailable("the server is closing", remedy="try again")
        elif len(self.connections) >= limit:
            refusal = ResourceUnavailable(
                f"all {limit} connections of this server are in use",
                remedy="close idle clients or raise the server's connections_max",
            )
        if refusal is not None:
            self.stats.connections_refused += 1
            if len(self._refused) >= _REFUSED_MAX:
                connection.abort()
            self._refused.add(connection)
            return refusal
        self.connections.add(connection)
        self.stats.connections = len(self.connections)
        self.stats.connections_total += 1
        if self._on_connect is not None:
            self._on_connect(connection)
        return None

    def handshake_failed(self, error: Unavailable, peer: str) -> None:
        """Called by a connection that did not come to be."""
        if self.on_handshake_failed is not None:
            self.on_handshake_failed(error, peer)
        else:
            _log.info("TLS handshake with %s failed: %s", peer, error.message)

    def forget(self, connection: LaneConnection) -> None:
        """Called by a connection that is gone."""
        if connection in self.connections:
            self.connections.discard(connection)
            self.stats.connections = len(self.connections)
            if self._on_disconnect is not None:
                self._on_disconnect(connection)
        self._refused.discard(connection)
        self._changed.set()

    # --- the end --------------------------------------------------------------------------------

    async def close(self, deadline_s: float = 2.0) -> None:
        """Stop listening, let what is in flight finish within `deadline_s`, close everything."""
        until_s = time.monotonic() + deadline_s
        self._closing = True
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for path, device, inode in self._unix_files:
            _remove_own_socket(path, device, inode)
        self._unix_files.clear()
        if self.handshakes is not None:
            self.handshakes.close()
        everyone = self.connections | self._refused
        for connection in everyone:
            connection.close()
        await self._wait_gone(until_s)
        for connection in self.connections | self._refused:
            connection.abort()
        if self.tasks:
            for task in self.tasks:
                task.cancel()
            # Cancelled tasks end in this tick unless a handler refuses, which must not hold us.
            await asyncio.wait(self.tasks, timeout=max(0.1, until_s - time.monotonic()))
        await self._wait_gone(time.monotonic() + 0.5)

    async def _wait_gone(self, until_s: float) -> None:
        while self.connections or self._refused:
            self._changed.clear()
            try:
                async with asyncio.timeout(until_s - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                return


def _inherited_tcp_options(sock: socket.socket) -> None:
    """Options that Linux passes on to accepted sockets; elsewhere the loop sets TCP_NODELAY."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _bind_unix(path: str, mode: int) -> tuple[socket.socket, tuple[str, int, int]]:
    """A listening Unix socket and its file: path, device, inode."""
    path = os.path.abspath(path)
    if len(path.encode()) > UNIX_PATH_BYTES_MAX:
        raise ResourceUnavailable(
            f"the Unix socket path {path!r} has more than {UNIX_PATH_BYTES_MAX} bytes",
            remedy="use a shorter directory",
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale_socket(path)
        sock.bind(path)
        os.chmod(path, mode)  # before listen(): until then nobody can connect
        sock.listen(_BACKLOG)
        made = os.stat(path)
    except OSError as error:
        sock.close()
        raise ResourceUnavailable(f"can't listen on unix://{path}: {error.strerror}") from error
    except CenoteError:
        sock.close()
        raise
    return sock, (path, made.st_dev, made.st_ino)


def _remove_stale_socket(path: str) -> None:
    """Remove a socket file whose owner is dead. Raises ResourceUnavailable for any other file."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ResourceUnavailable(
            f"can't listen on unix://{path}: a file that is no socket is there",
            remedy="choose another path",
        )
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.setblocking(False)  # a live owner with a full backlog gives EAGAIN at once
        probe.connect(path)
    except ConnectionRefusedError:
        _log.info("replacing the stale socket file %s", path)
        _remove_own_socket(path, found.st_dev, found.st_ino)
        return
    except FileNotFoundError:
        return
    except BlockingIOError:
        pass
    finally:
        probe.close()
    raise ResourceUnavailable(
        f"can't listen on unix://{path}: another process serves it",
        remedy="stop that process or choose another path",
    )


def _remove_own_socket(path: str, device: int, inode: int) -> None:
    """Unlink `path` if it still is the file that we mean."""
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if (found.st_dev, found.st_ino) == (device, inode):
            os.unlink(path)
