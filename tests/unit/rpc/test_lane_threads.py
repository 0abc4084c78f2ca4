"""The lane's blocking client with several threads, while it is closed, and after a fork."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cenote.api.errors import (
    ClientClosed,
    DeadlineExceeded,
    ForkedClient,
)
from cenote.rpc.lane_client import LaneClient
from promptness import ends_within
from unit.rpc.lane_testing import (
    COUNT,
    ECHO,
    LATER,
    NEVER,
    LaneThread,
    ScriptedServer,
    ends_in,
    open_sockets,
    silent,
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


def test_threads_share_a_bounded_pool(lane: LaneThread) -> None:
    with LaneClient(lane.address, b"", connections_max=3) as client:

        def work(thread: int) -> int:
            for n in range(100):
                body = b"%d/%d" % (thread, n)
                assert client.call(ECHO, body, 10) == body
                if n % 25 == 0:
                    assert client.call_many(ECHO, [body] * 10, 10) == [body] * 10
            return thread

        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(work, range(12))) == list(range(12))
        assert client.connections <= 3
    assert len(lane.hellos) <= 3


def test_a_thread_alone_uses_one_connection(lane: LaneThread, client: LaneClient) -> None:
    for _ in range(50):
        client.call(ECHO, b"", 5)
    assert client.connections == len(lane.hellos) == 1


def test_waiting_for_a_connection_ends_by_the_deadline(lane: LaneThread) -> None:
    with (
        LaneClient(lane.address, b"", connections_max=1) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        other = pool.submit(client.call, LATER, b"a", 5)
        wait_until(lambda: b"a" in lane.futures, what="the other call")
        late = ends_in(lambda: client.call(ECHO, b"", 0.15), DeadlineExceeded, 0.15)
        assert "all 1 connections" in str(late)
        assert not late.maybe_executed
        lane.finish(b"a", b"x")
        assert other.result() == b"x"


@pytest.mark.parametrize("many", [False, True])
def test_close_ends_calls_in_other_threads(lane: LaneThread, many: bool) -> None:
    sockets_before = open_sockets()
    client = LaneClient(lane.address, b"", connections_max=2)
    with ThreadPoolExecutor(4) as pool:
        names = [b"%d" % n for n in range(4)]  # two wait for replies, two for connections
        calls: list[Future[Any]] = []
        for name in names:
            if many:
                calls.append(pool.submit(client.call_many, NEVER, [name], 10))
            else:
                calls.append(pool.submit(client.call, NEVER, name, 10))
        wait_until(lambda: len(lane.futures) == 2, what="two calls under way")
        with ends_within(0.5):
            client.close()
            for call in calls:
                with pytest.raises(ClientClosed):
                    call.result()
    assert client.closed
    assert client.connections == 0
    with pytest.raises(ClientClosed):
        client.call(ECHO, b"", 5)
    client.close()
    wait_until(lambda: not lane.server.connections, what="the server's side")
    assert open_sockets() == sockets_before


def test_close_ends_a_call_that_connects(tmp_path: Path) -> None:
    client = LaneClient(f"unix://{tmp_path}/none.sock", b"", connect_timeout_s=30)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, ECHO, b"", 30)
        with pytest.raises(TimeoutError):
            call.result(0.03)
        client.close()
        with pytest.raises(ClientClosed):
            call.result(0.5)


def test_close_ends_a_call_that_says_hello(tmp_path: Path) -> None:
    with ScriptedServer(tmp_path, silent, greet=False) as server, ThreadPoolExecutor(1) as pool:
        client = LaneClient(server.address, b"", connect_timeout_s=30)
        call = pool.submit(client.call, ECHO, b"", 30)
        wait_until(lambda: server.accepted, what="the connection")
        client.close()
        with pytest.raises(ClientClosed):
            call.result(0.5)


def test_close_while_threads_call(lane: LaneThread) -> None:
    sockets_before = open_sockets()
    for _ in range(10):
        client = LaneClient(lane.address, b"", connections_max=3)
        started = threading.Barrier(5)

        def work(client: LaneClient = client, started: threading.Barrier = started) -> None:
            started.wait(10)
            try:
                while True:
                    client.call(ECHO, b"x", 5)
            except ClientClosed:
                return

        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(work) for _ in range(4)]
            started.wait(10)
            client.close()
            for call in calls:
                call.result()
        assert client.connections == 0
    wait_until(lambda: not lane.server.connections, what="the server's side")
    assert open_sockets() == sockets_before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_does_no_harm(lane: LaneThread) -> None:
    with LaneClient(lane.address, b"") as client:
        client.call(COUNT, b"", 5)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                client.call(COUNT, b"", 5)
            except ForkedClient:
                client.close()
                code = 42
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 42
        assert client.call(COUNT, b"", 5) == b"2", "the parent's connection must live on"
        assert client.connections == len(lane.hellos) == 1


def test_calls_beside_a_thread_that_never_rests(lane: LaneThread) -> None:
    # How fast they are then is measured in benchmarks/micro/bench_lane.py: here, the server's loop
    # is a thread of the same process and suffers, too.
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=burn)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    thread.start()
    try:
        with LaneClient(lane.address, b"") as client:
            for n in range(20):
                assert client.call(ECHO, b"%d" % n, 5) == b"%d" % n
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval_s)
