"""Store daemons at the service: attaching in slices, heartbeats held open, probes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from cenote.api.errors import (
    InvalidArgument,
    NodeSuperseded,
    ResourceUnavailable,
    SessionUnknown,
    StaleEpoch,
)
from cenote.api.rows import SLOT
from cenote.master.memory_backend import MemoryLog
from cenote.master.operations import Later
from cenote.master.service import MasterService
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb
from master_pool import MasterPool, attach_request, inventory_of, lane, restarted
from waiting import loop_turns, wait_until_async


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def pool() -> MasterPool:
    return MasterPool()


# ---- daemons --------------------------------------------------------------------------------


def test_a_daemon_of_a_later_epoch_is_refused(pool: MasterPool) -> None:
    with pytest.raises(StaleEpoch, match="attached to epoch 9") as caught:
        pool.service.attach(attach_request(2, last_epoch=9), 1.0)
    assert "`epoch`" in caught.value.remedy


def test_an_attach_that_was_fenced_for_an_earlier_epoch_is_refused(log: MemoryLog) -> None:
    """Its connection broke, and the lane sent it to the next master, for which that daemon has
    fenced nobody yet: whoever writes there would do so under grants that this master knows not."""
    pool = MasterPool(log=log)
    pool.put(b"a")
    inventory = inventory_of(pool.acquire(b"a"), pool, [b"a"])
    pool.service.close()
    again = restarted(log)
    meant_for = again.service.epoch - 1
    with pytest.raises(StaleEpoch, match=f"fenced its writers for epoch {meant_for}"):
        again.service.attach(attach_request(inventory=inventory, last_epoch=meant_for), 1.0)
    assert again.service.state.status(0).nodes_alive == 0
    request = attach_request(inventory=inventory, last_epoch=again.service.epoch)
    assert again.service.attach(request, 1.0).clear_slots == b""


def test_an_attach_that_was_meant_for_another_pools_master_is_refused(pool: MasterPool) -> None:
    """It does not tell of its namespaces: what it holds would be cleared."""
    epoch = pool.service.epoch
    request = attach_request(last_epoch=epoch, master_pool_id=b"another one's id")
    with pytest.raises(StaleEpoch, match="of another pool, this is epoch"):
        pool.service.attach(request, 1.0)
    request.master_pool_id = pool.service.state.pool_id
    assert pool.service.attach(request, 1.0).epoch == epoch


def test_an_inventory_comes_in_slices(log: MemoryLog) -> None:
    keys = [b"%d" % i for i in range(5)]
    pool = MasterPool(log=log)
    pool.put(*keys)
    inventory = inventory_of(pool.acquire(*keys), pool, keys)
    pool.service.close()
    again = restarted(log)
    width = SLOT.itemsize
    for number in (0, 1, 1):  # the second slice comes twice
        part = inventory[2 * number * width : (2 * number + 2) * width]
        request = attach_request(inventory=part, more=True, slice=number)
        assert again.service.attach(request, 1.0).node_id == 0
    assert again.service.state.status(0).nodes_alive == 0
    last = again.service.attach(attach_request(inventory=inventory[4 * width :], slice=2), 1.0)
    assert last.node_id == 1
    assert again.exists(*keys) == [1] * 5
    assert again.service.state.status(0).nodes_alive == 1


def test_an_inventory_with_a_gap_is_refused(log: MemoryLog) -> None:
    """What is missing would be dropped as lost; and a last slice names no segments."""
    pool = MasterPool(log=log)
    pool.put(b"a", b"b")
    inventory = inventory_of(pool.acquire(b"a", b"b"), pool, [b"a", b"b"])
    half = inventory[: SLOT.itemsize]
    pool.service.close()
    again = restarted(log)
    attach = again.service.attach
    with pytest.raises(SessionUnknown, match="without those before it"):
        attach(attach_request(inventory=half, slice=1), 1.0)
    attach(attach_request(inventory=half, more=True), 1.0)
    with pytest.raises(SessionUnknown, match="slice 2 came after 1"):
        attach(attach_request(inventory=half, slice=2), 1.0)
    with pytest.raises(SessionUnknown):
        attach(attach_request(inventory=half, slice=1), 1.0)
    attach(attach_request(inventory=inventory), 1.0)
    assert again.exists(b"a", b"b") == [1, 1]


def test_slices_of_an_earlier_process_are_not_mixed_in(log: MemoryLog) -> None:
    pool = MasterPool(log=log)
    pool.put(b"a", b"b")
    inventory = inventory_of(pool.acquire(b"a", b"b"), pool, [b"a", b"b"])
    first, second = inventory[: SLOT.itemsize], inventory[SLOT.itemsize :]
    pool.service.close()
    again = restarted(log)
    attach = again.service.attach
    attach(attach_request(start_number=1, process_id=1, inventory=first, more=True), 1.0)
    attach(attach_request(start_number=2, process_id=2, inventory=first, more=True), 1.0)
    for number in (0, 1):
        with pytest.raises(NodeSuperseded):
            attach(attach_request(start_number=1, process_id=1, slice=number), 1.0)
    attach(attach_request(start_number=2, process_id=2, inventory=second, slice=1), 1.0)
    assert again.exists(b"a", b"b") == [1, 1]
    with pytest.raises(NodeSuperseded):
        attach(attach_request(start_number=1, process_id=1), 1.0)


def test_slices_are_bounded_in_number_and_size(pool: MasterPool) -> None:
    for number in range(10, 74):
        pool.service.attach(attach_request(number, more=True), 1.0)
    with pytest.raises(ResourceUnavailable, match="attaching already"):
        pool.service.attach(attach_request(99, more=True), 1.0)
    pool.clock.advance_s(61)
    request = attach_request(99, more=True, inventory=bytes(SLOT.itemsize * 8192))
    pool.service.attach(request, 1.0)
    request.slice = 1
    with pytest.raises(InvalidArgument, match="more rows than the 4096 slots"):
        pool.service.attach(request, 1.0)


def beat(service: MasterService, **fields: int) -> Awaitable[bytes] | bytes:
    request = pb.HeartbeatRequest(node_id=1, epoch=service.epoch, **fields)  # type: ignore[arg-type]
    return service.dispatch(lane(), pb.MASTER_METHOD_HEARTBEAT, request.SerializeToString(), 5000)


def test_a_heartbeat_is_held_until_there_is_something_to_do(pool: MasterPool) -> None:
    """A session that falls silent while it has a grant must be cut off by the daemon."""

    async def scenario() -> None:
        pool.put_start(b"a")
        held = beat(pool.service, wait_ms=30_000)
        assert not isinstance(held, bytes)
        task = asyncio.ensure_future(held)
        await loop_turns()
        for _ in range(9):
            pool.clock.advance_s(1)
            pool.service.tick()
            await loop_turns()
            assert not task.done()
        pool.clock.advance_s(2)
        pool.service.tick()
        reply = pb.HeartbeatResponse.FromString(await asyncio.wait_for(task, 5))
        (instruction,) = reply.instructions
        assert instruction.cut_sessions.session_ids == pool.session_id
        again = beat(pool.service, wait_ms=30_000)
        assert isinstance(again, bytes)  # not reported as done: told again at once
        done = beat(pool.service, wait_ms=0, done_instruction=instruction.number)
        assert isinstance(done, bytes)
        assert not pb.HeartbeatResponse.FromString(done).instructions

    asyncio.run(scenario())


def test_a_held_heartbeat_ends_in_time_and_by_a_later_one(pool: MasterPool) -> None:
    async def scenario() -> None:
        held = beat(pool.service, wait_ms=20)
        assert not isinstance(held, bytes)
        assert pb.HeartbeatResponse.FromString(await asyncio.wait_for(held, 5)).epoch == 1
        first = asyncio.ensure_future(_awaited(beat(pool.service, wait_ms=30_000)))
        await loop_turns()
        second = asyncio.ensure_future(_awaited(beat(pool.service, wait_ms=30_000)))
        await asyncio.wait_for(first, 5)
        assert not second.done()
        pool.service.release_waiting()
        await asyncio.wait_for(second, 5)

    asyncio.run(scenario())


async def _awaited(reply: Awaitable[bytes] | bytes) -> bytes:
    return reply if isinstance(reply, bytes) else await reply


def test_a_reported_node_is_probed_and_hidden_where_it_does_not_answer(pool: MasterPool) -> None:
    probed: list[int] = []
    pool.service.decider.on_probe = probed.append
    pool.put(b"a")
    report = pb.ReportFailureRequest(node_id=1, session_id=pool.session_id, what="timeout")
    answer = pool.service.report_failure(report, 1.0)
    assert answer.state == common_pb2.NODE_STATE_SUSPECT
    assert probed == [1]
    assert pool.service.endpoint_of(1, common_pb2.TRANSPORT_KIND_TCP) == "127.0.0.1:1"
    pool.service.note_probe(1, True)
    assert pool.exists(b"a") == [1]
    pool.service.note_probe(1, False)
    assert pool.exists(b"a") == [0]
    assert pool.hello().cluster_view.nodes[0].state == common_pb2.NODE_STATE_DEAD
    # That it talks to the master does not make it reachable: it is asked again.
    pool.service.heartbeat(pb.HeartbeatRequest(node_id=1, epoch=1), 1.0)
    assert pool.exists(b"a") == [0]
    assert probed == [1, 1]
    pool.service.note_probe(1, True)
    assert pool.exists(b"a") == [1]


def test_a_held_heartbeat_does_not_revive_its_sender(pool: MasterPool) -> None:
    pool.put(b"a")
    heartbeat = pb.HeartbeatRequest(node_id=1, epoch=1, wait_ms=1000)
    later = pool.service._operations.heartbeat(heartbeat)
    assert isinstance(later, Later)
    assert later.again is not None
    pool.clock.advance_s(10.0)
    pool.service.tick()
    assert pool.exists(b"a") == [0]
    later.again()
    assert pool.exists(b"a") == [0]
    pool.service.heartbeat(pb.HeartbeatRequest(node_id=1, epoch=1), 1.0)
    assert pool.exists(b"a") == [1]


def test_a_detach_of_another_epoch_is_refused(pool: MasterPool) -> None:
    with pytest.raises(StaleEpoch):
        pool.service.detach(pb.DetachRequest(node_id=1, epoch=9), 1.0)
    pool.put(b"a")
    pool.service.detach(pb.DetachRequest(node_id=1, epoch=1, contents_survive=True), 1.0)
    assert pool.exists(b"a") == [0]


def test_grpc_calls_are_served_on_the_loop(pool: MasterPool) -> None:
    async def scenario() -> None:
        pool.put(b"a")
        found = await pool.service.call(pb.ExistsRequest(keys=pool.batch(b"a")), 1.0)
        assert isinstance(found, pb.ExistsResponse)
        assert found.present == b"\1"
        held = asyncio.ensure_future(
            pool.service.call(pb.HeartbeatRequest(node_id=1, epoch=1, wait_ms=30_000), 10.0)
        )
        await wait_until_async(lambda: len(pool.service.polls), what="the heartbeat to be held")
        pool.service.release_waiting()
        assert isinstance(await asyncio.wait_for(held, 5), pb.HeartbeatResponse)

    asyncio.run(scenario())
