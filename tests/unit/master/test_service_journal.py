"""The service and its journal: nothing is said that is not written, and a restart knows it all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future

import pytest

from cenote.api.errors import (
    DeadlineExceeded,
    InternalError,
    ResourceUnavailable,
    SessionUnknown,
)
from cenote.api.rows import ObjectStatus, PutStatus
from cenote.master.memory_backend import MemoryBackend, MemoryLog
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb
from master_pool import MasterPool, attach_request, inventory_of, lane, restarted, u64
from waiting import loop_turns

JOURNALED = pb.PutOptions(durability=common_pb2.DURABILITY_JOURNALED)


class SlowDisk(MemoryBackend):
    """Syncs are done when `let_go` is called; `broken` makes appends fail."""

    shared = False

    def __init__(self, log: MemoryLog | None = None) -> None:
        super().__init__(log)
        self.slow = False
        self.broken = False
        self.waiting: list[tuple[int, Future[None]]] = []

    def append(self, records: Sequence[bytes]) -> int:
        if self.broken:
            raise ResourceUnavailable("no space left on device", remedy="make room")
        return super().append(records)

    def sync(self, entry: int) -> Future[None]:
        if not self.slow:
            return super().sync(entry)
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        self.waiting.append((entry, future))
        return future

    def let_go(self) -> None:
        waiting, self.waiting = self.waiting, []
        for _, future in waiting:
            future.set_result(None)


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def disk(log: MemoryLog) -> SlowDisk:
    return SlowDisk(log)


@pytest.fixture
def pool(disk: SlowDisk) -> MasterPool:
    return MasterPool(disk)


def on_lane(pool: MasterPool, method: int, request: object) -> bytes | Awaitable[bytes]:
    body = request.SerializeToString()  # type: ignore[attr-defined]
    return pool.service.dispatch(lane(pool.session_id), method, body, 5000)


# ---- before a reply leaves ------------------------------------------------------------------


def test_in_process_a_call_returns_after_the_append(pool: MasterPool, log: MemoryLog) -> None:
    started = pool.put_start(b"a")
    before = len(log.records)
    pool.put_commit(started)
    assert len(log.records) == before + 1


def test_on_the_lane_one_flush_appends_a_batch_of_replies(pool: MasterPool, log: MemoryLog) -> None:
    before = len(log.records)
    for key in (b"a", b"b", b"c"):
        request = pb.PutStartRequest(
            keys=pool.batch(key), sizes=u64(100), request_id=pool.next_request()
        )
        reply = on_lane(pool, pb.MASTER_METHOD_PUT_START, request)
        assert isinstance(reply, bytes)
        started = pb.PutStartResponse.FromString(reply)
        commit = pb.PutCommitRequest(
            grant_id=started.grant_id, checksums=u64(0), request_id=pool.next_request()
        )
        assert isinstance(on_lane(pool, pb.MASTER_METHOD_PUT_COMMIT, commit), bytes)
    assert len(log.records) == before
    pool.service.flush()
    assert len(log.records) == before + 1
    pool.service.flush()
    assert len(log.records) == before + 1


def test_what_can_wait_is_not_appended_while_the_disk_is_at_work(
    pool: MasterPool, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(pool.service.decider.backend), "is_syncing", True)
    started = pool.put_start(b"a")
    request = pb.PutCommitRequest(
        grant_id=started.grant_id, checksums=u64(0), request_id=pool.next_request()
    )
    before = len(log.records)
    assert isinstance(on_lane(pool, pb.MASTER_METHOD_PUT_COMMIT, request), bytes)
    pool.service.flush_urgent()
    pool.service.flush_soon()
    assert len(log.records) == before
    monkeypatch.setattr(type(pool.service.decider.backend), "is_syncing", False)
    pool.service.flush_soon()
    assert len(log.records) == before + 1


def test_a_tick_appends_whatever_the_disk_does(
    pool: MasterPool, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(pool.service.decider.backend), "is_syncing", True)
    started = pool.put_start(b"a")
    request = pb.PutCommitRequest(
        grant_id=started.grant_id, checksums=u64(0), request_id=pool.next_request()
    )
    before = len(log.records)
    assert isinstance(on_lane(pool, pb.MASTER_METHOD_PUT_COMMIT, request), bytes)
    pool.service.tick()
    assert len(log.records) == before + 1


def test_lookups_leave_no_trace(pool: MasterPool, log: MemoryLog) -> None:
    pool.put(b"a")
    before = len(log.records)
    pool.exists(b"a")
    pool.acquire(b"a")
    pool.service.tick()
    assert len(log.records) == before


def test_removes_and_journaled_commits_wait_for_the_disk(
    pool: MasterPool, disk: SlowDisk, log: MemoryLog
) -> None:
    async def scenario() -> None:
        disk.slow = True
        started = pool.put_start(b"a", options=JOURNALED)
        commit = pb.PutCommitRequest(grant_id=started.grant_id, checksums=u64(1))
        committed = on_lane(pool, pb.MASTER_METHOD_PUT_COMMIT, commit)
        removed = on_lane(pool, pb.MASTER_METHOD_REMOVE, pb.RemoveRequest(keys=pool.batch(b"a")))
        assert not isinstance(committed, bytes)
        assert not isinstance(removed, bytes)
        tasks = [asyncio.ensure_future(reply) for reply in (committed, removed)]
        await loop_turns()
        assert [entry for entry, _ in disk.waiting] == [
            disk.last_entry - 1,
            disk.last_entry,
        ]
        assert not any(task.done() for task in tasks)
        disk.let_go()
        commit_reply, remove_reply = await asyncio.gather(*tasks)
        assert pb.PutCommitResponse.FromString(commit_reply).statuses == b"\1"
        assert pb.RemoveResponse.FromString(remove_reply).removed == b"\1"

    asyncio.run(scenario())


def test_relaxed_commits_wait_for_nothing(pool: MasterPool, disk: SlowDisk) -> None:
    disk.slow = True
    assert pool.put(b"a") == b"\1"


def test_a_remove_of_an_unknown_key_is_journaled_too(pool: MasterPool, log: MemoryLog) -> None:
    before = len(log.records)
    assert pool.remove(b"never") == [0]
    assert len(log.records) == before + 1


def test_a_disk_that_never_confirms_ends_the_call_by_its_deadline(
    pool: MasterPool, disk: SlowDisk
) -> None:
    disk.slow = True
    request = pb.RemoveRequest(keys=pool.batch(b"a"))
    with pytest.raises(DeadlineExceeded, match="did not confirm") as caught:
        pool.service.remove(request, 0.01)
    assert caught.value.maybe_executed
    with pytest.raises(DeadlineExceeded):
        asyncio.run(asyncio.wait_for(pool.service.call(request, 0.01), 5))
    disk.let_go()


def test_a_cancelled_wait_does_not_disturb_the_disk(pool: MasterPool, disk: SlowDisk) -> None:
    async def scenario() -> None:
        disk.slow = True
        reply = on_lane(pool, pb.MASTER_METHOD_REMOVE, pb.RemoveRequest(keys=pool.batch(b"a")))
        assert not isinstance(reply, bytes)
        task = asyncio.ensure_future(reply)
        await loop_turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        disk.let_go()

    asyncio.run(scenario())


# ---- a journal that takes no writes ---------------------------------------------------------


def test_writes_are_refused_and_lookups_go_on(pool: MasterPool, disk: SlowDisk) -> None:
    pool.put(b"a")
    started = pool.put_start(b"b")
    disk.refusal = ResourceUnavailable("the disk is full", remedy="make room")
    service = pool.service
    for call in (
        lambda: pool.put_start(b"c"),
        lambda: pool.put_commit(started),
        lambda: pool.remove(b"a"),
        lambda: service.pin(pb.PinRequest(keys=pool.batch(b"a")), 1.0),
        lambda: service.attach(attach_request(2), 1.0),
        lambda: service.open_namespace(pb.OpenNamespaceRequest(name="n", create=True), 1.0),
    ):
        with pytest.raises(ResourceUnavailable, match="the disk is full"):
            call()
    assert pool.exists(b"a", b"b") == [1, 0]
    assert pool.statuses(pool.acquire(b"a")) == [1]
    disk.refusal = None
    assert pool.put_commit(started).statuses == b"\1"


def test_what_could_not_be_appended_is_kept_and_appended_first(
    pool: MasterPool, disk: SlowDisk, log: MemoryLog
) -> None:
    started = pool.put_start(b"a")
    disk.broken = True
    with pytest.raises(ResourceUnavailable, match="takes no writes: no space left"):
        pool.put_commit(started)
    with pytest.raises(ResourceUnavailable):
        pool.put_start(b"b")
    pool.service.tick()  # tried again, in vain, and nothing is lost
    assert pool.service.decider.refusal is not None
    disk.broken = False
    pool.clock.advance_s(1)
    pool.service.tick()
    assert pool.service.decider.refusal is None
    assert pool.put(b"b") == b"\1"
    pool.service.close()
    assert restarted(log).exists(b"a", b"b") == [1, 1]


def test_only_the_replies_that_need_a_failed_append_are_held_back(
    pool: MasterPool, disk: SlowDisk
) -> None:
    started = pool.put_start(b"a")
    disk.broken = True
    commit = pb.PutCommitRequest(grant_id=started.grant_id, checksums=u64(1))
    assert isinstance(on_lane(pool, pb.MASTER_METHOD_PUT_COMMIT, commit), bytes)
    with pytest.raises(ResourceUnavailable):
        pool.service.flush()  # the lane server cuts this connection
    exists = pb.ExistsRequest(keys=pool.batch(b"a"))
    assert isinstance(on_lane(pool, pb.MASTER_METHOD_EXISTS, exists), bytes)
    pool.service.flush()
    remove = pb.RemoveRequest(keys=pool.batch(b"a"))
    with pytest.raises(ResourceUnavailable):
        on_lane(pool, pb.MASTER_METHOD_REMOVE, remove)
    pool.service.flush()
    disk.broken = False
    pool.clock.advance_s(1)
    pool.service.tick()
    assert pool.put_commit(started).statuses == b"\4"  # decided already: under no request id


def test_a_decision_that_cannot_be_written_down_ends_all_writing(
    pool: MasterPool, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.put(b"a")
    started = pool.put_start(b"b")
    before = list(log.records)

    def fail(_entry: object) -> None:
        raise InternalError("columns")

    monkeypatch.setattr("cenote.master.journal.encode_entry", fail)
    with pytest.raises(InternalError, match="could not be journaled"):
        pool.put_commit(started)
    monkeypatch.undo()
    for _ in range(3):
        with pytest.raises(InternalError, match="could not be journaled"):
            pool.put_start(b"c")
        pool.clock.advance_s(2)
        pool.service.tick()
    assert pool.exists(b"a") == [1]
    pool.service.close()
    assert log.records == before
    assert restarted(log).exists(b"a", b"b") == [1, 0]


# ---- restarts -------------------------------------------------------------------------------


def test_a_restart_keeps_objects_and_namespaces_and_forgets_sessions(log: MemoryLog) -> None:
    pool = MasterPool(log=log)
    pool.put(b"a", b"b", b"c")
    pool.remove(b"b")
    pool.service.close()
    again = MasterPool(MemoryBackend(log), bare=True)
    again.namespace = pool.namespace
    assert again.service.epoch == 2
    assert again.exists(b"a", b"b", b"c") == [1, 0, 1]
    with pytest.raises(SessionUnknown):
        again.acquire(b"a")
    again.hello()
    # No daemon has attached yet: the objects are known, there is no capacity to lease from.
    assert again.statuses(again.acquire(b"a", b"b")) == [ObjectStatus.UNLEASED, 0]


def test_an_object_outlives_any_number_of_restarts(log: MemoryLog) -> None:
    pool = MasterPool(log=log)
    pool.put(*(b"%d" % i for i in range(300)))
    for _ in range(3):
        pool.service.close()
        pool = restarted(log)
        assert pool.exists(*(b"%d" % i for i in range(301))) == [1] * 300 + [0]


KEYS = [b"%d" % i for i in range(4)]


def with_attached_node(log: MemoryLog, inventory: bytes) -> MasterPool:
    pool = restarted(log, node_dead_s=1000.0, session_ttl_s=1000.0)
    request = attach_request(inventory=inventory, last_epoch=pool.service.epoch)
    attached = pool.service.attach(request, 1.0)
    assert attached.clear_slots == b""
    assert pool.exists(*KEYS) == [1, 1, 1, 1]
    return pool


def grants(pool: MasterPool) -> bool:
    return pool.put_start(b"new").puts[0] == PutStatus.GRANTED


def crash(log: MemoryLog) -> None:
    """What a killed process leaves."""
    log.leader = None


def test_after_a_crash_space_is_given_at_once(log: MemoryLog) -> None:
    """Leases of before prove nothing any more: their readers see that the tenure is over."""
    pool = MasterPool(log=log)
    pool.put(*KEYS)
    inventory = inventory_of(pool.acquire(*KEYS), pool, KEYS)
    crash(log)
    assert grants(with_attached_node(log, inventory))
