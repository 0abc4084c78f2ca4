"""Asking the kernel how it would route between two addresses.

The kernel resolves the way of a RoCE connection by the address and the network device of the local
GID, rules of policy routing included. So it is asked just that, over netlink; reading the routing
tables would give another answer on hosts with several NICs, which have rules as a rule.
"""

from __future__ import annotations

import errno
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Final

__all__ = ["Route", "RouteQuery", "ask_route"]

Address = IPv4Address | IPv6Address

_TIMEOUT_S: Final = 0.5  # the kernel answers at once; only a fault of its own makes one wait
_REPLY_BYTES_MAX: Final = 16_384
_HEADER: Final = struct.Struct("=IHHII")
_ROUTE: Final = struct.Struct("=BBBBBBBBI")
_ATTRIBUTE: Final = struct.Struct("=HH")
_RTM_NEWROUTE: Final = 24
_RTM_GETROUTE: Final = 26
_NLMSG_ERROR: Final = 2
_NLM_F_REQUEST: Final = 1
_RTM_F_LOOKUP_TABLE: Final = 0x1000
_RTA_DST, _RTA_SRC, _RTA_OIF, _RTA_GATEWAY, _RTA_TABLE, _RTA_VIA = 1, 2, 4, 5, 15, 18
_RTN_UNICAST: Final = 1
_RTN_LOCAL: Final = 2
_NO_ROUTE: Final = frozenset(
    {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL, errno.EACCES, errno.ENODEV}
)


class Route(IntEnum):
    """How an address is reached from another one; less is better."""

    LOCAL = 0
    """It is this host's own."""
    DIRECT = 1
    """On the link."""
    GATEWAY = 2
    UNKNOWN = 3
    """The kernel could not be asked."""
    NONE = 4


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """From the address `source` of the network device `netdev` to `target`."""

    source: Address
    netdev: str
    target: Address


def ask_route(query: RouteQuery) -> Route:
    """The kernel's answer, within half a second. UNKNOWN where it can't be asked."""
    if query.source.version != query.target.version:
        return Route.NONE
    try:
        index = socket.if_nametoindex(query.netdev) if query.netdev else 0
    except OSError:
        return Route.NONE  # there is no such device (any more), or not in this namespace
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
            sock.settimeout(_TIMEOUT_S)
            sock.bind((0, 0))
            sock.send(_request(query, index))
            reply = sock.recv(_REPLY_BYTES_MAX)
    except OSError:
        return Route.UNKNOWN
    return _parse(reply)


def _request(query: RouteQuery, netdev_index: int) -> bytes:
    bits = query.target.max_prefixlen
    family = socket.AF_INET if query.target.version == 4 else socket.AF_INET6
    body = _ROUTE.pack(family, bits, bits, 0, 0, 0, 0, 0, _RTM_F_LOOKUP_TABLE)
    body += _attribute(_RTA_DST, query.target.packed) + _attribute(_RTA_SRC, query.source.packed)
    if netdev_index:
        body += _attribute(_RTA_OIF, struct.pack("=I", netdev_index))
    length = _HEADER.size + len(body)
    return _HEADER.pack(length, _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value  # lengths here are 4n


def _parse(reply: bytes) -> Route:
    if len(reply) < _HEADER.size:
        return Route.UNKNOWN
    length, kind, *_ = _HEADER.unpack_from(reply)
    if kind == _NLMSG_ERROR and len(reply) >= _HEADER.size + 4:
        (code,) = struct.unpack_from("=i", reply, _HEADER.size)
        return Route.NONE if -code in _NO_ROUTE else Route.UNKNOWN
    if kind != _RTM_NEWROUTE or len(reply) < _HEADER.size + _ROUTE.size:
        return Route.UNKNOWN
    route_type = _ROUTE.unpack_from(reply, _HEADER.size)[7]
    attributes = _attributes(reply[_HEADER.size + _ROUTE.size : length])
    if route_type == _RTN_LOCAL:
        return Route.LOCAL
    # Given a device and no route, IPv4 takes everything to be on its link; then no table has it.
    table = attributes.get(_RTA_TABLE, b"")
    if route_type != _RTN_UNICAST or not any(table):
        return Route.NONE
    return Route.GATEWAY if attributes.keys() & {_RTA_GATEWAY, _RTA_VIA} else Route.DIRECT


def _attributes(data: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = data[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return found
