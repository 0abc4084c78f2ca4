"""The lane over TLS: calls as without it, and who can't prove who he is told why, quickly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cenote.api.errors import (
    AlreadyExists,
    CenoteError,
    DeadlineExceeded,
    ProtocolError,
    TlsFailed,
    Unavailable,
)
from cenote.rpc.frames import FrameParser, decode_error
from cenote.rpc.lane_aio import AsyncLaneClient
from cenote.rpc.lane_client import LaneClient
from cenote.rpc.lane_limits import LaneLimits
from cenote.security.tls import Tls, TlsFiles
from promptness import ends_within
from tls_kit import Authority, Issued
from waiting import wait_until

from .lane_testing import CALL, ECHO, MANY_BYTES, RAISE, LaneThread

pytestmark = pytest.mark.filterwarnings("error")


class Pki:
    def __init__(self, folder: Path) -> None:
        self.ours = Authority(folder, "ours")
        self.others = Authority(folder, "others")
        self.server = self.ours.issue("server", cn="the server")
        self.client = self.ours.issue("client", "engine.ann", cn="ann")


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "pki")


@contextlib.contextmanager
def serving(
    tmp_path: Path, tls: Tls | None, limits: LaneLimits | None = None
) -> Iterator[LaneThread]:
    with LaneThread(tmp_path, limits, tcp=True, tls=tls) as server:
        yield server


def refused_by_both(
    server: LaneThread, tls: Tls | None, kind: type[CenoteError] = TlsFailed
) -> set[str]:
    """What the blocking and the other client say; neither may take long."""
    said = set()

    async def ask() -> None:
        async with AsyncLaneClient(server.tcp_address, b"", tls=tls) as client:
            await client.call(ECHO, b"x", 10.0)

    with ends_within(3.0), LaneClient(server.tcp_address, b"", tls=tls) as client:
        with pytest.raises(kind) as blocking:
            client.call(ECHO, b"x", 10.0)
        said.add(str(blocking.value))
    with ends_within(3.0):
        with pytest.raises(kind) as waiting:
            asyncio.run(ask())
        said.add(str(waiting.value))
    return said


def test_calls_are_what_they_are_without_it(tmp_path: Path, pki: Pki) -> None:
    tls = pki.ours.client(pki.client)
    with (
        serving(tmp_path, pki.ours.server(pki.server)) as server,
        LaneClient(server.tcp_address, b"hi", tls=tls) as client,
    ):
        for size in (0, 1, 100, 16 << 10, 70_000, 1 << 20):
            body = bytes(size)
            assert client.call(ECHO, body, 10.0) == body
        assert len(client.call(MANY_BYTES, b"3000000", 10.0)) == 3_000_000
        with pytest.raises(AlreadyExists):
            client.call(RAISE, b"exists", 10.0)
        bodies = [bytes([n % 251]) * (n * 37) for n in range(300)]
        assert client.call_many(ECHO, bodies, 20.0) == bodies
        assert client.connections == 1
        assert server.hellos == [b"hi"]


def test_coroutines_call_over_it(tmp_path: Path, pki: Pki) -> None:
    async def ask(address: str) -> None:
        async with AsyncLaneClient(address, b"", tls=pki.ours.client(pki.client)) as client:
            bodies = [bytes([n]) * 5_000 for n in range(100)]
            assert await client.call_many(ECHO, bodies, 20.0) == bodies

    with serving(tmp_path, pki.ours.server(pki.server)) as server:
        asyncio.run(ask(server.tcp_address))


def test_handlers_learn_whose_certificate_it_is(tmp_path: Path, pki: Pki) -> None:
    def whose(connection: object, _: bytes) -> bytes:
        return ",".join(connection.identities).encode()  # type: ignore[attr-defined]

    with serving(tmp_path, pki.ours.server(pki.server)) as server:
        server.on_call = whose
        with LaneClient(server.tcp_address, b"", tls=pki.ours.client(pki.client)) as client:
            said = client.call(CALL, b"", 10.0).decode().split(",")
        assert said[-1] == "cn:ann"
        assert "dns:engine.ann" in said
        with LaneClient(server.address, b"", tls=pki.ours.client(pki.client)) as client:
            assert client.call(CALL, b"", 10.0) == b"", "Unix sockets stay plain"


def test_who_is_not_proven_is_told_why(tmp_path: Path, pki: Pki) -> None:
    stranger = pki.others.issue("stranger")
    expired = pki.ours.issue("expired", expired=True)

    def with_ca_of_ours(issued: Issued) -> Tls:
        return pki.ours.client(issued)

    with serving(tmp_path, pki.ours.server(pki.server)) as server:
        told = {
            "wrong CA here": refused_by_both(server, pki.others.client(stranger)),
            "wrong CA there": refused_by_both(server, with_ca_of_ours(stranger)),
            "none": refused_by_both(server, pki.ours.client()),
            "expired": refused_by_both(server, with_ca_of_ours(expired)),
            "name": refused_by_both(server, pki.ours.client(pki.client, "elsewhere")),
            "plain": refused_by_both(server, None),
        }
        # Whoever was refused has not kept the others from working.
        with LaneClient(server.tcp_address, b"", tls=pki.ours.client(pki.client)) as client:
            assert client.call(ECHO, b"x", 10.0) == b"x"
        assert server.server.stats.handshakes_failed >= 8
    for words, texts in (
        ("is of no CA in", told["wrong CA here"]),
        ("of a CA that it does not know", told["wrong CA there"]),
        ("wants a certificate of ours", told["none"]),
        ("our certificate has expired", told["expired"]),
        ("is not for that name", told["name"]),
        ("this port speaks TLS", told["plain"]),
    ):
        assert all(words in text for text in texts), (words, texts)
    assert str(pki.others.ca) in next(iter(told["wrong CA here"]))


def test_a_server_whose_certificate_has_expired_is_refused(tmp_path: Path, pki: Pki) -> None:
    expired = pki.ours.issue("expired", expired=True)
    with serving(tmp_path, pki.ours.server(expired)) as server:
        said = refused_by_both(server, pki.ours.client(pki.client))
    assert all("has expired" in text for text in said), said


def test_tls_at_a_port_without_it(tmp_path: Path, pki: Pki) -> None:
    with serving(tmp_path, None) as server:
        said = refused_by_both(server, pki.ours.client(pki.client))
        assert all("does not speak TLS" in text for text in said), said


def test_none_asked_for_and_optional(tmp_path: Path, pki: Pki) -> None:
    with (
        serving(tmp_path, pki.ours.server(pki.server, "off")) as server,
        LaneClient(server.tcp_address, b"", tls=pki.ours.client()) as client,
    ):
        assert client.call(ECHO, b"x", 10.0) == b"x"
    with serving(tmp_path / "..", pki.ours.server(pki.server, "optional")) as server:
        with LaneClient(server.tcp_address, b"", tls=pki.ours.client()) as client:
            assert client.call(ECHO, b"x", 10.0) == b"x"
        stranger = pki.ours.client(pki.others.issue("stranger"))
        refused_by_both(server, stranger)


def is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_slow_handshakes_keep_nobody_waiting(tmp_path: Path, pki: Pki) -> None:
    limits = LaneLimits(handshakes_max=8, hello_timeout_s=30.0)
    tls = pki.ours.client(pki.client)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path, pki.ours.server(pki.server), limits))
        host, _, port = server.tcp_address.removeprefix("tcp://").rpartition(":")
        silent = []
        for n in range(40):
            sock = stack.enter_context(socket.create_connection((host, int(port)), 10))
            sock.sendall((b"", b"\x16", b"\x16\x03\x01\x02\x00\x01")[n % 3])
            silent.append(sock)
        client = stack.enter_context(LaneClient(server.tcp_address, b"", tls=tls))
        with ends_within(3.0):
            assert client.call(ECHO, b"x", 10.0) == b"x"
        handshakes = server.server.handshakes
        assert handshakes is not None
        assert len(handshakes) <= 8
        wait_until(lambda: sum(map(is_closed, silent)) >= 32, what="the others to be gone")


def test_a_handshake_ends_in_time(tmp_path: Path, pki: Pki) -> None:
    limits = LaneLimits(hello_timeout_s=0.2)
    with serving(tmp_path, pki.ours.server(pki.server), limits) as server:
        host, _, port = server.tcp_address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), 10) as sock, ends_within(5.0):
            sock.sendall(b"\x16\x03\x01")
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        wait_until(lambda: not len(server.server.handshakes or ()), what="no handshake")


def test_a_client_gives_up_a_handshake_in_time(pki: Pki) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with (
            LaneClient(address, b"", tls=pki.ours.client(pki.client)) as client,
            ends_within(2.0),
            pytest.raises(DeadlineExceeded),
        ):
            client.call(ECHO, b"x", 0.5)


def test_closing_ends_a_handshake(pki: Pki) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        client = LaneClient(address, b"", tls=pki.ours.client(pki.client))
        failed: list[CenoteError] = []

        def call() -> None:
            try:
                client.call(ECHO, b"x", 30.0)
            except CenoteError as error:
                failed.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        with silent.accept()[0] as accepted, ends_within(3.0):
            accepted.recv(1)
            client.close()
            thread.join()
        assert [type(error).__name__ for error in failed] == ["ClientClosed"]


def test_closing_ends_a_call(tmp_path: Path, pki: Pki) -> None:
    def stop(do: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=do)
        thread.start()
        return thread

    with serving(tmp_path, pki.ours.server(pki.server)) as server:
        client = LaneClient(server.tcp_address, b"", tls=pki.ours.client(pki.client))
        assert client.call(ECHO, b"x", 10.0) == b"x"
        failed: list[CenoteError] = []

        def call() -> None:
            try:
                client.call(4, b"never", 30.0)
            except CenoteError as error:
                failed.append(error)

        thread = stop(call)
        wait_until(lambda: b"never" in server.futures, what="the call")
        with ends_within(3.0):
            client.close()
            thread.join()
        assert isinstance(failed[0], CenoteError)
        server.finish(b"never", b"")


def test_another_certificate_without_a_restart(tmp_path: Path, pki: Pki) -> None:
    now_s = [0.0]
    server_tls = pki.ours.server(pki.server, clock=lambda: now_s[0])
    client_tls = pki.ours.client(pki.client, clock=lambda: now_s[0])
    with serving(tmp_path, server_tls) as server:
        with LaneClient(server.tcp_address, b"", tls=client_tls) as client:
            assert client.call(ECHO, b"x", 10.0) == b"x"
            pki.server.replace_by(pki.others.issue("stranger"))
            now_s[0] += 2
            assert client.call(ECHO, b"y", 10.0) == b"y", "connections outlive certificates"
        assert "is of no CA in" in next(iter(refused_by_both(server, client_tls)))
        pki.server.replace_by(pki.ours.issue("renewed"))
        now_s[0] += 2
        with LaneClient(server.tcp_address, b"", tls=client_tls) as client:
            assert client.call(ECHO, b"x", 10.0) == b"x"


def test_revoked(tmp_path: Path, pki: Pki) -> None:
    now_s = [0.0]
    server_tls = pki.ours.server(pki.server, clock=lambda: now_s[0])
    other = pki.ours.issue("other")
    ours = pki.ours.client(pki.client)
    with serving(tmp_path, server_tls) as server:
        pki.ours.revoke(pki.client)
        now_s[0] += 2
        # The client's own CA file has the list as well: it looks the server up in it.
        said = refused_by_both(server, ours)
        assert all("is revoked" in text for text in said), said
        with LaneClient(server.tcp_address, b"", tls=pki.ours.client(other)) as client:
            assert client.call(ECHO, b"x", 10.0) == b"x"
    assert server_tls.trust_generation == 1


def test_broken_files_change_nothing(tmp_path: Path, pki: Pki) -> None:
    now_s = [0.0]
    tls = pki.ours.server(pki.server, clock=lambda: now_s[0])
    key, before = pki.server.key.read_bytes(), pki.server.cert.read_bytes()
    with serving(tmp_path, tls) as server:
        for path, data in (
            (pki.server.key, pki.client.key.read_bytes()),  # not that of the certificate
            (pki.server.cert, b"garbage"),
            (pki.server.cert, b""),
        ):
            path.write_bytes(data)
            now_s[0] += 2
            with LaneClient(server.tcp_address, b"", tls=pki.ours.client(pki.client)) as client:
                assert client.call(ECHO, b"x", 10.0) == b"x"
        pki.server.cert.unlink()
        now_s[0] += 2
        with LaneClient(server.tcp_address, b"", tls=pki.ours.client(pki.client)) as client:
            assert client.call(ECHO, b"x", 10.0) == b"x"
        assert tls.generation == 0
        pki.server.key.write_bytes(key)
        pki.server.cert.write_bytes(before)
        now_s[0] += 2
        tls.refresh()
        assert tls.generation == 1


def test_garbage_in_the_middle_ends_one_connection(tmp_path: Path, pki: Pki) -> None:
    with serving(tmp_path, pki.ours.server(pki.server)) as server:
        host, _, port = server.tcp_address.removeprefix("tcp://").rpartition(":")
        context = pki.ours.client(pki.client).client_context()
        raw = socket.create_connection((host, int(port)), 10)
        tls = context.wrap_socket(raw, server_hostname=host)
        with tls:
            socket.socket.send(tls, b"\x17\x03\x03\x00\x20" + bytes(32))  # past TLS
            assert socket.socket.recv(tls, 1 << 16) is not None
        raw.close()
        wait_until(lambda: not server.server.connections, what="its end")
        with LaneClient(server.tcp_address, b"", tls=pki.ours.client(pki.client)) as client:
            assert client.call(ECHO, b"x", 10.0) == b"x"


def test_what_a_plain_client_is_told_is_a_frame(tmp_path: Path, pki: Pki) -> None:
    with serving(tmp_path, pki.ours.server(pki.server)) as server:
        host, _, port = server.tcp_address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), 10) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            parser = FrameParser(1 << 20)
            parser.feed(sock.recv(1 << 16))
            frame = parser.next()
            assert frame is not None
            error = decode_error(frame[3], frame[4])
            assert isinstance(error, TlsFailed)
            assert isinstance(error, Unavailable)
            assert not isinstance(error, ProtocolError)
            assert "tls_ca" in error.remedy


def test_files_that_can_not_be_used(tmp_path: Path, pki: Pki) -> None:
    missing = TlsFiles(cert=str(tmp_path / "no.pem"), key=str(pki.server.key), ca=str(pki.ours.ca))
    mixed = TlsFiles(cert=str(pki.server.cert), key=str(pki.client.key), ca=str(pki.ours.ca))
    for files, words in ((missing, "no.pem"), (mixed, "is not that of the certificate")):
        with pytest.raises(CenoteError, match=words) as found:
            Tls(files)
        assert type(found.value).__name__ == "ConfigError"
        assert "PRIVATE" not in str(found.value)
    with pytest.raises(CenoteError, match="without tls_key"):
        Tls.for_client(TlsFiles(cert="x", ca="y"))
    with pytest.raises(CenoteError, match="no --tls-ca"):
        Tls.for_server(TlsFiles(cert="x", key="y"))
    with pytest.raises(CenoteError, match="without tls_ca"):
        Tls.for_client(TlsFiles(server_name="x"))
    assert Tls.for_client(TlsFiles()) is None
