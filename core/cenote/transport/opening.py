"""Opening a data connection: addresses, hellos, and the descriptors that come with the answer."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final, NamedTuple

from cenote.api.errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidArgument,
    ProtocolError,
    ResourceUnavailable,
    TlsFailed,
    Unavailable,
)
from cenote.security.tls import Tls
from cenote.security.tls_socket import begin_tls
from cenote.v1 import store_pb2

from . import wire
from .connection import DataConnection, enlarge_buffers

__all__ = [
    "TLS_SCHEME",
    "Target",
    "TlsTarget",
    "close_all",
    "connect",
    "greet",
    "parse_host_port",
    "parse_target",
    "shake_hands",
]

_KEEPALIVE: Final = (
    (socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1),
    (socket.TCP_KEEPIDLE, socket.IPPROTO_TCP, 10),
    (socket.TCP_KEEPINTVL, socket.IPPROTO_TCP, 5),
    (socket.TCP_KEEPCNT, socket.IPPROTO_TCP, 3),
)
_SOL: Final = socket.SOL_SOCKET

TLS_SCHEME: Final = "tls://"


class TlsTarget(NamedTuple):
    """Where a daemon listens that speaks TLS."""

    host: str
    port: int


Target = tuple[str, int] | TlsTarget | str
"""Where a daemon listens: (host, port), or the path of its Unix socket."""


def parse_target(text: str) -> Target:
    """`host:port`, or `tls://host:port`, as endpoints have it. Raises InvalidArgument."""
    if text.startswith(TLS_SCHEME):
        return TlsTarget(*parse_host_port(text.removeprefix(TLS_SCHEME)))
    return parse_host_port(text)


def parse_host_port(text: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`. Raises InvalidArgument."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
        raise InvalidArgument(
            f"{text!r} is no data address", remedy="use host:port, or [host]:port for IPv6"
        )
    return host, int(port)


def connect(target: Target, name: str, deadline: float, spin_s: float = 0.0) -> DataConnection:
    """A connected socket, without TLS, and not greeted yet.

    Raises Unavailable, DeadlineExceeded, ResourceUnavailable (out of descriptors).
    """
    if isinstance(target, str):
        attempts: list[tuple[int, Any]] = [(socket.AF_UNIX, target)]
    else:
        attempts = _resolve(*target, deadline)
    refused: OSError | None = None
    for family, address in attempts:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise ResourceUnavailable(f"no socket to reach {name}: {error}") from error
        connection = DataConnection(sock, name, spin_s)
        try:
            sock.settimeout(None)  # whatever the program's default is
            connection.begin(deadline, monotonic())
            enlarge_buffers(sock)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for option, level, value in _KEEPALIVE:
                    sock.setsockopt(level, option, value)
            sock.connect(address)  # bounded by SO_SNDTIMEO
        except BlockingIOError as error:
            connection.close()
            raise DeadlineExceeded(f"{name} did not accept before the deadline") from error
        except OSError as error:
            connection.close()
            refused = error
            continue
        except BaseException:  # whatever it was, the socket must not stay open
            connection.close()
            raise
        return connection
    raise Unavailable(f"can't connect to {name} at {target}: {refused}")


def shake_hands(
    connection: DataConnection, target: Target, deadline: float, tls: Tls | None
) -> None:
    """Put a new connection on TLS, where the target says so; `shut_down` ends it early.

    Raises TlsFailed, DeadlineExceeded, ClientClosed.
    """
    if not isinstance(target, TlsTarget):
        return
    if tls is None:
        raise TlsFailed(
            f"{connection.name} speaks TLS alone",
            remedy="give tls_ca, the CA that signed its certificate (CENOTE_CLIENT_TLS_CA)",
        )
    raw = connection.sock
    assert isinstance(raw, socket.socket)

    def check() -> None:
        if connection.closing:
            raise ClientClosed("the channel was closed during the call")

    wrapped = begin_tls(raw, tls, connection.name, deadline, host=target.host, check=check)
    connection.put_on_tls(wrapped)
    connection.begin(deadline, monotonic())


def _resolve(host: str, port: int, deadline: float) -> list[tuple[int, Any]]:
    """Addresses of a host. The system's resolver can't be interrupted, so it gets a thread."""
    found: list[tuple[int, Any]] = []
    failed: list[OSError] = []

    def look_up(flags: int) -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        except OSError as error:
            failed.append(error)
        else:
            found.extend((info[0], info[4]) for info in infos)

    look_up(socket.AI_NUMERICHOST)
    if found:
        return found
    failed.clear()
    thread = threading.Thread(target=look_up, args=(0,), name="cenote-resolve", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - monotonic()))
    if thread.is_alive():
        raise DeadlineExceeded(f"the name {host!r} was not resolved before the deadline")
    if failed:
        raise Unavailable(f"the name {host!r} can't be resolved: {failed[0]}") from failed[0]
    return found


def greet(
    connection: DataConnection, hello: store_pb2.DataHelloRequest
) -> tuple[store_pb2.DataHelloResponse, list[int]]:
    """Exchange hellos: the daemon's answer, and the descriptors that came with it.

    Raises what the daemon refused with (Unauthenticated, GrantRevoked, ResourceUnavailable,
    ProtocolVersionMismatch …) beside a connection's errors.
    """
    try:
        connection.sock.sendall(wire.encode_hello(hello))
    except BlockingIOError:
        connection.stalled()
        connection.lost("it takes no hello")
    except OSError:
        pass  # it may have refused already: then it said why, which is read below
    descriptors: list[int] = []
    try:
        head = _receive_with_descriptors(connection, wire.HELLO_REPLY.size, descriptors)
        code, length = wire.hello_reply_length(head)
        body = bytearray(length)
        connection.receive_view(memoryview(body))
        response = wire.decode_hello_reply(code, body)
        wanted = 0
        if hello.want_descriptors:
            wanted = len(response.segments) + response.has_claims + response.has_head
            wanted += bool(response.staging_id)
        while len(descriptors) < wanted:
            _receive_with_descriptors(connection, 1, descriptors)
        if len(descriptors) != wanted:
            raise ProtocolError(f"{len(descriptors)} descriptors came, {wanted} are due")
    except BaseException:  # whatever it was, the descriptors must not stay open
        close_all(descriptors)
        raise
    return response, descriptors


def _receive_with_descriptors(
    connection: DataConnection, length: int, descriptors: list[int]
) -> bytes:
    """Exactly `length` bytes; descriptors that come with the first are appended."""
    room = socket.CMSG_SPACE(wire.DESCRIPTORS_PER_MESSAGE * 4)
    received = b""
    while len(received) < length:
        try:
            data, extras, flags, _ = connection.sock.recvmsg(
                length - len(received), room, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            connection.stalled()
            continue
        except OSError as error:
            connection.lost(error)
        for level, kind, payload in extras:
            if (level, kind) == (_SOL, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) // 4 * 4])
                descriptors.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            raise ResourceUnavailable(
                "this process has no room for the descriptors of all segments",
                remedy="raise the limit of open files (ulimit -n)",
            )
        if not data:
            connection.lost("it was closed during the hello")
        received += data
        connection.look_at_clock()
    return received


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors, each of them whatever happens to the others."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
