"""What a lane server refuses, bounds and survives, seen from the wire."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cenote.api.errors import (
    DeadlineExceeded,
    ProtocolError,
    ResourceUnavailable,
)
from cenote.rpc.frames import (
    REPLY,
)
from cenote.rpc.lane_connection import LaneConnection
from cenote.rpc.lane_server import LaneLimits
from unit.rpc.lane_testing import (
    CALL,
    COUNT,
    ECHO,
    LATER,
    MANY_BYTES,
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
