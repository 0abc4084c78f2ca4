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
    ERROR,
    HEADER,
    HELLO,
    HELLO_REPLY,
    REPLY,
    REQUEST,
    Frame,
    decode_error,
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
)
from waiting import wait_until


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[LaneThread]:
    with LaneThread(tmp_path, tcp=True) as started:
        yield started


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
        assert leader.leader == "tcp://other:1"
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


# --- bounds -------------------------------------------------------------------------------------


def test_garbage_after_hello_is_answered_and_closed(lane: LaneThread) -> None:
    with RawClient(lane.address) as client:
        client.send(request(2, ECHO, b"ok") + os.urandom(10) + b"\xff" * 100_000)
        assert client.next() == (REPLY, 2, ECHO, 0, b"ok")
        assert isinstance(error_in(client.next()), ProtocolError)
        assert client.next() is None
    still_serves(lane)
    assert lane.server.stats.protocol_errors == 1


def test_random_garbage_never_ends_the_server(lane: LaneThread, rng: random.Random) -> None:
    for _ in range(100):
        with RawClient(lane.address, greet=rng.random() < 0.5) as client:
            raw = bytearray(request(2, ECHO, rng.randbytes(rng.randrange(200))) * 3)
            for _ in range(rng.randrange(1, 20)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            client.send(bytes(raw[: rng.randrange(1, len(raw))]))
    still_serves(lane)
    wait_until(lambda: not lane.server.connections, what="all connections gone")
    assert lane.server.partial_bytes == 0


def test_an_oversized_request_is_named_and_closed(tmp_path: Path) -> None:
    with (
        LaneThread(tmp_path, LaneLimits(body_bytes_max=1000)) as lane,
        RawClient(lane.address) as client,
    ):
        client.send(request(2, ECHO, b"x" * 1000))
        assert client.next() == (REPLY, 2, ECHO, 0, b"x" * 1000)
        client.send(request(3, ECHO, b"x" * 1001))
        frame = client.next()
        assert frame is not None
        assert frame[1] == 3
        assert "REQUEST frame of 1001 bytes exceeds the limit of 1000" in str(error_in(frame))
        assert client.next() is None


def test_a_truncated_frame_loses_nothing_but_itself(lane: LaneThread) -> None:
    with RawClient(lane.address) as client:
        client.send(request(2, COUNT) + request(3, COUNT, b"x" * 50)[:-1])
        assert client.next() == (REPLY, 2, COUNT, 0, b"1")
    wait_until(lambda: not lane.server.connections, what="the connection's end")
    assert lane.count == 1
    assert lane.server.partial_bytes == 0


def test_a_frame_that_never_ends_is_given_up(tmp_path: Path) -> None:
    with (
        LaneThread(tmp_path, LaneLimits(frame_timeout_s=0.05)) as lane,
        RawClient(lane.address) as client,
    ):
        client.send(request(2, ECHO, b"x" * 100)[:-1])
        assert "did not arrive whole within 0.05 s" in str(error_in(client.next()))
        assert client.next() is None


def test_unfinished_frames_of_all_clients_are_bounded(tmp_path: Path) -> None:
    with LaneThread(tmp_path, LaneLimits(partial_bytes_max=100_000)) as lane:
        clients = [RawClient(lane.address) for _ in range(2)]
        for client in clients:
            client.send(request(2, ECHO, b"x" * 70_000)[:-1])
            wait_until(lambda: lane.server.partial_bytes >= 69_999, what="the bytes")
        assert isinstance(error_in(clients[1].next()), ResourceUnavailable)
        clients[0].send(b"x")
        assert clients[0].next() == (REPLY, 2, ECHO, 0, b"x" * 70_000)
        for client in clients:
            client.sock.close()


def test_connections_are_bounded(tmp_path: Path) -> None:
    with LaneThread(tmp_path, LaneLimits(connections_max=2)) as lane:
        first, second = RawClient(lane.address), RawClient(lane.address)
        with RawClient(lane.address, greet=False) as third:
            assert "all 2 connections" in str(error_in(third.next()))
            assert third.next() is None
        first.sock.close()
        wait_until(lambda: len(lane.server.connections) == 1, what="a free place")
        still_serves(lane)
        second.sock.close()
    kinds = [kind for kind, _ in lane.events]
    assert kinds.count("connect") == kinds.count("disconnect") == 3


def test_requests_beyond_inflight_max_wait(tmp_path: Path) -> None:
    with (
        LaneThread(tmp_path, LaneLimits(inflight_max=2)) as lane,
        RawClient(lane.address) as client,
    ):
        client.send(b"".join(request(n, LATER, b"%d" % n) for n in (2, 3, 4)))
        wait_until(lambda: len(lane.futures) == 2, what="the first two")
        client.send(request(5, ECHO, b"held back"))
        lane.finish(b"3", b"three")
        assert client.next() == (REPLY, 3, LATER, 0, b"three")
        wait_until(lambda: b"4" in lane.futures, what="the third")
        lane.finish(b"4", b"four")
        lane.finish(b"2", b"two")
        assert {client.next() for _ in range(3)} == {
            (REPLY, 4, LATER, 0, b"four"),
            (REPLY, 2, LATER, 0, b"two"),
            (REPLY, 5, ECHO, 0, b"held back"),
        }


def test_a_client_that_does_not_read_is_paused_then_cut(tmp_path: Path) -> None:
    limits = LaneLimits(write_buffer_high_bytes=100_000, slow_reader_timeout_s=0.3)
    with LaneThread(tmp_path, limits) as lane, RawClient(lane.address) as slow:
        slow.sock.setblocking(False)
        sent = others = 0
        ask = request(2, MANY_BYTES, b"50000")
        while lane.server.stats.cut == 0:
            still_serves(lane)
            others += 1
            try:
                sent += slow.sock.send(ask * 100) // len(ask)
            except BlockingIOError:
                pass  # paused, as it should be
            except (BrokenPipeError, ConnectionResetError):
                break
        wait_until(lambda: lane.server.stats.cut == 1, what="the cut")
        # Its requests were not executed beyond what buffers hold.
        served = lane.server.stats.requests - others
        assert served < 200
        assert sent > served
        still_serves(lane)


def test_a_slow_reader_that_reads_again_gets_everything(tmp_path: Path) -> None:
    limits = LaneLimits(write_buffer_high_bytes=100_000, slow_reader_timeout_s=10)
    with LaneThread(tmp_path, limits) as lane, RawClient(lane.address) as slow:
        slow.send(b"".join(request(n, MANY_BYTES, b"50000") for n in range(2, 202)))
        wait_until(lambda: any(c._write_paused for c in lane.server.connections), what="the pause")
        for n in range(2, 202):
            assert slow.next() == (REPLY, n, MANY_BYTES, 0, b"z" * 50_000)


def test_a_flooding_connection_leaves_turns_to_others(tmp_path: Path) -> None:
    """The heartbeat is sent at the flood's first request, when all of the flood is read."""
    limits = LaneLimits(frames_per_tick_max=10, tick_ms_max=1000)
    with (
        LaneThread(tmp_path, limits) as lane,
        RawClient(lane.address) as flood,
        RawClient(lane.address) as heart,
    ):
        order: list[bytes] = []

        def on_call(_: LaneConnection, body: bytes) -> bytes:
            if not order:
                heart.send(request(2, CALL, b"heartbeat"))
            order.append(body)
            return b""

        lane.on_call = on_call
        flood.send(b"".join(request(n, CALL, b"flood") for n in range(2, 1002)))
        assert heart.next() == (REPLY, 2, CALL, 0, b"")
        for _ in range(1000):
            assert flood.next() is not None
    assert len(order) == 1001
    assert order.index(b"heartbeat") <= 40


def test_a_request_that_waited_past_its_deadline_is_not_executed(tmp_path: Path) -> None:
    limits = LaneLimits(inflight_max=1)
    with LaneThread(tmp_path, limits) as lane, RawClient(lane.address) as client:
        client.send(request(2, LATER, b"a") + request(3, COUNT, deadline_ms=1))
        wait_until(lambda: b"a" in lane.futures, what="the first request")
        (connection,) = lane.server.connections
        lane.loop.call_soon_threadsafe(
            setattr, connection, "_fed_at_s", connection._fed_at_s - 0.01
        )
        lane.finish(b"a", b"")
        assert client.next() == (REPLY, 2, LATER, 0, b"")
        error = error_in(client.next())
        assert isinstance(error, DeadlineExceeded)
        assert "was not executed" in str(error)
        assert lane.count == 0


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
