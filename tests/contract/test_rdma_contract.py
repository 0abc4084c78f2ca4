"""The RDMA transport passes the public contract suite: on devices of this process anywhere, and on
real verbs, with each library, where there is a device (see `make test-rdma`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import pytest

from cenote.transport.nics.facts import NicPort
from cenote.transport.nics.sysfs import read_counters, read_ports
from cenote.transport.testing import FarEnd, TransportContract
from cenote.transport.testing_support import DEADLINE_S, LocalMemory, batch, payload
from fake_rdma import FakeFarEnd
from rdma_daemon import RdmaFarEnd, rdma_far_end

BYTES = 8 << 20
PACKET_BYTES_MAX = 4096


def sent_packets(port: NicPort) -> int:
    counters = read_counters(port)
    return counters.get("sent_pkts", 0) or counters.get("port_xmit_packets", 0)


def moves_by_rdma(far: FakeFarEnd | RdmaFarEnd) -> None:
    """Write and read BYTES, registered and not; nothing of it over TCP."""
    channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
    extents = batch([(far.segment_id, i << 20, 1 << 20) for i in range(8)])
    for registered in (False, True):
        data = payload(BYTES, registered)
        source = np.frombuffer(data, np.uint8)
        memory = LocalMemory(BYTES)
        steps = np.arange(8, dtype=np.uint64) << np.uint64(20)
        regions = []
        if registered:
            regions.append(far.transport.register(memory.address, BYTES, memory))
            memory.bytes[:] = source
            source = memory.bytes
        before = far.transport.counters.staged_bytes
        to = steps + np.uint64(source.ctypes.data)
        sums = np.zeros(8, np.uint64)
        assert not channel.write(extents, to, 7, DEADLINE_S, sums).any()
        assert far.peek(0, BYTES) == data
        memory.bytes[:] = 0
        to = steps + np.uint64(memory.address)
        read_sums = np.zeros(8, np.uint64)
        assert not channel.read(extents, to, DEADLINE_S, read_sums).any()
        assert memory.bytes.tobytes() == data
        assert sums.tolist() == read_sums.tolist()
        staged = far.transport.counters.staged_bytes - before
        assert staged == (0 if registered else 2 * BYTES)
        for region in regions:
            far.transport.deregister(region)
    counters = far.transport.counters
    assert (counters.read_bytes, counters.written_bytes) == (2 * BYTES, 2 * BYTES)
    assert (counters.tcp_calls, counters.failed_paths) == (0, 0)
    channel.close()


class TestFakeRdma(TransportContract):
    devices: ClassVar[tuple[str, ...]] = ("fake0",)

    @contextmanager
    def far_end(self) -> Iterator[FarEnd]:
        with FakeFarEnd(self.devices) as far:
            yield far

    def test_bytes_go_over_the_devices(self) -> None:
        with FakeFarEnd(self.devices) as far:
            moves_by_rdma(far)
            assert far.fabric.moved_bytes >= 2 * BYTES


class TestFakeRdmaWithTwoNics(TestFakeRdma):
    devices = ("fake0", "fake1")


class OnDevices(TransportContract):
    library = ""

    @contextmanager
    def far_end(self) -> Iterator[FarEnd]:
        with rdma_far_end(self.library) as far:
            yield far

    def test_bytes_go_over_the_devices(self) -> None:
        """By the devices' own count."""
        with rdma_far_end(self.library) as far:
            ports = read_ports()
            before = [sent_packets(port) for port in ports]
            moves_by_rdma(far)
            for port, sent in zip(ports, before, strict=True):
                packets = sent_packets(port) - sent
                assert packets >= 0.8 * 2 * BYTES / len(ports) / PACKET_BYTES_MAX, port.name


@pytest.mark.rdma
class TestRdmaWithIbverbs(OnDevices):
    library = "ibverbs"


@pytest.mark.rdma
class TestRdmaWithPyverbs(OnDevices):
    library = "pyverbs"
