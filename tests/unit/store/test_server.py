"""The data server against clients that do as they like."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from cenote.api.errors import (
    ERRORS_BY_CODE,
    CenoteError,
    DeadlineExceeded,
    GrantRevoked,
    InvalidArgument,
    PermissionDenied,
    ProtocolError,
    ProtocolVersionMismatch,
    ResourceUnavailable,
    StaleEpoch,
    StaleLocation,
)
from cenote.store.server import DataServer
from cenote.store.serving import ServingLimits
from cenote.store.sessions import SessionTable
from cenote.transport import wire
from cenote.transport.fake_segment import FakeSegment, FakeSegments
from cenote.transport.testing_support import GRACE_S, seal_rows
from promptness import ends_within
from raw_data_client import SESSION, SIZE_BYTES, Daemon, Raw, daemon, rows
from waiting import wait_until


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path) as it:
        yield it


def assert_alive(running: Daemon) -> None:
    with Raw(running) as client:
        client.hello(b"another session!")
        client.send(wire.OP_PING, 1, bytes(24))
        assert client.reply() == ([0], b"")


# ---- hello ----------------------------------------------------------------------------------


@pytest.mark.parametrize("unix", [False, True])
def test_it_introduces_itself(running: Daemon, unix: bool) -> None:
    running.segments.epoch = 4
    with Raw(running, unix=unix) as client:
        answer = client.hello()
    assert (answer.epoch, answer.node_id) == (4, 1)
    [segment] = answer.segments
    assert (segment.segment_id, segment.size_bytes) == (7, SIZE_BYTES)
    assert (segment.ready_bytes, segment.incarnation) == (SIZE_BYTES, running.segment.incarnation)


def test_requests_are_pipelined(running: Daemon) -> None:
    with Raw(running) as client:
        client.hello()
        client.send(wire.OP_WRITE, 1, rows((7, 0, 5)) + b"hello")
        client.send(wire.OP_READ, 1, rows((7, 1, 3)))
        client.send(wire.OP_READ, 2, rows((7, 0, 1), (7, 4, 1)))
        client.send(wire.OP_PING, 1, bytes(24))
        assert [client.reply() for _ in range(4)] == [
            ([0], b""),
            ([0], b"ell"),
            ([0, 0], b"ho"),
            ([0], b""),
        ]


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", ProtocolError),
        (bytes(1000), ProtocolError),
        (wire.HELLO.pack(wire.MAGIC, 7, 9, 0), ProtocolVersionMismatch),
        (wire.HELLO.pack(wire.MAGIC, 1, 1, 1 << 30), ProtocolError),
        (wire.HELLO.pack(wire.MAGIC, 1, 1, 4) + b"\xff\xff\xff\xff", ProtocolError),
        (wire.HELLO.pack(wire.MAGIC, 1, 1, 0), InvalidArgument),  # no session id
    ],
)
@pytest.mark.parametrize("unix", [False, True])
def test_what_is_no_hello(
    running: Daemon, sent: bytes, error: type[CenoteError], unix: bool
) -> None:
    with Raw(running, unix=unix) as client:
        client.sock.sendall(sent)
        with pytest.raises(error):
            client.hello_reply()
        assert client.is_closed()
    assert_alive(running)


def test_hellos_that_are_refused(running: Daemon) -> None:
    with Raw(running) as client, pytest.raises(InvalidArgument, match="session id"):
        client.hello(b"short")
    with Raw(running) as client, pytest.raises(InvalidArgument, match="Unix socket"):
        client.hello(want_descriptors=True)


def test_one_connection_too_many(tmp_path: Path) -> None:
    with daemon(tmp_path, connections_max=2) as running:
        with Raw(running) as first, Raw(running) as second:
            first.hello()
            second.hello()
            with Raw(running) as third, pytest.raises(ResourceUnavailable, match="2 data"):
                third.hello()
            counters = running.server.counters()
            assert (counters.connections, counters.accepted, counters.refused) == (2, 3, 1)
        wait_until(lambda: not running.server.counters().connections, what="the clients to go")
        assert_alive(running)


# ---- requests that are none -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "count", "body", "length"),
    [
        (wire.OP_READ, 0, bytes(24), None),
        (wire.OP_READ, 2, bytes(24), None),
        (wire.OP_READ, 1, bytes(48), None),
        (wire.OP_READ, wire.ITEMS_MAX + 1, bytes(24), 24 * (wire.ITEMS_MAX + 1)),
        (wire.OP_READ, 0xFFFF_FFFF, bytes(24), 24 * 0xFFFF_FFFF),
        (wire.OP_WRITE, 1, rows((7, 0, 10)), 24 + 11),
        (wire.OP_WRITE, 1, rows((7, 0, 10)), 24),
        (wire.OP_WRITE, 2, rows((7, 0, 10), (7, 0, 1 << 41)), 48 + 10 + (1 << 41)),
        (wire.OP_WRITE, 2, rows((7, 0, 10), (7, 0, (1 << 64) - 10)), 48),
        (wire.OP_SEAL, 1, bytes(24), 24),
        (wire.OP_SEAL, 1, bytes(24), wire.SEAL_BYTES_MAX + 1),
        (wire.OP_SEAL, 1, bytes(8 + 76 + 5), None),
        (wire.OP_PING, 1, bytes(24), 25),
        *[
            (op, 1, bytes(24), length)
            for op in (wire.OP_RDMA, wire.OP_GRANT, wire.OP_SLOTS, wire.OP_PROVE)
            for length in (0, 23)
        ],
        (0, 1, bytes(24), None),
        (99, 1, bytes(24), None),
    ],
)
def test_what_is_no_request(
    running: Daemon, op: int, count: int, body: bytes, length: int | None
) -> None:
    with Raw(running) as client:
        client.hello()
        client.send(op, count, body, length=length)
        with pytest.raises(ProtocolError):
            client.reply()
        assert client.is_closed()
    assert_alive(running)


@pytest.mark.parametrize("length", [0, 23])
@pytest.mark.parametrize("op", [wire.OP_READ, wire.OP_WRITE, wire.OP_STAGED, wire.OP_PING, 99])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_header_that_says_that_nothing_follows_is_not_waited_on(
    running: Daemon, op: int, length: int, in_pieces: bool
) -> None:
    header = wire.REQUEST.pack(op, 0, 0, 0, 5, 1, 9, length)
    with Raw(running) as client:
        client.hello()
        with ends_within(1.0 + GRACE_S):
            if in_pieces:
                client.sock.sendall(header[:10])
                client.sock.sendall(header[10:])
            else:
                client.sock.sendall(header)
            with pytest.raises(ProtocolError):
                client.reply()
            assert client.is_closed()
    assert_alive(running)


def test_random_bytes_in_every_place(running: Daemon, rng: random.Random) -> None:
    for turn in range(60):
        with Raw(running, unix=bool(turn % 2)) as client:
            if turn % 3:
                client.hello()
            with contextlib.suppress(ConnectionError):
                client.sock.sendall(rng.randbytes(rng.randint(1, 300)))
                client.sock.shutdown(socket.SHUT_WR)
                while client.sock.recv(4096):
                    pass
    assert_alive(running)
    wait_until(lambda: not running.server.counters().connections, what="all threads to end")


def test_truncated_requests(running: Daemon) -> None:
    running.segment.view[:64] = b"x" * 64
    whole = wire.REQUEST.pack(wire.OP_WRITE, 0, 0, 2, 5, 1, 9, 48 + 64)
    whole += rows((7, 0, 32), (7, 32, 32)) + b"y" * 64
    for length in (1, 31, 32, 55, 56, 79, 80, 81, 100, len(whole) - 1):
        with Raw(running) as client:
            client.hello()
            client.sock.sendall(whole[:length])
            client.sock.shutdown(socket.SHUT_WR)
            assert client.is_closed()
    assert_alive(running)


# ---- reads and writes -----------------------------------------------------------------------


def test_a_writer_has_to_say_so(running: Daemon) -> None:
    with Raw(running) as client:
        client.hello(writer=False)
        client.send(wire.OP_READ, 1, rows((7, 0, 4)))
        assert client.reply() == ([0], bytes(4))
        client.send(wire.OP_WRITE, 1, rows((7, 0, 4)) + b"data")
        with pytest.raises(PermissionDenied):
            client.reply()
    assert bytes(running.segment.view[:4]) == bytes(4)


def test_only_what_is_ready_can_be_touched(running: Daemon) -> None:
    running.segment.ready_bytes = 4096
    with Raw(running) as client:
        client.hello()
        client.send(wire.OP_READ, 2, rows((7, 4095, 1), (7, 4095, 2)))
        assert client.reply() == ([0, InvalidArgument.code], bytes(1))
        client.send(wire.OP_WRITE, 1, rows((7, 4096, 4)) + b"data")
        assert client.reply() == ([InvalidArgument.code], b"")
        running.segment.ready_bytes = 8192
        client.send(wire.OP_WRITE, 1, rows((7, 4096, 4)) + b"data")
        assert client.reply() == ([0], b"")
    assert bytes(running.segment.view[4096:4100]) == b"data"


def test_payload_without_a_place_is_taken_out_of_the_stream(running: Daemon) -> None:
    stale, invalid = StaleLocation.code, InvalidArgument.code
    pieces = [(9, 0, 3), (7, 0, 2), (7, SIZE_BYTES, 3 << 20), (7, 8, 2), (7, 10, 1), (7, 5, 0)]
    body = rows(*pieces) + b"???" + b"ab" + bytes(3 << 20) + b"cd" + b"e"
    with Raw(running) as client:
        client.hello()
        client.send(wire.OP_WRITE, len(pieces), body)
        client.send(wire.OP_READ, 1, rows((7, 0, 12)))
        assert client.reply() == ([stale, 0, invalid, 0, 0, invalid], b"")
        assert client.reply() == ([0], b"ab\0\0\0\0\0\0cde\0")
    assert running.server.counters().written_bytes == 5


def test_too_much_without_a_place_ends_the_connection(running: Daemon) -> None:
    with Raw(running) as client:
        client.hello()
        size = 2 << 30
        client.send(wire.OP_WRITE, 1, rows((9, 0, size)), length=24 + size)
        with pytest.raises(StaleLocation):
            client.reply()
        assert client.is_closed()
    assert_alive(running)


def test_changes_of_an_older_epoch(running: Daemon) -> None:
    running.segments.epoch = 3
    with Raw(running) as client:
        client.hello()
        client.send(wire.OP_WRITE, 1, rows((7, 0, 4)) + b"data", epoch=2)
        client.send(wire.OP_WRITE, 2, rows((7, 0, 2), (7, 2, 2)) + b"data", epoch=2)
        seals = seal_rows([7], 1)
        body = wire.SEAL_PREFIX.pack(1, 1) + seals.rows + seals.keys
        client.send(wire.OP_SEAL, 1, body, epoch=2)
        for _ in range(3):
            with pytest.raises(StaleEpoch, match="epoch 3"):
                client.reply()
        assert bytes(running.segment.view[:4]) == bytes(4)
        assert running.segment.seals == {}
        # A newer one than the daemon's is no reason to refuse.
        client.send(wire.OP_WRITE, 1, rows((7, 0, 4)) + b"data", epoch=4)
        client.send(wire.OP_SEAL, 1, body, epoch=3)
        assert client.reply() == ([0], b"")
        assert client.reply() == ([0], b"")
    assert list(running.segment.seals) == [0]
    wait_until(lambda: running.server.counters().seals == 1, what="the seal to be counted")


def test_writes_under_void_grants_change_nothing(running: Daemon) -> None:
    running.segments.first_grant_id = 10
    with Raw(running) as client:
        client.hello()
        client.send(wire.OP_WRITE, 1, rows((7, 0, 4)) + b"data")  # under grant 9
        client.send(wire.OP_WRITE, 2, rows((7, 0, 2), (7, 2, 2)) + b"data")
        assert client.reply() == ([GrantRevoked.code], b"")
        assert client.reply() == ([GrantRevoked.code] * 2, b"")
        assert bytes(running.segment.view[:4]) == bytes(4)
        running.segments.first_grant_id = 9
        client.send(wire.OP_WRITE, 1, rows((7, 0, 4)) + b"data")
        assert client.reply() == ([0], b"")
    assert bytes(running.segment.view[:4]) == b"data"


def test_a_large_payload_of_an_older_epoch_is_not_waited_for(running: Daemon) -> None:
    running.segments.epoch = 3
    with Raw(running) as client:
        client.hello()
        size = SIZE_BYTES
        client.send(wire.OP_WRITE, 1, rows((7, 0, size)), length=24 + size, epoch=2)
        with pytest.raises(StaleEpoch):
            client.reply()


def test_seals_name_their_keys(running: Daemon) -> None:
    seals = seal_rows([7, 8, 7], 1)
    with Raw(running) as client:
        client.hello(writer=False)
        body = wire.SEAL_PREFIX.pack(1, 1) + seals.rows + seals.keys
        client.send(wire.OP_SEAL, 3, body)
        assert client.reply() == ([0, StaleLocation.code, 0], b"")
    assert {slot: key for slot, (_, key) in running.segment.seals.items()} == {0: b"k", 2: b"kkk"}


def test_counters(running: Daemon) -> None:
    with Raw(running) as client:
        client.hello()
        client.send(wire.OP_WRITE, 1, rows((7, 0, 100)) + bytes(100))
        client.send(wire.OP_WRITE, 2, rows((7, 0, 100), (7, 500, 50)) + bytes(150))
        client.send(wire.OP_READ, 1, rows((7, 0, 30)))
        client.send(wire.OP_READ, 2, rows((7, 0, 3), (7, 500, 4)))
        for _ in range(4):
            client.reply()
        client.send(wire.OP_PING, 1, bytes(24))
        client.reply()
        counters = running.server.counters()
        assert (counters.read_bytes, counters.written_bytes) == (37, 250)
        assert counters.connections == 1
    wait_until(lambda: not running.server.counters().connections, what="the client to be gone")
    counters = running.server.counters()
    assert (counters.read_bytes, counters.written_bytes, counters.accepted) == (37, 250, 1)


# ---- slow clients ---------------------------------------------------------------------------

QUICK = ServingLimits(hello_timeout_s=0.2, stall_timeout_s=0.2)


def test_a_client_that_stops_in_the_middle_is_told_and_closed(tmp_path: Path) -> None:
    with daemon(tmp_path, QUICK) as running:
        whole = wire.REQUEST.pack(wire.OP_WRITE, 0, 0, 2, 5, 1, 9, 48 + 64)
        whole += rows((7, 0, 32), (7, 32, 32)) + b"y" * 64
        for length in (10, 60, 100):
            with Raw(running) as client:
                client.hello()
                with ends_within(1.0 + GRACE_S):
                    client.sock.sendall(whole[:length])
                    with pytest.raises(DeadlineExceeded):
                        client.reply()
                    assert client.is_closed()


def test_a_client_that_trickles_is_closed(tmp_path: Path) -> None:
    with daemon(tmp_path, QUICK) as running, Raw(running) as client:
        client.hello()
        begun = monotonic()
        client.send(wire.OP_WRITE, 1, rows((7, 0, 1000)), length=1024)
        stopped = threading.Event()
        with contextlib.suppress(ConnectionError):
            while monotonic() - begun < 10:
                client.sock.sendall(b"x")
                stopped.wait(0.02)
        assert monotonic() - begun < 5


def test_a_client_that_does_not_greet_or_does_not_read(tmp_path: Path) -> None:
    with daemon(tmp_path, QUICK) as running:
        with Raw(running) as client:
            with pytest.raises(DeadlineExceeded):
                client.hello_reply()
            assert client.is_closed()
        with Raw(running) as client:
            client.hello()
            for _ in range(4):
                client.send(wire.OP_READ, 1, rows((7, 0, SIZE_BYTES)))
            wait_until(lambda: not running.server.counters().connections, what="it to be given up")


def test_an_idle_client_may_stay(tmp_path: Path) -> None:
    limits = ServingLimits(stall_timeout_s=0.02)
    with daemon(tmp_path, limits) as running, Raw(running) as client:
        client.hello()
        begun = monotonic()
        wait_until(lambda: monotonic() - begun > 0.1, what="several timeouts to pass")
        client.send(wire.OP_PING, 1, bytes(24))
        assert client.reply() == ([0], b"")


# ---- life -----------------------------------------------------------------------------------


def test_close_from_any_state(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack, daemon(tmp_path) as running:
        clients = [stack.enter_context(Raw(running)) for _ in range(6)]
        for client in clients[1:]:
            client.hello()
        clients[2].send(wire.OP_READ, 1, rows((7, 0, SIZE_BYTES)))  # nobody reads the answer
        clients[3].send(wire.OP_WRITE, 1, rows((7, 0, 1000)) + bytes(500), length=1024)
        clients[4].sock.sendall(b"\x01" * 20)
        clients[5].send(wire.OP_READ, 99, bytes(24))  # refused, and lingering
        wait_until(lambda: running.server.counters().connections == 6, what="six connections")
        with ends_within(1.0):
            running.server.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("cenote-data")]
        assert not os.path.exists(running.unix_path)
        running.server.close()


def test_close_without_start(tmp_path: Path) -> None:
    segments = FakeSegments([])
    server = DataServer(segments, SessionTable(segments), tcp=("127.0.0.1", 0))
    server.close()
    with pytest.raises(ConnectionError):
        socket.create_connection(server.tcp_address or ("", 0))
    with pytest.raises(InvalidArgument):
        DataServer(segments, SessionTable(segments))


def test_addresses_that_are_taken(running: Daemon, tmp_path: Path) -> None:
    with pytest.raises(ResourceUnavailable, match="another port"):
        DataServer(running.segments, running.sessions, tcp=("127.0.0.1", running.port))
    with pytest.raises(ResourceUnavailable):
        DataServer(running.segments, running.sessions, unix_path=running.unix_path)
    with pytest.raises(ResourceUnavailable):
        DataServer(running.segments, running.sessions, unix_path=str(tmp_path / ("x" * 200)))
    assert_alive(running)


def test_the_socket_of_a_killed_daemon_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "data.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with daemon(tmp_path) as running:
        assert_alive(running)
        assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("mine")
    with pytest.raises(ResourceUnavailable), daemon(tmp_path):
        pass
    assert path.read_text() == "mine"


def test_a_cut_session_learns_why(running: Daemon) -> None:
    with Raw(running) as client:
        client.hello()
        running.sessions.cut([SESSION])
        with pytest.raises(GrantRevoked):
            client.reply()
        assert client.is_closed()
    with Raw(running) as client, pytest.raises(GrantRevoked):
        client.hello()
    assert_alive(running)


def test_a_bug_costs_one_connection(running: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(FakeSegment, "seal", broken)
    seals = seal_rows([7], 1)
    with Raw(running) as client:
        client.hello()
        client.send(wire.OP_SEAL, 1, wire.SEAL_PREFIX.pack(1, 1) + seals.rows + seals.keys)
        with pytest.raises(ERRORS_BY_CODE[2], match="oops"):
            client.reply()
    assert_alive(running)
