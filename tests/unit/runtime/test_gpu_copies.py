"""Copies by the CUDA driver. For the driver stands a program of a few lines, whose device memory is
host memory and whose streams do what they are given when somebody asks how far they are; on a
machine with a GPU the real one is tried, too."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import InvalidBuffer, ResourceUnavailable
from cenote.runtime.gpu_copies import CopyTicket, CudaCopies, open_cuda
from waiting import wait_until

NOT_READY = 600


def number(value: Any) -> int:
    return int(getattr(value, "value", value) or 0)


class FakeDriver:
    """What is asked of libcuda.so.1, with a stream as a list of what is to be done."""

    def __init__(self) -> None:
        self.handles = itertools.count(100)
        self.contexts: list[int] = []
        self.streams: dict[int, list[Callable[[], bool]]] = {1: [], 2: []}
        self.events: dict[int, bool] = {}
        self.pinned: dict[int, int] = {}
        self.retained: list[int] = []
        self.flushed = 0
        self.busy: set[int] = set()
        """Streams that do nothing for now."""
        self.codes: dict[str, int] = {}

    def _code(self, name: str) -> int:
        return self.codes.get(name, 0)

    def _run(self) -> None:
        for _ in range(len(self.streams) + 1):
            for stream, queue in self.streams.items():
                while queue and stream not in self.busy and queue[0]():
                    queue.pop(0)

    def cuInit(self, _flags: Any) -> int:
        return self._code("cuInit")

    def cuDeviceGet(self, handle: Any, device: Any) -> int:
        handle._obj.value = 50 + number(device)
        return 0 if number(device) < 2 else 101

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: Any, handle: Any) -> int:
        assert number(which) == 124
        value._obj.value = number(handle) == 50
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, _size: Any, handle: Any) -> int:
        text.value = f"0000:{number(handle)}:00.0".encode()
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        if number(device) > 1:
            return 101
        context._obj.value = 1000 + number(device)
        self.retained.append(number(device))
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        self.retained.remove(number(device))
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.contexts.append(number(context))
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self.contexts.pop()
        return 0

    def cuStreamCreate(self, stream: Any, _flags: Any) -> int:
        stream._obj.value = handle = next(self.handles)
        self.streams[handle] = []
        return 0

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        del self.streams[number(stream)]
        return 0

    def cuEventCreate(self, event: Any, _flags: Any) -> int:
        event._obj.value = handle = next(self.handles)
        self.events[handle] = True
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        handle = number(event)
        self.events[handle] = False

        def reached() -> bool:
            self.events[handle] = True
            return True

        self.streams[number(stream)].append(reached)
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, _flags: Any) -> int:
        handle = number(event)
        self.streams[number(stream)].append(lambda: self.events[handle])
        return 0

    def cuEventQuery(self, event: Any) -> int:
        self._run()
        if not self.events[number(event)]:
            return NOT_READY
        return self._code("cuEventQuery")

    def cuEventDestroy_v2(self, event: Any) -> int:
        return 0  # what waits for it still may

    def _copy(self, name: str, target: Any, source: Any, size: Any, stream: Any) -> int:
        if self._code(name):
            return self._code(name)
        assert self.contexts
        to, at, length = number(target), number(source), number(size)

        def copied() -> bool:
            ctypes.memmove(to, at, length)
            return True

        self.streams[number(stream)].append(copied)
        return 0

    def cuMemcpyDtoHAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        return self._copy("cuMemcpyDtoHAsync_v2", target, source, size, stream)

    def cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        return self._copy("cuMemcpyHtoDAsync_v2", target, source, size, stream)

    def cuMemHostRegister_v2(self, address: Any, size: Any, _flags: Any) -> int:
        if not self._code("cuMemHostRegister_v2"):
            self.pinned[number(address)] = number(size)
        return self._code("cuMemHostRegister_v2")

    def cuMemHostUnregister(self, address: Any) -> int:
        del self.pinned[number(address)]
        return 0

    def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:
        assert (target, scope) == (0, 100)
        self.flushed += 1
        return 801


def finish(ticket: CopyTicket) -> None:
    wait_until(ticket.done, what="the copies to end")


def memory(data: bytes = bytes(4096)) -> tuple[np.ndarray, int]:
    array = np.frombuffer(data, np.uint8).copy()
    return array, array.ctypes.data


def test_there_and_back() -> None:
    driver = FakeDriver()
    copies = CudaCopies(driver)
    data = np.random.default_rng(1).bytes(4096)
    device, there = memory(data)
    host, here = memory()
    finish(copies.begin(0, 0, [(there, here, 4096)], [], True))
    assert host.tobytes() == data
    device[:] = 0
    finish(copies.begin(1, 0, [(there, here, 100), (there + 200, here + 200, 50)], [], False))
    assert device[:100].tobytes() == data[:100]
    assert device[200:250].tobytes() == data[200:250]
    assert not device[100:200].any()
    assert not device[250:].any()
    copies.flush(1)
    assert driver.flushed == 1
    assert driver.contexts == []
    copies.close()
    assert driver.retained == []
    assert set(driver.streams) == {1, 2}


def test_copies_come_after_what_the_owner_computes() -> None:
    driver = FakeDriver()
    copies = CudaCopies(driver)
    device, there = memory(b"a" * 4096)
    host, here = memory()
    driver.busy.add(2)
    late = copies.begin(0, 0, [(there, here, 4096)], [2], True)
    settled = copies.settle(0, [2])
    other = copies.begin(0, 1, [(there, here, 10)], [1], True)
    finish(other)  # another lane does not wait for it
    assert not late.done()
    assert not settled.done()
    finish(copies.settle(0, [1]))
    assert host[10:].sum() == 0
    device[:] = ord("b")
    driver.busy.clear()
    finish(late)
    finish(settled)
    assert host.tobytes() == b"b" * 4096
    assert late.done()
    copies.close()


def test_pinned_memory() -> None:
    driver = FakeDriver()
    copies = CudaCopies(driver)
    _, here = memory()
    assert copies.pin(0, here, 4096)
    assert driver.pinned == {here: 4096}
    copies.unpin(0, here)
    driver.codes["cuMemHostRegister_v2"] = 712
    assert not copies.pin(0, here, 4096)
    copies.close()


def test_where_a_device_sits() -> None:
    copies = CudaCopies(FakeDriver())
    assert copies.bus_address(1) == "0000:51:00.0"
    assert copies.bus_address(2) == ""
    assert copies.device_count() == 2
    assert [copies.exports_dmabufs(number) for number in range(3)] == [True, False, False]


def test_no_driver_and_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cenote.runtime.gpu_copies._LIBRARY", "libcuda.so.that-is-not-here")
    with pytest.raises(ResourceUnavailable, match="no CUDA driver") as caught:
        open_cuda()
    assert "tensor.cpu()" in caught.value.remedy
    driver = FakeDriver()
    driver.codes["cuInit"] = 100
    with pytest.raises(ResourceUnavailable, match="CUDA error 100") as caught:
        CudaCopies(driver)
    assert "tensor.cpu()" in caught.value.remedy


def test_errors_are_told_when_nothing_is_under_way_any_more() -> None:
    driver = FakeDriver()
    copies = CudaCopies(driver)
    _, there = memory()
    _, here = memory()
    driver.codes["cuMemcpyDtoHAsync_v2"] = 1
    ticket = copies.begin(0, 0, [(there, here, 4096)], [], True)
    with pytest.raises(InvalidBuffer, match="CUDA error 1"):
        wait_until(ticket.done, what="an error")
    driver.codes = {"cuEventQuery": 700}
    ticket = copies.begin(0, 0, [(there, here, 4096)], [], True)
    with pytest.raises(InvalidBuffer, match="a copy failed"):
        wait_until(ticket.done, what="an error")
    with pytest.raises(InvalidBuffer, match="GPU 9 can't be used"):
        copies.begin(9, 0, [], [], True)
    assert driver.contexts == []
    copies.close()


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    """Memory that the driver gives, filled, copied out, changed and copied back."""
    try:
        copies = open_cuda()
    except ResourceUnavailable as error:
        pytest.skip(error.message)
    cuda = copies._cuda
    data = np.random.default_rng(2).bytes(1 << 20)
    host, here = memory(data)
    pinned = copies.pin(0, here, len(data))
    there = ctypes.c_uint64()
    with copies._current(0):
        assert cuda.cuMemAlloc_v2(ctypes.byref(there), ctypes.c_size_t(len(data))) == 0
    try:
        finish(copies.begin(0, 0, [(there.value, here, len(data))], [1], False))
        host[:] = 0
        finish(copies.settle(0, [1]))
        finish(copies.begin(0, 1, [(there.value, here, len(data))], [1], True))
        assert host.tobytes() == data
    finally:
        with copies._current(0):
            cuda.cuMemFree_v2(there)
        if pinned:
            copies.unpin(0, here)
        copies.close()
