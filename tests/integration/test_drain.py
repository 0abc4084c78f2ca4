"""Nodes that are left while clients work: no call fails, and nothing is lost."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from admin import admin_of
from cenote.cli.connect import Admin
from cenote.client import Client
from cenote.v1 import admin_pb2
from cluster import Cluster
from etcd import EtcdCluster
from payloads import payload_of
from waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MIB = 1 << 20
SIZE = 256 << 10


def used_bytes(cluster: Cluster, name: str) -> int:
    with admin_of(cluster) as admin:
        return int(admin.nodes()[name].used_bytes)


def state_of(cluster: Cluster, name: str) -> int:
    with admin_of(cluster) as admin:
        return int(admin.nodes()[name].view.state)


def start_drain(cluster: Cluster, name: str, bandwidth: int) -> int:
    """As `cenote drain` does, which takes seconds where many tests run; what the node holds."""
    with Admin(cluster.grpc.split(","), deadline_s=20.0) as admin:
        (node,) = (node for node in admin.nodes() if node.view.name == name)
        return admin.drain(node.view.node_id, bandwidth=bandwidth)


def tasks_of(cluster: Cluster) -> list[admin_pb2.TaskStatus]:
    with Admin(cluster.grpc.split(","), deadline_s=20.0) as admin:
        return list(admin.tasks())


def drained(cluster: Cluster, name: str) -> dict[str, int]:
    """Drain a node to the end; what the task says."""
    done = cluster.cli("drain", name, "--wait", "--json", timeout_s=60)
    assert done.returncode == 0, done.stderr
    task: dict[str, int] = json.loads(done.stdout)
    return task


class Load:
    """Readers and writers of one client until `end`; each failure is kept."""

    def __init__(self, client: Client, keys: list[str], seed: int) -> None:
        self.failures: list[str] = []
        self.reads = self.puts = 0
        self.written: list[str] = []
        self._client = client
        self._keys = keys
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(seed,)),
            threading.Thread(target=self._write, args=(seed,)),
            threading.Thread(target=self._write_small, args=(seed,)),
        ]
        for thread in self._threads:
            thread.start()

    def _guarded(self, what: str, key: str, good: bool) -> None:
        if not good:
            self.failures.append(f"{what} {key}")

    def _read(self, seed: int) -> None:
        dice = random.Random(seed)
        buffer = bytearray(SIZE)
        while not self._stop.is_set():
            key = dice.choice(self._keys)
            try:
                size = self._client.get_into(key, buffer)
                self._guarded("wrong bytes or a miss of", key, buffer == payload_of(key, SIZE))
                self._guarded("size of", key, size == SIZE)
            except Exception as error:  # whatever a user would meet with
                self.failures.append(f"get {key}: {error!r}")
            self.reads += 1

    def _put(self, key: str, size: int) -> None:
        try:
            self._client.put(key, payload_of(key, size))
            self.written.append(key)
        except Exception as error:  # whatever a user would meet with
            self.failures.append(f"put {key}: {error!r}")
        self.puts += 1

    def _write(self, seed: int) -> None:
        for number in range(60):
            if not self._stop.is_set():
                self._put(f"w-{seed}-{number}", SIZE)

    def _write_small(self, seed: int) -> None:
        number = 0
        while not self._stop.is_set() and number < 20_000:
            self._put(f"s-{seed}-{number}", 1000)
            number += 1

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20.0)
            assert not thread.is_alive()

    def check_written(self) -> None:
        keys = self.written
        for first in range(0, len(keys), 500):
            some = keys[first : first + 500]
            for key, value in zip(some, self._client.get_batch(some), strict=True):
                assert value == payload_of(key, SIZE if key[0] == "w" else 1000), key


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


@contextmanager
def loaded(cluster: Cluster, keys: list[str], *transports: tuple[str, ...]) -> Iterator[list[Load]]:
    """Clients that read `keys` and put others, over each of these transports."""
    clients = [cluster.client(transports=ways, deadline_s=15.0) for ways in transports]
    loads = [Load(client, keys, seed) for seed, client in enumerate(clients)]
    try:
        yield loads
    finally:
        for load in loads:
            load.end()
        for client in clients:
            client.close()


def fill(client: Client, count: int) -> list[str]:
    keys = [f"key-{number}" for number in range(count)]
    for first in range(0, count, 20):
        some = keys[first : first + 20]
        client.put_batch(some, [payload_of(key, SIZE) for key in some]).raise_for_errors()
    return keys


def test_a_node_is_drained_under_load_and_stopped() -> None:
    with Cluster(stores=3, dram_bytes=128 * MIB) as cluster:
        cluster.wait_alive(3)
        with cluster.client() as client:
            keys = fill(client, 240)
            before = used_bytes(cluster, "s1")
            assert before > 10 * MIB
            with loaded(cluster, keys, ("shm",), ("tcp",)) as loads:
                wait_until(lambda: all(load.reads > 20 for load in loads), what="the load to run")
                task = drained(cluster, "s1")
                assert task["evicted_objects"] == 0
                assert task["moved_bytes"] >= before // 2
                assert used_bytes(cluster, "s1") == 0
                cluster.stores[1].stop()
                at = [load.reads for load in loads]
                wait_until(
                    lambda: all(load.reads > n + 50 for load, n in zip(loads, at, strict=True)),
                    what="reads without the node",
                )
                for load in loads:
                    load.end()
                    assert load.failures == []
                    assert load.puts > 50
                    load.check_written()
            values = client.get_batch(keys)
            assert [v == payload_of(k, SIZE) for k, v in zip(keys, values, strict=True)].count(
                True
            ) == len(keys)


def test_a_drained_node_comes_back_drained_and_is_taken_up_again() -> None:
    with Cluster(stores=2, dram_bytes=64 * MIB) as cluster, cluster.client() as client:
        cluster.wait_alive(2)
        keys = fill(client, 60)
        drained(cluster, "s0")
        cluster.stores[0].restart()
        cluster.master.restart()
        cluster.wait_alive(2)
        with admin_of(cluster) as admin:
            wait_until(lambda: admin.nodes()["s0"].drained, what="the node to be drained again")
        assert "drained" in cluster.cli("nodes").stdout.decode()
        more = [f"more-{number}" for number in range(20)]
        client.put_batch(more, [payload_of(key, SIZE) for key in more]).raise_for_errors()
        assert used_bytes(cluster, "s0") == 0
        assert cluster.cli("undrain", "s0").returncode == 0
        again = [f"again-{number}" for number in range(60)]
        client.put_batch(again, [payload_of(key, SIZE) for key in again]).raise_for_errors()
        assert used_bytes(cluster, "s0") > 0
        for key in [*keys, *more, *again]:
            assert client.get(key) == payload_of(key, SIZE), key


def test_a_drain_can_be_cancelled_and_needs_another_node() -> None:
    with Cluster(stores=1, dram_bytes=64 * MIB) as cluster, cluster.client() as client:
        cluster.wait_alive(1)
        keys = fill(client, 60)
        refused = cluster.cli("drain", "s0")
        assert refused.returncode == 1
        assert b"no other node" in refused.stderr
        assert cluster.cli("drain", "nobody").returncode == 3
        cluster.add_store()
        cluster.wait_alive(2)
        assert cluster.cli("drain", "s0", "--bandwidth", "64KiB").returncode == 0
        (task,) = json.loads(cluster.cli("tasks", "--json").stdout)
        assert (task["kind"], task["node_name"], task["bandwidth"]) == ("drain", "s0", 64 << 10)
        assert "drain" in cluster.cli("tasks").stdout.decode()
        assert cluster.cli("drain", "s0", "--cancel").returncode == 0
        assert json.loads(cluster.cli("tasks", "--json").stdout) == []
        assert used_bytes(cluster, "s0") > 0
        for key in keys:
            assert client.get(key) == payload_of(key, SIZE), key


def test_the_source_is_killed_in_the_middle_and_comes_back() -> None:
    with Cluster(stores=2, dram_bytes=128 * MIB) as cluster, cluster.client() as client:
        cluster.wait_alive(2)
        keys = fill(client, 200)
        before = used_bytes(cluster, "s0")
        assert start_drain(cluster, "s0", 4 * MIB) > 0
        wait_until(lambda: used_bytes(cluster, "s0") < before, 20.0, what="some to move")
        cluster.stores[0].kill()
        wait_until(
            lambda: [task.state for task in tasks_of(cluster)] == ["waiting"],
            20.0,
            what="the drain to wait",
        )
        cluster.stores[0].restart()
        drained(cluster, "s0")
        for key in keys:
            assert client.get(key) == payload_of(key, SIZE), key


def test_replicas_of_a_killed_node_are_made_anew() -> None:
    flags = {"node-dead-s": 1, "heartbeat-s": 0.2, "repair-after-s": 2}
    with Cluster(stores=0, dram_bytes=64 * MIB, master_flags=flags) as cluster:
        for number in range(3):
            cluster.add_store(flags={"failure-domain": f"rack-{number}"})
        cluster.wait_alive(3)
        with cluster.client() as client:
            keys = [f"key-{number}" for number in range(100)]
            values = [payload_of(key, SIZE) for key in keys]
            client.put_batch(keys, values, replicas=2).raise_for_errors()
            cluster.stores[1].kill()

            def is_whole() -> bool:
                return any(
                    task.kind == "repair" and task.state == "done" and task.moved_objects
                    for task in tasks_of(cluster)
                )

            # Within 2 s of silence and a few more for 16 MiB.
            wait_until(is_whole, 15.0, what="the replicas to be two again")
            # So that another node may go.
            cluster.stores[2].kill()
            for key in keys:
                assert client.get(key) == payload_of(key, SIZE), key


def test_another_master_goes_on_with_a_drain(etcd: EtcdCluster) -> None:
    with Cluster(stores=3, masters=2, metadata=etcd.url, dram_bytes=128 * MIB) as cluster:
        cluster.wait_alive(3)
        with cluster.client(deadline_s=15.0) as client:
            keys = fill(client, 240)
            with loaded(cluster, keys, ("shm",), ("tcp",)) as loads:
                assert start_drain(cluster, "s1", 4 * MIB) > 0
                # What writers put there before is to be moved, too.
                before = used_bytes(cluster, "s1")
                wait_until(
                    lambda: any(task.moved_objects > 4 for task in tasks_of(cluster)),
                    30.0,
                    what="some to move",
                )
                leader = cluster.leader()
                leader.kill()
                cluster.leader()
                leader.start()
                leader.wait_ready()
                task = drained(cluster, "s1")
                assert 0 < task["moved_bytes"] < before
                assert used_bytes(cluster, "s1") == 0
                cluster.stores[1].stop()
                for load in loads:
                    load.end()
                    assert load.failures == []
                    load.check_written()
            for key in keys:
                assert client.get(key) == payload_of(key, SIZE), key


def test_a_fresh_node_gets_its_share_of_what_is_there() -> None:
    with Cluster(stores=1, dram_bytes=192 * MIB) as cluster, cluster.client() as client:
        cluster.wait_alive(1)
        keys = fill(client, 320)
        cluster.add_store()
        cluster.wait_alive(2)
        assert cluster.cli("rebalance", "--cancel").returncode == 2
        with loaded(cluster, keys, ("shm",), ("tcp",)) as loads:
            assert cluster.cli("rebalance", "--bandwidth", "200MiB").returncode == 0

            def is_done() -> bool:
                (task,) = tasks_of(cluster)
                return bool(task.state == "done")

            wait_until(is_done, 30.0, what="the pool to be even")
            for load in loads:
                load.end()
                assert load.failures == []
                load.check_written()
        with admin_of(cluster) as admin:
            ratios = admin.fill_ratios()
        assert abs(ratios["s0"] - ratios["s1"]) < 0.15
        for key in keys:
            assert client.get(key) == payload_of(key, SIZE), key


def test_what_lies_on_its_ssd_is_moved_too(tmp_path: Path) -> None:
    with Cluster(stores=0) as cluster:
        for number in range(2):
            flags = {"ssd": str(tmp_path / f"ssd{number}"), "ssd-size": 192 * MIB}
            cluster.add_store(dram_bytes=32 * MIB, flags=flags)
        cluster.wait_alive(2)
        with cluster.client() as client, admin_of(cluster) as admin:
            keys = [f"key-{number}" for number in range(480)]
            for first in range(0, len(keys), 20):
                some = keys[first : first + 20]
                client.put_batch(some, [payload_of(key, SIZE) for key in some]).raise_for_errors()
                goal = first + 20 - 160
                wait_until(
                    lambda goal=goal: admin.status().demoted_objects >= goal,  # type: ignore[misc]
                    30.0,
                    what="copies on the SSDs",
                )
            before = admin.status()
            assert before.evicted_objects == 0
            assert before.evicted_to_ssd > 100
            task = drained(cluster, "s1")
            assert task["evicted_objects"] == 0
            assert admin.status().evicted_objects == 0
            cluster.stores[1].stop()
            for key in keys:
                assert client.get(key) == payload_of(key, SIZE), key
