"""The leading master dies or stops under load, and another one takes over.

Nothing acknowledged is lost, nothing removed returns, no byte is wrong, and writes go on soon. With
CENOTE_TEST_FULL=1 each kind of fault is repeated 20 times; run with `-s` to see the times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster import Cluster, Process, run_cenote
from etcd import EtcdCluster
from payloads import payload_of
from takeovers import DEADLINE_S, ROUNDS, check_all, report, settle
from waiting import wait_until
from workers import Load, pass_time, shared_pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

FULL_NODE_BYTES = 6 << 20


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


def kill(cluster: Cluster, leader: Process) -> None:
    leader.kill()
    cluster.leader()
    pass_time(1.0)
    leader.start()
    leader.wait_ready()


def stop_and_continue(cluster: Cluster, leader: Process) -> None:
    leader.pause()
    cluster.leader()
    pass_time(1.0)
    leader.resume()
    wait_until(lambda: cluster.role_of(leader) == "standby", what="the old leader to stand by")


@pytest.mark.parametrize(
    ("fault", "durability"),
    [
        (kill, "relaxed"),
        (kill, "journaled"),
        (stop_and_continue, "relaxed"),
        (stop_and_continue, "journaled"),
    ],
)
def test_another_master_takes_over_under_load(
    etcd: EtcdCluster, seed: int, fault: Callable[[Cluster, Process], None], durability: str
) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(shared_pool(etcd.url, masters=2, stores=2))
        load = Load(
            stack,
            cluster,
            seed,
            replicas=1,
            deadline_s=DEADLINE_S,
            durability=durability,
            misses_are_legal=True,
        )
        pass_time(1.0)
        faults: list[float] = []
        for _ in range(ROUNDS):
            settle(cluster, 2)
            pass_time(1.0)
            leader = cluster.leader()
            faults.append(time.monotonic())
            fault(cluster, leader)
        settle(cluster, 2)
        end_s = time.monotonic()
        load.stop()
        assert load.failures() == []
        check_all(cluster, load)  # first: slowness must not hide a loss
        report(load, faults, end_s)


@pytest.mark.parametrize("fault", [kill, stop_and_continue])
def test_a_full_pool_changes_hands(
    etcd: EtcdCluster, seed: int, fault: Callable[[Cluster, Process], None]
) -> None:
    """Space is given away again and again, while what etcd knows lags behind: no byte is wrong."""
    with ExitStack() as stack:
        cluster = stack.enter_context(
            shared_pool(etcd.url, masters=2, stores=2, dram_bytes=FULL_NODE_BYTES)
        )
        load = Load(
            stack,
            cluster,
            seed,
            replicas=1,
            deadline_s=DEADLINE_S,
            misses_are_legal=True,
            keep=True,
        )

        def evicted() -> int:
            """By the present leader."""
            status = json.loads(cluster.cli("status", "--json").stdout)
            return int(status["evicted_objects"])

        wait_until(lambda: evicted() > 100, 30.0, what="the pool to be full")
        for _ in range(ROUNDS):
            settle(cluster, 2)
            pass_time(1.0)
            fault(cluster, cluster.leader())
        settle(cluster, 2)
        wait_until(lambda: evicted() > 100, 30.0, what="the last leader to evict, too")
        load.stop()
        assert load.failures() == []
        stored = load.stored()
        keys = list(stored)
        for transports in (("shm", "tcp"), ("tcp",)):
            with cluster.client(transports=transports, deadline_s=20.0) as client:
                values = client.get_batch(keys)
                there = [(k, v) for k, v in zip(keys, values, strict=True) if v is not None]
                assert all(value == payload_of(key, stored[key]) for key, value in there)
        print(f"{len(there)} of {len(keys)} are left")


def test_the_command_shows_who_leads_and_asks_the_leader(etcd: EtcdCluster) -> None:
    with shared_pool(etcd.url, masters=2, stores=1) as cluster:
        leader = cluster.leader()
        (standby,) = [master for master in cluster.masters if master is not leader]
        lane_of = {m.name: m.ready["lane"].removeprefix("tcp://") for m in cluster.masters}

        def roles() -> dict[str, str]:
            shown = json.loads(cluster.cli("status", "--json").stdout)
            assert (shown["role"], shown["nodes_alive"]) == ("leader", 1)
            return {m["addresses"][0]: m["role"] for m in shown["masters"]}

        wanted = {lane_of[leader.name]: "leader", lane_of[standby.name]: "standby"}
        wait_until(lambda: roles() == wanted, what="the leader to have heard of the standby")
        assert "(leader), " in cluster.cli("status").stdout.decode()
        # Told of the standby alone, it finds the leader.
        alone = {"CENOTE_MASTER": lane_of[standby.name], "CENOTE_GRPC": standby.ready["grpc"]}
        environment = cluster.environment | alone
        shown = json.loads(run_cenote("status", "--json", environment=environment).stdout)
        assert shown["role"] == "leader"
        leader.kill()
        assert cluster.leader() is standby
        epoch = shown["epoch"]
        shown = json.loads(cluster.cli("status", "--json").stdout)
        assert (shown["role"], shown["epoch"]) == ("leader", epoch + 1)
        cluster.wait_alive(1)
        put = cluster.cli("put", "k", "-", stdin=b"bytes")
        assert put.returncode == 0, put.stderr
        got = cluster.cli("get", "k")
        assert (got.returncode, got.stdout) == (0, b"bytes")
