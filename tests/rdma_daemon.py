"""Data servers with real RDMA devices, and transports to them. Needs a device; skips without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cenote.api.errors import ResourceUnavailable
from cenote.transport.base import SessionIdentity
from cenote.transport.rdma import RdmaTransport
from cenote.transport.rdma_lane import LaneSettings
from cenote.transport.rdma_nics import Nics, find_nics
from cenote.v1 import common_pb2
from data_daemon import SEGMENT_ID, DataDaemon, data_daemon

__all__ = ["RdmaFarEnd", "patient", "rdma_far_end", "rdma_nics"]

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

    def __init__(self, daemon: DataDaemon, transport: RdmaTransport) -> None:
        self.transport = transport
        self.node = daemon.node
        self.pause = daemon.pause
        self.resume = daemon.resume
        self.stop = daemon.kill
        self.daemon = daemon

    def peek(self, offset: int, length: int) -> bytes:
        return self.daemon.memory[offset : offset + length]

    def poke(self, offset: int, data: bytes) -> None:
        self.daemon.memory[offset : offset + len(data)] = data

    def set_epoch(self, epoch: int) -> None:
        assert self.daemon.ask("epoch", epoch)

    def cut(self, session_id: bytes) -> None:
        assert self.daemon.ask("cut", session_id) == ([session_id], [])


@contextmanager
def rdma_far_end(library: str, **options: Any) -> Iterator[RdmaFarEnd]:
    """Another process that serves over all devices here, and a transport to it."""
    transport = RdmaTransport(rdma_nics(library), settings=patient)
    try:
        with data_daemon(SIZE_BYTES, rdma=library, **options) as daemon:
            yield RdmaFarEnd(daemon, transport)
    finally:
        transport.close()
