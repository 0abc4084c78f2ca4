"""Bugs that the simulator found in the SDK's writes, each in its smallest form."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from cenote.api.errors import (
    CenoteError,
    DeadlineExceeded,
    GrantRevoked,
    StaleLocation,
    Unavailable,
)
from cenote.client import Client
from cenote.client.housekeeping import take_some
from cenote.v1 import master_pb2 as pb
from fake_pool import FakeMaster
from waiting import wait_until


@pytest.mark.parametrize("refusals", [1, 2, 5])
def test_seals_that_several_nodes_put_off_several_times_stay_whose_they_are(
    client: Client, master: FakeMaster, refusals: int
) -> None:
    """What was left came node by node, and was looked up as if it were in order: some slots were
    sealed twice and others never, and all of them acknowledged."""
    values = {f"key-{i}": b"value %d" % i for i in range(6)}
    for node in (1, 2):
        master.nodes[node].seal_refusals = refusals
    results = client.put_batch(list(values), list(values.values()), replicas=2, min_replicas=2)
    assert results.stored_count == 6
    for node in (1, 2):
        sealed = {key: seq for key, seq, _ in master.nodes[node].sealed.values()}
        assert sealed == {key.encode(): i + 1 for i, key in enumerate(values)}


@pytest.mark.parametrize("node", [1, 2])
@pytest.mark.parametrize("code", [StaleLocation.code, Unavailable.code])
def test_what_only_another_replica_took_is_committed_with_its_own_checksum(
    client: Client, master: FakeMaster, node: int, code: int
) -> None:
    """Items that a node refused were not hashed on their way there, and counted as if they were:
    the objects were stored with a checksum of 0, which no bytes have."""
    values = {f"key-{i}": b"value %d" % i for i in range(3)}
    master.nodes[node].statuses = [code]
    results = client.put_batch(list(values), list(values.values()), replicas=2, min_replicas=1)
    assert results.stored_count == 3
    other = master.nodes[3 - node]
    sealed = {key: checksum for key, _, checksum in other.sealed.values()}
    assert sealed == {key.encode(): xxh3_64_intdigest(v) for key, v in values.items()}
    assert client.get_batch(list(values)) == list(values.values())


def cancelled(master: FakeMaster) -> list[int]:
    """Ids that the master was told to forget."""
    found: list[int] = []
    for request in master.requests["renew_session"]:
        found += np.frombuffer(request.cancelled_request_ids, "<u8").tolist()
    return found


ASKING: dict[str, Callable[[Client], object]] = {
    "put": lambda c: c.put("key", b"value"),
    "put_batch": lambda c: c.put_batch(["a", "b"], [b"x", b"y"]),
    "view": lambda c: c.view(["here"]).__enter__(),
}


@pytest.mark.parametrize("name", ASKING)
def test_what_an_answer_that_was_never_seen_gave_is_given_back(
    client: Client, master: FakeMaster, name: str
) -> None:
    """It was nobody's for as long as the session lived."""
    client.put("here", b"bytes")
    method = "acquire" if name == "view" else "put_start"
    master.faults[method] = [DeadlineExceeded("no answer came")] * 2
    with pytest.raises(CenoteError):
        ASKING[name](client)
    request_id = master.requests[method][-1].request_id
    assert request_id
    master.faults["renew_session"] = [DeadlineExceeded("not now")]
    wait_until(lambda: cancelled(master) == [request_id] * 2, what="it to be cancelled, and again")


def test_what_was_answered_is_not_cancelled(client: Client, master: FakeMaster) -> None:
    client.put("key", b"value")
    client.put_batch(["a", "b"], [b"x", b"y"])
    with client.view(["key"], copy=True):
        pass
    client.put("key", b"value")
    assert not client.session.state.cancelled
    assert cancelled(master) == []


def test_references_whose_turn_never_came_are_given_back(
    client: Client, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer gave space for some objects, and references to the bytes of others. Where the call
    ended with the former the latter were held for as long as the session lived."""
    start = master.put_start

    def both(request: pb.PutStartRequest, deadline_s: float) -> pb.PutStartResponse:
        reply = start(request, deadline_s)
        reply.alias_grant_id = 777
        return reply

    monkeypatch.setattr(master, "put_start", both)
    master.faults["put_commit"] = [DeadlineExceeded("no answer came")] * 2
    with pytest.raises(CenoteError):
        client.put_batch(["a", "b"], [b"x", b"y"], dedup=True)
    wait_until(lambda: (777, False) in master.aborted, what="the references to be given back")


def test_what_is_to_be_cancelled_is_bounded(client: Client) -> None:
    state = client.session.state
    state.wake = lambda: None
    for request_id in range(1, 5000):
        state.cancel(request_id)
    assert take_some(state.cancelled) == list(range(5000 - 1024, 5000))
    assert take_some(state.cancelled) == []


def test_a_closed_views_hold_is_told_until_the_master_has_answered(
    client: Client, master: FakeMaster
) -> None:
    """It rode on the next request, which may get lost, and then it was held for ever."""
    client.put("key", b"value")
    master.faults["release"] = [DeadlineExceeded("lost"), DeadlineExceeded("lost")]
    with client.view(["key"]):
        assert len(master.leases) == 1
    master.faults["exists"] = [DeadlineExceeded("lost")] * 2
    with pytest.raises(DeadlineExceeded):
        client.exists("key")
    wait_until(lambda: not master.leases, what="the hold to end")
    assert master.calls["release"] == 3


@pytest.mark.parametrize("name", ASKING)
def test_what_was_answered_and_forgotten_is_asked_anew(
    client: Client, master: FakeMaster, name: str
) -> None:
    client.put("here", b"bytes")
    method = "acquire" if name == "view" else "put_start"
    master.faults[method] = [GrantRevoked("the answer is not kept any more")]
    asked = len(master.requests[method])
    ASKING[name](client)
    first, second = (r.request_id for r in master.requests[method][asked:])
    assert first != second
    wait_until(lambda: cancelled(master) == [first], what="the forgotten one to be cancelled")
