"""The master as a service in process: microseconds of CPU a call, from the request's bytes to the
reply's, journal included; and how long a restart takes.

python benchmarks/micro/bench_service.py [--metadata memory:|file] [--objects 300000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np

from cenote.master.compaction import CompactionLimits
from cenote.master.compactor import compact
from cenote.master.file_backend import FileBackend
from cenote.master.journal_files import list_directory
from cenote.master.memory_backend import MemoryBackend
from cenote.master.metadata import MetadataBackend
from cenote.master.service import MasterService
from cenote.master.state_config import StateConfig
from cenote.rpc.lane_server import LaneConnection
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb

SESSION = b"s" * 16
GIB = 1 << 30
NO_COMPACTION = CompactionLimits(journal_bytes_min=1 << 50, journal_files_max=1 << 20)
# Nothing here sends heartbeats or renews sessions.
CONFIG = StateConfig(node_dead_s=1e6, session_ttl_s=1e6)


class Connection:
    """As much of a lane connection as the service looks at."""

    session = SESSION


class Pool:
    """A service with one node, called as the lane calls it: dispatch, then flush."""

    def __init__(self, backend: MetadataBackend, size_bytes: int) -> None:
        self.service = MasterService(backend, CONFIG)
        for _ in self.service.load():
            pass
        self._connection = cast(LaneConnection, Connection())
        self.service.hello(pb.HelloRequest(session_id=SESSION), 1.0)
        self.service.open_namespace(pb.OpenNamespaceRequest(name="bench", create=True), 5.0)
        segment = pb.SegmentInfo(
            tier=common_pb2.TIER_DRAM,
            incarnation=b"i",
            size_bytes=size_bytes,
            ready_bytes=size_bytes,
            unit_bytes=64,
            slots=1 << 22,
        )
        request = pb.AttachRequest(node_uuid=b"n" * 16, node_name="node", segments=[segment])
        self.service.attach(request, 5.0)
        self._requests = 0

    def call(self, method: int, body: bytes) -> bytes:
        reply = self.service.dispatch(self._connection, method, body, 5000)
        self.service.flush()
        assert isinstance(reply, bytes)
        return reply

    def request_id(self) -> int:
        self._requests += 1
        return self._requests

    def start_body(self, digests: bytes) -> bytes:
        sizes = (64).to_bytes(8, "little")
        return pb.PutStartRequest(
            keys=batch(digests), sizes=sizes, request_id=self.request_id()
        ).SerializeToString()

    def commit_body(self, started: bytes, n: int) -> bytes:
        grant_id = pb.PutStartResponse.FromString(started).grant_id
        return pb.PutCommitRequest(
            grant_id=grant_id, checksums=bytes(8 * n), request_id=self.request_id()
        ).SerializeToString()

    def put(self, digests: bytes) -> None:
        started = self.call(pb.MASTER_METHOD_PUT_START, self.start_body(digests))
        body = self.commit_body(started, len(digests) // 16)
        self.call(pb.MASTER_METHOD_PUT_COMMIT, body)


def batch(digests: bytes) -> common_pb2.KeyBatch:
    return common_pb2.KeyBatch(namespace_id=1, generation=1, digests=digests)


def show(name: str, n: int, seconds: list[float], calls: int) -> None:
    us = statistics.median(seconds) / calls * 1e6
    print(f"{name:12s} n={n:4d} {us:9.2f} us/call {us / n:8.3f} us/key")


def lookups(pool: Pool, known: np.ndarray, n: int, calls: int, rounds: int) -> None:
    rng = np.random.default_rng(1)

    def exists(digests: bytes) -> tuple[int, bytes]:
        request = pb.ExistsRequest(keys=batch(digests))
        return pb.MASTER_METHOD_EXISTS, request.SerializeToString()

    def match(digests: bytes) -> tuple[int, bytes]:
        request = pb.MatchRequest(keys=batch(digests))
        return pb.MASTER_METHOD_MATCH, request.SerializeToString()

    def acquire(digests: bytes) -> tuple[int, bytes]:
        request = pb.AcquireRequest(keys=batch(digests), lease=True, ttl_ms=1)
        return pb.MASTER_METHOD_ACQUIRE, request.SerializeToString()

    makers: list[Callable[[bytes], tuple[int, bytes]]] = [exists, match, acquire]
    for make in makers:
        seconds = []
        for _ in range(rounds):
            picked = rng.integers(0, len(known), (calls, n))
            requests = [make(known[row].tobytes()) for row in picked]
            began = time.thread_time()
            for method, body in requests:
                pool.call(method, body)
            seconds.append(time.thread_time() - began)
            pool.service.tick()
        show(make.__name__, n, seconds, calls)


def writes(pool: Pool, n: int, calls: int, rounds: int) -> None:
    start_s: list[float] = []
    commit_s: list[float] = []
    for _ in range(rounds):
        start = commit = 0.0
        for _ in range(calls):
            body = pool.start_body(os.urandom(16 * n))
            began = time.thread_time()
            started = pool.call(pb.MASTER_METHOD_PUT_START, body)
            start += time.thread_time() - began
            body = pool.commit_body(started, n)
            began = time.thread_time()
            pool.call(pb.MASTER_METHOD_PUT_COMMIT, body)
            commit += time.thread_time() - began
        start_s.append(start)
        commit_s.append(commit)
    show("put_start", n, start_s, calls)
    show("put_commit", n, commit_s, calls)


def restart(directory: Path, what: str) -> None:
    backend = FileBackend(directory, compaction=NO_COMPACTION)
    began = time.perf_counter()
    service = MasterService(backend, CONFIG)
    for _ in service.load():
        pass
    took_s = time.perf_counter() - began
    objects = service.state.status(0.0).objects
    print(f"restart from {what}: {objects} objects in {took_s:.2f} s, {backend.bytes_used} bytes")
    service.close()


def restarts(objects: int) -> None:
    for n, count in ((512, objects), (1, objects // 4)):
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            pool = Pool(FileBackend(directory, compaction=NO_COMPACTION), 2 * objects * 64 + GIB)
            for _ in range(0, count, n):
                pool.put(os.urandom(16 * n))
            pool.service.close()
            restart(directory, f"a journal of puts of {n}")
            through = list_directory(directory).journals[-1].first - 1
            began = time.perf_counter()
            compact(directory, through)
            print(f"compaction: {time.perf_counter() - began:.2f} s")
            restart(directory, "a snapshot")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metadata", choices=["memory:", "file"], default="file")
    parser.add_argument("--objects", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        backend: MetadataBackend = MemoryBackend()
        if options.metadata == "file":
            backend = FileBackend(Path(scratch))
        pool = Pool(backend, 8 * GIB)
        known = np.frombuffer(os.urandom(16 * options.objects), "V16")
        for i in range(0, options.objects, 512):
            pool.put(known[i : i + 512].tobytes())
        gc.collect()
        gc.freeze()
        gc.disable()
        for n, calls in ((1, 2000), (128, 100), (512, 50)):
            lookups(pool, known, n, calls, options.rounds)
            writes(pool, n, calls, options.rounds)
        pool.service.close()
    restarts(options.objects)


if __name__ == "__main__":
    main()
