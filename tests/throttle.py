"""A slow link: a TCP proxy that hands on what a server sends at a bounded rate."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Final, Self

__all__ = ["SlowLink"]

_STEP_BYTES: Final = 16 << 10
_BUFFER_BYTES: Final = 32 << 10
_CONNECTIONS_MAX: Final = 16
_CONNECT_S: Final = 5.0


class SlowLink:
    """Listens on a port of its own; `bytes_per_s` from the server to all clients together.

    with SlowLink(1e6) as link:
        link.target = "127.0.0.1", 7000      # before the first connection
        link.address                         # "127.0.0.1:port"
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.target = ("", 0)
        self.sent_bytes = 0
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self._stopping = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(_CONNECT_S)

    def _spawn(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while len(self._sockets) < 2 * _CONNECTIONS_MAX:
                client, _ = self._listener.accept()
                server = socket.create_connection(self.target, _CONNECT_S)
                server.settimeout(None)
                # Little is on its way, so that the rate is what the client sees.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
                self._sockets += [client, server]
                self._spawn(self._hand_on, client, server, False)
                self._spawn(self._hand_on, server, client, True)

    def _hand_on(self, source: socket.socket, target: socket.socket, slowly: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_STEP_BYTES):
                if slowly:
                    self._wait_for(len(data))
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _wait_for(self, length: int) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._free_at_s = max(now_s, self._free_at_s) + length / self._bytes_per_s
            wait_s = self._free_at_s - now_s
            self.sent_bytes += length
        self._stopping.wait(wait_s)
