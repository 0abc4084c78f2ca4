"""One-sided access over RDMA: channels to daemons that have a NIC in reach of one of this host's.

`rdma_channel` says how a channel works and what it promises.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Final, final

from cenote.api.errors import ClientClosed, InvalidArgument, ProtocolError, Unavailable
from cenote.runtime.cuda import DmaBuf, export_dmabuf
from cenote.security.tls import Tls
from cenote.v1 import common_pb2

from .access import NO_MAPPING
from .base import Region, SessionIdentity
from .nics.advertised import decode_ports
from .nics.choice import PathChoice, choose_paths, place_of_process
from .nics.facts import Place
from .nics.filters import DeviceFilter
from .nics.routing import Route, RouteQuery, ask_route
from .nics.sysfs import read_numa_cpus, read_pci_place
from .opening import parse_target
from .pool import ConnectionPool, hello_for
from .rdma_channel import RdmaChannel
from .rdma_lane import LaneSettings
from .rdma_lanes import RdmaCounters
from .rdma_memory import BLOCKS_MAX, LocalMemory
from .rdma_mover import SPIN_S
from .rdma_nics import Nics, find_nics

__all__ = ["RdmaTransport", "open_rdma_transport"]

_SETTINGS: Final = LaneSettings()


@final
class RdmaTransport:
    """Channels over RDMA.

    `nics`: the devices to use; closed with the transport. `lanes_per_peer` bounds the calls that
    are under way to one daemon at once, and with it the queue pairs: two for each path and lane.
    `staging_blocks_max`: of 4 MiB each, for memory that is not registered. `place`: where memory
    is that will be moved; None: on the NUMA node that this process is bound to, if it is, and later
    near the GPU whose memory was registered last.
    """

    kind = common_pb2.TRANSPORT_KIND_RDMA

    def __init__(
        self,
        nics: Nics,
        *,
        lanes_per_peer: int = 4,
        staging_blocks_max: int = BLOCKS_MAX,
        settings: LaneSettings = _SETTINGS,
        spin_s: float = SPIN_S,
        ask_route: Callable[[RouteQuery], Route] = ask_route,
        place: Place | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        if lanes_per_peer < 1 or staging_blocks_max < 1:
            raise InvalidArgument("lanes_per_peer and staging_blocks_max must be at least 1")
        self.counters = RdmaCounters()
        self.memory = LocalMemory(nics, blocks_max=staging_blocks_max)
        self._nics = nics
        self._lanes_per_peer = lanes_per_peer
        self._settings = settings
        self._spin_s = spin_s
        self._ask_route = ask_route
        if place is None:
            place = place_of_process(os.sched_getaffinity(0), read_numa_cpus())
        self._place = place
        self._spread = itertools.count(os.getpid())
        self._channels: weakref.WeakSet[RdmaChannel] = weakref.WeakSet()
        self._closed = False

    def obstacle(self, node: common_pb2.NodeView, identity: SessionIdentity) -> str | None:
        if not any(endpoint.kind == self.kind for endpoint in node.endpoints):
            return "the node offers no RDMA"
        if identity.access.no_mapping:
            return NO_MAPPING
        try:
            return self.paths_to(node).obstacle
        except Unavailable as error:
            return error.message

    def paths_to(self, node: common_pb2.NodeView) -> PathChoice:
        """The pairs of ports that connect this host with the node, and the ports that have none."""
        for endpoint in node.endpoints:
            if endpoint.kind == self.kind:
                try:
                    peer_ports = decode_ports(endpoint.device_info)
                except ProtocolError as error:
                    raise Unavailable(f"node {node.name or node.node_id}: {error}") from error
                return choose_paths(
                    self._nics.ports,
                    peer_ports,
                    self._ask_route,
                    place=self._place,
                    spread=next(self._spread),
                )
        return PathChoice(())

    def register(self, address: int, length: int, keeper: object) -> Region:
        return self.memory.register(address, length, keeper)

    def register_device(
        self,
        address: int,
        length: int,
        keeper: object,
        export: Callable[[int, int], DmaBuf] = export_dmabuf,
        *,
        bus_address: str = "",
    ) -> Region:
        """As `register`, for memory of a GPU. Extents are then read and written there directly, by
        this transport alone: what can't go over RDMA fails, since no processor may touch it.

        `bus_address`: of the GPU, as in "0000:3b:00.0". Channels that are made from now on use the
        NICs near it first, and those of its NUMA node before others.
        Raises InvalidBuffer, InvalidArgument, ResourceUnavailable (the driver exports none, or a
        NIC takes none), which says what would help.
        """
        with export(address, length) as buffer:
            region = self.memory.register_dmabuf(buffer, address, length, keeper)
        if bus_address:
            place = read_pci_place(bus_address)
            if place != Place():
                self._place = place
        return region

    def deregister(self, region: Region) -> None:
        self.memory.deregister(region)

    def connect(
        self, node: common_pb2.NodeView, identity: SessionIdentity, epoch: int, deadline_s: float
    ) -> RdmaChannel:
        if self._closed:
            raise ClientClosed("the RDMA transport is closed")
        target = next(
            (parse_target(e.address) for e in node.endpoints if e.kind == self.kind), None
        )
        if target is None:
            raise Unavailable(f"node {node.name or node.node_id} has no RDMA address")
        choice = self.paths_to(node)
        if choice.obstacle is not None:
            raise Unavailable(
                f"no NIC of this host reaches node {node.name or node.node_id}: {choice.obstacle}"
            )
        name = f"{node.name or f'node {node.node_id}'} ({target[0]}:{target[1]})"
        pool = ConnectionPool(
            target,
            name,
            hello_for(identity, epoch, writer=True),
            self._lanes_per_peer,
            on_closed=lambda connection: channel.closed(connection),
            access=identity.access,
            tls=self._tls,
        )
        channel = RdmaChannel(
            pool,
            node.node_id,
            epoch,
            self._nics,
            self.memory,
            choice.paths,
            self._settings,
            self.counters,
            self._spin_s,
        )
        try:
            channel.open(deadline_s)
        except BaseException:  # whatever it was, no socket may stay open
            channel.close()
            raise
        self._channels.add(channel)
        return channel

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for channel in list(self._channels):
            channel.close()
        if self.memory.close():
            self._nics.close()


def open_rdma_transport(
    verbs: str = "auto",
    devices: Sequence[str] = (),
    gid_index: int = -1,
    spin_s: float = SPIN_S,
    tls: Tls | None = None,
) -> RdmaTransport:
    """A transport over this host's devices: those that `devices` allows (see `DeviceFilter`).

    `spin_s`: look for completions for so long before sleeping until they come; 0 never.

    Raises ResourceUnavailable where none can be used, ConfigError.
    """
    allowed = DeviceFilter.parse(devices)
    nics = find_nics(verbs, allowed, gid_index=None if gid_index < 0 else gid_index)
    return RdmaTransport(nics, spin_s=spin_s, tls=tls)
