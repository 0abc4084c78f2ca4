"""A standby follows, campaigns and takes over; who asks it is sent to the leader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from cenote.api.errors import (
    NotLeader,
    ResourceUnavailable,
    StaleEpoch,
    TenureEnded,
    Unavailable,
)
from cenote.api.rows import CommitStatus, PutStatus
from cenote.master import standby as standby_module
from cenote.master.commands import ResetNamespace
from cenote.master.front import LEADER, STANDBY, Front
from cenote.master.journal import snapshot_records
from cenote.master.memory_backend import MemoryBackend, MemoryLog
from cenote.master.metadata import Followed, MasterRow
from cenote.master.operations import Settings
from cenote.master.service import MasterService
from cenote.master.standby import SnapshotLimits, Standby
from cenote.master.state_config import StateConfig
from cenote.runtime.clock import ManualClock
from cenote.v1 import master_pb2 as pb
from master_pool import MIB, MasterPool, attach_request, inventory_of, lane
from unit.master.state_checks import pool_of
from waiting import wait_until

KEYS = [b"%d" % i for i in range(20)]


class Waiting(MemoryBackend):
    """Waits for news as a service would; like one it takes a moment to make things durable."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log)
        self.slow = False
        self.waiting: list[tuple[int, Future[None]]] = []
        self.settled = 0

    def follow(self, timeout_s: float) -> Followed:
        followed = super().follow(timeout_s)
        if not followed.records:
            threading.Event().wait(0.002)
        return followed

    @property
    def durable_entry(self) -> int:
        return self.settled if self.slow else self.last_entry

    def sync(self, entry: int) -> Future[None]:
        if not self.slow or entry <= self.settled:
            return super().sync(entry)
        future: Future[None] = Future()
        self.waiting.append((entry, future))
        return future

    def settle(self) -> None:
        self.settled = self.last_entry
        for entry, future in self.waiting:
            if entry <= self.settled:
                future.set_result(None)
        self.waiting = [(e, f) for e, f in self.waiting if e > self.settled]


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def leader(log: MemoryLog) -> MasterPool:
    backend = Waiting(log)
    pool = MasterPool(backend)
    backend.join(MasterRow("one:1", ("one:1",)))
    backend.settle()
    return pool


class Follower:
    """A standby at work."""

    def __init__(self, log: MemoryLog, limits: SnapshotLimits | None = None) -> None:
        self.backend = Waiting(log)
        self.backend.join(MasterRow("two:2", ("two:2",)))
        self.standby = Standby(self.backend, StateConfig(), limits)
        self.service: MasterService | None = None
        self.clock = ManualClock()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        won = self.standby.run()
        if won is not None:
            service = MasterService(self.backend, StateConfig(), clock=self.clock)
            for _ in service.load(won.opened, won.followed):
                pass
            self.service = service

    def has_caught_up(self, log: MemoryLog, leader: MasterPool) -> bool:
        return self.standby.followed_entry == leader.backend.last_entry

    def lead(self, log: MemoryLog) -> MasterService:
        log.leader = None
        self.thread.join(10)
        assert self.service is not None
        return self.service

    def stop(self) -> None:
        self.standby.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()


def test_a_standby_takes_over_what_it_has_followed(log: MemoryLog, leader: MasterPool) -> None:
    leader.put(*KEYS[:10])
    follower = Follower(log)
    wait_until(lambda: follower.has_caught_up(log, leader), what="the standby has caught up")
    leader.put(*KEYS[10:])
    leader.remove(KEYS[3])
    started = leader.put_start(b"open")
    left = [key for key in KEYS if key != KEYS[3]]
    inventory = inventory_of(leader.acquire(*left), leader, left)
    followed = follower.standby
    service = follower.lead(log)
    assert service.epoch == 2
    assert service.state.object_count == 19
    assert followed._state._pool.epoch == 2
    # A grant of the epoch before is none of this one's.
    hello = service.hello(pb.HelloRequest(session_id=leader.session_id, boot_id="boot-1"), 1.0)
    assert (hello.epoch, hello.is_leader) == (2, True)
    commit = pb.PutCommitRequest(
        grant_id=started.grant_id,
        checksums=bytes(8),
        session_id=leader.session_id,
        request_id=999,
        epoch=1,
    )
    assert service.put_commit(commit, 1.0).statuses == bytes((CommitStatus.NOT_GRANTED,))
    exists = pb.ExistsRequest(keys=leader.batch(*KEYS))
    assert list(service.exists(exists, 1.0).present) == [i != 3 for i in range(20)]
    attached = service.attach(attach_request(inventory=inventory, last_epoch=2), 1.0)
    assert attached.epoch == 2
    start = pb.PutStartRequest(
        keys=leader.batch(b"new"),
        sizes=(100).to_bytes(8, "little"),
        session_id=leader.session_id,
        request_id=1,
    )
    reply = service.put_start(start, 1.0)
    assert reply.puts[0] == PutStatus.GRANTED
    assert reply.grant_id >> 40 == 2
    # The old leader's journal is closed to it.
    with pytest.raises(NotLeader) as lost:
        leader.put(b"late")
    assert lost.value.addresses == ("two:2",)
    assert leader.service.decider.lost is not None


class Unaware(MemoryBackend):
    """Has not heard yet of who was elected after it."""

    @property
    def lost(self) -> NotLeader | None:
        return None


@pytest.mark.parametrize("has_followed", [True, False], ids=["followed", "from its beginning"])
@pytest.mark.parametrize("kind", [MemoryBackend, Unaware])
def test_who_was_overtaken_while_it_loaded_does_not_lead(
    kind: type[MemoryBackend], has_followed: bool, log: MemoryLog, leader: MasterPool
) -> None:
    """What it reads is of its successor already: it stands by again, it does not end."""
    leader.put(*KEYS)
    slow = kind(log)
    if has_followed:
        won = Standby(slow, StateConfig())
        log.leader = None
        ours = won.run()
        assert ours is not None
        opened, followed = ours.opened, ours.followed
    else:
        log.leader = None
        assert slow.campaign(1.0)
        opened, followed = slow.open(), None
    assert opened.epoch == 2
    log.leader = None  # its tenure ended before it had read anything
    successor = MasterPool(MemoryBackend(log))
    assert successor.service.epoch == 3
    late = MasterService(slow, StateConfig())
    with pytest.raises(NotLeader, match=r"epoch 2 (is|was) over"):
        for _ in late.load(opened, followed):
            pass
    assert log.leader is successor.backend
    successor.put(b"new")


def test_a_standby_can_be_stopped(log: MemoryLog, leader: MasterPool) -> None:
    follower = Follower(log)
    follower.stop()
    assert follower.service is None


def test_nothing_piles_up_in_a_standby(log: MemoryLog, leader: MasterPool) -> None:
    follower = Follower(log)
    for i in range(30):
        leader.put(b"k%d" % i)
        leader.remove(b"k%d" % (i // 2))
    wait_until(lambda: follower.has_caught_up(log, leader), what="the standby has caught up")
    follower.stop()
    assert not follower.standby._state._pool.effects


def test_a_standby_writes_snapshots(log: MemoryLog, leader: MasterPool) -> None:
    leader.put(*KEYS)
    follower = Follower(log, SnapshotLimits(journal_bytes=1, journal_share=0.0, interval_s=0.0))
    wait_until(lambda: bool(log.snapshot) and not log.records, what="the journal is truncated")
    leader.put(b"more")
    wait_until(lambda: not log.records, what="... and again")
    other = Follower(log)
    wait_until(lambda: other.has_caught_up(log, leader), what="a new standby has caught up")
    other.stop()
    service = follower.lead(log)
    assert service.state.object_count == 21
    assert follower.standby.snapshots >= 2


def test_a_snapshot_is_given_up_when_the_leader_is_gone(
    log: MemoryLog, leader: MasterPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader.put(*KEYS)

    def vacate(*_: object, **__: object) -> Sequence[bytes]:
        log.leader = None
        return real(*_, **__)  # type: ignore[arg-type,return-value]

    real = snapshot_records
    monkeypatch.setattr(standby_module, "snapshot_records", vacate)
    follower = Follower(log, SnapshotLimits(journal_bytes=1, journal_share=0.0, interval_s=0.0))
    follower.thread.join(10)
    assert follower.service is not None
    assert not log.snapshot


# ---- the front --------------------------------------------------------------------------------


def test_a_standby_says_who_leads(log: MemoryLog, leader: MasterPool) -> None:
    backend = Waiting(log)
    backend.join(MasterRow("two:2", ("two:2",)))
    front = Front(backend, Settings(addresses=("two:2",), cluster_name="c"))
    role: str = front.role
    assert role == STANDBY
    hello = pb.HelloRequest(session_id=b"s" * 16).SerializeToString()
    connection = lane()
    reply = pb.HelloResponse.FromString(front.lane_hello(connection, hello))
    assert (reply.is_leader, list(reply.leader_addresses), reply.epoch) == (False, ["one:1"], 1)
    assert reply.cluster_name == "c"
    with pytest.raises(NotLeader) as told:
        front.dispatch(connection, pb.MASTER_METHOD_EXISTS, b"", 1000)
    assert (told.value.addresses, told.value.epoch) == (("one:1",), 1)
    log.leader = None
    with pytest.raises(NotLeader, match="no master leads") as told:
        front.dispatch(connection, pb.MASTER_METHOD_EXISTS, b"", 1000)
    assert told.value.addresses == ()
    # The session that a connection named is found when this master comes to lead.
    follower = Follower(log)
    follower.thread.join(10)
    front.leading = follower.service
    role = front.role
    assert role == LEADER
    front.flush_urgent()
    with pytest.raises(Exception, match="session"):
        front.dispatch(connection, pb.MASTER_METHOD_RENEW_SESSION, b"", 1000)


# ---- a service that is slow, or gone ------------------------------------------------------------


def test_space_is_given_away_only_when_what_freed_it_is_durable(log: MemoryLog) -> None:
    backend = Waiting(log)
    pool = MasterPool(backend, size_bytes=MIB // 4)
    backend.settle()
    while not pool.service.state.status(0).counters.evicted:  # fill it
        pool.put(*[b"f%d" % pool.next_request() for _ in range(16)], size=4000)
        pool.service.tick()
    backend.settle()
    backend.slow = True
    entry = backend.last_entry
    request = pb.PutStartRequest(
        keys=pool.batch(*[b"x%d" % i for i in range(32)]),
        sizes=(4000).to_bytes(8, "little"),
        session_id=pool.session_id,
        request_id=1 << 20,
    ).SerializeToString()
    waits = pool.service.dispatch(lane(pool.session_id), pb.MASTER_METHOD_PUT_START, request, 1000)
    assert not isinstance(waits, bytes), "it evicted, and that is not durable"
    assert asyncio.iscoroutine(waits)
    waits.close()
    assert backend.last_entry > entry
    backend.settle()
    again = pool.service.dispatch(lane(pool.session_id), pb.MASTER_METHOD_PUT_START, request, 1000)
    assert isinstance(again, bytes), "the same answer, at once"


def test_nobody_learns_a_seed_before_it_is_durable(log: MemoryLog) -> None:
    """Also who did not open the namespace: a later leader would draw another seed."""
    backend = Waiting(log)
    pool = MasterPool(backend)
    backend.settle()
    backend.slow = True
    request = pb.OpenNamespaceRequest(name="new", create=True, fingerprint=b"f")

    def open_it() -> object:
        body = request.SerializeToString()
        method = pb.MASTER_METHOD_OPEN_NAMESPACE
        return pool.service.dispatch(lane(pool.session_id), method, body, 1000)

    for who in ("who opens it", "who comes next"):
        waits = open_it()
        assert asyncio.iscoroutine(waits), who
        waits.close()
    backend.settle()
    assert isinstance(open_it(), bytes)
    pool.put(b"a")
    assert backend.durable_entry < backend.last_entry
    assert isinstance(open_it(), bytes), "it waits for nothing else"
    pool.service.decider.apply(ResetNamespace("new", 7))
    waits = open_it()
    assert asyncio.iscoroutine(waits), "a new generation has a new seed"
    waits.close()


def test_what_is_granted_is_made_up_for_before_it_is_needed(log: MemoryLog) -> None:
    """Between two ticks, too: what is evicted on demand keeps its writer waiting."""
    backend = Waiting(log)
    pool = MasterPool(backend, size_bytes=2 * MIB)
    pool.clock.advance_s(1.0)
    state = pool.service.state

    def free_bytes() -> int:
        status = state.status(0)
        return status.capacity_bytes - status.used_bytes

    while not state.status(0).counters.evicted:  # fill it
        pool.put(*[b"f%d" % pool.next_request() for _ in range(16)])
        pool.service.tick()
    pool.service.tick()
    backend.settle()
    before, evicted = free_bytes(), state.status(0).counters.evictions_on_demand
    for _ in range(50):
        pool.put(*[b"g%d" % pool.next_request() for _ in range(16)])
        pool.clock.advance_s(0.003)
        pool.service.flush()
    assert state.status(0).counters.evictions_on_demand == evicted
    assert free_bytes() > before / 2


class Pending:
    """A pool of which nothing more becomes durable; PutStarts, and whether they wait."""

    def __init__(self, log: MemoryLog) -> None:
        self.backend = Waiting(log)
        self.pool = MasterPool(self.backend, size_bytes=MIB)
        self.pool.put(b"a", b"b", b"c", size=4000)
        while (left := self.free_bytes()) > 20_000:
            self.pool.put(b"f%d" % left, size=min(left - 16_000, 100_000))
        self.backend.settle()
        self.pool.service.tick()
        self.backend.slow = True

    def free_bytes(self) -> int:
        (segment,) = pool_of(self.pool.service.state).segments.by_id.values()
        return segment.free_units * 64

    def remove(self, key: bytes) -> None:
        body = pb.RemoveRequest(keys=self.pool.batch(key)).SerializeToString()
        session = lane(self.pool.session_id)
        reply = self.pool.service.dispatch(session, pb.MASTER_METHOD_REMOVE, body, 1000)
        assert asyncio.iscoroutine(reply)
        reply.close()

    def waits(self, key: bytes, size: int) -> bool:
        body = pb.PutStartRequest(
            keys=self.pool.batch(key),
            sizes=size.to_bytes(8, "little"),
            session_id=self.pool.session_id,
            request_id=self.pool.next_request(),
        ).SerializeToString()
        session = lane(self.pool.session_id)
        reply = self.pool.service.dispatch(session, pb.MASTER_METHOD_PUT_START, body, 1000)
        if isinstance(reply, bytes):
            return False
        assert asyncio.iscoroutine(reply)
        reply.close()
        return True


def test_a_put_waits_for_a_removal_only_where_it_gets_its_space_or_is_of_its_key(
    log: MemoryLog,
) -> None:
    pending = Pending(log)
    pending.remove(b"b")
    assert not pending.waits(b"x", 4000), "there is other space, although this would just fit"
    assert pending.waits(b"b", 8000), "the removed key"
    assert any(pending.waits(b"x%d" % i, 4000) for i in range(8)), "nothing else is left"
    pending.backend.settle()
    assert not pending.waits(b"b", 100)


def test_a_put_waits_for_the_namespace_that_it_is_in(log: MemoryLog) -> None:
    """Who opens it waits by itself."""
    pending = Pending(log)
    service, pool = pending.pool.service, pending.pool
    open_it = pb.OpenNamespaceRequest(name="new", create=True).SerializeToString()
    reply = service.dispatch(lane(pool.session_id), pb.MASTER_METHOD_OPEN_NAMESPACE, open_it, 1000)
    assert asyncio.iscoroutine(reply)
    reply.close()
    assert pending.waits(b"x", 8000)
    pending.backend.settle()
    assert not pending.waits(b"y", 8000)


def test_pins_and_ticks_keep_nobody_waiting(log: MemoryLog) -> None:
    pending = Pending(log)
    body = pb.PinRequest(keys=pending.pool.batch(b"a"), ttl_ms=1000).SerializeToString()
    pending.pool.service.dispatch(lane(pending.pool.session_id), pb.MASTER_METHOD_PIN, body, 1000)
    pending.pool.service.tick()
    assert not pending.waits(b"x", 8000)


def test_a_relaxed_commit_does_not_wait(log: MemoryLog) -> None:
    backend = Waiting(log)
    pool = MasterPool(backend)
    backend.settle()
    backend.slow = True
    assert pool.put(b"a") == bytes((CommitStatus.DECIDED,))
    assert backend.durable_entry < backend.last_entry


def test_a_service_that_takes_no_writes_is_asked_again(log: MemoryLog) -> None:
    backend = Waiting(log)
    pool = MasterPool(backend)
    backend.refusal = ResourceUnavailable("the backlog is full")
    with pytest.raises(Unavailable, match="backlog is full"):
        pool.put_start(b"a")
    assert pool.exists(b"a") == [0]


def test_past_its_tenure_a_leader_says_so(log: MemoryLog) -> None:
    backend = Waiting(log)
    pool = MasterPool(backend)
    pool.put(b"a")
    backend.tenure_end_s = pool.clock.monotonic_s() + 1.0
    pool.service.tick()
    assert not pool.hello().past_tenure
    pool.clock.advance_s(1.0)
    assert pool.hello().past_tenure
    with pytest.raises(TenureEnded):
        pool.put_start(b"b")
    assert pool.statuses(pool.acquire(b"a")) == [2], "without a lease"
    with pytest.raises((TenureEnded, StaleEpoch)):
        pool.service.heartbeat(pb.HeartbeatRequest(node_id=1, epoch=1), 1.0)
    pool.service.note_probe(1, False)  # and what a probe finds has no consequence
    # What grew since the last tick counts at once.
    backend.tenure_end_s = pool.clock.monotonic_s() + 1.0
    assert pool.put_start(b"b").puts[0] == PutStatus.GRANTED
    assert not pool.hello().past_tenure
