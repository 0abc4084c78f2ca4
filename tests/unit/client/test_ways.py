"""Which way is taken to a node, why not a better one, and how it changes while calls run."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cenote.api.errors import CenoteError, PermissionDenied, Unavailable
from cenote.api.types import PeerPath
from cenote.client import Client
from cenote.client.ways import PAUSE_MAX_S, Ways
from cenote.transport.base import Channel, SessionIdentity
from cenote.v1 import common_pb2
from fake_nodes import FakeTransport
from fake_pool import FakeMaster
from waiting import wait_until

SHM = common_pb2.TRANSPORT_KIND_SHM
RDMA = common_pb2.TRANSPORT_KIND_RDMA
TCP = common_pb2.TRANSPORT_KIND_TCP
NODE = common_pb2.NodeView(node_id=1, name="n1")
IDENTITY = SessionIdentity(b"0123456789abcdef", "boot", 1, common_pb2.Credentials())
SOON_S = 5.0


class Way:
    """Transports in their order, and the ways that they make."""

    def __init__(self, master: FakeMaster, *kinds: int) -> None:
        self.over = [FakeTransport(master.nodes, kind=kind, by_lease=kind == SHM) for kind in kinds]
        self.ways = Ways(self.over)
        self.channel: Channel | None = None

    def connect(self) -> str | None:
        self.channel = None
        self.channel = self.ways.connect(NODE, IDENTITY, 1, 0.0)
        return self.taken

    @property
    def path(self) -> PeerPath:
        return self.ways.path(NODE, self.channel)

    @property
    def taken(self) -> str | None:
        return self.path.path

    @property
    def reasons(self) -> list[tuple[str, str]]:
        return [(found.path, found.reason) for found in self.path.obstacles]


def test_the_first_that_can_is_taken_and_the_better_ones_say_why_not(master: FakeMaster) -> None:
    way = Way(master, SHM, RDMA, TCP)
    assert way.connect() == "shm"
    assert way.reasons == []
    way.over[0].in_the_way = "another host"
    way.over[1].refusal = Unavailable("no route", remedy="cable")
    assert way.connect() == "tcp"
    assert way.reasons == [("shm", "another host"), ("rdma", "no route (cable)")]
    way.over[1].refusal = None
    assert way.connect() == "rdma"
    assert way.reasons == [("shm", "another host")]


def test_where_nothing_works_all_reasons_are_told(master: FakeMaster) -> None:
    way = Way(master, SHM, TCP)
    for transport in way.over:
        transport.in_the_way = "no"
    with pytest.raises(Unavailable, match="shm: no; tcp: no"):
        way.connect()
    assert way.taken is None
    assert [path for path, _ in way.reasons] == ["shm", "rdma", "tcp"]
    refusal: CenoteError = PermissionDenied("not you")
    way.over[0].in_the_way, way.over[0].refusal = None, refusal
    with pytest.raises(PermissionDenied):
        way.connect()


@pytest.mark.parametrize(
    ("kinds", "taken", "reasons"),
    [
        ((TCP,), "tcp", [("shm", "use only tcp"), ("rdma", "use only tcp")]),
        ((TCP, SHM), "tcp", [("shm", "prefer tcp"), ("rdma", "use only tcp, shm")]),
        ((SHM,), "shm", []),
        ((common_pb2.TRANSPORT_KIND_MEMORY,), "memory", []),
    ],
)
def test_what_the_client_was_told_is_a_reason(
    master: FakeMaster, kinds: tuple[int, ...], taken: str, reasons: list[tuple[str, str]]
) -> None:
    way = Way(master, *kinds)
    assert way.connect() == taken
    assert len(way.reasons) == len(reasons)
    for (path, reason), (expected_path, part) in zip(way.reasons, reasons, strict=True):
        assert path == expected_path
        assert part in reason


def test_a_channel_that_makes_a_detour_says_so(master: FakeMaster) -> None:
    way = Way(master, SHM, RDMA, TCP)
    way.over[0].in_the_way = "another host"
    assert way.connect() == "rdma"
    (channel,) = way.over[1].channels
    channel.obstacle = "its port is down"
    assert way.taken == "tcp"
    assert way.reasons == [("shm", "another host"), ("rdma", "for the moment: its port is down")]
    channel.obstacle = ""
    assert way.taken == "rdma"


def test_the_prediction_connects_to_nobody(master: FakeMaster) -> None:
    way = Way(master, SHM, TCP)
    way.over[0].in_the_way = "another host"
    found = way.ways.predicted(NODE, IDENTITY)
    assert (found.path, found.obstacles[0].reason) == ("tcp", "another host")
    assert way.over[1].channels == []


def test_a_better_way_is_tried_less_and_less_often(master: FakeMaster) -> None:
    way = Way(master, SHM, TCP)
    way.over[0].in_the_way = "its socket is gone"
    way.connect()
    nodes = {1: NODE}
    now_s, looks = 1e9, 0
    while looks < 12:
        looks += 1
        assert way.ways.improvable(nodes, IDENTITY, now_s) == []
        now_s += PAUSE_MAX_S
    way.over[0].in_the_way = None
    assert way.ways.improvable(nodes, IDENTITY, now_s) == [1]
    assert way.ways.improvable({}, IDENTITY, now_s) == []
    way.channel = way.ways.improve(NODE, IDENTITY, 1, 0.0)
    assert way.channel is way.over[0].channels[-1]
    assert way.taken == "shm"
    assert way.ways.improvable(nodes, IDENTITY, now_s) == []


def test_a_better_way_that_refuses_keeps_the_one_that_is_taken(master: FakeMaster) -> None:
    way = Way(master, SHM, TCP)
    way.over[0].refusal = Unavailable("not now")
    assert way.connect() == "tcp"
    way.over[0].refusal = Unavailable("still not")
    assert way.ways.improve(NODE, IDENTITY, 1, 0.0) is None
    assert way.taken == "tcp"
    assert way.reasons[0] == ("shm", "still not")


# ---- a client ----------------------------------------------------------------------------------


def test_the_way_is_improved_under_load_and_no_call_fails(master: FakeMaster) -> None:
    shm, tcp = (FakeTransport(master.nodes, kind=k, by_lease=k == SHM) for k in (SHM, TCP))
    shm.in_the_way = "not yet"
    failures: list[BaseException] = []
    end = threading.Event()
    with Client.embedded(master, [shm, tcp]) as client:
        client.put("k", b"bytes")
        paths = {path.node_id: path for path in client.paths()}
        assert {path.path for path in paths.values()} == {"tcp"}
        assert client.session.state.lease_proven == set()

        def read() -> None:
            while not end.is_set():
                try:
                    assert client.get("k") == b"bytes"
                except BaseException as error:  # whatever it was, the test is to show it
                    failures.append(error)
                    return

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        shm.in_the_way = None
        old = list(tcp.channels)

        def improved() -> bool:
            return {path.path for path in client.paths()} == {"shm"}

        wait_until(improved, SOON_S, what="the better way to be taken")
        wait_until(lambda: all(c.closed for c in old), SOON_S, what="the old channels to be closed")
        nodes = {path.node_id for path in client.paths()}
        wait_until(
            lambda: client.session.state.lease_proven == nodes, SOON_S, what="leases to count"
        )
        end.set()
        for reader in readers:
            reader.join(SOON_S)
        assert failures == []
        assert client.stats().node_failures == 0
    assert all(channel.closed for channel in [*shm.channels, *tcp.channels])


def test_a_call_under_way_keeps_its_channel_to_its_end(master: FakeMaster) -> None:
    shm, tcp = (FakeTransport(master.nodes, kind=k, by_lease=k == SHM) for k in (SHM, TCP))
    shm.in_the_way = "not yet"
    inside, go_on = threading.Event(), threading.Event()
    with Client.embedded(master, [shm, tcp]) as client:
        client.put("k", b"bytes")
        client.session.state.limits.location_ttl_s = 0.0
        client.forget_locations()
        (old,) = tcp.channels

        def hold() -> None:
            inside.set()
            assert go_on.wait(SOON_S)

        got: list[bytes | None] = []
        reader = threading.Thread(target=lambda: got.append(client.get("k")))
        master.nodes[old.node_id].on_copy = hold
        reader.start()
        assert inside.wait(SOON_S)
        shm.in_the_way = None
        wait_until(
            lambda: client.session.channels[old.node_id] is not old,
            SOON_S,
            what="the better way to be taken",
        )
        assert not old.closed
        assert old.node_id not in client.session.state.lease_proven
        master.nodes[old.node_id].on_copy = lambda: None
        go_on.set()
        reader.join(SOON_S)
        assert got == [b"bytes"]
        wait_until(lambda: old.closed, SOON_S, what="the old channel to be closed")


def test_paths_of_nodes_that_are_gone(master: FakeMaster) -> None:
    tcp = FakeTransport(master.nodes, kind=TCP, by_lease=False)
    tcp.refusal = Unavailable("nobody listens")
    with Client.embedded(master, [tcp]) as client:
        for path in client.paths(deadline_s=1.0):
            assert path.path is None
            assert [o.reason for o in path.obstacles if o.path == "tcp"] == ["nobody listens"]


def test_closing_while_a_better_way_is_tried_leaves_nothing(
    master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    shm, tcp = (FakeTransport(master.nodes, kind=k, by_lease=k == SHM) for k in (SHM, TCP))
    shm.in_the_way = "not yet"
    trying, go_on = threading.Event(), threading.Event()
    connect = shm.connect

    def slow(*arguments: Any) -> Any:
        trying.set()
        assert go_on.wait(SOON_S)
        return connect(*arguments)

    monkeypatch.setattr(shm, "connect", slow)
    client = Client.embedded(master, [shm, tcp])
    client.put("k", b"bytes")
    shm.in_the_way = None
    assert trying.wait(SOON_S)
    closing = threading.Thread(target=client.close)
    closing.start()
    wait_until(lambda: client.closed, SOON_S, what="the client to close")
    go_on.set()
    closing.join(SOON_S)
    assert not closing.is_alive()
    assert all(channel.closed for channel in [*shm.channels, *tcp.channels])
    assert client.session.channels == {}
