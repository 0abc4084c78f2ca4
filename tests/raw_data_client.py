"""A data server in this process, and a client of it that is only a socket."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cenote.store.gate import Gate
from cenote.store.server import DataServer
from cenote.store.serving import ServingLimits
from cenote.store.sessions import SessionTable
from cenote.transport import wire
from cenote.transport.fake_segment import FakeSegment, FakeSegments
from cenote.transport.testing_support import batch
from cenote.v1 import store_pb2

__all__ = ["SESSION", "SIZE_BYTES", "Daemon", "Raw", "daemon", "rows"]

SESSION = b"0123456789abcdef"
SIZE_BYTES = 16 << 20


@dataclass
class Daemon:
    server: DataServer
    segment: FakeSegment
    segments: FakeSegments
    sessions: SessionTable
    unix_path: str

    @property
    def port(self) -> int:
        assert self.server.tcp_address is not None
        return self.server.tcp_address[1]


@contextlib.contextmanager
def daemon(
    folder: Path,
    limits: ServingLimits | None = None,
    gate: bool = False,
    connections_max: int = 256,
) -> Iterator[Daemon]:
    segment = FakeSegment(7, SIZE_BYTES)
    segments = FakeSegments([segment])
    sessions = SessionTable(segments)
    unix_path = str(folder / "data.sock")
    server = DataServer(
        segments,
        sessions,
        tcp=("127.0.0.1", 0),
        unix_path=unix_path,
        limits=limits,
        gate=Gate(segments) if gate else None,
        connections_max=connections_max,
    )
    server.start()
    try:
        yield Daemon(server, segment, segments, sessions, unix_path)
    finally:
        server.close()
        segments.close()


class Raw:
    """A client's socket, without a client."""

    def __init__(self, daemon: Daemon, *, unix: bool = False) -> None:
        if unix:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(daemon.unix_path)
        else:
            self.sock = socket.create_connection(("127.0.0.1", daemon.port))
        self.sock.settimeout(20)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def receive(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            more = self.sock.recv(length - len(data))
            if not more:
                break
            data += more
        return data

    def hello(
        self,
        session_id: bytes = SESSION,
        *,
        ticket: bytes = b"",
        writer: bool = True,
        want_descriptors: bool = False,
    ) -> store_pb2.DataHelloResponse:
        """Raises what the daemon refuses with."""
        request = store_pb2.DataHelloRequest(
            ticket=ticket,
            session_id=session_id,
            writer=writer,
            want_descriptors=want_descriptors,
        )
        with contextlib.suppress(OSError):  # it may have refused already
            self.sock.sendall(wire.encode_hello(request))
        return self.hello_reply()

    def hello_reply(self) -> store_pb2.DataHelloResponse:
        code, length = wire.hello_reply_length(self.receive(wire.HELLO_REPLY.size))
        return wire.decode_hello_reply(code, self.receive(length))

    def send(
        self, op: int, count: int, body: bytes, *, epoch: int = 1, length: int | None = None
    ) -> None:
        size = len(body) if length is None else length
        self.sock.sendall(wire.REQUEST.pack(op, 0, 0, count, 5, epoch, 9, size) + body)

    def reply(self) -> tuple[list[int], bytes]:
        """Statuses and payload. Raises what the daemon refuses with."""
        head = self.receive(wire.REPLY_BYTES)
        assert len(head) == wire.REPLY_BYTES
        _, _, code, items, _, _, length = wire.REPLY.unpack(head)
        body = self.receive(length)
        if code:
            raise wire.decode_error(code, body)
        return list(body[:items]), body[items:]

    def is_closed(self) -> bool:
        """Whether the daemon closed it; waits for it."""
        with contextlib.suppress(ConnectionError):
            return not self.sock.recv(1)
        return True


def rows(*pieces: tuple[int, int, int]) -> bytes:
    return batch(list(pieces)).tobytes()
