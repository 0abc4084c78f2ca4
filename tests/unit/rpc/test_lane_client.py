"""The lane's blocking client against a real server: calls, one by one and pipelined."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cenote.api.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    NotLeader,
    ResourceUnavailable,
    Unauthenticated,
    Unavailable,
)
from cenote.rpc.frames import HEADER
from cenote.rpc.lane_client import LaneClient
from cenote.rpc.lane_server import LaneLimits
from promptness import ends_within
from unit.rpc.lane_testing import (
    DEADLINE,
    ECHO,
    LATER,
    MANY_BYTES,
    PARTS,
    RAISE,
    LaneThread,
    ScriptedServer,
)
from waiting import wait_until


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[LaneThread]:
    with LaneThread(tmp_path, tcp=True) as started:
        yield started


@pytest.fixture
def client(lane: LaneThread) -> Iterator[LaneClient]:
    with LaneClient(lane.address, b"test") as made:
        yield made


@pytest.mark.parametrize("spin_polls", [0, 60])
def test_calls_over_tcp_and_unix(lane: LaneThread, spin_polls: int) -> None:
    for address in (lane.address, lane.tcp_address, lane.tcp_address.removeprefix("tcp://")):
        with LaneClient(address, b"me", spin_polls=spin_polls) as client:
            for size in (0, 1, 64, 8192, 65_519, 65_520, 65_536, 70_000, 3_000_000, 16 << 20):
                body = random.Random(size).randbytes(size)
                assert client.call(ECHO, body, 5) == body
            assert client.call(PARTS, b"abc", 5) == b"abccba"
            assert client.connections == 1
    assert lane.hellos == [b"me"] * 3


def test_the_servers_errors_come_typed_and_keep_the_connection(client: LaneClient) -> None:
    with pytest.raises(AlreadyExists) as exists:
        client.call(RAISE, b"same", 5)
    assert exists.value.same_bytes is True
    assert exists.value.remedy == "look"
    with pytest.raises(NotLeader) as leader:
        client.call(RAISE, b"leader", 5)
    assert leader.value.addresses == ("tcp://other:1",)
    assert client.call(ECHO, b"x", 5) == b"x"
    assert client.connections == 1


def test_the_server_is_told_the_deadline(client: LaneClient) -> None:
    client.call(ECHO, b"", 5)
    assert client.call(DEADLINE, b"", 2.5) == b"2500"
    assert client.call(DEADLINE, b"", 0.0004) == b"1"
    assert client.call(DEADLINE, b"", 1e12) == b"4294967295"


def test_requests_that_can_not_be_right_do_not_leave(client: LaneClient) -> None:
    with pytest.raises(InvalidArgument, match="exceeds the limit"):
        client.call(ECHO, bytes((16 << 20) + 1), 5)
    for deadline_s in (0, -1, float("nan")):
        with pytest.raises(DeadlineExceeded) as late:
            client.call(ECHO, b"", deadline_s)
        assert not late.value.maybe_executed
    assert client.connections == 0


def test_hello_may_change_and_its_reply_is_handed_on(lane: LaneThread) -> None:
    replies: list[bytes] = []
    count = iter(range(10))
    with LaneClient(
        lane.address, lambda: b"%d" % next(count), on_hello=replies.append, connections_max=2
    ) as client:
        client.call(ECHO, b"", 5)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(client.call, LATER, b"a", 5)
            wait_until(lambda: b"a" in lane.futures, what="the other call")
            client.call(ECHO, b"", 5)
            lane.finish(b"a", b"")
            other.result()
    assert replies == [b"welcome 0", b"welcome 1"]


def test_a_refused_hello_is_raised_at_once(lane: LaneThread) -> None:
    with LaneClient(lane.address, b"stranger") as client:
        with pytest.raises(Unauthenticated):
            client.call(ECHO, b"", 5)
        assert client.connections == 0
    lane.hello_error = NotLeader("no", addresses=["tcp://b:2"])
    with LaneClient(lane.address, b"x") as client, pytest.raises(NotLeader):
        client.call(ECHO, b"", 5)


def test_a_full_server_says_so(tmp_path: Path) -> None:
    with (
        LaneThread(tmp_path, LaneLimits(connections_max=1)) as lane,
        LaneClient(lane.address, b"1") as first,
        LaneClient(lane.address, b"2") as second,
    ):
        first.call(ECHO, b"", 5)
        with pytest.raises(ResourceUnavailable, match="all 1 connections"):
            second.call(ECHO, b"", 5)


def test_a_callback_that_raises_leaves_no_socket(lane: LaneThread) -> None:
    def on_hello(_: bytes) -> None:
        raise KeyError("mine")

    with LaneClient(lane.address, b"", on_hello=on_hello) as client:
        with pytest.raises(KeyError):
            client.call(ECHO, b"", 5)
        assert client.connections == 0
    wait_until(lambda: not lane.server.connections, what="the connection's end")


# --- pipelined ----------------------------------------------------------------------------------


def test_threads_whose_work_can_wait_do_not_spin(
    lane: LaneThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[None] = []
    monkeypatch.setattr("cenote.rpc.lane_socket._step_aside", lambda: looks.append(None))
    monkeypatch.setattr("cenote.rpc.lane_socket.SLEEPERS", {threading.get_ident()})
    with LaneClient(lane.tcp_address, b"", spin_polls=60) as client:
        assert client.call(1, b"x", 5.0)
    assert not looks


@pytest.mark.parametrize("spin_polls", [0, 60])
def test_many_calls_at_once(lane: LaneThread, rng: random.Random, spin_polls: int) -> None:
    with LaneClient(lane.tcp_address, b"", spin_polls=spin_polls) as client:
        for count, size_max in ((0, 0), (1, 10), (500, 300), (40, 200_000), (3, 5_000_000)):
            bodies = [rng.randbytes(rng.randrange(size_max + 1)) for _ in range(count)]
            assert client.call_many(ECHO, bodies, 20) == bodies
        assert client.connections == 1


def test_requests_and_replies_beyond_all_socket_buffers_do_not_deadlock(tmp_path: Path) -> None:
    with (
        LaneThread(tmp_path, LaneLimits(write_buffer_high_bytes=100_000)) as lane,
        LaneClient(lane.address, b"") as client,
    ):
        replies = client.call_many(MANY_BYTES, [b"400000"] * 100, 20)
        assert replies == [b"z" * 400_000] * 100
        bodies = [b"y" * 900_000] * 30
        assert client.call_many(ECHO, bodies, 20) == bodies


def test_many_calls_get_an_error_each(client: LaneClient) -> None:
    results = client.call_many(RAISE, [b"same", b"other", b"leader"], 5)
    assert [type(result) for result in results] == [AlreadyExists, AlreadyExists, NotLeader]
    first = results[0]
    assert isinstance(first, AlreadyExists)
    assert first.same_bytes is True
    assert client.connections == 1


def test_many_calls_may_be_answered_in_any_order(lane: LaneThread, client: LaneClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(client.call_many, LATER, [b"a", b"b", b"c"], 5)
        wait_until(lambda: len(lane.futures) == 3, what="all requests")
        for name in (b"c", b"a", b"b"):
            lane.finish(name, name * 2)
        assert work.result() == [b"aa", b"bb", b"cc"]


def test_many_calls_that_run_late_keep_what_was_answered(
    lane: LaneThread, client: LaneClient
) -> None:
    with ThreadPoolExecutor(1) as pool, ends_within(0.3, at_least_s=0.3):
        work = pool.submit(client.call_many, LATER, [b"a", b"b", b"c"], 0.3)
        wait_until(lambda: len(lane.futures) == 3, what="all requests")
        lane.finish(b"b", b"in time")
        results = work.result()
    assert results[1] == b"in time"
    for late in (results[0], results[2]):
        assert isinstance(late, DeadlineExceeded)
    assert results[0] is not results[2]
    assert client.call(ECHO, b"x", 5) == b"x"


def test_many_calls_say_which_of_them_left(tmp_path: Path) -> None:
    def script(sock: socket.socket) -> None:
        sock.recv(HEADER.size)
        sock.close()

    with (
        ScriptedServer(tmp_path, script) as server,
        LaneClient(server.address, b"", connect_timeout_s=0.5) as client,
    ):
        results = client.call_many(ECHO, [b"x" * 600_000] * 100, 5)
    assert all(isinstance(result, Unavailable) for result in results)
    left = [isinstance(r, Unavailable) and r.maybe_executed for r in results]
    assert left[0]
    assert not left[-1]
