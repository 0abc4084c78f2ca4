"""The transports of simulated clients: what makes their channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cenote.transport.base import Region, SessionIdentity
from cenote.v1 import common_pb2
from sim.data_path import ShmChannel, TcpChannel
from sim.loop import Party

if TYPE_CHECKING:
    from sim.world import World

__all__ = ["SimShm", "SimTcp", "SimTransport"]


class SimTransport:
    def __init__(self, world: World, party: Party, boot_id: Callable[[], str]) -> None:
        self._world = world
        self._party = party
        self._boot_id = boot_id
        self._channels: list[Any] = []

    def register(self, address: int, length: int, keeper: object) -> Region:
        return Region(address, length, keeper)

    def deregister(self, region: Region) -> None:
        pass

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


class SimTcp(SimTransport):
    kind = common_pb2.TRANSPORT_KIND_TCP

    def obstacle(self, node: common_pb2.NodeView, identity: SessionIdentity) -> str | None:
        return None

    def connect(
        self, node: common_pb2.NodeView, identity: SessionIdentity, epoch: int, deadline_s: float
    ) -> TcpChannel:
        channel = TcpChannel(self._world, self._party, node, identity, epoch=epoch)
        until_s = self._world.loop.now_s + deadline_s
        channel._idle.append(channel._take(until_s))
        self._channels.append(channel)
        return channel


class SimShm(SimTransport):
    kind = common_pb2.TRANSPORT_KIND_SHM

    def obstacle(self, node: common_pb2.NodeView, identity: SessionIdentity) -> str | None:
        if not node.boot_id or node.boot_id != identity.boot_id:
            return "another host"
        if self._world.loop.now_s < self._world.sockets_hidden_until_s:
            return "its socket is hidden"
        return None

    def connect(
        self, node: common_pb2.NodeView, identity: SessionIdentity, epoch: int, deadline_s: float
    ) -> ShmChannel:
        channel = ShmChannel(self._world, self._party, node, identity, epoch=epoch)
        try:
            channel.open(deadline_s)
        except BaseException:
            channel.close()
            raise
        self._channels.append(channel)
        return channel
