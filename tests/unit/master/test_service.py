"""The master as a service in process: what goes in, what comes out, and when."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.errors import (
    FingerprintMismatch,
    NamespaceNotFound,
    NamespaceReset,
    SessionUnknown,
)
from cenote.api.master import MasterApi
from cenote.api.rows import PUT, CommitStatus, PutStatus
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb
from master_pool import MasterPool, attach_request, u64

DECIDED = CommitStatus.DECIDED


# ---- the way of an object -------------------------------------------------------------------


def test_the_service_is_a_master_api() -> None:
    api: MasterApi = MasterPool(bare=True).service
    assert api is not None


def test_put_commit_acquire_exists_match() -> None:
    pool = MasterPool()
    started = pool.put_start(b"a", b"b", size=1000)
    assert np.frombuffer(started.puts, PUT)["status"].tolist() == [PutStatus.GRANTED] * 2
    assert started.epoch == 1
    committed = pool.put_commit(started)
    assert (list(committed.statuses), committed.epoch) == ([DECIDED, DECIDED], 1)
    assert pool.exists(b"a", b"x", b"b") == [1, 0, 1]
    found = pool.acquire(b"a", b"x")
    assert pool.statuses(found) == [1, 0]
    assert found.lease.lease_id
    assert (found.lease.ttl_ms, found.lease.epoch) == (5000, 1)
    matched = pool.service.match(pb.MatchRequest(keys=pool.batch(b"a", b"b", b"x", b"a")), 1.0)
    assert (matched.prefix_keys, matched.presence_bitmap) == (2, bytes([0b1011]))
    assert pool.put_start(b"a").puts[0] == PutStatus.EXISTS


def test_full_keys_are_hashed_with_the_namespaces_seed() -> None:
    pool = MasterPool()
    long_key = b"L" * 100
    started = pool.put_start(size=640, batch=pool.full(b"a", long_key))
    pool.put_commit(started)
    lengths = np.frombuffer(started.extents, "<u8").reshape(-1, 3)[:, 2].tolist()
    assert lengths == [640, 740]  # the long key's tail is reserved behind the payload
    assert pool.exists(b"a", long_key) == [1, 1]
    present = pool.service.exists(pb.ExistsRequest(keys=pool.full(b"a", b"x", long_key)), 1.0)
    assert list(present.present) == [1, 0, 1]


def test_full_keys_of_another_generation_are_refused() -> None:
    pool = MasterPool()
    batch = pool.full(b"a")
    batch.generation += 1
    with pytest.raises(NamespaceReset):
        pool.service.exists(pb.ExistsRequest(keys=batch), 1.0)
    batch.namespace_id += 1
    with pytest.raises(NamespaceReset):
        pool.service.exists(pb.ExistsRequest(keys=batch), 1.0)


def test_remove_answers_per_key() -> None:
    pool = MasterPool()
    pool.put(b"a", b"b")
    assert pool.remove(b"a", b"x") == [1, 0]
    assert pool.exists(b"a", b"b") == [0, 1]


def test_pin_and_unpin_answer_per_key() -> None:
    pool = MasterPool()
    pool.put(b"a")
    service = pool.service
    assert list(service.pin(pb.PinRequest(keys=pool.batch(b"a", b"x")), 1.0).pinned) == [1, 0]
    assert service.state.status(0).pinned_objects == 1
    unpinned = service.unpin(pb.UnpinRequest(keys=pool.batch(b"a", b"x")), 1.0).unpinned
    assert list(unpinned) == [1, 0]
    assert service.state.status(0).pinned_objects == 0


def test_a_retry_is_no_second_decision() -> None:
    pool = MasterPool()
    request = pb.PutStartRequest(
        keys=pool.batch(b"a"), sizes=u64(100), session_id=pool.session_id, request_id=7
    )
    first, again = pool.service.put_start(request, 1.0), pool.service.put_start(request, 1.0)
    assert first == again
    commit = pb.PutCommitRequest(
        grant_id=first.grant_id, checksums=u64(1), session_id=pool.session_id, request_id=8
    )
    assert pool.service.put_commit(commit, 1.0) == pool.service.put_commit(commit, 1.0)


def test_an_aborted_grant_decides_nothing() -> None:
    pool = MasterPool()
    started = pool.put_start(b"a")
    pool.service.put_abort(
        pb.PutAbortRequest(grant_id=started.grant_id, session_id=pool.session_id), 1.0
    )
    assert list(pool.put_commit(started).statuses) == [CommitStatus.NOT_GRANTED]


def test_a_hello_tells_the_limits_and_the_view() -> None:
    pool = MasterPool(nodes=2)
    hello = pool.hello()
    assert (hello.epoch, hello.is_leader, hello.batch_keys_max) == (1, True, 16384)
    assert hello.session_ttl_ms == hello.lease_ttl_max_ms == 10_000
    assert [node.name for node in hello.cluster_view.nodes] == ["node-1", "node-2"]
    assert {s.node_id for s in hello.cluster_view.segments} == {1, 2}
    assert hello.cluster_view.nodes[0].endpoints[0].address == "127.0.0.1:1"
    version = hello.cluster_view.view_version
    same = pool.service.get_cluster_view(pb.GetClusterViewRequest(known_view_version=version), 1.0)
    assert not same.HasField("cluster_view")
    pool.service.attach(attach_request(3), 1.0)
    changed = pool.service.get_cluster_view(
        pb.GetClusterViewRequest(known_view_version=version), 1.0
    )
    assert len(changed.cluster_view.nodes) == 3
    assert changed.cluster_view.view_version > version


def test_a_namespace_keeps_its_fingerprint() -> None:
    pool = MasterPool()
    with pytest.raises(FingerprintMismatch):
        pool.service.open_namespace(pb.OpenNamespaceRequest(name="models", fingerprint=b"g"), 1.0)
    with pytest.raises(NamespaceNotFound):
        pool.service.open_namespace(pb.OpenNamespaceRequest(name="other"), 1.0)
    again = pool.service.open_namespace(
        pb.OpenNamespaceRequest(name="models", fingerprint=b"f", create=True), 1.0
    )
    assert not again.created
    assert again.digest_seed == pool.namespace.digest_seed


def test_sessions_end_by_silence_and_are_renewed_with_their_leases() -> None:
    pool = MasterPool()
    pool.put(b"a")
    lease_id = pool.acquire(b"a").lease.lease_id
    renewed = pool.service.renew_session(
        pb.RenewSessionRequest(session_id=pool.session_id, lease_ids=u64(lease_id, 5)), 1.0
    )
    assert renewed.lost_lease_ids == u64(5)
    for _ in range(11):
        pool.clock.advance_s(1)
        pool.service.heartbeat(pb.HeartbeatRequest(node_id=1, epoch=1), 1.0)
        pool.service.tick()
    with pytest.raises(SessionUnknown):
        pool.put_start(b"b")
    pool.hello()
    assert list(pool.put(b"b")) == [DECIDED]
    pool.service.close_session(pb.CloseSessionRequest(session_id=pool.session_id), 1.0)
    with pytest.raises(SessionUnknown):
        pool.acquire(b"a")


def test_news_is_applied_before_what_it_rides_on() -> None:
    pool = MasterPool()
    pool.put(b"a")
    lease_id = pool.acquire(b"a").lease.lease_id
    assert pool.service.state.status(0).leases == 1
    news = common_pb2.Piggyback(released_lease_ids=u64(lease_id))
    pool.service.exists(pb.ExistsRequest(keys=pool.batch(b"a"), piggyback=news), 1.0)
    assert pool.service.state.status(0).leases == 0
    touched = common_pb2.Piggyback(
        namespace_id=pool.namespace.namespace_id,
        generation=pool.namespace.generation,
        touched_digests=pool.digest(b"a"),
    )
    pool.service.touch(pb.TouchRequest(piggyback=touched), 1.0)
    assert pool.service.state.counters.touched_keys == 1


@pytest.mark.parametrize("size", [1 << 21, 1 << 36, 1 << 40, (1 << 50) - 1000])
@pytest.mark.parametrize("count", [1, 2])
def test_objects_that_no_pool_can_hold_find_no_space(size: int, count: int) -> None:
    pool = MasterPool(size_bytes=1 << 20)
    started = pool.put_start(*[b"%d" % i for i in range(count)], size=size)
    statuses = np.frombuffer(started.puts, PUT)["status"].tolist()
    assert PutStatus.GRANTED not in statuses
    assert list(pool.put_commit(pool.put_start(b"small")).statuses) == [DECIDED]
