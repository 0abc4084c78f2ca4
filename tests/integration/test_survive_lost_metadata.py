"""The master's directory is lost: the pool comes back from what its store daemons hold."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import ExitStack
from functools import partial

import pytest

from cenote.client import Client
from cluster import Cluster
from payloads import payload_of
from waiting import wait_until
from workers import pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SIZE_BYTES = 20_000
COUNT = 200
DEADLINE_S = 20.0


def keys_of(name: str, count: int = COUNT) -> list[str]:
    return [f"{name}-{i}" for i in range(count)]


def fill(client: Client, name: str) -> dict[str, bytes]:
    values = {key: payload_of(key.encode(), SIZE_BYTES) for key in keys_of(name)}
    client.put_batch(list(values), list(values.values())).raise_for_errors()
    return values


def lose_metadata(cluster: Cluster) -> None:
    cluster.master.kill(signal.SIGKILL)
    shutil.rmtree(cluster.directory / "metadata")
    cluster.master.start()
    cluster.master.wait_ready()


def status(cluster: Cluster) -> dict[str, object]:
    found: dict[str, object] = json.loads(cluster.cli("status", "--json").stdout)
    return found


def all_there(client: Client, values: dict[str, bytes]) -> bool:
    return client.get_batch(list(values), deadline_s=DEADLINE_S) == list(values.values())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_pool_is_rebuilt_from_its_daemons(transport: str) -> None:
    with pool(2) as cluster, ExitStack() as stack:
        clients, values = [], []
        for name in ("one", "two"):
            client = cluster.client(
                namespace=name, fingerprint=name.encode(), transports=(transport,)
            )
            clients.append(stack.enter_context(client))
            values.append(fill(client, name))
        clients[0].remove_batch(keys_of("one", 20))
        before = status(cluster)
        assert not before["notice"]

        for number in range(2):  # the pool that was rebuilt is rebuilt, too
            lose_metadata(cluster)
            cluster.wait_alive(2)
            for client, some in zip(clients, values, strict=True):
                kept = dict(list(some.items())[20:])
                wait_until(partial(all_there, client, kept), what="all to be there again")
            for client, some in zip(clients, values, strict=True):
                client.put(f"new-{number}", b"new", deadline_s=DEADLINE_S)
                some[f"new-{number}"] = b"new"
            now = status(cluster)
            assert int(str(now["epoch"])) > int(str(before["epoch"]))
            assert "removed" in str(now["notice"])
            assert "metadata were lost" in cluster.master.log_text()
            before = now

        for name, some in zip(("one", "two"), values, strict=True):
            with cluster.client(namespace=name, fingerprint=name.encode()) as client:
                kept = dict(list(some.items())[20:])
                assert all_there(client, kept)
        # What was removed since is journaled again.
        clients[1].remove_batch(keys_of("two"))
        cluster.master.restart(signal.SIGKILL)
        cluster.wait_alive(2)
        with cluster.client(namespace="two", fingerprint=b"two") as client:
            assert not client.exists_batch(keys_of("two")).any()


def test_daemons_of_another_pool_are_refused_and_keep_what_they_hold() -> None:
    """They were pointed to the wrong master: nothing of theirs is cleared."""
    with pool(1) as right, pool(1) as wrong, ExitStack() as stack:
        client = stack.enter_context(right.client(namespace="n"))
        values = fill(client, "k")
        with wrong.client(namespace="n") as other:
            other.put("theirs", b"theirs")
        store = right.stores[0]
        store.kill(signal.SIGTERM)
        master = store.flags["master"]
        store.flags["master"] = wrong.lane
        store.start()
        wait_until(
            lambda: "holds contents of pool" in store.log_text() or not store.is_running,
            what="the daemon to be refused",
        )
        assert "--master name the master of its pool" in store.log_text()
        if store.is_running:
            store.kill(signal.SIGTERM)
        else:
            store.expected_down = True
        store.flags["master"] = master
        store.start()
        right.wait_alive(1)
        assert all_there(client, values)
