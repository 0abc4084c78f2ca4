"""Nodes that do not answer in time: budgets, one more try where nothing else has the bytes; and a
master that can't give space yet."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from cenote.api.errors import DeadlineExceeded, ReplicasUnavailable, Unavailable
from cenote.client import Client
from cenote.client.plan.budgets import (
    LEASE_SHARE,
    PROBE_WAIT_S,
    attempt_budget_s,
    transfer_s,
)
from cenote.client.plan.grants import LeaseHold
from cenote.client.plan.peers import Peers
from cenote.v1 import common_pb2
from fake_pool import FakeMaster

MakeClient = Callable[..., Client]
SILENT = DeadlineExceeded("it did not finish before the deadline")


def fill(client: Client, count: int, **options: Any) -> dict[str, bytes]:
    values = {f"key-{i}": os.urandom(100) for i in range(count)}
    client.put_batch(list(values), list(values.values()), **options).raise_for_errors()
    return values


def test_a_frozen_node_leaves_time_for_another_replica() -> None:
    assert attempt_budget_s(5.0, 4096, alternatives=True) == pytest.approx(transfer_s(4096))
    assert attempt_budget_s(0.2, 4096, alternatives=True) == pytest.approx(0.08)
    assert attempt_budget_s(2.0, 1 << 30, alternatives=True) == pytest.approx(0.8)


def test_a_frozen_node_leaves_time_for_a_last_try() -> None:
    first_s = attempt_budget_s(5.0, 4096, alternatives=False)
    assert first_s == pytest.approx(transfer_s(4096))
    assert attempt_budget_s(4.0, 4096, alternatives=False, last=True) == pytest.approx(3.6)
    # Too little for two: all of it at once.
    assert attempt_budget_s(0.5, 4096, alternatives=False) == pytest.approx(0.45)
    assert first_s * 2 + PROBE_WAIT_S < 1.0


@pytest.mark.parametrize("count", [1, 3])
def test_a_silent_node_that_lives_is_tried_once_more(
    client: Client, master: FakeMaster, count: int
) -> None:
    values = fill(client, count)
    master.nodes[1].fault = SILENT

    def answers() -> None:
        master.nodes[1].fault = None

    master.hooks["report_failure"] = answers
    if count == 1:
        assert client.get("key-0") == values["key-0"]
    else:
        assert client.get_batch(list(values)) == list(values.values())
    assert 1 in master.failures
    assert client.session.state.suspects == {}
    assert client.stats().unreachable_misses == 0


@pytest.mark.parametrize("count", [1, 3])
def test_a_silent_node_that_is_gone_costs_a_miss(
    client: Client, master: FakeMaster, count: int
) -> None:
    values = fill(client, count)
    master.nodes[1].fault = SILENT
    master.hooks["report_failure"] = master.objects.clear  # the master hides what is there alone
    assert client.get_batch(list(values)) == [None] * count
    assert client.get("key-0") is None


def test_a_node_that_stays_silent_costs_a_miss_and_no_endless_loop(
    client: Client, master: FakeMaster
) -> None:
    values = fill(client, 2)
    master.nodes[1].fault = SILENT
    assert client.get_batch(list(values)) == [None, None]
    assert client.stats().unreachable_misses == 2


def test_of_two_replicas_a_silent_one_is_tried_once(
    make_client: MakeClient, master: FakeMaster
) -> None:
    client = make_client(by_lease=False, location_cache_entries=16)
    values = fill(client, 1, replicas=2)
    assert client.get("key-0") == values["key-0"]
    master.nodes[1].fault = SILENT
    assert client.get("key-0") == values["key-0"]  # from the cached location, then the other one
    assert client.stats().node_failures == 1
    client._space.locations.clear()
    assert client.get("key-0") == values["key-0"]
    assert client.stats().node_failures == 1


def test_a_batch_that_met_a_silent_node_at_a_cached_location_warns_the_next_call(
    make_client: MakeClient, master: FakeMaster
) -> None:
    client = make_client(by_lease=False, location_cache_entries=16)
    values = fill(client, 3, replicas=2)
    assert client.get_batch(list(values)) == list(values.values())
    master.nodes[1].fault = SILENT
    assert client.get_batch(list(values)) == list(values.values())
    assert 1 in client.session.state.avoided()


def test_who_is_down_in_the_view_is_avoided_until_it_is_not(client: Client) -> None:
    state = client.session.state
    down = common_pb2.ClusterView(
        view_version=5,
        nodes=[
            common_pb2.NodeView(node_id=1, state=common_pb2.NODE_STATE_DEAD),
            common_pb2.NodeView(node_id=2, state=common_pb2.NODE_STATE_ALIVE),
            common_pb2.NodeView(node_id=3, state=common_pb2.NODE_STATE_DETACHED),
        ],
    )
    state.suspect(2, "a moment ago")
    state.use_peers(Peers(down))
    assert state.peers.down == {1, 3}
    assert state.avoided() == set()  # the master doesn't name them anyway
    assert set(state.suspects) == {1, 3}
    state.suspect(1, "of course")
    assert not [node for node, _ in state.failures if node == 1]  # the master knows
    back = common_pb2.ClusterView(
        view_version=6,
        nodes=[common_pb2.NodeView(node_id=i, state=common_pb2.NODE_STATE_ALIVE) for i in (1, 2)],
    )
    state.use_peers(Peers(back))
    assert state.peers.down == set()
    assert state.suspects == {}


def fall_silent_after_commit(master: FakeMaster) -> None:
    def silent() -> None:
        master.nodes[1].fault = SILENT

    master.hooks["put_commit"] = silent


@pytest.mark.parametrize("count", [1, 3])
def test_an_unanswered_seal_is_asked_for_once_more(
    client: Client, master: FakeMaster, count: int
) -> None:
    fall_silent_after_commit(master)

    def answers() -> None:
        master.hooks.clear()
        master.nodes[1].fault = None

    master.hooks["report_failure"] = answers
    values = fill(client, count)
    assert client.get_batch(list(values)) == list(values.values())
    assert len(master.nodes[1].sealed) == count


@pytest.mark.parametrize("count", [1, 3])
def test_an_unanswered_seal_is_done_elsewhere_once_the_node_is_hidden(
    client: Client, master: FakeMaster, count: int
) -> None:
    fall_silent_after_commit(master)

    def hide() -> None:
        master.hooks.clear()
        master.down = {1}
        master.view_version += 1
        master.objects.clear()

    master.hooks["report_failure"] = hide
    values = fill(client, count)
    assert client.get_batch(list(values)) == list(values.values())
    assert not master.nodes[1].sealed
    assert len(master.nodes[2].sealed) == count
    assert client.stats().failed == 0


@pytest.mark.parametrize("count", [1, 3])
def test_too_few_nodes_without_silent_ones_that_live_are_tried_once_more(
    client: Client, master: FakeMaster, count: int
) -> None:
    """On a busy machine all of them may be slow at once: a put failed after a tenth of its time."""
    for node in (1, 2):
        master.nodes[node].fault = SILENT

    def answer() -> None:
        for node in (1, 2):
            master.nodes[node].fault = None

    master.hooks["report_failure"] = answer
    values = fill(client, count, replicas=2, min_replicas=2)
    assert client.get_batch(list(values)) == list(values.values())
    assert {1, 2} <= set(master.failures)
    assert client.stats().failed == 0
    assert client.session.state.suspects == {}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("hidden", [True, False])
def test_too_few_nodes_without_those_that_stay_silent_end_the_put(
    client: Client, master: FakeMaster, hidden: bool, count: int
) -> None:
    for node in (1, 2):
        master.nodes[node].fault = SILENT

    def hide() -> None:
        master.down = {1, 2}
        master.view_version += 1

    if hidden:
        master.hooks["report_failure"] = hide
    keys = [f"k{i}" for i in range(count)]
    results = client.put_batch(keys, [b"x"] * count, replicas=2, min_replicas=2)
    assert all(isinstance(result.error, ReplicasUnavailable) for result in results)
    assert master.calls["put_start"] == (3 if hidden else 4)
    assert client.put("one", b"x").stored


@pytest.mark.parametrize("count", [1, 3])
def test_a_put_waits_for_a_master_that_was_just_restarted(
    client: Client, master: FakeMaster, count: int
) -> None:
    master.not_yet = 7  # more often than a put is started anew for any other reason
    values = fill(client, count)
    assert client.get_batch(list(values)) == list(values.values())
    master.not_yet = 1_000
    with pytest.raises(Unavailable, match="just restarted"):
        client.put("late", b"x", deadline_s=0.2)
    (failed,) = client.put_batch(["late"], [b"x"], deadline_s=0.2)
    assert isinstance(failed.error, Unavailable)
    assert client.exists_batch(list(values)).all()


def test_space_is_asked_for_ahead_only_where_the_next_put_would_take_it(
    client: Client, master: FakeMaster
) -> None:
    """Puts that avoid a node take none: what they asked for piled up to half of the pool."""
    state, spares = client.session.state, client._space.spares

    def asked() -> list[int]:
        spares._credit = 64
        master.requests["put_start"].clear()
        client.put_batch([f"k{master.calls['put_start']}-{i}" for i in range(3)], [b"x"] * 3)
        return [request.spare_count > 0 for request in master.requests["put_start"]]

    assert asked() == [True]
    state.suspect(3, "a moment ago")
    assert asked() == [False]
    master.down = {3}
    state.use_peers(Peers(master.view()))
    assert asked() == [True]  # whoever is down gets nothing, so nothing is avoided


def test_a_view_that_comes_once_more_ends_no_suspicion(client: Client, master: FakeMaster) -> None:
    """It does with the hello of each new connection to the master."""
    session = client.session
    session.state.suspect(1, "a moment ago")
    session.take_view(master.view(), 1)
    assert session.state.avoided() == {1}
    master.view_version += 1
    session.take_view(master.view(), 1)
    assert session.state.avoided() == set()


def test_a_lease_that_began_after_the_last_renewal_is_renewed_in_time(client: Client) -> None:
    housekeeper, holds = client.session.housekeeper, client.session.state.holds
    now_s = 100.0
    holds[1] = LeaseHold(1, 3000, now_s + LEASE_SHARE * 3.0)
    holds[2] = LeaseHold(2, 0, now_s - 50.0)  # an acquired lease: its owner's affair
    assert not housekeeper._holds_are_due(now_s)
    assert not housekeeper._holds_are_due(now_s + 0.8)
    assert housekeeper._holds_are_due(now_s + 1.0)


@pytest.mark.parametrize("count", [1, 3])
def test_who_alone_has_the_bytes_is_tried_though_it_failed_another_call_just_now(
    client: Client, master: FakeMaster, count: int
) -> None:
    """A daemon that was just restarted is met through what was left of the one before."""
    values = fill(client, count)
    state = client.session.state
    state.suspect(1, "its connection was closed")
    assert client.get_batch(list(values)) == list(values.values())
    assert state.suspects == {}  # it works
    state.suspect(1, "its connection was closed")
    assert client.get("key-0") == values["key-0"]
    assert client.stats().unreachable_misses == 0


@pytest.mark.parametrize("count", [1, 3])
def test_who_failed_again_after_a_pause_is_avoided_though_nothing_else_has_the_bytes(
    client: Client, master: FakeMaster, count: int
) -> None:
    values = fill(client, count)
    state = client.session.state
    master.nodes[1].fault = SILENT
    state.suspect(1, "a moment ago")
    tries: list[int] = []
    master.nodes[1].on_copy = lambda: tries.append(1)
    assert client.get_batch(list(values)) == [None] * count
    assert len(tries) == 1  # once: whoever met it first has the master look at it
    _, pause_s = state.suspects[1]
    state.suspects[1] = (0.0, pause_s)  # that pause is over
    state.suspect(1, "again")
    assert client.get_batch(list(values)) == [None] * count
    assert len(tries) == 1


def test_a_replica_that_is_not_suspected_comes_first(
    make_client: MakeClient, master: FakeMaster
) -> None:
    client = make_client(by_lease=False)
    values = fill(client, 3, replicas=2)
    client.session.state.suspect(1, "a moment ago")
    reads = master.nodes[1].reads
    assert client.get_batch(list(values)) == list(values.values())
    assert master.nodes[1].reads == reads


@pytest.mark.parametrize("count", [1, 3])
def test_a_newer_view_that_came_while_a_node_failed_is_looked_at(
    client: Client, master: FakeMaster, count: int
) -> None:
    """A daemon was restarted. Where it is now was learned in the background, between the call's
    failure at the old place and its look for news: then nothing speaks of news any more."""
    node = master.nodes[1]

    def restarted() -> None:
        if node.fault is not None:
            node.fault = None
            master.view_version += 1
            client.session.take_view(master.view(), 1)
            raise Unavailable("the connection was closed")

    node.on_copy = restarted
    values = fill(client, count)
    for _ in range(2):
        node.fault = Unavailable("it was restarted")
        assert client.get_batch(list(values)) == list(values.values())
        node.fault = Unavailable("it was restarted")
        assert client.get("key-0") == values["key-0"]
    assert client.stats().unreachable_misses == 0
    master.down = {2, 3}
    client.remove_batch(list(values))
    node.fault = Unavailable("it was restarted")
    values = fill(client, count)
    node.fault = Unavailable("it was restarted")
    client.put("one", b"x")
    assert client.session.state.avoided() == set()
