"""The client's end against servers that do as they are told, byte by byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic

import numpy as np
import pytest

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    InvalidArgument,
    NoSpace,
    ProtocolError,
    ProtocolVersionMismatch,
    Unavailable,
)
from cenote.transport import opening, wire
from cenote.transport.base import SessionIdentity
from cenote.transport.connection import DataConnection, timeval
from cenote.transport.tcp import TcpChannel, TcpTransport
from cenote.transport.testing_support import LocalMemory, batch
from cenote.v1 import common_pb2, store_pb2
from promptness import ends_within
from waiting import wait_until

IDENTITY = SessionIdentity(b"0123456789abcdef", "boot", 1, common_pb2.Credentials())
ANSWER = wire.encode_hello_reply(store_pb2.DataHelloResponse(epoch=1, node_id=1))
Script = Callable[[socket.socket], None]


def receive(sock: socket.socket, length: int) -> bytes:
    return sock.recv(length, socket.MSG_WAITALL)


def greet(sock: socket.socket, answer: bytes = ANSWER) -> None:
    receive(sock, wire.hello_length(receive(sock, wire.HELLO.size)))
    sock.sendall(answer)


def call_id_of(request: bytes) -> int:
    return int(wire.REQUEST_ONE.unpack(request)[4])


def reply(op: int, call_id: int, items: int, length: int, code: int = 0) -> bytes:
    return wire.REPLY.pack(op, 0, code, items, call_id, 1, length)


@dataclass
class Server:
    """Runs one script for each connection, in turn."""

    scripts: list[Script]
    port: int = 0
    failed: BaseException | None = None

    def run(self, listener: socket.socket) -> None:
        try:
            for script in self.scripts:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(ConnectionError):
                    sock.settimeout(10)
                    script(sock)
        except BaseException as error:  # shown by the test
            self.failed = error


@contextlib.contextmanager
def serving(*scripts: Script) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        server = Server(list(scripts), listener.getsockname()[1])
        thread = threading.Thread(target=server.run, args=(listener,))
        thread.start()
        yield server
        thread.join(15)
        assert server.failed is None
        assert not thread.is_alive()


@contextlib.contextmanager
def channel_to(*scripts: Script, spin_s: float = 0.0) -> Iterator[TcpChannel]:
    with serving(*scripts) as server:
        transport = TcpTransport(spin_s=spin_s)
        endpoint = common_pb2.Endpoint(
            kind=common_pb2.TRANSPORT_KIND_TCP, address=f"127.0.0.1:{server.port}"
        )
        node = common_pb2.NodeView(node_id=1, endpoints=[endpoint])
        try:
            yield transport.connect(node, IDENTITY, 1, 10.0)
        finally:
            transport.close()


# ---- deadlines ------------------------------------------------------------------------------


def trickle(sock: socket.socket) -> None:
    """Half a reply, then a byte now and then, for as long as somebody takes them."""
    greet(sock)
    call_id = call_id_of(receive(sock, wire.HEAD_BYTES))
    sock.sendall(reply(wire.OP_READ, call_id, 1, 100_001) + b"\x00" + b"x" * 50_000)
    stopped = threading.Event()
    for _ in range(400):
        sock.sendall(b"y")
        stopped.wait(0.01)


@pytest.mark.parametrize("spin_s", [0.0, 1e-3])
def test_a_peer_that_trickles_can_not_stretch_a_call(spin_s: float) -> None:
    with channel_to(trickle, spin_s=spin_s) as channel:
        memory = LocalMemory(100_000)
        with ends_within(0.25, at_least_s=0.22), pytest.raises(DeadlineExceeded):
            channel.read_one(1, 0, 100_000, memory.address, 0.25, False)
        landed = int((memory.bytes != 0xA5).sum())
        assert 50_000 <= landed < 100_000
        assert memory.untouched(landed, 100_000)


def send_steadily(sock: socket.socket) -> None:
    """A whole reply at 5 MB/s: no receive of a step waits for long."""
    greet(sock)
    call_id = call_id_of(receive(sock, wire.HEAD_BYTES))
    sock.sendall(reply(wire.OP_READ, call_id, 1, 8_000_001) + b"\x00")
    stopped = threading.Event()
    for _ in range(160):
        sock.sendall(bytes(50_000))
        stopped.wait(0.01)


@pytest.mark.parametrize("checksum", [False, True])
def test_a_slow_and_steady_peer_can_not_stretch_a_call(checksum: bool) -> None:
    with channel_to(send_steadily) as channel:
        memory = LocalMemory(8_000_000)
        with ends_within(0.25, at_least_s=0.22), pytest.raises(DeadlineExceeded):
            channel.read_one(1, 0, 8_000_000, memory.address, 0.25, checksum)
        landed = int((memory.bytes != 0xA5).sum())
        assert 0 < landed < 8_000_000
        assert memory.untouched(landed, 8_000_000)


def test_nothing_lands_after_the_call_returned() -> None:
    returned = threading.Event()
    said = threading.Event()

    def late(sock: socket.socket) -> None:
        greet(sock)
        call_id = call_id_of(receive(sock, wire.HEAD_BYTES))
        sock.sendall(reply(wire.OP_READ, call_id, 1, 4097) + b"\x00" + b"x" * 1000)
        assert returned.wait(10)
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"y" * 3096)
        said.set()

    with channel_to(late) as channel:
        memory = LocalMemory(4096)
        with pytest.raises(DeadlineExceeded):
            channel.read_one(1, 0, 4096, memory.address, 0.1, True)
        returned.set()
        assert said.wait(10)
        assert memory.untouched(1000, 4096)


def test_a_peer_that_takes_no_payload() -> None:
    done = threading.Event()

    def take_nothing(sock: socket.socket) -> None:
        greet(sock)
        assert done.wait(10)

    with channel_to(take_nothing) as channel:
        memory = LocalMemory(32 << 20)
        with ends_within(0.25, at_least_s=0.22), pytest.raises(DeadlineExceeded):
            channel.write_one(1, 0, 32 << 20, memory.address, 7, 0.25, True)
        done.set()


def test_kernel_timeouts_are_set_only_where_they_are_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = DataConnection(ours, "peer")
        now = 1000.0
        armed: list[float] = []
        real = DataConnection._arm

        def arm(self: DataConnection, at: float) -> None:
            armed.append(self._deadline - at)
            real(self, at)

        monkeypatch.setattr(DataConnection, "_arm", arm)
        connection.begin(now + 5.0, now)
        connection.begin(now + 5.02, now)  # about as long: stays
        connection.begin(now + 9.0, now)  # longer: the shorter setting is mended when it ends
        assert armed == [5.0]
        connection.begin(now + 1.0, now)
        assert armed == [5.0, 1.0]
        with pytest.raises(DeadlineExceeded):
            connection.begin(now - 1.0, now)


def test_an_earlier_and_shorter_deadline_does_not_count() -> None:
    def slow(sock: socket.socket) -> None:
        greet(sock)
        for pause_s in (0.0, 0.4):
            call_id = call_id_of(receive(sock, wire.HEAD_BYTES))
            threading.Event().wait(pause_s)
            sock.sendall(reply(wire.OP_READ, call_id, 1, 5) + b"\x00" + b"data")

    with channel_to(slow) as channel:
        memory = LocalMemory(4)
        assert channel.read_one(1, 0, 4, memory.address, 0.15, False) == (0, 0)
        assert channel.read_one(1, 0, 4, memory.address, 10.0, False) == (0, 0)


def test_timevals_are_never_zero_which_would_mean_for_ever() -> None:
    assert timeval(0.0) == timeval(0.001)
    assert np.frombuffer(timeval(2.5), np.int64).tolist() == [2, 500_000]


# ---- answers that are none ------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        lambda i: reply(wire.OP_WRITE, i, 1, 5) + b"\x00data",
        lambda i: reply(wire.OP_READ, i + 1, 1, 5) + b"\x00data",
        lambda i: reply(wire.OP_READ, i, 2, 5) + b"\x00data",
        lambda i: reply(wire.OP_READ, i, 1, 4) + b"\x00dat",
        lambda i: reply(wire.OP_READ, i, 1, 6) + b"\x00data!",
        lambda i: reply(wire.OP_READ, i, 1, 5) + b"\x15data",
        lambda i: reply(wire.OP_READ, i, 1, 0) + b"\x00data",
        lambda i: reply(wire.OP_READ, i, 1, 1 << 62) + b"\x00data",
        lambda i: reply(wire.OP_READ, i, 0, 1 << 30, code=3) + b"text",
        lambda i: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_garbage_for_a_reply(answer: Callable[[int], bytes]) -> None:
    def lie(sock: socket.socket) -> None:
        greet(sock)
        sock.sendall(answer(call_id_of(receive(sock, wire.HEAD_BYTES))))

    def lie_again(sock: socket.socket) -> None:
        greet(sock)
        request = receive(sock, wire.HEAD_BYTES + wire.EXTENT_BYTES)
        wrong = answer(call_id_of(request[: wire.HEAD_BYTES]))
        sock.sendall(wrong)

    with channel_to(lie, lie_again) as channel:
        memory = LocalMemory(64)
        with pytest.raises(ProtocolError):
            channel.read_one(1, 0, 4, memory.address, 10.0, True)
        assert memory.untouched(4, 64)
        addresses = np.array([memory.address, memory.address + 8], np.uint64)
        with pytest.raises((ProtocolError, Unavailable)):
            channel.read(batch([(1, 0, 4), (1, 4, 4)]), addresses, 10.0)


def test_errors_keep_their_type_on_either_side_of_a_close() -> None:
    text = wire.encode_error(NoSpace("full"))

    def refuse(sock: socket.socket) -> None:
        greet(sock)
        call_id = call_id_of(receive(sock, wire.HEAD_BYTES))
        sock.sendall(reply(wire.OP_READ, call_id, 0, len(text), code=NoSpace.code) + text)

    def refuse_unasked(sock: socket.socket) -> None:
        greet(sock)
        sock.sendall(reply(wire.OP_NONE, 0, 0, len(text), code=NoSpace.code) + text)
        receive(sock, wire.HEAD_BYTES)  # the rest of the request is left unread: a reset follows

    with channel_to(refuse, refuse_unasked) as channel:
        memory = LocalMemory(32 << 20)
        with pytest.raises(NoSpace, match="full"):
            channel.read_one(1, 0, 4, memory.address, 10.0, True)
        with pytest.raises(NoSpace, match="full"):
            channel.write_one(1, 0, 32 << 20, memory.address, 7, 10.0, False)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (wire.encode_hello_error(NoSpace("full")), NoSpace),
        (wire.encode_hello_error(ProtocolVersionMismatch("old")), ProtocolVersionMismatch),
        (b"SSH-2.0-OpenSSH_9.6\r\n", ProtocolError),
        (wire.HELLO_REPLY.pack(0, 3) + b"\xff\xff\xff", ProtocolError),
        (b"", Unavailable),
        (ANSWER[:5], Unavailable),
    ],
)
def test_hellos_that_fail(answer: bytes, error: type[CenoteError]) -> None:
    with pytest.raises(error), channel_to(lambda sock: greet(sock, answer)):
        pass


# ---- the pool -------------------------------------------------------------------------------


def echo_reads(sock: socket.socket) -> None:
    greet(sock)
    while request := receive(sock, wire.HEAD_BYTES):
        sock.sendall(reply(wire.OP_READ, call_id_of(request), 1, 5) + b"\x00data")


def test_a_connection_that_the_peer_closed_while_idle_is_not_used() -> None:
    closed = threading.Event()

    def leave(sock: socket.socket) -> None:
        greet(sock)
        request = receive(sock, wire.HEAD_BYTES)
        sock.sendall(reply(wire.OP_READ, call_id_of(request), 1, 5) + b"\x00data")
        sock.close()
        closed.set()

    with channel_to(leave, echo_reads) as channel:
        memory = LocalMemory(4)
        assert channel.read_one(1, 0, 4, memory.address, 10.0, False) == (0, 0)
        assert closed.wait(10)
        begun = monotonic()
        wait_until(lambda: monotonic() - begun > 0.06, what="the connection to be idle for long")
        assert channel.read_one(1, 0, 4, memory.address, 10.0, False) == (0, 0)


def test_a_call_waits_for_a_connection_no_longer_than_its_deadline() -> None:
    done = threading.Event()

    def stall(sock: socket.socket) -> None:
        greet(sock)
        request = receive(sock, wire.HEAD_BYTES)
        assert done.wait(10)
        sock.sendall(reply(wire.OP_READ, call_id_of(request), 1, 5) + b"\x00data")
        receive(sock, 1)

    with serving(stall) as server:
        transport = TcpTransport(connections_per_peer=1)
        endpoint = common_pb2.Endpoint(
            kind=common_pb2.TRANSPORT_KIND_TCP, address=f"127.0.0.1:{server.port}"
        )
        channel = transport.connect(
            common_pb2.NodeView(node_id=1, endpoints=[endpoint]), IDENTITY, 1, 10.0
        )
        memory = LocalMemory(8)
        results: list[tuple[int, int]] = []
        first = threading.Thread(
            target=lambda: results.append(channel.read_one(1, 0, 4, memory.address, 10.0, False))
        )
        first.start()
        wait_until(lambda: not channel._pool._idle, what="the only connection to be in use")
        with pytest.raises(DeadlineExceeded, match="in use"):
            channel.read_one(1, 0, 4, memory.address, 0.05, False)
        done.set()
        first.join(10)
        assert results == [(0, 0)]
        transport.close()


def test_close_interrupts_a_hello_too() -> None:
    done = threading.Event()

    def mute(sock: socket.socket) -> None:
        assert done.wait(10)

    with channel_to(echo_reads, mute) as channel:
        memory = LocalMemory(4)
        held = channel._pool.take(monotonic() + 10, monotonic())
        ended: list[type[CenoteError]] = []

        def call() -> None:
            try:
                channel.read_one(1, 0, 4, memory.address, 10.0, False)
            except CenoteError as error:
                ended.append(type(error))

        thread = threading.Thread(target=call)
        thread.start()
        wait_until(lambda: len(channel._pool._all) == 2, what="the second connection")
        channel._pool.give_back(held)
        channel.close()
        thread.join(10)
        assert ended == [ClientClosed]
        done.set()


# ---- addresses ------------------------------------------------------------------------------


def test_host_and_port() -> None:
    assert opening.parse_host_port("10.0.0.1:80") == ("10.0.0.1", 80)
    assert opening.parse_host_port("[::1]:7000") == ("::1", 7000)
    for text in (
        "",
        "host",
        "host:",
        ":80",
        "::1:80",
        "host:0",
        "host:65536",
        "host:\uff18\uff10",
        "[]:80",
    ):
        with pytest.raises(InvalidArgument):
            opening.parse_host_port(text)


def test_nobody_listens_or_the_name_is_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    deadline = monotonic() + 10
    with pytest.raises(Unavailable):
        opening.connect(("127.0.0.1", port), "node", deadline)
    with pytest.raises(Unavailable):
        opening.connect("/nowhere/data.sock", "node", deadline)


def test_the_resolver_can_not_stretch_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def look_up(*args: object, type: int, flags: int) -> list[object]:
        if flags:
            raise socket.gaierror("not numeric")
        done.wait(10)
        raise socket.gaierror("unknown name")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with ends_within(0.1), pytest.raises(DeadlineExceeded):
        opening.connect(("slow.example", 80), "node", monotonic() + 0.1)
    done.set()
    with pytest.raises(Unavailable, match="resolved"):
        opening.connect(("slow.example", 80), "node", monotonic() + 10)
