"""Where new bytes go: nodes of different size fill evenly, a fresh node is not flooded."""

from __future__ import annotations

import os

import numpy as np
import pytest

from admin import Admin, admin_of
from cenote.client import Client
from cluster import Cluster
from waiting import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
KIB = 1 << 10
SIZE = 256 * KIB


class Writer:
    """Puts new keys of `SIZE` bytes, and counts what it put."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._data = np.frombuffer(os.urandom(SIZE * 32), np.uint8).reshape(32, SIZE)
        self._number = 0

    def put(self, size_bytes: int, batch: int) -> int:
        """About so many bytes in batches of so many keys (1: single puts); how many in truth."""
        count = -(-size_bytes // SIZE // batch) * batch
        for _ in range(0, count, batch):
            keys = [f"k{self._number + i}" for i in range(batch)]
            self._number += batch
            if batch == 1:
                assert self._client.put(keys[0], self._data[0]).stored
            else:
                results = self._client.put_from_batch(keys, list(self._data[:batch]))
                assert results.stored_count == batch, results
        return count * SIZE


def wait_for_memory(admin: Admin, size_bytes: float) -> None:
    """Until so much is allocatable: memory comes chunk by chunk."""
    wait_until(
        lambda: admin.status().capacity_bytes >= size_bytes, 30.0, what="the segments' memory"
    )


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_nodes_of_256_mib_and_1_gib_fill_evenly(batch: int) -> None:
    """Fill ratios stay within 10 points all along: while they fill, when full, when overwritten."""
    steps = 24
    with Cluster(stores=0) as cluster:
        small = cluster.add_store(dram_bytes=256 * MIB)
        large = cluster.add_store(dram_bytes=1024 * MIB)
        cluster.wait_alive(2)
        with admin_of(cluster) as admin, cluster.client(transports=("shm",)) as client:
            wait_for_memory(admin, 0.98 * 1280 * MIB)
            writer = Writer(client)
            for step in range(steps):  # one and a half times what fits
                writer.put(1280 * MIB * 3 // 2 // steps, batch)
                ratios = admin.fill_ratios()
                apart = abs(ratios[small.name] - ratios[large.name])
                assert apart <= 0.10, f"step {step}: {ratios}"
            assert min(admin.fill_ratios().values()) >= 0.85


@pytest.mark.parametrize(("batch", "fresh_mib"), [(1, 128), (16, 128), (16, 512)])
def test_a_fresh_node_gets_at_most_twice_its_fair_share(batch: int, fresh_mib: int) -> None:
    """A fair share is that of the capacity; and a bit more than that it does get, until it is full
    like the others."""
    old_mib = 384
    with Cluster(stores=0) as cluster:
        cluster.add_store(dram_bytes=old_mib // 2 * MIB)
        cluster.add_store(dram_bytes=old_mib // 2 * MIB)
        with admin_of(cluster) as admin, cluster.client(transports=("shm",)) as client:
            wait_for_memory(admin, 0.98 * old_mib * MIB)
            writer = Writer(client)
            writer.put(old_mib * MIB * 11 // 10, 16)
            assert min(admin.fill_ratios().values()) > 0.9, "the pool is not full"
            fresh = cluster.add_store(dram_bytes=fresh_mib * MIB)
            cluster.wait_alive(3)
            wait_for_memory(admin, 0.98 * (old_mib + fresh_mib) * MIB)
            capacities = {name: n.capacity_bytes for name, n in admin.nodes().items()}
            fair = capacities[fresh.name] / sum(capacities.values())
            put_bytes = 0
            while put_bytes < 3 * fresh_mib * MIB:
                put_bytes += writer.put(8 * MIB, batch)
                used_bytes = admin.nodes()[fresh.name].used_bytes
                if used_bytes >= 0.9 * capacities[fresh.name]:
                    break
                # Placement is by runs of about 1 MiB: one more or less is no flood.
                allowed_bytes = 2 * fair * put_bytes + 2 * MIB
                assert used_bytes <= allowed_bytes, f"{used_bytes / put_bytes:.0%}, fair {fair:.0%}"
            ratios = admin.fill_ratios()
            assert ratios[fresh.name] >= 0.85, f"it does not catch up: {ratios}"
            assert min(ratios.values()) >= 0.85, ratios
