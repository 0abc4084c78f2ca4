from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from cenote.api.errors import ClientClosed, DeadlineExceeded, GrantRevoked, NoSpace, Unavailable
from cenote.transport.base import SessionIdentity
from cenote.transport.fake_segment import FakeSegment, FakeSegments
from cenote.transport.memory import Fault, FaultKind, MemoryChannel, MemoryNetwork, MemoryTransport
from cenote.transport.testing_support import LocalMemory, batch, seal_rows
from cenote.v1 import common_pb2

IDENTITY = SessionIdentity(b"0123456789abcdef", "boot", 1, common_pb2.Credentials())
NODE = common_pb2.NodeView(node_id=1)


@dataclass
class World:
    """Virtual time: a wait takes no real time, and runs `then` (once) before it ends."""

    segment: FakeSegment
    network: MemoryNetwork
    channel: MemoryChannel
    waited_s: list[float]
    then: Callable[[], None] | None = None

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        then, self.then = self.then, None
        if then is not None:
            then()
        return ready()


@pytest.fixture
def world() -> Iterator[World]:
    segment = FakeSegment(1, 1 << 16)
    waited: list[float] = []
    holder: list[World] = []
    network = MemoryNetwork(
        [FakeSegments([segment])], wait=lambda ready, timeout_s: holder[0].wait(ready, timeout_s)
    )
    channel = MemoryTransport(network).connect(NODE, IDENTITY, 1, 1.0)
    holder.append(World(segment, network, channel, waited))
    yield holder[0]
    segment.close()


def write(world: World, items: int = 1) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    memory = LocalMemory(64)
    extents = batch([(1, 64 * i, 64) for i in range(items)])
    return world.channel.write(extents, np.array([memory.address] * items, np.uint64), 7, 2.5)


def written(world: World) -> list[int]:
    """Offsets at which something was written."""
    return [i for i in range(0, 1 << 16, 64) if world.segment.view[i]]


def test_a_dropped_operation_is_not_done(world: World) -> None:
    world.network.fail_next(Fault(FaultKind.DROP))
    with pytest.raises(DeadlineExceeded):
        write(world)
    assert written(world) == []
    assert world.waited_s == [2.5]
    write(world)
    assert written(world) == [0]


def test_a_lost_reply_leaves_it_done(world: World) -> None:
    world.network.fail_next(Fault(FaultKind.LOSE_REPLY))
    with pytest.raises(DeadlineExceeded):
        write(world, 3)
    assert written(world) == [0, 64, 128]


def test_the_nth_operation_fails_after_some_items(world: World) -> None:
    first = world.network.operations
    world.network.fail(first + 2, Fault(FaultKind.ERROR, error=NoSpace("torn"), items=2))
    write(world)
    with pytest.raises(NoSpace):
        write(world, 5)
    assert written(world) == [0, 64]
    write(world, 5)
    assert len(written(world)) == 5
    assert world.network.operations == first + 3


def test_a_late_write_lands_when_told_to_and_not_after_a_cut(world: World) -> None:
    world.network.fail_next(Fault(FaultKind.LATE))
    with pytest.raises(DeadlineExceeded):
        write(world)
    assert written(world) == []
    assert world.network.deliver_late() == 1
    assert written(world) == [0]
    world.segment.view[0:64] = bytes(64)
    world.network.fail_next(Fault(FaultKind.LATE))
    with pytest.raises(DeadlineExceeded):
        write(world)
    world.network.cut([IDENTITY.session_id])
    assert world.network.deliver_late() == 0
    assert written(world) == []
    with pytest.raises(GrantRevoked):
        write(world)


def test_delays(world: World) -> None:
    world.network.fail_next(Fault(FaultKind.DELAY, delay_s=1.5))
    write(world)
    world.network.fail_next(Fault(FaultKind.DELAY, delay_s=9.0))
    with pytest.raises(DeadlineExceeded):
        write(world, 2)
    assert world.waited_s == [1.5, 2.5]
    assert written(world) == [0]


def test_a_pause_that_ends_in_time_and_one_that_does_not(world: World) -> None:
    world.network.pause(1)
    world.then = lambda: world.network.resume(1)
    write(world)
    world.network.pause(1)
    with pytest.raises(DeadlineExceeded):
        write(world, 2)
    world.then = world.channel.close
    with pytest.raises(ClientClosed):
        write(world, 2)
    assert written(world) == [0]


def test_a_daemon_that_goes_and_comes_back(world: World) -> None:
    world.network.stop(1)
    with pytest.raises(Unavailable):
        world.channel.seal(seal_rows([1], 1), 1.0)
    assert world.channel.view(batch([(1, 0, 1)]), 7, 1.0).views == [None]
    world.network.add(FakeSegments([world.segment]))
    world.network.fail_next(Fault(FaultKind.ERROR, error=Unavailable("torn"), items=1))
    with pytest.raises(Unavailable):
        world.channel.seal(seal_rows([1, 1], 1), 1.0)
    assert list(world.segment.seals) == [0]
    assert world.channel.seal(seal_rows([1, 1], 1), 1.0).tolist() == [0, 0]
