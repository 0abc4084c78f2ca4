"""Every transport passes the public contract suite, against a real data server where it has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from cenote.transport.base import SessionIdentity, Transport
from cenote.transport.fake_segment import FakeSegment, FakeSegments
from cenote.transport.memory import MemoryNetwork, MemoryTransport
from cenote.transport.shm import ShmTransport
from cenote.transport.tcp import TcpTransport
from cenote.transport.testing import FarEnd, TransportContract
from cenote.v1 import common_pb2
from data_daemon import SEGMENT_ID, DataDaemon, data_daemon
from tls_kit import Authority

SIZE_BYTES = 40 << 20
IDENTITY = SessionIdentity(b"session of tests", "this boot", 1, common_pb2.Credentials())


class DaemonFarEnd:
    """A data server in another process."""

    identity = IDENTITY
    segment_id = SEGMENT_ID
    size_bytes = SIZE_BYTES

    def __init__(self, daemon: DataDaemon, transport: Transport) -> None:
        self.transport = transport
        self.needs_peer = transport.kind == common_pb2.TRANSPORT_KIND_TCP
        self.outlives_peer = transport.kind == common_pb2.TRANSPORT_KIND_SHM
        self.proven_by_lease = self.outlives_peer
        self.node = daemon.node
        self.pause = daemon.pause
        self.resume = daemon.resume
        self.stop = daemon.kill
        self._daemon = daemon

    def peek(self, offset: int, length: int) -> bytes:
        return self._daemon.memory[offset : offset + length]

    def poke(self, offset: int, data: bytes) -> None:
        self._daemon.memory[offset : offset + len(data)] = data

    def set_epoch(self, epoch: int) -> None:
        assert self._daemon.ask("epoch", epoch)

    def cut(self, session_id: bytes) -> None:
        cut, quarantined = self._daemon.ask("cut", session_id)
        assert [*cut, *quarantined] == [session_id]
        assert bool(quarantined) == self.outlives_peer  # it has the segment mapped


@contextmanager
def daemon_far_end(transport: Transport, **options: Any) -> Iterator[FarEnd]:
    with data_daemon(SIZE_BYTES, **options) as daemon:
        try:
            yield DaemonFarEnd(daemon, transport)
        finally:
            transport.close()


class TestTcp(TransportContract):
    spin_s: ClassVar[float] = 50e-6

    @contextmanager
    def far_end(self) -> Iterator[FarEnd]:
        with daemon_far_end(TcpTransport(spin_s=self.spin_s)) as far:
            yield far


class TestTls(TransportContract):
    """TCP with TLS on it, and a certificate on both sides."""

    @contextmanager
    def far_end(self) -> Iterator[FarEnd]:
        with TemporaryDirectory() as folder:
            authority = Authority(Path(folder))
            server = authority.server(authority.issue("server"))
            transport = TcpTransport(tls=authority.client(authority.issue("client")))
            with daemon_far_end(transport, tls_files=server.files) as far:
                yield far


class TestShm(TransportContract):
    @contextmanager
    def far_end(self) -> Iterator[FarEnd]:
        with daemon_far_end(ShmTransport()) as far:
            yield far


class TestShmAlone(TransportContract):
    """Without helper threads and page tables ahead of use."""

    @contextmanager
    def far_end(self) -> Iterator[FarEnd]:
        transport = ShmTransport(copy_helpers=0, populate_bytes_max=0, spin_s=0.0)
        with daemon_far_end(transport) as far:
            yield far


class MemoryFarEnd:
    """A daemon in this process."""

    identity = IDENTITY
    segment_id = SEGMENT_ID
    size_bytes = SIZE_BYTES
    needs_peer = True
    outlives_peer = False
    proven_by_lease = True

    def __init__(self, segment: FakeSegment) -> None:
        self._segment = segment
        self._segments = FakeSegments([segment])
        self._network = MemoryNetwork([self._segments])
        self.transport = MemoryTransport(self._network)
        self.node = common_pb2.NodeView(
            node_id=1, endpoints=[common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_MEMORY)]
        )

    def peek(self, offset: int, length: int) -> bytes:
        return bytes(self._segment.view[offset : offset + length])

    def poke(self, offset: int, data: bytes) -> None:
        self._segment.view[offset : offset + len(data)] = data

    def set_epoch(self, epoch: int) -> None:
        self._segments.epoch = epoch

    def cut(self, session_id: bytes) -> None:
        self._network.cut([session_id])

    def pause(self) -> None:
        self._network.pause(1)

    def resume(self) -> None:
        self._network.resume(1)

    def stop(self) -> None:
        self._network.stop(1)


class TestMemory(TransportContract):
    @contextmanager
    def far_end(self) -> Iterator[FarEnd]:
        segment = FakeSegment(SEGMENT_ID, SIZE_BYTES)
        far = MemoryFarEnd(segment)
        try:
            yield far
        finally:
            far.transport.close()
