"""A TlsSocket means by its calls what a plain socket means."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from cenote.security.tls import identities_of
from cenote.security.tls_socket import TlsSocket, begin_tls, looks_like_tls
from cenote.transport.connection import timeval
from promptness import ends_within
from tls_kit import Authority

Pair = tuple[TlsSocket, TlsSocket]
_WAITALL = int(socket.MSG_WAITALL)
_DONTWAIT = int(socket.MSG_DONTWAIT)
_MORE = int(socket.MSG_MORE)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    authority = Authority(tmp_path)
    server_tls = authority.server(authority.issue("server"))
    client_tls = authority.client(authority.issue("client", cn="ann"), "localhost")
    one, other = socket.socketpair()
    made: list[TlsSocket] = []

    def serve() -> None:
        made.append(begin_tls(other, server_tls, "it", monotonic() + 20, server_side=True))

    thread = threading.Thread(target=serve)
    thread.start()
    client = begin_tls(one, client_tls, "it", monotonic() + 20, host="localhost")
    thread.join(20)
    yield client, made[0]
    client.close()
    made[0].close()


def timeouts(sock: TlsSocket, seconds: float) -> None:
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, timeval(seconds))


def test_bytes_arrive_as_they_were_sent(pair: Pair) -> None:
    client, server = pair
    sent = bytes(range(256)) * 4096
    thread = threading.Thread(target=client.sendall, args=(sent,))
    thread.start()
    got = bytearray(len(sent))
    assert server.recv_into(got, len(got), _WAITALL) == len(sent)
    thread.join(20)
    assert got == sent


def test_scattered_buffers(pair: Pair) -> None:
    client, server = pair
    parts = [bytes([n]) * size for n, size in enumerate((1, 40_000, 0, 16, 4096, 16 << 10, 7))]
    total = sum(map(len, parts))
    thread = threading.Thread(target=client.sendmsg, args=(parts,))
    thread.start()
    into = [memoryview(bytearray(len(part))) for part in parts if part]
    assert server.recvmsg_into(into, 0, _WAITALL)[0] == total
    thread.join(20)
    assert [bytes(view) for view in into] == [part for part in parts if part]


def test_more_waits_for_what_follows(pair: Pair) -> None:
    client, server = pair
    assert client.send(b"head", _MORE) == 4
    with pytest.raises(BlockingIOError):
        server.recv(10, _DONTWAIT)
    body = b"body" * 10_000
    thread = threading.Thread(target=client.sendall, args=(body,))
    thread.start()
    got = bytearray(4 + len(body))
    assert server.recv_into(got, len(got), _WAITALL) == len(got)
    thread.join(20)
    assert got == b"head" + body


def test_waits_end_in_time(pair: Pair) -> None:
    client, server = pair
    timeouts(server, 0.05)
    with ends_within(2.0), pytest.raises(BlockingIOError):
        server.recv_into(bytearray(8), 8, _WAITALL)
    client.send(b"half")
    with ends_within(2.0):
        assert server.recv_into(bytearray(8), 8, _WAITALL) == 4
    timeouts(client, 0.05)
    with ends_within(5.0):
        sent = client.send(bytes(64 << 20))
    assert 0 < sent < 64 << 20, "nobody receives"


def test_what_never_waits(pair: Pair) -> None:
    client, server = pair
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.recv_into(bytearray(8))
    client.send(b"12345678")
    got = bytearray(4)
    while True:
        try:
            assert server.recv_into(got) == 4
            break
        except BlockingIOError:
            continue
    assert server.pending() == 4
    assert server.recv(1, socket.MSG_PEEK | _DONTWAIT) != b""
    assert server.recv(8) == b"5678"


def test_an_end_is_seen_and_can_be_answered(pair: Pair) -> None:
    client, server = pair
    waiting: list[int] = []

    def receive() -> None:
        waiting.append(server.recv_into(bytearray(8), 8, _WAITALL))

    thread = threading.Thread(target=receive)
    thread.start()
    with ends_within(2.0):
        server.shutdown(socket.SHUT_RD)  # from another thread, as a daemon revokes
        thread.join(20)
    assert waiting == [0]
    server.send(b"why")
    assert client.recv(10) == b"why"
    server.close()
    assert client.recv(10) == b""


def test_whose_certificate_it_is(pair: Pair) -> None:
    _, server = pair
    assert server.identities == ("dns:localhost", "cn:ann")
    subject = ((("organizationName", "x"),), (("commonName", "C"),))
    names = (("DNS", "A.example"), ("URI", "spiffe://p/A"), ("IP Address", "1.2.3.4"))
    said = identities_of({"subject": subject, "subjectAltName": names})
    assert said == ("uri:spiffe://p/A", "dns:a.example", "cn:C")
    assert identities_of(None) == identities_of({}) == ()


def test_what_tls_begins_with() -> None:
    assert looks_like_tls(b"\x16\x03\x01")
    for first in (b"\x16\x03\x00", b"\x16\x02\x01", b"GET", b"\x00\x00\x00", b"cen"):
        assert not looks_like_tls(first)
