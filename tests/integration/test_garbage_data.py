"""Garbage on a store daemon's data ports: an answer or the connection's end, never the daemon's."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from cenote.api.errors import (
    CenoteError,
    GrantRevoked,
    InvalidArgument,
    PermissionDenied,
    ProtocolError,
    ProtocolVersionMismatch,
    StaleLocation,
)
from cenote.api.rows import EXTENT
from cenote.transport import wire
from cenote.v1 import store_pb2
from ports import SESSION, Pool, pool_with_canaries, received, say

pytestmark = pytest.mark.integration

DATA = ["data tcp", "data unix"]


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[Pool]:
    with pool_with_canaries() as made:
        yield made


@pytest.fixture
def pool(shared_pool: Pool) -> Iterator[Pool]:
    """After each test everything that was put before is still there, and nobody died."""
    yield shared_pool
    shared_pool.check()


def data_hello(
    version_min: int = 1, version_max: int = 1, body: bytes | None = None, writer: bool = True
) -> bytes:
    if body is None:
        body = store_pb2.DataHelloRequest(session_id=SESSION, writer=writer).SerializeToString()
    return wire.HELLO.pack(wire.MAGIC, version_min, version_max, len(body)) + body


def exactly(sock: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = sock.recv(length - len(data))
        assert part, f"closed after {len(data)} of {length} bytes"
        data += part
    return bytes(data)


def greeted(sock: socket.socket) -> store_pb2.DataHelloResponse:
    say(sock, data_hello())
    code, length = wire.hello_reply_length(exactly(sock, wire.HELLO_REPLY.size))
    return wire.decode_hello_reply(code, exactly(sock, length))


BAD_HELLOS: dict[str, tuple[bytes, type[CenoteError], str]] = {
    "magic": (b"etcd\0\0\0\0" + bytes(8), ProtocolError, "protocol"),
    "version 0": (data_hello(0, 0), ProtocolVersionMismatch, "0"),
    "version 9": (data_hello(9, 9), ProtocolVersionMismatch, "9"),
    "oversized": (wire.HELLO.pack(wire.MAGIC, 1, 1, 1 << 31), ProtocolError, str(1 << 31)),
    "nonsense": (data_hello(body=b"\xff" * 50), ProtocolError, "hello"),
    "no session": (data_hello(body=b""), InvalidArgument, "session"),
}


@pytest.mark.parametrize("port", DATA)
@pytest.mark.parametrize(("data", "kind", "named"), BAD_HELLOS.values(), ids=list(BAD_HELLOS))
def test_bad_hellos_on_the_data_ports(
    pool: Pool, port: str, data: bytes, kind: type[CenoteError], named: str
) -> None:
    with pool.connect(port) as sock:
        say(sock, data)
        code, length = wire.hello_reply_length(exactly(sock, wire.HELLO_REPLY.size))
        text = exactly(sock, length)
        assert not received(sock), "it says more after its refusal"
    with pytest.raises(kind, match=named):
        raise wire.decode_error(code, text)


def request(
    op: int,
    count: int,
    rows: bytes,
    payload: bytes = b"",
    *,
    body: int | None = None,
    epoch: int = 99,
    grant_id: int = 1,
) -> bytes:
    length = len(rows) + len(payload) if body is None else body
    return wire.REQUEST.pack(op, 0, 0, count, 7, epoch, grant_id, length) + rows + payload


def extent(segment: int, offset: int, length: int) -> bytes:
    row = np.zeros(1, EXTENT)
    row["segment"], row["offset"], row["length"] = segment, offset, length
    return row.tobytes()


def outcome(sock: socket.socket) -> list[int] | CenoteError:
    """Statuses of a reply's items, or the error that refused the whole request."""
    _, _, code, count, _, _, length = wire.REPLY.unpack(exactly(sock, wire.REPLY_BYTES))
    body = exactly(sock, length)
    return wire.decode_error(code, body) if code else list(body[:count])


ROW = extent(1, 0, 64)
BAD_DATA: dict[str, tuple[bytes, type[CenoteError]]] = {
    "no such operation": (request(99, 1, ROW), ProtocolError),
    "no items": (request(wire.OP_READ, 0, ROW), ProtocolError),
    "a million items": (request(wire.OP_READ, 1 << 20, ROW, body=24 << 20), ProtocolError),
    "rows missing": (request(wire.OP_READ, 2, ROW), ProtocolError),
    "write without payload": (request(wire.OP_WRITE, 1, ROW), ProtocolError),
    "write with too much": (request(wire.OP_WRITE, 1, ROW, bytes(65)), ProtocolError),
    "write that wraps": (
        request(wire.OP_WRITE, 2, extent(1, 0, (1 << 64) - 64) + ROW, bytes(64)),
        ProtocolError,
    ),
    "seal of nothing": (request(wire.OP_SEAL, 1, ROW), ProtocolError),
    "oversized seal": (request(wire.OP_SEAL, 1, ROW, body=1 << 40), ProtocolError),
}


@pytest.mark.parametrize("port", DATA)
@pytest.mark.parametrize(("data", "kind"), BAD_DATA.values(), ids=list(BAD_DATA))
def test_bad_requests_on_the_data_ports(
    pool: Pool, port: str, data: bytes, kind: type[CenoteError]
) -> None:
    with pool.connect(port) as sock:
        greeted(sock)
        say(sock, data)
        error = outcome(sock)
    assert isinstance(error, kind), error


@pytest.mark.parametrize("port", DATA)
def test_extents_that_do_not_exist_fail_alone(pool: Pool, port: str) -> None:
    with pool.connect(port) as sock:
        segments = {s.segment_id: s.size_bytes for s in greeted(sock).segments}
        (segment, size), invalid = next(iter(segments.items())), InvalidArgument.code
        for offset, length, status in (
            (0, 64, 0),
            (size - 64, 64, 0),
            (size - 63, 64, invalid),
            (size, 1, invalid),
            (1 << 63, 1, invalid),
            ((1 << 64) - 1, 2, invalid),
            (0, 1 << 63, invalid),
            (0, 0, invalid),
        ):
            say(sock, request(wire.OP_READ, 1, extent(segment, offset, length)))
            assert outcome(sock) == [status], (offset, length)
        say(sock, request(wire.OP_READ, 1, extent(segment + 1000, 0, 64)))
        assert outcome(sock) == [StaleLocation.code]
        rows = (
            ROW.replace(ROW, extent(segment, 0, 64))
            + extent(segment, size, 1)
            + extent(77777, 0, 1)
        )
        say(sock, request(wire.OP_READ, 3, rows))
        assert outcome(sock) == [0, invalid, StaleLocation.code]


@pytest.mark.parametrize("port", DATA)
def test_a_write_where_there_is_nothing_is_refused(pool: Pool, port: str) -> None:
    with pool.connect(port) as sock:
        told = greeted(sock)
        (segment,) = told.segments
        where = extent(segment.segment_id, segment.size_bytes - 32, 64)
        epoch = told.epoch
        say(sock, request(wire.OP_WRITE, 1, where, bytes(64), epoch=epoch))
        assert outcome(sock) == [GrantRevoked.code], "the grant is of an earlier tenure"
        say(
            sock,
            request(wire.OP_WRITE, 1, where, bytes(64), epoch=epoch, grant_id=(epoch + 1) << 40),
        )
        assert outcome(sock) == [InvalidArgument.code]
        say(sock, request(wire.OP_PING, 1, bytes(24)))
        assert outcome(sock) == [0]


@pytest.mark.parametrize("port", DATA)
def test_a_reader_can_not_write(pool: Pool, port: str) -> None:
    with pool.connect(port) as sock:
        say(sock, data_hello(writer=False))
        code, length = wire.hello_reply_length(exactly(sock, wire.HELLO_REPLY.size))
        (segment,) = wire.decode_hello_reply(code, exactly(sock, length)).segments
        say(sock, request(wire.OP_WRITE, 1, extent(segment.segment_id, 0, 64), b"\xee" * 64))
        assert isinstance(outcome(sock), PermissionDenied | GrantRevoked)


@pytest.mark.parametrize("port", DATA)
def test_requests_cut_anywhere(pool: Pool, port: str) -> None:
    with pool.connect(port) as sock:
        (segment,) = greeted(sock).segments
    # Beyond what any object takes, so that the bytes that do arrive are nobody's.
    where = extent(segment.segment_id, segment.size_bytes - 4096, 4096)
    whole = data_hello() + request(wire.OP_WRITE, 1, where, bytes(4096))
    for length in [*range(0, 160, 7), 1000, len(whole) - 1]:
        with pool.connect(port) as sock:
            say(sock, whole[:length])


@pytest.mark.parametrize("port", DATA)
def test_mutated_requests_on_the_data_ports(pool: Pool, port: str, rng: random.Random) -> None:
    """Reads and seals with bytes changed at random; writes would be right to write."""
    good = [request(wire.OP_READ, 2, ROW + extent(1, 64, 64)), request(wire.OP_SEAL, 1, bytes(84))]
    for _ in range(300):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(1, len(data))  # not the operation
            data[at] = rng.randrange(256)
        with pool.connect(port) as sock:
            greeted(sock)
            say(sock, bytes(data))
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            received(sock, 1 << 16)
