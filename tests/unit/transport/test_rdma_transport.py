"""The RDMA transport on fake devices: faults, buffers, leaks."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, ClassVar

import numpy as np
import pytest

from cenote.api.errors import (
    BufferInUse,
    DeadlineExceeded,
    InvalidArgument,
    ProtocolError,
    ResourceUnavailable,
    StaleEpoch,
)
from cenote.transport.rdma_lane import ask_daemon
from cenote.transport.testing_support import DEADLINE_S, GUARD, LocalMemory, batch, payload
from cenote.transport.verbs.base import VerbsError
from cenote.transport.verbs.fake import FakeQueuePair
from cenote.v1 import store_pb2
from fake_rdma import FakeFarEnd
from rdma_scenarios import ITEM_BYTES, ITEMS, Far, RdmaScenarios, Traffic, the_lane
from waiting import wait_until


class TestOnFakes(RdmaScenarios):
    devices: ClassVar[tuple[str, ...]] = ("fake0",)

    @contextmanager
    def far_end(self, **options: Any) -> Iterator[Far]:
        with FakeFarEnd(self.devices, **options) as far:
            yield far
        for verbs in (far.near_verbs, far.far_verbs):
            for device in verbs.devices.values():
                open_now = (device.regions, device.queue_pairs, device.completion_queues)
                assert open_now == (0, 0, 0), device.name

    def pull(self, far: Far, nic: int) -> None:
        assert isinstance(far, FakeFarEnd)
        far.fabric.pull(list(far.near_verbs.devices.values())[nic])

    def plug(self, far: Far, nic: int) -> None:
        assert isinstance(far, FakeFarEnd)
        far.fabric.plug(list(far.near_verbs.devices.values())[nic])

    def queue_pairs(self, far: Far) -> int:
        assert isinstance(far, FakeFarEnd)
        return len(far.fabric.pairs)

    def resources(self, far: Far) -> object:
        assert isinstance(far, FakeFarEnd)
        wait_until(lambda: not far.server.counters().connections, what="connections to end")
        devices = [*far.near_verbs.devices.values(), *far.far_verbs.devices.values()]
        counts = [(d.regions, d.completion_queues) for d in devices]
        return len(far.host._lanes), far.host.queue_pairs, counts, threading.active_count()


class TestOnTwoFakes(TestOnFakes):
    devices = ("fake0", "fake1")
    connects = 50


@pytest.fixture
def far() -> Iterator[FakeFarEnd]:
    with FakeFarEnd() as far:
        yield far


def test_a_deadline_that_passes_ends_what_is_under_way(far: FakeFarEnd) -> None:
    """Nothing lands later, here or there, though the network had it all along."""
    channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
    traffic = Traffic(far)
    data = traffic.write(channel)
    far.fabric.hold()
    traffic.memory.bytes[:] = GUARD
    with pytest.raises(DeadlineExceeded):
        channel.read(traffic.extents, traffic.addresses, 0.1)
    with pytest.raises(DeadlineExceeded):
        channel.write(traffic.extents, traffic.addresses, 7, 0.1)
    far.fabric.release()
    assert traffic.memory.untouched(0, ITEMS * ITEM_BYTES)
    assert far.peek(0, ITEM_BYTES) == data[:ITEM_BYTES]
    traffic.read(channel, data)
    assert far.transport.counters.tcp_calls == 0


def test_a_device_that_does_not_let_go(far: FakeFarEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the call says that its buffer is in use; staged, it is not."""

    def refuse(pair: FakeQueuePair) -> None:
        raise VerbsError(errno.EIO, "the device is gone")

    channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
    for registered, error in ((True, BufferInUse), (False, DeadlineExceeded)):
        traffic = Traffic(far, registered=registered)
        traffic.read(channel, traffic.write(channel))
        far.fabric.hold()
        with monkeypatch.context() as patched:
            patched.setattr(FakeQueuePair, "fail", refuse)
            patched.setattr(FakeQueuePair, "close", refuse)
            with pytest.raises(error):
                channel.read(traffic.extents, traffic.addresses, 0.1)
        far.fabric.release()
    channel.close()
    far.transport.close()  # not the devices, of which something is kept
    assert far.transport.memory.registered_bytes
    assert far.transport._nics.devices
    for pair in list(far.fabric.pairs.values()):  # what the device kept
        if pair.device in far.near_verbs.devices.values():
            pair.close()


def test_memory_that_can_not_be_registered(far: FakeFarEnd) -> None:
    """Not even for staging: everything goes over TCP, and says why."""
    channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
    for device in far.near_verbs.devices.values():
        device.register_fails = errno.ENOMEM
    memory = LocalMemory(4096)
    with pytest.raises(ResourceUnavailable, match="can't register"):
        far.transport.register(memory.address, 4096, memory)
    traffic = Traffic(far, registered=False)
    traffic.read(channel, traffic.write(channel))
    assert far.transport.counters.tcp_calls == 2
    assert "staging" in channel.obstacle or "register" in channel.obstacle


def test_a_daemon_that_can_not_register_its_memory() -> None:
    """What is not registered goes over TCP; what is registered later, over RDMA then."""
    with FakeFarEnd(chunk_bytes=8 << 20) as far:
        for device in far.far_verbs.devices.values():
            device.register_fails = errno.ENOMEM
        channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
        far.host._chunks[0][2:] = []
        far.host._chunks[0][1:2] = []
        data = payload(32 << 20, 1)
        source = np.frombuffer(data, np.uint8)
        extents = batch([(far.segment_id, i << 20, 1 << 20) for i in range(32)])
        steps = np.arange(32, dtype=np.uint64) << np.uint64(20)
        channel.close()
        channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
        assert not channel.write(extents, steps + np.uint64(source.ctypes.data), 7, 20.0).any()
        assert far.peek(0, 32 << 20) == data
        counters = far.transport.counters
        assert (counters.written_bytes, counters.tcp_calls) == (8 << 20, 1)
        with pytest.raises(ResourceUnavailable):
            far.host.register_more()
        for device in far.far_verbs.devices.values():
            device.register_fails = 0
        while not far.host.register_more():
            pass

        def goes_over_rdma() -> bool:
            before = counters.tcp_calls
            memory = LocalMemory(32 << 20)
            assert not channel.read(extents, steps + np.uint64(memory.address), 20.0).any()
            assert memory.bytes.tobytes() == data
            return counters.tcp_calls == before

        wait_until(goes_over_rdma, what="all of it to be read over RDMA")


def test_extents_over_two_registrations() -> None:
    with FakeFarEnd(chunk_bytes=1 << 20) as far:
        channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
        data = payload(5 << 20, 3)
        source = np.frombuffer(data, np.uint8)
        start = (1 << 19) + 77
        args = (far.segment_id, start, 5 << 20)
        assert channel.write_one(*args, source.ctypes.data, 7, DEADLINE_S, True)[0] == 0
        assert far.peek(start, 5 << 20) == data
        memory = LocalMemory(5 << 20)
        assert channel.read_one(*args, memory.address, DEADLINE_S, True)[0] == 0
        assert memory.bytes.tobytes() == data
        assert far.transport.counters.tcp_calls == 0


def test_writers_of_an_older_epoch_are_ended(far: FakeFarEnd) -> None:
    """When the daemon follows another leader, before it says so; reads go on over other lanes."""
    channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
    traffic = Traffic(far)
    data = traffic.write(channel)
    lane = the_lane(channel)
    far.set_epoch(2)
    size = 2 * ITEMS * ITEM_BYTES
    kept = far.peek(0, size)
    # What it has still to post, by whatever way, lands nowhere.
    lane.writers[0].pair.post(
        0,
        0,
        [traffic.memory.address],
        [64],
        [int(far.transport.memory.snapshot.keys["fake0"][0])],
        [far.segment.address],
        [int(lane.places.keys["fake0"][0])],
    )
    assert far.peek(0, size) == kept
    # Before the client hears that the connection was ended, its queue pair's silence is the NIC's
    # fault, for all it can know, and it goes over TCP for a moment.
    wait_until(lambda: not lane.connection.is_quiet(), what="the client to hear of it")
    with pytest.raises(StaleEpoch):
        channel.write(traffic.extents, traffic.addresses, 7, DEADLINE_S)
    traffic.read(channel, data)
    channel.epoch = 2
    traffic.read(channel, traffic.write(channel))
    assert far.transport.counters.tcp_calls == 0


def test_grants_from_before_are_void(far: FakeFarEnd) -> None:
    far.segments.first_grant_id = 8
    channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
    traffic = Traffic(far)
    statuses = channel.write(traffic.extents, traffic.addresses, 7, DEADLINE_S)
    assert set(statuses.tolist()) == {22}
    assert not channel.write(traffic.extents, traffic.addresses, 8, DEADLINE_S).any()


def test_a_daemon_without_room_for_queue_pairs() -> None:
    """Clients go on over TCP."""
    with FakeFarEnd() as far:
        far.host._queue_pairs_max = 0
        channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
        traffic = Traffic(far)
        traffic.read(channel, traffic.write(channel))
        assert far.transport.counters.tcp_calls == 2
        assert "queue pairs" in channel.obstacle


@pytest.mark.parametrize(
    "change",
    [
        {"number": 1 << 24},
        {"first_psn": 1 << 24},
        {"gid": b"short"},
        {"mtu_code": 0},
        {"mtu_code": 9},
        {"lid": 1 << 16},
        {"device": "no such device"},
        {"gid_index": 1 << 20},
    ],
    ids=str,
)
def test_requests_that_no_client_makes(far: FakeFarEnd, change: dict[str, Any]) -> None:
    """They cost the connection at most."""
    channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
    lane = the_lane(channel)
    wanted = store_pb2.RdmaQueuePair(
        device="fake0", port=1, gid_index=1, number=5, gid=bytes(16), mtu_code=5
    )
    for name, value in change.items():
        setattr(wanted, name, value)
    lane.connection.begin(monotonic() + DEADLINE_S, monotonic())
    with pytest.raises((ProtocolError, InvalidArgument)):
        ask_daemon(lane.connection, store_pb2.RdmaRequest(lane_id=9, queue_pairs=[wanted]))
    traffic, counters = Traffic(far), far.transport.counters

    def goes_over_rdma() -> bool:
        before = counters.tcp_calls
        traffic.read(channel, traffic.write(channel))
        return counters.tcp_calls == before

    # While the daemon lets go of that connection, TCP serves.
    wait_until(goes_over_rdma, what="RDMA over another connection")


def test_a_queue_pair_that_can_not_be_destroyed_keeps_its_session(
    far: FakeFarEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a session never seems to be cut off, for something could still land."""

    def refuse(pair: FakeQueuePair) -> None:
        raise VerbsError(errno.EIO, "the device is gone")

    channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
    traffic = Traffic(far)
    traffic.write(channel)
    pairs = [pair for pair in far.fabric.pairs.values() if pair.device is the_far_device(far)]
    with monkeypatch.context() as patched:
        patched.setattr(FakeQueuePair, "fail", refuse)
        patched.setattr(FakeQueuePair, "close", refuse)
        channel.close()
        wait_until(lambda: not far.server.counters().connections, what="the connection to end")
        session = far.identity.session_id
        assert far.sessions.cut([session], 0.1) == ([], [session])
        assert far.sessions.poll() == []
    assert far.sessions.poll() == [session]
    for pair in [*pairs, *far.fabric.pairs.values()]:
        pair.close()


def the_far_device(far: FakeFarEnd) -> object:
    return far.far_verbs.devices["fake0"]
