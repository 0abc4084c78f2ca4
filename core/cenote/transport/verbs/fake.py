"""Devices that are only memory of this process, behind the same seam. For tests.

A `FakeFabric` connects the devices of several `FakeVerbs`. What is posted is carried out at once
and in order, by the thread that posts; `hold` makes it wait, as a slow network would. Regions,
queue pairs and completion queues are counted, so that a test sees what leaks.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

from .base import (
    Access,
    CompletionQueue,
    DeviceLimits,
    Opcode,
    PathSettings,
    PortInfo,
    PortState,
    QueuePairAddress,
    QueuePairState,
    VerbsError,
    WorkStatus,
)

__all__ = ["FakeDevice", "FakeFabric", "FakeVerbs"]

MESSAGE_BYTES_MAX: Final = 1 << 20
"""Small, so that splitting is tried."""


@dataclass(slots=True)
class _Request:
    number: int
    opcode: int
    local: int
    length: int
    local_key: int
    remote: int
    remote_key: int
    signalled: bool


@final
class FakeFabric:
    """All regions and queue pairs, and what goes wrong between them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.regions: dict[int, FakeRegion] = {}
        self.pairs: dict[int, FakeQueuePair] = {}
        self.keys = itertools.count(0x100)
        self.numbers = itertools.count(0x11)
        self.moved_bytes = 0
        self._held = False

    def hold(self) -> None:
        """Carry nothing out until `release`."""
        with self.lock:
            self._held = True

    def release(self) -> None:
        with self.lock:
            self._held = False
            for pair in list(self.pairs.values()):
                pair.work()

    @property
    def held(self) -> bool:
        return self._held

    def pull(self, device: FakeDevice) -> None:
        """The device's cable: what it sends is lost, and its port is down."""
        with self.lock:
            device.is_linked = False

    def plug(self, device: FakeDevice) -> None:
        with self.lock:
            device.is_linked = True


@final
class FakeVerbs:
    """See `base.Verbs`."""

    name = "fake"

    def __init__(self, fabric: FakeFabric, device_names: Sequence[str] = ("fake0",)) -> None:
        self.devices = {
            name: FakeDevice(fabric, name, (0xFE80 << 112 | index + 1).to_bytes(16, "big"))
            for index, name in enumerate(device_names)
        }

    def device_names(self) -> list[str]:
        return list(self.devices)

    def open(self, device_name: str) -> FakeDevice:
        device = self.devices.get(device_name)
        if device is None:
            raise VerbsError(errno.ENODEV, f"there is no RDMA device {device_name}")
        return device


@final
class FakeDevice:
    """See `base.Device`. `register_fails` is the errno that registering fails with, if any;
    `takes_dmabufs`: what stands for memory of a GPU is this process's, too."""

    event_fd = -1

    def __init__(self, fabric: FakeFabric, name: str, gid: bytes) -> None:
        self.name = name
        self.fabric = fabric
        self.is_linked = True
        self.register_fails = 0
        self.takes_dmabufs = False
        self.regions = 0
        self.queue_pairs = 0
        self.completion_queues = 0
        self.limits = DeviceLimits(
            queue_pairs=1024,
            work_requests=256,
            completions=4096,
            regions=1024,
            region_bytes=1 << 40,
            reads_in_flight=16,
            ports=1,
        )
        self._gid = gid

    def consume_event(self) -> int:
        raise VerbsError(errno.EAGAIN, "a fake device has no events")

    def port(self, number: int) -> PortInfo:
        if number != 1:
            raise VerbsError(errno.EINVAL, f"{self.name} has no port {number}")
        return PortInfo(
            state=PortState.ACTIVE if self.is_linked else PortState.DOWN,
            mtu_code=5,
            message_bytes_max=MESSAGE_BYTES_MAX,
            lid=0,
            gids=2,
            is_ethernet=True,
        )

    def gid(self, port: int, index: int) -> bytes:
        return self._gid if index < 2 else bytes(16)

    def register(self, address: int, length: int, access: int) -> FakeRegion:
        if self.register_fails:
            raise VerbsError(self.register_fails, os.strerror(self.register_fails))
        if length <= 0 or (access & Access.REMOTE_WRITE and not access & Access.LOCAL_WRITE):
            raise VerbsError(errno.EINVAL, "registering: no such region can be")
        return FakeRegion(self, address, length, access)

    def register_dmabuf(
        self, fd: int, offset: int, length: int, address: int, access: int
    ) -> FakeRegion:
        if not self.takes_dmabufs:
            raise VerbsError(errno.EOPNOTSUPP, "this fake device takes no dma-bufs")
        return self.register(address, length, access)

    def completion_queue(self, depth: int) -> FakeCompletionQueue:
        return FakeCompletionQueue(self, depth)

    def queue_pair(self, completions: CompletionQueue, depth: int, access: int) -> FakeQueuePair:
        assert isinstance(completions, FakeCompletionQueue)
        return FakeQueuePair(self, completions, depth, access)

    def close(self) -> None:
        if self.regions or self.queue_pairs or self.completion_queues:
            raise VerbsError(errno.EBUSY, f"{self.name} has something open")


@final
class FakeRegion:
    """See `base.MemoryRegion`."""

    def __init__(self, device: FakeDevice, address: int, length: int, access: int) -> None:
        self.device = device
        self.address = address
        self.length = length
        self.access = access
        with device.fabric.lock:
            self.local_key = self.remote_key = next(device.fabric.keys)
            device.fabric.regions[self.local_key] = self
            device.regions += 1

    def covers(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length

    def close(self) -> None:
        with self.device.fabric.lock:
            if self.device.fabric.regions.pop(self.local_key, None) is not None:
                self.device.regions -= 1


@final
class FakeCompletionQueue:
    """See `base.CompletionQueue`."""

    def __init__(self, device: FakeDevice, depth: int) -> None:
        self._device = device
        self._depth = depth
        self._ended: deque[tuple[int, int]] = deque()
        self._armed = False
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.pairs = 0
        device.completion_queues += 1
        self._closed = False

    def add(self, number: int, status: int) -> None:
        if len(self._ended) >= self._depth:
            raise VerbsError(errno.EOVERFLOW, "the completion queue ran over")
        self._ended.append((number, status))
        if self._armed:
            self._armed = False
            os.eventfd_write(self.fd, 1)

    def poll(self, most: int) -> list[tuple[int, int]]:
        with self._device.fabric.lock:
            return [self._ended.popleft() for _ in range(min(most, len(self._ended)))]

    def arm(self) -> None:
        self._armed = True

    def consume_event(self) -> None:
        os.eventfd_read(self.fd)

    def close(self) -> None:
        if self.pairs:
            raise VerbsError(errno.EBUSY, "the completion queue is in use")
        if not self._closed:
            self._closed = True
            self._device.completion_queues -= 1
            os.close(self.fd)


@final
class FakeQueuePair:
    """See `base.QueuePair`."""

    def __init__(
        self, device: FakeDevice, completions: FakeCompletionQueue, depth: int, access: int
    ) -> None:
        self.device = device
        self.access = access
        self._completions = completions
        self._depth = depth
        self._state = QueuePairState.RESET
        self._peer = 0
        self._pending: deque[_Request] = deque()
        fabric = device.fabric
        with fabric.lock:
            self.number = next(fabric.numbers)
            fabric.pairs[self.number] = self
            device.queue_pairs += 1
            completions.pairs += 1
        self._closed = False

    def connect(self, first_psn: int, peer: QueuePairAddress, path: PathSettings) -> None:
        if self._state != QueuePairState.RESET:
            raise VerbsError(errno.EINVAL, "connecting: the queue pair was used before")
        self._peer = peer.number
        self._state = QueuePairState.READY_TO_SEND

    def post(
        self,
        opcode: int,
        first_id: int,
        local_addresses: Sequence[int],
        lengths: Sequence[int],
        local_keys: Sequence[int],
        remote_addresses: Sequence[int],
        remote_keys: Sequence[int],
    ) -> None:
        columns = zip(
            local_addresses, lengths, local_keys, remote_addresses, remote_keys, strict=True
        )
        with self.device.fabric.lock:
            if self._closed or self._state == QueuePairState.RESET:
                raise VerbsError(errno.EINVAL, "posting: the queue pair is not connected")
            last = first_id + len(lengths) - 1
            for number, (local, length, key, remote, remote_key) in enumerate(columns, first_id):
                if len(self._pending) >= self._depth:
                    raise VerbsError(errno.ENOMEM, "posting: the queue pair is full")
                self._pending.append(
                    _Request(number, opcode, local, length, key, remote, remote_key, number == last)
                )
            self.work()

    def work(self) -> None:
        """Carry out what is pending. Under the fabric's lock."""
        while self._pending:
            if self._state == QueuePairState.ERROR:
                self._completions.add(self._pending.popleft().number, WorkStatus.FLUSHED)
                continue
            if self.device.fabric.held:
                return
            request = self._pending.popleft()
            status = self._carry_out(request)
            if status:
                self._state = QueuePairState.ERROR
            if status or request.signalled:
                self._completions.add(request.number, status)

    def _carry_out(self, request: _Request) -> int:
        fabric = self.device.fabric
        peer = fabric.pairs.get(self._peer)
        mine = fabric.regions.get(request.local_key)
        if mine is None or mine.device is not self.device:
            return WorkStatus.LOCAL_PROTECTION
        if not mine.covers(request.local, request.length):
            return WorkStatus.LOCAL_PROTECTION
        if request.opcode == Opcode.READ and not mine.access & Access.LOCAL_WRITE:
            return WorkStatus.LOCAL_PROTECTION
        if peer is None or not self.device.is_linked or not peer.device.is_linked:
            return WorkStatus.RETRIES_EXCEEDED
        if peer._state != QueuePairState.READY_TO_SEND or peer._peer != self.number:
            return WorkStatus.RETRIES_EXCEEDED
        theirs = fabric.regions.get(request.remote_key)
        wanted = Access.REMOTE_READ if request.opcode == Opcode.READ else Access.REMOTE_WRITE
        if theirs is None or theirs.device is not peer.device or request.length > MESSAGE_BYTES_MAX:
            return WorkStatus.REMOTE_ACCESS
        if not theirs.covers(request.remote, request.length):
            return WorkStatus.REMOTE_ACCESS
        if not peer.access & wanted or not theirs.access & wanted:
            return WorkStatus.REMOTE_ACCESS
        if request.opcode == Opcode.READ:
            ctypes.memmove(request.local, request.remote, request.length)
        else:
            ctypes.memmove(request.remote, request.local, request.length)
        fabric.moved_bytes += request.length
        return WorkStatus.SUCCESS

    def fail(self) -> None:
        with self.device.fabric.lock:
            if not self._closed:
                self._state = QueuePairState.ERROR
                self.work()

    def state(self) -> int:
        return self._state

    def close(self) -> None:
        fabric = self.device.fabric
        with fabric.lock:
            if self._closed:
                return
            self._closed = True
            self._pending.clear()
            self._completions.pairs -= 1
            self.device.queue_pairs -= 1
            with suppress(KeyError):
                del fabric.pairs[self.number]
