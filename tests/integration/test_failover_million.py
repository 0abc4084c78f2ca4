"""A pool of a million small objects loses its leading master: with CENOTE_TEST_FULL=1 only."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from cenote.client import Client
from etcd import EtcdCluster
from integration.test_million import COUNT, NODE_BYTES, key_of, put_all, rss_bytes
from waiting import wait_until
from workers import shared_pool

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not os.environ.get("CENOTE_TEST_FULL"), reason="takes minutes: set CENOTE_TEST_FULL=1"
    ),
]

WARM_S = 3.0
COLD_S = 20.0
DATABASE_BYTES_MAX = 400 << 20


def database_bytes(etcd: EtcdCluster) -> int:
    (status,) = json.loads(etcd.ctl("endpoint", "status", "--write-out=json"))
    return int(status["Status"]["dbSize"])


def until_answered(client: Client) -> tuple[float, float]:
    """Seconds until a lookup is answered, and until a put is."""
    began_s = time.monotonic()
    assert client.exists(key_of(COUNT // 2), deadline_s=30.0)
    looked_s = time.monotonic() - began_s
    assert client.put(f"after{began_s}", b"x", deadline_s=30.0).stored
    return looked_s, time.monotonic() - began_s


def check_samples(client: Client) -> None:
    for start in range(0, COUNT, COUNT // 50):
        keys = [key_of(i) for i in range(start, start + 500)]
        assert client.exists_batch(keys, deadline_s=30.0).all()


def test_a_million_objects_change_hands(tmp_path: Path) -> None:
    with (
        EtcdCluster(tmp_path / "etcd") as etcd,
        shared_pool(etcd.url, masters=2, stores=1, dram_bytes=NODE_BYTES) as cluster,
        cluster.client(transports=("shm",), deadline_s=30.0) as client,
    ):
        began_s = time.monotonic()
        put_all(client, 0, COUNT)
        print(f"put in {time.monotonic() - began_s:.0f} s")
        leader = cluster.leader()
        (standby,) = [master for master in cluster.masters if master is not leader]
        wait_until(
            lambda: "snapshot written" in standby.log_text() + leader.log_text(),
            60.0,
            what="a snapshot",
        )
        print(f"standby: {rss_bytes(standby) >> 20} MiB, leader: {rss_bytes(leader) >> 20} MiB")
        leader.kill()
        looked_s, put_s = until_answered(client)
        print(f"warm: lookups after {looked_s:.2f} s, puts after {put_s:.2f} s")
        check_samples(client)
        wait_until(
            lambda: database_bytes(etcd) < DATABASE_BYTES_MAX, 60.0, what="etcd to be small again"
        )
        print(f"etcd's database: {database_bytes(etcd) >> 20} MiB")
        cluster.leader().kill()
        began_s = time.monotonic()
        leader.start()
        leader.wait_ready()
        wait_until(lambda: cluster.role_of(leader) == "leader", 60.0, what="it to lead")
        cold_s = time.monotonic() - began_s
        print(f"cold: leads after {cold_s:.2f} s, puts {until_answered(client)[1]:.2f} s later")
        check_samples(client)
        assert looked_s < put_s < WARM_S
        assert cold_s < COLD_S
