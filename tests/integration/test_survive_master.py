"""The master is killed and restarted under load: nothing acknowledged is lost, nothing returns."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

import pytest

from cenote.client import Client
from cluster import Cluster
from loads import summary
from payloads import payload_of
from waiting import wait_until
from workers import Load, pass_time, pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
KIB, MIB = 1 << 10, 1 << 20


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_view_outlives_the_master_that_gave_its_hold(number: signal.Signals) -> None:
    """Its claim keeps what is seen where it is, though it is removed, and the pool overwritten."""
    size, count = 64 * KIB, 16
    limits = {"lease-ttl-s": 0.2, "lease-ttl-max-s": 0.2}
    keys = [f"viewed{i}" for i in range(count)]
    with (
        Cluster(stores=1, dram_bytes=8 * MIB, master_flags=limits) as cluster,
        cluster.client(transports=("shm",)) as client,
        cluster.client(transports=("shm",)) as other,
    ):
        client.put_batch(keys, [payload_of(key, size) for key in keys]).raise_for_errors()
        with client.view(keys, copy=False) as views:
            cluster.master.restart(number)
            cluster.wait_alive(1)
            assert other.remove_batch(keys[: count // 2]).all()
            for number_of in range(0, 512, 16):
                others = [f"other{number_of + i}" for i in range(16)]
                other.put_batch(others, [bytes([7]) * size] * 16, deadline_s=20).raise_for_errors()
            for key, seen in zip(keys, views, strict=True):
                assert seen is not None
                assert bytes(seen) == payload_of(key, size), key
            del seen
        # Its space comes back once nobody looks any more.
        everything = 8 * MIB * 3 // 4 // size
        wait_until(lambda: used_again(other, everything, size), what="all of the space")


def used_again(client: Client, count: int, size: int) -> bool:
    """Whether so many objects are in the pool at a time."""
    keys = [f"again{i}" for i in range(count)]
    client.put_batch(keys, [bytes(size)] * count, deadline_s=20)
    return bool(client.exists_batch(keys).all())
