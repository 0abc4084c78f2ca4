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
LARGEST_BYTES = 64 << 20
EXTENTS = 1000
EXTENT_BYTES = 4096
LONG_S = 120.0
"""An emulated device moves some 100 MB/s where nobody else wants the processor."""


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

    def test_one_kib_to_64_mib(self) -> None:
        """In one extent each, every byte compared; nothing of it over TCP."""
        with rdma_far_end(self.library, size_bytes=LARGEST_BYTES) as far:
            channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
            memory = LocalMemory(LARGEST_BYTES)
            far.transport.register(memory.address, LARGEST_BYTES, memory)
            for turn, size in enumerate((1 << 10, 64 << 10, 1 << 20, (16 << 20) + 5, 64 << 20)):
                data = np.frombuffer(payload(size, turn), np.uint8)
                memory.bytes[:size] = data
                place = (far.segment_id, 0, size, memory.address)
                status, digest = channel.write_one(*place, 7, LONG_S, True)
                assert status == 0
                memory.bytes[:size] = 0
                assert channel.read_one(*place, LONG_S, True) == (0, digest)
                assert np.array_equal(memory.bytes[:size], data), size
            assert far.transport.counters.tcp_calls == 0
            channel.close()

    def test_a_thousand_extents(self) -> None:
        """In one batch, all apart from each other there."""
        with rdma_far_end(self.library) as far:
            channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
            memory = LocalMemory(EXTENTS * EXTENT_BYTES)
            far.transport.register(memory.address, EXTENTS * EXTENT_BYTES, memory)
            data = payload(EXTENTS * EXTENT_BYTES, 3)
            memory.bytes[:] = np.frombuffer(data, np.uint8)
            extents = batch(
                [(far.segment_id, 2 * i * EXTENT_BYTES, EXTENT_BYTES) for i in range(EXTENTS)]
            )
            steps = np.arange(EXTENTS, dtype=np.uint64) * np.uint64(EXTENT_BYTES)
            addresses = steps + np.uint64(memory.address)
            sums = np.zeros((2, EXTENTS), np.uint64)
            assert not channel.write(extents, addresses, 7, LONG_S, sums[0]).any()
            memory.bytes[:] = 0
            assert not channel.read(extents, addresses, LONG_S, sums[1]).any()
            assert memory.bytes.tobytes() == data
            assert np.array_equal(sums[0], sums[1])
            assert far.transport.counters.tcp_calls == 0
            channel.close()


@pytest.mark.rdma
class TestRdmaWithIbverbs(OnDevices):
    library = "ibverbs"


@pytest.mark.rdma
class TestRdmaWithPyverbs(OnDevices):
    library = "pyverbs"
