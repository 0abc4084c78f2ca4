"""Data servers with real RDMA devices, and transports to them. Needs a device; skips without."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest

from cenote.api.errors import CenoteError, ResourceUnavailable
from cenote.transport.base import SessionIdentity
from cenote.transport.rdma import RdmaTransport
from cenote.transport.rdma_lane import LaneSettings
from cenote.transport.rdma_nics import Nics, find_nics
from cenote.transport.testing_support import LocalMemory, batch
from cenote.v1 import common_pb2
from data_daemon import SEGMENT_ID, DataDaemon, data_daemon
from waiting import stop_process

__all__ = ["RdmaFarEnd", "StoppableWriter", "patient", "rdma_far_end", "rdma_nics"]

SIZE_BYTES = 40 << 20
IDENTITY = SessionIdentity(b"session of tests", "this boot", 1, common_pb2.Credentials())
patient = LaneSettings(timeout_exponent=18, probe_s=2.0)
"""An emulated machine may stall for longer than a dead peer would be waited for otherwise."""


def rdma_nics(library: str) -> Nics:
    """The devices here; skips where there are none."""
    try:
        return find_nics(library)
    except ResourceUnavailable as error:
        pytest.skip(f"{error} (see make test-rdma)")


class RdmaFarEnd:
    """See `cenote.transport.testing.FarEnd`: a data server in another process."""

    identity = IDENTITY
    segment_id = SEGMENT_ID
    size_bytes = SIZE_BYTES
    needs_peer = False
    outlives_peer = False
    proven_by_lease = False

    def __init__(self, daemon: DataDaemon, transport: RdmaTransport, library: str) -> None:
        self.transport = transport
        self.node = daemon.node
        self.pause = daemon.pause
        self.resume = daemon.resume
        self.stop = daemon.kill
        self.daemon = daemon
        self._library = library
        self.later: DataDaemon | None = None

    def restart(self) -> None:
        """Another process, with other memory, at the same address."""
        self.daemon.kill()
        options = {"rdma": self._library, "port": self.daemon.tcp[1]}
        self.later = DataDaemon(self.size_bytes, f"{self.daemon.unix_path}.2", options)
        self.daemon = self.later

    def peek(self, offset: int, length: int) -> bytes:
        return self.daemon.memory[offset : offset + length]

    def poke(self, offset: int, data: bytes) -> None:
        self.daemon.memory[offset : offset + len(data)] = data

    def set_epoch(self, epoch: int) -> None:
        assert self.daemon.ask("epoch", epoch)

    def silence(self) -> None:
        """Its queue pairs answer no more, and nothing tells its clients."""
        assert all(self.daemon.ask("silence"))

    def cut(self, session_id: bytes) -> None:
        assert self.daemon.ask("cut", session_id) == ([session_id], [])


@contextmanager
def rdma_far_end(
    library: str, *, size_bytes: int = SIZE_BYTES, **options: Any
) -> Iterator[RdmaFarEnd]:
    """Another process that serves over all devices here, and a transport to it."""
    transport = RdmaTransport(rdma_nics(library), settings=patient)
    try:
        with data_daemon(size_bytes, rdma=library, **options) as daemon:
            far = RdmaFarEnd(daemon, transport, library)
            far.size_bytes = size_bytes
            try:
                yield far
            finally:
                if far.later is not None:
                    far.later.close()
    finally:
        transport.close()


def _write_for_ever(pipe: Connection, library: str, node: bytes, session_id: bytes) -> None:
    """Write registered memory, until an error, which is told."""
    transport = RdmaTransport(find_nics(library), settings=patient)
    identity = SessionIdentity(session_id, "this boot", os.getpid(), common_pb2.Credentials())
    channel = transport.connect(common_pb2.NodeView.FromString(node), identity, 1, 60.0)
    memory = LocalMemory(StoppableWriter.size_bytes)
    transport.register(memory.address, StoppableWriter.size_bytes, memory)
    step = StoppableWriter.size_bytes // 64
    extents = batch([(SEGMENT_ID, i * step, step) for i in range(64)])
    addresses = np.arange(64, dtype=np.uint64) * np.uint64(step) + np.uint64(memory.address)
    writes = 0
    try:
        while True:
            channel.write(extents, addresses, 7, 60.0)
            assert transport.counters.tcp_calls == 0
            writes += 1
            if writes % 4 == 0:
                pipe.send("written")
    except CenoteError as error:
        pipe.send(type(error).__name__)


class StoppableWriter:
    """Another process that writes over RDMA all the time."""

    size_bytes = 4 << 20
    session_id = b"one that writes!"

    def __init__(self, library: str, node: common_pb2.NodeView) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=_write_for_ever,
            args=(other, library, node.SerializeToString(), self.session_id),
            daemon=True,
        )
        self._process.start()
        other.close()
        assert self._pipe.recv() == "written"

    def pause(self) -> None:
        stop_process(self._process.pid or 0)

    def resume(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGCONT)

    def wait_for_writes(self) -> None:
        """So many that some began after this was called."""
        while self._pipe.poll():
            assert self._pipe.recv() == "written"
        for _ in range(2):
            assert self._pipe.recv() == "written"

    def error(self) -> str:
        """What ended it."""
        while True:
            told = self._pipe.recv()
            if told != "written":
                return str(told)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.join(10)
        self._pipe.close()
