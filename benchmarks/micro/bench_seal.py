"""What sealing a slot costs: python benchmarks/micro/bench_seal.py

Batches as a put sends them: distinct slots in random order, 32-byte keys, every slot replaced by a
higher version each time. The best of several rounds is what the code costs; the median shows the
machine.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from cenote.api.rows import SEAL
from cenote.store.slot_format import SLOT_BYTES
from cenote.store.slots import SlotTable

SLOTS = 1 << 18
ROUNDS = 7
ROUND_SLOTS = 40_000


def seal_us_per_slot(batch: int, key_bytes: int) -> tuple[float, float]:
    """Best and median microseconds per slot."""
    rng = np.random.default_rng(1)
    data_bytes = SLOTS * 1024
    data = memoryview(bytearray(data_bytes if key_bytes > 64 else 1))
    table = SlotTable(
        memoryview(bytearray(SLOTS * SLOT_BYTES)), data, unit_bytes=64, limit_bytes=data_bytes
    )
    calls = max(1, ROUND_SLOTS // batch)
    figures, seq = [], 0
    starts = np.arange(batch, dtype=np.int64) * key_bytes
    for _ in range(ROUNDS):
        batches = []
        for _ in range(calls):
            rows = np.zeros(batch, SEAL)
            rows["slot"] = rng.choice(SLOTS, batch, replace=False)
            rows["offset"] = rows["slot"].astype(np.uint64) * np.uint64(1024)
            rows["length"] = 1024
            rows["object_size"] = 1024 - (key_bytes if key_bytes > 64 else 0)
            rows["extent_count"] = 1
            rows["key_length"] = key_bytes
            seq += 1
            rows["seq"] = seq
            batches.append((rows, memoryview(rng.bytes(batch * key_bytes))))
        begin = time.perf_counter()
        for rows, keys in batches:
            table.seal(1, 1, 1, rows, keys, starts)
        figures.append((time.perf_counter() - begin) / calls / batch * 1e6)
    assert table.seals == ROUNDS * calls * batch
    return min(figures), statistics.median(figures)


def main() -> None:
    """Print one line for each batch size and key length."""
    print(f"{'batch':>6} {'key bytes':>10} {'best us/slot':>13} {'median':>8}")
    for key_bytes in (32, 64, 112):
        for batch in (1, 2, 8, 32, 128, 512):
            best, median = seal_us_per_slot(batch, key_bytes)
            print(f"{batch:>6} {key_bytes:>10} {best:>13.2f} {median:>8.2f}")


if __name__ == "__main__":
    main()
