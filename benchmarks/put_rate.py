"""Puts a second with the metadata in etcd and in a directory, by turns in one run.

    PYTHONPATH=tests python benchmarks/put_rate.py [--rounds 9] [--seconds 1] [--members 1]

Two pools on loopback, alike but for `--metadata`; a client process of its own for each, over shared
memory, `relaxed`. A round is the same work at one pool and then at the other, which goes first
alternates, and the other's processes are idle meanwhile. Cases: batches of 128 objects of 64 B,
single puts of 4 KiB, both with room left; batches into a pool that is full, so that each of them
evicts. Told are medians, and the median over the rounds of etcd's rate by the directory's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from cenote.client import Client
from cluster import Cluster
from etcd import EtcdCluster

MIB: Final = 1 << 20
POOL_BYTES: Final = 512 * MIB
FULL_BYTES: Final = 24 * MIB
BATCH: Final = 128
SMALL_BYTES: Final = 64
BLOCK_BYTES: Final = 4096
PAUSE_S: Final = 0.1
WARM_SHARE: Final = 0.2
REMOVED_AT_ONCE: Final = 4096


class Work:
    """Puts at one pool. What was put is removed after each round, unless it is to be full."""

    def __init__(self, client: Client, *, keep: bool) -> None:
        self._client = client
        self._keep = keep
        self._number = 0
        self._put: list[str] = []
        self._values = [bytes([i]) * SMALL_BYTES for i in range(BATCH)]
        self._block = np.full(BLOCK_BYTES, 7, np.uint8)

    def _keys(self, count: int) -> list[str]:
        first, self._number = self._number, self._number + count
        return [f"key{i:012}" for i in range(first, first + count)]

    def batch(self) -> int:
        keys = self._keys(BATCH)
        results = self._client.put_batch(keys, self._values)
        assert results.stored_count == BATCH, next(r for r in results if r.error)
        self._put += keys
        return BATCH

    def single(self) -> int:
        (key,) = self._keys(1)
        assert self._client.put_from(key, self._block).stored
        self._put.append(key)
        return 1

    def rate(self, step: Callable[[], int], seconds: float) -> float:
        """Puts a second, after a moment that does not count."""
        warm_until_s = time.perf_counter() + seconds * WARM_SHARE
        while time.perf_counter() < warm_until_s:
            step()
        began_s, done = time.perf_counter(), 0
        while time.perf_counter() - began_s < seconds:
            done += step()
        rate = done / (time.perf_counter() - began_s)
        if not self._keep:
            for first in range(0, len(self._put), REMOVED_AT_ONCE):
                self._client.remove_batch(self._put[first : first + REMOVED_AT_ONCE])
        self._put.clear()
        return rate


def measure(
    pools: dict[str, Cluster], case: str, rounds: int, seconds: float, *, full: bool = False
) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        clients = {
            name: stack.enter_context(pool.client(transports=("shm",), deadline_s=10.0))
            for name, pool in pools.items()
        }
        works = {name: Work(client, keep=full) for name, client in clients.items()}
        steps = {name: getattr(work, case) for name, work in works.items()}
        if full:
            for name, work in works.items():
                work.rate(steps[name], seconds * 3)  # until it evicts
        rates: dict[str, list[float]] = {name: [] for name in pools}
        for number in range(rounds):
            order = list(pools) if number % 2 else list(pools)[::-1]
            for name in order:
                rates[name].append(works[name].rate(steps[name], seconds))
                time.sleep(PAUSE_S)
    ratios = [e / f for e, f in zip(rates["etcd"], rates["file"], strict=True)]
    return {
        "file_per_s": round(statistics.median(rates["file"])),
        "etcd_per_s": round(statistics.median(rates["etcd"])),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_least": round(min(ratios), 3),
        "ratio_most": round(max(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--members", type=int, default=1, help="of etcd")
    parser.add_argument("--cases", default="batch,single,full")
    options = parser.parse_args()
    report: dict[str, object] = {"cores": os.cpu_count(), "machine": platform.machine()}
    with (
        tempfile.TemporaryDirectory(prefix="cenote-etcd-") as directory,
        EtcdCluster(Path(directory), members=options.members) as etcd,
    ):
        for case in options.cases.split(","):
            full = case == "full"
            with contextlib.ExitStack() as inner:
                size_bytes = FULL_BYTES if full else POOL_BYTES
                pools = {
                    name: inner.enter_context(Cluster(metadata=metadata, dram_bytes=size_bytes))
                    for name, metadata in (("file", "file"), ("etcd", f"{etcd.url}/{case}"))
                }
                for pool in pools.values():
                    pool.wait_alive(1)
                report[case] = measure(
                    pools, "batch" if full else case, options.rounds, options.seconds, full=full
                )
                print(json.dumps({case: report[case]}), flush=True)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
