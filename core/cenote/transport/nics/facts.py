"""What is known of a host's NICs: plain values, read by `sysfs`, judged by `choice`.

Everything is told per port of a device ("mlx5_0:1"): a port is what has a link, addresses and a
speed of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Final

__all__ = ["ETHERNET", "INFINIBAND", "ROCE_V2", "Distance", "Gid", "NicPort", "PeerPort", "Place"]

ETHERNET: Final = "Ethernet"
INFINIBAND: Final = "InfiniBand"
ROCE_V2: Final = "RoCE v2"

_SUBNET_BITS: Final = 64


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table."""

    index: int
    value: IPv6Address
    type: str
    """As the kernel names it: "RoCE v2", "IB/RoCE v1"."""
    netdev: str = ""
    """The network device whose address it is; "" on InfiniBand."""

    @property
    def address(self) -> IPv4Address | IPv6Address:
        """The IP address that it stands for."""
        return self.value.ipv4_mapped or self.value

    @property
    def subnet_prefix(self) -> int:
        """The upper half: on InfiniBand, the subnet."""
        return int(self.value) >> _SUBNET_BITS


@dataclass(frozen=True, slots=True)
class NicPort:
    """One port of an RDMA device of this host."""

    device: str
    port: int
    link_layer: str
    """ETHERNET (RoCE) or INFINIBAND."""
    state: str
    """"ACTIVE" where it can move bytes; as the kernel names it."""
    physical_state: str = ""
    rate_gbps: float = 0.0
    """0: the kernel does not tell."""
    lid: int = 0
    gids: tuple[Gid, ...] = ()
    """Entries of the table that are set."""
    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()
    """From the host bridge down, such as ("pci0000:3a", "0000:3a:00.0", "0000:3b:00.0"); empty for
    a device that is no PCI device."""

    @property
    def name(self) -> str:
        return f"{self.device}:{self.port}"


@dataclass(frozen=True, slots=True)
class PeerPort:
    """One port of a peer, as the peer advertises it: only what it would use itself."""

    device: str
    port: int
    link_layer: str
    gids: tuple[Gid, ...]
    rate_gbps: float = 0.0
    lid: int = 0

    @property
    def name(self) -> str:
        return f"{self.device}:{self.port}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where memory is: a NUMA node for host memory, a PCIe device for a GPU's."""

    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()


class Distance(IntEnum):
    """What bytes cross between a NIC and memory; less is nearer."""

    SAME_SWITCH = 0
    """They share a PCIe switch or root port."""
    SAME_HOST_BRIDGE = 1
    SAME_NUMA_NODE = 2
    UNKNOWN = 3
    """Of one of them the node is not told: a virtual machine, a software device."""
    OTHER_NUMA_NODE = 4

    @property
    def text(self) -> str:
        return self.name.lower().replace("_", " ")
