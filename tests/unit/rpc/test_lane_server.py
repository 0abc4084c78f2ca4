"""The lane's server against clients of all kinds, seen from the wire."""

from __future__ import annotations

import logging
import os
import random
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cenote.api.errors import (
    AlreadyExists,
    CenoteError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    NotLeader,
    ProtocolError,
    ProtocolVersionMismatch,
    ResourceUnavailable,
    Unauthenticated,
    Unavailable,
)
from cenote.rpc.frames import (
    HEADER,
    HELLO,
    HELLO_REPLY,
    REPLY,
    pack_frame,
    pack_hello,
    parse_hello_reply,
)
from cenote.rpc.lane_connection import LaneConnection
from cenote.rpc.lane_server import LaneLimits, LaneServer
from unit.rpc.lane_testing import (
    BUG,
    CALL,
    COUNT,
    DEADLINE,
    ECHO,
    LATER,
    MANY_BYTES,
    NEVER,
    PARTS,
    RAISE,
    WRONG,
    LaneThread,
    RawClient,
    error_in,
    request,
    still_serves,
)
from waiting import wait_until


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[LaneThread]:
    with LaneThread(tmp_path, tcp=True) as started:
        yield started


# --- replies ------------------------------------------------------------------------------------


def test_replies_over_tcp_and_unix(lane: LaneThread) -> None:
    for address in (lane.address, lane.tcp_address):
        with RawClient(address) as client:
            for size in (0, 1, 64, 8192, 70_000, 3_000_000):
                body = random.Random(size).randbytes(size)
                client.send(request(size + 2, ECHO, body))
                assert client.next() == (REPLY, size + 2, ECHO, 0, body)


def test_tcp_sends_without_delay_and_finds_dead_peers(lane: LaneThread) -> None:
    with RawClient(lane.tcp_address):
        (connection,) = lane.server.connections
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.peer.startswith("127.0.0.1:")


def test_the_handler_knows_its_peer_and_session(lane: LaneThread) -> None:
    lane.on_call = lambda connection, _: repr((connection.peer, connection.session)).encode()
    with RawClient(lane.address) as client:
        client.send(request(2, CALL))
        frame = client.next()
        assert frame is not None
        assert f"pid={os.getpid()}," in frame[4].decode()
        assert "b'raw'" in frame[4].decode()


def test_a_list_is_one_body_and_0_means_the_default_deadline(lane: LaneThread) -> None:
    with RawClient(lane.address) as client:
        client.send(request(2, PARTS, b"abc") + request(3, DEADLINE, deadline_ms=0))
        assert client.next() == (REPLY, 2, PARTS, 0, b"abccba")
        assert client.next() == (REPLY, 3, DEADLINE, 0, b"5000")


def test_errors_are_typed_and_bugs_are_logged(
    lane: LaneThread, caplog: pytest.LogCaptureFixture
) -> None:
    with RawClient(lane.address) as client, caplog.at_level(logging.ERROR):
        client.send(request(2, RAISE, b"same") + request(3, RAISE, b"leader") + request(4, BUG))
        exists = error_in(client.next())
        assert isinstance(exists, AlreadyExists)
        assert (exists.message, exists.remedy, exists.same_bytes) == ("taken", "look", True)
        leader = error_in(client.next())
        assert isinstance(leader, NotLeader)
        assert leader.addresses == ("tcp://other:1",)
        bug = error_in(client.next())
        assert isinstance(bug, InternalError)
        assert "ValueError: a bug, on purpose" in str(bug)
        client.send(request(5, WRONG) + request(6, ECHO, b"still here"))
        assert isinstance(error_in(client.next()), InternalError)
        assert client.next() == (REPLY, 6, ECHO, 0, b"still here")
    assert "a bug, on purpose" in caplog.text


def test_a_reply_over_the_limit_is_an_error_of_that_call(tmp_path: Path) -> None:
    with (
        LaneThread(tmp_path, LaneLimits(body_bytes_max=1000)) as lane,
        RawClient(lane.address) as client,
    ):
        client.send(request(2, MANY_BYTES, b"1001") + request(3, MANY_BYTES, b"1000"))
        error = error_in(client.next())
        assert isinstance(error, InvalidArgument)
        assert "1001 bytes" in str(error)
        assert client.next() == (REPLY, 3, MANY_BYTES, 0, b"z" * 1000)


def test_awaited_replies_overtake_nobody_and_hold_up_nobody(lane: LaneThread) -> None:
    with RawClient(lane.address) as client:
        client.send(request(2, LATER, b"a") + request(3, LATER, b"b") + request(4, ECHO, b"now"))
        assert client.next() == (REPLY, 4, ECHO, 0, b"now")
        lane.finish(b"b", b"second first")
        assert client.next() == (REPLY, 3, LATER, 0, b"second first")
        lane.finish(b"a", AlreadyExists("late"))
        assert isinstance(error_in(client.next()), AlreadyExists)


def test_an_awaited_reply_ends_by_its_deadline(lane: LaneThread) -> None:
    with RawClient(lane.address) as client:
        client.send(request(2, NEVER, b"x", 30) + request(3, LATER, b"y", 30))
        frames = [client.next(), client.next()]
        assert all(isinstance(error_in(frame), DeadlineExceeded) for frame in frames)
        wait_until(lambda: lane.cancelled == [b"x"], what="the coroutine's end")
        assert not lane.futures[b"y"].cancelled(), "a handler's future is not ours to cancel"
        lane.finish(b"y", b"too late")
        client.send(request(4, ECHO))
        assert client.next() == (REPLY, 4, ECHO, 0, b"")


def test_a_gone_client_ends_its_coroutines(lane: LaneThread) -> None:
    with RawClient(lane.address) as client:
        client.send(request(2, NEVER, b"x"))
        wait_until(lambda: b"x" in lane.futures, what="the request")
    wait_until(lambda: lane.cancelled == [b"x"], what="the coroutine's end")
    wait_until(lambda: not lane.server.tasks, what="no task left")


def test_before_flush_runs_once_per_batch_and_before_its_replies(lane: LaneThread) -> None:
    seen: list[int] = []
    lane.before_flush = lambda: seen.append(lane.count)
    with RawClient(lane.address) as client:
        wait_until(lambda: seen == [0], what="hello's flush")
        client.send(b"".join(request(n, COUNT) for n in range(2, 12)))
        assert [client.next() for _ in range(10)][-1] == (REPLY, 11, COUNT, 0, b"10")
        assert seen == [0, 10]


def test_a_failed_flush_hook_sends_no_reply(
    lane: LaneThread, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        if lane.count:
            raise OSError("the journal's disk is full")

    lane.before_flush = fail
    with RawClient(lane.address) as client:
        client.send(request(2, COUNT))
        with pytest.raises(ConnectionResetError):
            raise ConnectionResetError if client.next() is None else AssertionError
    lane.before_flush = lambda: None
    still_serves(lane)
    assert "the journal's disk is full" in caplog.text


# --- hello --------------------------------------------------------------------------------------


def test_hello_gives_the_version_and_the_handlers_reply(lane: LaneThread) -> None:
    with RawClient(lane.address, greet=False) as client:
        client.send(pack_frame(HELLO, 9, body=pack_hello(b"me", 1, 7)))
        frame = client.next()
        assert frame is not None
        assert frame[:2] == (HELLO_REPLY, 9)
        assert parse_hello_reply(frame[4]) == (1, b"welcome me")
    assert lane.hellos == [b"me"]


@pytest.mark.parametrize(
    ("raw", "kind", "what"),
    [
        (pack_frame(HELLO, 1, body=pack_hello(b"", 90, 99)), ProtocolVersionMismatch, "90 to 99"),
        (pack_frame(HELLO, 1, body=b"etcd\0\0\0\1\1\0\1\0"), ProtocolError, "etcd"),
        (pack_frame(HELLO, 1, body=b"short"), ProtocolError, "5 bytes"),
        (pack_frame(HELLO, 1, body=pack_hello(b"stranger")), Unauthenticated, "who are you"),
        (request(1, ECHO), ProtocolError, "the first frame must be HELLO"),
        (pack_frame(REPLY, 1), ProtocolError, "the first frame must be HELLO"),
        (b"GET / HTTP/1.1\r\n\r\n", ProtocolError, "GET / HTTP"),
        (HEADER.pack(17 << 20, 1, 0, HELLO, 0, 0), ProtocolError, "exceeds the limit"),
        (os.urandom(10) + b"\xff" * 5000, ProtocolError, "not a cenote frame: kind 255"),
    ],
)
def test_a_wrong_beginning_is_answered_and_closed(
    lane: LaneThread, raw: bytes, kind: type[CenoteError], what: str
) -> None:
    for address in (lane.address, lane.tcp_address):
        with RawClient(address, greet=False) as client:
            client.send(raw)
            error = error_in(client.next())
            assert type(error) is kind
            assert what in str(error)
            assert client.next() is None
    still_serves(lane)


def test_a_bug_in_the_hello_handler_refuses_that_client_only(lane: LaneThread) -> None:
    lane.hello_error = KeyError("bug")
    with RawClient(lane.address, greet=False) as client:
        client.send(pack_frame(HELLO, 1, body=pack_hello(b"")))
        assert isinstance(error_in(client.next()), InternalError)
    lane.hello_error = None
    still_serves(lane)


def test_an_awaited_hello_holds_back_what_follows(lane: LaneThread) -> None:
    async def waiting() -> None:
        lane.hello_waits = lane.loop.create_future()

    lane.run(waiting)
    with RawClient(lane.address, greet=False) as client:
        client.send(pack_frame(HELLO, 1, body=pack_hello(b"slow")) + request(2, COUNT))
        wait_until(lambda: lane.hellos == [b"slow"], what="the hello")
        assert lane.count == 0
        assert lane.hello_waits is not None
        lane.loop.call_soon_threadsafe(lane.hello_waits.set_result, b"at last")
        frame = client.next()
        assert frame is not None
        assert parse_hello_reply(frame[4]).payload == b"at last"
        assert client.next() == (REPLY, 2, COUNT, 0, b"1")


def test_a_second_hello_is_refused(lane: LaneThread) -> None:
    with RawClient(lane.address) as client:
        client.send(request(2, ECHO) + pack_frame(HELLO, 3, body=pack_hello(b"")))
        assert client.next() == (REPLY, 2, ECHO, 0, b"")
        assert "HELLO frame: not due here" in str(error_in(client.next()))
        assert client.next() is None


def test_a_silent_client_is_told_and_closed(tmp_path: Path) -> None:
    with (
        LaneThread(tmp_path, LaneLimits(hello_timeout_s=0.05)) as lane,
        RawClient(lane.address, greet=False) as client,
    ):
        client.send(b"\x05\x00")
        assert "no complete HELLO within 0.05 s" in str(error_in(client.next()))
        assert client.next() is None


# --- listening and the end ----------------------------------------------------------------------


def test_the_socket_file_is_private_and_goes_with_the_server(tmp_path: Path) -> None:
    with LaneThread(tmp_path) as lane:
        assert stat.S_IMODE(os.stat(lane.path).st_mode) == 0o600
    assert not os.path.exists(lane.path)


def test_a_dead_owners_socket_file_is_replaced(tmp_path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "lane.sock"))
    dead.close()
    with LaneThread(tmp_path) as lane:
        still_serves(lane)


def test_what_is_in_use_is_refused(lane: LaneThread, tmp_path: Path) -> None:
    def listen(path: str) -> None:
        lane.run(lambda: lane.server.listen_unix(path))

    with pytest.raises(ResourceUnavailable, match="another process serves it"):
        listen(lane.path)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ResourceUnavailable, match="no socket"):
        listen(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(ResourceUnavailable, match="more than 107 bytes"):
        listen(str(tmp_path / ("x" * 120)))
    with pytest.raises(ResourceUnavailable, match="No such file"):
        listen(str(tmp_path / "missing" / "lane.sock"))
    port = int(lane.tcp_address.rsplit(":", 1)[1])
    with pytest.raises(ResourceUnavailable, match=f"127.0.0.1:{port}"):
        lane.run(lambda: lane.server.listen_tcp("127.0.0.1", port))
    still_serves(lane)


def test_close_lets_what_is_in_flight_finish(lane: LaneThread) -> None:
    with RawClient(lane.address) as client:
        client.send(request(2, LATER, b"a"))
        wait_until(lambda: b"a" in lane.futures, what="the request")

        async def close() -> None:
            lane.loop.call_later(0.02, lambda: lane.futures[b"a"].set_result(b"done"))
            await lane.server.close(5)

        lane.run(close)
        assert client.next() == (REPLY, 2, LATER, 0, b"done")
        assert client.next() is None
    assert not lane.server.connections


def test_close_ends_by_its_deadline(lane: LaneThread) -> None:
    with RawClient(lane.address) as client, RawClient(lane.address):
        client.send(request(2, NEVER, b"x"))
        wait_until(lambda: b"x" in lane.futures, what="the request")

        async def close() -> float:
            start_s = lane.loop.time()
            await lane.server.close(0.1)
            return lane.loop.time() - start_s

        assert lane.run(close) < 0.5
        assert lane.cancelled == [b"x"]
        assert not lane.server.tasks


def test_a_handler_may_close_and_still_reply(lane: LaneThread) -> None:
    def last_one(connection: LaneConnection, body: bytes) -> bytes:
        connection.close(Unavailable("moving house"))
        return body

    lane.on_call = last_one
    with RawClient(lane.address) as client:
        client.send(request(2, CALL, b"bye") + request(3, COUNT))
        assert client.next() == (REPLY, 2, CALL, 0, b"bye")
        assert "moving house" in str(error_in(client.next()))
        assert client.next() is None
    assert lane.count == 0


def test_a_server_needs_a_loop_only_to_listen() -> None:
    server = LaneServer(lambda *_: b"", lambda *_: b"")
    assert server.stats.connections == 0
