"""Memory of this process that its RDMA devices may touch: what callers registered, and staging.

What a caller did not register goes through *staging blocks*, which are registered once: one copy
more, and no device ever touches memory that may have been given back.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final, final

import numpy as np

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    InvalidArgument,
    ResourceUnavailable,
)
from cenote.runtime.cuda import GPU_REMEDY, DmaBuf
from cenote.runtime.memlock import pinning_error
from cenote.runtime.memory import address_of

from .base import Region, U64Array
from .rdma_nics import Nics
from .rdma_places import NOWHERE, IndexArray
from .verbs.base import Access, Device, MemoryRegion, VerbsError

__all__ = ["LocalMemory", "Snapshot", "StagingBlock"]

BLOCK_BYTES: Final = 4 << 20
BLOCKS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Regions by their addresses, at one moment. Its indices are those of `keys`."""

    starts: U64Array
    ends: U64Array
    keys: dict[str, U64Array]
    """By device: the local key of each region."""
    start_list: list[int]
    end_list: list[int]

    def find_one(self, address: int, length: int) -> int:
        """As `find`, for one piece."""
        at = bisect_right(self.start_list, address) - 1
        return at if at >= 0 and address + length <= self.end_list[at] else NOWHERE

    def find(self, addresses: U64Array, lengths: U64Array) -> IndexArray:
        """The region that holds each piece; NOWHERE where none does."""
        if not len(self.starts):
            return np.full(len(addresses), NOWHERE, np.int64)
        at = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        ends = self.ends[at]  # of the last one for -1, which is told apart below
        inside = (at >= 0) & (addresses <= ends)
        inside &= lengths <= ends - np.minimum(addresses, ends)
        at[~inside] = NOWHERE
        return at


@final
class StagingBlock:
    """BLOCK_BYTES of registered memory, one user at a time."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_DONTFORK)
        self.address = address_of(self.memory)


@final
class LocalMemory:
    """Registrations with all devices of `nics`; for several threads."""

    def __init__(self, nics: Nics, *, blocks_max: int = BLOCKS_MAX) -> None:
        self._nics = nics
        self._blocks_max = blocks_max
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._regions: dict[int, tuple[Region, dict[str, MemoryRegion]]] = {}
        self._idle: list[StagingBlock] = []
        self._blocks = 0
        self._kept: list[object] = []
        self._device_regions: tuple[Region, ...] = ()
        self._closed = False
        self.registered_bytes = 0
        self.snapshot = self._taken()

    # ---- what callers register --------------------------------------------------------------

    def register(self, address: int, length: int, keeper: object) -> Region:
        """Pin memory for every device.

        Raises InvalidArgument, InvalidBuffer, ResourceUnavailable (the limit of locked memory).
        """
        return self._register(
            Region(address, length, keeper),
            lambda device: device.register(address, length, Access.LOCAL_WRITE),
            lambda error: pinning_error(error.errno or 0, length, "a buffer"),
        )

    def register_dmabuf(self, buffer: DmaBuf, address: int, length: int, keeper: object) -> Region:
        """Memory of another device, such as a GPU, for every NIC: `address` is what calls name it
        by. The processor never touches it: see `holds_device_memory`.

        Raises InvalidArgument, ResourceUnavailable (a NIC, its driver or the library can't).
        """
        region = self._register(
            Region(address, length, keeper),
            lambda device: device.register_dmabuf(
                buffer.fd, buffer.offset, length, address, Access.LOCAL_WRITE
            ),
            _dmabuf_error,
        )
        with self._lock:
            self._device_regions = (*self._device_regions, region)
        return region

    def _register(
        self,
        region: Region,
        make: Callable[[Device], MemoryRegion],
        error_of: Callable[[VerbsError], CenoteError],
    ) -> Region:
        if region.length <= 0:
            raise InvalidArgument(f"memory of {region.length} bytes can't be registered")
        made: dict[str, MemoryRegion] = {}
        try:
            for name, device in self._nics.devices.items():
                made[name] = make(device)
        except VerbsError as error:
            _let_go(made)
            raise error_of(error) from error
        with self._lock:
            if self._closed:
                _let_go(made)
                raise ClientClosed("the RDMA transport is closed")
            self._regions[id(region)] = region, made
            self.registered_bytes += region.length
            self.snapshot = self._taken()
        return region

    @property
    def has_device_memory(self) -> bool:
        return bool(self._device_regions)

    def holds_device_memory(self, addresses: U64Array) -> bool:
        """Whether any of these is in memory that the processor must not touch."""
        return any(
            ((addresses >= region.address) & (addresses < region.address + region.length)).any()
            for region in self._device_regions
        )

    def deregister(self, region: Region) -> None:
        """The reverse; no call may be using it. Idempotent."""
        with self._lock:
            _, made = self._regions.pop(id(region), (region, {}))
            if made:
                self.registered_bytes -= region.length
            self._device_regions = tuple(r for r in self._device_regions if r is not region)
            self.snapshot = self._taken()
        _let_go(made)

    def _taken(self) -> Snapshot:
        # A list first: memory that ends meanwhile may be deregistered by its finalizer, right here.
        held = list(self._regions.values())
        held.sort(key=lambda pair: pair[0].address)
        starts = np.array([region.address for region, _ in held], np.uint64)
        sizes = np.array([region.length for region, _ in held], np.uint64)
        keys = {
            name: np.array([made[name].local_key for _, made in held], np.uint64)
            for name in self._nics.devices
        }
        ends = starts + sizes
        return Snapshot(starts, ends, keys, starts.tolist(), ends.tolist())

    # ---- staging ----------------------------------------------------------------------------

    def take(self, count: int, deadline: float) -> Sequence[StagingBlock]:
        """One to `count` blocks; waits for the first one only.

        Raises ResourceUnavailable (none can be registered), DeadlineExceeded, ClientClosed.
        """
        taken: list[StagingBlock] = []
        with self._lock:
            while not self._idle and self._blocks >= self._blocks_max:
                left_s = deadline - monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded("all staging memory for RDMA was in use")
                self._changed.wait(left_s)
            if self._closed:
                raise ClientClosed("the RDMA transport is closed")
            while self._idle and len(taken) < count:
                taken.append(self._idle.pop())
            new = min(count - len(taken), self._blocks_max - self._blocks)
            self._blocks += new
        for made in range(new):
            block = StagingBlock()
            try:
                self.register(block.address, BLOCK_BYTES, block)
            except CenoteError as error:
                with self._lock:
                    self._blocks -= new - made
                    self._changed.notify_all()
                if taken:
                    break
                if isinstance(error, ResourceUnavailable | ClientClosed):
                    raise
                raise ResourceUnavailable(f"no staging memory for RDMA: {error}") from error
            taken.append(block)
        return taken

    def give_back(self, blocks: Sequence[StagingBlock]) -> None:
        """No device touches them any more."""
        if not blocks:
            return
        with self._lock:
            self._idle.extend(blocks)
            self._changed.notify_all()

    def keep(self, *things: object) -> None:
        """What a device did not let go of stays as it is until the process ends: it, its memory and
        the open devices. Libraries crash where a device is closed before what was made of it, so
        not even the collector may have them."""
        self._kept.append(things)
        kept = (things, self, self._nics, self._nics.devices)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def close(self) -> bool:
        """Let all go, when nothing is under way; False where something is kept, and with it all
        devices."""
        with self._lock:
            self._closed = True
            regions, self._regions = list(self._regions.values()), {}
            if self._kept:  # it may still be written into
                self._regions = {id(region): (region, made) for region, made in regions}
                return False
            self._idle.clear()
            self._changed.notify_all()
        for _, made in regions:
            _let_go(made)
        return True


def _dmabuf_error(error: VerbsError) -> CenoteError:
    number = error.errno or 0
    # Python's table has another name for this number, which the kernel's sources do not use.
    name = "EOPNOTSUPP" if number == errno.EOPNOTSUPP else errno.errorcode.get(number, number)
    what = f"{error.strerror or error} (errno {name})"
    return ResourceUnavailable(f"GPU memory can't be registered: {what}", remedy=GPU_REMEDY)


def _let_go(made: dict[str, MemoryRegion]) -> None:
    for region in made.values():
        with suppress(VerbsError):  # its device is gone, and with it the registration
            region.close()
