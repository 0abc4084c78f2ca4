"""What goes wrong on RDMA, as tests that run on fake devices and on real ones alike.

Derive a class, say in `far_end` where the daemon is, and how its cables are pulled.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import CenoteError, GrantRevoked, InvalidArgument, Unavailable
from cenote.transport.rdma_channel import RdmaChannel
from cenote.transport.rdma_lane import Lane
from cenote.transport.testing_support import (
    DEADLINE_S,
    GRACE_S,
    GUARD,
    LocalMemory,
    batch,
    payload,
)
from fake_rdma import FakeFarEnd
from rdma_daemon import RdmaFarEnd
from waiting import wait_until

__all__ = ["RdmaScenarios"]

Far = FakeFarEnd | RdmaFarEnd
ITEM_BYTES = 64 << 10
ITEMS = 64


def the_lane(channel: RdmaChannel) -> Lane:
    [lane] = channel._lanes._lanes.values()
    return lane


class Traffic:
    """ITEMS extents, written and read back, checked whenever a call says that it went well."""

    def __init__(self, far: Far, *, registered: bool = True) -> None:
        self.far = far
        self.memory = LocalMemory(ITEMS * ITEM_BYTES)
        self.region = None
        if registered:
            size = ITEMS * ITEM_BYTES
            self.region = far.transport.register(self.memory.address, size, self.memory)
        steps = np.arange(ITEMS, dtype=np.uint64)
        # With gaps there, so that they are as many work requests.
        places = [(far.segment_id, 2 * i * ITEM_BYTES, ITEM_BYTES) for i in range(ITEMS)]
        self.extents = batch(places)
        self.addresses = steps * np.uint64(ITEM_BYTES) + np.uint64(self.memory.address)
        self.turn = 0

    def write(self, channel: RdmaChannel, deadline_s: float = DEADLINE_S) -> bytes:
        self.turn += 1
        data = payload(ITEMS * ITEM_BYTES, self.turn)
        self.memory.bytes[:] = np.frombuffer(data, np.uint8)
        assert not channel.write(self.extents, self.addresses, 7, deadline_s).any()
        for i in range(0, ITEMS, 7):
            found = self.far.peek(2 * i * ITEM_BYTES, ITEM_BYTES)
            assert found == data[i * ITEM_BYTES : (i + 1) * ITEM_BYTES]
        return data

    def read(self, channel: RdmaChannel, data: bytes, deadline_s: float = DEADLINE_S) -> None:
        self.memory.bytes[:] = GUARD
        assert not channel.read(self.extents, self.addresses, deadline_s).any()
        assert self.memory.bytes.tobytes() == data

    def close(self) -> None:
        if self.region is not None:
            self.far.transport.deregister(self.region)


class RdmaScenarios:
    """The suite. `devices`: how many each end has."""

    connects = 1000

    def far_end(self, **options: Any) -> AbstractContextManager[Far]:
        raise NotImplementedError

    def pull(self, far: Far, nic: int) -> None:
        raise NotImplementedError

    def plug(self, far: Far, nic: int) -> None:
        raise NotImplementedError

    def device_count(self, far: Far) -> int:
        return len(far.transport._nics.ports)

    @contextlib.contextmanager
    def channel(self) -> Iterator[tuple[Far, RdmaChannel]]:
        with self.far_end() as far:
            channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
            try:
                yield far, channel
            finally:
                channel.close()

    # ---- what the daemon's device refuses ---------------------------------------------------

    @pytest.mark.parametrize("registered", [True, False])
    def test_a_wrong_key_costs_no_bytes(self, registered: bool) -> None:
        """The device refuses, the call goes over TCP, the next one over RDMA again."""
        with self.channel() as (far, channel):
            traffic = Traffic(far, registered=registered)
            data = traffic.write(channel)
            lane = the_lane(channel)
            for keys in lane.places.keys.values():
                keys ^= np.uint64(0x5A)
            traffic.read(channel, data)
            assert far.transport.counters.tcp_calls == 1
            data = traffic.write(channel)
            assert the_lane(channel) is not lane
            lane = the_lane(channel)
            for keys in lane.places.keys.values():
                keys ^= np.uint64(0x5A)
            traffic.read(channel, traffic.write(channel))
            assert far.transport.counters.tcp_calls == 2
            traffic.close()

    def test_beyond_what_is_registered(self) -> None:
        """A client that believes in more memory than there is gets what TCP says of it."""
        with self.channel() as (far, channel):
            memory = LocalMemory(4096)
            lane = the_lane(channel)
            for number, segment in lane.places._segments.items():
                longer = segment.ends + np.uint64(1 << 20)
                lane.places._segments[number] = replace(segment, ends=longer)
            status, _ = channel.read_one(
                far.segment_id, far.size_bytes, 4096, memory.address, DEADLINE_S, False
            )
            assert status == InvalidArgument.code
            assert memory.untouched(0, 4096)
            assert far.transport.counters.tcp_calls == 1

    # ---- cables -----------------------------------------------------------------------------

    def test_a_nic_whose_link_is_down(self) -> None:
        """With two, its share is finished on the other one; with none left, over TCP; and back."""
        with self.channel() as (far, channel):
            traffic = Traffic(far)
            data = traffic.write(channel)
            count = self.device_count(far)
            try:
                for nic in range(count):
                    self.pull(far, nic)
                    before = far.transport.counters.tcp_calls
                    traffic.read(channel, data)
                    data = traffic.write(channel)
                    over_tcp = far.transport.counters.tcp_calls - before
                    assert over_tcp == (0 if nic < count - 1 else 2)
                assert channel.obstacle
            finally:
                for nic in range(count):
                    self.plug(far, nic)
            self._wait_for_rdma(far, channel, traffic, data)
            traffic.close()

    def _wait_for_rdma(self, far: Far, channel: RdmaChannel, traffic: Traffic, data: bytes) -> None:
        """Over all devices, within the time that failed paths are left alone."""

        def is_back() -> bool:
            before = far.transport.counters.tcp_calls
            traffic.read(channel, data)
            lanes = list(channel._lanes._lanes.values())
            used = [len(lane.readers) for lane in lanes]
            return far.transport.counters.tcp_calls == before and max(used) == len(
                channel._lanes._paths
            )

        wait_until(is_back, timeout_s=120, what="RDMA over all devices again")

    def test_a_link_that_goes_down_in_the_middle(self) -> None:
        with self.channel() as (far, channel):
            if self.device_count(far) < 2:
                pytest.skip("this machine has one device")
            traffic = Traffic(far)
            data = traffic.write(channel)
            stop = threading.Event()
            errors: list[BaseException] = []

            def work() -> None:
                try:
                    while not stop.is_set():
                        traffic.read(channel, data)
                except BaseException as error:  # told by the test
                    errors.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            try:
                wait_until(
                    lambda: far.transport.counters.read_bytes > 4 * ITEMS * ITEM_BYTES,
                    timeout_s=60,
                    what="some reads",
                )
                self.pull(far, 0)
                wait_until(
                    lambda: errors or far.transport.counters.failed_paths,
                    timeout_s=60,
                    what="the failure to be noticed",
                )
                begun = far.transport.counters.read_bytes
                wait_until(
                    lambda: errors or far.transport.counters.read_bytes > begun,
                    timeout_s=60,
                    what="reads over the other device",
                )
            finally:
                stop.set()
                thread.join(60)
                self.plug(far, 0)
            assert errors == []
            traffic.close()

    # ---- peers ------------------------------------------------------------------------------

    def test_a_peer_that_dies_in_the_middle(self) -> None:
        with self.channel() as (far, channel):
            traffic = Traffic(far)
            data = traffic.write(channel)
            ended: list[tuple[type[BaseException], float]] = []
            killed_at: list[float] = []

            def work() -> None:
                try:
                    while True:
                        traffic.read(channel, data)
                except CenoteError as error:
                    ended.append((type(error), monotonic()))

            thread = threading.Thread(target=work)
            thread.start()
            wait_until(
                lambda: far.transport.counters.read_bytes > 2 * ITEMS * ITEM_BYTES,
                timeout_s=60,
                what="some reads",
            )
            killed_at.append(monotonic())
            far.stop()
            thread.join(60)
            [(kind, at)] = ended
            assert issubclass(kind, Unavailable)
            assert at - killed_at[0] < DEADLINE_S + GRACE_S
            # Nothing may land any more in what the caller has back.
            traffic.memory.bytes[:] = GUARD
            with pytest.raises(Unavailable):
                channel.read(traffic.extents, traffic.addresses, DEADLINE_S)
            assert traffic.memory.untouched(0, ITEMS * ITEM_BYTES)
            traffic.close()

    def test_a_peer_that_is_restarted(self) -> None:
        """At its old address: other queue pairs, other keys; what is late of before is nobody's."""
        with self.channel() as (far, channel):
            traffic = Traffic(far)
            traffic.write(channel)
            lane = the_lane(channel)
            far.restart()
            with contextlib.suppress(Unavailable):  # of the connections that broke
                channel.read(traffic.extents, traffic.addresses, DEADLINE_S)

            def is_well() -> bool:
                try:
                    traffic.read(channel, traffic.write(channel))
                except Unavailable:
                    return False
                return any(new is not lane for new in channel._lanes._lanes.values())

            wait_until(is_well, timeout_s=120, what="the new process to be used over RDMA")
            before = far.transport.counters.tcp_calls
            traffic.read(channel, traffic.write(channel))
            assert far.transport.counters.tcp_calls == before
            traffic.close()

    def test_a_writer_that_is_cut_off_writes_no_more(self) -> None:
        """Its queue pairs are ended before the daemon says that it is cut off."""
        with self.channel() as (far, channel):
            traffic = Traffic(far)
            traffic.write(channel)
            ended: list[BaseException] = []

            def work() -> None:
                try:
                    while True:
                        channel.write(traffic.extents, traffic.addresses, 7, DEADLINE_S)
                except CenoteError as error:
                    ended.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            wait_until(
                lambda: far.transport.counters.written_bytes > 2 * ITEMS * ITEM_BYTES,
                timeout_s=60,
                what="some writes",
            )
            far.cut(far.identity.session_id)
            size = 2 * ITEMS * ITEM_BYTES
            far.poke(0, bytes([GUARD]) * size)
            thread.join(60)
            assert [type(error) for error in ended] == [GrantRevoked]
            assert far.peek(0, size) == bytes([GUARD]) * size
            traffic.close()

    # ---- leaks ------------------------------------------------------------------------------

    def test_connecting_again_and_again_leaks_nothing(self) -> None:
        with self.far_end() as far:
            memory = LocalMemory(4096)

            def connect_and_read() -> None:
                channel = far.transport.connect(far.node, far.identity, 1, DEADLINE_S)
                status, _ = channel.write_one(
                    far.segment_id, 0, 4096, memory.address, 7, DEADLINE_S, False
                )
                assert status == 0
                channel.close()

            for _ in range(5):
                connect_and_read()
            wait_until(lambda: not self.queue_pairs(far), timeout_s=30, what="both ends to close")
            before = self.resources(far)
            for _ in range(self.connects):
                connect_and_read()
            wait_until(lambda: not self.queue_pairs(far), timeout_s=30, what="both ends to close")
            assert self.resources(far) == before

    def queue_pairs(self, far: Far) -> int:
        """How many are open, of both ends."""
        raise NotImplementedError

    def resources(self, far: Far) -> object:
        """Whatever else is open, of both ends; equal where nothing leaks."""
        raise NotImplementedError
