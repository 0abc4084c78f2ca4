"""Pools whose metadata are in etcd tell each other's daemons apart, and outlive the loss of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cenote.cli.connect import Admin
from cluster import Cluster
from etcd import EtcdCluster

pytestmark = pytest.mark.integration

VALUE = b"v" * 5000
KEYS = [f"k{i}" for i in range(30)]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


def fill(cluster: Cluster) -> None:
    with cluster.client(deadline_s=20.0) as client:
        for key in KEYS:
            assert client.put(key, VALUE).stored


def check(cluster: Cluster) -> None:
    with cluster.client(deadline_s=20.0) as client:
        assert client.get_batch(KEYS) == [VALUE] * len(KEYS)


def test_a_daemon_of_another_pool_is_refused_and_loses_nothing(etcd: EtcdCluster) -> None:
    with (
        Cluster(masters=2, stores=1, metadata=f"{etcd.url}/one") as one,
        Cluster(masters=2, stores=1, metadata=f"{etcd.url}/two") as two,
    ):
        fill(one)
        fill(two)
        store = one.stores[0]
        store.kill(signal.SIGTERM)
        right = store.flags["master"]
        store.flags["master"] = two.lane
        store.start()
        assert store.wait_exit(20.0) != 0
        assert "holds contents of pool" in store.log_text()
        two.wait_alive(1)
        store.flags["master"] = right
        store.restart()
        one.wait_alive(1)
        check(one)
        check(two)


def test_a_pool_keeps_its_id_over_leaders(etcd: EtcdCluster) -> None:
    """Else the next leader would take daemons for those of another pool."""
    with Cluster(masters=2, stores=1, metadata=etcd.url) as cluster:
        fill(cluster)
        for _ in range(2):
            leader = cluster.leader()
            leader.restart(signal.SIGKILL)
            check(cluster)
            cluster.wait_alive(1, 20.0)
        with Admin(cluster.grpc.split(",")) as admin:
            assert admin.status().notice == ""


def test_a_prefix_that_is_lost_is_rebuilt_from_the_daemons(etcd: EtcdCluster) -> None:
    with Cluster(masters=2, stores=1, metadata=etcd.url) as cluster:
        fill(cluster)
        for master in cluster.masters:
            master.kill()
        epoch = int(etcd.ctl("get", "--print-value-only", "/cenote/epoch"))
        etcd.ctl("del", "--prefix", "/cenote/")
        # Epochs begin with the minutes since 2026, and this pool is not a minute old.
        etcd.ctl("put", "/cenote/epoch", str(epoch + 1))
        for master in cluster.masters:
            master.start()
            master.wait_ready()
        cluster.wait_alive(1, 20.0)
        check(cluster)
        with Admin(cluster.grpc.split(",")) as admin:
            assert "metadata were lost" in admin.status().notice
