"""`cenote paths`, the path of `cenote nodes`, and a client that changes over: real daemons."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from promptness import ends_within
from waiting import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
SOON_S = 20.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(stores=2, dram_bytes=48 * MIB) as started:
        started.wait_alive(2)
        yield started


def paths(cluster: Cluster, *options: str, code: int = 0) -> list[dict[str, Any]]:
    done = cluster.cli("paths", "--json", *options)
    assert done.returncode == code, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def reasons(path: dict[str, Any]) -> dict[str, str]:
    return {obstacle["path"]: obstacle["reason"] for obstacle in path["obstacles"]}


class HiddenSocket:
    """The Unix socket of a daemon under another name meanwhile: as in another container."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        (node,) = [
            node
            for node in json.loads(cluster.cli("nodes", "--json").stdout)
            if node["name"] == f"s{index}"
        ]
        (address,) = [e["address"] for e in node["endpoints"] if e["kind"] == "shm"]
        self.path = Path(address)
        self._away = self.path.with_suffix(".away")

    def __enter__(self) -> HiddenSocket:
        self.path.rename(self._away)
        return self

    def __exit__(self, *_: object) -> None:
        self.show()

    def show(self) -> None:
        if self._away.exists():
            self._away.rename(self.path)


def test_shared_memory_is_taken_on_this_host(cluster: Cluster) -> None:
    found = paths(cluster)
    assert [(path["node"], path["path"], path["obstacles"]) for path in found] == [
        ("s0", "shm", []),
        ("s1", "shm", []),
    ]
    assert all(path["over"].endswith(".sock") for path in found)
    nodes = json.loads(cluster.cli("nodes", "--json").stdout)
    assert [node["path"] for node in nodes] == ["shm", "shm"]
    assert json.loads(cluster.cli("namespaces", "--json").stdout) == []  # nothing was made


def test_a_way_is_forced(cluster: Cluster) -> None:
    for path in paths(cluster, "--transports", "tcp"):
        assert path["path"] == "tcp"
        assert path["over"].startswith("127.0.0.1:")
        assert reasons(path)["shm"] == "this client is told to use only tcp"
    table = cluster.cli("nodes", "--transports", "tcp").stdout.decode().splitlines()
    assert [line.split()[3] for line in table[2:]] == ["tcp", "tcp"]
    for wrong in ("nfs", ","):
        assert cluster.cli("paths", "--transports", wrong).returncode == 2


def test_it_says_why_not_shared_memory(cluster: Cluster) -> None:
    with HiddenSocket(cluster, 0) as socket:
        first, second = paths(cluster)
        assert (first["path"], second["path"]) == ("tcp", "shm")
        assert str(socket.path) in reasons(first)["shm"]
        assert "No such file" in reasons(first)["shm"]
        text = cluster.cli("paths").stdout.decode()
        assert "No such file" in text
        forced = paths(cluster, "--transports", "shm", code=1)
        assert [path["path"] for path in forced] == [None, "shm"]
    assert {path["path"] for path in paths(cluster)} == {"shm"}


def test_a_node_that_stands_still_has_no_path_and_takes_no_longer_than_told(
    cluster: Cluster,
) -> None:
    cluster.stores[1].pause()
    try:
        with ends_within(SOON_S, "the command"):
            first, second = paths(cluster, "--deadline", "2", code=1)
        assert first["path"] == "shm"
        assert second["path"] is None
        assert reasons(second)
    finally:
        cluster.stores[1].resume()
    cluster.wait_alive(2, SOON_S)


def test_a_client_changes_over_under_load_without_a_failed_call(cluster: Cluster) -> None:
    failures: list[BaseException] = []
    end = threading.Event()
    data = bytes(range(256)) * 1024
    with (
        HiddenSocket(cluster, 0) as zero,
        HiddenSocket(cluster, 1) as one,
        cluster.client(namespace="changing") as client,
    ):
        client.put_batch([f"k{n}" for n in range(16)], [data] * 16).raise_for_errors()
        assert {path.path for path in client.paths()} == {"tcp"}

        def work(number: int) -> None:
            turn = 0
            while not end.is_set():
                turn += 1
                try:
                    assert client.get(f"k{turn % 16}") == data
                    client.put(f"w{number}/{turn % 8}", data).raise_for_error()
                    client.remove(f"w{number}/{turn % 8}")
                except BaseException as error:  # whatever it was, the test is to show it
                    failures.append(error)
                    return

        workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for worker in workers:
            worker.start()
        try:
            zero.show()
            one.show()
            wait_until(
                lambda: {path.path for path in client.paths()} == {"shm"},
                SOON_S,
                what="shared memory to be taken",
            )
            proven = client.session.state.lease_proven
            wait_until(lambda: len(proven) == 2, SOON_S, what="leases to count")
        finally:
            end.set()
            for worker in workers:
                worker.join(SOON_S)
        assert failures == []
        stats = client.stats()
        assert (stats.node_failures, stats.failed) == (0, 0)
        with client.view(["k0"]) as views:
            assert bytes(views[0] or b"") == data
