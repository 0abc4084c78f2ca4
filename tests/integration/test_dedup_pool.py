"""Content dedup in a pool of real processes: bytes that are there are neither moved nor stored
again, over restarts and takeovers, and nobody gets at bytes by their digest alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from admin import Admin, admin_of
from cenote.api.keys import digest_key
from cenote.api.rows import PUT, CommitStatus, PutStatus
from cenote.client import Client
from cenote.client.plan.steps import HashWide
from cenote.v1 import master_pb2 as pb
from cluster import Cluster
from etcd import EtcdCluster
from payloads import payload_of
from waiting import wait_until
from workers import shared_pool

pytestmark = pytest.mark.integration

SIZE = 200_000
EXTENT_BYTES = -(-SIZE // 64) * 64
VALUE = payload_of("the same bytes", SIZE)
KEYS = [f"key{i}" for i in range(10)]


def used_bytes(admin: Admin) -> int:
    """Of memory that holds objects."""
    return sum(node.used_bytes for node in admin.nodes().values())


def put_ten(client: Client) -> None:
    for key in KEYS:
        assert client.put(key, VALUE).stored


def check_ten(client: Client, admin: Admin) -> None:
    status = admin.status()
    assert (status.objects, status.used_bytes) == (10, EXTENT_BYTES)
    assert status.logical_bytes == 10 * EXTENT_BYTES
    assert client.get_batch(KEYS) == [VALUE] * 10


def remove_ten(client: Client, admin: Admin) -> None:
    """Nine, and then the last."""
    before = used_bytes(admin)
    for key in KEYS[:-1]:
        assert client.remove(key)
    client.forget_locations()
    assert client.get_batch(KEYS) == [None] * 9 + [VALUE]
    assert admin.status().used_bytes == EXTENT_BYTES
    assert client.remove(KEYS[-1])
    assert admin.status().used_bytes == 0
    wait_until(lambda: used_bytes(admin) <= before - EXTENT_BYTES, what="its space to be free")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ten_keys_of_the_same_bytes(transport: str) -> None:
    with (
        Cluster(stores=2) as cluster,
        admin_of(cluster) as admin,
        cluster.client(dedup=True, transports=(transport,)) as client,
    ):
        put_ten(client)
        check_ten(client, admin)
        status = admin.status()
        assert (status.dedup_objects, status.dedup_bytes) == (9, 9 * SIZE)
        if transport == "tcp":
            wait_until(
                lambda: sum(n.written_bytes for n in admin.nodes().values()) == SIZE,
                what="one transfer to be counted",
            )
        assert "saved" in cluster.cli("status").stdout.decode()
        remove_ten(client, admin)


def test_the_same_bytes_in_one_batch() -> None:
    with (
        Cluster(stores=1) as cluster,
        admin_of(cluster) as admin,
        cluster.client(transports=("tcp",)) as client,
    ):
        values = [VALUE] * 10 + [payload_of("others", 300)] * 5
        keys = [*KEYS, *[f"other{i}" for i in range(5)]]
        assert client.put_batch(keys, values, dedup=True).stored_count == 15
        status = admin.status()
        assert (status.dedup_objects, status.dedup_bytes) == (9 + 4, 9 * SIZE + 4 * 300)
        assert client.get_batch(keys) == values
        # A key that is longer than a slot holds is put as ever, and so is what asks for no dedup.
        assert client.put("x" * 200, VALUE, dedup=True).stored
        assert client.put("plain", VALUE).stored
        assert admin.status().dedup_objects == 9 + 4


@pytest.mark.parametrize("which", ["master", "store", "both"])
def test_restarts_keep_what_is_shared(which: str) -> None:
    with Cluster(stores=1) as cluster, cluster.client(dedup=True, deadline_s=20.0) as client:
        put_ten(client)
        processes = {"master": [cluster.master], "store": cluster.stores}.get(
            which, cluster.processes
        )
        for process in processes:
            process.kill()
        for process in processes:
            process.start()
            process.wait_ready()
        cluster.wait_alive(1)
        with admin_of(cluster) as admin:
            check_ten(client, admin)
            assert client.put("eleventh", VALUE).stored
            assert admin.status().dedup_objects == (10 if which == "store" else 1)
            assert client.remove("eleventh")
            remove_ten(client, admin)


def test_metadata_that_are_lost_are_rebuilt_as_they_were() -> None:
    with Cluster(stores=1) as cluster, cluster.client(dedup=True, deadline_s=20.0) as client:
        put_ten(client)
        cluster.master.kill()
        for path in (cluster.directory / "metadata").iterdir():
            path.unlink()
        cluster.master.start()
        cluster.master.wait_ready()
        cluster.wait_alive(1)
        with admin_of(cluster) as admin:
            check_ten(client, admin)
            remove_ten(client, admin)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


def test_another_master_takes_over(etcd: EtcdCluster) -> None:
    with (
        shared_pool(etcd.url, masters=2, stores=2) as cluster,
        cluster.client(dedup=True, deadline_s=20.0) as client,
    ):
        put_ten(client)
        cluster.leader().kill()
        cluster.leader()
        cluster.wait_alive(2)
        with admin_of(cluster) as admin:
            check_ten(client, admin)
            assert client.put("eleventh", VALUE).stored
            assert admin.status().dedup_objects == 1
            assert client.remove("eleventh")
            remove_ten(client, admin)


def test_a_digest_gives_nothing_without_the_bytes() -> None:
    """Who has heard a digest, and follows the protocol as far as that goes."""
    with Cluster(stores=1) as cluster, admin_of(cluster) as admin:
        with cluster.client(dedup=True) as owner:
            owner.put("secret", VALUE)
        with cluster.client() as thief:
            space, session = thief._space, thief.session
            key = digest_key(b"mine", space.seed)
            batch = pb.PutStartRequest().keys
            batch.namespace_id, batch.generation = space.namespace_id, space.generation
            batch.digests = key
            started = session.master.put_start(
                pb.PutStartRequest(
                    keys=batch,
                    sizes=np.array([SIZE], "<u8").tobytes(),
                    content_digests=xxh3_128_digest(VALUE, space.seed),
                    session_id=session.identity.session_id,
                    request_id=1 << 40,
                ),
                5.0,
            )
            (row,) = np.frombuffer(started.puts, PUT)
            assert row["status"] == PutStatus.DEDUPLICATED
            for number, tickets in enumerate((b"", bytes(16), b"x" * 16)):
                reply = session.master.put_commit(
                    pb.PutCommitRequest(
                        grant_id=started.alias_grant_id,
                        checksums=started.alias_checksums,
                        session_id=session.identity.session_id,
                        request_id=(1 << 40) + 1 + number,
                        epoch=started.epoch,
                        tickets=tickets,
                    ),
                    5.0,
                )
                assert list(reply.statuses) == [CommitStatus.NOT_GRANTED]
            assert thief.get("mine") is None
            assert not thief.exists("mine")
            assert admin.status().objects == 1


def test_namespaces_of_a_domain_hold_each_others_bytes() -> None:
    """Where the administrator has set that up, and nobody else's."""
    flags = {"dedup-domains": "models=one,two"}
    with Cluster(stores=1, master_flags=flags) as cluster, admin_of(cluster) as admin:
        for number, name in enumerate(("one", "two", "three")):
            with cluster.client(namespace=name, dedup=True) as client:
                assert client.put("key", VALUE).stored
                assert client.get("key") == VALUE
                assert admin.status().dedup_objects == min(number, 1)
        assert used_bytes(admin) == 2 * EXTENT_BYTES
        with cluster.client(namespace="one") as client:
            client.remove("key")
        with cluster.client(namespace="two") as client:
            assert client.get("key") == VALUE
            client.remove("key")
        assert used_bytes(admin) == EXTENT_BYTES


def test_who_claims_other_bytes_stores_its_own() -> None:
    """A digest that is not of the bytes: the daemon finds out, and they are sent."""
    with (
        Cluster(stores=1) as cluster,
        admin_of(cluster) as admin,
        cluster.client(dedup=True) as owner,
        cluster.client(dedup=True) as liar,
    ):
        owner.put("secret", VALUE)
        mine = payload_of("mine", SIZE)
        driver = liar._driver
        real = driver.do[HashWide]

        def lying(call: object, step: HashWide) -> bytes:
            if step.seed == liar._space.seed:
                return xxh3_128_digest(VALUE, step.seed)
            hashed: bytes = real(call, step)
            return hashed

        driver.do[HashWide] = lying
        assert liar.put("mine", mine).stored
        assert owner.get("mine") == mine
        assert owner.get("secret") == VALUE
        assert admin.status().dedup_objects == 0
        # What it said is worth nothing to others either: who has these bytes is asked again.
        assert owner.put("third", VALUE).stored
        assert owner.get("third") == VALUE
