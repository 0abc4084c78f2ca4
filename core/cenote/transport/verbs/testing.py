"""The public contract of a `Verbs` library: the fake and the real ones pass this suite.

Derive a test class from `VerbsContract` and say in `verbs`, `device_name` and `gid_index` what to
use: a device whose queue pairs can be connected to each other. Nothing here needs pytest itself.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from .base import (
    Access,
    CompletionQueue,
    Device,
    MemoryRegion,
    Opcode,
    PathSettings,
    PortState,
    QueuePair,
    QueuePairAddress,
    QueuePairState,
    Verbs,
    VerbsError,
    WorkStatus,
)

__all__ = ["VerbsContract"]

AREA_BYTES = 1 << 20
WAIT_S = 20.0
ALL = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
DEPTH = 64


class Pair:
    """Two connected queue pairs and a registered area at either end."""

    def __init__(
        self, device: Device, gid_index: int, access: int = ALL, path: PathSettings | None = None
    ) -> None:
        self.device = device
        self.areas = [mmap.mmap(-1, AREA_BYTES) for _ in range(2)]
        self.addresses = [ctypes.addressof(ctypes.c_char.from_buffer(area)) for area in self.areas]
        self.regions: list[MemoryRegion] = [
            device.register(address, AREA_BYTES, ALL) for address in self.addresses
        ]
        self.queues: list[CompletionQueue] = [device.completion_queue(4 * DEPTH) for _ in range(2)]
        self.near: QueuePair = device.queue_pair(self.queues[0], DEPTH, 0)
        self.far: QueuePair = device.queue_pair(self.queues[1], DEPTH, access)
        path = path or PathSettings(port=1, gid_index=gid_index, timeout_exponent=16)
        self._connect(gid_index, path)

    def _connect(self, gid_index: int, path: PathSettings) -> None:
        port = self.device.port(1)
        gid = self.device.gid(1, gid_index)
        ends = [
            QueuePairAddress(pair.number, 100 + i, port.lid, gid, port.mtu_code)
            for i, pair in enumerate((self.near, self.far))
        ]
        self.near.connect(100, ends[1], path)
        self.far.connect(101, ends[0], path)

    def post(self, opcode: int, pieces: list[tuple[int, int, int]], first_id: int = 0) -> None:
        """Pieces of (offset here, offset there, length)."""
        self.near.post(
            opcode,
            first_id,
            [self.addresses[0] + here for here, _, _ in pieces],
            [length for _, _, length in pieces],
            [self.regions[0].local_key] * len(pieces),
            [self.addresses[1] + there for _, there, _ in pieces],
            [self.regions[1].remote_key] * len(pieces),
        )

    def wait(self, count: int) -> list[tuple[int, int]]:
        """So many completions, which must come."""
        found: list[tuple[int, int]] = []
        end = monotonic() + WAIT_S
        while len(found) < count:
            found += self.queues[0].poll(16)
            assert monotonic() < end, f"only {found} came"
        return found

    def close(self) -> None:
        self.near.close()
        self.far.close()
        for queue in self.queues:
            queue.close()
        for region in self.regions:
            region.close()


class VerbsContract:
    """The suite."""

    gid_index = 1

    def verbs(self) -> Verbs:
        raise NotImplementedError

    def device_name(self) -> str:
        raise NotImplementedError

    @contextmanager
    def device(self) -> Iterator[Device]:
        device = self.verbs().open(self.device_name())
        try:
            yield device
        finally:
            device.close()

    @contextmanager
    def pair(self, access: int = ALL, path: PathSettings | None = None) -> Iterator[Pair]:
        with self.device() as device:
            pair = Pair(device, self.gid_index, access, path)
            try:
                yield pair
            finally:
                pair.close()

    def _refused(self, number: int, call: Callable[[], object]) -> None:
        try:
            call()
        except VerbsError as error:
            refused = error.errno
        else:
            refused = 0
        assert refused == number

    def test_devices(self) -> None:
        verbs = self.verbs()
        assert self.device_name() in verbs.device_names()
        self._refused(errno.ENODEV, lambda: verbs.open("no such device"))
        with self.device() as device:
            assert device.name == self.device_name()
            limits = device.limits
            assert min(limits.queue_pairs, limits.work_requests, limits.completions) >= DEPTH
            assert limits.reads_in_flight >= 1
            port = device.port(1)
            assert port.state == PortState.ACTIVE
            assert port.message_bytes_max >= AREA_BYTES
            gid = device.gid(1, self.gid_index)
            assert len(gid) == 16
            assert any(gid)

    def test_bytes_move_both_ways(self) -> None:
        with self.pair() as pair:
            data = random.Random(1).randbytes(AREA_BYTES)
            pair.areas[0][:] = data
            pair.post(Opcode.WRITE, [(0, 0, AREA_BYTES)], 7)
            assert pair.wait(1) == [(7, WorkStatus.SUCCESS)]
            assert pair.areas[1][:] == data
            pair.areas[0][:] = bytes(AREA_BYTES)
            pair.post(Opcode.READ, [(1, 2, 1000), (5000, 3, 1), (9000, 4096, 100_000)], 40)
            assert pair.wait(1) == [(42, WorkStatus.SUCCESS)]
            wanted = bytearray(AREA_BYTES)
            wanted[1:1001] = data[2:1002]
            wanted[5000:5001] = data[3:4]
            wanted[9000:109_000] = data[4096:104_096]
            assert pair.areas[0][:] == wanted
            assert pair.queues[0].poll(16) == []
            assert pair.queues[1].poll(16) == []

    def test_only_the_last_of_a_chain_is_told(self) -> None:
        with self.pair() as pair:
            for first in (0, 1 << 20, (1 << 40) + 5):
                pair.post(Opcode.WRITE, [(i, i, 1) for i in range(32)], first)
                assert pair.wait(1) == [(first + 31, WorkStatus.SUCCESS)]
            assert pair.queues[0].poll(16) == []

    def test_as_deep_as_was_asked_for(self) -> None:
        with self.pair() as pair:
            for first in range(0, DEPTH, 16):
                pair.post(Opcode.WRITE, [(i, i, 1) for i in range(16)], first)
            ended = [(first + 15, WorkStatus.SUCCESS) for first in range(0, DEPTH, 16)]
            assert pair.wait(DEPTH // 16) == ended

    def test_the_wrong_place_is_refused(self) -> None:
        outside = [(0, AREA_BYTES - 10, 64), (0, AREA_BYTES + (1 << 30), 64)]
        for opcode in (Opcode.WRITE, Opcode.READ):
            for bad in outside:
                with self.pair() as pair:
                    pair.areas[0][:4] = pair.areas[1][:4] = b"kept"
                    pair.post(opcode, [(100, 100, 8), bad, (200, 200, 8)])
                    first, second = pair.wait(2)
                    assert first == (1, WorkStatus.REMOTE_ACCESS)
                    assert second == (2, WorkStatus.FLUSHED)
                    assert pair.near.state() == QueuePairState.ERROR
                    assert pair.areas[0][:4] == pair.areas[1][:4] == b"kept"
                    pair.post(opcode, [(0, 0, 8)], 9)  # taken, and not carried out
                    assert pair.wait(1) == [(9, WorkStatus.FLUSHED)]
            with self.pair() as pair:
                pair.post(opcode, [(AREA_BYTES - 4, 0, 64)])
                assert pair.wait(1) == [(0, WorkStatus.LOCAL_PROTECTION)]

    def test_a_closed_region_is_out_of_reach(self) -> None:
        with self.pair() as pair:
            pair.regions[1].close()
            pair.post(Opcode.WRITE, [(0, 0, 8)])
            assert pair.wait(1) == [(0, WorkStatus.REMOTE_ACCESS)]
            pair.regions[1] = pair.device.register(pair.addresses[1], AREA_BYTES, ALL)

    def test_a_queue_pair_allows_what_it_was_made_for(self) -> None:
        with self.pair(Access.REMOTE_READ) as pair:
            pair.post(Opcode.READ, [(0, 0, 64)])
            assert pair.wait(1) == [(0, WorkStatus.SUCCESS)]
            pair.post(Opcode.WRITE, [(0, 0, 64)])
            [(_, status)] = pair.wait(1)
            assert status != WorkStatus.SUCCESS

    def test_after_fail_the_peer_writes_no_more(self) -> None:
        quick = PathSettings(port=1, gid_index=self.gid_index, timeout_exponent=12, retries=2)
        with self.pair(path=quick) as pair:
            pair.areas[0][:4] = b"late"
            pair.far.fail()
            pair.far.fail()
            assert pair.far.state() == QueuePairState.ERROR
            pair.post(Opcode.WRITE, [(0, 0, 4), (0, 8, 4)])
            assert pair.wait(2) == [(0, WorkStatus.RETRIES_EXCEEDED), (1, WorkStatus.FLUSHED)]
            assert pair.areas[1][:12] == bytes(12)

    def test_a_peer_that_is_gone_is_noticed(self) -> None:
        quick = PathSettings(port=1, gid_index=self.gid_index, timeout_exponent=12, retries=2)
        with self.pair(path=quick) as pair:
            pair.far.close()
            pair.far.close()
            pair.post(Opcode.READ, [(0, 0, 4)])
            assert pair.wait(1) == [(0, WorkStatus.RETRIES_EXCEEDED)]

    def test_sleeping_until_there_is_something(self) -> None:
        with self.pair() as pair:
            queue = pair.queues[0]
            for turn in range(3):
                queue.arm()
                assert queue.poll(1) == []
                pair.post(Opcode.WRITE, [(0, 0, 64)], turn)
                if queue.fd >= 0:
                    assert select.select([queue.fd], [], [], WAIT_S)[0]
                    queue.consume_event()
                    assert not select.select([queue.fd], [], [], 0)[0]
                assert pair.wait(1) == [(turn, WorkStatus.SUCCESS)]

    def test_what_can_not_be_registered(self) -> None:
        with self.device() as device:
            area = mmap.mmap(-1, 4096)
            address = ctypes.addressof(ctypes.c_char.from_buffer(area))
            self._refused(errno.EINVAL, lambda: device.register(address, 4096, Access.REMOTE_WRITE))
            self._refused(errno.EINVAL, lambda: device.register(address, 0, Access.LOCAL_WRITE))
            self._refused(
                errno.EOPNOTSUPP, lambda: device.register_dmabuf(0, 0, 4096, 0, Access.LOCAL_WRITE)
            )

    def test_settings_that_would_never_notice_a_dead_peer(self) -> None:
        for retries, exponent in ((7, 14), (6, 0), (-1, 14), (6, 32)):
            try:
                PathSettings(1, 0, retries=retries, timeout_exponent=exponent)
            except ValueError:
                continue
            raise AssertionError((retries, exponent))
