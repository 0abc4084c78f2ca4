"""GPU memory: exported, registered, moved by the NIC alone. What stands for a GPU is host memory,
and for its driver a program of a few lines: no machine of these tests has one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import InvalidBuffer, ResourceUnavailable, StaleEpoch
from cenote.runtime.cuda import DmaBuf, export_dmabuf
from cenote.transport.nics.facts import Place
from cenote.transport.testing_support import DEADLINE_S, LocalMemory, batch, payload
from fake_rdma import FakeFarEnd

PAGE = mmap.PAGESIZE
BASE = 1 << 40
SIZE_BYTES = 1 << 20


class FakeDriver:
    """Of one allocation at BASE; what it was asked for, and what it answers."""

    def __init__(self, size_bytes: int = 16 * PAGE, base: int = BASE) -> None:
        self.base, self.size_bytes = base, size_bytes
        self.exported: list[tuple[int, int, int]] = []
        self.error = 0
        self.fd = -1

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: ctypes.c_uint64) -> int:
        if not self.base <= address.value < self.base + self.size_bytes:
            return 1
        base._obj.value, size._obj.value = self.base, self.size_bytes
        return 0

    def cuMemGetHandleForAddressRange(
        self, fd: Any, first: ctypes.c_uint64, size: ctypes.c_size_t, kind: int, _flags: object
    ) -> int:
        self.exported.append((first.value, size.value, kind))
        if not self.error:
            self.fd = fd._obj.value = os.open("/dev/null", os.O_RDONLY)
        return self.error


def test_whole_pages_are_exported() -> None:
    driver = FakeDriver()
    with export_dmabuf(BASE + PAGE + 100, 2 * PAGE, driver) as buffer:
        assert driver.exported == [(BASE + PAGE, 3 * PAGE, 1)]
        assert (buffer.fd, buffer.offset) == (driver.fd, 100)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(driver.fd)
    buffer.close()


@pytest.mark.parametrize("address", [BASE - 1, BASE + 16 * PAGE])
def test_what_is_no_memory_of_a_gpu(address: int) -> None:
    with pytest.raises(InvalidBuffer, match="not memory of a GPU"):
        export_dmabuf(address, 1, FakeDriver())


def test_more_than_the_allocation() -> None:
    with pytest.raises(InvalidBuffer, match="not memory of a GPU"):
        export_dmabuf(BASE, 16 * PAGE + 1, FakeDriver())
    with pytest.raises(InvalidBuffer, match="share a page"):
        export_dmabuf(BASE + 512, 100, FakeDriver(512, BASE + 512))


def test_a_driver_that_exports_none() -> None:
    driver = FakeDriver()
    driver.error = 801
    with pytest.raises(ResourceUnavailable, match="not supported") as caught:
        export_dmabuf(BASE, PAGE, driver)
    assert "open kernel modules" in caught.value.remedy
    assert "tensor.cpu()" in caught.value.remedy


def test_no_driver_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cenote.runtime.cuda._LIBRARY", "libcuda.so.that-is-not-here")
    with pytest.raises(ResourceUnavailable, match="no CUDA driver") as caught:
        export_dmabuf(BASE, PAGE)
    assert "tensor.cpu()" in caught.value.remedy


# ---- moving ---------------------------------------------------------------------------------


@pytest.fixture
def far() -> Iterator[FakeFarEnd]:
    with FakeFarEnd(("fake0", "fake1")) as far:
        for device in far.near_verbs.devices.values():
            device.takes_dmabufs = True
        yield far


def exported(address: int, length: int) -> DmaBuf:
    return DmaBuf(os.open("/dev/null", os.O_RDONLY), 0)


def test_bytes_go_to_and_from_a_gpu(far: FakeFarEnd) -> None:
    """Batches and single extents, over both NICs; nothing staged, nothing over TCP."""
    channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
    memory = LocalMemory(SIZE_BYTES)
    region = far.transport.register_device(memory.address, SIZE_BYTES, memory, exported)
    data = payload(SIZE_BYTES, 1)
    memory.bytes[:] = np.frombuffer(data, np.uint8)
    extents = batch([(far.segment_id, i << 16, 1 << 16) for i in range(16)])
    addresses = (np.arange(16, dtype=np.uint64) << np.uint64(16)) + np.uint64(memory.address)
    assert not channel.write(extents, addresses, 7, DEADLINE_S).any()
    assert far.peek(0, SIZE_BYTES) == data
    memory.bytes[:] = 0
    assert not channel.read(extents, addresses, DEADLINE_S).any()
    assert memory.bytes.tobytes() == data
    one = (far.segment_id, 0, 4096, memory.address)
    assert channel.write_one(*one, 7, DEADLINE_S, False)[0] == 0
    assert channel.read_one(*one, DEADLINE_S, False)[0] == 0
    counters = far.transport.counters
    assert (counters.staged_bytes, counters.tcp_calls) == (0, 0)
    far.transport.deregister(region)
    assert not far.transport.memory.has_device_memory
    channel.close()


def test_the_processor_keeps_off_it(far: FakeFarEnd) -> None:
    """No checksum, no TCP; host memory goes on as before."""
    channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
    memory, plain = LocalMemory(4096), LocalMemory(4096)
    far.transport.register_device(memory.address, 4096, memory, exported)
    on_gpu = (far.segment_id, 0, 4096, memory.address)
    on_host = (far.segment_id, 0, 4096, plain.address)
    with pytest.raises(ResourceUnavailable, match="checksum"):
        channel.write_one(*on_gpu, 7, DEADLINE_S, True)
    assert channel.write_one(*on_host, 7, DEADLINE_S, True)[0] == 0
    for device in far.near_verbs.devices.values():
        far.fabric.pull(device)
    assert channel.read_one(*on_host, DEADLINE_S, False)[0] == 0
    assert far.transport.counters.tcp_calls == 1
    with pytest.raises(ResourceUnavailable, match="does not go over RDMA now") as caught:
        channel.read_one(*on_gpu, DEADLINE_S, False)
    assert "host memory" in caught.value.remedy
    assert far.transport.counters.tcp_calls == 1
    channel.close()


def test_a_nic_that_takes_none(far: FakeFarEnd) -> None:
    far.near_verbs.devices["fake1"].takes_dmabufs = False
    memory = LocalMemory(4096)
    with pytest.raises(ResourceUnavailable, match=r"takes no dma-bufs.*EOPNOTSUPP") as caught:
        far.transport.register_device(memory.address, 4096, memory, exported)
    assert "tensor.cpu()" in caught.value.remedy
    assert not far.transport.memory.has_device_memory
    assert far.near_verbs.devices["fake0"].regions == 0


def test_nics_near_the_gpu_come_first(far: FakeFarEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """From when its memory is registered: those of another NUMA node stand by."""
    ports = far.transport._nics.ports
    far.transport._nics.ports = tuple(
        replace(port, numa_node=node) for port, node in zip(ports, (1, 0), strict=True)
    )
    far.transport._place = Place()

    def order() -> list[tuple[str, bool]]:
        return [(p.local.device, p.standby) for p in far.transport.paths_to(far.node).paths]

    assert order() == [("fake0", False), ("fake1", False)]
    places = {"0000:3b:00.0": Place(0), "0000:ff:00.0": Place()}
    monkeypatch.setattr("cenote.transport.rdma.read_pci_place", places.__getitem__)
    memory = LocalMemory(4096)
    for address in ("", "0000:ff:00.0"):
        region = far.transport.register_device(
            memory.address, 4096, memory, exported, bus_address=address
        )
        far.transport.deregister(region)
        assert order() == [("fake0", False), ("fake1", False)]
    far.transport.register_device(
        memory.address, 4096, memory, exported, bus_address="0000:3b:00.0"
    )
    assert order() == [("fake1", False), ("fake0", True)]


def test_reads_that_a_lease_proves(far: FakeFarEnd) -> None:
    """Straight into the GPU, and the daemon says whether its leader is still the lease's."""
    channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
    memory = LocalMemory(SIZE_BYTES)
    data = payload(SIZE_BYTES, 4)
    far.poke(0, data)
    extents = batch([(far.segment_id, i << 16, 1 << 16) for i in range(16)])
    addresses = (np.arange(16, dtype=np.uint64) << np.uint64(16)) + np.uint64(memory.address)
    lease_id = far.segments.first_grant_id + 5
    with pytest.raises(ResourceUnavailable, match="not registered"):
        channel.read_direct(extents, addresses, lease_id, DEADLINE_S)
    far.transport.register_device(memory.address, SIZE_BYTES, memory, exported)
    assert not channel.read_direct(extents, addresses, lease_id, DEADLINE_S).any()
    assert memory.bytes.tobytes() == data
    with pytest.raises(StaleEpoch, match="leader was replaced"):
        channel.read_direct(extents, addresses, 0, DEADLINE_S)
    far.segments.first_grant_id = (lease_id | ((1 << 40) - 1)) + 1
    with pytest.raises(StaleEpoch, match="leader was replaced"):
        channel.read_direct(extents, addresses, lease_id, DEADLINE_S)
    assert far.transport.counters.tcp_calls == 0
    for device in far.near_verbs.devices.values():
        far.fabric.pull(device)
    with pytest.raises(ResourceUnavailable, match="does not go over RDMA now"):
        channel.read_direct(extents, addresses, lease_id, DEADLINE_S)
    assert far.transport.counters.tcp_calls == 0
    channel.close()
