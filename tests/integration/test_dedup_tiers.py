"""Bytes that several keys hold, on their way through the pool: to an SSD, out of memory, back, to
another node, over daemons and masters that are killed. They lie there once, and the last key that
goes frees their space."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from admin import Admin, admin_of
from cenote.cli import connect as cli
from cenote.client import Client
from cluster import Cluster
from etcd import EtcdCluster
from payloads import payload_of
from waiting import wait_until
from workers import shared_pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MIB = 1 << 20
SIZE = 200_000
DRAM, SSD = 24 * MIB, 64 * MIB
EXTENT_BYTES = -(-SIZE // 64) * 64
BLOCK_BYTES = -(-SIZE // 4096) * 4096
VALUE = payload_of("the same bytes", SIZE)
KEYS = [f"key{i}" for i in range(5)]
NAMESPACES = "one", "two"
FILLERS = [f"filler{i}" for i in range(180)]
"""More than memory has room for, and less than it and the SSD have."""


class Ten:
    """The same bytes under five keys of either of two namespaces, which may refer to each other's.
    Who looks sees memory and SSD of the whole pool."""

    def __init__(self, cluster: Cluster, one: Client, two: Client, admin: Admin) -> None:
        self.cluster = cluster
        self.admin = admin
        self.clients = one, two
        self._one = one

    def put(self) -> None:
        for client in self.clients:
            for key in KEYS:
                assert client.put(key, VALUE, dedup=True).stored
        assert self.admin.status().dedup_objects == 9

    def read(self) -> None:
        """All are there, and right. A daemon that was just started may be avoided for a moment, so
        something else is read first: what is asked for twice comes back to memory."""

        def is_answered(client: Client) -> bool:
            return client.put("probe", b"!").stored and client.get("probe") == b"!"

        def are_there(client: Client) -> bool:
            client.forget_locations()
            return client.get_batch(KEYS) == [VALUE] * len(KEYS)

        for client in self.clients:
            wait_until(partial(is_answered, client), what="the daemon to answer")
            assert client.remove("probe")
            wait_until(partial(are_there, client), what="five reads")

    def used(self) -> tuple[int, int]:
        """Bytes in (memory, SSDs) that objects have."""
        status = self.admin.status()
        return status.used_bytes, status.ssd_used_bytes

    def check(self, *, in_memory: int = 0, on_ssd: int = 0) -> None:
        """So many copies of the bytes there are, all keys taken together."""
        due = in_memory * EXTENT_BYTES, on_ssd * BLOCK_BYTES
        wait_until(lambda: self.used() == due, what=f"{due} bytes to be used")
        assert self.admin.status().objects == 10

    def push_out(self) -> None:
        """Have all of it leave memory for the SSD, by putting other things, which go again."""
        for at in range(0, len(FILLERS), 20):
            some = FILLERS[at : at + 20]
            self._one.put_batch(some, [payload_of(key, SIZE) for key in some]).raise_for_errors()
            # No faster than the SSD takes them: what has no copy yet still has room in memory.
            wait_until(partial(self._has_demoted, at + 20 - 70), what="copies")
        assert self.admin.status().evicted_objects == 0
        wait_until(lambda: not self.admin.status().copying_bytes, what="copies to end")
        assert all(self._one.remove_batch(FILLERS))

    def _has_demoted(self, count: int) -> bool:
        return self.admin.status().demoted_objects >= count

    def remove(self) -> None:
        """Nine of them, and then the last."""
        one, two = self.clients
        before = self.used()
        assert all(one.remove_batch(KEYS))
        assert all(two.remove_batch(KEYS[:-1]))
        two.forget_locations()
        assert two.get(KEYS[-1]) == VALUE
        assert two.get(KEYS[0]) is None
        assert self.used() == before
        assert two.remove(KEYS[-1])
        wait_until(lambda: self.used() == (0, 0), what="the last one's space to be free")
        wait_until(
            lambda: not any(node.used_bytes for node in self.admin.nodes().values()),
            what="nodes to hold nothing",
        )


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


@contextmanager
def ten_in_a_pool(etcd: EtcdCluster, directory: Path) -> Iterator[Ten]:
    """Two masters, and one node that has an SSD."""
    domains = f"models={','.join(NAMESPACES)}"
    with shared_pool(etcd.url, masters=2, stores=0, dedup_domains=domains) as cluster:
        add_node(cluster, directory)
        first, second = (
            cluster.client(namespace=name, deadline_s=20.0, transports=("tcp",))
            for name in NAMESPACES
        )
        with first, second, admin_of(cluster) as admin:
            yield Ten(cluster, first, second, admin)


def add_node(cluster: Cluster, directory: Path) -> None:
    name = f"ssd{len(cluster.stores)}"
    flags = {"ssd": str(directory / name), "ssd-size": SSD}
    cluster.add_store(dram_bytes=DRAM, flags=flags)
    cluster.wait_alive(len(cluster.stores))


def fail_over(cluster: Cluster) -> None:
    """Kill the master that leads; it stands by again afterwards."""
    leader = cluster.leader()
    leader.kill()
    cluster.leader()
    leader.start()
    leader.wait_ready()


def drain(cluster: Cluster, name: str) -> None:
    with cli.Admin(cluster.grpc.split(","), deadline_s=20.0) as admin:
        (node,) = (node for node in admin.nodes() if node.view.name == name)
        admin.drain(node.view.node_id)
        wait_until(
            lambda: next(n for n in admin.nodes() if n.view.name == name).drained,
            what=f"{name} to be drained",
        )


def test_ten_references_go_everywhere_and_the_last_frees_the_space(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    with ten_in_a_pool(etcd, tmp_path) as ten:
        cluster = ten.cluster
        ten.put()
        ten.check(in_memory=1)
        ten.push_out()
        ten.check(on_ssd=1)
        cluster.stores[0].restart(signal.SIGKILL)
        cluster.wait_alive(1)
        ten.check(on_ssd=1)
        ten.read()

        fail_over(cluster)
        cluster.wait_alive(1)
        ten.check(on_ssd=1)
        ten.read()
        ten.read()  # a second time, so that they come back to memory
        wait_until(lambda: ten.admin.status().promoted_objects == 10, what="ten promotions")
        ten.check(in_memory=1, on_ssd=1)
        ten.read()

        add_node(cluster, tmp_path)
        drain(cluster, "s0")
        ten.check(in_memory=1)
        assert ten.admin.nodes()["s0"].used_bytes == 0
        cluster.stores[0].stop()
        ten.read()

        cluster.stores[1].restart(signal.SIGKILL)
        cluster.wait_alive(1)
        fail_over(cluster)
        cluster.wait_alive(1)
        ten.check(in_memory=1)
        ten.read()
        ten.remove()
