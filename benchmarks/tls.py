"""What TLS costs: the same calls over TCP on pools without it, with it on the lane, and on all.

    PYTHONPATH=tests python benchmarks/tls.py [--rounds 5] [--seconds 0.5] [--json]

Three pools of one master and one store daemon on this machine, with the same client code; kinds are
interleaved in each round, a figure is the median of the rounds' medians, a ratio is against the
pool without TLS. Certificates are of elliptic curves (P-256), checked on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from cenote.client import Client
from cluster import Cluster
from tls_kit import Authority

BLOCK = 5 << 19
BATCH = 32
SMALL = 4096
SMALL_BATCH = 256
POOLS = ("plain", "lane", "all")


class Calls:
    """On one pool."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._block = np.random.default_rng(1).integers(0, 256, BLOCK, np.uint8)
        self._into = np.empty((BATCH, BLOCK), np.uint8)
        self._small = np.empty((SMALL_BATCH, SMALL), np.uint8)
        self._keys = [f"block-{n}" for n in range(BATCH)]
        self._small_keys = [f"small-{n}" for n in range(SMALL_BATCH)]
        self._next = 0
        client.put_from_batch(self._keys, [self._block] * BATCH)
        client.put_from_batch(self._small_keys, list(self._small))

    def _fresh(self, count: int) -> list[str]:
        self._next += count
        return [f"new-{n}" for n in range(self._next - count, self._next)]

    def cases(self) -> dict[str, tuple[Callable[[], object], int]]:
        """By name: a call, and the bytes that it moves (0: told by its time)."""
        client = self._client
        return {
            "exists, one key": (lambda: client.exists("block-0"), 0),
            "get_into 4 KiB": (self._get_unknown, 0),
            "put_from 4 KiB": (lambda: client.put(self._fresh(1)[0], self._small[0]), 0),
            "batch get 4 KiB x 256": (
                lambda: client.get_into_batch(self._small_keys, list(self._small)),
                SMALL * SMALL_BATCH,
            ),
            "get_into 2.5 MiB": (
                lambda: client.get_into(self._keys[0], self._into[0]),
                BLOCK,
            ),
            "batch get 2.5 MiB x 32": (
                lambda: client.get_into_batch(self._keys, list(self._into)),
                BLOCK * BATCH,
            ),
            "batch put 2.5 MiB x 32": (
                lambda: client.put_from_batch(self._fresh(BATCH), [self._block] * BATCH),
                BLOCK * BATCH,
            ),
        }

    def _get_unknown(self) -> None:
        self._client.forget_locations()
        self._client.get_into(self._small_keys[0], self._small[0])


def median_s(call: Callable[[], object], seconds: float) -> float:
    """Of the calls that fit into the time; three at least."""
    call()
    took: list[float] = []
    until_s = time.perf_counter() + seconds
    while len(took) < 3 or time.perf_counter() < until_s:
        began_s = time.perf_counter()
        call()
        took.append(time.perf_counter() - began_s)
    return statistics.median(took)


def measure(rounds: int, seconds: float) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        authority = Authority(Path(stack.enter_context(TemporaryDirectory())))
        daemon, client = authority.issue("daemon"), authority.issue("client")
        flags = authority.flags(daemon)
        options: dict[str, Any] = {"transports": ("tcp",)}
        secured = {**options, **authority.options(client)}
        made: dict[str, dict[str, tuple[Callable[[], object], int]]] = {}
        for name in POOLS:
            tls = {} if name == "plain" else flags
            more: dict[str, object] = {"tls-data": True} if name == "all" else {}
            cluster = stack.enter_context(
                Cluster(dram_bytes=768 << 20, master_flags=tls, store_flags={**tls, **more})
            )
            connected = cluster.client(**(secured if tls else options))
            made[name] = Calls(stack.enter_context(connected)).cases()
        rows = []
        for case, (_, size) in made["plain"].items():
            medians: dict[str, list[float]] = {name: [] for name in POOLS}
            for _ in range(rounds):
                for name in POOLS:
                    medians[name].append(median_s(made[name][case][0], seconds))
            times = {name: statistics.median(values) for name, values in medians.items()}
            rows.append({"case": case, "bytes": size, **times})
        return rows


def _told(seconds: float, size: int) -> str:
    return f"{size / seconds / 1e9:.2f} GB/s" if size else f"{seconds * 1e6:.0f} µs"


def main() -> int:
    parser = argparse.ArgumentParser(description="what TLS costs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each kind in each round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(options.rounds, options.seconds)
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        size = row["bytes"]
        told = [
            f"{name} {size / row[name] / 1e9:.2f} GB/s"
            if size
            else f"{name} {row[name] * 1e6:.0f} µs"
            for name in POOLS
        ]
        ratios = [f"{row[name] / row['plain']:.2f}" for name in POOLS[1:]]
        print(f"{row['case']:24} {', '.join(told)}; time x{' x'.join(ratios)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
