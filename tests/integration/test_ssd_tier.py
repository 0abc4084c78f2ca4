"""SSDs of real daemons: what they hold, over restarts, and what becomes of it when they fail."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from admin import Admin, admin_of
from cenote.api.errors import CenoteError
from cenote.client import Client
from cenote.v1 import admin_pb2
from cluster import Cluster
from payloads import payload_of
from promptness import ends_within, stopwatch
from waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MIB = 1 << 20
SIZE = 512 << 10
DRAM, SSD = 64 * MIB, 256 * MIB
KEYS = [f"key-{number}" for number in range(240)]
"""Twice of what fits into memory."""


@contextmanager
def ssd_pool(path: Path, **flags: object) -> Iterator[Cluster]:
    """A master and one daemon, with its SSD in `path`."""
    with Cluster(stores=0) as cluster:
        ssd = {"ssd": str(path / "ssd"), "ssd-size": SSD, **flags}
        cluster.add_store(dram_bytes=DRAM, flags=ssd)
        cluster.wait_alive(1)
        yield cluster


def status_of(cluster: Cluster) -> admin_pb2.GetStatusResponse:
    with admin_of(cluster) as admin:
        return admin.status()


def settled(cluster: Cluster) -> admin_pb2.GetStatusResponse:
    """The status once no copy is under way, and none was made for a while."""
    with admin_of(cluster) as admin:
        before, since_s = -1, time.monotonic()

        def is_quiet() -> bool:
            nonlocal before, since_s
            status = admin.status()
            if status.demoted_objects != before or status.copying_bytes:
                before, since_s = status.demoted_objects, time.monotonic()
            return time.monotonic() - since_s > 0.4

        wait_until(is_quiet, 30.0, what="the copies to end")
        return admin.status()


def fill(cluster: Cluster, client: Client, keys: list[str] = KEYS) -> None:
    """Put all, no faster than the SSD takes them."""
    with admin_of(cluster) as admin:
        before = admin.status().demoted_objects
        for first in range(0, len(keys), 20):
            some = keys[first : first + 20]
            client.put_batch(some, [payload_of(key, SIZE) for key in some]).raise_for_errors()
            # What has no copy yet still has room in memory.
            copies_after(admin, before + first + 20 - 100)


def copies_after(admin: Admin, goal: int) -> None:
    wait_until(lambda: admin.status().demoted_objects >= goal, 30.0, what=f"{goal} copies")


def check(client: Client, keys: list[str] = KEYS) -> int:
    """How many are there; each that is there is right."""
    values = client.get_batch(keys)
    wrong = [
        key
        for key, value in zip(keys, values, strict=True)
        if value is not None and value != payload_of(key, SIZE)
    ]
    assert not wrong
    return sum(value is not None for value in values)


def comes_back(client: Client, count: int, keys: list[str] = KEYS) -> int:
    """Until so many are there: what is asked of a daemon that was just restarted may be a miss, for
    as long as this client has not noticed, or where others said just now that it does not answer.
    """
    return wait_until(
        lambda: there if (there := check(client, keys)) >= count else 0, what=f"{count} objects"
    )


@pytest.mark.parametrize("transports", [("shm",), ("tcp",)])
def test_what_has_no_room_in_memory_is_read_from_the_ssd(
    tmp_path: Path, transports: tuple[str, ...]
) -> None:
    with ssd_pool(tmp_path) as cluster, cluster.client(transports=transports) as client:
        fill(cluster, client)
        status = settled(cluster)
        assert status.evicted_objects == 0
        assert status.evicted_to_ssd > 100
        assert check(client) == len(KEYS)
        stats = client.stats()
        assert stats.ssd_hits > 100
        assert status_of(cluster).acquired_hits_ssd > 100
        # The second touch brings back what fits.
        assert check(client) == len(KEYS)
        wait_until(lambda: status_of(cluster).promoted_objects > 20, 10.0, what="promotions")
        single = bytearray(SIZE)
        for key in KEYS[:20]:
            assert client.get_into(key, single) == SIZE
            assert single == payload_of(key, SIZE)
        assert status_of(cluster).damaged_replicas == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_restart_brings_back_both_tiers(tmp_path: Path, number: signal.Signals) -> None:
    with ssd_pool(tmp_path) as cluster, cluster.client() as client:
        fill(cluster, client)
        settled(cluster)
        (store,) = cluster.stores
        with ends_within(10.0, "coming back"):
            store.restart(number)
            cluster.wait_alive(1)
            comes_back(client, len(KEYS))


def test_a_reboot_loses_memory_and_not_the_ssd(tmp_path: Path) -> None:
    with ssd_pool(tmp_path) as cluster, cluster.client() as client:
        fill(cluster, client)
        copied = settled(cluster).ssd_used_bytes // SIZE
        (store,) = cluster.stores
        store.kill()
        for path in cluster.dram_directory.glob("cenote-s0*"):
            path.unlink()
        store.restart()
        cluster.wait_alive(1)
        assert copied > 100
        comes_back(client, round(0.99 * copied))


def test_a_new_master_knows_of_the_ssd(tmp_path: Path) -> None:
    with ssd_pool(tmp_path) as cluster, cluster.client() as client:
        fill(cluster, client)
        settled(cluster)
        cluster.master.restart(signal.SIGKILL)
        cluster.wait_alive(1)
        comes_back(client, len(KEYS))
        fill(cluster, client, [f"more-{number}" for number in range(60)])


def test_puts_do_not_wait_for_a_slow_ssd(tmp_path: Path) -> None:
    """It takes 1 MiB/s: nearly everything is evicted without a copy."""
    with ssd_pool(tmp_path, **{"ssd-write-limit": MIB}) as cluster, cluster.client() as client:
        longest_s = 0.0
        with stopwatch() as watch:
            for key in KEYS * 2:
                client.remove(key)
                began_s = time.monotonic()
                client.put(key, payload_of(key, SIZE))
                longest_s = max(longest_s, time.monotonic() - began_s)
        status = status_of(cluster)
        assert status.evicted_objects > 100
        assert longest_s < 2.0 + watch.delayed_s
        assert check(client) > 100


def damage(path: Path, seed: int) -> None:
    """Flip a bit in every 256 KiB of the file, slots included, but for its headers."""
    dice = random.Random(seed)
    with path.open("r+b") as file:
        for start in range(64 << 10, path.stat().st_size, 256 << 10):
            at = start + dice.randrange(min(256 << 10, path.stat().st_size - start))
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << dice.randrange(8)]))
        os.fsync(file.fileno())


@pytest.mark.parametrize("transports", [("shm",), ("tcp",)])
def test_bits_that_flip_on_the_ssd_cost_a_miss_and_heal(
    tmp_path: Path, transports: tuple[str, ...], seed: int
) -> None:
    with ssd_pool(tmp_path) as cluster, cluster.client(transports=transports) as client:
        fill(cluster, client)
        settled(cluster)
        damage(tmp_path / "ssd", seed)
        there = check(client)
        assert 100 < there < len(KEYS)
        assert status_of(cluster).damaged_replicas >= len(KEYS) - there
        lost = [key for key in KEYS if not client.exists(key)]
        fill(cluster, client, lost)
        assert check(client, lost) == len(lost)
        (store,) = cluster.stores
        damage(tmp_path / "ssd", seed + 1)
        store.restart(signal.SIGKILL)
        cluster.wait_alive(1)
        check(client)


def test_a_file_that_is_cut_short_costs_misses_and_heals(tmp_path: Path) -> None:
    with ssd_pool(tmp_path) as cluster, cluster.client() as client:
        fill(cluster, client)
        settled(cluster)
        os.truncate(tmp_path / "ssd", 32 * MIB)
        there = check(client)
        assert there < len(KEYS)
        assert check(client) <= there
        fill_again = [key for key in KEYS if not client.exists(key)][:20]
        for key in fill_again:
            client.put(key, payload_of(key, SIZE))
        assert check(client, fill_again) == len(fill_again)


def test_a_file_that_was_deleted_is_made_anew(tmp_path: Path) -> None:
    with ssd_pool(tmp_path) as cluster, cluster.client() as client:
        fill(cluster, client)
        settled(cluster)
        (tmp_path / "ssd").unlink()
        assert check(client) == len(KEYS)  # it is there for as long as the daemon has it open
        (store,) = cluster.stores
        store.restart(signal.SIGKILL)
        cluster.wait_alive(1)
        there = comes_back(client, 80)
        assert there < len(KEYS)
        lost = [key for key in KEYS if not client.exists(key)]
        fill(cluster, client, lost)
        assert check(client, lost) == len(lost)


def test_killed_while_it_copies_it_never_gives_wrong_bytes(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    with ssd_pool(tmp_path) as cluster, cluster.client() as client:
        (store,) = cluster.stores
        stop = threading.Event()
        trouble: list[BaseException] = []

        def load() -> None:
            own = random.Random(seed + 1)
            try:
                with cluster.client() as mine:
                    while not stop.is_set():
                        key = f"load-{own.randrange(2000)}"
                        # A daemon that is down is an error at once where it is the only one.
                        with contextlib.suppress(CenoteError):
                            value = mine.get(key)
                            assert value is None or value == payload_of(key, SIZE)
                            if value is None:
                                mine.put(key, payload_of(key, SIZE))
            except BaseException as error:  # it is the main thread that tells
                trouble.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        try:
            for _ in range(5):
                with admin_of(cluster) as admin:
                    copies_after(admin, admin.status().demoted_objects + dice.randrange(1, 20))
                store.restart(signal.SIGKILL)
                cluster.wait_alive(1)
        finally:
            stop.set()
            thread.join()
        assert not trouble, trouble
        comes_back(client, 60, [f"load-{number}" for number in range(2000)])


def test_a_disk_that_takes_no_more_costs_copies_and_no_put(tmp_path: Path) -> None:
    """Writes behind 100 MiB fail in the daemon, as on a full or failing disk."""
    with ssd_pool(tmp_path) as cluster, cluster.client() as client:
        fill(cluster, client, KEYS[:60])
        (store,) = cluster.stores
        unlimited = resource.prlimit(store.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(store.pid, resource.RLIMIT_FSIZE, (100 * MIB, unlimited[1]))
        keys = [f"late-{number}" for number in range(360)]
        with stopwatch() as watch:
            longest_s = 0.0
            for key in keys:
                began_s = time.monotonic()
                client.put(key, payload_of(key, SIZE))
                longest_s = max(longest_s, time.monotonic() - began_s)
        assert longest_s < 2.0 + watch.delayed_s
        wait_until(lambda: status_of(cluster).failed_copies, what="a copy to fail")
        assert check(client, KEYS[:60] + keys) > 60
        # Whether it was given up by then or not: a restart takes it into use again.
        store.restart(signal.SIGKILL)
        cluster.wait_alive(1)
        comes_back(client, 60, KEYS[:60] + keys)
        before = status_of(cluster).demoted_objects
        more = [f"more-{number}" for number in range(160)]
        client.put_batch(more, [payload_of(key, SIZE) for key in more]).raise_for_errors()
        with admin_of(cluster) as admin:
            copies_after(admin, before + 20)
        check(client, KEYS[:60] + keys + more)


def test_a_disk_without_room_is_told_at_the_start(tmp_path: Path) -> None:
    with Cluster(stores=0) as cluster:
        flags = {"ssd": str(tmp_path / "ssd"), "ssd-size": 1 << 50}
        with pytest.raises(Exception, match="are free there"):
            cluster.add_store(dram_bytes=DRAM, flags=flags)
        cluster.stores[0].expected_down = True
        assert not (tmp_path / "ssd").exists()
