"""How etcd is reached: an `etcd://` URL, and what does not belong into one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cenote.api.errors import ConfigError

__all__ = ["SCHEME", "EtcdOptions", "parse_etcd_url"]

SCHEME: Final = "etcd://"
PORT_DEFAULT: Final = 2379
ENDPOINTS_MAX: Final = 16
PREFIX_BYTES_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdOptions:
    """Raises ConfigError where they contradict each other."""

    endpoints: tuple[tuple[str, int], ...]
    """(host, port) of etcd's members, those asked first in front."""
    prefix: str = "/cenote"
    """All keys begin with it and a slash."""
    ca: str = ""
    """Path of the certificate that signed etcd's; '' for no TLS."""
    cert: str = ""
    """Path of our own certificate, where etcd wants one."""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not 0 < len(self.endpoints) <= ENDPOINTS_MAX:
            raise ConfigError(f"an etcd URL names 1 to {ENDPOINTS_MAX} endpoints")
        if bool(self.cert) != bool(self.key):
            raise ConfigError("--etcd-cert and --etcd-key go together")
        if self.cert and not self.ca:
            raise ConfigError("--etcd-cert without --etcd-ca", remedy="name the CA of etcd, too")
        if bool(self.user) != bool(self.password):
            raise ConfigError("--etcd-user and --etcd-password go together")
        if self.user and not self.ca:
            raise ConfigError(
                "a password for etcd would travel in the clear", remedy="use TLS: --etcd-ca"
            )

    @property
    def url(self) -> str:
        """As it may be written; holds no secret."""
        hosts = (f"[{host}]" if ":" in host else host for host, _ in self.endpoints)
        ports = (port for _, port in self.endpoints)
        joined = ",".join(f"{host}:{port}" for host, port in zip(hosts, ports, strict=True))
        return f"{SCHEME}{joined}{self.prefix}"


def parse_etcd_url(
    url: str, *, ca: str = "", cert: str = "", key: str = "", user: str = "", password: str = ""
) -> EtcdOptions:
    """`etcd://host:2379[,host…][/prefix]`. Raises ConfigError."""
    places, slash, path = url.removeprefix(SCHEME).partition("/")
    if not url.startswith(SCHEME) or not places:
        raise ConfigError(
            f"{url!r} is no etcd URL", remedy="write etcd://host:2379,host:2379/prefix"
        )
    if "@" in places:
        raise ConfigError(
            "an etcd URL holds no password", remedy="use --etcd-user and --etcd-password"
        )
    prefix = "/" + path.strip("/") if slash and path.strip("/") else "/cenote"
    if len(prefix.encode()) > PREFIX_BYTES_MAX or not prefix.isprintable() or "," in prefix:
        raise ConfigError(
            f"{prefix!r} is no prefix for keys", remedy="write etcd://host:2379,host:2379/prefix"
        )
    endpoints = tuple(_endpoint(place.strip(), url) for place in places.split(","))
    return EtcdOptions(
        endpoints=endpoints, prefix=prefix, ca=ca, cert=cert, key=key, user=user, password=password
    )


def _endpoint(place: str, url: str) -> tuple[str, int]:
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]"):
        host, port = place, str(PORT_DEFAULT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{place!r} in {url!r} is no endpoint", remedy="write host:2379")
    return host, int(port)
