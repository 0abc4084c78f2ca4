"""A million small objects in one segment, and what each costs the master in memory."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from admin import admin_of
from cenote.client import Client
from cluster import Cluster, Process
from payloads import payload_of
from waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

COUNT = 1_000_000
OLDEST = COUNT * 9 // 10
BATCH = 4096
KEY_BYTES = 112
PAYLOAD_BYTES = 64
# A payload and a key longer than its slot has room for take 192 bytes, the slot another 192.
NODE_BYTES = int(COUNT * 420 * 1.1) + (32 << 20)
RSS_PER_OBJECT_MAX = 320
LEFT_MAX = 0.40


def key_of(number: int) -> str:
    return f"{number:012}".rjust(KEY_BYTES, "k")


def rss_bytes(process: Process) -> int:
    """What the process has of the machine's memory, files not counted."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def put_all(client: Client, first: int, last: int) -> None:
    for start in range(first, last, BATCH):
        keys = [key_of(i) for i in range(start, min(last, start + BATCH))]
        results = client.put_batch(keys, [payload_of(key, PAYLOAD_BYTES) for key in keys])
        assert results.stored_count == len(keys), (
            start,
            results,
            next(r for r in results if r.error),
        )


def remove_all(client: Client, first: int, last: int) -> None:
    for start in range(first, last, BATCH):
        keys = [key_of(i) for i in range(start, min(last, start + BATCH))]
        assert client.remove_batch(keys, deadline_s=30.0).all()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(stores=1, dram_bytes=NODE_BYTES) as made:
        with admin_of(made) as admin:
            wait_until(
                lambda: admin.status().capacity_bytes > 0.9 * NODE_BYTES, 30.0, what="the memory"
            )
        yield made


class Growth:
    """How much memory the master has because of the objects."""

    def __init__(self, cluster: Cluster) -> None:
        self._master = cluster.master
        self._before_bytes = rss_bytes(self._master)
        self._grown_bytes = 0

    def note_full(self) -> None:
        """All are there now."""
        self._grown_bytes = rss_bytes(self._master) - self._before_bytes
        per_object = self._grown_bytes / COUNT
        print(f"{per_object:.0f} B of the master's memory for each of {COUNT} objects")
        assert per_object <= RSS_PER_OBJECT_MAX

    def left(self) -> float:
        return (rss_bytes(self._master) - self._before_bytes) / self._grown_bytes

    def wait_small(self, what: str) -> None:
        """Memory comes back in steps that hold nobody up."""
        try:
            wait_until(lambda: self.left() <= LEFT_MAX, what="the memory to come back")
        finally:
            print(f"{self.left():.0%} of the growth is left after removing {what}")


def check_present(client: Client, sample: list[int]) -> None:
    for start in range(0, COUNT, 1 << 16):
        keys = [key_of(i) for i in range(start, min(COUNT, start + (1 << 16)))]
        assert client.exists_batch(keys, deadline_s=20.0).all()
    assert not client.exists_batch([key_of(COUNT + i) for i in range(1000)]).any()
    values = client.get_batch([key_of(i) for i in sample])
    assert values == [payload_of(key_of(i), PAYLOAD_BYTES) for i in sample]
    for number in sample[:200]:
        assert client.get(key_of(number)) == payload_of(key_of(number), PAYLOAD_BYTES)


def test_all_are_there_and_removing_them_gives_the_memory_back(
    cluster: Cluster, rng: random.Random
) -> None:
    with cluster.client(transports=("shm",)) as client, admin_of(cluster) as admin:
        # What the first calls of any kind take is no object's.
        put_all(client, -2000, 0)
        remove_all(client, -2000, 0)
        growth = Growth(cluster)
        put_all(client, 0, COUNT)
        growth.note_full()
        assert admin.status().objects == COUNT
        check_present(client, rng.sample(range(COUNT), 2000))

        remove_all(client, 0, OLDEST)
        growth.wait_small("the oldest nine in ten")
        left = [key_of(i) for i in range(OLDEST, COUNT)]
        assert admin.status().objects == len(left)
        assert client.exists_batch(left, deadline_s=20.0).all()
        some = rng.sample(left, 1000)
        assert client.get_batch(some) == [payload_of(key, PAYLOAD_BYTES) for key in some]

        put_all(client, 0, OLDEST)
        assert admin.status().objects == COUNT
        remove_all(client, 0, COUNT)
        assert admin.status().objects == 0
        growth.wait_small("all")
