"""Clients, daemons and commands that are given etcd's address and find the masters there."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cenote.api.errors import CenoteError, ConfigError, Unavailable
from cenote.client import Client
from cenote.client.aio import AsyncClient
from cenote.kv.directory import EtcdDirectory
from cluster import Cluster, run_cenote
from etcd import EtcdCluster, free_ports
from promptness import ends_within
from waiting import wait_until

pytestmark = pytest.mark.integration

NO_ENVIRONMENT: dict[str, str] = {}


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


def test_everybody_finds_masters_that_nobody_was_told_of(etcd: EtcdCluster) -> None:
    """All masters that were there at the start end; one that came later leads."""
    with Cluster(
        masters=2, stores=1, metadata=etcd.url, store_flags={"master": etcd.url}
    ) as cluster:
        cluster.wait_alive(1)
        with Client(etcd.url, deadline_s=20.0) as client:
            assert client.put("before", b"1" * 5000).stored

            async def later() -> bytes | None:
                async with await AsyncClient.connect(etcd.url, deadline_s=20.0) as other:
                    assert await other.get("before") == b"1" * 5000
                    replace_masters(cluster)  # in this thread: a child ends with its parent
                    return await other.get("before")

            assert asyncio.run(later()) == b"1" * 5000
            assert client.get("before") == b"1" * 5000
            assert client.put("after", b"2" * 5000).stored  # hence the daemon found it, too


def replace_masters(cluster: Cluster) -> None:
    old = list(cluster.masters)
    leader = cluster.leader()
    new = cluster.add_master()
    for master in sorted(old, key=lambda one: one is leader):
        master.kill()
    wait_until(lambda: cluster.role_of(new) == "leader", 20.0, what="the new one to lead")


def test_commands_find_the_leader_through_etcd(etcd: EtcdCluster) -> None:
    with Cluster(masters=2, stores=1, metadata=etcd.url) as cluster:
        environment = cluster.environment | {"CENOTE_MASTER": etcd.url}
        del environment["CENOTE_GRPC"]

        def run(*words: str, stdin: bytes | None = None) -> bytes:
            done = run_cenote(*words, stdin=stdin, environment=environment)
            assert done.returncode == 0, done.stderr
            return done.stdout

        def roles() -> list[str]:
            """As the leader lists the masters. It looks for others once a second: one that came
            just now may not be among them yet."""
            status = json.loads(run("status", "--json"))
            assert status["role"] == "leader"
            return sorted(master["role"] for master in status["masters"])

        wait_until(lambda: roles() == ["leader", "standby"], what="both masters to be listed")
        run("put", "k", "-", stdin=b"hello")
        assert run("get", "k") == b"hello"
        assert b"s0" in run("nodes")


def test_a_daemon_waits_for_etcd_and_for_a_master(tmp_path: Path) -> None:
    ports = free_ports(2)
    url = f"etcd://127.0.0.1:{ports[0]}"
    with Cluster(stores=1, store_flags={"master": url}) as cluster:  # that master is a stranger
        store = cluster.stores[0]
        wait_until(lambda: "can't be looked up" in store.log_text(), what="it to say so")
        with EtcdCluster(tmp_path / "etcd", ports=ports) as etcd:
            wait_until(lambda: "no master is registered" in store.log_text(), what="it to say so")
            with Cluster(masters=2, stores=0, metadata=etcd.url) as masters:
                masters.wait_alive(1, 20.0)
                with Client(url, deadline_s=20.0) as client:
                    assert client.put("k", b"v" * 100).stored
                    assert client.get("k") == b"v" * 100


def test_no_etcd_is_an_error_that_says_so() -> None:
    (port,) = free_ports(1)
    with ends_within(1.0), pytest.raises(Unavailable, match="can't be looked up") as caught:
        Client(f"etcd://127.0.0.1:{port}", deadline_s=1.0)
    assert "etcd runs" in caught.value.remedy
    done = run_cenote(
        "status", "--master", f"etcd://127.0.0.1:{port}", "--deadline", "1", environment={}
    )
    assert done.returncode == 4
    assert b"can't be looked up" in done.stderr


def test_no_master_is_an_error_that_says_so(etcd: EtcdCluster) -> None:
    url = etcd.url + "/elsewhere"
    with ends_within(1.0), pytest.raises(Unavailable, match="no master is registered") as caught:
        Client(url, deadline_s=1.0)
    assert f"cenote-master --metadata {url}" in caught.value.remedy


def test_a_member_without_the_others_still_knows_the_masters(tmp_path: Path) -> None:
    with (
        EtcdCluster(tmp_path / "etcd", members=3) as etcd,
        Cluster(masters=2, stores=0, metadata=etcd.url) as cluster,
    ):
        directory = EtcdDirectory(etcd.options())
        before = directory.look_up(5.0)
        lanes = cluster.lane.split(",")
        assert sorted(a for place in before for a in place.addresses) == sorted(lanes)
        etcd.members[0].kill()
        etcd.members[1].pause()
        assert directory.wait(10.0) == before


def test_etcd_that_stops_answering_does_not_keep_a_client(etcd: EtcdCluster) -> None:
    """Neither one that has its masters nor, beyond its deadline, one that looks for them."""
    with (
        Cluster(masters=2, stores=1, metadata=etcd.url) as cluster,
        Client(etcd.url, deadline_s=5.0) as client,
    ):
        client.put("k", b"v" * 100)
        etcd.members[0].pause()
        try:
            with ends_within(1.0), pytest.raises(CenoteError):
                Client(etcd.url, deadline_s=1.0)
            for master in cluster.masters:
                master.pause()
            with ends_within(1.5), pytest.raises(CenoteError):
                client.acquire(["k"], 1.0, deadline_s=1.5)
        finally:
            for master in cluster.masters:
                master.resume()
            etcd.members[0].resume()
        assert client.get("k", deadline_s=20.0) == b"v" * 100


def test_only_those_who_ask_etcd_load_its_library() -> None:
    program = "import cenote.client, cenote.store.daemon, sys; print('etcd3' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3", None)
    with pytest.raises(ConfigError, match="missing") as caught:
        Client("etcd://127.0.0.1:1", deadline_s=1.0)
    assert "cenote[etcd]" in caught.value.remedy
