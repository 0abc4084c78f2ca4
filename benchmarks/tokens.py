"""What tokens cost: the same work at a pool that asks for them and at one that does not, by turns.

    PYTHONPATH=tests python benchmarks/tokens.py [--rounds 30] [--transport tcp]

Two pools on loopback, alike but for tokens; each has a master and one store daemon. Over TCP the
client of the pool with tokens is a tenant's (of some namespaces: each extent is looked at), over
shared memory one of all namespaces (the others get no memory to map). A round is the same work at
one pool and then at the other; which goes first alternates, and rounds are short, so that both see
the same of what else the machine does. Told are medians over the rounds and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np

from cenote.client import Client
from cluster import Cluster
from security_kit import Tokens

MIB: Final = 1 << 20
POOL_BYTES: Final = 256 * MIB
BATCH: Final = 64
BLOCK_BYTES: Final = 64 << 10
SMALL_BYTES: Final = 4096
SINGLES: Final = 50
"""Calls of one round."""
NAMESPACE: Final = "ann/bench"
HOLDERS: Final = {"tcp": "ann", "shm": "wide"}


class Work:
    """Of one pool. Each case takes one round's time; the number of calls is the same everywhere."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._keys = [f"block{i}" for i in range(BATCH)]
        self._blocks = list(
            np.random.default_rng(0).integers(0, 256, (BATCH, BLOCK_BYTES), np.uint8)
        )
        self._buffers = list(np.empty((BATCH, BLOCK_BYTES), np.uint8))
        self._small = np.empty(SMALL_BYTES, np.uint8)
        self._number = 0
        client.put_from_batch(self._keys, self._blocks).raise_for_errors()
        client.put("small", bytes(SMALL_BYTES)).raise_for_error()

    def get_4k(self) -> int:
        """One object of 4 KiB at a time."""
        for _ in range(SINGLES):
            self._client.get_into("small", self._small)
        return SINGLES

    def exists(self) -> int:
        """One key at a time: metadata alone."""
        for _ in range(SINGLES):
            self._client.exists("small")
        return SINGLES

    def get_batch(self) -> int:
        """64 objects of 64 KiB."""
        found = self._client.get_into_batch(self._keys, self._buffers)
        assert found.hit_count == BATCH
        return 1

    def put_4k(self) -> int:
        """One object of 4 KiB at a time, under new keys."""
        first, self._number = self._number, self._number + SINGLES
        keys = [f"put{i}" for i in range(first, first + SINGLES)]
        for key in keys:
            self._client.put_from(key, self._small)
        return SINGLES

    def put_batch(self) -> int:
        """64 objects of 64 KiB, under new keys."""
        first, self._number = self._number, self._number + BATCH
        keys = [f"put{i}" for i in range(first, first + BATCH)]
        self._client.put_from_batch(keys, self._blocks).raise_for_errors()
        return 1

    def forget(self) -> None:
        """What was put goes, between rounds."""
        if self._number:
            keys = [f"put{i}" for i in range(max(0, self._number - 4 * BATCH), self._number)]
            self._client.remove_batch(keys)


CASES: Final[dict[str, Callable[[Work], int]]] = {
    "exists": Work.exists,
    "get 4 KiB": Work.get_4k,
    "get 64 x 64 KiB": Work.get_batch,
    "put 4 KiB": Work.put_4k,
    "put 64 x 64 KiB": Work.put_batch,
}


def compare(works: dict[str, Work], rounds: int) -> dict[str, dict[str, float]]:
    """By case: microseconds of a call with and without, and the ratio."""
    times: dict[str, dict[str, list[float]]] = {c: {w: [] for w in works} for c in CASES}
    for number in range(rounds + 2):
        order = list(works) if number % 2 else list(works)[::-1]
        for case, run in CASES.items():
            for which in order:
                began_s = time.perf_counter()
                calls = run(works[which])
                took_s = (time.perf_counter() - began_s) / calls
                if number >= 2:  # the first ones warm up
                    times[case][which].append(took_s * 1e6)
        for work in works.values():
            work.forget()
    found = {}
    for case, by_pool in times.items():
        medians = {which: statistics.median(values) for which, values in by_pool.items()}
        found[case] = {**medians, "ratio": medians["tokens"] / medians["none"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--transport", choices=("tcp", "shm"), action="append")
    options = parser.parse_args()
    with ExitStack() as stack:
        tokens = Tokens(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        secured = stack.enter_context(
            Cluster(
                dram_bytes=POOL_BYTES,
                master_flags={"tokens": tokens.path},
                store_flags={"token-file": tokens.node_file},
            )
        )
        plain = stack.enter_context(Cluster(dram_bytes=POOL_BYTES))
        for transport in options.transport or ("shm", "tcp"):
            token = tokens[HOLDERS[transport]]
            with ExitStack() as clients:
                works = {}
                for which, pool, given in (("tokens", secured, token), ("none", plain, "")):
                    client = pool.client(
                        token=given, namespace=NAMESPACE, transports=(transport,), deadline_s=20.0
                    )
                    works[which] = Work(clients.enter_context(client))
                found = compare(works, options.rounds)
            for case, row in found.items():
                without, secured_us = row["none"], row["tokens"]
                print(
                    f"{transport}  {case:16} {without:9.1f} us without  {secured_us:9.1f} us with"
                    f"  x{row['ratio']:.2f}",
                    flush=True,
                )
            print(json.dumps({transport: found}))


if __name__ == "__main__":
    main()
