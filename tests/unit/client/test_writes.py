"""Putting: results, races, failed nodes, seals, what is given back."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from cenote.api.errors import (
    CenoteError,
    DeadlineExceeded,
    GrantRevoked,
    InternalError,
    InvalidArgument,
    InvalidBuffer,
    InvalidKey,
    NoSpace,
    ReplicasUnavailable,
    StaleLocation,
    Unavailable,
)
from cenote.client import Client, PutStatus, Sameness
from fake_pool import FakeMaster
from waiting import wait_until

MakeClient = Callable[..., Client]


def digest(master: FakeMaster, key: str) -> bytes:
    return xxh3_128_digest(key.encode(), master.seed)


def test_a_put_is_stored_once(client: Client, master: FakeMaster) -> None:
    assert client.put("a", b"one").stored
    again = client.put("a", b"two")
    assert again.existed
    assert again.same_bytes is None
    assert client.get("a") == b"one"
    assert master.nodes[1].writes == 1  # what exists is not sent


def test_everything_is_sealed_with_key_and_checksum(client: Client, master: FakeMaster) -> None:
    values = {f"{i}" * (1 + 12 * i): os.urandom(50 + i) for i in range(10)}
    client.put_batch(list(values), list(values.values()), replicas=2).raise_for_errors()
    for node in (1, 2):
        sealed = {key: (seq, checksum) for key, seq, checksum in master.nodes[node].sealed.values()}
        assert set(sealed) == {key.encode() for key in values}
        assert sorted(seq for seq, _ in sealed.values()) == list(range(1, 11))
        for key, value in values.items():
            assert sealed[key.encode()][1] == xxh3_64_intdigest(value)
        assert master.nodes[node].seals == 1


def test_long_keys_get_room_behind_their_payload(client: Client, master: FakeMaster) -> None:
    keys = ["k" * 64, "k" * 65, "k" * 512]
    client.put_batch(keys, [b"x" * 10] * 3).raise_for_errors()
    tails = np.frombuffer(master.requests["put_start"][0].tail_lengths, "<u2")
    assert tails.tolist() == [0, 65, 512]
    assert client.get_batch(keys) == [b"x" * 10] * 3


def test_equal_sizes_are_sent_once(client: Client, master: FakeMaster) -> None:
    client.put_batch(["a", "b", "c"], [b"xx", b"yy", b"zz"])
    client.put_batch(["d", "e"], [b"x", b"yy"])
    sizes = [np.frombuffer(r.sizes, "<u8").tolist() for r in master.requests["put_start"]]
    assert sizes == [[2], [1, 2]]


@pytest.mark.parametrize("extent_bytes_max", [1 << 20, 64, 7])
@pytest.mark.parametrize("replicas", [1, 3])
def test_scattered_and_striped_objects(
    client: Client, master: FakeMaster, extent_bytes_max: int, replicas: int
) -> None:
    master.extent_bytes_max = extent_bytes_max
    pieces = [[os.urandom(n) for n in lengths] for lengths in ([5], [1, 99], [64, 64, 3, 40])]
    keys = ["a", "b" * 70, "c"]
    assert client.put_from_batch(keys, pieces, replicas=replicas).stored_count == 3
    assert client.get_batch(keys) == [b"".join(each) for each in pieces]
    assert client.put_from("one", [b"ab", bytearray(b"c")]).stored
    assert client.get("one") == b"abc"
    for obj in master.objects.values():
        assert len(obj.replicas) == replicas or obj.size == 3


def test_a_put_by_address(client: Client) -> None:
    block = np.frombuffer(os.urandom(64), np.uint8)
    base = block.ctypes.data
    table = np.uint64(base) + np.array([[0, 32], [16, 48]], np.uint64)
    results = client.put_from_batch(["a", "b"], addresses=table, lengths=16)
    assert results.stored_count == 2
    assert client.get("b") == block[16:32].tobytes() + block[48:].tobytes()


def test_bad_arguments_are_refused_before_anything_is_sent(
    client: Client, master: FakeMaster
) -> None:
    before = dict(master.calls)
    for wrong, error in (
        (lambda: client.put("a", b""), InvalidBuffer),
        (lambda: client.put("a", "text"), InvalidBuffer),
        (lambda: client.put("", b"x"), InvalidKey),
        (lambda: client.put_batch(["a"], [b"x", b"y"]), InvalidBuffer),
        (lambda: client.put_batch(["a", ""], [b"x", b"y"]), InvalidKey),
        (lambda: client.put("a", b"x", replicas=0), InvalidArgument),
        (lambda: client.put("a", b"x", replicas=True), InvalidArgument),
        (lambda: client.put("a", b"x", replicas=1, min_replicas=2), InvalidArgument),
        (lambda: client.put("a", b"x", durability="eternal"), InvalidArgument),  # type: ignore[arg-type]
        (lambda: client.put("a", b"x", prefix="abc"), InvalidKey),
        (lambda: client.put("a", b"x", ttl_s="5"), InvalidArgument),  # type: ignore[arg-type]
    ):
        with pytest.raises(error):
            wrong()
    assert dict(master.calls) == before
    assert len(client.put_batch([], [])) == 0


def test_options_reach_the_master(make_client: MakeClient, master: FakeMaster) -> None:
    client = make_client(replicas=2, min_replicas=2, durability="journaled", local_first=True)
    client.put("a", b"x")
    options = master.requests["put_start"][-1].options
    assert (options.replicas, options.min_replicas, options.durability) == (2, 2, 2)
    assert options.local_first
    client.put("b", b"x", replicas=1, durability="relaxed", local_first=False, ttl_s=1.5)
    options = master.requests["put_start"][-1].options
    assert (options.replicas, options.min_replicas, options.durability) == (1, 1, 1)
    assert (options.local_first, options.ttl_ms, options.chain) == (False, 1500, False)


def test_of_a_put_chain_its_prefix_is_told_too(client: Client, master: FakeMaster) -> None:
    client.put_batch(["a", "b"], [b"x", b"y"], chain=True)
    client.put_batch(["c", "d"], [b"x", b"y"], prefix=["a", "b"])
    assert [request.options.chain for request in master.requests["put_start"]] == [True, True]
    wait_until(lambda: bool(master.put_chains), what="the whole chain is told")
    assert master.put_chains == [b"".join(digest(master, key) for key in "abcd")]
    assert not master.touched_chains  # which would count as a use


# ---- results ---------------------------------------------------------------------------------


def test_results_tell_keys_apart(client: Client, master: FakeMaster) -> None:
    client.put("there", b"old")
    master.rival_bytes = {digest(master, "same"): b"same", digest(master, "other"): b"OTHER"}
    keys = ["new", "there", "same", "other", "new", "huge"]
    values = [b"new", b"new", b"same", b"other", b"NEW", bytes(2 << 20)]
    results = client.put_batch(keys, values)
    assert results.statuses.tolist() == [
        PutStatus.STORED,
        PutStatus.EXISTED,
        PutStatus.EXISTED,
        PutStatus.EXISTED,
        PutStatus.EXISTED,
        PutStatus.FAILED,
    ]
    assert results.sameness.tolist()[1:4] == [Sameness.UNKNOWN, Sameness.SAME, Sameness.DIFFERENT]
    assert [result.same_bytes for result in results[1:4]] == [None, True, False]
    assert (results.stored_count, results.existed_count, results.failed_count) == (1, 4, 1)
    assert isinstance(results[5].error, NoSpace)
    assert results[-1].error is results[5].error
    assert not results.ok
    with pytest.raises(NoSpace, match=r"1 of 6 keys failed, first key 5 \(b'huge'\)"):
        results.raise_for_errors()
    assert client.get("new") == b"new"
    with pytest.raises(NoSpace):
        client.put("huge", bytes(2 << 20))
    with pytest.raises(IndexError):
        results[6]


def test_min_replicas_is_met_or_refused(client: Client, master: FakeMaster) -> None:
    with pytest.raises(ReplicasUnavailable):
        client.put("a", b"x", replicas=4, min_replicas=4)
    assert client.put("a", b"x", replicas=4, min_replicas=3).stored
    assert master.nodes[3].writes == 1


def test_a_pool_without_daemons_says_so(make_client: MakeClient) -> None:
    client = make_client(of=FakeMaster(nodes=0))
    with pytest.raises(ReplicasUnavailable, match=r"no store daemon .*start one"):
        client.put("a", b"x")


# ---- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("by_lease", [True, False])
def test_a_dead_node_is_replaced_inside_the_call(
    make_client: MakeClient, master: FakeMaster, by_lease: bool
) -> None:
    client = make_client(by_lease=by_lease)
    client._session.channel(1, 1.0)
    master.nodes[1].fault = Unavailable("killed")
    assert client.put("a", b"x").stored
    assert client.get("a") == b"x"
    assert master.nodes[2].writes == 1
    wait_until(lambda: bool(master.aborted), what="the lost grant is aborted")
    # Over shm nothing can be under way any more; over TCP bytes may still arrive.
    assert [unfenced for _, unfenced in master.aborted] == [not by_lease]
    wait_until(lambda: master.failures == [1], what="the failure is reported")
    results = client.put_batch([f"k{i}" for i in range(20)], [b"y"] * 20)
    assert results.stored_count == 20  # node 1 is avoided from the start
    assert len(master.aborted) == 1


def test_a_lost_replica_is_told_at_commit(client: Client, master: FakeMaster) -> None:
    master.nodes[2].fault = Unavailable("killed")
    assert client.put("a", b"x", replicas=2).stored
    lost = np.frombuffer(master.requests["put_commit"][-1].failed_replicas, "<u4")
    assert lost.tolist() == [0, 1]
    assert client.get("a") == b"x"
    assert client.put("b", b"x", replicas=2, min_replicas=2).stored  # on nodes 1 and 3
    assert master.nodes[3].writes == 1


def test_the_first_replica_may_be_the_lost_one(client: Client, master: FakeMaster) -> None:
    master.nodes[1].fault = Unavailable("killed")
    values = [os.urandom(100) for _ in range(5)]
    keys = [f"k{i}" for i in range(5)]
    assert client.put_batch(keys, values, replicas=2).stored_count == 5
    assert client.get_batch(keys) == values


def test_too_few_replicas_written_start_anew(client: Client, master: FakeMaster) -> None:
    master.nodes[2].statuses = [GrantRevoked.code]
    keys = ["a", "b"]
    assert client.put_batch(keys, [b"x", b"y"], replicas=2, min_replicas=2).stored_count == 2
    assert master.calls["put_start"] == 2
    assert client.get_batch(keys) == [b"x", b"y"]


def test_no_node_at_all_is_an_error(client: Client, master: FakeMaster) -> None:
    for node in master.nodes.values():
        node.fault = Unavailable("the whole rack is gone")
    with pytest.raises(NoSpace):  # the last attempt finds no node that isn't avoided
        client.put("a", b"x")
    results = client.put_batch(["a", "b"], [b"x", b"y"])
    assert results.failed_count == 2
    assert client.get("a") is None


def test_a_suspect_is_better_than_no_node(make_client: MakeClient) -> None:
    master = FakeMaster(nodes=2)
    client = make_client(of=master)
    client._session.state.suspect(1, "a while ago")
    assert client.put_batch(["a", "b"], [b"x"] * 2, replicas=2, min_replicas=2).stored_count == 2
    assert master.calls["put_start"] == 2
    client._session.state.suspect(1, "a while ago")
    client._session.state.suspect(2, "a while ago")
    assert client.put("c", b"x").stored
    assert client.put("d", b"x", prefix=["a"]).stored


def test_a_growing_slot_table_is_waited_for(client: Client, master: FakeMaster) -> None:
    master.nodes[1].seal_refusals = 3
    assert client.put_batch(["a", "b"], [b"x", b"y"]).stored_count == 2
    assert master.nodes[1].seals == 4
    master.nodes[1].seal_refusals = 1000
    with pytest.raises((Unavailable, DeadlineExceeded)):
        client.put("c", b"x", deadline_s=0.1)


def test_a_put_that_no_node_seals_in_time_says_so_and_why(
    client: Client, master: FakeMaster
) -> None:
    for node in master.nodes.values():
        node.seal_refusals = 10_000
    with pytest.raises(DeadlineExceeded, match="did not seal it before the deadline: ") as caught:
        client.put("k", b"v" * 100, deadline_s=0.3)
    assert "put_abort" not in str(caught.value)
    assert "cenote nodes" in caught.value.remedy


def die_at_the_seal(master: FakeMaster, node_id: int) -> None:
    def die() -> None:
        master.hooks.clear()
        master.nodes[node_id].fault = Unavailable("died at the seal")

    master.hooks["put_commit"] = die


@pytest.mark.parametrize("count", [1, 3])
def test_what_was_decided_but_not_sealed_is_put_elsewhere(
    client: Client, master: FakeMaster, count: int
) -> None:
    values = {f"k{i}": os.urandom(100) for i in range(count)}
    die_at_the_seal(master, 1)
    if count == 1:
        assert client.put("k0", values["k0"]).stored
    else:
        assert client.put_batch(list(values), list(values.values())).stored_count == count
    assert not master.nodes[1].sealed
    assert len(master.nodes[2].sealed) == count
    assert client.get_batch(list(values)) == list(values.values())
    assert client.stats().failed == 0


@pytest.mark.parametrize("count", [1, 3])
def test_too_few_sealed_replicas_are_put_elsewhere(
    client: Client, master: FakeMaster, count: int
) -> None:
    values = {f"k{i}": os.urandom(100) for i in range(count)}
    die_at_the_seal(master, 2)
    if count == 1:
        assert client.put("k0", values["k0"], replicas=2, min_replicas=2).stored
    else:
        results = client.put_batch(list(values), list(values.values()), replicas=2, min_replicas=2)
        assert results.stored_count == count
    nodes = [sorted(r[0][0] for r in obj.replicas) for obj in master.objects.values()]
    assert nodes == [[1, 3]] * count
    assert client.get_batch(list(values)) == list(values.values())


def test_what_can_be_sealed_nowhere_is_an_error(
    make_client: Callable[..., Client],
) -> None:
    alone = FakeMaster(nodes=1)
    client = make_client(of=alone)
    alone.hooks["put_commit"] = lambda: setattr(
        alone.nodes[1], "fault", Unavailable("died at the seal")
    )
    with pytest.raises(CenoteError, match="died at the seal"):
        client.put("a", b"x")
    alone.nodes[1].fault = None
    assert client.get("a") is None


def test_one_sealed_replica_is_enough(client: Client, master: FakeMaster) -> None:
    master.hooks["put_commit"] = lambda: setattr(
        master.nodes[2], "fault", Unavailable("died at the seal")
    )
    assert client.put("a", b"x", replicas=2).stored
    assert client.get("a") == b"x"


def test_a_lost_reply_is_asked_for_with_the_same_id(client: Client, master: FakeMaster) -> None:
    master.faults["put_start"] = [Unavailable("reply lost")]
    master.faults["put_commit"] = [Unavailable("reply lost")]
    assert client.put("a", b"x").stored
    ids = [request.request_id for request in master.requests["put_start"]]
    assert ids[0] == ids[1]
    ids = [request.request_id for request in master.requests["put_commit"]]
    assert ids[0] == ids[1]
    client.put("b", b"x")
    all_ids = {r.request_id for m in ("put_start", "put_commit") for r in master.requests[m]}
    assert len(all_ids) == 4


def test_a_revoked_grant_is_put_again(client: Client, master: FakeMaster) -> None:
    master.faults["put_commit"] = [GrantRevoked("cut off")]
    assert client.put("a", b"x").stored
    assert master.calls["put_start"] == 2
    master.faults["put_commit"] = [GrantRevoked("cut off")] * 6
    with pytest.raises(GrantRevoked):
        client.put("b", b"x")
    assert master.calls["put_start"] == 8


def test_an_error_gives_the_grant_back(client: Client, master: FakeMaster) -> None:
    master.faults["put_commit"] = [InternalError("a bug")]
    with pytest.raises(InternalError):
        client.put("a", b"x")
    wait_until(lambda: len(master.aborted) == 1, what="the grant is aborted")
    assert master.aborted[0][1] is False  # the write had ended
    assert client._session.aborts == type(client._session.aborts)()


@pytest.mark.parametrize("where", ["put_start", "write", "put_commit"])
def test_ctrl_c_leaves_the_client_usable(
    make_client: MakeClient, master: FakeMaster, where: str
) -> None:
    client = make_client(by_lease=False)

    def interrupt() -> None:
        master.hooks.clear()
        master.nodes[1].on_copy = lambda: None
        raise KeyboardInterrupt

    if where == "write":
        master.nodes[1].on_copy = interrupt
    else:
        master.hooks[where] = interrupt
    with pytest.raises(KeyboardInterrupt):
        client.put("a", b"x")
    if where != "put_start":
        wait_until(lambda: len(master.aborted) == 1, what="the grant is aborted")
        assert master.aborted[0][1] is (where == "write")  # it may still be under way
    assert client.put("a", b"x").stored
    assert client.get("a") == b"x"


@pytest.mark.parametrize("when", ["before", "put_commit"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_session_that_was_cut_off_is_replaced(
    client: Client, master: FakeMaster, when: str, count: int
) -> None:
    client.put("warm", b"x")
    old = client._session.state.session_id
    keys = [f"k{i}" for i in range(count)]

    def cut() -> None:
        master.nodes[1].cut_sessions = {old}

    if when == "before":
        cut()
    else:
        master.hooks[when] = cut
    if count == 1:
        assert client.put("k0", b"y").stored
    else:
        assert client.put_batch(keys, [b"y"] * count).stored_count == count
    assert client._session.state.session_id != old
    assert client.get_batch(keys) == [b"y"] * count
    assert master.calls["hello"] == 2
    master.nodes[1].cut_sessions = {client._session.state.session_id}
    client._space.locations.clear()
    assert client.get_batch(keys) == [b"y"] * count
    assert client.get("warm") == b"x"
    assert master.calls["hello"] == 3


def test_a_refused_seal_is_put_again(client: Client, master: FakeMaster) -> None:
    original = type(client._session.channel(1, 1.0)).seal
    refused: list[int] = []

    def refuse_once(self, batch, deadline_s):  # type: ignore[no-untyped-def]
        if not refused:
            refused.append(1)
            master.objects.clear()  # evicted already, and its slot given to a newer object
            return np.full(1, StaleLocation.code, np.uint8)
        return original(self, batch, deadline_s)

    channel_type = type(client._session.channel(1, 1.0))
    channel_type.seal = refuse_once  # type: ignore[method-assign]
    try:
        assert client.put("a", b"x").stored
    finally:
        channel_type.seal = original  # type: ignore[method-assign]
    assert client.get("a") == b"x"


def test_long_batches_are_cut(make_client: MakeClient, master: FakeMaster) -> None:
    master.batch_keys_max = 7
    client = make_client()
    keys = [f"k{i}" for i in range(30)]
    values = [os.urandom(20) for _ in keys]
    assert client.put_batch(keys, values).stored_count == 30
    assert master.calls["put_start"] == 5
    assert client.get_batch(keys) == values


def test_a_batch_that_is_cut_off_tells_what_it_has(
    make_client: MakeClient, master: FakeMaster
) -> None:
    master.batch_keys_max = 5
    client = make_client()

    def fail_second() -> None:
        if master.calls["put_start"] == 2:
            raise InternalError("a bug")

    master.hooks["put_start"] = fail_second
    results = client.put_batch([f"k{i}" for i in range(10)], [b"x"] * 10)
    assert (results.stored_count, results.failed_count) == (5, 5)
    with pytest.raises(InternalError, match="5 of 10 keys failed, first key 5"):
        results.raise_for_errors()


def test_a_deadline_bounds_the_call(client: Client, master: FakeMaster) -> None:
    master.faults["put_start"] = [Unavailable("nobody there")] * 1000
    with pytest.raises(DeadlineExceeded, match="nobody there"):
        client.put("a", b"x", deadline_s=0.05)
    assert len(master.faults["put_start"]) > 900  # it backs off


def test_an_option_that_puts_do_not_have_is_refused(client: Client, master: FakeMaster) -> None:
    misspelt: dict[str, int] = {"ttl": 60}
    with pytest.raises(InvalidArgument, match=r"no option 'ttl' .*ttl_s"):
        client.put("a", b"x", **misspelt)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="no option 'ttl'"):
        client.put_batch(["a"], [b"x"], **misspelt)  # type: ignore[arg-type]
    assert master.calls["put_start"] == 0
