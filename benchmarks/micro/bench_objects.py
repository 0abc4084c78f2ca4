"""What the object table costs: ns per key of each operation, and bytes per object.

    python benchmarks/micro/bench_objects.py [--objects 300000] [--batch 512] [--json]
    python benchmarks/micro/bench_objects.py --memory [--objects 1000000]

Times are medians over batches of random keys. `--memory` measures the resident memory of a fresh
process per way of removing: nothing, everything, the oldest 90 %, a random 90 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from cenote.master.objects import EXTENT, ObjectTable

Digests = npt.NDArray[np.uint64]


def random_digests(rng: np.random.Generator, count: int) -> Digests:
    return rng.integers(0, 2**64, (count, 2), dtype=np.uint64)


def touch_memory(size_bytes: int = 1 << 30) -> None:
    """Make the machine have this much memory at hand.

    A virtual machine's first touch of a page may cost ten times a page fault: not ours to measure.
    """
    room = mmap.mmap(-1, size_bytes)
    np.frombuffer(room, np.uint8)[:: mmap.PAGESIZE] = 1


def fill(table: ObjectTable, digests: Digests, batch: int = 4096, seq: int = 1) -> None:
    for start in range(0, len(digests), batch):
        part = digests[start : start + batch]
        insert(table, part, columns(len(part), seq + start))


def columns(n: int, seq: int) -> dict[str, Any]:
    extents = np.zeros(n, EXTENT)
    extents["segment"] = 3
    extents["slot"] = extents["offset_units"] = np.arange(n)
    extents["length_units"] = 64
    seqs = np.arange(seq, seq + n, dtype=np.uint64)
    return {"checksum": seqs, "seq": seqs, "extents": extents}


def insert(table: ObjectTable, digests: Digests, given: dict[str, Any]) -> npt.NDArray[np.int64]:
    return table.insert(digests, size_bytes=4096, epoch=1, namespace=1, stamp=1, **given)


def insert_one(table: ObjectTable, low: int, high: int, seq: int) -> int:
    return table.insert_one(
        low,
        high,
        size_bytes=4096,
        checksum=seq,
        seq=seq,
        epoch=1,
        namespace=1,
        stamp=seq,
        segment=3,
        slot=seq & 0xFFFF,
        offset_units=seq & 0xFFFF,
        length_units=64,
    )


def median_ns(
    function: Callable[..., object], calls: Iterable[tuple[Any, ...]], keys: int
) -> float:
    """Median time of function(*call) in ns per key."""
    clock = time.perf_counter_ns
    times = []
    for call in calls:
        start = clock()
        function(*call)
        times.append(clock() - start)
    return float(np.median(times)) / keys


def measure(objects: int, batch: int, rounds: int) -> dict[str, float]:
    """ns per key (bytes for the last) by operation."""
    touch_memory()
    rng = np.random.default_rng(1)
    table = ObjectTable()
    digests = random_digests(rng, objects)
    start = time.perf_counter_ns()
    fill(table, digests)
    result = {"bulk insert, 4096": (time.perf_counter_ns() - start) / objects}

    def some(n: int) -> Digests:
        return digests[rng.integers(0, objects, n)]

    hits = [(some(batch),) for _ in range(rounds)]
    absent = [(random_digests(rng, batch),) for _ in range(rounds)]
    mixed = [(np.concatenate((some(batch // 2), k[: batch // 2])),) for (k,) in absent]
    result[f"lookup, hits, {batch}"] = median_ns(table.lookup, hits, batch)
    result[f"lookup, absent, {batch}"] = median_ns(table.lookup, absent, batch)
    result[f"lookup, half absent, {batch}"] = median_ns(table.lookup, mixed, batch)
    few = [(some(16),) for _ in range(rounds)]
    result["lookup, hits, 16"] = median_ns(table.lookup, few, 16)
    pairs = [tuple(k) for k in some(10 * rounds).tolist()]
    result["lookup_one, hit"] = median_ns(table.lookup_one, pairs, 1)
    rows = [(table.lookup(some(batch)),) for _ in range(rounds)]
    result[f"records_of, {batch}"] = median_ns(table.records_of, rows, batch)
    result[f"extents_of, {batch}"] = median_ns(table.extents_of, rows, batch)
    result |= measure_changes(table, digests, rng, rounds)
    result["bytes an object (estimate)"] = table.memory_bytes() / table.used_rows
    return result


def measure_changes(
    table: ObjectTable, digests: Digests, rng: np.random.Generator, rounds: int
) -> dict[str, float]:
    """Inserting at the end, then replacing random objects by new ones as eviction would."""
    n = 128
    seq = 10**9
    given = columns(n, seq)
    fresh = [(table, random_digests(rng, n), given) for _ in range(rounds)]
    result = {f"insert at the end, {n}": median_ns(insert, fresh, n)}
    victims = rng.permutation(table.lookup(digests))[: rounds * n].reshape(rounds, n)
    clock = time.perf_counter_ns
    times = np.zeros((3, rounds))
    for i in range(rounds):
        keys = random_digests(rng, n)
        marks = [clock()]
        table.unlink(victims[i])
        marks.append(clock())
        table.free(victims[i])
        marks.append(clock())
        insert(table, keys, given)
        marks.append(clock())
        times[:, i] = np.diff(marks)
    for name, row in zip(("unlink", "free", "insert in holes"), times, strict=True):
        result[f"{name}, {n}"] = float(np.median(row)) / n
        result[f"{name}, {n}, worst batch"] = float(row.max()) / n
    pairs = random_digests(rng, 10 * rounds).tolist()
    result["insert_one"] = median_ns(insert_one, [(table, *pair, seq) for pair in pairs], 1)
    ones = [(table.lookup_one(*pair),) for pair in pairs]
    result["unlink_one"] = median_ns(table.unlink_one, ones, 1)
    result["free_one"] = median_ns(table.free_one, ones, 1)
    return result


# ---- memory ----------------------------------------------------------------------------------


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


REMOVALS = ("nothing", "all", "oldest 90 %", "random 90 %")


def measure_memory(objects: int, removal: str) -> dict[str, float]:
    """Resident memory in this process, which should be fresh."""
    rng = np.random.default_rng(1)
    fill(warm := ObjectTable(), random_digests(rng, 1000))
    del warm
    gc.collect()
    before = resident_bytes()
    table = ObjectTable()
    batch = 1000
    for start in range(0, objects, batch):
        insert(table, random_digests(rng, batch), columns(batch, 1 + start))
    peak = resident_bytes() - before
    rows = np.flatnonzero(table.state)[1:]
    if removal == "nothing":
        rows = rows[:0]
    elif removal == "oldest 90 %":
        rows = rows[: objects * 9 // 10]
    elif removal == "random 90 %":
        rows = rng.permutation(rows)[: objects * 9 // 10]
    estimate = table.memory_bytes()
    slowest_ns = steps = 0
    for start in range(0, len(rows), batch):
        table.unlink(rows[start : start + batch])
        table.free(rows[start : start + batch])
    del rows
    while removal != "nothing":
        high_water, began = table.high_water, time.perf_counter_ns()
        moved, _ = table.compact()
        slowest_ns = max(slowest_ns, time.perf_counter_ns() - began)
        steps += 1
        if table.high_water == high_water and not len(moved):
            break
    return {
        "bytes an object at the peak": peak / objects,
        "estimated": estimate / objects,
        "left, % of the peak": 100 * (resident_bytes() - before) / peak,
        "left, % estimated": 100 * table.memory_bytes() / estimate,
        "compact steps": steps,
        "slowest compact step, us": slowest_ns / 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--objects", type=int, default=0, help="default 300000; 1000000 for memory")
    parser.add_argument("--batch", type=int, default=512, help="keys a lookup")
    parser.add_argument("--rounds", type=int, default=500, help="batches measured")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--removal", choices=REMOVALS, help="one memory case, in this process")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    if args.removal:
        results[args.removal] = measure_memory(args.objects or 10**6, args.removal)
    elif args.memory:
        for removal in REMOVALS:
            command = [sys.executable, __file__, "--removal", removal, "--json"]
            command += ["--objects", str(args.objects or 10**6)]
            results |= json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    else:
        objects = args.objects or 300_000
        results[f"{objects} objects, ns per key"] = measure(objects, args.batch, args.rounds)
    if args.json:
        print(json.dumps(results))
        return
    for title, figures in results.items():
        print(title)
        for name, value in figures.items():
            print(f"  {name:40s}{value:12.1f}")


if __name__ == "__main__":
    main()
