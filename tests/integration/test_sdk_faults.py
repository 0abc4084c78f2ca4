"""The SDK beside real daemons that are killed, stopped and restarted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from cenote.api.errors import CenoteError
from cenote.client import Client
from cluster import Cluster
from promptness import ends_within
from waiting import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
TRANSPORTS = [pytest.param(("shm", "tcp"), id="shm"), pytest.param(("tcp",), id="tcp")]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two nodes in failure domains of their own; a restarted master waits one second."""
    flags = {"lease-ttl-s": "1s", "lease-ttl-max-s": "1s"}
    with Cluster(stores=0, dram_bytes=64 * MIB, master_flags=flags) as made:
        for i in range(2):
            made.add_store(flags={"failure-domain": f"domain-{i}"})
        made.wait_alive(2)
        yield made


def fill(client: Client, prefix: str, count: int, **options: int) -> dict[str, bytes]:
    values = {f"{prefix}{i}": os.urandom(4096) for i in range(count)}
    results = client.put_batch(list(values), list(values.values()), **options)  # type: ignore[arg-type]
    results.raise_for_errors()
    assert results.stored_count == count
    return values


def timed_get(client: Client, keys: list[str], deadline_s: float) -> list[bytes | None]:
    with ends_within(deadline_s, "get_batch"):
        return client.get_batch(keys, deadline_s=deadline_s)


@pytest.mark.parametrize("transports", TRANSPORTS)
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_node_costs_nothing_with_two_replicas(
    cluster: Cluster, transports: tuple[str, ...], how: str
) -> None:
    with cluster.client(transports=transports, location_cache_entries=0) as client:
        values = fill(client, "k", 100, replicas=2, min_replicas=2)
        victim = cluster.stores[0]
        if how == "killed":
            victim.kill()
        else:
            victim.pause()
        keys = list(values)
        for _ in range(3):
            assert timed_get(client, keys, 2.0) == list(values.values())
        for key in keys[:20]:
            assert client.get(key, deadline_s=2.0) == values[key]
        assert client.stats().failed == 0
        if how == "stopped":
            victim.resume()
        else:
            victim.restart()
        wait_until(
            lambda: (
                timed_get(client, keys, 2.0) == list(values.values())
                and not client.session.state.suspects
            ),
            what="the node is trusted again",
        )


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_puts_go_elsewhere_when_a_node_is_lost(
    cluster: Cluster, transports: tuple[str, ...]
) -> None:
    with cluster.client(transports=transports) as client:
        fill(client, "before", 20)  # so that it has channels
        cluster.stores[1].kill()
        values = fill(client, "batch", 100, deadline_s=3)
        for i in range(20):
            values[f"one{i}"] = os.urandom(64)
            assert client.put(f"one{i}", values[f"one{i}"], deadline_s=3).stored
        assert client.get_batch(list(values)) == list(values.values())


def test_contents_survive_a_restart_of_their_daemon(cluster: Cluster) -> None:
    with cluster.client() as client, cluster.client(transports=("tcp",)) as far:
        values = fill(client, "k", 50)
        for store in cluster.stores:
            store.restart(signal.SIGTERM)
        for each in (client, far):
            wait_until(
                lambda each=each: each.get_batch(list(values)) == list(values.values()),  # type: ignore[misc]
                what="everything is back",
            )
        fill(client, "after", 50)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_master_knows_what_was_acknowledged(
    cluster: Cluster, number: signal.Signals
) -> None:
    with cluster.client() as client:
        values = fill(client, "k", 50, replicas=2)
        session_id = client.session.identity.session_id
        cluster.master.restart(number)
        assert client.exists_batch(list(values)).all()
        wait_until(
            lambda: client.get_batch(list(values)) == list(values.values()),
            what="the daemons attached",
        )

        def writes_again() -> bool:
            try:
                return client.put(f"new-{time.monotonic()}", b"x").stored
            except CenoteError:
                return False

        wait_until(writes_again, what="the master places again")
        assert client.session.identity.session_id == session_id


def test_calls_end_by_their_deadline_while_the_master_is_stopped(cluster: Cluster) -> None:
    with cluster.client() as client:
        values = fill(client, "k", 10)
        client.get_batch(list(values))
        cluster.master.pause()
        for use in (
            lambda: client.get("absent", deadline_s=0.3),
            lambda: client.get_batch(["absent"] * 3, deadline_s=0.3),
            lambda: client.put("new", b"x", deadline_s=0.3),
            lambda: client.put_batch(["a", "b"], [b"x", b"y"], deadline_s=0.3),
            lambda: client.exists("absent", deadline_s=0.3),
            lambda: client.exists_batch(["absent"] * 5000, deadline_s=0.3),
            lambda: client.match(["absent"], deadline_s=0.3),
            lambda: client.remove("absent", deadline_s=0.3),
        ):
            with ends_within(0.3), pytest.raises(CenoteError) as caught:
                use()
            assert caught.value.remedy or caught.value.message
        # What is cached needs no master.
        assert client.get("k3") == values["k3"]
        with ends_within(2.0):
            client.close()
        cluster.master.resume()
    assert [t.name for t in threading.enumerate() if t.name.startswith("cenote")] == []


def test_views_outlive_eviction(cluster: Cluster) -> None:
    with cluster.client(transports=("shm",)) as client:
        values = fill(client, "k", 4)
        with client.view([*values, "absent"], copy=False) as views:
            block = os.urandom(256 << 10)
            for i in range(600):  # more than the pool holds
                client.put(f"fill{i}", block)
            assert [None if v is None else bytes(v) for v in views] == [*values.values(), None]
        arrays: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
        with pytest.raises(CenoteError, match="still exported"), client.view(["fill599"]) as views:
            arrays.extend(np.frombuffer(v, np.uint8) for v in views if v is not None)
        kept = arrays[0]
        assert kept.tobytes() == block  # still held
    # Closing leaves the memory that somebody still looks at.
    assert kept.tobytes() == block


def test_a_reader_on_another_lease_in_another_process(cluster: Cluster) -> None:
    with cluster.client() as scheduler, cluster.client() as worker:
        values = fill(scheduler, "k", 20)
        lease = scheduler.acquire(list(values), 5.0)
        block = np.zeros((20, 4096), np.uint8)
        assert worker.get_into_batch(list(values), block, lease=lease).hit_count == 20
        assert block.tobytes() == b"".join(values.values())
        scheduler.release(lease)
