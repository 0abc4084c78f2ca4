"""All masters and all store daemons are restarted one after the other, under load: an upgrade."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from etcd import EtcdCluster
from payloads import payload_of
from waiting import wait_until
from workers import Load, pass_time, shared_pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


def test_no_call_fails_and_nothing_is_lost(etcd: EtcdCluster, seed: int) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(shared_pool(etcd.url, masters=3, stores=3))
        # Else a put takes one copy while one node restarts and another one is still suspected.
        load = Load(stack, cluster, seed, replicas=2, min_replicas=2, deadline_s=8.0)
        began_s = time.monotonic()
        pass_time(1.0)
        for master in cluster.masters:
            master.restart()
            cluster.leader()
            cluster.wait_alive(3, 20.0)
            print(f"{time.monotonic() - began_s:.1f} s: {master.name} restarted")
            pass_time(1.0)
        for store in cluster.stores:
            store.restart()
            cluster.wait_alive(3, 20.0)
            print(f"{time.monotonic() - began_s:.1f} s: {store.name} restarted")
            pass_time(1.0)
        load.stop()
        misses = sorted(miss_s - began_s for one in load.reports for miss_s in one.misses)
        if misses:
            print(f"{len(misses)} misses from {misses[0]:.2f} to {misses[-1]:.2f} s")
        assert load.failures() == []
        stored = load.stored()
        keys = list(stored)
        with cluster.client(deadline_s=20.0) as client:
            values = client.get_batch(keys)
            assert values == [payload_of(key, stored[key]) for key in keys]
            assert not client.exists_batch(load.removed()).any()
        wait_until(
            lambda: sorted(map(cluster.role_of, cluster.masters)) == ["leader", *["standby"] * 2],
            what="one leader and two standbys",
        )
