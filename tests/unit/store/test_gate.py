"""What sessions may touch: tickets, grants, and whose each unit of a segment is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from cenote.api.errors import (
    GrantRevoked,
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from cenote.api.rows import EXTENT, SEAL
from cenote.security.tickets import KeyRing, pack_proof, sign_ticket
from cenote.security.tokens import Role
from cenote.store.gate import Gate, Pass
from cenote.transport.fake_segment import FakeSegment, FakeSegments
from cenote.v1 import store_pb2

ANN, BOB = 3, 4
SEGMENT = 7


def extents(*pieces: tuple[int, int], slot: int = 0) -> NDArray[np.void]:
    rows = [(SEGMENT, slot + i, offset, length) for i, (offset, length) in enumerate(pieces)]
    return np.array(rows, EXTENT)


def seals(rows: NDArray[np.void]) -> NDArray[np.void]:
    made = np.zeros(len(rows), SEAL)
    for name in ("segment", "slot", "offset", "length"):
        made[name] = rows[name]
    return made


@dataclass
class World:
    gate: Gate
    segment: FakeSegment
    ring: KeyRing

    def session(self, holder: str, role: Role = Role.WRITE, *, may_map: bool = False) -> Pass:
        session_id = holder.encode().ljust(16, b".")
        ticket = store_pb2.AccessTicket(
            session_id=session_id,
            holder=holder,
            role=role,
            namespaces=["*"] if may_map else [f"{holder}/*"],
            may_map=may_map,
        )
        return self.gate.admit(sign_ticket(ticket, self.ring.current), session_id)

    def show(self, who: Pass, grant_id: int, namespace_id: int, rows: NDArray[np.void]) -> None:
        key = self.ring.current[1]
        proof = pack_proof(key, who.session_id, grant_id, namespace_id, SEGMENT, rows.tobytes())
        self.gate.prove(who.session_id, grant_id, namespace_id, rows, proof)

    def seal(self, namespace_id: int, rows: NDArray[np.void]) -> None:
        self.gate.sealed(namespace_id, seals(rows))


@pytest.fixture
def world() -> Iterator[World]:
    segment = FakeSegment(SEGMENT, 1 << 20)
    segments = FakeSegments([segment])
    segments.namespaces = {ANN: "ann/llama", BOB: "bob/llama"}
    gate, ring = Gate(segments), KeyRing(10.0)
    gate.learn(ring.packed())
    yield World(gate, segment, ring)
    segments.close()


def test_what_was_written_under_a_grant_is_its_namespaces(world: World) -> None:
    ann, bob = world.session("ann"), world.session("bob")
    rows = extents((0, 100), (128, 64))
    assert not ann.may_read(world.segment, 0, 100)  # nobody's yet
    assert not ann.may_write_at(5, rows)
    world.show(ann, 5, ANN, rows)
    assert ann.may_write_at(5, rows)
    assert ann.may_write_one(5, SEGMENT, 0, 192)  # neighbours, in one piece
    assert not ann.may_write_at(6, rows)
    assert not ann.may_write_one(5, SEGMENT, 0, 193)
    assert not bob.may_write_at(5, rows)
    for who, may in ((ann, True), (bob, False)):
        assert who.may_read(world.segment, 0, 100) is may
    world.seal(ANN, rows)
    assert ann.may_read(world.segment, 0, 192)
    assert not bob.may_read(world.segment, 0, 1)
    assert not ann.may_write_at(5, rows)  # the grant ended


def test_reads_are_judged_row_by_row(world: World) -> None:
    ann, bob = world.session("ann"), world.session("bob")
    world.seal(ANN, extents((0, 64)))
    world.seal(BOB, extents((64, 64)))
    rows = extents((0, 64), (64, 64), (128, 64))
    for who, wanted in ((ann, [0, 27, 27]), (bob, [27, 0, 27])):
        statuses = np.zeros(3, np.uint8)
        assert who.deny_reads(rows, statuses, world.gate._segments) == 2
        assert statuses.tolist() == wanted
    wide = world.session("wide", may_map=True)
    assert wide.deny_reads(rows, np.zeros(3, np.uint8), world.gate._segments) == 0


def test_the_later_grant_wins(world: World) -> None:
    ann, bob = world.session("ann"), world.session("bob")
    rows = extents((0, 4096))
    world.show(ann, 5, ANN, rows)
    world.show(bob, 6, BOB, rows)  # ann gave it up
    assert not ann.may_write_at(5, rows)
    assert not ann.may_read(world.segment, 0, 64)
    assert bob.may_write_at(6, rows)
    world.show(ann, 5, ANN, rows)  # once more: that changes nothing
    assert bob.may_write_at(6, rows)
    other = world.session("carl")
    with pytest.raises(GrantRevoked):  # one that was held back
        world.show(other, 4, ANN, rows)


def test_a_grant_of_an_old_key_takes_nothing_that_was_sealed_since(world: World) -> None:
    ann = world.session("ann")
    rows = extents((0, 4096))
    old = pack_proof(world.ring.current[1], ann.session_id, 5, ANN, SEGMENT, rows.tobytes())
    world.ring.tick(0.0)
    world.ring.tick(100.0)
    world.gate.learn(world.ring.packed())
    world.seal(BOB, rows)  # over shared memory: no grant was shown
    with pytest.raises(GrantRevoked):
        world.gate.prove(ann.session_id, 5, ANN, rows, old)


def test_seals_are_of_what_was_written_as_that_namespaces(world: World) -> None:
    ann, bob = world.session("ann"), world.session("bob")
    rows = extents((0, 4096), slot=9)
    assert not ann.may_seal(ANN, seals(rows)).any()
    world.show(ann, 5, ANN, rows)
    assert ann.may_seal(ANN, seals(rows)).all()
    assert not ann.may_seal(BOB, seals(rows)).any()
    assert not bob.may_seal(BOB, seals(rows)).any()
    assert not bob.may_seal(ANN, seals(rows)).any()
    assert not ann.may_seal(ANN, seals(extents((0, 4096), slot=8))).any()  # another's slot
    mate = world.session("ann")  # finishes the work of a writer that died
    assert mate.may_seal(ANN, seals(rows)).all()
    assert not world.session("ann", Role.READ).may_seal(ANN, seals(rows)).any()


def test_tickets(world: World) -> None:
    ticket = store_pb2.AccessTicket(session_id=b"s" * 16, holder="ann", role=Role.READ)
    signed = sign_ticket(ticket, world.ring.current)
    assert world.gate.admit(signed, b"s" * 16).holder == "ann"
    for wrong in (b"", b"x", signed[:-1], signed[:-1] + b"\0", signed + b"\0"):
        with pytest.raises(Unauthenticated):
            world.gate.admit(wrong, b"s" * 16)
    with pytest.raises(Unauthenticated, match="another session"):
        world.gate.admit(signed, b"t" * 16)
    with pytest.raises(Unavailable):
        world.gate.admit(sign_ticket(ticket, (1, bytes(32))), b"s" * 16)
    for _ in range(3):  # a key is known for a while after it was replaced
        assert world.gate.admit(signed, b"s" * 16)
        world.ring.tick(float(world.ring.current[0]) * 1e6)
        world.gate.learn(world.ring.packed())
        if world.ring.current[0] - store_pb2.AccessTicket.FromString(signed[:-32]).key_id > 1:
            break
    with pytest.raises(PermissionDenied, match="forged"):
        world.gate.prove(
            b"s" * 16, 5, ANN, extents((0, 64)), SEGMENT.to_bytes(4, "little") + bytes(16)
        )


def test_before_a_master_was_met_nobody_is_let_in(world: World) -> None:
    gate = Gate(FakeSegments([world.segment]))
    with pytest.raises(Unavailable):
        gate.admit(b"anything")
    gate.learn(b"")  # of a master without tokens
    with pytest.raises(Unavailable):
        gate.admit(b"anything")


def test_a_batch_of_nothing_but_addresses_that_are_not_there(world: World) -> None:
    """Whoever guesses addresses finds the end of the segment, too: that was an IndexError."""
    ann = world.session("ann")
    rows = extents((2 << 20, 4096), (3 << 20, 4096))
    statuses = np.full(len(rows), InvalidArgument.code, np.uint8)  # as the segments say
    segments = world.gate._segments
    assert ann.deny_reads(rows, statuses, segments) == 0
    assert statuses.tolist() == [InvalidArgument.code] * 2
    assert ann.deny_reads(rows[:0], statuses[:0], segments) == 0
