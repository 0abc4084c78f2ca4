"""The leading master dies or stops under load, and another one takes over.

Nothing acknowledged is lost, nothing removed returns, no byte is wrong, and writes go on soon. With
CENOTE_TEST_FULL=1 each kind of fault is repeated 20 times; run with `-s` to see the times.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cenote.client import Client
from cluster import Cluster, Process, run_cenote
from etcd import EtcdCluster
from loads import Sample
from payloads import payload_of
from waiting import wait_until
from workers import Load, pass_time, reads, shared_pool, writes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ROUNDS = 20 if os.environ.get("CENOTE_TEST_FULL") else 2
DEADLINE_S = 8.0
MEDIAN_S, WORST_S = 3.0, 4.0
SLACK = 1.0 if os.environ.get("CENOTE_TEST_FULL") else 1.5
"""Two rounds on a busy machine tell little of a median."""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


def first_after(samples: list[Sample], fault_s: float) -> float:
    """Seconds from the fault to the end of the first call that began after it."""
    ends = [end_s for end_s, took_s, _ in samples if end_s - took_s >= fault_s]
    assert ends, "no call has ended since the fault"
    return min(ends) - fault_s


def settle(cluster: Cluster, count: int) -> None:
    """All masters are there, one leads, all nodes are attached."""
    cluster.leader()
    cluster.wait_alive(count, 20.0)
    wait_until(
        lambda: all(cluster.role_of(master) for master in cluster.masters),
        what="all masters to answer",
    )


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


def check_all(cluster: Cluster, load: Load) -> None:
    stored, removed = load.stored(), load.removed()
    keys = list(stored)
    for transports in (("shm", "tcp"), ("tcp",)):
        with cluster.client(transports=transports, deadline_s=20.0) as client:
            check_stored(client, keys, stored)
            back = client.exists_batch(removed)
            assert not back.any(), f"{int(back.sum())} of {len(removed)} removed keys are back"
    print(f"{len(keys)} acknowledged, {len(removed)} removed")


def check_stored(client: Client, keys: list[str], stored: object) -> None:
    sizes = dict(stored)  # type: ignore[call-overload]
    for first in range(0, len(keys), 256):
        some = keys[first : first + 256]
        values = client.get_batch(some)
        lost = [key for key, value in zip(some, values, strict=True) if value is None]
        assert not lost, f"{len(lost)} acknowledged objects are lost, {lost[0]} first"
        assert values == [payload_of(key, sizes[key]) for key in some]


@pytest.mark.parametrize(
    ("fault", "durability"),
    [(kill, "relaxed"), (kill, "journaled"), (stop_and_continue, "relaxed")],
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
        report(load, faults, end_s)
        check_all(cluster, load)


def report(load: Load, faults: list[float], end_s: float) -> None:
    """Print the times, and hold them to what was promised."""
    times: dict[str, list[float]] = {"get": [], "put": [], "put by all four": []}
    for fault_s, until_s in zip(faults, [*faults[1:], end_s], strict=True):
        samples = load.samples(fault_s, until_s)
        times["get"].append(first_after(reads(samples), fault_s))
        times["put"].append(first_after(writes(samples), fault_s))
        by_client = [
            [s for s in writes(one.samples) if fault_s <= s[0] < until_s] for one in load.reports
        ]
        times["put by all four"].append(max(first_after(some, fault_s) for some in by_client))
    for name, seconds in times.items():
        print(
            f"first {name}: median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s"
            f" of {len(seconds)}"
        )
    misses = sum(len(one.misses) for one in load.reports)
    print(f"misses until the daemons had attached: {misses}")
    for name in ("put", "put by all four"):
        assert statistics.median(times[name]) < MEDIAN_S * SLACK
        assert max(times[name]) < WORST_S * SLACK


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
        shown = json.loads(cluster.cli("status", "--json").stdout)
        assert (shown["role"], shown["epoch"]) == ("leader", 2)
        cluster.wait_alive(1)
        put = cluster.cli("put", "k", "-", stdin=b"bytes")
        assert put.returncode == 0, put.stderr
        got = cluster.cli("get", "k")
        assert (got.returncode, got.stdout) == (0, b"bytes")
