"""Clients that do anything at random while their pool's daemons are killed, stopped, restarted.

Never wrong bytes, never an error that is not typed; when all is well again, everything works and
nothing has leaked. CENOTE_TEST_FULL=1 makes it last ten times as long.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from admin import Admin, admin_of
from cenote.api.errors import CenoteError
from cluster import Cluster
from etcd import EtcdCluster
from remote import Remote
from waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

MIB = 1 << 20
FULL = os.environ.get("CENOTE_TEST_FULL") == "1"
FAULTS = 60 if FULL else 7
FLAGS = {
    "lease-ttl-s": 0.5,
    "lease-ttl-max-s": 1,
    "session-ttl-s": 3,
    "node-dead-s": 2,
    "heartbeat-s": 0.3,
    "location-ttl-s": 1,
}
CLIENTS = [("shm", "tcp"), ("tcp",), ("shm",)]


def disturb(cluster: Cluster, rng: random.Random) -> str:
    """One fault, and its end; what it was."""
    process = rng.choice([*cluster.masters, *cluster.stores])
    kind = rng.choice(["SIGKILL", "SIGTERM", "pause"])
    if kind == "pause":
        process.pause()
        pass_time(rng.uniform(0.1, 3.0))
        process.resume()
    else:
        process.kill(signal.Signals[kind])
        pass_time(rng.uniform(0.0, 2.5))
        process.start()
        process.wait_ready()
    return f"{process.name}: {kind}"


def pass_time(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= until_s, seconds + 1, what="time to pass")


def wait_for_calls(admin: Admin, count: int) -> None:
    """Until the clients had some more puts decided, all by one leader."""
    first: dict[int, int] = {}

    def went_on() -> bool:
        status = admin.status()
        return status.last_seq >= first.setdefault(status.epoch, status.last_seq) + count

    wait_until(went_on, 60.0, what="clients to go on")


@pytest.mark.parametrize("masters", [1, 2])
def test_nothing_is_ever_wrong_and_all_is_well_afterwards(
    rng: random.Random, masters: int, tmp_path: Path
) -> None:
    log = []
    with ExitStack() as stack:
        metadata = "file"
        if masters > 1:
            metadata = stack.enter_context(EtcdCluster(tmp_path / "etcd")).url
        cluster = stack.enter_context(
            Cluster(
                stores=0,
                masters=masters,
                metadata=metadata,
                dram_bytes=24 * MIB,
                master_flags=FLAGS,
            )
        )
        for i in range(3):
            cluster.add_store(flags={"failure-domain": f"domain{i}"})
        cluster.wait_alive(3)
        clients = [
            stack.enter_context(
                Remote(
                    "chaos",
                    cluster.lane,
                    rng.randrange(1 << 30),
                    {"transports": transports, "deadline_s": 1.5},
                )
            )
            for transports in CLIENTS
        ]
        for client in clients:
            client.expect("ready")
        with admin_of(cluster) as admin:
            for _ in range(FAULTS):
                wait_for_calls(admin, 100)
                log.append(disturb(cluster, rng))
            cluster.wait_alive(3)
            wait_for_calls(admin, 100)
            counts: Counter[str] = Counter()
            for client in clients:
                client.say("stop")
            for client in clients:
                came, wrong = client.hear()
                counts += came
                assert not wrong, f"{wrong[:5]} after {log}"
            print(log, dict(counts))
            assert counts["hits"] > 200
            check_that_all_is_well(cluster, admin)


def check_that_all_is_well(cluster: Cluster, admin: Admin) -> None:
    with cluster.client(replicas=2, min_replicas=2) as client:

        def put() -> bool:
            try:
                return client.put(f"well{time.monotonic()}", b"x" * 100_000).stored
            except CenoteError:
                return False

        wait_until(put, what="two replicas to be written again")
        number = iter(range(1000))
        for _ in range(60):  # twice what fits
            keys = [f"again{next(number)}" for _ in range(8)]
            client.put_batch(keys, [b"y" * 100_000] * 8).raise_for_errors()
        assert client.get_batch(keys) == [b"y" * 100_000] * 8

    def held() -> tuple[int, int, int, int]:
        status = admin.status()
        return (
            status.granted_bytes,
            status.quarantined_bytes,
            status.condemned_bytes,
            status.leased_bytes,
        )

    try:
        wait_until(lambda: held() == (0, 0, 0, 0), what="space to come back")
    finally:
        print("granted, quarantined, condemned, leased bytes:", held())
    status = admin.status()
    # What is used is what objects have: nothing is lost to nobody.
    assert sum(n.used_bytes for n in admin.nodes().values()) <= status.capacity_bytes
    assert status.used_bytes == sum(n.used_bytes for n in admin.nodes().values())


@pytest.mark.parametrize("transports", [("shm",), ("tcp",)])
def test_a_put_counts_with_the_replica_that_was_written(transports: tuple[str, ...]) -> None:
    """The other one's node has just died, and nobody knows it yet."""
    with Cluster(stores=0, dram_bytes=24 * MIB) as cluster:
        for i in range(2):
            cluster.add_store(flags={"failure-domain": f"domain{i}"})
        cluster.wait_alive(2)
        with cluster.client(transports=transports) as client:
            values = {f"k{i}": bytes([i]) * (1000 + i) for i in range(40)}
            client.put_batch(list(values), list(values.values()), replicas=2).raise_for_errors()
            cluster.stores[1].kill()
            more = {f"m{i}": bytes([i]) * (2000 + i) for i in range(40)}
            results = client.put_batch(list(more), list(more.values()), replicas=2)
            assert results.stored_count == len(more), results[0].error
            assert client.put("single", b"one", replicas=2).stored
            assert client.get_batch(list(values | more)) == list((values | more).values())
            assert client.get("single") == b"one"
            assert client.stats().failed == 0
