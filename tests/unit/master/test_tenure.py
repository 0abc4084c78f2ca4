"""Until when a master decides, and what it still answers afterwards."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cenote.api.errors import TenureEnded
from cenote.api.rows import ObjectStatus, PutStatus
from cenote.master import commands as c
from cenote.master.effects import NodeServes
from cenote.master.nodes import NodeState
from cenote.master.tenure import DECISIONS
from unit.master.state_checks import pool_of
from unit.master.state_kit import KIB, Kit, new_node, session_id


@pytest.fixture
def kit() -> Kit:
    made = Kit().with_nodes(new_node(1)).with_session(1)
    made.put([1, 2, 3], KIB)
    return made


def extend(kit: Kit, seconds: float) -> None:
    kit.apply(c.ExtendTenure(kit.now_s + seconds))


def acquire(kit: Kit, **options: object) -> c.AcquireReply:
    reply: c.AcquireReply = kit.apply(
        c.Acquire(session_id(1), *kit.place, kit.digests(1), **options)  # type: ignore[arg-type]
    )
    return reply


def status_of(reply: c.AcquireReply) -> int:
    return reply.objects[31]


def longest_lease_s(kit: Kit) -> float:
    leases = pool_of(kit.state).leases.by_id.values()
    return max((lease.deadline_s - kit.now_s for lease in leases), default=0.0)


def test_no_lease_outlives_the_tenure(kit: Kit) -> None:
    extend(kit, 1.5)
    reply = acquire(kit, ttl_ms=9000, lease=True)
    assert status_of(reply) == ObjectStatus.LEASED
    assert 1490 <= reply.ttl_ms <= 1500
    assert longest_lease_s(kit) <= 1.5
    batch: c.AcquireReply = kit.apply(
        c.Acquire(session_id(1), *kit.place, kit.digests(1, 2, 3), ttl_ms=9000, lease=True)
    )
    assert 1490 <= batch.ttl_ms <= 1500
    # Renewed, it goes as far as the tenure does by then.
    kit.now_s += 1.0
    extend(kit, 1.5)
    leases = np.array([reply.lease_id, batch.lease_id], np.uint64)
    kit.apply(c.RenewSession(session_id(1), leases, 9000))
    assert 1.4 < longest_lease_s(kit) <= 1.5


def test_past_the_tenure_lookups_are_answered_without_leases(kit: Kit) -> None:
    extend(kit, 1.0)
    kit.now_s += 1.0
    reply = acquire(kit, ttl_ms=1000, lease=True)
    assert status_of(reply) == ObjectStatus.UNLEASED
    assert not reply.lease_id
    assert kit.apply(c.Exists(*kit.place, kit.digests(1, 9))).tolist() == [1, 0]
    batch: c.AcquireReply = kit.apply(
        c.Acquire(session_id(1), *kit.place, kit.digests(1, 2), ttl_ms=9000, lease=True)
    )
    assert not batch.lease_id
    with pytest.raises(TenureEnded):
        acquire(kit, ttl_ms=0, lease=True, hold=True, request_id=5)
    assert longest_lease_s(kit) == 0


def test_past_the_tenure_nothing_is_decided(kit: Kit) -> None:
    started = kit.start([4], KIB)
    extend(kit, 1.0)
    kit.now_s += 1.0
    before = len(kit.durable())
    place = kit.place
    digests = kit.digests(1)
    for command in (
        c.PutStart(session_id(1), 99, *place, kit.digests(9), np.array([KIB], np.uint64)),
        c.PutCommit(session_id(1), 98, started.reply.grant_id, None, np.array([1], np.uint64)),
        c.PutAbort(session_id(1), started.reply.grant_id),
        c.Remove(*place, digests),
        c.Pin(*place, digests, 0),
        c.Unpin(*place, digests),
        c.RenewSession(session_id(1)),
        c.ResetNamespace("a", 7),
        c.OpenNamespace("new", b"", True, 1, 5),
        kit.attach_command(new_node(2)),
        c.NodeProbed(kit.nodes[1].node_id, False),
    ):
        with pytest.raises(TenureEnded, match="can't prove"):
            kit.apply(command)
    assert kit.apply(c.OpenNamespace("a", b"f", True, 1, 5)).namespace_id == place[0]
    kit.tick(1000.0)
    assert len(kit.durable()) == before
    assert kit.state.status(kit.now_s).objects == 3


def test_when_the_tenure_goes_on_nobody_is_taken_for_silent(kit: Kit) -> None:
    extend(kit, 1.0)
    kit.tick(100.0)
    extend(kit, 1.0)
    kit.tick()
    node = kit.state.nodes(kit.now_s)[0]
    assert node.state == NodeState.ALIVE
    assert kit.put([9], KIB) == [PutStatus.GRANTED], "the session is there, too"
    kit.tick(0.9)
    extend(kit, 10.0)
    kit.tick(5.2)
    assert kit.state.nodes(kit.now_s)[0].state == NodeState.DEAD


def test_every_command_either_decides_or_is_known_not_to() -> None:
    harmless = {
        c.OpenSession,
        c.CloseSession,
        c.CutSession,
        c.OpenNamespace,
        c.Exists,
        c.Acquire,
        c.Release,
        c.Touch,
        c.Piggyback,
        c.ExtendTenure,
        c.Tick,
    }
    assert set(Kit().state._operations) == DECISIONS | harmless


def test_a_master_with_metadata_of_its_own_has_no_end(kit: Kit) -> None:
    assert kit.state._pool.tenure_end_s == math.inf
    assert not kit.new(NodeServes)[1:]
