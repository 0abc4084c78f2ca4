"""The lane beside a raw socket echo: latency, CPU time per call, calls per second.

    python benchmarks/micro/bench_lane.py [--rounds 5] [--calls 3000] [--json] [--check]

Both servers are uvloop echoes in a process of their own, the client is this process. Which core a
process wakes up on changes a round trip from 7 to 80 µs, so the places are fixed: `cross` puts the
client and the servers on different cores (an idle core has to wake up for each message), `same` on
one (no wake-up: what is left is the work, so this is where CPU time per call is read). Kinds are
interleaved in each round, a figure is the median of the rounds' medians, a ratio is against `raw`
of the same transport, size and place.

`busy` repeats the calls beside a Python thread that never rests, as an engine may have: there it
counts how often a call has to win the GIL back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import uvloop

from cenote.rpc.lane_client import LaneClient
from cenote.rpc.lane_server import LaneServer

CLIENT_CPU_US_MAX = 8.0  # unix, 64 B, same core
UNIX_RATIO_MAX = 1.3  # against raw, cross; the better of spinning and not
SIZES = (64, 8192)
BATCH = 32


def serve(pipe: Any, directory: str) -> None:
    class RawEcho(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.write = transport.write

        def data_received(self, data: bytes) -> None:
            self.write(data)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        lane = LaneServer(lambda _c, _m, body, _d: body, lambda _c, _p: b"")
        await lane.listen_unix(f"{directory}/lane.sock")
        _, lane_port = await lane.listen_tcp()
        await loop.create_unix_server(RawEcho, f"{directory}/raw.sock")
        raw = await loop.create_server(RawEcho, "127.0.0.1", 0)
        pipe.send((lane_port, raw.sockets[0].getsockname()[1]))
        await asyncio.Event().wait()

    uvloop.run(main())


class Kind:
    """One way to make a call."""

    def __init__(self, name: str, call: Callable[[bytes], object], close: Callable[[], None]):
        self.name = name
        self.call = call
        self.close = close


def raw_kinds(address: str | tuple[str, int]) -> list[Kind]:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    sock = socket.socket(family)
    sock.connect(address)
    if family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(1 << 16)

    def raw(message: bytes) -> None:
        sock.send(message)
        sock.recv_into(buffer)

    def raw_spin(message: bytes) -> None:
        sock.send(message)
        for _ in range(60):
            try:
                sock.recv_into(buffer, 0, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                pass
        sock.recv_into(buffer)

    return [Kind("raw", raw, sock.close), Kind("raw spin 60", raw_spin, lambda: None)]


def lane_kinds(address: str) -> list[Kind]:
    kinds = []
    for spin_polls in (0, 60):
        client = LaneClient(address, b"", spin_polls=spin_polls)

        def call(message: bytes, client: LaneClient = client) -> bytes:
            return client.call(3, message, 5.0)

        kinds.append(Kind(f"lane spin {spin_polls}", call, client.close))
    return kinds


def measure(call: Callable[[bytes], object], message: bytes, calls: int) -> dict[str, float]:
    for _ in range(min(200, calls)):
        call(message)
    times_ns = []
    now_ns = time.perf_counter_ns
    cpu_s = time.thread_time()
    for _ in range(calls):
        start_ns = now_ns()
        call(message)
        times_ns.append(now_ns() - start_ns)
    cpu_us = (time.thread_time() - cpu_s) / calls * 1e6
    times_ns.sort()
    return {
        "p50_us": times_ns[calls // 2] / 1e3,
        "p99_us": times_ns[calls * 99 // 100] / 1e3,
        "cpu_us": cpu_us,
    }


def busy_thread(stop: threading.Event) -> threading.Thread:
    def burn() -> None:
        while not stop.is_set():
            for _ in range(1000):
                pass

    thread = threading.Thread(target=burn, name="busy", daemon=True)
    thread.start()
    return thread


def pipelined(address: str, calls: int) -> float:
    """Calls per second of one thread that sends batches of 32."""
    with LaneClient(address, b"") as client:
        bodies = [b"x" * 64] * BATCH
        client.call_many(3, bodies, 5.0)
        start_s = time.perf_counter()
        for _ in range(calls // BATCH):
            client.call_many(3, bodies, 5.0)
        return calls / (time.perf_counter() - start_s)


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    cpus = sorted(os.sched_getaffinity(0))
    context = get_context("spawn")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = context.Pipe()
        server = context.Process(target=serve, args=(theirs, directory), daemon=True)
        server.start()
        assert server.pid is not None
        lane_port, raw_port = ours.recv()
        transports = {
            "unix": raw_kinds(f"{directory}/raw.sock")
            + lane_kinds(f"unix://{directory}/lane.sock"),
            "tcp": raw_kinds(("127.0.0.1", raw_port)) + lane_kinds(f"127.0.0.1:{lane_port}"),
        }
        try:
            for place, server_cpu in (("cross", cpus[-1]), ("same", cpus[0])):
                os.sched_setaffinity(server.pid, {server_cpu})
                os.sched_setaffinity(0, {cpus[0]})
                for transport, kinds in transports.items():
                    for size in SIZES:
                        rows += interleaved(place, transport, kinds, size, options)
                address = f"unix://{directory}/lane.sock"
                per_s = statistics.median(pipelined(address, options.calls * 4) for _ in range(3))
                rows.append({"place": place, "kind": f"pipelined x{BATCH}", "calls_per_s": per_s})
            os.sched_setaffinity(server.pid, {cpus[-1]})
            os.sched_setaffinity(0, {cpus[0]})
            stop = threading.Event()
            thread = busy_thread(stop)
            few = argparse.Namespace(rounds=options.rounds, calls=100)
            rows += interleaved("busy", "unix", transports["unix"], 64, few)
            stop.set()
            thread.join()
        finally:
            for kinds in transports.values():
                for kind in kinds:
                    kind.close()
            server.kill()
            server.join()
    return rows


def interleaved(
    place: str, transport: str, kinds: list[Kind], size: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    message = b"x" * size
    rounds: dict[str, list[dict[str, float]]] = {kind.name: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in kinds:
            rounds[kind.name].append(measure(kind.call, message, options.calls))
    base_us = median_of(rounds["raw"])["p50_us"]
    rows = []
    for name, measured in rounds.items():
        figures = median_of(measured)
        head = {"place": place, "transport": transport, "size": size, "kind": name}
        rows.append({**head, **figures, "ratio": figures["p50_us"] / base_us})
    return rows


def verdicts(rows: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """What was promised: (what, measured, at most)."""
    found = []
    for size in SIZES:
        ratios = [
            row["ratio"]
            for row in rows
            if (row.get("transport"), row.get("size"), row["place"]) == ("unix", size, "cross")
            and row["kind"].startswith("lane")
        ]
        found.append((f"unix {size} B, cross: p50 against raw", min(ratios), UNIX_RATIO_MAX))
    (cpu_us,) = (
        row["cpu_us"]
        for row in rows
        if (row.get("transport"), row.get("size"), row["place"]) == ("unix", 64, "same")
        and row["kind"] == "lane spin 60"
    )
    found.append(("unix 64 B, same: client CPU µs per call", cpu_us, CLIENT_CPU_US_MAX))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="the lane beside a raw socket echo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=3000, help="per kind and round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    options = parser.parse_args()
    rows = run(options)
    results = verdicts(rows)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            if "calls_per_s" in row:
                print(f"{row['place']:6} {row['kind']:>24} {row['calls_per_s']:10,.0f} calls/s")
                continue
            print(
                f"{row['place']:6} {row['transport']:5} {row['size']:5} B {row['kind']:12}"
                f" p50 {row['p50_us']:7.1f}  p99 {row['p99_us']:8.1f}"
                f"  cpu {row['cpu_us']:5.1f} µs  x{row['ratio']:.2f}"
            )
        for what, measured, most in results:
            print(f"{what}: {measured:.2f} (at most {most})")
    missed = any(measured > most for _, measured, most in results)
    return int(options.check and missed)


if __name__ == "__main__":
    sys.exit(main())
