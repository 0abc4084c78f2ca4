"""A pool under load from four processes, seen from the test: start, let time pass, stop, judge."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from cluster import Cluster
from loads import Report, Sample, quantile_ms, summary
from network import Place
from payloads import payload_of
from remote import Remote
from waiting import wait_until

__all__ = [
    "DEADLINE_S",
    "TRANSPORTS",
    "Load",
    "check_back_to_normal",
    "pass_time",
    "pool",
    "reads",
    "shared_pool",
    "writes",
]

MIB = 1 << 20
BASE = {f"base{i}": 1 + i * 997 % 60_000 for i in range(300)}
TRANSPORTS = [("shm", "tcp"), ("shm", "tcp"), ("tcp",), ("tcp",)]
DEADLINE_S = 2.0
CALLS_MIN = 60


def pass_time(seconds: float) -> None:
    """Let the load go on for so long."""
    until_s = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= until_s, seconds + 1, what="time to pass")


@contextmanager
def shared_pool(
    metadata: str | Sequence[str],
    *,
    masters: int,
    stores: int,
    dram_bytes: int = 96 * MIB,
    places: Sequence[Place] = (),
    store_flags: Mapping[str, object] | None = None,
    **flags: object,
) -> Iterator[Cluster]:
    """As `pool`, with several masters over metadata that they share; `places`: see `Cluster`."""
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    with Cluster(
        stores=0,
        masters=masters,
        dram_bytes=dram_bytes,
        metadata=metadata,
        master_flags=named,
        places=places,
        store_flags=store_flags,
    ) as cluster:
        for i in range(stores):
            cluster.add_store(flags={"failure-domain": f"domain{i}"})
        cluster.wait_alive(stores)
        yield cluster


@contextmanager
def pool(stores: int, *, dram_bytes: int = 96 * MIB, **flags: object) -> Iterator[Cluster]:
    """Nodes s0, s1 ..., each in a failure domain of its own; `flags` are the master's."""
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    with Cluster(stores=0, dram_bytes=dram_bytes, master_flags=named) as cluster:
        for i in range(stores):
            cluster.add_store(flags={"failure-domain": f"domain{i}"})
        cluster.wait_alive(stores)
        yield cluster


class Load:
    """Four processes that read and write, two of them over shared memory."""

    def __init__(
        self,
        stack: ExitStack,
        cluster: Cluster,
        seed: int,
        *,
        replicas: int,
        min_replicas: int = 1,
        deadline_s: float = DEADLINE_S,
        durability: str = "default",
        **settings: bool,
    ) -> None:
        """`settings`: see `loads.steady`."""
        with cluster.client(replicas=replicas, min_replicas=replicas) as client:
            values = [payload_of(key, size) for key, size in BASE.items()]
            client.put_batch(list(BASE), values, deadline_s=30.0).raise_for_errors()
        self._workers = [
            stack.enter_context(
                Remote(
                    "steady",
                    cluster.lane,
                    (seed + i) % 1_000_000,
                    BASE,
                    {"transports": transports, "deadline_s": deadline_s},
                    {
                        "replicas": replicas,
                        "min_replicas": min_replicas,
                        "durability": durability,
                    },
                    settings,
                )
            )
            for i, transports in enumerate(TRANSPORTS)
        ]
        for worker in self._workers:
            worker.expect("ready")
        self.reports: list[Report] = []

    def calls(self) -> int:
        """How many there were."""
        for worker in self._workers:
            worker.say("calls")
        return sum(worker.hear() for worker in self._workers)

    def pass_time(self, seconds: float) -> None:
        """Let it go on for so long, and longer where the machine lets few calls be made."""
        before = self.calls()
        pass_time(seconds)
        wait_until(lambda: self.calls() > before + CALLS_MIN, what="some calls")

    def stop(self) -> None:
        """End it; its reports are there then."""
        for worker in self._workers:
            worker.say("stop")
        self.reports = [worker.hear() for worker in self._workers]
        for text in self.failures()[:10]:
            print(text)

    def failures(self) -> list[str]:
        """Calls that failed, keys that were missed though they must not be, wrong bytes."""
        return [text for report in self.reports for text in report.failures]

    def samples(self, from_s: float, to_s: float) -> list[Sample]:
        """Of calls that ended in that time."""
        return [s for report in self.reports for s in report.samples if from_s <= s[0] < to_s]

    def stored(self) -> Mapping[str, int]:
        """Sizes of everything that was acknowledged and not removed."""
        return BASE | {k: size for report in self.reports for k, size in report.stored.items()}

    def removed(self) -> list[str]:
        return [key for report in self.reports for key in report.removed]


def writes(samples: list[Sample]) -> list[Sample]:
    return [s for s in samples if s[2].startswith("put")]


def reads(samples: list[Sample]) -> list[Sample]:
    return [s for s in samples if s[2].startswith("get")]


def check_back_to_normal(
    load: Load, began_s: float, fault_s: float, end_s: float, within_s: float = 1.0
) -> None:
    """So long after the fault latencies are what they were before it."""
    before = load.samples(began_s, fault_s)
    during = load.samples(fault_s, fault_s + within_s)
    after = load.samples(fault_s + within_s, end_s)
    for name, samples in (("before", before), ("just after", during), ("later", after)):
        print(f"{name}: {summary(samples)}; reads: {summary(reads(samples))}")
    assert len(before) > 50
    assert len(after) > 50
    normal_ms = quantile_ms(before, 0.99)
    assert quantile_ms(after, 0.99) < max(5 * normal_ms, 100)
