"""The lane's blocking client against a real server, and against servers that misbehave."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cenote.api.errors import (
    AlreadyExists,
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    ForkedClient,
    InvalidArgument,
    NotLeader,
    ProtocolError,
    ResourceUnavailable,
    Unauthenticated,
    Unavailable,
)
from cenote.rpc.frames import HEADER, REPLY, pack_error, pack_frame
from cenote.rpc.lane_client import LaneClient
from cenote.rpc.lane_server import LaneLimits
from unit.rpc.lane_testing import (
    COUNT,
    DEADLINE,
    ECHO,
    LATER,
    MANY_BYTES,
    NEVER,
    PARTS,
    RAISE,
    LaneThread,
    ScriptedServer,
    open_sockets,
)
from waiting import wait_until

TOLERANCE_S = 0.1  # DESIGN, promise 2


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[LaneThread]:
    with LaneThread(tmp_path, tcp=True) as started:
        yield started


@pytest.fixture
def client(lane: LaneThread) -> Iterator[LaneClient]:
    with LaneClient(lane.address, b"test") as made:
        yield made


def ends_in(work: Callable[[], object], kind: type[CenoteError], after_s: float) -> CenoteError:
    """`work` raises `kind`, `after_s` seconds from now."""
    start_s = time.monotonic()
    with pytest.raises(kind) as caught:
        work()
    took_s = time.monotonic() - start_s
    assert after_s - 0.01 <= took_s <= after_s + TOLERANCE_S, took_s
    return caught.value


# --- calls --------------------------------------------------------------------------------------


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
    assert leader.value.leader == "tcp://other:1"
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
    lane.hello_error = NotLeader("no", leader="tcp://b:2")
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
    with ThreadPoolExecutor(1) as pool:
        start_s = time.monotonic()
        work = pool.submit(client.call_many, LATER, [b"a", b"b", b"c"], 0.3)
        wait_until(lambda: len(lane.futures) == 3, what="all requests")
        lane.finish(b"b", b"in time")
        results = work.result()
        assert 0.29 <= time.monotonic() - start_s <= 0.3 + TOLERANCE_S
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


# --- deadlines ----------------------------------------------------------------------------------


def silent(sock: socket.socket) -> None:
    while sock.recv(1 << 16):
        pass


@pytest.mark.parametrize("spin_polls", [0, 60])
def test_a_server_that_stops_answering(tmp_path: Path, spin_polls: int) -> None:
    with (
        ScriptedServer(tmp_path, silent) as server,
        LaneClient(server.address, b"", spin_polls=spin_polls) as client,
    ):
        for deadline_s in (0.01, 0.2):
            call = partial(client.call, ECHO, b"x", deadline_s)
            late = ends_in(call, DeadlineExceeded, deadline_s)
            assert late.maybe_executed
        assert client.connections == 0


def test_a_server_that_stops_reading(tmp_path: Path) -> None:
    def deaf(_: socket.socket) -> None:
        server.stopped.wait(10)

    with ScriptedServer(tmp_path, deaf) as server, LaneClient(server.address, b"") as client:
        ends_in(lambda: client.call(ECHO, bytes(10 << 20), 0.2), DeadlineExceeded, 0.2)
        start_s = time.monotonic()
        results = client.call_many(ECHO, [bytes(1 << 20)] * 10, 0.2)
        assert 0.19 <= time.monotonic() - start_s <= 0.2 + TOLERANCE_S
        assert {type(result) for result in results} == {DeadlineExceeded}


@pytest.mark.parametrize("size", [100, 200_000])
def test_a_server_that_trickles(tmp_path: Path, size: int) -> None:
    def trickle(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        for byte in pack_frame(REPLY, 2, ECHO, body=b"x" * size):
            sock.sendall(bytes([byte]))
            if server.stopped.wait(0.005):
                return

    with ScriptedServer(tmp_path, trickle) as server, LaneClient(server.address, b"") as client:
        ends_in(lambda: client.call(ECHO, b"", 0.25), DeadlineExceeded, 0.25)


def test_a_server_stopped_in_the_middle_of_a_reply(tmp_path: Path) -> None:
    def half(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(pack_frame(REPLY, 2, ECHO, body=b"x" * 1000)[:500])
        server.stopped.wait(10)

    with ScriptedServer(tmp_path, half) as server, LaneClient(server.address, b"") as client:
        ends_in(lambda: client.call(ECHO, b"", 0.2), DeadlineExceeded, 0.2)


def test_a_late_reply_is_nobody_elses(lane: LaneThread, client: LaneClient) -> None:
    with pytest.raises(DeadlineExceeded):
        client.call(LATER, b"a", 0.02)
    wait_until(lambda: b"a" in lane.futures, what="the request")
    lane.finish(b"a", b"late")
    assert client.call(ECHO, b"mine", 5) == b"mine"


def test_deadlines_hold_while_signals_rain(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        with ScriptedServer(tmp_path, silent) as server, LaneClient(server.address, b"") as client:
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
            ends_in(lambda: client.call(ECHO, b"x", 0.2), DeadlineExceeded, 0.2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_call_leaves_no_reply_behind(lane: LaneThread, client: LaneClient) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            client.call(LATER, b"a", 5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    lane.finish(b"a", b"not yours")
    assert client.call(ECHO, b"mine", 5) == b"mine"


# --- servers that are not there, or go ----------------------------------------------------------


def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_nobody_there(tmp_path: Path) -> None:
    for address in (f"tcp://127.0.0.1:{unused_port()}", f"unix://{tmp_path}/none.sock"):
        with LaneClient(address, b"", connect_timeout_s=0.1) as client:
            with pytest.raises(Unavailable) as caught:
                client.call(ECHO, b"", 5)
            assert address in str(caught.value)
            assert caught.value.remedy
            assert not caught.value.maybe_executed
            ends_in(partial(client.call, ECHO, b"", 0.05), Unavailable, 0.025)


def test_a_name_that_does_not_exist() -> None:
    with (
        LaneClient("no-such-host.invalid:1", b"", connect_timeout_s=0.2) as client,
        pytest.raises(Unavailable, match=r"no-such-host\.invalid:1"),
    ):
        client.call(ECHO, b"", 5)


def test_a_name_is_resolved(lane: LaneThread) -> None:
    port = lane.tcp_address.rsplit(":", 1)[1]
    with LaneClient(f"localhost:{port}", b"") as client:
        assert client.call(ECHO, b"x", 5) == b"x"


def test_a_server_that_comes_later_is_found(tmp_path: Path) -> None:
    with (
        LaneClient(f"unix://{tmp_path}/lane.sock", b"", connect_timeout_s=10) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        work = pool.submit(client.call, ECHO, b"x", 10)
        with pytest.raises(TimeoutError):
            work.result(0.03)
        with LaneThread(tmp_path):
            assert work.result() == b"x"


def test_a_server_that_does_not_answer_hello(tmp_path: Path) -> None:
    with (
        ScriptedServer(tmp_path, silent, greet=False) as server,
        LaneClient(server.address, b"", connect_timeout_s=0.2) as client,
    ):
        gone = ends_in(lambda: client.call(ECHO, b"", 5), Unavailable, 0.2)
        assert server.address in str(gone)
        ends_in(lambda: client.call(ECHO, b"", 0.1), Unavailable, 0.1)


def has_three(futures: Sized) -> bool:
    return len(futures) == 3


def test_a_restarted_server_is_found_again_without_an_error(tmp_path: Path) -> None:
    with LaneClient(f"unix://{tmp_path}/lane.sock", b"", connections_max=3) as client:
        for _ in range(3):
            with LaneThread(tmp_path) as lane:
                with ThreadPoolExecutor(3) as pool:
                    names = [b"%d" % n for n in range(3)]
                    calls = [pool.submit(client.call, LATER, name, 5) for name in names]
                    wait_until(partial(has_three, lane.futures), what="a call on each connection")
                    for name in names:
                        lane.finish(name, name)
                    assert [call.result() for call in calls] == names
                assert client.connections == 3
        assert len(lane.hellos) == 3


def test_a_connection_that_breaks_before_the_reply(tmp_path: Path) -> None:
    def hang_up(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.close()

    with ScriptedServer(tmp_path, hang_up) as server, LaneClient(server.address, b"") as client:
        for _ in range(2):
            with pytest.raises(Unavailable, match="broke before the reply") as caught:
                client.call(ECHO, b"x", 5)
            assert caught.value.maybe_executed
        assert client.connections == 0


def test_a_server_that_hangs_up_at_once(tmp_path: Path) -> None:
    with (
        ScriptedServer(tmp_path, lambda sock: sock.close()) as server,
        LaneClient(server.address, b"") as client,
        pytest.raises(Unavailable),
    ):
        client.call(ECHO, b"x" * 100_000, 5)
    assert server.accepted <= 3


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (pack_frame(REPLY, 7, ECHO), "a reply to call 7"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP/1.1"),
        (pack_frame(1, 2), "HELLO frame instead"),
        (HEADER.pack(1 << 30, 2, ECHO, REPLY, 0, 0), "exceeds the limit"),
        (pack_error(0, ProtocolError("you sent garbage")), "you sent garbage"),
        (pack_error(2, ProtocolError("too large")), "too large"),
    ],
)
def test_a_server_that_sends_nonsense(tmp_path: Path, answer: bytes, what: str) -> None:
    def nonsense(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(answer)
        sock.recv(1)

    with ScriptedServer(tmp_path, nonsense) as server, LaneClient(server.address, b"") as client:
        with pytest.raises(ProtocolError) as caught:
            client.call(ECHO, b"x", 1)
        assert what in str(caught.value)
        assert client.connections == 0
        (result,) = client.call_many(ECHO, [b"x"], 0.2)
        assert isinstance(result, ProtocolError)
        assert client.connections == 0


def test_a_farewell_behind_a_reply_ends_the_connection_only(tmp_path: Path) -> None:
    def reply_and_go(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(pack_frame(REPLY, 2, body=b"last") + pack_error(0, Unavailable("closing")))
        sock.recv(1)

    with (
        ScriptedServer(tmp_path, reply_and_go) as server,
        LaneClient(server.address, b"") as client,
    ):
        assert client.call(ECHO, b"x", 5) == b"last"
        assert client.connections == 0
        assert client.call_many(ECHO, [b"x"], 5) == [b"last"]
        assert client.connections == 0


def test_a_server_that_is_no_lane_server(tmp_path: Path) -> None:
    def http(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        sock.close()

    with (
        ScriptedServer(tmp_path, http, greet=False) as server,
        LaneClient(server.address, b"") as client,
        pytest.raises(ProtocolError, match=r"HTTP/1\.1 400"),
    ):
        client.call(ECHO, b"x", 5)


# --- threads, close, fork -----------------------------------------------------------------------


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
        start_s = time.monotonic()
        client.close()
        for call in calls:
            with pytest.raises(ClientClosed):
                call.result()
        assert time.monotonic() - start_s < 0.5
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


def test_a_call_does_not_give_up_the_gil_to_a_busy_thread(lane: LaneThread) -> None:
    """Sending and the first looks at the socket keep the GIL: see lane_socket."""
    # The server's loop is a thread of this process, so this only shows that a call works while
    # another thread never lets go by itself; benchmarks/micro/bench_lane.py has the figures.
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
