"""The lane's blocking client against servers that are silent, slow, gone, or talk nonsense."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cenote.api.errors import (
    DeadlineExceeded,
    ProtocolError,
    Unavailable,
)
from cenote.rpc import lane_connect, lane_socket
from cenote.rpc.frames import HEADER, REPLY, pack_error, pack_frame
from cenote.rpc.lane_client import LaneClient
from promptness import ends_within
from unit.rpc.lane_testing import (
    ECHO,
    LATER,
    LaneThread,
    ScriptedServer,
    ends_in,
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


@pytest.mark.parametrize("spin_polls", [0, 60])
def test_a_server_that_stops_answering(tmp_path: Path, spin_polls: int) -> None:
    with (
        ScriptedServer(tmp_path, silent) as server,
        LaneClient(server.address, b"", spin_polls=spin_polls) as client,
    ):
        for deadline_s in (0.01, 0.2):
            call = partial(client.call, ECHO, b"x", deadline_s)
            late = ends_in(call, DeadlineExceeded, deadline_s)
            # Within 10 ms a busy machine may not even have connected.
            assert late.maybe_executed or deadline_s < 0.1
        assert client.connections == 0


def test_a_server_that_stops_reading(tmp_path: Path) -> None:
    def deaf(_: socket.socket) -> None:
        server.stopped.wait(10)

    with ScriptedServer(tmp_path, deaf) as server, LaneClient(server.address, b"") as client:
        ends_in(lambda: client.call(ECHO, bytes(10 << 20), 0.2), DeadlineExceeded, 0.2)
        with ends_within(0.2, at_least_s=0.2):
            results = client.call_many(ECHO, [bytes(1 << 20)] * 10, 0.2)
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
            with ends_within(0.1), pytest.raises(Unavailable):  # that is the time to connect
                client.call(ECHO, b"", 0.3)


def test_a_tcp_server_that_accepts_nobody() -> None:
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):  # more than the backlog holds: the last ones are not answered
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with LaneClient(address, b"", connect_timeout_s=0.1) as client:
            gone = ends_in(lambda: client.call(ECHO, b"", 5), Unavailable, 0.1)
            assert f"no connection to {address}: nobody answered in time" in str(gone)


def test_a_unix_server_that_accepts_nobody(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        path = str(tmp_path / "full.sock")
        listener.bind(path)
        listener.listen(0)
        code = 0
        while code == 0:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            code = sock.connect_ex(path)
        client = stack.enter_context(LaneClient(f"unix://{path}", b"", connect_timeout_s=0.1))
        with pytest.raises(Unavailable, match=path):
            client.call(ECHO, b"", 5)


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
        late = ends_in(lambda: client.call(ECHO, b"", 0.1), DeadlineExceeded, 0.1)
        assert server.address in str(late)
        assert not late.maybe_executed


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


def test_a_server_that_dies_before_it_hears_hello(
    lane: LaneThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was connected can't be written to any more: the same as no connection."""
    connect = lane_connect.connect_socket
    gone = 2

    def dead_at_first(*arguments: Any) -> socket.socket:
        nonlocal gone
        if not gone:
            return connect(*arguments)
        gone -= 1
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    monkeypatch.setattr(lane_socket, "connect_socket", dead_at_first)
    with LaneClient(lane.address, b"test") as client:
        assert client.call(ECHO, b"x", 5.0) == b"x"
        gone = 1 << 20
    with LaneClient(lane.address, b"test", connect_timeout_s=0.1) as client:
        with pytest.raises(Unavailable, match="no connection to") as caught:
            client.call(ECHO, b"x", 5.0)
        assert not caught.value.maybe_executed


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
