"""Every call ends by its deadline, whoever does not answer, and works again when they do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import BufferInUse, CenoteError, DeadlineExceeded, Unavailable
from cenote.client import Client
from cluster import Cluster
from payloads import payload_of
from promptness import ends_within
from waiting import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
LARGE = 4 * MIB
KEYS = [f"k{i}" for i in range(8)]


@pytest.fixture(params=["shm", "tcp"])
def transports(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return (request.param,)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # Nobody is declared dead for being away for some seconds: the calls alone have to notice.
    flags = {
        "node-dead-s": 30,
        "session-ttl-s": 30,
        "lease-ttl-max-s": 30,
        "pinned-share-max": 1,
    }
    with Cluster(stores=1, dram_bytes=96 * MIB, master_flags=flags) as made:
        yield made


@pytest.fixture
def client(cluster: Cluster, transports: tuple[str, ...]) -> Iterator[Client]:
    with cluster.client(transports=transports, location_cache_entries=0) as made:
        made.put_batch(KEYS, [payload_of(k, LARGE) for k in KEYS]).raise_for_errors()
        made.put("small", b"s" * 100)
        yield made


def outcome(call: Callable[[float], object], deadline_s: float) -> object:
    """What it gave, or raised."""
    try:
        return call(deadline_s)
    except CenoteError as error:
        return error


def check_ends(name: str, call: Callable[[float], object], deadline_s: float) -> object:
    """It ends by its deadline; what came of it."""
    with ends_within(deadline_s, name):
        return outcome(call, deadline_s)


Calls = dict[str, Callable[[float], Any]]


def master_calls(client: Client) -> Calls:
    block = np.zeros((len(KEYS), LARGE), np.uint8)
    return {
        "get": lambda s: client.get("small", deadline_s=s),
        "get_batch": lambda s: client.get_batch(KEYS, deadline_s=s),
        "get_into": lambda s: client.get_into(KEYS[0], block[0], deadline_s=s),
        "get_into_batch": lambda s: client.get_into_batch(KEYS, block, deadline_s=s),
        "put": lambda s: client.put("new", b"x", deadline_s=s),
        "put_batch": lambda s: client.put_batch(["n0", "n1"], [b"x", b"y"], deadline_s=s),
        "exists": lambda s: client.exists("small", deadline_s=s),
        "exists_batch": lambda s: client.exists_batch(KEYS * 1000, deadline_s=s),
        "match": lambda s: client.match(KEYS, deadline_s=s),
        "acquire": lambda s: client.acquire(KEYS, 1.0, deadline_s=s),
        "pin": lambda s: client.pin(KEYS, deadline_s=s),
        "unpin": lambda s: client.unpin(KEYS, deadline_s=s),
        "remove": lambda s: client.remove("nobody's", deadline_s=s),
        "namespace": lambda s: client.namespace("another", deadline_s=s),
        "view": lambda s: client.view(KEYS, deadline_s=s).__enter__(),
    }


def test_a_master_that_does_not_answer(cluster: Cluster, client: Client) -> None:
    calls = master_calls(client)
    cluster.master.pause()
    for name, call in calls.items():
        came = check_ends(name, call, 0.2)
        assert isinstance(came, DeadlineExceeded | Unavailable), f"{name}: {came!r}"
    cluster.master.resume()
    for name, call in calls.items():
        if name != "view":
            assert not isinstance(call(10.0), CenoteError), name
    assert client.get_batch(KEYS) == [payload_of(k, LARGE) for k in KEYS]


def data_calls(client: Client) -> Calls:
    block = np.zeros((len(KEYS), LARGE), np.uint8)
    number = iter(range(1000))
    return {
        "get": lambda s: client.get("small", deadline_s=s),
        "get_into": lambda s: client.get_into(KEYS[0], block[0], deadline_s=s),
        "get_into_batch": lambda s: client.get_into_batch(KEYS, block, deadline_s=s),
        "put": lambda s: client.put(f"new{next(number)}", b"x", deadline_s=s),
        "put_from_batch": lambda s: client.put_from_batch(
            [f"b{next(number)}", f"b{next(number)}"], list(block[:2]), deadline_s=s
        ),
    }


def test_a_store_daemon_that_does_not_answer(
    cluster: Cluster, client: Client, transports: tuple[str, ...]
) -> None:
    """Reads are misses or errors then (over shared memory they need no daemon); no put is said to
    be stored, since that takes the daemon's seal."""
    store = cluster.stores[0]
    calls = data_calls(client)
    store.pause()
    for name, call in calls.items():
        came = check_ends(name, call, 0.3)
        if name.startswith("put"):
            assert all_failed(came), f"{name}: {came!r}"
        elif isinstance(came, CenoteError):
            assert isinstance(came, DeadlineExceeded | Unavailable | BufferInUse), f"{name}: {came}"
    store.resume()
    wait_until(lambda: client.get("small") == b"s" * 100, what="the daemon to be used again")
    assert client.get_batch(KEYS, deadline_s=10.0) == [payload_of(k, LARGE) for k in KEYS]

    def puts_again() -> bool:
        try:
            return client.put(f"again{time.monotonic()}", b"x").stored
        except CenoteError:
            return False

    wait_until(puts_again, what="puts to work again")


def all_failed(came: Any) -> bool:
    if isinstance(came, CenoteError):
        return True
    return hasattr(came, "failed_count") and came.failed_count == len(came)


def test_a_daemon_that_stops_in_the_middle_of_a_transfer(cluster: Cluster) -> None:
    """When the call has returned, nothing writes into its buffer any more."""
    block = np.zeros((len(KEYS), LARGE), np.uint8)
    with cluster.client(transports=("tcp",), location_cache_entries=0) as client:
        client.put_batch(KEYS, [payload_of(k, LARGE) for k in KEYS]).raise_for_errors()
        store = cluster.stores[0]

        def pause_halfway() -> None:
            wait_until(lambda: bool(block[0, :8].any()), what="the first bytes")
            store.pause()

        halfway = threading.Thread(target=pause_halfway)
        halfway.start()
        with ends_within(6.0):  # several calls, and one that waits
            outcome(
                lambda s: [client.get_into_batch(KEYS, block, deadline_s=s) for _ in range(50)], 3.0
            )
        halfway.join()
        before = block.copy()
        store.resume()
        wait_until(lambda: client.get("nobody's") is None, what="the daemon to go on")
        assert (block == before).all(), "a late answer was written into the buffer"
        wait_until(
            lambda: client.get_into_batch(KEYS, block, deadline_s=10.0).hit_count == len(KEYS),
            15.0,
            what="the daemon to be used again",
        )
        assert [bytes(row) for row in block] == [payload_of(k, LARGE) for k in KEYS]


def test_opening_and_closing_beside_those_that_do_not_answer(
    cluster: Cluster, client: Client
) -> None:
    for process in cluster.processes:
        process.pause()
    came = check_ends("opening", lambda s: cluster.client(deadline_s=s), 0.3)
    assert isinstance(came, DeadlineExceeded | Unavailable)
    with ends_within(2.0, "close"):
        client.close()
    left = [t.name for t in threading.enumerate() if t.name.startswith("cenote")]
    assert left == []
    for process in cluster.processes:
        process.resume()


def test_many_threads_and_a_master_that_does_not_answer(cluster: Cluster, client: Client) -> None:
    """One's wait is not added to another's."""
    cluster.master.pause()
    came: list[object] = []

    def call() -> None:
        came.append(outcome(lambda s: client.get_batch(KEYS, deadline_s=s), 0.4))

    threads = [threading.Thread(target=call) for _ in range(12)]
    with ends_within(0.4, "the last of them"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)
    cluster.master.resume()
    assert [type(each) for each in came if isinstance(each, CenoteError)] == [DeadlineExceeded] * 12
