"""Addresses of the metadata lane: `tcp://host:port`, `host:port`, `[v6]:port`, `unix:///path`."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from cenote.api.errors import ConfigError, InvalidArgument

__all__ = [
    "UNIX_PATH_BYTES_MAX",
    "Address",
    "host_and_port",
    "is_loopback",
    "joined",
    "parse_address",
    "refuse_open_ports",
]

UNIX_PATH_BYTES_MAX = 107  # sockaddr_un.sun_path less its NUL; longer ones fail obscurely

_FORMS = "use tcp://host:port, host:port or unix:///absolute/path"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a lane server listens: a Unix socket when `path` is set, otherwise TCP."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def host_and_port(address: str, name: str) -> tuple[str, int]:
    """("::1", 5120) for "[::1]:5120"; port 0 takes a free one. `name`: of the flag. Raises
    ConfigError."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    ambiguous = ":" in bare and host == bare
    wrong_port = not port.isascii() or not port.isdigit() or int(port) > 65535
    if not colon or not bare or ambiguous or wrong_port:
        raise ConfigError(f"--{name} {address!r} is no address", remedy="write host:port")
    return bare, int(port)


def joined(host: str, port: int) -> str:
    """The reverse of `host_and_port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether nobody but this host can reach what listens on `host`, as far as its form tells."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name: what it stands for may change
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def refuse_open_ports(flags: Iterable[tuple[str, str, str]], credentials: str) -> None:
    """For a daemon that asks nobody who he is: it may listen on loopback alone.

    `flags`: (flag, what it was given, its host), of each port; `credentials`: the flags that would
    make it ask. Raises ConfigError.
    """
    for flag, given, host in flags:
        if not is_loopback(host):
            raise ConfigError(
                f"{flag} {given} is open to the network, and without credentials nobody would be"
                " asked who he is",
                remedy=f"give {credentials} (`cenote token init` makes what it takes; see"
                " docs/security.md), or --insecure where all who reach this address may read and"
                " write the pool",
            )


def parse_address(text: str) -> Address:
    """The address that `text` names. Raises InvalidArgument."""
    if text.startswith("unix:"):
        return _parse_unix(text)
    rest = text.removeprefix("tcp://")
    if "://" in rest:
        raise InvalidArgument(f"address {text!r} has an unknown scheme", remedy=_FORMS)
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        port_text = tail.removeprefix(":") if bracket and tail.startswith(":") else ""
    else:
        host, _, port_text = rest.rpartition(":")
        if ":" in host:
            raise InvalidArgument(
                f"address {text!r} is ambiguous", remedy="write IPv6 hosts as [::1]:port"
            )
    if not host or not port_text.isascii() or not port_text.isdigit():
        raise InvalidArgument(f"address {text!r} has no host or no port", remedy=_FORMS)
    port = int(port_text)
    if not 0 < port < 65536:
        raise InvalidArgument(f"address {text!r}: the port must be 1 to 65535")
    return Address(host=host, port=port)


def _parse_unix(text: str) -> Address:
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        path = path[2:]
    if not path.startswith("/") or "\x00" in path:
        raise InvalidArgument(f"address {text!r} needs an absolute path", remedy=_FORMS)
    if len(path.encode()) > UNIX_PATH_BYTES_MAX:
        raise InvalidArgument(
            f"the Unix socket path {path!r} has more than {UNIX_PATH_BYTES_MAX} bytes",
            remedy="use a shorter directory",
        )
    return Address(path=path)
