"""Who is told remote keys and gets queue pairs, where tickets are asked for: devices of memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cenote.api.errors import PermissionDenied, Unauthenticated
from cenote.security.tickets import KeyRing, sign_ticket
from cenote.security.tokens import Role
from cenote.store.gate import Gate
from cenote.store.rdma_host import RdmaHost
from cenote.store.server import DataServer
from cenote.store.sessions import SessionTable
from cenote.transport import wire
from cenote.transport.fake_segment import FakeSegment, FakeSegments
from cenote.transport.rdma_nics import Nics
from cenote.transport.verbs.fake import FakeFabric, FakeVerbs
from cenote.v1 import store_pb2
from fake_rdma import fake_ports
from security_kit import DataSocket

SESSION = b"session of tests"
SEGMENT_BYTES = 1 << 20


class Guarded:
    """A data server that asks for tickets, with RDMA."""

    def __init__(self) -> None:
        self.segments = FakeSegments([FakeSegment(7, SEGMENT_BYTES)])
        self.ring = KeyRing(10.0)
        gate = Gate(self.segments)
        gate.learn(self.ring.packed())
        verbs = FakeVerbs(FakeFabric(), ("fake0",))
        self.host = RdmaHost(self.segments, Nics(verbs, fake_ports(verbs)))
        while not self.host.register_more():
            pass
        self.server = DataServer(
            self.segments,
            SessionTable(self.segments),
            tcp=("127.0.0.1", 0),
            rdma=self.host,
            gate=gate,
        )
        self.server.start()

    def ticket(self, role: Role, *namespaces: str, may_map: bool) -> bytes:
        ticket = store_pb2.AccessTicket(
            session_id=SESSION, holder="ann", role=role, namespaces=namespaces, may_map=may_map
        )
        return sign_ticket(ticket, self.ring.current)

    def socket(self) -> DataSocket:
        assert self.server.tcp_address is not None
        return DataSocket("{}:{}".format(*self.server.tcp_address))

    def close(self) -> None:
        self.server.close()
        self.host.close()
        self.segments.close()


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    guarded = Guarded()
    yield guarded
    guarded.close()


def asked(raw: DataSocket, *, writes: bool | None = None) -> Any:
    """What it is told, having asked for a queue pair (`writes`: which kind) or none."""
    request = store_pb2.RdmaRequest(lane_id=1)
    if writes is not None:
        request.queue_pairs.add(
            device="fake0", port=1, gid_index=1, gid=bytes(16), mtu_code=5, writes=writes
        )
    _, payload = raw.ask(wire.OP_RDMA, 1, wire.encode_rdma_request(request))
    return wire.decode_rdma_reply(bytearray(payload))


def test_who_may_map_all_memory_is_told_the_keys(guarded: Guarded) -> None:
    with guarded.socket() as raw:
        raw.hello(SESSION, guarded.ticket(Role.WRITE, "*", may_map=True))
        reply = asked(raw, writes=True)
        [told] = reply.registrations
        assert told.length == SEGMENT_BYTES
        assert list(told.remote_keys) != [0]
        assert len(reply.queue_pairs) == guarded.host.queue_pairs == 1


def test_one_tenant_is_told_nothing(guarded: Guarded) -> None:
    with guarded.socket() as raw:
        raw.hello(SESSION, guarded.ticket(Role.WRITE, "ann/*", may_map=False))
        with pytest.raises(PermissionDenied, match="RDMA"):
            asked(raw, writes=False)
    assert guarded.host.queue_pairs == 0


@pytest.mark.parametrize("ticket", [b"", b"x" * 100])
def test_nobody_is_told_nothing(guarded: Guarded, ticket: bytes) -> None:
    with guarded.socket() as raw, pytest.raises(Unauthenticated):
        raw.hello(SESSION, ticket)
    assert guarded.host.queue_pairs == 0


def test_who_only_reads_gets_no_pair_that_writes(guarded: Guarded) -> None:
    """And the one for reading refuses writes, whatever key they name."""
    ticket = guarded.ticket(Role.READ, "*", may_map=True)
    with guarded.socket() as raw:
        raw.hello(SESSION, ticket)
        with pytest.raises(PermissionDenied, match="does not write"):
            asked(raw, writes=True)
    assert guarded.host.queue_pairs == 0
    with guarded.socket() as raw:
        raw.hello(SESSION, ticket)
        assert len(asked(raw, writes=False).queue_pairs) == 1
