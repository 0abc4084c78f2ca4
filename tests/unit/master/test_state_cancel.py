"""Requests whose answers were never seen: what they gave is taken back, late ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.errors import GrantRevoked, InvalidArgument
from cenote.api.rows import UNIT_BYTES, CommitStatus, PutStatus
from cenote.master import commands as c
from cenote.master.sessions import CANCELLED_MAX, REQUESTS_SEEN
from cenote.v1 import master_pb2 as pb
from master_pool import MasterPool, u64
from unit.master.state_checks import check
from unit.master.state_kit import KIB, Kit, new_node, session_id


@pytest.fixture
def kit() -> Kit:
    return Kit().with_nodes(new_node(1), new_node(2)).with_session(1).with_session(2)


def cancel(kit: Kit, *request_ids: int, session: int = 1) -> None:
    ids = np.array(request_ids, np.uint64)
    kit.apply(c.RenewSession(session_id(session), cancelled_request_ids=ids))
    check(kit.state)


def free_units(kit: Kit) -> int:
    return sum(segment.free_units for segment in kit.state._pool.segments.by_id.values())


def test_a_grant_that_nobody_knows_of_is_free_again(kit: Kit) -> None:
    free = free_units(kit)
    put = kit.start([1, 2, 3], 4 * KIB, request_id=70)
    other = kit.start([4], 4 * KIB, request_id=71)
    assert kit.state.status(kit.now_s).grants == 2
    cancel(kit, 70, session=2)  # that session has no such request
    assert kit.state.status(kit.now_s).grants == 2
    cancel(kit, 70, 70, 999)
    status = kit.state.status(kit.now_s)
    assert (status.grants, status.quarantined_bytes) == (1, 0)
    assert free_units(kit) == free - 4 * KIB // UNIT_BYTES
    assert set(kit.commit(put)) == {CommitStatus.NOT_GRANTED}
    assert kit.commit(other) == [CommitStatus.DECIDED]
    assert kit.put([1]) == [PutStatus.GRANTED]


def test_what_was_decided_meanwhile_stays(kit: Kit) -> None:
    put = kit.start([1, 2], KIB, request_id=70)
    kit.commit(put, [0])
    cancel(kit, 70)
    assert kit.exists(1, 2) == [1, 0]
    assert kit.state.status(kit.now_s).grants == 0


def test_a_request_that_comes_after_its_cancellation_is_refused(kit: Kit) -> None:
    cancel(kit, 70, 71)
    with pytest.raises(GrantRevoked, match="cancelled"):
        kit.start([1], request_id=70)
    kit.put([2])
    with pytest.raises(GrantRevoked, match="cancelled"):
        kit.acquire(2, hold=True, request_id=71)
    status = kit.state.status(kit.now_s)
    assert (status.grants, status.leases) == (0, 0)
    assert kit.start([1], request_id=72).statuses == [PutStatus.GRANTED]


def test_a_retry_of_a_hold_gets_the_same_one(kit: Kit) -> None:
    kit.put([1, 2])
    first = kit.acquire(1, 2, hold=True, request_id=70)
    assert kit.acquire(1, 2, hold=True, request_id=70) == first
    assert kit.state.status(kit.now_s).leases == 1
    assert kit.acquire(1, 2, hold=True, request_id=71).lease_id != first.lease_id
    kit.remove(1)
    cancel(kit, 70)
    assert kit.state.status(kit.now_s).condemned_bytes == KIB
    cancel(kit, 71)
    status = kit.state.status(kit.now_s)
    assert (status.leases, status.condemned_bytes) == (0, 0)
    cancel(kit, 70, 71)


def test_cancellations_are_bounded(kit: Kit) -> None:
    cancel(kit, *range(1, CANCELLED_MAX + 100))
    session = kit.state._pool.sessions.get(session_id(1))
    assert list(session.cancelled) == list(range(100, CANCELLED_MAX + 100))
    pool = MasterPool()
    many = u64(*range(CANCELLED_MAX + 1))
    with pytest.raises(InvalidArgument, match="cancelled"):
        pool.service.renew_session(
            pb.RenewSessionRequest(session_id=pool.session_id, cancelled_request_ids=many), 1.0
        )


def test_a_request_that_comes_once_more_when_its_answer_is_forgotten_gives_nothing(
    kit: Kit,
) -> None:
    """A copy of it that was late on its way: what it was given was nobody's while the session
    lived."""
    for request_id in range(1, 200):
        put = kit.start([request_id], request_id=request_id)
        kit.commit(put)
    kit.apply(c.Remove(*kit.place, kit.digests(3, 150)))
    for late in (3, 150):
        if not kit.state._pool.sessions.get(session_id(1)).replies.get(late << 1):
            with pytest.raises(GrantRevoked, match="not kept"):
                kit.start([late], request_id=late)
    assert kit.state.status(kit.now_s).grants == 0
    check(kit.state)


def test_requests_are_decided_in_any_order_and_each_once(kit: Kit) -> None:
    session = kit.state._pool.sessions.get(session_id(1))
    order = [5, 1, REQUESTS_SEEN, 2, 4 * REQUESTS_SEEN, 3 * REQUESTS_SEEN + 1]
    for request_id in order:
        session.begin(request_id)
        with pytest.raises(GrantRevoked):
            session.begin(request_id)
    with pytest.raises(GrantRevoked):  # so old that it may have been
        session.begin(3 * REQUESTS_SEEN)
    with pytest.raises(GrantRevoked):
        session.begin(7)
