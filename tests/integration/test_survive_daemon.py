"""A store daemon is restarted under load: what it held is served again; what is damaged is not."""

from __future__ import annotations

import mmap
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from admin import admin_of
from cenote.client import Client
from cluster import Cluster
from payloads import payload_of
from waiting import wait_until
from workers import TRANSPORTS, Load, pass_time, pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SHORT_LEASES = {"lease_ttl_s": 0.5, "lease_ttl_max_s": 1}
DATA, SLOTS = ".data", ".slots"


def check_all(client: Client, stored: dict[str, int]) -> None:
    """Everything is there, with its bytes."""
    keys = list(stored)
    for first in range(0, len(keys), 256):
        some = keys[first : first + 256]
        values = client.get_batch(some, deadline_s=20.0)
        lost = [key for key, value in zip(some, values, strict=True) if value is None]
        assert not lost, f"{len(lost)} of {len(some)} acknowledged objects are missed: {lost[0]}"
        assert values == [payload_of(key, stored[key]) for key in some]
    print(f"{len(keys)} acknowledged objects are there")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_restarted_daemon_serves_all_that_was_acknowledged(
    seed: int, number: signal.Signals
) -> None:
    with pool(2, dram_bytes=256 << 20, **SHORT_LEASES) as cluster, ExitStack() as stack:
        load = Load(stack, cluster, seed, replicas=1, misses_are_legal=True, keep=True)
        pass_time(1.0)
        for store in cluster.stores:
            fault_s = time.monotonic()
            store.restart(number)
            cluster.wait_alive(2)
            print(f"{store.name} is back after {time.monotonic() - fault_s:.2f} s")
            pass_time(1.0)
        back_s = time.monotonic()
        pass_time(1.0)
        load.stop()
        assert load.failures() == []
        late = [t for report in load.reports for t in report.misses if t > back_s + 0.5]
        assert not late, "keys are missed long after their daemon came back"
        assert sum(len(report.misses) for report in load.reports) > 0
        # Over TCP a daemon that died in the middle of a write has its session cut off, for another.
        near = zip(load.reports, TRANSPORTS, strict=True)
        assert all(report.same_session for report, kinds in near if "shm" in kinds)
        for transports in (("shm",), ("tcp",)):
            with cluster.client(transports=transports) as client:
                check_all(client, dict(load.stored()))


SIZES = {f"object-{i:03}": 1 + i * 397 % 30_000 for i in range(150)}
PAYLOAD, TABLE, TORN = "object-017", "object-042", "object-077"


@contextmanager
def contents(cluster: Cluster, suffix: str) -> Iterator[mmap.mmap]:
    """The store's data or table file, as memory that can be changed."""
    (path,) = (p for p in cluster.dram_directory.rglob("*") if p.name.endswith(suffix))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory


def only_place(memory: mmap.mmap, text: bytes) -> int:
    at = memory.find(text)
    assert at >= 0
    assert memory.find(text, at + 1) < 0
    return at


def flip_payload(cluster: Cluster, key: str) -> None:
    with contents(cluster, DATA) as data:
        at = only_place(data, payload_of(key, SIZES[key])[:200])
        data[at + SIZES[key] // 2] ^= 0x10


def fill(client: Client) -> None:
    values = [payload_of(key, size) for key, size in SIZES.items()]
    client.put_batch(list(SIZES), values).raise_for_errors()


def check_misses(client: Client, *damaged: str) -> None:
    """These are missed, everything else is right."""
    for key in damaged:
        assert client.get(key) is None
    values = client.get_batch(list(SIZES))
    assert values == [None if k in damaged else payload_of(k, n) for k, n in SIZES.items()]


def check_healed(client: Client, *damaged: str) -> None:
    for key in damaged:
        assert not client.exists(key)
        assert client.put(key, payload_of(key, SIZES[key])).stored
    check_misses(client)


def test_what_was_damaged_while_the_daemon_was_away_is_a_miss() -> None:
    with (
        pool(1, dram_bytes=24 << 20, **SHORT_LEASES) as cluster,
        cluster.client(transports=("shm",)) as near,
        cluster.client(transports=("tcp",)) as far,
        admin_of(cluster) as admin,
    ):
        fill(near)
        (store,) = cluster.stores
        store.kill()
        flip_payload(cluster, PAYLOAD)
        with contents(cluster, SLOTS) as table:
            table[only_place(table, TABLE.encode()) - 20] ^= 1
            at = only_place(table, TORN.encode())
            table[at : at + 64] = bytes(64)
        store.start()
        store.wait_ready()
        cluster.wait_alive(1)
        check_misses(far, PAYLOAD, TABLE, TORN)
        check_misses(near, PAYLOAD, TABLE, TORN)
        wait_until(lambda: not admin.status().unverified_slots, what="all to be verified")

        def leased() -> bool:
            lease = near.acquire(list(SIZES)[:3], 1.0)
            near.release(lease)
            return bool(lease.lease_id)

        wait_until(leased, what="leases to be given again")
        check_misses(near, PAYLOAD, TABLE, TORN)
        status = admin.status()
        assert (status.damaged_replicas, status.broken_slots, status.lost_objects) == (1, 2, 2)
        told = cluster.cli("status").stdout.decode()
        assert "1 replica dropped, 2 slots torn, 2 objects not brought back" in told
        check_healed(near, PAYLOAD, TABLE, TORN)
        check_misses(far)


def test_what_is_damaged_while_it_is_served_is_a_miss_for_who_takes_the_checksum() -> None:
    with (
        pool(1, dram_bytes=24 << 20) as cluster,
        cluster.client(transports=("tcp",)) as client,
        admin_of(cluster) as admin,
    ):
        fill(client)
        assert client.get(PAYLOAD) == payload_of(PAYLOAD, SIZES[PAYLOAD])
        for key in (PAYLOAD, TABLE):
            flip_payload(cluster, key)
        check_misses(client, PAYLOAD, TABLE)
        assert admin.status().damaged_replicas == 2
        assert client.stats().misreads == 2
        check_healed(client, PAYLOAD, TABLE)
