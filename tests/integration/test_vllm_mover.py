"""The process that moves a vLLM worker's bytes: over a real pool, and when it or the pool dies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cenote.api.errors import DeadlineExceeded, Unavailable
from cenote.connectors.vllm.mover import Mover
from cenote.connectors.vllm.moves import Batch, Lane, NowaitLane
from cenote.connectors.vllm.options import make_options
from cenote.connectors.vllm.orders import SpaceName
from cluster import Cluster
from mover_calls import get, put
from promptness import ends_within
from waiting import wait_until

SPACE = SpaceName("mover", b"mover")
BLOCK = 64 << 10
COUNT = 8
KEYS = [b"%032d" % i for i in range(COUNT)]
LENGTHS = np.full(COUNT, BLOCK, np.uint64)
FIRST = np.arange(COUNT, dtype=np.uint64) * np.uint64(BLOCK)
SECOND = FIRST + np.uint64(COUNT * BLOCK)


def made(master: str, transport: str = "shm") -> Mover:
    options = make_options({"master": master, "transports": [transport]})
    mover = Mover(options, "mover-test", 2 * COUNT * BLOCK)
    mover.start()
    return mover


@pytest.fixture(params=["shm", "tcp"])
def mover(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Mover]:
    mover = made(cluster.lane, request.param)
    wait_until(lambda: meets_pool(mover), 20, what="the pool to be met")
    yield mover
    mover.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(stores=1, dram_bytes=32 << 20) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def empty(cluster: Cluster) -> None:
    """What an earlier test saved is not there any more."""
    with cluster.client() as client:
        client.namespace(SPACE.name, fingerprint=SPACE.fingerprint).remove_batch(KEYS)


def fill(mover: Mover) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    data = np.random.default_rng(1).integers(0, 256, COUNT * BLOCK, np.uint8)
    mover.array[: len(data)] = data
    mover.array[len(data) :] = 0
    return data


def meets_pool(mover: Mover) -> bool:
    """Whether it may be asked for something."""
    try:
        return not get(mover, SPACE, [b"unknown"], SECOND[:1], LENGTHS[:1], 5.0).done.any()
    except Unavailable:
        return False


def reached(mover: Mover) -> bool:
    """Whether a put succeeds: the pool is there."""
    try:
        return bool(put(mover, SPACE, KEYS, FIRST, LENGTHS, 5.0).done.all())
    except Unavailable:
        return False


def test_blocks_go_to_the_pool_and_come_back(mover: Mover) -> None:
    data = fill(mover)
    saved = put(mover, SPACE, KEYS, FIRST, LENGTHS, 20.0, chain=True)
    assert saved.stored.all()
    again = put(mover, SPACE, KEYS, FIRST, LENGTHS, 20.0)
    assert (again.existed_count, again.failed_count) == (COUNT, 0)
    assert again.done.all()
    assert not again.stored.any()
    got = get(mover, SPACE, [*KEYS[:-1], b"unknown"], SECOND, LENGTHS, 20.0)
    assert got.done.tolist() == [True] * (COUNT - 1) + [False]
    there = mover.array[len(data) : 2 * len(data) - BLOCK]
    assert there.tobytes() == data[:-BLOCK].tobytes()


def test_what_is_asked_before_a_pool_was_reached_waits_for_it(cluster: Cluster) -> None:
    mover = made(cluster.lane)
    try:
        data = fill(mover)
        assert put(mover, SPACE, KEYS, FIRST, LENGTHS, 20.0).stored.all()
        assert get(mover, SPACE, KEYS, SECOND, LENGTHS, 20.0).done.all()
        assert mover.array[len(data) :].tobytes() == data.tobytes()
    finally:
        mover.close()


def test_what_is_asked_before_a_pool_was_reached_waits_no_longer_than_its_deadline() -> None:
    with Cluster(stores=1, dram_bytes=32 << 20) as cluster:
        cluster.master.pause()  # it takes the connection, and says nothing
        mover = made(cluster.lane)
        try:
            with pytest.raises(DeadlineExceeded, match="no pool"):
                get(mover, SPACE, KEYS, SECOND, LENGTHS, 0.2)
            cluster.master.resume()
        finally:
            mover.close()


def test_one_that_died_is_replaced_and_its_batch_fails(mover: Mover) -> None:
    fill(mover)
    wait_until(lambda: reached(mover), 20, what="the pool to be reached")
    pid = mover.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable):
        get(mover, SPACE, KEYS, SECOND, LENGTHS, 5.0)
    wait_until(lambda: reached(mover), 30, what="another process to reach the pool")
    assert mover.pid != pid


def test_one_that_is_stopped_is_ended_so_that_nothing_is_written_late(mover: Mover) -> None:
    fill(mover)
    wait_until(lambda: reached(mover), 20, what="the pool to be reached")
    pid = mover.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded):
        get(mover, SPACE, KEYS, SECOND, LENGTHS, 0.1)
    assert not Path(f"/proc/{pid}").exists() or mover.pid != pid
    wait_until(lambda: reached(mover), 30, what="another process to reach the pool")


def test_without_a_pool_it_says_so_and_finds_it_later() -> None:
    with Cluster(stores=1, dram_bytes=32 << 20) as cluster:
        cluster.master.kill()
        mover = made(cluster.lane)
        try:
            with pytest.raises(Unavailable):
                put(mover, SPACE, KEYS, FIRST, LENGTHS, 20.0)
            cluster.master.restart()
            cluster.wait_alive(1)
            wait_until(lambda: reached(mover), 30, what="the pool to be reached")
        finally:
            mover.close()


def test_an_owner_that_is_killed_ends_the_wait_for_its_bytes_at_once() -> None:
    """It hangs first, so that the read is under way for sure: only its end can tell."""
    with Cluster(stores=1, dram_bytes=32 << 20) as cluster:
        mover = made(cluster.lane, "tcp")
        try:
            fill(mover)
            wait_until(lambda: reached(mover), 20, what="the pool to be reached")
            (store,) = cluster.stores
            store.pause()
            killer = threading.Timer(0.2, store.kill)
            killer.start()
            began_s = time.monotonic()
            got = get(mover, SPACE, KEYS, SECOND, LENGTHS, 60.0)
            took_s = time.monotonic() - began_s
            killer.join()
            assert not got.done.any(), "misses, and no error"
            assert took_s < 30, "nothing like the deadline"
        finally:
            mover.close()


def test_an_owner_that_hangs_costs_no_more_than_the_deadline() -> None:
    with Cluster(stores=1, dram_bytes=32 << 20) as cluster:
        mover = made(cluster.lane, "tcp")
        try:
            fill(mover)
            wait_until(lambda: reached(mover), 20, what="the pool to be reached")
            pid = mover.pid
            cluster.stores[0].pause()
            done = np.zeros(COUNT, np.bool_)
            with ends_within(0.5, "the read"), contextlib.suppress(DeadlineExceeded):
                done = get(mover, SPACE, KEYS, SECOND, LENGTHS, 0.5).done
            assert not done.any()
            assert mover.pid == pid, "the call ended by itself, the process is as good as before"
            cluster.stores[0].resume()
            wait_until(lambda: reached(mover), 30, what="the owner to be used again")
        finally:
            mover.close()


def test_no_transfer_waits_for_another_and_all_end_in_order(mover: Mover) -> None:
    fill(mover)
    wait_until(lambda: reached(mover), 20, what="the pool to be reached")
    ended: list[int] = []
    until_s = time.monotonic() + 20.0
    for number in range(20):
        batch = Batch("get", SPACE, KEYS, SECOND, LENGTHS, until_s)
        mover.begin(batch, lambda answer, number=number: ended.append(number))  # type: ignore[misc]
    assert not ended, "what came of them is told in a poll"
    mover.drain(20.0)
    assert ended == list(range(20))
    mover.drain(20.0)  # nothing is under way: at once


def test_one_that_takes_no_message_makes_nobody_wait(mover: Mover) -> None:
    """More than a connection holds; all of them end when it is ended."""
    fill(mover)
    wait_until(lambda: reached(mover), 20, what="the pool to be reached")
    pid = mover.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    came: list[object] = []
    keys = [b"%04000d" % number for number in range(COUNT)]
    until_s = time.monotonic() + 0.1
    with ends_within(5, "sending"):
        for _ in range(100):
            mover.begin(Batch("put", SPACE, keys, FIRST, LENGTHS, until_s), came.append)

    def ended() -> bool:
        mover.poll()
        return len(came) == 100

    wait_until(ended, 30, what="all of them to end")
    assert all(isinstance(each, DeadlineExceeded) for each in came)


def test_more_than_a_bound_is_refused(mover: Mover) -> None:
    fill(mover)
    wait_until(lambda: reached(mover), 20, what="the pool to be reached")
    until_s = time.monotonic() + 60.0
    batch = Batch("get", SPACE, KEYS, SECOND, LENGTHS, until_s)

    def begin_many() -> None:
        for _ in range(5000):
            mover.begin(batch, lambda answer: None)

    with pytest.raises(Unavailable, match="under way"):
        begin_many()
    mover.drain(60.0)


def test_messages_come_whole_in_pieces_and_in_one() -> None:
    left, right = socket.socketpair()
    mine, theirs = Lane(left), Lane(right)
    messages = [b"", b"x" * 10, b"y" * 1_000_000, b"z"]

    def send() -> None:
        for each in messages:
            mine.send(each)

    sender = threading.Thread(target=send)
    sender.start()
    assert [theirs.receive() for _ in messages] == messages
    sender.join()
    left, right = socket.socketpair()
    left.close()
    with pytest.raises(EOFError):
        Lane(right).receive()


def test_who_never_waits_sends_and_has_the_same_messages() -> None:
    left, right = socket.socketpair()
    mine, theirs = NowaitLane(left), NowaitLane(right)
    messages = [b"", b"x" * 10, b"y" * 1_000_000, b"z"]
    assert theirs.receive() is None
    for each in messages:
        mine.send(each)
    found: list[bytes] = []

    def arrived() -> bool:
        mine.flush()
        while (message := theirs.receive()) is not None:
            found.append(message)
        return len(found) == len(messages)

    wait_until(arrived, 20, what="the messages")
    assert found == messages


ENGINE = """
import sys
from cenote.connectors.vllm.mover import Mover
from cenote.connectors.vllm.options import make_options
options = make_options({"master": sys.argv[1]})
mover = Mover(options, "engine", 1 << 20, lambda: print(mover.pid, flush=True))
mover.start()
sys.stdin.read()
"""


def test_it_ends_with_an_engine_that_is_killed(cluster: Cluster) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, cluster.lane],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        engine.kill()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), 20, what="the process to end")
