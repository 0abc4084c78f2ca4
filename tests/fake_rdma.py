"""A daemon with RDMA devices that are only memory, and a transport to it, in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from ipaddress import IPv6Address
from types import TracebackType
from typing import Self

from cenote.store.rdma_host import RdmaHost
from cenote.store.server import DataServer
from cenote.store.sessions import SessionTable
from cenote.transport.base import SessionIdentity
from cenote.transport.fake_segment import FakeSegment, FakeSegments
from cenote.transport.nics.advertised import encode_ports
from cenote.transport.nics.choice import advertised
from cenote.transport.nics.facts import ETHERNET, ROCE_V2, Gid, NicPort
from cenote.transport.nics.routing import Route
from cenote.transport.rdma import RdmaTransport
from cenote.transport.rdma_nics import Nics
from cenote.transport.verbs.fake import FakeFabric, FakeVerbs
from cenote.v1 import common_pb2
from link import Link

__all__ = ["FakeFarEnd", "fake_ports"]

SEGMENT_ID = 7
SIZE_BYTES = 40 << 20
IDENTITY = SessionIdentity(b"session of tests", "this boot", 1, common_pb2.Credentials())


def fake_ports(verbs: FakeVerbs) -> list[NicPort]:
    """What /sys would tell of fake devices."""
    return [
        NicPort(name, 1, ETHERNET, "ACTIVE", gids=(Gid(1, IPv6Address(device.gid(1, 1)), ROCE_V2),))
        for name, device in verbs.devices.items()
    ]


class FakeFarEnd:
    """See `cenote.transport.testing.FarEnd`. The daemon's connections can be held up."""

    identity = IDENTITY
    segment_id = SEGMENT_ID
    size_bytes = SIZE_BYTES
    needs_peer = False
    outlives_peer = False
    proven_by_lease = False

    def __init__(
        self,
        devices: Sequence[str] = ("fake0",),
        *,
        chunk_bytes: int = 16 << 20,
        connections_max: int = 256,
    ) -> None:
        self.fabric = FakeFabric()
        self.near_verbs = FakeVerbs(self.fabric, devices)
        self.far_verbs = FakeVerbs(self.fabric, devices)
        self.segment = FakeSegment(SEGMENT_ID, SIZE_BYTES)
        self.segments = FakeSegments([self.segment])
        self.sessions = SessionTable(self.segments)
        self._options = chunk_bytes, connections_max
        self._serve(0)
        assert self.server.tcp_address is not None
        far_nics = self.host.nics
        self.link = Link(self.server.tcp_address[1])
        self.transport = RdmaTransport(
            Nics(self.near_verbs, fake_ports(self.near_verbs)),
            ask_route=lambda query: Route.DIRECT,
        )
        address = f"127.0.0.1:{self.link.port}"
        self.node = common_pb2.NodeView(
            node_id=1,
            name="far",
            endpoints=[
                common_pb2.Endpoint(
                    kind=common_pb2.TRANSPORT_KIND_RDMA,
                    address=address,
                    device_info=encode_ports(advertised(far_nics.ports)),
                ),
                common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_TCP, address=address),
            ],
        )
        self._stopped = False

    def _serve(self, port: int) -> None:
        nics = Nics(self.far_verbs, fake_ports(self.far_verbs))
        chunk_bytes, connections_max = self._options
        self.host = RdmaHost(self.segments, nics, chunk_bytes=chunk_bytes)
        while not self.host.register_more():
            pass
        self.server = DataServer(
            self.segments,
            self.sessions,
            tcp=("127.0.0.1", port),
            rdma=self.host,
            connections_max=connections_max,
        )

    def restart(self) -> None:
        """As another process would: the same address, other queue pairs, other keys."""
        assert self.server.tcp_address is not None
        port = self.server.tcp_address[1]
        self.server.close()
        self.host.close()
        self._serve(port)
        self.server.start()

    def __enter__(self) -> Self:
        self.server.start()
        self.link.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.transport.close()
        self.stop()
        self.link.__exit__(kind, error, trace)
        self.segments.close()

    def peek(self, offset: int, length: int) -> bytes:
        return bytes(self.segment.view[offset : offset + length])

    def poke(self, offset: int, data: bytes) -> None:
        self.segment.view[offset : offset + len(data)] = data

    def set_epoch(self, epoch: int) -> None:
        self.segments.epoch = epoch
        assert self.sessions.end_older_writes(epoch)

    def cut(self, session_id: bytes) -> None:
        assert self.sessions.cut([session_id]) == ([session_id], [])

    def pause(self) -> None:
        self.link.cut()

    def resume(self) -> None:
        self.link.heal()

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            with contextlib.suppress(OSError):
                self.server.close()
            self.host.close()
