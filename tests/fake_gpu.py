"""A GPU that is only memory: what is on it can't be touched but by its own copies.

Pages of a `FakeArray` have no permissions (mprotect), so a processor that reads, hashes or writes
there ends with SIGSEGV: a test that passes has shown that none did. Copies run when somebody looks
whether they are done, or never, on order.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from cenote.api.errors import CenoteError, ResourceUnavailable
from cenote.runtime.memory import address_of

__all__ = ["FakeArray", "FakeGpu", "FakeTensor", "no_gpu"]

_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_NOTHING, _ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE
LEGACY_STREAM = 1


class FakeArray:
    """`size_bytes` on a device, with the interface of CuPy's and Numba's arrays."""

    device = 0
    stream: int | None = None
    guarded = True

    def __init__(self, size_bytes: int, data: bytes = b"", *, guarded: bool = True) -> None:
        self.size_bytes = size_bytes
        self.guarded = guarded
        self._map = mmap.mmap(-1, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.address = address_of(self._map)
        self._map[: len(data)] = data
        self._protect(_NOTHING)

    def _protect(self, permissions: int) -> None:
        if self.guarded:
            assert _mprotect(self.address, len(self._map), permissions) == 0

    def holds(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + len(self._map)

    def copy(self, target: int, source: int, length: int) -> None:
        self._protect(_ALL)
        ctypes.memmove(target, source, length)
        self._protect(_NOTHING)

    @property
    def data(self) -> bytes:
        """What is there, as a test sees it."""
        self._protect(_ALL)
        found = self._map[: self.size_bytes]
        self._protect(_NOTHING)
        return found

    @data.setter
    def data(self, data: bytes) -> None:
        self._protect(_ALL)
        self._map[: len(data)] = data
        self._protect(_NOTHING)

    def part(self, first: int, length: int) -> FakePart:
        return FakePart(self, first, length)

    def rows(self, count: int) -> list[FakePart]:
        width = self.size_bytes // count
        return [self.part(i * width, width) for i in range(count)]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.part(0, self.size_bytes).__cuda_array_interface__


class FakePart:
    """Some of it."""

    def __init__(self, whole: FakeArray, first: int, length: int) -> None:
        self.whole, self.first, self.length = whole, first, length
        self.device = whole.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.length,),
            "typestr": "|u1",
            "data": (self.whole.address + self.first, False),
            "strides": None,
            "version": 3,
            "stream": self.whole.stream,
        }


class FakeTensor:
    """What is asked of a torch tensor."""

    def __init__(
        self,
        memory: np.ndarray[Any, Any] | FakeArray,
        device: str = "cpu",
        contiguous: bool = True,
    ) -> None:
        self._memory = memory
        self._contiguous = contiguous
        self.device = type(
            "device", (), {"type": device, "index": 0, "__str__": lambda _: device + ":0"}
        )()

    def data_ptr(self) -> int:
        if isinstance(self._memory, FakeArray):
            return self._memory.address
        return int(self._memory.ctypes.data)

    def is_contiguous(self) -> bool:
        return self._contiguous

    def numel(self) -> int:
        memory = self._memory
        return memory.size_bytes if isinstance(memory, FakeArray) else int(memory.size)

    def element_size(self) -> int:
        return 1 if isinstance(self._memory, FakeArray) else int(self._memory.itemsize)


FakeTensor.__module__ = "torch"


class FakeTicket:
    def __init__(self, gpu: FakeGpu, copies: Sequence[tuple[FakeArray, int, int, int]]) -> None:
        self._gpu = gpu
        self._copies = list(copies)
        self.is_done = False

    def done(self) -> bool:
        if self.is_done:
            return True
        if self._gpu.stuck:
            return False
        self.is_done = True
        self._gpu.under_way.remove(self)
        error, self._gpu.error = self._gpu.error, None
        if error is not None:
            raise error
        for array, target, source, length in self._copies:
            array.copy(target, source, length)
        return True


class FakeGpu:
    """See `cenote.runtime.gpu_copies.GpuCopies`."""

    def __init__(self, *arrays: FakeArray) -> None:
        self.arrays = list(arrays)
        self.pins = True
        self.pinned: dict[int, int] = {}
        self.stuck = False
        """What was begun does not end."""
        self.error: CenoteError | None = None
        """Of the copy that ends next."""
        self.under_way: list[FakeTicket] = []
        self.waited_for: list[int] = []
        """Streams that copies came after."""
        self.copies = 0
        self.most_under_way = 0
        self.flushes = 0
        self.is_closed = False

    def array(self, size_bytes: int, data: bytes = b"", *, guarded: bool = True) -> FakeArray:
        made = FakeArray(size_bytes, data, guarded=guarded)
        self.arrays.append(made)
        return made

    def open(self) -> FakeGpu:
        return self

    def bus_address(self, device: int) -> str:
        return f"0000:3{device}:00.0"

    def pin(self, device: int, address: int, length: int) -> bool:
        if self.pins:
            self.pinned[address] = length
        return self.pins

    def unpin(self, device: int, address: int) -> None:
        self.pinned.pop(address, None)

    def begin(
        self,
        device: int,
        lane: int,
        copies: Sequence[tuple[int, int, int]],
        streams: Sequence[int],
        to_host: bool,
    ) -> FakeTicket:
        self.waited_for += streams
        self.copies += len(copies)
        rows = []
        for there, here, length in copies:
            [array] = [each for each in self.arrays if each.holds(there, length)]
            assert array.device == device
            rows.append((array, here, there, length) if to_host else (array, there, here, length))
        return self._begun(rows)

    def settle(self, device: int, streams: Sequence[int]) -> FakeTicket:
        self.waited_for += streams
        return self._begun([])

    def _begun(self, rows: Sequence[tuple[FakeArray, int, int, int]]) -> FakeTicket:
        ticket = FakeTicket(self, rows)
        self.under_way.append(ticket)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return ticket

    def flush(self, device: int) -> None:
        self.flushes += 1

    def close(self) -> None:
        self.is_closed = True


def no_gpu() -> FakeGpu:
    """Instead of a driver."""
    raise ResourceUnavailable("there is no CUDA driver here", remedy="tensor.cpu()")
