"""What was acknowledged outlives its master, its daemons, and both, however they end."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Literal

import pytest

from admin import Admin, admin_of
from cenote.api.errors import CenoteError
from cenote.client import Client
from cluster import Cluster
from payloads import payload_of
from remote import Remote
from waiting import wait_until

pytestmark = pytest.mark.integration

KIB = 1 << 10
MIB = 1 << 20
SIGNALS = [signal.SIGTERM, signal.SIGKILL]
Durability = Literal["relaxed", "journaled"]
LARGE = {f"large{i}": 300_000 + 7 * i for i in range(40)}
SMALL = {f"small{i}": 1 + i % 900 for i in range(3000)}
LONG = {f"long{i}".ljust(112 + i % 400, "x"): 500 for i in range(200)}
OBJECTS = LARGE | SMALL | LONG
# So that what readers of a tenure leased is free soon in the same tenure.
SHORT_LEASES = {"lease-ttl-s": 0.5, "lease-ttl-max-s": 1}
REMOVED = [key for i, key in enumerate(OBJECTS) if i % 5 == 0]
KEPT = [key for i, key in enumerate(OBJECTS) if i % 5]


def put_and_remove(client: Client, durability: Durability) -> None:
    """All of OBJECTS, then away with REMOVED."""
    keys = list(OBJECTS)
    for first in range(0, len(keys), 500):
        some = keys[first : first + 500]
        values = [payload_of(key, OBJECTS[key]) for key in some]
        assert client.put_batch(some, values, durability=durability).stored_count == len(some)
    assert client.remove_batch(REMOVED).all()


def check(client: Client, present: Iterable[str], absent: Iterable[str]) -> None:
    """Every object is there with its bytes, every removed one is not."""
    keys = list(present)
    for first in range(0, len(keys), 500):
        some = keys[first : first + 500]
        for key, value in zip(some, client.get_batch(some, deadline_s=20.0), strict=True):
            assert value == payload_of(key, OBJECTS[key]), key[:20]
    assert not client.exists_batch(list(absent)).any()
    assert client.get_batch(list(absent)[:100]) == [None] * len(list(absent)[:100])


@pytest.mark.parametrize("durability", ["relaxed", "journaled"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_restarted_master_knows_everything(
    number: signal.Signals, durability: Durability
) -> None:
    with Cluster(stores=2, dram_bytes=64 * MIB, master_flags=SHORT_LEASES) as cluster:
        with cluster.client() as client:
            put_and_remove(client, durability)
            cluster.master.restart(number)
            cluster.wait_alive(2)
            # The very same client goes on, and a new one finds the same.
            check(client, KEPT, REMOVED)
        with cluster.client(transports=("tcp",)) as client:
            check(client, KEPT, REMOVED)
            # A second restart replays what the first one replayed, and what came since.
            wait_for_room(client, KIB)
            assert client.put("since", b"then").stored
            assert client.remove(KEPT[0])
            cluster.master.restart(number)
            cluster.wait_alive(2)
            check(client, KEPT[1:], [*REMOVED, KEPT[0]])
            assert client.get("since") == b"then"


@pytest.mark.parametrize("number", SIGNALS)
def test_what_was_removed_can_be_put_anew_with_other_bytes(number: signal.Signals) -> None:
    with Cluster(stores=1) as cluster, cluster.client() as client:
        client.put("key", b"old" * 1000)
        client.remove("key")
        client.put("key", b"new" * 1001)
        cluster.master.restart(number)
        cluster.wait_alive(1)
        assert client.get("key") == b"new" * 1001


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("which", ["stores", "all"])
def test_restarted_store_daemons_bring_their_objects_back(
    which: str, number: signal.Signals
) -> None:
    flags = SHORT_LEASES
    with (
        Cluster(stores=2, dram_bytes=64 * MIB, master_flags=flags) as cluster,
        cluster.client() as client,
    ):
        put_and_remove(client, "relaxed")
        processes = cluster.processes if which == "all" else cluster.stores
        for process in processes:
            process.kill(number)
        for process in processes:
            process.start()
            process.wait_ready()
        cluster.wait_alive(2)
        check(client, KEPT, REMOVED)
        with cluster.client(transports=("tcp",)) as other:
            check(other, KEPT, REMOVED)
            wait_for_room(client, KIB)
            assert other.put("afterwards", b"new").stored
        assert client.get("afterwards") == b"new"


def test_a_master_that_was_away_frees_and_reuses_space_again() -> None:
    """After a restart the pool can be overwritten again and again: nothing leaked."""
    size, batch = 256 * KIB, 16
    flags = SHORT_LEASES
    with (
        Cluster(stores=1, dram_bytes=32 * MIB, master_flags=flags) as cluster,
        cluster.client() as client,
    ):
        number = 0
        for number_of_restart in range(3):
            for _ in range(3 * 32 * MIB // size // batch):
                keys = [f"k{number + i}" for i in range(batch)]
                number += batch
                results = client.put_batch(keys, [payload_of(key, size) for key in keys])
                assert results.stored_count == batch, results[0].error
            newest = [f"k{i}" for i in range(number - 80, number)]
            for key in newest:
                assert client.get(key) == payload_of(key, size)
            cluster.master.restart(SIGNALS[number_of_restart % 2])
            cluster.wait_alive(1)
            for key in newest:
                assert client.get(key) == payload_of(key, size)
            wait_for_room(client, size)
        with admin_of(cluster) as admin:
            status = admin.status()
            assert status.used_bytes + status.granted_bytes <= status.capacity_bytes
            assert status.condemned_bytes == status.quarantined_bytes == 0


def wait_for_room(client: Client, size: int) -> None:
    """Until space is reused again: once its daemon has attached."""
    numbers = iter(range(1_000_000))

    def put() -> bool:
        key = f"room{next(numbers)}"
        try:
            return client.put(key, payload_of(key, size)).stored
        except CenoteError:
            return False

    wait_until(put, 30.0, what="room after the restart")


@pytest.mark.parametrize("durability", ["relaxed", "journaled"])
def test_nothing_acknowledged_is_lost_when_the_master_is_killed_under_load(
    seed: int, durability: Durability
) -> None:
    size, kills = 3 * KIB, 3
    flags = SHORT_LEASES
    with (
        Cluster(stores=2, dram_bytes=512 * MIB, master_flags=flags) as cluster,
        ExitStack() as stack,
    ):
        writers = [
            stack.enter_context(
                Remote(
                    "write_and_remember", cluster.lane, (seed + i) % 10_000, size, batch, durability
                )
            )
            for i, batch in enumerate((1, 32))
        ]
        for writer in writers:
            writer.expect("ready")
        with cluster.client() as client, admin_of(cluster) as admin:
            for _ in range(kills):
                wait_for_progress(admin)
                cluster.master.restart(signal.SIGKILL)
                cluster.wait_alive(2)
            wait_for_progress(admin)
            for writer in writers:
                writer.say("stop")
            reports = [writer.hear() for writer in writers]
            for report in reports:
                check_report(client, report, size)


def wait_for_progress(admin: Admin) -> None:
    """Until some hundred more objects were stored."""
    seen = admin.status().objects
    wait_until(lambda: admin.status().objects > seen + 300, 20.0, what="progress")


def check_report(client: Client, report: dict[str, Any], size: int) -> None:
    stored, removed = sorted(report["stored"]), sorted(report["removed"])
    assert len(stored) >= 1
    assert removed
    for first in range(0, len(stored), 512):
        some = stored[first : first + 512]
        values = client.get_batch(some, deadline_s=20.0)
        lost = [key for key, value in zip(some, values, strict=True) if value is None]
        assert not lost, f"{len(lost)} acknowledged objects are lost, first {lost[0]}"
        assert values == [payload_of(key, size) for key in some]
    assert not client.exists_batch(removed).any(), "what was removed is there again"
    # Nobody was told what became of these; but what is there is right.
    for key, value in zip(
        report["unknown"], client.get_batch(list(report["unknown"])), strict=True
    ):
        assert value in (None, payload_of(key, size))
