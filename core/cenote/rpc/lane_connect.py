"""Connecting a stream socket to a lane address within a deadline, whatever the network does."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from cenote.api.errors import ClientClosed, DeadlineExceeded, Unavailable

from .address import Address

__all__ = ["Cancelled", "connect_socket", "unreachable"]

Cancelled = Callable[[], bool]
_Target = tuple[int, Any]  # address family, sockaddr

_SLICE_S = 0.05  # how often a waiting connect looks whether its client was closed


def unreachable(address: Address, why: object) -> Unavailable:
    """The error for a server that can't be talked to; it names the address and what to check."""
    if isinstance(why, OSError) and why.errno:
        why = os.strerror(why.errno)
    return Unavailable(
        f"no connection to {address}: {why}",
        remedy="check that the server runs and listens on this address",
    )


def connect_socket(
    address: Address, until_s: float, clock: Callable[[], float], cancelled: Cancelled
) -> socket.socket:
    """A connected non-blocking socket (TCP: without delay).

    `until_s` is on `clock`. Raises Unavailable when nobody accepts, DeadlineExceeded when nothing
    was heard until `until_s`, ClientClosed when `cancelled()` turns true.
    """
    failure: OSError | None = None
    for family, target in _targets(address, until_s, clock, cancelled):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _connect(sock, target, until_s, clock, cancelled)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise unreachable(address, failure or "the name has no address") from failure


def _connect(
    sock: socket.socket,
    target: Any,
    until_s: float,
    clock: Callable[[], float],
    cancelled: Cancelled,
) -> None:
    code = sock.connect_ex(target)
    if code == 0:
        return
    if code not in (errno.EINPROGRESS, errno.EINTR):  # EAGAIN: a Unix server's backlog is full
        raise OSError(code, os.strerror(code))
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    while not poll.poll(_slice_s(until_s, clock, cancelled) * 1000):
        pass
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _slice_s(until_s: float, clock: Callable[[], float], cancelled: Cancelled) -> float:
    if cancelled():
        raise ClientClosed("the client was closed while it was connecting")
    left_s = until_s - clock()
    if left_s <= 0:
        raise DeadlineExceeded("nobody answered the connection attempt in time")
    return min(left_s, _SLICE_S)


def _targets(
    address: Address, until_s: float, clock: Callable[[], float], cancelled: Cancelled
) -> list[_Target]:
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    try:
        return _lookup(address, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # a name: ask the resolver
    # getaddrinfo can't be given a deadline and may sit in DNS timeouts for half a minute. It runs
    # in a thread of its own, which ends with the lookup and which nobody has to wait for.
    found: list[_Target] = []
    failed: list[OSError] = []
    done = threading.Event()

    def look_up() -> None:
        try:
            found.extend(_lookup(address, 0))
        except OSError as error:
            failed.append(error)
        finally:
            done.set()

    threading.Thread(target=look_up, name="cenote-resolve", daemon=True).start()
    while not done.wait(_slice_s(until_s, clock, cancelled)):
        pass
    if failed:
        raise unreachable(address, failed[0].strerror or failed[0]) from failed[0]
    return found


def _lookup(address: Address, flags: int) -> list[_Target]:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    return [(entry[0], entry[4]) for entry in found]
