"""Small puts in a real pool: most of them ask the master once, and nothing stays granted."""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from admin import Admin, admin_of
from cenote.client import Client
from cluster import Cluster
from payloads import payload_of
from remote import Remote
from waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

MIB = 1 << 20
SIZE = 4000
THREADS = PROCESSES = 3
PUTS = 334
"""Of each of them: 2004 in all."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = {
        "metrics-listen": "127.0.0.1:0",
        "session-ttl-s": 2,
        "lease-ttl-s": 0.5,
        "lease-ttl-max-s": 1,
    }
    with Cluster(stores=2, dram_bytes=64 * MIB, master_flags=flags) as made:
        made.wait_alive(2)
        yield made


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[Admin]:
    with admin_of(cluster) as made:
        yield made


def calls(cluster: Cluster, method: str) -> int:
    """Of the master since its start."""
    text = urllib.request.urlopen(cluster.master.ready["metrics"], timeout=5).read().decode()
    name = f'cenote_master_calls_total{{method="{method}"}} '
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return int(float(line.removeprefix(name)))


def wait_for_nothing_granted(admin: Admin, timeout_s: float = 20.0) -> None:
    """And that what is used is what objects use: no extent is lost."""

    def at_rest() -> bool:
        status = admin.status()
        return not (status.grants or status.granted_bytes or status.quarantined_bytes)

    wait_until(at_rest, timeout_s, what="nothing to be granted")
    used = sum(node.used_bytes for node in admin.nodes().values())
    assert used == admin.status().used_bytes


def put_all(client: Client, prefix: str, failed: list[str]) -> None:
    for i in range(PUTS):
        key = f"{prefix}{i}"
        if not client.put(key, payload_of(key, SIZE)).stored:
            failed.append(key)


@pytest.mark.parametrize("transports", [("shm",), ("tcp",)], ids=["shm", "tcp"])
def test_most_small_puts_start_nothing(
    cluster: Cluster, admin: Admin, transports: tuple[str, ...]
) -> None:
    name = transports[0]
    options = {"transports": transports, "deadline_s": 20.0}
    starts, commits = calls(cluster, "put_start"), calls(cluster, "put_commit")
    with ExitStack() as stack:
        programs = [
            stack.enter_context(
                Remote("put_small", cluster.lane, f"{name}-p{i}-", PUTS, SIZE, options)
            )
            for i in range(PROCESSES)
        ]
        client = stack.enter_context(cluster.client(**options))
        for program in programs:
            program.expect("ready")
        failed: list[str] = []
        threads = [
            threading.Thread(target=put_all, args=(client, f"{name}-t{i}-", failed))
            for i in range(THREADS)
        ]
        for program in programs:
            program.say("go")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for program in programs:
            program.expect([])
        assert failed == []
        puts = (THREADS + PROCESSES) * PUTS
        starts = calls(cluster, "put_start") - starts
        print(f"{puts} puts, {starts} of them began with a PutStart")
        assert calls(cluster, "put_commit") - commits == puts
        assert starts < puts // 5
        wait_for_nothing_granted(admin)  # all of them are alive, and idle
        for kind, count in (("p", PROCESSES), ("t", THREADS)):
            for i in range(count):
                keys = [f"{name}-{kind}{i}-{j}" for j in range(PUTS)]
                assert client.get_batch(keys) == [payload_of(key, SIZE) for key in keys]
        for program in programs:
            program.say("end")


@pytest.mark.parametrize("transports", [("shm",), ("tcp",)], ids=["shm", "tcp"])
def test_the_spares_of_a_client_that_was_killed_come_back(
    cluster: Cluster, admin: Admin, transports: tuple[str, ...]
) -> None:
    """Not at once: it may still be writing, as far as the master knows; but when its session has
    run out and the daemon has cut it off."""
    name = transports[0]
    wait_for_nothing_granted(admin)
    for life in range(5):  # on a busy machine it may be idle for a second before it is killed
        prefix = f"{name}-{life}-"
        with Remote(
            "put_small", cluster.lane, prefix, 200, SIZE, {"transports": transports}
        ) as program:
            program.expect("ready")
            program.say("go")
            program.expect([])
            program.signalled(signal.SIGKILL)
        if admin.status().granted_bytes > 10 * SIZE:
            break
    else:
        pytest.fail("it had no spares when it was killed")
    with cluster.client(transports=transports) as client:
        keys = [f"{prefix}{i}" for i in range(200)]
        assert client.get_batch(keys) == [payload_of(key, SIZE) for key in keys]
        assert client.put(f"{prefix}after", b"x").stored
    wait_for_nothing_granted(admin)


def test_those_of_a_stopped_client_wait_for_it(cluster: Cluster, admin: Admin) -> None:
    """No time gives them to others; when it goes on it is told, and puts as before."""
    run = os.urandom(3).hex()  # the pool may have what an earlier try of this test put
    wait_for_nothing_granted(admin)
    options = {"transports": ("shm",), "deadline_s": 20.0}
    with Remote("peer", cluster.lane, options) as peer:
        peer.expect("ready")

        def put(first: int, count: int) -> None:
            for i in range(first, first + count):
                key = f"stopped-{run}-{i}"
                peer.say(("put", (key, payload_of(key, SIZE)), {}))
                done, result = peer.hear()
                assert done, result
                assert result.stored

        put(0, 100)
        assert admin.status().grants
        peer.process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: admin.status().quarantined_bytes, what="its session to end")
            held = admin.status().quarantined_bytes
            assert held > 10 * SIZE
            with cluster.client() as other:
                for i in range(200):
                    assert other.put(
                        f"other-{run}-{i}", payload_of(f"other-{run}-{i}", SIZE)
                    ).stored
            assert admin.status().quarantined_bytes == held
        finally:
            peer.process.send_signal(signal.SIGCONT)
        put(100, 100)
        wait_for_nothing_granted(admin)
        with cluster.client() as reader:
            for prefix in ("stopped", "other"):
                keys = [f"{prefix}-{run}-{i}" for i in range(200)]
                assert reader.get_batch(keys) == [payload_of(key, SIZE) for key in keys]
        peer.say(None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_master_knows_nothing_of_them(cluster: Cluster, number: signal.Signals) -> None:
    """Puts go on, in space that the new one gives; nobody writes where he did before."""
    with (
        cluster.client(deadline_s=20.0) as client,
        cluster.client(deadline_s=20.0) as other,
    ):
        values: dict[str, bytes] = {}

        def put(by: Client, prefix: str, count: int) -> None:
            for i in range(count):
                key = f"{prefix}-{number.name}-{i}"
                values[key] = payload_of(key, SIZE)
                assert by.put(key, values[key]).stored

        put(client, "before", 100)
        assert client._space.spares.held
        cluster.master.restart(number)
        put(other, "between", 100)
        put(client, "after", 100)
        with cluster.client() as reader:
            assert reader.get_batch(list(values)) == list(values.values())
        with admin_of(cluster) as admin:
            wait_for_nothing_granted(admin)
