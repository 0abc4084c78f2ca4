"""The transports of a client, as it was configured and as the machine has them."""

from __future__ import annotations

from cenote.api.errors import ConfigError, ResourceUnavailable
from cenote.runtime.log import get_logger
from cenote.transport.base import Transport

from .config import ClientConfig

__all__ = ["make_transports"]

_NAMES = ("shm", "rdma", "tcp")

_log = get_logger(__name__)


def make_transports(config: ClientConfig) -> list[Transport]:
    """In the order of `config.transports`. RDMA is left out where this host has none, unless it is
    all that was asked for.

    Raises ConfigError, ResourceUnavailable.
    """
    unknown = [name for name in config.transports if name not in _NAMES]
    if unknown:
        raise ConfigError(
            f"there is no transport {unknown[0]!r}", remedy="one of: " + ", ".join(_NAMES)
        )
    made: list[Transport] = []
    for name in config.transports:
        try:
            made.append(_make(name, config))
        except ResourceUnavailable as error:
            if set(config.transports) == {name}:
                raise
            _log.debug("a transport is left out", transport=name, why=error.message)
    return made


def _make(name: str, config: ClientConfig) -> Transport:
    # Each is imported when it is wanted: together they take as long as a small program.
    if name == "shm":
        from cenote.transport.shm import ShmTransport

        return ShmTransport()
    if name == "rdma":
        from cenote.transport.rdma import open_rdma_transport

        return open_rdma_transport(config.verbs, config.rdma_devices, config.rdma_gid_index)
    from cenote.transport.tcp import TcpTransport

    return TcpTransport()
