"""What a `Kv` promises (`cenote.kv.service`), held against etcd and against the model of it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator

import pytest

from cenote.kv.etcd import EtcdKv
from cenote.kv.service import (
    Created,
    Delete,
    Get,
    Kv,
    KvCompacted,
    KvEvent,
    KvRefused,
    KvUnavailable,
    Modified,
    Put,
    after,
    prefix_end,
)
from etcd import EtcdCluster
from kv_model import KvModel, ModelKv
from waiting import wait_until

T = 5.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(params=["model", "etcd"])
def kv(request: pytest.FixtureRequest) -> Iterator[Kv]:
    made: Kv
    if request.param == "model":
        made = ModelKv(KvModel(), threading.Condition(threading.RLock()))
    else:
        made = EtcdKv(request.getfixturevalue("etcd").options())
    yield made
    made.close()


@pytest.fixture
def p() -> bytes:
    """A prefix of the test's own."""
    return b"/" + uuid.uuid4().hex.encode() + b"/"


def put(kv: Kv, key: bytes, value: bytes = b"v", lease: int = 0) -> int:
    """Returns its revision."""
    reply = kv.txn((), (Put(key, value, lease),), timeout_s=T)
    assert reply.succeeded
    return reply.revision


def value(kv: Kv, key: bytes) -> bytes | None:
    rows = kv.range(key, timeout_s=T).rows
    return rows[0].value if rows else None


def test_what_was_put_is_read_in_order(kv: Kv, p: bytes) -> None:
    assert kv.range(p, prefix_end(p), timeout_s=T).rows == []
    revisions = [put(kv, p + name, name) for name in (b"b", b"a", b"c")]
    reply = kv.range(p, prefix_end(p), timeout_s=T)
    assert [row.key for row in reply.rows] == [p + b"a", p + b"b", p + b"c"]
    assert [row.value for row in reply.rows] == [b"a", b"b", b"c"]
    assert reply.rows[1].mod_revision == reply.rows[1].create_revision == revisions[0]
    assert revisions == sorted(set(revisions))
    assert reply.revision >= revisions[-1]
    again = put(kv, p + b"b", b"new")
    (row,) = kv.range(p + b"b", timeout_s=T).rows
    assert (row.value, row.create_revision, row.mod_revision) == (b"new", revisions[0], again)
    assert [r.key for r in kv.range(p + b"b", after(p + b"b"), timeout_s=T).rows] == [p + b"b"]


def test_a_limit_cuts_and_says_so(kv: Kv, p: bytes) -> None:
    for number in range(5):
        put(kv, p + b"%d" % number)
    reply = kv.range(p, prefix_end(p), limit=3, timeout_s=T)
    assert [row.key[-1:] for row in reply.rows] == [b"0", b"1", b"2"]
    assert reply.more
    reply = kv.range(p + b"3", prefix_end(p), limit=3, timeout_s=T)
    assert [row.key[-1:] for row in reply.rows] == [b"3", b"4"]
    assert not reply.more
    assert kv.range(p + b"0", keys_only=True, timeout_s=T).rows[0].value == b""


def test_a_transaction_does_one_branch_or_the_other(kv: Kv, p: bytes) -> None:
    a, b = p + b"a", p + b"b"
    first = kv.txn([Created(a, 0)], [Put(a, b"1"), Put(b, b"1")], [Get(a)], timeout_s=T)
    assert first.succeeded
    assert first.rows == []
    second = kv.txn([Created(a, 0)], [Put(a, b"2")], [Get(a), Get(p + b"none")], timeout_s=T)
    assert not second.succeeded
    found, missing = second.rows
    assert found is not None
    assert (found.value, found.mod_revision, missing) == (b"1", first.revision, None)
    assert second.revision == first.revision, "reading makes no revision"
    third = kv.txn(
        [Modified(a, first.revision), Modified(p + b"none", 0)], [Put(a, b"3")], timeout_s=T
    )
    assert third.succeeded
    assert not kv.txn([Modified(a, first.revision)], [Put(a, b"4")], timeout_s=T).succeeded
    assert kv.txn([Created(a, first.revision)], [Delete(p, prefix_end(p))], timeout_s=T).succeeded
    assert kv.range(p, prefix_end(p), timeout_s=T).rows == []
    assert kv.txn([Created(a, 0), Modified(a, 0)], [Get(b)], timeout_s=T).rows == [None]


def test_what_a_transaction_may_not_hold_is_refused(kv: Kv, p: bytes) -> None:
    with pytest.raises(KvRefused):
        kv.txn((), [Put(p + b"%d" % n, b"") for n in range(129)], timeout_s=T)
    with pytest.raises(KvRefused):
        kv.txn((), [Put(p + b"a", bytes(2 << 20))], timeout_s=T)
    with pytest.raises(KvRefused):
        kv.txn((), [Put(p + b"a", b"1"), Put(p + b"a", b"2")], timeout_s=T)
    assert value(kv, p + b"a") is None


def test_a_lease_takes_its_keys_with_it(kv: Kv, p: bytes) -> None:
    lease = kv.grant(60, timeout_s=T)
    put(kv, p + b"a", b"v", lease)
    put(kv, p + b"b", b"v", lease)
    put(kv, p + b"b", b"v")  # freed from it
    assert kv.keep_alive(lease, timeout_s=T)
    kv.revoke(lease, timeout_s=T)
    assert value(kv, p + b"a") is None
    assert value(kv, p + b"b") == b"v"
    assert not kv.keep_alive(lease, timeout_s=T)
    kv.revoke(lease, timeout_s=T)
    with pytest.raises(KvRefused):
        put(kv, p + b"c", b"v", lease)


def test_a_lease_ends_by_itself(kv: Kv, p: bytes) -> None:
    put(kv, p + b"a", b"v", kv.grant(1, timeout_s=T))
    wait_until(lambda: value(kv, p + b"a") is None, what="the lease to end")


def test_a_watch_sees_all_changes_from_its_revision_on(kv: Kv, p: bytes) -> None:
    first = put(kv, p + b"a", b"1")
    put(kv, p[:-1] + b"0outside")
    second = put(kv, p + b"a", b"2")
    watch = kv.watch(p, prefix_end(p), revision=first)
    seen: list[KvEvent] = []

    def sees(count: int) -> bool:
        seen.extend(watch.poll(1.0))
        return len(seen) >= count

    wait_until(lambda: sees(2), what="what had happened")
    third = kv.txn((), [Put(p + b"b", b"3"), Delete(p + b"a")], timeout_s=T).revision
    wait_until(lambda: sees(4), what="what happens")
    assert seen[:2] == [KvEvent(p + b"a", b"1", first), KvEvent(p + b"a", b"2", second)]
    assert sorted(seen[2:]) == [KvEvent(p + b"a", None, third), KvEvent(p + b"b", b"3", third)]
    assert watch.poll(0.01) == []
    watch.close()
    watch.close()


def test_a_watch_can_be_woken(kv: Kv, p: bytes) -> None:
    watch = kv.watch(p, prefix_end(p), revision=put(kv, p[:-1] + b"0") + 1)
    threading.Timer(0.05, watch.wake).start()
    assert watch.poll(30.0) == []
    watch.wake()
    assert watch.poll(30.0) == []
    watch.close()


def test_what_was_compacted_can_not_be_watched(kv: Kv, p: bytes) -> None:
    first = put(kv, p + b"a", b"1")
    put(kv, p + b"a", b"2")
    last = put(kv, p + b"a", b"3")
    kv.compact(last, timeout_s=T)
    kv.compact(last, timeout_s=T)
    watch = kv.watch(p, prefix_end(p), revision=first)
    with pytest.raises(KvCompacted):
        wait_until(lambda: watch.poll(1.0), what="the watch to be refused")
    watch = kv.watch(p, prefix_end(p), revision=last)
    assert wait_until(lambda: watch.poll(1.0), what="the newest") == [KvEvent(p + b"a", b"3", last)]
    watch.close()
    assert value(kv, p + b"a") == b"3"


def test_the_size_is_told(kv: Kv, p: bytes) -> None:
    put(kv, p + b"a", bytes(1000))
    assert kv.size_bytes(timeout_s=T) > 0


def test_a_closed_connection_does_nothing(kv: Kv, p: bytes) -> None:
    watch = kv.watch(p, prefix_end(p), revision=1)
    kv.close()
    kv.close()
    with pytest.raises(KvUnavailable):
        put(kv, p + b"a")
    with pytest.raises(KvUnavailable):
        wait_until(lambda: watch.poll(1.0), what="the watch to end")
