"""Another master takes over under load, again and again: how that is judged.

With CENOTE_TEST_FULL=1 each kind of fault is repeated 20 times.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from itertools import zip_longest

from cenote.client import Client
from cluster import Cluster
from loads import Sample
from payloads import payload_of
from waiting import wait_until
from workers import Load, reads, writes

__all__ = ["DEADLINE_S", "ROUNDS", "check_all", "report", "settle"]

ROUNDS = 20 if os.environ.get("CENOTE_TEST_FULL") else 2
DEADLINE_S = 8.0
MEDIAN_S, WORST_S = 3.0, 4.0
SLACK_OF_FEW = 1.5
"""Few rounds on a busy machine tell little of a median."""
FEW = 10


def first_after(samples: list[Sample], fault_s: float) -> float:
    """Seconds from the fault to the end of the first call that began after it."""
    ends = [end_s for end_s, took_s, _ in samples if end_s - took_s >= fault_s]
    assert ends, "no call has ended since the fault"
    return min(ends) - fault_s


def settle(cluster: Cluster, count: int) -> None:
    """All masters are there, one of them alone takes itself for the leader, all nodes are attached.

    An old leader that etcd does not reach answers lookups from what it knew.
    """
    wait_until(
        lambda: (
            sorted(map(cluster.role_of, cluster.masters))
            == ["leader", *["standby"] * (len(cluster.masters) - 1)]
        ),
        20.0,
        what="all masters to answer, and one to lead",
    )
    cluster.wait_alive(count, 20.0)


def check_all(cluster: Cluster, load: Load) -> None:
    stored, removed = load.stored(), load.removed()
    keys = list(stored)
    for transports in (("shm", "tcp"), ("tcp",)):
        with cluster.client(transports=transports, deadline_s=20.0) as client:
            check_stored(client, keys, stored)
            back = client.exists_batch(removed)
            assert not back.any(), f"{int(back.sum())} of {len(removed)} removed keys are back"
    print(f"{len(keys)} acknowledged, {len(removed)} removed")


def check_stored(client: Client, keys: list[str], stored: object) -> None:
    sizes = dict(stored)  # type: ignore[call-overload]
    for first in range(0, len(keys), 256):
        some = keys[first : first + 256]
        values = client.get_batch(some)
        lost = [key for key, value in zip(some, values, strict=True) if value is None]
        assert not lost, f"{len(lost)} acknowledged objects are lost, {lost[0]} first"
        assert values == [payload_of(key, sizes[key]) for key in some]


def report(
    load: Load, faults: Sequence[float], end_s: float, taken_over: Sequence[float] = ()
) -> None:
    """Print the times, and hold them to what was promised.

    `taken_over`: when the new leader was seen to lead, after each fault, where the old one may
    have served for a while after it. All on the monotonic clock.
    """
    times: dict[str, list[float]] = {}
    untils = [*faults[1:], end_s]
    for fault_s, until_s, new_s in zip_longest(faults, untils, taken_over):
        for name, seconds in _times(load, fault_s, until_s, new_s).items():
            times.setdefault(name, []).append(seconds)
    for name, some in times.items():
        print(f"{name}: median {statistics.median(some):.2f} s, worst {max(some):.2f} s", end="")
        print(f" of {len(some)}")
    misses = sum(len(one.misses) for one in load.reports)
    print(f"misses until the daemons had attached: {misses}")
    slack = SLACK_OF_FEW if len(faults) < FEW else 1.0
    for name, some in times.items():
        assert statistics.median(some) < MEDIAN_S * slack, f"{name}, median of {some}"
        assert max(some) < WORST_S * slack, f"{name}, worst of {some}"


def _times(load: Load, fault_s: float, until_s: float, new_s: float | None) -> dict[str, float]:
    """What one fault cost, in seconds."""
    samples = load.samples(fault_s, until_s)
    by_client = [
        [s for s in writes(one.samples) if fault_s <= s[0] < until_s] for one in load.reports
    ]
    times = {
        "first get": first_after(reads(samples), fault_s),
        "first put": first_after(writes(samples), fault_s),
        "first put by all four": max(first_after(some, fault_s) for some in by_client),
        "slowest get": max(took_s for _, took_s, _ in reads(samples)),
        "slowest put": max(took_s for _, took_s, _ in writes(samples)),
    }
    if new_s is not None:
        # The old leader acknowledges nothing from then on.
        ends = [[end_s for end_s, _, _ in some if end_s >= new_s] for some in by_client]
        assert all(ends), "a client has not written to the new leader"
        times["first put at the new leader"] = min(map(min, ends)) - fault_s
        times["first put at the new leader by all four"] = max(map(min, ends)) - fault_s
    return times
