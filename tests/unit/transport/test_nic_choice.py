"""Which NICs and addresses are used: fake /sys trees in, decisions out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv6Address, ip_network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import ConfigError, ProtocolError
from cenote.transport.nics.advertised import decode_ports, encode_ports
from cenote.transport.nics.choice import (
    advertised,
    choose_paths,
    distance_between,
    place_of_process,
    usable_ports,
)
from cenote.transport.nics.facts import Distance, Gid, NicPort, PeerPort, Place
from cenote.transport.nics.filters import DeviceFilter
from cenote.transport.nics.routing import Route, RouteQuery
from cenote.transport.nics.sysfs import (
    read_counters,
    read_netdevs,
    read_numa_cpus,
    read_pci_place,
    read_ports,
)
from cenote.v1 import store_pb2
from fake_sys import FakeSys, gid_text

V1, V2 = "IB/RoCE v1", "RoCE v2"


@pytest.fixture
def sys(tmp_path: Path) -> FakeSys:
    return FakeSys(tmp_path)


def roce(name: str, address: str, **changes: object) -> NicPort:
    gid = Gid(3, IPv6Address(int(gid_text(address).replace(":", ""), 16)), V2, f"eth-{name}")
    port = NicPort(name, 1, "Ethernet", "ACTIVE", "LinkUp", 400.0, 0, (gid,), 0)
    return replace(port, **changes)  # type: ignore[arg-type]


def on_link(bits: int = 24) -> Callable[[RouteQuery], Route]:
    """A network in which those with one prefix see each other, and nobody else does."""

    def ask(query: RouteQuery) -> Route:
        if query.source == query.target:
            return Route.LOCAL
        network = ip_network(f"{query.source}/{bits}", strict=False)
        return Route.DIRECT if query.target in network else Route.NONE

    return ask


# ---- reading -----------------------------------------------------------------------------------


def test_a_host_without_rdma_has_no_ports(tmp_path: Path) -> None:
    assert read_ports(tmp_path) == []
    assert read_netdevs(tmp_path) == frozenset()


def test_all_that_sys_says_of_a_port(sys: FakeSys) -> None:
    device = sys.pci("pci0000:3a", "0000:3a:00.0", "0000:3b:00.0", numa_node=1)
    sys.nic(
        "mlx5_0",
        device=device,
        netdev="eth4",
        gids=[("fe80::1", V1), ("fe80::1", V2), ("", ""), ("10.0.0.7", V2)],
        counters={"out_of_sequence": 12},
    )
    (port,) = read_ports(sys.root)
    assert (port.name, port.state, port.physical_state) == ("mlx5_0:1", "ACTIVE", "LinkUp")
    assert (port.rate_gbps, port.numa_node, port.lid) == (400.0, 1, 0)
    assert port.pci_path == ("pci0000:3a", "0000:3a:00.0", "0000:3b:00.0")
    assert [(gid.index, str(gid.address), gid.type) for gid in port.gids] == [
        (0, "fe80::1", V1),
        (1, "fe80::1", V2),
        (3, "10.0.0.7", V2),
    ]
    assert {gid.netdev for gid in port.gids} == {"eth4"}
    assert read_counters(port, sys.root) == {"out_of_sequence": 12}


def test_a_software_device_is_where_its_network_device_is(sys: FakeSys) -> None:
    device = sys.pci("pci0000:00", "0000:00:03.0", numa_node=0)
    sys.nic("rxe0", netdev="eth0", gids=[("10.0.0.1", V2)])
    (sys.root / "class" / "net" / "eth0" / "device").symlink_to(device)
    (port,) = read_ports(sys.root)
    assert (port.numa_node, port.pci_path) == (0, ("pci0000:00", "0000:00:03.0"))


def test_the_end_of_a_long_table_is_not_waited_for(sys: FakeSys) -> None:
    gids = [("10.0.0.1", V2), *[("", "")] * 30, ("10.0.0.2", V2), *[("", "")] * 300]
    sys.nic("mlx5_0", netdev="eth0", gids=gids)
    (port,) = read_ports(sys.root)
    assert [gid.index for gid in port.gids] == [0, 31]


def test_what_can_not_be_read_is_unknown(sys: FakeSys) -> None:
    (sys.root / "class" / "infiniband" / "odd" / "ports" / "1" / "gids").mkdir(parents=True)
    (sys.root / "class" / "infiniband" / "odd" / "ports" / "1" / "gids" / "0").write_text("what?")
    (port,) = read_ports(sys.root)
    assert (port.state, port.rate_gbps, port.gids, port.numa_node) == ("", 0.0, (), None)
    (refusal,) = usable_ports([port])[1]
    assert "unknown state" in refusal.reason


# ---- one end by itself -------------------------------------------------------------------------


def test_only_routable_addresses_of_version_2_count_and_ipv4_is_in_front(sys: FakeSys) -> None:
    sys.nic(
        "mlx5_0",
        netdev="eth0",
        gids=[("fe80::1", V2), ("fd00::7", V2), ("10.0.0.7", V1), ("10.0.0.7", V2)],
    )
    (port,), refused = usable_ports(read_ports(sys.root), netdevs=read_netdevs(sys.root))
    assert refused == []
    assert [gid.index for gid in port.gids] == [3, 1]


@pytest.mark.parametrize(
    ("nic", "reason"),
    [
        ({"state": "1: DOWN", "physical_state": "3: Disabled"}, "DOWN, physical state Disabled"),
        ({"gids": []}, "its GID table is empty"),
        ({"gids": [("10.0.0.7", V1)]}, "no GID of RoCE v2"),
        ({"gids": [("fe80::1", V2)]}, "only a link-local address"),
        ({"link_layer": "Unspecified"}, "link layer is Unspecified"),
        ({"link_layer": "InfiniBand", "gids": []}, "it has no GID"),
    ],
)
def test_a_port_that_is_not_used_is_told_with_the_reason(
    sys: FakeSys, nic: dict[str, object], reason: str
) -> None:
    sys.nic("mlx5_0", **{"netdev": "eth0", "gids": [("10.0.0.7", V2)], **nic})  # type: ignore[arg-type]
    usable, (refusal,) = usable_ports(read_ports(sys.root), netdevs=read_netdevs(sys.root))
    assert usable == []
    assert refusal.name == "mlx5_0:1"
    assert reason in str(refusal)


def test_an_address_of_another_network_namespace_is_no_use(sys: FakeSys) -> None:
    sys.nic("mlx5_0", netdev="eth0", gids=[("10.0.0.7", V2)])
    usable, (refusal,) = usable_ports(read_ports(sys.root), netdevs={"lo"})
    assert usable == []
    assert "eth0 is not in this network namespace" in refusal.reason


def test_the_operator_may_name_the_entry_of_the_table(sys: FakeSys) -> None:
    sys.nic("mlx5_0", netdev="eth0", gids=[("fe80::1", V2), ("10.0.0.7", V2)])
    (port,), _ = usable_ports(read_ports(sys.root), gid_index=0)
    assert [gid.index for gid in port.gids] == [0]
    usable, (refusal,) = usable_ports(read_ports(sys.root), gid_index=9)
    assert usable == []
    assert "no entry 9" in refusal.reason


@pytest.mark.parametrize(
    ("patterns", "allowed"),
    [
        ("", {"mlx5_0", "mlx5_1", "mlx5_bond_0"}),
        ("mlx5_0", {"mlx5_0"}),
        ("mlx5_?", {"mlx5_0", "mlx5_1"}),
        ("!mlx5_bond_*", {"mlx5_0", "mlx5_1"}),
        ("mlx5_*,!mlx5_1", {"mlx5_0", "mlx5_bond_0"}),
        ("mlx5_0:1, mlx5_1:2", {"mlx5_0"}),
        ("mlx5_0:*,!mlx5_0:1", set()),
    ],
)
def test_filters(patterns: str, allowed: set[str]) -> None:
    ports = [roce(name, "10.0.0.1") for name in ("mlx5_0", "mlx5_1", "mlx5_bond_0")]
    usable, refused = usable_ports(ports, DeviceFilter.parse(patterns))
    assert {port.device for port in usable} == allowed
    assert {refusal.name for refusal in refused} == {p.name for p in ports if p not in usable}


def test_a_filter_that_matches_nothing_is_noticed() -> None:
    found = DeviceFilter.parse("mlx5_0,mlx_1,!mlx5_7").unmatched([roce("mlx5_0", "10.0.0.1")])
    assert found == ["mlx_1", "mlx5_7"]


@pytest.mark.parametrize("text", ["!", "mlx5_0:one", "/dev/infiniband/uverbs0", ":1"])
def test_a_filter_that_can_not_be_right_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no RDMA device"):
        DeviceFilter.parse(text)


# ---- both ends together ------------------------------------------------------------------------


def test_each_nic_goes_to_the_peers_nic_of_its_own_network() -> None:
    local = [roce("mlx5_0", "10.0.0.1"), roce("mlx5_1", "10.0.1.1")]
    peer = advertised([roce("mlx5_0", "10.0.1.2"), roce("mlx5_1", "10.0.0.2")])
    choice = choose_paths(local, peer, on_link())
    assert [(p.local.device, p.peer.device) for p in choice.paths] == [
        ("mlx5_0", "mlx5_1"),
        ("mlx5_1", "mlx5_0"),
    ]
    assert choice.obstacle is None


def test_on_the_link_is_better_than_over_a_router() -> None:
    local = [roce("mlx5_0", "10.0.0.1")]
    peer = advertised([roce("a", "10.0.1.2"), roce("b", "10.0.0.2")])

    def ask(query: RouteQuery) -> Route:
        direct = on_link()(query)
        return Route.GATEWAY if direct is Route.NONE else direct

    (path,) = choose_paths(local, peer, ask).paths
    assert (path.peer.device, path.route) == ("b", Route.DIRECT)


def test_ports_of_a_peer_are_shared_out_among_ours_and_among_clients() -> None:
    local = [roce(f"mlx5_{i}", f"10.0.0.{i + 1}") for i in range(4)]
    peer = advertised([roce(f"mlx5_{i}", f"10.0.0.{i + 101}") for i in range(4)])
    first = set()
    for spread in range(4):
        paths = choose_paths(local, peer, on_link(), spread=spread).paths
        assert len({path.peer.device for path in paths}) == 4
        first.add(paths[0].peer.device)
    assert len(first) == 4


def test_a_port_without_a_way_says_where_it_wanted_to_go() -> None:
    choice = choose_paths(
        [roce("mlx5_0", "10.0.0.1")], advertised([roce("mlx5_0", "10.9.0.2")]), on_link()
    )
    assert choice.paths == ()
    assert choice.obstacle is not None
    assert "no route" in choice.obstacle
    assert "10.9.0.2" in choice.obstacle


def test_ends_that_do_not_fit_together() -> None:
    port = roce("mlx5_0", "10.0.0.1")
    infiniband = replace(port, link_layer="InfiniBand")
    six = roce("mlx5_1", "fd00::2")
    for peers, reason in (
        ((), "offers no RDMA port"),
        (advertised([infiniband]), "not Ethernet"),
        (advertised([six]), "no route"),
    ):
        obstacle = choose_paths([port], peers, lambda query: Route.DIRECT).obstacle
        assert obstacle is not None
        assert reason in obstacle
    assert (
        choose_paths([], advertised([port]), on_link()).obstacle == "this host has no RDMA device"
    )


def test_ipv6_is_routed_like_ipv4() -> None:
    port = roce("mlx5_0", "fd00:1::1")
    (path,) = choose_paths([port], advertised([roce("x", "fd00:1::2")]), on_link(64)).paths
    assert str(path.peer_gid.address) == "fd00:1::2"


def test_infiniband_is_one_subnet_and_asks_no_routes() -> None:
    def ask(query: RouteQuery) -> Route:
        raise AssertionError

    port = roce("mlx5_0", "fe80::1", link_layer="InfiniBand", lid=7)
    same = replace(port, gids=(Gid(0, IPv6Address("fe80::2"), ""),))
    other = replace(port, gids=(Gid(0, IPv6Address("fec0::2"), ""),))
    assert choose_paths([port], advertised([same]), ask).paths[0].route is Route.DIRECT
    assert choose_paths([port], advertised([other]), ask).paths == ()


def test_on_one_host_a_nic_talks_to_itself_and_not_to_its_neighbour() -> None:
    ports = [roce("rxe0", "10.77.0.1"), roce("rxe1", "10.77.1.1")]

    def ask(query: RouteQuery) -> Route:
        return Route.LOCAL  # all of them are this host's addresses

    paths = choose_paths(ports, advertised(ports), ask).paths
    assert [(p.local.device, p.peer.device) for p in paths] == [("rxe0", "rxe0"), ("rxe1", "rxe1")]


def test_nics_near_the_memory_are_in_front_and_far_ones_stand_by(sys: FakeSys) -> None:
    for number, node in enumerate((1, 0, 0)):
        device = sys.pci(f"pci0000:{number}0", f"0000:{number}0:01.0", numa_node=node)
        sys.nic(
            f"mlx5_{number}",
            device=device,
            netdev=f"e{number}",
            gids=[(f"10.0.0.{number + 1}", V2)],
        )
    local, _ = usable_ports(read_ports(sys.root))
    peer = advertised([roce("mlx5_0", "10.0.0.100")])
    paths = choose_paths(local, peer, on_link(), place=Place(numa_node=0)).paths
    assert [(p.local.device, p.standby) for p in paths] == [
        ("mlx5_1", False),
        ("mlx5_2", False),
        ("mlx5_0", True),
    ]
    far_only = choose_paths(local[:1], peer, on_link(), place=Place(numa_node=0)).paths
    assert [(p.distance, p.standby) for p in far_only] == [(Distance.OTHER_NUMA_NODE, False)]
    unknown = choose_paths(local, peer, on_link()).paths
    assert {p.standby for p in unknown} == {False}


def test_a_process_that_is_bound_to_a_node_has_its_memory_there(sys: FakeSys) -> None:
    nodes = sys.root / "devices" / "system" / "node"
    for number, cpus in enumerate(("0-3,8-11", "4-7,12-15", "")):
        (nodes / f"node{number}").mkdir(parents=True)
        (nodes / f"node{number}" / "cpulist").write_text(cpus + "\n")
    (nodes / "possible").write_text("0-2\n")
    found = read_numa_cpus(sys.root)
    assert found == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}, 2: set()}
    assert place_of_process({1, 9}, found) == Place(0)
    assert place_of_process({4}, found) == Place(1)
    assert place_of_process({3, 4}, found) == Place()
    assert place_of_process({99}, found) == Place()
    assert place_of_process({0}, {}) == Place()


def test_the_distance_to_a_gpu(sys: FakeSys) -> None:
    gpu = sys.pci("pci0000:3a", "0000:3a:00.0", "0000:3b:00.0", "0000:3d:00.0", numa_node=0)
    near = sys.pci("pci0000:3a", "0000:3a:00.0", "0000:3b:00.0", "0000:3c:00.0", numa_node=0)
    bridge = sys.pci("pci0000:3a", "0000:3a:02.0", "0000:40:00.0", numa_node=0)
    node = sys.pci("pci0000:5a", "0000:5a:00.0", numa_node=0)
    other = sys.pci("pci0000:ba", "0000:ba:00.0", numa_node=1)
    for name, device in (("a", near), ("b", bridge), ("c", node), ("d", other)):
        sys.nic(name, device=device)
    sys.nic("e", netdev="eth9")
    place = read_pci_place(gpu.name.upper(), sys.root)
    assert [distance_between(port, place) for port in read_ports(sys.root)] == [
        Distance.SAME_SWITCH,
        Distance.SAME_HOST_BRIDGE,
        Distance.SAME_NUMA_NODE,
        Distance.OTHER_NUMA_NODE,
        Distance.UNKNOWN,
    ]
    assert read_pci_place("0000:ff:00.0", sys.root) == Place()


# ---- what peers are told -----------------------------------------------------------------------


def test_what_is_advertised_is_what_the_peer_reads() -> None:
    infiniband = roce("mlx5_1", "fe80::1", link_layer="InfiniBand", lid=7)
    told = decode_ports(encode_ports(advertised([roce("mlx5_0", "10.0.0.1"), infiniband])))
    assert [(p.name, p.link_layer, p.rate_gbps, p.lid) for p in told] == [
        ("mlx5_0:1", "Ethernet", 400.0, 0),
        ("mlx5_1:1", "InfiniBand", 400.0, 7),
    ]
    assert [str(p.gids[0].address) for p in told] == ["10.0.0.1", "fe80::1"]
    assert decode_ports(b"") == ()


def test_ports_that_can_not_be_are_refused() -> None:
    port = store_pb2.RdmaPort(device="x", gids=[store_pb2.RdmaGid(gid=b"short")])
    many = store_pb2.RdmaPorts(ports=[store_pb2.RdmaPort()] * 65)
    for info in (
        b"\xff\xff",
        store_pb2.RdmaPorts(ports=[port]).SerializeToString(),
        many.SerializeToString(),
    ):
        with pytest.raises(ProtocolError):
            decode_ports(info)


ADDRESSES = st.builds(lambda net, host: f"10.0.{net}.{host}", st.integers(0, 3), st.integers(1, 9))
PORTS = st.lists(ADDRESSES, max_size=6, unique=True).map(
    lambda found: [roce(f"mlx5_{i}", address) for i, address in enumerate(found)]
)


@given(PORTS, PORTS, st.integers(0, 100), st.integers(0, 3))
def test_every_path_is_a_way_and_every_port_has_one_or_a_reason(
    local: list[NicPort], peers: list[NicPort], spread: int, node: int
) -> None:
    peer: tuple[PeerPort, ...] = advertised(peers)
    ask = on_link()
    choice = choose_paths(local, peer, ask, place=Place(numa_node=node), spread=spread)
    told = [p.local.name for p in choice.paths] + [r.name for r in choice.refusals]
    assert sorted(told) == sorted(port.name for port in local)
    for path in choice.paths:
        query = RouteQuery(path.local_gid.address, path.local_gid.netdev, path.peer_gid.address)
        assert ask(query) is not Route.NONE
        assert path.local_gid in path.local.gids
        assert path.peer_gid in path.peer.gids
    for refusal in choice.refusals:
        port = next(p for p in local if p.name == refusal.name)
        assert not any(
            ask(RouteQuery(port.gids[0].address, "", p.gids[0].address)) in (Route.DIRECT,)
            for p in peer
        )
    assert (choice.obstacle is None) == bool(choice.paths)
