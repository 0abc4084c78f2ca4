"""Quotas, priorities, pins and times to live in real pools: floods, restarts, and the command."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import NoSpace, QuotaExceeded
from cenote.cli.cmd_demo import SAMPLE
from cenote.client import Client
from cluster import Cluster, run_cenote
from payloads import payload_of
from waiting import wait_until
from workers import pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

KIB, MIB = 1 << 10, 1 << 20
SIZE = 64 * KIB
POINT = 0.01


def run(cluster: Cluster, *arguments: object, code: int = 0) -> Any:
    """The JSON that a command prints."""
    result = cluster.cli(*map(str, arguments), "--json", timeout_s=300)
    assert result.returncode == code, result.stderr.decode()
    return json.loads(result.stdout) if result.stdout else None


def set_quota(cluster: Cluster, namespace: str, *options: object) -> Any:
    return run(cluster, "namespaces", "set-quota", namespace, *options)


def namespaces(cluster: Cluster) -> dict[str, Any]:
    return {each["name"]: each for each in run(cluster, "namespaces")}


def fill(client: Client, name: str, count: int, **options: Any) -> dict[str, bytes]:
    values = {f"{name}-{i}": payload_of(f"{name}-{i}".encode(), SIZE) for i in range(count)}
    client.put_batch(list(values), list(values.values()), **options).raise_for_errors()
    return values


@contextmanager
def flood(cluster: Cluster, namespace: str, block_bytes: int = SIZE) -> Iterator[list[int]]:
    """Somebody puts as fast as it goes, never the same twice; yields how many so far."""
    done, end, failures = [0], threading.Event(), []
    block = np.zeros(block_bytes, np.uint8)

    def work() -> None:
        try:
            with cluster.client(namespace=namespace) as client:
                while not end.is_set():
                    keys = [f"flood-{done[0] + i}" for i in range(16)]
                    client.put_from_batch(keys, [block] * 16).raise_for_errors()
                    done[0] += 16
        except BaseException as error:  # shown when the flood ends
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_until(lambda: done[0] or failures, what="the flood to begin")
        yield done
    finally:
        end.set()
        thread.join(60)
    assert not failures, failures


@pytest.mark.parametrize("flooders_quota", [None, 24 * MIB])
def test_a_flood_leaves_others_alone(flooders_quota: int | None) -> None:
    with pool(2, dram_bytes=32 * MIB) as cluster, cluster.client(namespace="quiet") as client:
        values = fill(client, "q", 320)  # 20 of 64 MiB
        set_quota(cluster, "quiet", "--dram", "24MiB")
        with cluster.client(namespace="flood") as other:
            other.exists("x")
        if flooders_quota:
            set_quota(cluster, "flood", "--dram", flooders_quota)
        with flood(cluster, "flood") as done:
            wait_until(lambda: done[0] * SIZE > 160 * MIB, timeout_s=120, what="a flood")
            assert all(client.exists_batch(list(values)))
        assert client.get_batch(list(values)) == list(values.values())
        used = namespaces(cluster)["flood"]["used_bytes"]
        assert used > 24 * MIB, "room that nobody else wanted was not used"


def test_a_replay_hits_as_often_beside_a_flood() -> None:
    """Within its quota as without the flood; beyond it no less than with the quota's room alone."""
    block_bytes, blocks = 8 * KIB, 2_000
    replay = ["replay", SAMPLE, "--block-size", "8KiB"]
    some = [*replay, "--limit", 120]
    with pool(1, dram_bytes=64 * MIB) as cluster:
        alone = run(cluster, *some)
        (name,) = (each for each in namespaces(cluster) if each.startswith("replay-"))
        set_quota(cluster, name, "--dram", "32MiB")
        assert 8 * MIB < namespaces(cluster)[name]["used_bytes"] < 32 * MIB
        with flood(cluster, "flood", block_bytes) as done:
            wait_until(lambda: done[0] * block_bytes > 64 * MIB, timeout_s=120, what="a flood")
            beside = run(cluster, *some)
            before = done[0]
            set_quota(cluster, name, "--dram", blocks * block_bytes)
            beyond = run(cluster, *replay)
            assert (done[0] - before) * block_bytes > 64 * MIB
        for report in (alone, beside, beyond):
            assert (report["errors"], report["wrong_bytes"]) == (0, 0)
        assert alone["hit_rate_blocks"] > 0.02
        assert beside["hit_rate_blocks"] == pytest.approx(alone["hit_rate_blocks"], abs=POINT)
    words = ["simulate", SAMPLE, "--json", "--capacity", blocks, "--policy", "lru"]
    (expected,) = json.loads(run_cenote(*map(str, words), timeout_s=300).stdout)["results"]
    assert beyond["hit_rate_blocks"] > expected["hit_rate"] - POINT


@pytest.mark.parametrize("lost", [False, True])
def test_quotas_pins_and_times_to_live_outlive_the_master(lost: bool) -> None:
    """Where all metadata are lost, daemons know of quotas."""
    with pool(2) as cluster, cluster.client(namespace="mine") as client:
        fill(client, "k", 10)
        fill(client, "short", 4, ttl_s=6.0)
        set_quota(cluster, "mine", "--dram", "8MiB", "--objects", 1000, "--priority", "high")
        set_quota(cluster, "mine", "--ssd", "1GiB")
        assert client.pin(["k-0", "k-1"], ttl_s=300).all()
        assert client.pin(["k-2"]).all()
        before = namespaces(cluster)["mine"]
        assert before["pinned_objects"] == 3
        cluster.master.kill(signal.SIGKILL)
        if lost:
            shutil.rmtree(cluster.directory / "metadata")
        cluster.master.start()
        cluster.master.wait_ready()
        cluster.wait_alive(2)
        wait_until(lambda: "mine" in namespaces(cluster), what="the namespace")
        after = namespaces(cluster)["mine"]
        for name in ("dram_quota_bytes", "ssd_quota_bytes", "objects_quota", "priority"):
            assert after[name] == before[name] != 0
        if lost:
            return
        assert after["pinned_objects"] == 3
        listed = {each["key"]: each["left_s"] for each in run(cluster, "pins", "-n", "mine")}
        assert listed.keys() == {"k-0", "k-1", "k-2"}
        assert listed["k-2"] is None
        assert 200 < listed["k-0"] <= 300
        # Six seconds since they were put, not since the restart.
        wait_until(lambda: not client.exists("short-0"), timeout_s=9, what="the end of a time")
        assert client.exists("k-5")


def test_pins_of_the_command() -> None:
    with pool(1, dram_bytes=32 * MIB) as cluster, cluster.client(namespace="p") as client:
        fill(client, "k", 40)
        assert run(cluster, "pin", "-n", "p", "k-1", "k-2") == {"pinned": 2, "missing": []}
        assert run(cluster, "pin", "-n", "p", "--ttl", "0.5s", "k-3")["pinned"] == 1
        gone = run(cluster, "pin", "-n", "p", "k-1", "nobody", code=3)
        assert gone == {"pinned": 1, "missing": ["nobody"]}
        totals = run(cluster, "pins")
        assert totals["pinned_bytes_max"] == pytest.approx(8 * MIB, rel=0.1)
        assert [each["name"] for each in totals["namespaces"]] == ["p"]
        wait_until(lambda: run(cluster, "pins")["pinned_objects"] == 2, what="a pin to end")
        with flood(cluster, "flood") as done:
            wait_until(lambda: done[0] * SIZE > 64 * MIB, timeout_s=120, what="a flood")
        assert client.exists_batch([f"k-{i}" for i in range(40)]).tolist() == [
            i in (1, 2) for i in range(40)
        ]
        text = cluster.cli("pins", "-n", "p").stdout.decode()
        assert "k-1" in text
        assert "until unpinned" in text
        assert run(cluster, "unpin", "-n", "p", "k-1", "k-2")["unpinned"] == 2
        assert "nothing is pinned" in cluster.cli("pins").stderr.decode()
        more = list(fill(client, "more", 300))
        with pytest.raises(QuotaExceeded, match="pinned"):
            client.pin(more)


def test_quotas_of_the_command() -> None:
    with pool(1, dram_bytes=32 * MIB) as cluster, cluster.client(namespace="a") as client:
        client.put("k", b"v")
        assert cluster.cli("namespaces", "set-quota", "a").returncode == 2
        assert cluster.cli("namespaces", "set-quota", "nobody", "--objects", "1").returncode == 3
        for wrong in (("--dram", "much"), ("--objects", "-1"), ("--priority", "urgent")):
            assert cluster.cli("namespaces", "set-quota", "a", *wrong).returncode in (1, 2)
        told = cluster.cli("namespaces", "set-quota", "a", "--dram", "1GiB", "--priority", "low")
        assert "namespace a has 1 GiB in memory; priority low" in told.stderr.decode()
        assert "quotas promise 1 GiB of memory" in told.stderr.decode()
        assert "1 GiB in memory promised" in cluster.cli("status").stdout.decode()
        table = cluster.cli("namespaces", "--wide").stdout.decode()
        assert "1 GiB" in table
        assert "low" in table
        reset = set_quota(cluster, "a", "--dram", "none", "--priority", "normal")
        assert (reset["dram_quota_bytes"], reset["priority"]) == (0, "normal")


def test_what_is_promised_to_others_is_refused_with_the_reason() -> None:
    with pool(1, dram_bytes=16 * MIB) as cluster, cluster.client(namespace="all") as client:
        client.put("k", b"v")
        set_quota(cluster, "all", "--dram", "16MiB")
        for number in range(40):
            fill(client, f"a{number}", 8)
        with cluster.client(namespace="none") as other:
            other.put("small", b"v")  # what is kept free ahead of need is anybody's
            with pytest.raises(NoSpace, match="quotas keep for others"):
                fill(other, "b", 100)
