"""What the lane's tests share: a real server in a thread, a scripted one, a raw client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest
import uvloop

from cenote.api.errors import AlreadyExists, CenoteError, NotLeader, Unauthenticated
from cenote.rpc.frames import (
    ERROR,
    HELLO,
    HELLO_REPLY,
    REPLY,
    REQUEST,
    Frame,
    FrameParser,
    decode_error,
    pack_frame,
    pack_hello,
    pack_hello_reply,
)
from cenote.rpc.lane_server import LaneConnection, LaneLimits, LaneServer
from cenote.security.tls import Tls
from promptness import ends_within

T = TypeVar("T")

ECHO = 1
RAISE = 2  # a typed error, chosen by the body
BUG = 3
LATER = 4  # answered when `finish(body)` is called
MANY_BYTES = 5  # as many as the body says
PARTS = 6  # a list of bytes
DEADLINE = 7  # the deadline_ms that the handler was given
NEVER = 8  # a coroutine that waits for ever
WRONG = 9  # a handler that returns nonsense
COUNT = 10  # how many COUNT requests came
CALL = 11  # calls `on_call(connection, body)`


class LaneThread:
    """A lane server on a loop of its own in a thread, as a context manager."""

    def __init__(
        self,
        tmp_path: Path,
        limits: LaneLimits | None = None,
        *,
        tcp: bool = False,
        tls: Tls | None = None,
    ) -> None:
        self.tls = tls
        self.path = str(tmp_path / "lane.sock")
        self.address = f"unix://{self.path}"
        self.limits = limits or LaneLimits()
        self.tcp = tcp
        self.tcp_address = ""
        self.loop: asyncio.AbstractEventLoop
        self.server: LaneServer
        self.hellos: list[bytes] = []
        self.hello_error: Exception | None = None
        self.hello_waits: asyncio.Future[bytes] | None = None
        self.events: list[tuple[str, Any]] = []
        self.futures: dict[bytes, asyncio.Future[Any]] = {}
        self.cancelled: list[bytes] = []
        self.count = 0
        self.before_flush: Callable[[], None] = lambda: None
        self.on_call: Callable[[LaneConnection, bytes], bytes] = lambda _, body: body
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lane-server")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result(10)

    def finish(self, name: bytes, result: bytes | Exception) -> None:
        """Answer a LATER request."""

        def do() -> None:
            future = self.futures.pop(name)
            if isinstance(result, bytes):
                future.set_result(result)
            else:
                future.set_exception(result)

        self.loop.call_soon_threadsafe(do)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.server = LaneServer(
            self.dispatch,
            self.hello,
            limits=self.limits,
            before_flush=lambda: self.before_flush(),
            on_connect=lambda c: self.events.append(("connect", c)),
            on_disconnect=lambda c: self.events.append(("disconnect", c)),
        )
        await self.server.listen_unix(self.path)
        if self.tcp:
            host, port = await self.server.listen_tcp(tls=self.tls)
            self.tcp_address = f"tcp://{host}:{port}"
        self._ready.set()
        await self._stop.wait()
        await self.server.close(0.5)

    def hello(self, connection: LaneConnection, payload: bytes) -> Any:
        self.hellos.append(payload)
        if payload == b"stranger":
            raise Unauthenticated("who are you?")
        if self.hello_error is not None:
            raise self.hello_error
        connection.session = payload
        if self.hello_waits is not None:
            return self.hello_waits
        return b"welcome " + payload

    def dispatch(
        self, connection: LaneConnection, method: int, body: bytes, deadline_ms: int
    ) -> Any:
        if method == ECHO:
            return body
        if method == RAISE:
            if body == b"leader":
                raise NotLeader("not me", addresses=["tcp://other:1"])
            raise AlreadyExists("taken", remedy="look", same_bytes=body == b"same")
        if method == BUG:
            raise ValueError("a bug, on purpose")
        if method == LATER:
            future = self.futures[body] = self.loop.create_future()
            return future
        if method == MANY_BYTES:
            return b"z" * int(body)
        if method == PARTS:
            return [body, b"", body[::-1]]
        if method == DEADLINE:
            return b"%d" % deadline_ms
        if method == NEVER:
            return self._never(body)
        if method == COUNT:
            self.count += 1
            return b"%d" % self.count
        if method == CALL:
            return self.on_call(connection, body)
        return 42

    async def _never(self, name: bytes) -> bytes:
        self.futures[name] = self.loop.create_future()
        try:
            await self.loop.create_future()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return b""


class RawClient:
    """A socket with frames: for what a well-behaved client would not send."""

    def __init__(self, address: str, *, greet: bool = True) -> None:
        if address.startswith("unix://"):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(10)
            self.sock.connect(address.removeprefix("unix://"))
        else:
            host, port = address.removeprefix("tcp://").rsplit(":", 1)
            self.sock = socket.create_connection((host, int(port)), timeout=10)
        self.parser = FrameParser(1 << 30)
        if greet:
            self.send(pack_frame(HELLO, 1, body=pack_hello(b"raw")))
            frame = self.next()
            assert frame is not None
            assert frame[0] == HELLO_REPLY

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, raw: bytes) -> None:
        self.sock.sendall(raw)

    def next(self) -> Frame | None:
        """The next frame, or None at the stream's end."""
        while (frame := self.parser.next()) is None:
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self.parser.feed(data)
        return frame


class ScriptedServer:
    """Accepts on a Unix socket, answers hello, then does with each connection what it is told."""

    def __init__(
        self, tmp_path: Path, script: Callable[[socket.socket], None], *, greet: bool = True
    ) -> None:
        self.path = str(tmp_path / "scripted.sock")
        self.address = f"unix://{self.path}"
        self.stopped = threading.Event()
        self.accepted = 0
        self._script = script
        self._greet = greet
        self._listener = socket.socket(socket.AF_UNIX)
        self._threads: list[threading.Thread] = []
        self._socks: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._threads.append(threading.Thread(target=self._accept, name="scripted"))
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        for sock in (self._listener, *self._socks):
            with contextlib.suppress(OSError):  # gone already
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for sock in (self._listener, *self._socks):
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._socks.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,), name="scripted-connection")
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            if self._greet:
                sock.recv(1 << 16)
                sock.sendall(pack_frame(HELLO_REPLY, 1, body=pack_hello_reply(1, b"")))
            self._script(sock)
        except OSError:
            pass  # the client hung up


def open_sockets() -> int:
    """How many sockets this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def ends_in(work: Callable[[], object], kind: type[CenoteError], after_s: float) -> CenoteError:
    """`work` raises `kind`, `after_s` seconds from now."""
    with ends_within(after_s, at_least_s=after_s), pytest.raises(kind) as caught:
        work()
    return caught.value


def silent(sock: socket.socket) -> None:
    while sock.recv(1 << 16):
        pass


def request(call_id: int, method: int, body: bytes = b"", deadline_ms: int = 5000) -> bytes:
    return pack_frame(REQUEST, call_id, method, deadline_ms, body)


def error_in(frame: Frame | None) -> CenoteError:
    assert frame is not None, "the connection was closed without a word"
    assert frame[0] == ERROR, frame
    return decode_error(frame[3], frame[4])


def still_serves(lane: LaneThread) -> None:
    with RawClient(lane.address) as client:
        client.send(request(2, ECHO, b"alive"))
        assert client.next() == (REPLY, 2, ECHO, 0, b"alive")
