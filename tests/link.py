"""A network between two programs that can be cut: a TCP proxy on loopback.

with Link(7000) as link:
    link.port          # instead of 7000
    link.cut()         # nothing is heard any more, in neither direction; nobody is told
    link.heal()        # connections from before are broken, new ones go through
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from types import TracebackType
from typing import Final, Self

__all__ = ["Link"]

_LOOK_S: Final = 0.02
_READ_BYTES: Final = 1 << 16


class Link:
    """One thread carries all connections."""

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._is_cut = threading.Event()
        self._still = threading.Event()
        self._drop = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link")

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def cut(self) -> None:
        """When it returns, nothing passes any more."""
        self._still.clear()
        self._is_cut.set()
        assert self._still.wait(5)

    def heal(self) -> None:
        self._drop.set()
        self._is_cut.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.join(5)
        for each in (self._listener, *self._pairs):
            each.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stopping.is_set():
                if self._drop.is_set():
                    self._drop.clear()
                    for each in list(self._pairs):
                        self._close(selector, each)
                if self._is_cut.is_set():
                    self._still.set()
                    self._stopping.wait(_LOOK_S)
                    continue
                for key, _ in selector.select(_LOOK_S):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket):
                        self._carry(selector, key.fileobj)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target, 1.0)
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            self._pairs[one] = other
            selector.register(one, selectors.EVENT_READ)

    def _carry(self, selector: selectors.BaseSelector, one: socket.socket) -> None:
        other = self._pairs.get(one)
        if other is None:
            return
        try:
            data = one.recv(_READ_BYTES)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        self._close(selector, one)

    def _close(self, selector: selectors.BaseSelector, one: socket.socket) -> None:
        other = self._pairs.pop(one, None)
        if other is None:
            return
        self._pairs.pop(other, None)
        for each in (one, other):
            with contextlib.suppress(KeyError):
                selector.unregister(each)
            each.close()
