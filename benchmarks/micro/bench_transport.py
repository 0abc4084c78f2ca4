"""The transports beside the bare system calls: GB/s, items/s, latency.

    python benchmarks/micro/bench_transport.py [--rounds 9] [--check] [--json] [--only tcp|shm]

The data server is a process of its own with one segment. All kinds are interleaved in each round
and a figure is the median of the rounds. `raw tcp` is a blocking socket that asks for a block and
gets it (no checksum); `memmove` copies a block of the mapped segment into the same buffer.
Checksums are taken wherever "xxh3" is written. `--check` fails where a ratio misses its yardstick.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cenote.api.rows import EXTENT, SEAL
from cenote.transport.base import SealBatch, SessionIdentity
from cenote.transport.shm import ShmTransport
from cenote.transport.tcp import TcpTransport
from cenote.v1 import common_pb2

BLOCK = 2560 << 10
MANY = 64
SMALL = 4096
SMALL_MANY = 256
SEGMENT_BYTES = 512 << 20
BLOCKS = SEGMENT_BYTES // BLOCK
DEADLINE_S = 10.0
LATENCY_CALLS = 400

SERVER = """
import socket, sys, threading
import numpy as np
from cenote.store.server import DataServer
from cenote.store.sessions import SessionTable
from cenote.transport.fake_segment import FakeSegment, FakeSegments

size, block = int(sys.argv[2]), int(sys.argv[3])
segment = FakeSegment(1, size)
np.frombuffer(segment.view, np.uint8)[:] = 1
segments = FakeSegments([segment])
server = DataServer(segments, SessionTable(segments), tcp=("127.0.0.1", 0), unix_path=sys.argv[1])
server.start()
raw = socket.create_server(("127.0.0.1", 0))

def serve_raw():
    for _ in range(2):
        sock, _ = raw.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        length = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "big")
        threading.Thread(target=answer, args=(sock, length), daemon=True).start()

def answer(sock, length):
    at = 0
    while sock.recv(1):
        sock.sendall(segment.view[at : at + length])
        at = (at + length) % (size - length)

threading.Thread(target=serve_raw, daemon=True).start()
print(server.tcp_address[1], raw.getsockname()[1], flush=True)
sys.stdin.read()
server.close()
"""

# (what, compared with, least ratio): the yardsticks of the data path alone.
YARDSTICKS = [
    ("tcp read 2.5 MiB xxh3", "raw tcp 2.5 MiB", 0.8),
    ("tcp read 64 x 2.5 MiB xxh3", "raw tcp 2.5 MiB", 0.9),
    ("tcp write 64 x 2.5 MiB xxh3", "raw tcp 2.5 MiB", 0.6),
    ("shm read 2.5 MiB", "memmove 2.5 MiB", 0.9),
    ("shm read 64 x 2.5 MiB", "memmove 2.5 MiB", 0.9),
]

Case = tuple[str, str, Callable[[int], float]]
"""(name, unit, measure(round))."""


class Bench:
    """A daemon, channels to it, and a buffer as large as its segment."""

    def __init__(self, folder: str, spin_s: float) -> None:
        path = str(Path(folder, "data.sock"))
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, path, str(SEGMENT_BYTES), str(BLOCK)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.server.stdout is not None
        port, raw_port = map(int, self.server.stdout.readline().split())
        node = common_pb2.NodeView(
            node_id=1,
            boot_id="here",
            endpoints=[
                common_pb2.Endpoint(
                    kind=common_pb2.TRANSPORT_KIND_TCP, address=f"127.0.0.1:{port}"
                ),
                common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_SHM, address=path),
            ],
        )
        credentials = common_pb2.Credentials()
        identity = SessionIdentity(os.urandom(16), "here", os.getpid(), credentials)
        self.transports = [TcpTransport(spin_s=spin_s), ShmTransport(spin_s=spin_s)]
        self.tcp = self.transports[0].connect(node, identity, 1, DEADLINE_S)
        self.shm: Any = self.transports[1].connect(node, identity, 1, DEADLINE_S)
        self.buffer = np.ones(SEGMENT_BYTES, np.uint8)
        self.address = self.buffer.ctypes.data
        self.raw_block = self._raw(raw_port, BLOCK)
        self.raw_small = self._raw(raw_port, SMALL)
        self.at = 0
        self.seals = 0
        self.shm.write_one(1, 0, 1, self.address, 1, DEADLINE_S, False)
        mappings = [self.shm._readable[1], self.shm._writable[1]]
        while any(mapping.populated_bytes < SEGMENT_BYTES for mapping in mappings):
            time.sleep(0.01)

    def _raw(self, port: int, length: int) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        sock.sendall(length.to_bytes(4, "big"))
        return sock

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        self.raw_block.close()
        self.raw_small.close()
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait(10)

    def place(self, length: int) -> int:
        """Where the next piece lies: never where the last ones were, so that nothing is cached."""
        self.at = (self.at + 37 * BLOCK) % (SEGMENT_BYTES - length) // SMALL * SMALL
        return self.at

    # ---- measures ---------------------------------------------------------------------------

    def gbps(self, call: Callable[[int], None], length: int, calls: int) -> float:
        times = []
        for _ in range(calls):
            at = self.place(length)
            start = time.perf_counter()
            call(at)
            times.append(time.perf_counter() - start)
        return length / statistics.median(times) / 1e9

    def latency_us(self, call: Callable[[int], None], share: float = 0.5) -> float:
        times = []
        for i in range(LATENCY_CALLS):
            start = time.perf_counter_ns()
            call(i * SMALL)
            times.append(time.perf_counter_ns() - start)
        times.sort()
        return times[int(len(times) * share)] / 1e3

    def beside_busy_thread_us(self, call: Callable[[int], None]) -> float:
        """p50 beside a Python thread that never rests: what it costs to win the GIL back."""
        stop = threading.Event()

        def burn() -> None:
            n = 0
            while not stop.is_set():
                n += 1

        thread = threading.Thread(target=burn)
        thread.start()
        times = []
        for i in range(30):
            start = time.perf_counter_ns()
            call(i * SMALL)
            times.append(time.perf_counter_ns() - start)
        stop.set()
        thread.join()
        return statistics.median(times) / 1e3

    # ---- work -------------------------------------------------------------------------------

    def raw_read(self, sock: socket.socket, at: int, length: int) -> None:
        view = memoryview(self.buffer)[at : at + length]
        sock.sendall(b"x")
        got = 0
        while got < length:
            got += sock.recv_into(view[got:], 0, socket.MSG_WAITALL)

    def one(self, channel: Any, length: int, write: bool, xxh3: bool) -> Callable[[int], None]:
        def call(at: int) -> None:
            there = (1, at, length, self.address + at)
            if write:
                status, _ = channel.write_one(*there, 1, DEADLINE_S, xxh3)
            else:
                status, _ = channel.read_one(*there, DEADLINE_S, xxh3)
            assert status == 0

        return call

    def batch(
        self, channel: Any, length: int, count: int, write: bool, xxh3: bool, scattered: bool
    ) -> Callable[[int], None]:
        steps = np.arange(count, dtype=np.uint64) * np.uint64(length)
        rng = np.random.default_rng(1)
        remote = rng.permutation(steps) if scattered else steps
        local = rng.permutation(steps) if scattered else steps
        extents = np.zeros(count, EXTENT)
        extents["segment"], extents["length"] = 1, length
        sums = np.zeros(count, np.uint64) if xxh3 else None

        def call(at: int) -> None:
            extents["offset"] = remote + np.uint64(at)
            addresses = local + np.uint64(self.address + at)
            if write:
                statuses = channel.write(extents, addresses, 1, DEADLINE_S, sums)
            else:
                statuses = channel.read(extents, addresses, DEADLINE_S, sums)
            assert not statuses.any()

        return call

    def seal(self, channel: Any, count: int) -> Callable[[int], None]:
        rows = np.zeros(count, SEAL)
        rows["segment"], rows["slot"], rows["key_length"] = 1, np.arange(count), 16

        def call(_: int) -> None:
            self.seals += 1
            rows["seq"] = self.seals
            batch = SealBatch(1, 1, 1, rows.tobytes(), b"k" * 16 * count)
            assert not channel.seal(batch, DEADLINE_S).any()

        return call

    # ---- cases ------------------------------------------------------------------------------

    def cases(self) -> list[Case]:
        raw_shm = self.shm._readable[1].address

        def memmove(length: int) -> Callable[[int], None]:
            return lambda at: ctypes.memmove(self.address + at, raw_shm + at, length) and None

        def raw(sock: socket.socket, length: int) -> Callable[[int], None]:
            return lambda at: self.raw_read(sock, at, length)

        found: list[Case] = []

        def gbps(name: str, call: Callable[[int], None], length: int, calls: int) -> None:
            found.append((name, "GB/s", lambda _: self.gbps(call, length, calls)))

        def items(name: str, call: Callable[[int], None], length: int, count: int) -> None:
            per_item = 1e6 * count / length  # GB/s -> k items/s
            found.append((name, "k/s", lambda _: self.gbps(call, length, 12) * per_item))

        def us(name: str, call: Callable[[int], None]) -> None:
            found.append((f"{name} p50", "us", lambda _: self.latency_us(call)))
            found.append((f"{name} p99", "us", lambda _: self.latency_us(call, 0.99)))

        gbps("raw tcp 2.5 MiB", raw(self.raw_block, BLOCK), BLOCK, 12)
        gbps("memmove 2.5 MiB", memmove(BLOCK), BLOCK, 12)
        us("raw tcp 4 KiB", raw(self.raw_small, SMALL))
        us("memmove 4 KiB", memmove(SMALL))
        for name, channel in (("tcp", self.tcp), ("shm", self.shm)):
            for write in (False, True):
                verb = "write" if write else "read"
                for xxh3 in (False, True):
                    how = " xxh3" if xxh3 else ""
                    one = self.one(channel, BLOCK, write, xxh3)
                    gbps(f"{name} {verb} 2.5 MiB{how}", one, BLOCK, 12)
                    many = self.batch(channel, BLOCK, MANY, write, xxh3, False)
                    gbps(f"{name} {verb} 64 x 2.5 MiB{how}", many, BLOCK * MANY, 1)
                    us(f"{name} {verb} 4 KiB{how}", self.one(channel, SMALL, write, xxh3))
                    for scattered in (False, True):
                        where = " scattered" if scattered else ""
                        few = self.batch(channel, SMALL, SMALL_MANY, write, xxh3, scattered)
                        items(
                            f"{name} {verb} 256 x 4 KiB{where}{how}",
                            few,
                            SMALL * SMALL_MANY,
                            SMALL_MANY,
                        )
                scattered_blocks = self.batch(channel, BLOCK, MANY, write, True, True)
                gbps(
                    f"{name} {verb} 64 x 2.5 MiB scattered xxh3",
                    scattered_blocks,
                    BLOCK * MANY,
                    1,
                )
            us(f"{name} seal 1", self.seal(channel, 1))
            busy = self.one(channel, SMALL, False, True)
            found.append(
                (
                    f"{name} read 4 KiB beside a busy thread p50",
                    "us",
                    lambda _, busy=busy: self.beside_busy_thread_us(busy),  # type: ignore[misc]
                )
            )
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--spin-us", type=float, default=50.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, list[float]] = defaultdict(list)
    units: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder, options.spin_us * 1e-6)
        try:
            cases = [
                case
                for case in bench.cases()
                if not options.only or case[0].startswith((options.only, "raw", "memmove"))
            ]
            for number in range(options.rounds + 1):
                for name, unit, measure in cases:
                    figure = measure(number)
                    units[name] = unit
                    if number:  # the first round warms up
                        figures[name].append(figure)
        finally:
            bench.close()
    medians = {name: statistics.median(values) for name, values in figures.items()}
    if options.json:
        print(json.dumps({name: [units[name], value] for name, value in medians.items()}))
    else:
        for name, value in medians.items():
            low, high = min(figures[name]), max(figures[name])
            print(f"{name:50s} {value:9.2f} {units[name]:5s} ({low:.2f} ... {high:.2f})")
    missed = 0
    for name, base, least in YARDSTICKS:
        if name in medians and base in medians:
            ratio = medians[name] / medians[base]
            missed += ratio < least
            if not options.json:
                verdict = "ok" if ratio >= least else "MISSED"
                print(f"{name:40s} {ratio:5.2f} x {base} (at least {least}) {verdict}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
