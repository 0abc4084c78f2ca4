"""The master is killed and restarted under load: nothing acknowledged is lost, nothing returns."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

import pytest

from cenote.client import Client
from loads import summary
from payloads import payload_of
from workers import Load, pass_time, pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def check_all(client: Client, load: Load) -> None:
    """What was acknowledged is there, with its bytes; what was removed is not."""
    stored = load.stored()
    keys = list(stored)
    for first in range(0, len(keys), 256):
        some = keys[first : first + 256]
        values = client.get_batch(some, deadline_s=20.0)
        lost = [key for key, value in zip(some, values, strict=True) if value is None]
        assert not lost, f"{len(lost)} acknowledged objects are lost, {lost[0]} first"
        assert values == [payload_of(key, stored[key]) for key in some]
    removed = load.removed()
    assert removed
    back = client.exists_batch(removed)
    assert not back.any(), f"{int(back.sum())} of {len(removed)} removed keys are back"
    print(f"{len(keys)} acknowledged, {len(removed)} removed")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_calls_that_span_a_restart_of_the_master_succeed(seed: int, number: signal.Signals) -> None:
    with pool(2) as cluster, ExitStack() as stack:
        load = Load(stack, cluster, seed, replicas=1, deadline_s=5.0)
        began_s = time.monotonic()
        pass_time(1.0)
        for _ in range(2):
            fault_s = time.monotonic()
            cluster.master.restart(number)
            print(f"ready again after {time.monotonic() - fault_s:.2f} s")
            cluster.wait_alive(2)
            print(f"all attached after {time.monotonic() - fault_s:.2f} s")
            pass_time(1.5)
        end_s = time.monotonic()
        load.stop()
        assert load.failures() == []
        print("before:", summary(load.samples(began_s, fault_s)))
        print("after:", summary(load.samples(fault_s, end_s)))
        with cluster.client() as client:
            check_all(client, load)
        with cluster.client(transports=("tcp",)) as client:
            check_all(client, load)
