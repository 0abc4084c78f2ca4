"""The transports of a client, as it was configured and as the machine has them."""

from __future__ import annotations

from typing import Final

from cenote.api.errors import ConfigError, ResourceUnavailable
from cenote.security.tls import Tls
from cenote.transport.absent import AbsentTransport
from cenote.transport.base import Transport
from cenote.v1 import common_pb2

from .config import ClientConfig

__all__ = ["make_transports"]

_KINDS: Final = {
    "shm": common_pb2.TRANSPORT_KIND_SHM,
    "rdma": common_pb2.TRANSPORT_KIND_RDMA,
    "tcp": common_pb2.TRANSPORT_KIND_TCP,
}


def make_transports(config: ClientConfig, tls: Tls | None = None) -> list[Transport]:
    """In the order of `config.transports`. For RDMA where this host has none stands something that
    says why, unless it is all that was asked for.

    Raises ConfigError, ResourceUnavailable.
    """
    unknown = [name for name in config.transports if name not in _KINDS]
    if unknown:
        raise ConfigError(
            f"there is no transport {unknown[0]!r}", remedy="one of: " + ", ".join(_KINDS)
        )
    made: list[Transport] = []
    for name in config.transports:
        try:
            made.append(_make(name, config, tls))
        except ResourceUnavailable as error:
            if set(config.transports) == {name}:
                raise
            made.append(AbsentTransport(_KINDS[name], error.message))
    return made


def _make(name: str, config: ClientConfig, tls: Tls | None) -> Transport:
    # Each is imported when it is wanted: together they take as long as a small program.
    if name == "shm":
        from cenote.transport.shm import ShmTransport

        return ShmTransport()
    if name == "rdma":
        from cenote.transport.rdma import open_rdma_transport

        return open_rdma_transport(
            config.verbs,
            config.rdma_devices,
            config.rdma_gid_index,
            tls=tls,
            **({"spin_s": 0.0} if config.gives_way else {}),
        )
    from cenote.transport.tcp import SPIN_S, TcpTransport

    return TcpTransport(tls=tls, spin_s=0.0 if config.gives_way else SPIN_S)
