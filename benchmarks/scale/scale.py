"""How far one master goes: metadata traffic of 1,000 daemons and 10,000 clients, in one process.

python benchmarks/scale/scale.py [--nodes 1000] [--clients 10000] [--requests 3000] [--json]

The master's service is called as its lane calls it, from a request's bytes to the reply's, journal
included, on a clock of its own: daemons beat, clients renew their sessions, and each request of an
engine is one lookup of a prefix chain under a lease and, for what was missing, a put in two calls.
What is counted is CPU time of the thread, so other load on the machine counts little. What the lane
itself costs for each call (sockets, frames) is measured beside it, over TCP on loopback, and added.
From that follows how many requests a second fill one core, which is what a master has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any, cast

import numpy as np
import uvloop

from cenote.api.rows import OBJECT
from cenote.master.memory_backend import MemoryBackend
from cenote.master.service import MasterService
from cenote.master.state_config import StateConfig
from cenote.rpc.lane_client import LaneClient
from cenote.rpc.lane_server import LaneConnection, LaneServer
from cenote.runtime.clock import ManualClock
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb

GIB = 1 << 30
HEARTBEAT_S = 1.0
RENEWAL_S = 10.0 / 3
"""A third of a session's life, as the client does."""
LANE_CALLS = 20_000
LANE_CLIENTS = 16


@dataclass
class Cost:
    """Calls of one kind, and the CPU time that they took."""

    calls: int = 0
    cpu_s: float = 0.0

    @property
    def us(self) -> float:
        return self.cpu_s / max(1, self.calls) * 1e6


@dataclass
class Lane:
    """As much of a lane connection as the service looks at."""

    session: bytes = b""


@dataclass
class Pool:
    """The service with its nodes and clients."""

    nodes: int
    clients: int
    clock: ManualClock = field(default_factory=ManualClock)
    costs: dict[str, Cost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = StateConfig(sessions_max=max(100_000, 2 * self.clients))
        self.service = MasterService(MemoryBackend(), config, clock=self.clock)
        for _ in self.service.load():
            pass
        self._connection = cast(LaneConnection, Lane())
        for number in range(self.nodes):
            self._attach(number)
        self.service.open_namespace(pb.OpenNamespaceRequest(name="scale", create=True), 5.0)
        self.sessions = [number.to_bytes(16, "little") for number in range(1, self.clients + 1)]
        for session in self.sessions:
            self.timed("hello", lambda s=session: self._hello(s))
        self._requests = 0

    def _attach(self, number: int) -> None:
        segment = pb.SegmentInfo(
            tier=common_pb2.TIER_DRAM,
            incarnation=number.to_bytes(16, "little"),
            size_bytes=64 * GIB,
            ready_bytes=64 * GIB,
            unit_bytes=64,
            slots=1 << 16,
        )
        request = pb.AttachRequest(
            node_uuid=number.to_bytes(16, "little"), node_name=f"n{number}", segments=[segment]
        )
        self.timed("attach", lambda: self.service.attach(request, 5.0))

    def _hello(self, session: bytes) -> None:
        self.service.hello(pb.HelloRequest(session_id=session), 1.0)

    def timed(self, kind: str, act: Any) -> Any:
        cost = self.costs.setdefault(kind, Cost())
        began_s = time.thread_time()
        result = act()
        cost.cpu_s += time.thread_time() - began_s
        cost.calls += 1
        return result

    def call(self, kind: str, session: bytes, method: int, message: Any) -> bytes:
        """One call as the lane makes it; the client's part of it is not counted."""
        body = message.SerializeToString()
        cast(Lane, self._connection).session = session

        def act() -> bytes:
            reply = self.service.dispatch(self._connection, method, body, 5000)
            self.service.flush()
            assert isinstance(reply, bytes), f"{kind} was not answered at once"
            return reply

        return cast(bytes, self.timed(kind, act))

    def next_request(self) -> int:
        self._requests += 1
        return self._requests


def heartbeat(pool: Pool, number: int) -> None:
    message = pb.HeartbeatRequest(node_id=number + 1, epoch=pool.service.epoch)
    pool.timed("heartbeat", lambda: pool.service.heartbeat(message, 5.0))


def renew(pool: Pool, session: bytes) -> None:
    message = pb.RenewSessionRequest(session_id=session)
    pool.call("renew session", session, pb.MASTER_METHOD_RENEW_SESSION, message)


def engine_request(pool: Pool, session: bytes, chain: np.ndarray, size_bytes: int) -> int:
    """A lookup of all blocks, and a put of those that were missing; how many these were."""
    keys = common_pb2.KeyBatch(namespace_id=1, generation=1, digests=chain.tobytes())
    asked = pb.AcquireRequest(keys=keys, lease=True, ttl_ms=1000, chain=True, session_id=session)
    reply = pool.call("acquire", session, pb.MASTER_METHOD_ACQUIRE, asked)
    found = np.frombuffer(pb.AcquireResponse.FromString(reply).objects, OBJECT)
    present = int(np.count_nonzero(found["status"]))
    missing = chain[present:]
    if not len(missing):
        return 0
    start = pb.PutStartRequest(
        keys=common_pb2.KeyBatch(namespace_id=1, generation=1, digests=missing.tobytes()),
        sizes=size_bytes.to_bytes(8, "little"),
        session_id=session,
        request_id=pool.next_request(),
    )
    reply = pool.call("put start", session, pb.MASTER_METHOD_PUT_START, start)
    commit = pb.PutCommitRequest(
        grant_id=pb.PutStartResponse.FromString(reply).grant_id,
        checksums=bytes(8 * len(missing)),
        session_id=session,
        request_id=pool.next_request(),
    )
    pool.call("put commit", session, pb.MASTER_METHOD_PUT_COMMIT, commit)
    return len(missing)


def chains(rng: np.random.Generator, blocks: int, new: int) -> Iterator[np.ndarray]:
    """Prefix chains: most of each was seen before, its last `new` blocks were not."""
    known = [rng.integers(1, 1 << 62, (blocks, 2)).astype(np.uint64) for _ in range(512)]
    yield from known
    while True:
        chain = known[int(rng.integers(len(known)))].copy()
        chain[blocks - new :] = rng.integers(1, 1 << 62, (new, 2)).astype(np.uint64)
        yield chain


def play(pool: Pool, given: argparse.Namespace) -> float:
    """All requests, and what daemons and clients send meanwhile; simulated seconds."""
    rng = np.random.default_rng(given.seed)
    source = chains(rng, given.blocks, given.new)
    for _ in range(512):
        engine_request(pool, pool.sessions[0], next(source), given.block_bytes)
    for kind in ("acquire", "put start", "put commit"):
        pool.costs[kind] = Cost()
    began_s = pool.clock.monotonic_s()
    beats = renewals = 0
    for number in range(given.requests):
        now_s = number / given.rate
        pool.clock.advance_s(began_s + now_s - pool.clock.monotonic_s())
        while beats < now_s / HEARTBEAT_S * pool.nodes:
            heartbeat(pool, beats % pool.nodes)
            beats += 1
        while renewals < now_s / RENEWAL_S * pool.clients:
            renew(pool, pool.sessions[renewals % pool.clients])
            renewals += 1
        session = pool.sessions[int(rng.integers(pool.clients))]
        engine_request(pool, session, next(source), given.block_bytes)
        if number % 16 == 0:
            pool.timed("tick", pool.service.tick)
    return given.requests / given.rate


# ---- the lane ---------------------------------------------------------------------------------


def _serve(pipe: Pipe, reply_bytes: int) -> None:
    answer = bytes(reply_bytes)

    async def main() -> None:
        lane = LaneServer(lambda _c, _m, _body, _d: answer, lambda _c, _p: b"")
        host, port = await lane.listen_tcp()
        pipe.send(f"tcp://{host}:{port}")
        told = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), told.set)
        await told.wait()

    uvloop.run(main())


def lane_us(request_bytes: int, reply_bytes: int) -> float:
    """CPU microseconds of a server's process for each call over TCP, frames and sockets alone: of
    clients with a connection each, which wait for each reply."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs, reply_bytes), daemon=True)
    server.start()
    address = ours.recv()
    idle_s = _cpu_s(server.pid)
    body = bytes(request_bytes)

    def ask() -> None:
        with LaneClient(address, b"") as client:
            for _ in range(LANE_CALLS // LANE_CLIENTS):
                client.call(3, body, 10.0)

    with ThreadPoolExecutor(LANE_CLIENTS) as threads:
        for asked in [threads.submit(ask) for _ in range(LANE_CLIENTS)]:
            asked.result()
    used_s = _cpu_s(server.pid) - idle_s
    ours.send(None)
    server.join(10.0)
    return used_s / LANE_CALLS * 1e6


def _cpu_s(pid: int | None) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- the report -------------------------------------------------------------------------------

BACKGROUND = ("heartbeat", "renew session")
REQUEST = ("acquire", "put start", "put commit")


def report(pool: Pool, given: argparse.Namespace, simulated_s: float) -> dict[str, Any]:
    lane = lane_us(16 * given.blocks, 64 * given.blocks)
    costs = pool.costs
    tick_share = costs["tick"].cpu_s / simulated_s
    background = sum(
        (costs[kind].us + lane) * rate / 1e6
        for kind, rate in zip(
            BACKGROUND, (pool.nodes / HEARTBEAT_S, pool.clients / RENEWAL_S), strict=True
        )
    )
    calls = sum(costs[kind].calls for kind in REQUEST) / given.requests
    request_us = sum(costs[kind].cpu_s for kind in REQUEST) / given.requests * 1e6 + calls * lane
    saturation = (1 - background - tick_share) / (request_us / 1e6)
    return {
        "nodes": pool.nodes,
        "clients": pool.clients,
        "blocks": given.blocks,
        "new_blocks": given.new,
        "us_per_call": {kind: round(cost.us, 1) for kind, cost in costs.items()},
        "lane_us_per_call": round(lane, 1),
        "background_core_share": round(background, 3),
        "tick_core_share": round(tick_share, 4),
        "us_per_request": round(request_us, 1),
        "requests_per_s_at_one_core": round(saturation),
        "keys_per_s_at_one_core": round(saturation * given.blocks),
        "objects": pool.service.state.status(pool.clock.monotonic_s()).objects,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a simulated second")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of each request's prefix")
    parser.add_argument("--new", type=int, default=16, help="of these, seen for the first time")
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    pool = Pool(given.nodes, given.clients)
    found = report(pool, given, play(pool, given))
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        if isinstance(value, dict):
            for kind, us in value.items():
                print(f"{kind:<28} {us:>10.1f} us")
        else:
            print(f"{name.replace('_', ' '):<28} {value:>10}")


if __name__ == "__main__":
    main()
