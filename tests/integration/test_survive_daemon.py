"""A store daemon is restarted under load: what it held is served again; what is damaged is not."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

import pytest

from cenote.client import Client
from payloads import payload_of
from workers import Load, pass_time, pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SHORT_LEASES = {"lease_ttl_s": 0.5, "lease_ttl_max_s": 1}


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
        sessions = None
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
        del sessions
        for transports in (("shm",), ("tcp",)):
            with cluster.client(transports=transports) as client:
                check_all(client, dict(load.stored()))
