"""A node dies, or stands still, under reads and writes from four processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from admin import Admin, admin_of
from cluster import Cluster
from loads import Report, Sample, quantile_ms, summary
from payloads import payload_of
from remote import Remote
from waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

MIB = 1 << 20
BASE = {f"base{i}": 1 + i * 997 % 60_000 for i in range(300)}
TRANSPORTS = [("shm", "tcp"), ("shm", "tcp"), ("tcp",), ("tcp",)]
BEFORE_S = 1.5
DEADLINE_S = 2.0
# What a busy machine adds to what is promised.
SLACK_S = 0.5


def pass_time(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= until_s, seconds + 1, what="time to pass")


@contextmanager
def pool(stores: int, **flags: object) -> Iterator[Cluster]:
    with Cluster(stores=0, dram_bytes=96 * MIB, master_flags=flags) as cluster:
        for i in range(stores):
            cluster.add_store(flags={"failure-domain": f"domain{i}"})
        cluster.wait_alive(stores)
        yield cluster


class Load:
    """Four processes that read and write."""

    def __init__(
        self,
        stack: ExitStack,
        cluster: Cluster,
        seed: int,
        replicas: int,
        misses_are_legal: bool = False,
    ) -> None:
        with cluster.client(replicas=replicas, min_replicas=replicas) as client:
            values = [payload_of(key, size) for key, size in BASE.items()]
            client.put_batch(list(BASE), values).raise_for_errors()
        put_options = {"replicas": replicas}
        self._workers = [
            stack.enter_context(
                Remote(
                    "steady",
                    cluster.lane,
                    (seed + i) % 1_000_000,
                    BASE,
                    {"transports": transports, "deadline_s": DEADLINE_S},
                    put_options,
                    {"misses_are_legal": misses_are_legal},
                )
            )
            for i, transports in enumerate(TRANSPORTS)
        ]
        for worker in self._workers:
            worker.expect("ready")
        self.reports: list[Report] = []

    def stop(self) -> None:
        for worker in self._workers:
            worker.say("stop")
        self.reports = [worker.hear() for worker in self._workers]

    def failures(self) -> list[str]:
        return [text for report in self.reports for text in report.failures]

    def samples(self, from_s: float, to_s: float) -> list[Sample]:
        """Of calls that ended in that time."""
        return [s for report in self.reports for s in report.samples if from_s <= s[0] < to_s]


def traffic(admin: Admin, name: str) -> int:
    node = admin.nodes()[name]
    return node.read_bytes + node.written_bytes


def reads(samples: list[Sample]) -> list[Sample]:
    return [s for s in samples if s[2].startswith("get")]


def check_back_to_normal(load: Load, began_s: float, fault_s: float, end_s: float) -> None:
    """Latencies a second after the fault are what they were before it."""
    before = load.samples(began_s, fault_s)
    during = load.samples(fault_s, fault_s + 1)
    after = load.samples(fault_s + 1, end_s)
    for name, samples in (("before", before), ("first second", during), ("after", after)):
        print(f"{name}: {summary(samples)}; reads: {summary(reads(samples))}")
    assert len(before) > 100
    assert len(after) > 100
    normal_ms = quantile_ms(before, 0.99)
    assert quantile_ms(after, 0.99) < max(5 * normal_ms, 100)


@pytest.mark.parametrize("stores", [2, 3])
def test_a_killed_node_fails_nothing(seed: int, stores: int) -> None:
    """Two replicas: no read and no put fails, no byte is wrong."""
    with pool(stores) as cluster, ExitStack() as stack:
        load = Load(stack, cluster, seed, replicas=2)
        began_s = time.monotonic()
        pass_time(BEFORE_S)
        cluster.stores[1].kill()
        fault_s = time.monotonic()
        pass_time(3.0)
        end_s = time.monotonic()
        load.stop()
        assert load.failures() == []
        check_back_to_normal(load, began_s, fault_s, end_s)


def test_a_stopped_node_slows_one_read_of_each_client(seed: int) -> None:
    """By half its deadline at most; then the node is avoided until it answers again."""
    with pool(3) as cluster, ExitStack() as stack:
        load = Load(stack, cluster, seed, replicas=2)
        began_s = time.monotonic()
        pass_time(BEFORE_S)
        cluster.stores[1].pause()
        fault_s = time.monotonic()
        pass_time(4.0)
        cluster.stores[1].resume()
        resumed_s = time.monotonic()
        cluster.wait_alive(3)
        with admin_of(cluster) as admin:
            used = traffic(admin, "s1")
            wait_until(lambda: traffic(admin, "s1") > used, what="the node to be used again")
        end_s = time.monotonic()
        load.stop()
        assert load.failures() == []
        check_back_to_normal(load, began_s, fault_s, resumed_s)
        print("after it went on:", summary(load.samples(resumed_s, end_s)))
        for report in load.reports:
            slow = [s for s in reads(report.samples) if fault_s <= s[0] and s[1] > 0.1 * DEADLINE_S]
            print("slow reads:", [(round(s[0] - fault_s, 2), round(s[1], 3)) for s in slow])
            assert len(slow) <= 1
            assert all(s[1] <= DEADLINE_S / 2 + SLACK_S for s in slow)
