"""From a client's configuration to its masters, by their addresses or by the etcd they are in."""

from __future__ import annotations

from collections.abc import Callable

from cenote.rpc.lane_client import SPIN_POLLS_DEFAULT
from cenote.security.tls import Tls
from cenote.v1 import master_pb2 as pb

from .config import ClientConfig
from .master_stub import LaneMaster

__all__ = ["reach_masters"]


def reach_masters(
    config: ClientConfig,
    hello: pb.HelloRequest,
    greeted: Callable[[pb.HelloResponse], None],
    tls: Tls | None = None,
) -> LaneMaster:
    """Raises Unavailable, Unauthenticated and ConfigError where they can't be looked up."""
    directory, addresses = config.directory(), config.addresses
    if directory is not None:
        places = directory.wait(config.deadline_s)
        addresses = tuple(address for place in places for address in place.addresses)
    return LaneMaster(
        addresses,
        hello,
        on_hello=greeted,
        directory=directory,
        tls=tls,
        spin_polls=0 if config.gives_way else SPIN_POLLS_DEFAULT,
    )
