"""A client of one pool, told what to do by lines of JSON on its stdin: see `beside_peer`.

Runs in the virtual environment of its pool, so it uses the standard library alone; `ours` needs
cenote, `peer` the peer's wheel. `node` is the peer's process that holds the bytes, no client.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import random
import signal
import sys
import time

MIB = 1 << 20
BUFFER_BYTES = 64 * MIB


class Ours:
    def __init__(self, options: dict) -> None:
        from cenote.client import Client

        self.client = Client(
            options["master"],
            namespace="bench",
            transports=tuple(options["transports"]),
            verbs=options["verbs"],
            deadline_s=120.0,
        )

    def alloc(self, size_bytes: int) -> tuple[int, object]:
        buffer = self.client.alloc(size_bytes)
        return buffer.address, memoryview(buffer.array)

    def put(self, keys: list[str], addresses: list[int], sizes: list[int]) -> None:
        self.client.put_from_batch(keys, addresses=addresses, lengths=sizes).raise_for_errors()

    def get(self, keys: list[str], addresses: list[int], sizes: list[int]) -> None:
        results = self.client.get_into_batch(keys, addresses=addresses, lengths=sizes)
        results.raise_for_errors()
        assert results.hit_count == len(keys)

    def remove(self, keys: list[str]) -> None:
        self.client.remove_batch(keys)

    def over_rdma_bytes(self) -> int:
        stats = self.client.stats()
        return stats.rdma_read_bytes + stats.rdma_written_bytes

    def close(self) -> None:
        self.client.close()


class Peer:
    def __init__(self, options: dict) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        code = self.store.setup(
            options["host"],
            "P2PHANDSHAKE",
            options["segment_bytes"],
            options["buffer_bytes"],
            "rdma",
            options["devices"],
            options["master"],
        )
        if code:
            raise RuntimeError(f"the peer's set-up returned {code}")
        self.kept: list[object] = []

    def alloc(self, size_bytes: int) -> tuple[int, object]:
        memory = mmap.mmap(-1, size_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        code = self.store.register_buffer(address, size_bytes)
        if code:
            raise RuntimeError(f"the peer's register_buffer returned {code}")
        self.kept.append(memory)
        return address, memoryview(memory)

    def put(self, keys: list[str], addresses: list[int], sizes: list[int]) -> None:
        codes = self.store.batch_put_from(keys, addresses, sizes)
        assert not any(codes), codes

    def get(self, keys: list[str], addresses: list[int], sizes: list[int]) -> None:
        found = self.store.batch_get_into(keys, addresses, sizes)
        assert list(found) == sizes, found

    def remove(self, keys: list[str]) -> None:
        for key in keys:
            self.store.remove(key)

    def over_rdma_bytes(self) -> int:
        return 0  # it does not tell; the devices' count does

    def close(self) -> None:
        self.store.close()


def measure(side: Ours | Peer, order: dict, memory: tuple[int, memoryview]) -> dict:
    """One batch, put or got; the bytes are checked outside of the time that is told."""
    start, view = memory
    size, count, turn = order["size_bytes"], order["count"], order["turn"]
    keys = [f"{size} {turn} {i}" for i in range(count)]
    addresses = [start + i * size for i in range(count)]
    sizes = [size] * count
    data = random.Random(turn).randbytes(1 << 16)
    if order["what"] == "put":
        for first in range(0, count * size, len(data)):
            view[first : first + len(data)] = data[: count * size - first]
    else:
        view[: count * size] = bytes(count * size)
    cpu, wall = time.process_time(), time.perf_counter()
    (side.put if order["what"] == "put" else side.get)(keys, addresses, sizes)
    told = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    if order["what"] == "get":
        wanted = hashlib.sha1()
        for first in range(0, count * size, len(data)):
            wanted.update(data[: count * size - first])
        assert hashlib.sha1(view[: count * size]).digest() == wanted.digest(), "wrong bytes"
        if order.get("remove"):
            side.remove(keys)
    return told


def main() -> None:
    kind, options = sys.argv[1], json.loads(sys.argv[2])
    side = Ours(options) if kind == "ours" else Peer(options)
    memory = side.alloc(BUFFER_BYTES) if kind != "node" else None
    print(json.dumps({"ready": True}), flush=True)
    if memory is None:
        signal.pause()
        return
    for line in sys.stdin:
        order = json.loads(line)
        if order["what"] == "end":
            break
        print(json.dumps({**measure(side, order, memory)}), flush=True)
    print(json.dumps({"rdma_bytes": side.over_rdma_bytes()}), flush=True)
    side.close()


if __name__ == "__main__":
    main()
