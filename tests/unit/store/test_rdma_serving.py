"""A daemon's RDMA end that comes late, grows, and tells what is wrong with it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import IPv6Address

import pytest

from cenote.api.errors import ResourceUnavailable
from cenote.store.config import StoreConfig
from cenote.store.rdma_host import RdmaHost
from cenote.store.rdma_serving import RdmaServing, rdma_endpoint
from cenote.transport.fake_segment import FakeSegment, FakeSegments
from cenote.transport.nics.advertised import decode_ports
from cenote.transport.nics.choice import usable_ports
from cenote.transport.nics.facts import ROCE_V2, Gid, NicPort
from cenote.transport.nics.filters import DeviceFilter
from cenote.transport.rdma_nics import Nics
from cenote.transport.verbs.fake import FakeFabric, FakeVerbs
from cenote.v1 import master_pb2 as pb
from fake_rdma import fake_ports
from waiting import wait_until

SEGMENT_BYTES = 4 << 20


class Machine:
    """Two fake devices whose links go up and down, and a daemon's RDMA end on it."""

    def __init__(self) -> None:
        self.verbs = FakeVerbs(FakeFabric(), ("fake0", "fake1"))
        self.up: set[str] = set()
        self.segments = FakeSegments([FakeSegment(7, SEGMENT_BYTES)])
        self.changes: list[RdmaHost] = []
        self.serving = self.serve("auto")

    def serve(self, rdma: str) -> RdmaServing:
        return RdmaServing(
            StoreConfig(rdma=rdma),  # type: ignore[arg-type]
            self.segments,
            self.changes.append,
            find=self._find,
            ports=self.ports,
        )

    def ports(self) -> list[NicPort]:
        states = {name: "ACTIVE" if name in self.up else "DOWN" for name in self.verbs.devices}
        address = Gid(1, IPv6Address("::ffff:10.0.0.1"), ROCE_V2)
        return [
            replace(port, state=states[port.device], gids=(address,))
            for port in fake_ports(self.verbs)
        ]

    def _find(self, choice: str, allowed: DeviceFilter, *, gid_index: int | None) -> Nics:
        usable, refused = usable_ports(self.ports(), allowed, gid_index=gid_index)
        if not usable:
            raise ResourceUnavailable("; ".join(map(str, refused)))
        return Nics(self.verbs, usable, refused)

    def told(self) -> pb.NodeStats:
        stats = pb.NodeStats()
        self.serving.tell(stats)
        return stats

    def wait_registered(self, devices: int) -> None:
        wait_until(
            lambda: sum(d.regions for d in self.verbs.devices.values()) == devices,
            what="the segment to be registered",
        )

    def close(self) -> None:
        self.serving.close(5.0)
        self.segments.close()


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.close()
    for device in machine.verbs.devices.values():
        assert (device.regions, device.completion_queues) == (0, 0)


def test_a_port_that_is_down_at_the_start_is_served_once_it_is_up(machine: Machine) -> None:
    serving = machine.serving
    assert serving.open() is None
    assert "fake0:1: its port is DOWN" in machine.told().rdma_trouble
    assert not serving.look()

    machine.up.add("fake1")
    assert serving.look()
    [host] = machine.changes
    assert serving.host is host
    [port] = decode_ports(rdma_endpoint(host, "here:1").device_info)
    assert port.device == "fake1"
    machine.wait_registered(1)
    assert machine.told().rdma_registered_bytes == SEGMENT_BYTES
    assert machine.told().rdma_trouble == ""
    assert not serving.look()

    machine.up.add("fake0")  # another one: what is registered is with it, too
    assert serving.look()
    assert machine.changes == [host, host]
    names = [p.device for p in decode_ports(rdma_endpoint(host, "here:1").device_info)]
    assert names == ["fake1", "fake0"]
    machine.wait_registered(2)
    assert machine.told().rdma_registered_bytes == SEGMENT_BYTES


def test_memory_that_can_not_be_pinned_is_told(machine: Machine) -> None:
    machine.up = {"fake0", "fake1"}
    device = machine.verbs.devices["fake1"]
    device.register_fails = errno.ENOMEM
    host = machine.serving.open()
    assert host is not None
    with pytest.raises(ResourceUnavailable, match="segment 0, for fake1"):
        host.register_more()
    host._run_once()
    trouble = machine.told().rdma_trouble
    assert trouble.startswith("goes over TCP: can't ")
    assert "4 MiB for segment 0, for fake1" in trouble
    assert len(trouble.encode()) <= 1024
    device.register_fails = 0
    host._run_once()
    assert machine.told().rdma_trouble == ""
    assert device.regions == 1


def test_on_means_at_the_start(machine: Machine) -> None:
    machine.serving = machine.serve("on")
    with pytest.raises(ResourceUnavailable, match="DOWN"):
        machine.serving.open()


def test_off_means_never(machine: Machine) -> None:
    machine.up = {"fake0"}
    machine.serving = machine.serve("off")
    assert machine.serving.open() is None
    machine.serving.start()
    assert machine.serving.host is None
    assert machine.told() == pb.NodeStats()
