"""The master's state in process: CPU nanoseconds a key, without messages, sockets and journal.

python benchmarks/micro/bench_state.py [--objects 300000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import EXTENT, SLOT
from cenote.master import commands as c
from cenote.master.state import MasterState, StateConfig

SESSION = b"s" * 16
NOW_S = 100.0
PAYLOAD_BYTES = 64


def new_state(objects: int, payload_bytes: int, share_free: float = 0.5) -> MasterState:
    """One node with room for `objects` (and some more) of this size."""
    state = MasterState(StateConfig(), 1)
    size = int(objects * (payload_bytes + 256) * (1 + share_free)) >> 12 << 12
    report = c.SegmentReport(
        0, 1, b"i" * 16, size, size, 64, int(objects * 1.6), np.zeros(0, EXTENT)
    )
    state.apply(c.OpenSession(SESSION, boot_id="host"), NOW_S)
    state.apply(c.OpenNamespace("bench", b"", True, 1, 7), NOW_S)
    attach = c.Attach(b"n" * 16, "node", "host", "", [], [report], np.zeros(0, SLOT), 1)
    state.apply(attach, NOW_S)
    return state


def put(state: MasterState, digests: NDArray[np.uint64], payload_bytes: int) -> None:
    n = len(digests)
    sizes = np.full(n, payload_bytes, np.uint64)
    reply = state.put_start(c.PutStart(SESSION, 0, 1, 1, digests, sizes), NOW_S)
    checksums = np.arange(n, dtype=np.uint64)
    state.put_commit(c.PutCommit(SESSION, 0, reply.grant_id, None, checksums), NOW_S)
    state.take_effects()


def ns_per_key(rounds: int, batches: int, n: int, runs: list[Callable[[int], None]]) -> list[float]:
    """Medians over rounds; in each, every one of `runs` does all its batches, then the next."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds):
        for run, into in zip(runs, times, strict=True):
            start = time.process_time_ns()
            for i in range(number * batches, (number + 1) * batches):
                run(i)
            into.append((time.process_time_ns() - start) / (batches * n))
    return [float(np.median(into)) for into in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    objects, rounds = options.objects, options.rounds
    state = new_state(objects, PAYLOAD_BYTES)
    digests = rng.integers(0, 1 << 63, (objects, 2), dtype=np.uint64)
    start = time.process_time()
    for i in range(0, objects, 512):
        put(state, digests[i : i + 512], PAYLOAD_BYTES)
    print(f"fill at 512: {(time.process_time() - start) / objects * 1e9:.0f} ns/key")
    memory = state.status(NOW_S).metadata_memory_bytes / objects
    print(f"metadata: {memory:.0f} B/object")
    for n, batches in ((1, 2000), (16, 400), (128, 100), (512, 40)):
        measure(state, digests, n, batches, rounds)
    replay_speed(state, objects)


def measure(
    state: MasterState, digests: NDArray[np.uint64], n: int, batches: int, rounds: int
) -> None:
    rng = np.random.default_rng(1000 + n)
    picks = rng.integers(0, len(digests), (rounds * batches, n))
    keys = [np.ascontiguousarray(digests[pick]) for pick in picks]

    def exists(i: int) -> None:
        state.exists(c.Exists(1, 1, keys[i]), NOW_S)

    leases: list[int] = []

    def acquire(i: int) -> None:
        reply = state.acquire(c.Acquire(SESSION, 1, 1, keys[i], 1000), NOW_S)
        leases.append(reply.lease_id)

    def release(i: int) -> None:
        ids = np.array([leases.pop()], np.uint64)
        state.piggyback(c.Piggyback(released_lease_ids=ids), NOW_S)

    fresh = rng.integers(0, 1 << 63, (rounds * batches, n, 2), dtype=np.uint64)
    sizes = np.full(n, PAYLOAD_BYTES, np.uint64)
    checksums = np.arange(n, dtype=np.uint64)
    grants: list[int] = []

    def put_start(i: int) -> None:
        command = c.PutStart(SESSION, 0, 1, 1, fresh[i], sizes)
        grants.append(state.put_start(command, NOW_S).grant_id)

    def put_commit(i: int) -> None:
        command = c.PutCommit(SESSION, 0, grants.pop(), None, checksums)
        state.put_commit(command, NOW_S)
        state.take_effects()

    more = rng.integers(0, 1 << 63, (rounds * batches, n, 2), dtype=np.uint64)

    def put_and_commit(i: int) -> None:
        put(state, more[i], PAYLOAD_BYTES)

    def remove_more(i: int) -> None:
        state.apply(c.Remove(1, 1, more[i]), NOW_S)

    def remove(i: int) -> None:
        state.apply(c.Remove(1, 1, fresh[i]), NOW_S)

    parts = []
    groups: list[list[Callable[[int], None]]] = [
        [exists],
        [acquire, release],
        [put_start, put_commit, remove],
        [put_and_commit, remove_more],
    ]
    for runs in groups:
        for run, ns in zip(runs, ns_per_key(rounds, batches, n, runs), strict=True):
            parts.append(f"{run.__name__} {ns:.0f}")
    print(f"n={n}: " + ", ".join(parts) + " ns/key")


def replay_speed(state: MasterState, objects: int) -> None:
    start = time.process_time()
    effects = list(state.snapshot())
    middle = time.process_time()
    copy = MasterState(StateConfig(), 2)
    for effect in effects:
        copy.replay(effect)
    end = time.process_time()
    print(
        f"snapshot {(middle - start) / objects * 1e9:.0f} ns/object, "
        f"replay {(end - middle) / objects * 1e9:.0f} ns/object"
    )


if __name__ == "__main__":
    main()
