"""A hint that keys will be read soon, with a real daemon and its SSD."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from admin import admin_of
from cluster import Cluster
from payloads import payload_of
from waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MIB = 1 << 20
SIZE = 512 << 10
KEYS = [f"key-{number}" for number in range(200)]


def test_what_will_be_read_soon_is_in_memory_by_then(tmp_path: Path) -> None:
    with Cluster(stores=0) as cluster:
        flags = {"ssd": str(tmp_path / "ssd"), "ssd-size": 256 * MIB}
        cluster.add_store(dram_bytes=64 * MIB, flags=flags)
        cluster.wait_alive(1)
        with cluster.client() as client, admin_of(cluster) as admin:
            for first in range(0, len(KEYS), 20):
                some = KEYS[first : first + 20]
                client.put_batch(some, [payload_of(key, SIZE) for key in some]).raise_for_errors()
                goal = first + 20 - 100
                wait_until(
                    lambda goal=goal: admin.status().demoted_objects >= goal,  # type: ignore[misc]
                    30.0,
                    what="copies on the SSD",
                )
            cold = KEYS[:16]
            before = admin.status()
            assert client.prefetch(cold).prefix_keys == len(cold)
            wait_until(
                lambda: admin.status().promoted_objects >= before.promoted_objects + len(cold),
                20.0,
                what="all of it to be in memory",
            )
            values = client.get_batch(cold)
            assert [bytes(v or b"") for v in values] == [payload_of(key, SIZE) for key in cold]
            after = admin.status()
            assert after.acquired_hits_ssd == before.acquired_hits_ssd
            # The same by the command.
            some = [key for key in KEYS if not in_memory(cluster, key)][:4]
            asked = cluster.cli("prefetch", *some, "--json")
            assert asked.returncode == 0, asked.stderr
            assert json.loads(asked.stdout) == {"asked_for": len(some), "missing": []}
            wait_until(
                lambda: all(in_memory(cluster, key) for key in some), 30.0, what="them in memory"
            )
            assert cluster.cli("prefetch", some[0], "nobody").returncode == 3


def in_memory(cluster: Cluster, key: str) -> bool:
    found = json.loads(cluster.cli("stat", key, "--json").stdout)
    return "dram" in {extent["tier"] for extent in found["extents"]}
