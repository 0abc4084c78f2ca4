"""Puts a second with the metadata in etcd and in a directory, by turns in one run.

    PYTHONPATH=tests python benchmarks/put_rate.py [--rounds 40] [--members 1] [--full-mib 24]

Two pools on loopback, alike but for `--metadata`, shared memory, `relaxed`. A round is the same
work at one pool and then at the other; which goes first alternates. Rounds are short, so that both
see the same of what else the machine does. Cases: batches of 128 objects of 64 B, single puts of 4
KiB, both with room left; batches into a pool that is full, so that each of them evicts. Told are
medians, the ratio of them, and the microseconds of CPU that each kind of process takes for a put:
less depends on the machine's other work there.
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
BATCH: Final = 128
SMALL_BYTES: Final = 64
BLOCK_BYTES: Final = 4096
PAUSE_S: Final = 0.02
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
REMOVED_AT_ONCE: Final = 4096
FILL_S: Final = 2.0
FILL_MIB_PER_S: Final = 10
"""Until a pool evicts."""


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

    def rate(self, step: Callable[[], int], seconds: float) -> tuple[float, int]:
        """Puts a second, after one that does not count; how many there were."""
        step()
        began_s, done = time.perf_counter(), 0
        while time.perf_counter() - began_s < seconds:
            done += step()
        rate = done / (time.perf_counter() - began_s)
        if not self._keep:
            for first in range(0, len(self._put), REMOVED_AT_ONCE):
                self._client.remove_batch(self._put[first : first + REMOVED_AT_ONCE])
        self._put.clear()
        return rate, done


def cpu_s(pid: int) -> float:
    """Of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Spent:
    """CPU by kind of process, while at work for one pool."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = {"client": os.getpid(), **pids}
        self._from: dict[str, float] = {}
        self.total_s = dict.fromkeys(self._pids, 0.0)

    def __enter__(self) -> None:
        self._from = {name: cpu_s(pid) for name, pid in self._pids.items()}

    def __exit__(self, *_: object) -> None:
        for name, pid in self._pids.items():
            self.total_s[name] += cpu_s(pid) - self._from[name]


def measure(
    pools: dict[str, tuple[Cluster, dict[str, int]]],
    case: str,
    rounds: int,
    seconds: float,
    *,
    fill_s: float = 0.0,
) -> dict[str, object]:
    """`fill_s`: for so long a pool is filled first, and nothing is removed."""
    with contextlib.ExitStack() as stack:
        works = {
            name: Work(
                stack.enter_context(pool.client(transports=("shm",), deadline_s=10.0)),
                keep=fill_s > 0,
            )
            for name, (pool, _) in pools.items()
        }
        steps = {name: getattr(work, case) for name, work in works.items()}
        for name, work in works.items():
            work.rate(steps[name], fill_s or seconds)
        rates: dict[str, list[float]] = {name: [] for name in pools}
        done = dict.fromkeys(pools, 0)
        spent = {name: Spent(pids) for name, (_, pids) in pools.items()}
        for number in range(rounds):
            for name in list(pools) if number % 2 else list(pools)[::-1]:
                with spent[name]:
                    rate, count = works[name].rate(steps[name], seconds)
                    time.sleep(PAUSE_S)
                rates[name].append(rate)
                done[name] += count
    median = {name: statistics.median(some) for name, some in rates.items()}
    return {
        "per_s": {name: round(value) for name, value in median.items()},
        "ratio": round(median["etcd"] / median["file"], 3),
        "cpu_us": {
            name: {kind: round(1e6 * s / done[name], 1) for kind, s in spent[name].total_s.items()}
            for name in pools
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.15)
    parser.add_argument("--members", type=int, default=1, help="of etcd")
    parser.add_argument("--cases", default="batch,single,full")
    parser.add_argument("--full-mib", type=int, default=24, help="of the pool that is full")
    options = parser.parse_args()
    report: dict[str, object] = {"cores": os.cpu_count(), "machine": platform.machine()}
    with (
        tempfile.TemporaryDirectory(prefix="cenote-etcd-") as directory,
        EtcdCluster(Path(directory), members=options.members) as etcd,
    ):
        for case in options.cases.split(","):
            full = case == "full"
            with contextlib.ExitStack() as inner:
                size_bytes = options.full_mib * MIB if full else POOL_BYTES
                pools = {
                    name: inner.enter_context(Cluster(metadata=metadata, dram_bytes=size_bytes))
                    for name, metadata in (("file", "file"), ("etcd", f"{etcd.url}/{case}"))
                }
                parts = {}
                for name, pool in pools.items():
                    pool.wait_alive(1)
                    pids = {"master": pool.master.pid, "store": pool.stores[0].pid}
                    if name == "etcd":
                        pids |= {f"etcd{i}": member.pid for i, member in enumerate(etcd.members)}
                    parts[name] = (pool, pids)
                step = "batch" if full else case
                fill_s = FILL_S + options.full_mib / FILL_MIB_PER_S if full else 0.0
                report[case] = measure(parts, step, options.rounds, options.seconds, fill_s=fill_s)
                print(json.dumps({case: report[case]}), flush=True)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
