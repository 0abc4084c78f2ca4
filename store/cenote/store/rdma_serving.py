"""Whether this daemon serves over RDMA: as it was told, and as the machine has it.

A port that can't be used when the daemon starts (its link is down, it has no address yet) is looked
at again now and then, and served from when it can be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, final

from cenote.api.errors import CenoteError, ResourceUnavailable
from cenote.runtime.log import get_logger
from cenote.transport.nics.advertised import encode_ports
from cenote.transport.nics.choice import advertised, usable_ports
from cenote.transport.nics.facts import NicPort
from cenote.transport.nics.filters import DeviceFilter
from cenote.transport.nics.sysfs import read_netdevs, read_ports
from cenote.transport.rdma_nics import Nics, find_nics
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb

from .config import StoreConfig
from .rdma_host import RdmaHost
from .segment import SegmentSet

__all__ = ["RdmaServing", "rdma_endpoint"]

LOOK_S: Final = 5.0
"""Some dozen files of each port are read."""
_TROUBLE_CHARACTERS_MAX: Final = 500

_log = get_logger("cenote.store.rdma")


@final
class RdmaServing:
    """The daemon's RDMA end, which may come late and grow.

    `open` once; `start` has it look for more until `close`. `on_change` is called, in that thread,
    when there is a host, or one with more ports.
    """

    def __init__(
        self,
        config: StoreConfig,
        segments: SegmentSet,
        on_change: Callable[[RdmaHost], None],
        *,
        look_s: float = LOOK_S,
        find: Callable[..., Nics] = find_nics,
        ports: Callable[[], list[NicPort]] = read_ports,
    ) -> None:
        self._config = config
        self._allowed = DeviceFilter.parse(config.rdma_devices)
        self._gid_index = None if config.rdma_gid_index < 0 else config.rdma_gid_index
        self._segments = segments
        self._on_change = on_change
        self._look_s = look_s
        self._find = find
        self._read_ports = ports
        self.host: RdmaHost | None = None
        self._obstacle = ""
        """Why there is no host though the machine has devices."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cenote-rdma-ports", daemon=True)

    def open(self) -> RdmaHost | None:
        """The RDMA end, not started; None where there is none and none was demanded.

        Raises ResourceUnavailable where `--rdma on` can't be had.
        """
        if self._config.rdma == "off":
            return None
        try:
            nics = self._find(self._config.verbs, self._allowed, gid_index=self._gid_index)
            try:
                host = RdmaHost(self._segments, nics)
            except ResourceUnavailable:
                nics.close()
                raise
        except ResourceUnavailable as error:
            if self._config.rdma == "on":
                raise
            obstacle = error.message if self._read_ports() else ""
            if obstacle and obstacle != self._obstacle:
                _log.info("not served over RDMA", why=obstacle)
            self._obstacle = obstacle
            return None
        for refusal in nics.refusals:
            _log.info("an RDMA port is not used", port=refusal.name, why=refusal.reason)
        self._obstacle = ""
        self.host = host
        return host

    def start(self) -> None:
        """Begin to register memory, and to look for ports that come up."""
        if self.host is not None:
            self.host.start()
        if self._config.rdma != "off":
            self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(self._look_s):
            try:
                self.look()
            except CenoteError as error:  # of `--rdma on`: it was there at the start
                _log.warning("RDMA ports can't be looked at", error=error)

    def look(self) -> bool:
        """Serve what can be served by now; whether that is more than before."""
        host = self.host
        if host is None:
            host = self.open()
            if host is None:
                return False
            host.start()
            added = host.nics.ports
        else:
            served = {port.name for port in host.nics.ports}
            ports = [port for port in self._read_ports() if port.name not in served]
            usable, _ = usable_ports(
                ports, self._allowed, netdevs=read_netdevs(), gid_index=self._gid_index
            )
            added = tuple(host.add_ports(usable))
            if not added:
                return False
        _log.info("served over RDMA from now on", ports=",".join(port.name for port in added))
        self._on_change(host)
        return True

    def tell(self, stats: pb.NodeStats) -> None:
        """What the master is told with each heartbeat."""
        host, trouble = self.host, self._obstacle
        if host is not None:
            stats.rdma_registered_bytes = host.registered_bytes
            stats.rdma_queue_pairs = host.queue_pairs
            stats.rdma_received_bytes, stats.rdma_sent_bytes = host.traffic_bytes
            trouble = "" if host.trouble is None else f"goes over TCP: {host.trouble}"
        shown = "".join(c if c.isprintable() else " " for c in trouble)
        stats.rdma_trouble = shown[:_TROUBLE_CHARACTERS_MAX]

    def close(self, timeout_s: float) -> None:
        """End all; the memory must still be mapped."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self.host is not None:
            self.host.close(timeout_s)


def rdma_endpoint(host: RdmaHost, address: str) -> common_pb2.Endpoint:
    """What clients are told: where the side channel is, and which ports there are."""
    return common_pb2.Endpoint(
        kind=common_pb2.TRANSPORT_KIND_RDMA,
        address=address,
        device_info=encode_ports(advertised(host.nics.ports)),
    )
