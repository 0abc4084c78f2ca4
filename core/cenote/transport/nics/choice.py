"""Which ports and addresses connect this host with a peer: decided over facts, without I/O.

First each end by itself (`usable_ports`): what the operator allows, what is up, what has an address
that RoCE v2 can be routed by. Then both together (`choose_paths`): the pairs of ports between which
the kernel knows a way, one for each local port, those near the memory in front. Whatever is left
out is told with the reason and what would help.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from .facts import ETHERNET, INFINIBAND, ROCE_V2, Distance, Gid, NicPort, PeerPort, Place
from .filters import DeviceFilter
from .routing import Route, RouteQuery

__all__ = [
    "NicPath",
    "PathChoice",
    "Refusal",
    "advertised",
    "choose_paths",
    "distance_between",
    "place_of_process",
    "usable_ports",
]

PATHS_MAX: Final = 16
_GIDS_CONSIDERED: Final = 4  # of a port: so that two hosts with many addresses ask few questions
_ACTIVE: Final = "ACTIVE"
ANY_DEVICE: Final = DeviceFilter()
ANYWHERE: Final = Place()

AskRoute = Callable[[RouteQuery], Route]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A port that is not used, why, and what would help."""

    name: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" + (f" ({self.remedy})" if self.remedy else "")


@dataclass(frozen=True, slots=True)
class NicPath:
    """A pair of ports that can be connected."""

    local: NicPort
    local_gid: Gid
    peer: PeerPort
    peer_gid: Gid
    route: Route
    distance: Distance
    rate_gbps: float
    """Of the slower end; 0 where neither is told."""
    standby: bool = False
    """To be used only where no path that is not standby works: its NIC is far from the memory."""


@dataclass(frozen=True, slots=True)
class PathChoice:
    """Paths to a peer, best first, and the local ports that have none."""

    paths: tuple[NicPath, ...]
    refusals: tuple[Refusal, ...] = ()

    @property
    def obstacle(self) -> str | None:
        """Why there is no path at all; None where there is one."""
        if self.paths:
            return None
        return "; ".join(map(str, self.refusals)) or "this host has no RDMA device"


# ---- one end by itself -----------------------------------------------------------------------


def usable_ports(
    ports: Sequence[NicPort],
    allowed: DeviceFilter = ANY_DEVICE,
    *,
    netdevs: Collection[str] | None = None,
    gid_index: int | None = None,
) -> tuple[list[NicPort], list[Refusal]]:
    """The ports that can be used, each with only the GIDs that can; and the others.

    `netdevs`: the network devices in this namespace, where known. `gid_index`: the one entry of the
    table that the operator wants, instead of those that are fit.
    """
    usable: list[NicPort] = []
    refused: list[Refusal] = []
    for port in ports:
        found = _examine(port, allowed, netdevs, gid_index)
        if isinstance(found, Refusal):
            refused.append(found)
        else:
            usable.append(replace(port, gids=found))
    return usable, refused


def _examine(
    port: NicPort,
    allowed: DeviceFilter,
    netdevs: Collection[str] | None,
    gid_index: int | None,
) -> tuple[Gid, ...] | Refusal:
    if not allowed.allows(port):
        return Refusal(port.name, f"left out by the device filter {allowed}")
    if port.state != _ACTIVE:
        physical = f", physical state {port.physical_state}" if port.physical_state else ""
        return Refusal(
            port.name,
            f"its port is {port.state or 'in an unknown state'}{physical}",
            "check cable, switch port and `ip link`; on InfiniBand a subnet manager must run",
        )
    if port.link_layer not in (ETHERNET, INFINIBAND):
        return Refusal(port.name, f"its link layer is {port.link_layer or 'unknown'}")
    if gid_index is not None:
        chosen = tuple(gid for gid in port.gids if gid.index == gid_index)
        if not chosen:
            return Refusal(
                port.name, f"its GID table has no entry {gid_index}", "leave the choice to cenote"
            )
        return chosen
    if port.link_layer == INFINIBAND:
        return port.gids[:1] or Refusal(port.name, "it has no GID", "is a subnet manager running?")
    return _routable_gids(port, netdevs)


def _routable_gids(port: NicPort, netdevs: Collection[str] | None) -> tuple[Gid, ...] | Refusal:
    """Of a RoCE port, those of version 2 with an address that can be routed; IPv4 in front."""
    second = [gid for gid in port.gids if gid.type == ROCE_V2]
    if not second:
        return Refusal(
            port.name,
            "it has no GID of RoCE v2" if port.gids else "its GID table is empty",
            "give its network device an IP address and set it up",
        )
    here = [g for g in second if netdevs is None or not g.netdev or g.netdev in netdevs]
    if not here:
        return Refusal(
            port.name,
            f"its network device {second[0].netdev} is not in this network namespace",
            "run in the host's network namespace, or move the device into this one",
        )
    fit = [gid for gid in here if not gid.address.is_link_local]
    if not fit:
        return Refusal(
            port.name,
            f"its network device {here[0].netdev} has only a link-local address",
            f"ip address add ADDRESS/BITS dev {here[0].netdev or 'DEVICE'}",
        )
    fit.sort(key=lambda gid: (gid.address.version, gid.index))
    return tuple(fit[:_GIDS_CONSIDERED])


def advertised(usable: Sequence[NicPort]) -> tuple[PeerPort, ...]:
    """What peers are told of ports from `usable_ports`."""
    return tuple(
        PeerPort(p.device, p.port, p.link_layer, p.gids, p.rate_gbps, p.lid) for p in usable
    )


# ---- both ends together ----------------------------------------------------------------------


def choose_paths(
    usable: Sequence[NicPort],
    peer_ports: Sequence[PeerPort],
    ask_route: AskRoute,
    *,
    place: Place = ANYWHERE,
    spread: int = 0,
    paths_max: int = PATHS_MAX,
) -> PathChoice:
    """One path for each usable local port that reaches a port of the peer.

    `place`: where the memory is that is moved. `spread`: any number that differs from client to
    client, so that not all of them begin with the peer's first port. Paths in the order of use.
    """
    order = sorted(usable, key=lambda p: (distance_between(p, place), -p.rate_gbps, p.name))
    paths: list[NicPath] = []
    refusals: list[Refusal] = []
    taken: Counter[str] = Counter()
    for position, port in enumerate(order):
        found = _best_path(port, peer_ports, ask_route, place, taken, spread + position)
        if found is None:
            refusals.append(_no_way(port, peer_ports))
            continue
        taken[found.peer.name] += 1
        paths.append(found)
    if paths:
        nearest = paths[0].distance
        far = Distance.OTHER_NUMA_NODE
        paths = [replace(p, standby=p.distance is far and nearest is not far) for p in paths]
    return PathChoice(tuple(paths[:paths_max]), tuple(refusals))


def _no_way(port: NicPort, peer_ports: Sequence[PeerPort]) -> Refusal:
    if not peer_ports:
        return Refusal(port.name, "the peer offers no RDMA port")
    if all(p.link_layer != port.link_layer for p in peer_ports):
        return Refusal(port.name, f"the peer's ports are not {port.link_layer}")
    targets = sorted({str(gid.address) for p in peer_ports for gid in p.gids})
    shown = ", ".join(targets[:4]) + (" ..." if len(targets) > 4 else "")
    return Refusal(
        port.name,
        f"no route from its addresses to the peer's ({shown})",
        f"ip route get ADDRESS from {port.gids[0].address if port.gids else 'ADDRESS'}",
    )


def _best_path(
    port: NicPort,
    peer_ports: Sequence[PeerPort],
    ask_route: AskRoute,
    place: Place,
    taken: Counter[str],
    turn: int,
) -> NicPath | None:
    """Rather on the link than over a router, rather to a port that nobody else goes to."""
    best: tuple[tuple[int, int, float, int, int], NicPath] | None = None
    for number, peer in enumerate(peer_ports):
        for preference, (own, other, route) in enumerate(_ways(port, peer, ask_route)):
            rank = (
                route,
                taken[peer.name],
                -peer.rate_gbps,
                (number - turn) % len(peer_ports),
                preference,
            )
            if best is None or rank < best[0]:
                rate = min(filter(None, (port.rate_gbps, peer.rate_gbps)), default=0.0)
                found = NicPath(port, own, peer, other, route, distance_between(port, place), rate)
                best = (rank, found)
    return best[1] if best else None


def _ways(port: NicPort, peer: PeerPort, ask_route: AskRoute) -> Iterator[tuple[Gid, Gid, Route]]:
    """Pairs of GIDs between which there is a way."""
    if port.link_layer != peer.link_layer:
        return
    for own in port.gids[:_GIDS_CONSIDERED]:
        for other in peer.gids[:_GIDS_CONSIDERED]:
            route = _route(port, own, other, ask_route)
            if route is not Route.NONE:
                yield own, other, route


def _route(port: NicPort, own: Gid, other: Gid, ask_route: AskRoute) -> Route:
    if port.link_layer == INFINIBAND:
        return Route.DIRECT if own.subnet_prefix == other.subnet_prefix else Route.NONE
    if own.address.version != other.address.version:
        return Route.NONE
    route = ask_route(RouteQuery(own.address, own.netdev, other.address))
    # Another NIC of this host: the kernel would not send that over a wire.
    if route is Route.LOCAL and own.address != other.address:
        return Route.NONE
    return route


def place_of_process(cpus: Collection[int], nodes: Mapping[int, Collection[int]]) -> Place:
    """Where the memory is of a process that may run on these processors: on their NUMA node, since
    the kernel takes it from there. Nowhere in particular where they are of several.

    `nodes`: the processors of each node.
    """
    homes = {node for node, members in nodes.items() if not set(cpus).isdisjoint(members)}
    return Place(homes.pop()) if len(homes) == 1 else ANYWHERE


def distance_between(port: NicPort, place: Place) -> Distance:
    """What bytes cross between the port's device and memory at `place`."""
    common = 0
    for ours, theirs in zip(port.pci_path, place.pci_path, strict=False):
        if ours != theirs:
            break
        common += 1
    if common >= 2:
        return Distance.SAME_SWITCH
    if common == 1:
        return Distance.SAME_HOST_BRIDGE
    if port.numa_node is None or place.numa_node is None:
        return Distance.UNKNOWN
    same = port.numa_node == place.numa_node
    return Distance.SAME_NUMA_NODE if same else Distance.OTHER_NUMA_NODE
