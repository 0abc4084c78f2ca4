"""Clients of several masters: whom they ask, whom they follow, how long that takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cenote.api.errors import (
    CenoteError,
    DeadlineExceeded,
    NotLeader,
    TenureEnded,
    Unavailable,
)
from cenote.client import master_stub
from cenote.client.aio import AsyncClient
from cenote.client.client import Client
from cenote.client.master_stub import LaneMaster
from cenote.client.masters import HELLO_S, SILENT_HELLO_S, Masters, seek_pause_s
from cenote.v1 import master_pb2 as pb
from fake_pool import FakeMaster
from master_thread import MasterThread
from promptness import ends_within
from waiting import wait_until

Connect = Callable[..., Client]


@pytest.fixture
def other(master: FakeMaster, tmp_path: Path) -> Iterator[MasterThread]:
    """A second master over the same metadata; a standby at first."""
    with MasterThread(master, tmp_path / "two.sock") as thread:
        yield thread


def take_over(old: MasterThread, new: MasterThread) -> None:
    new.epoch = old.epoch + 5
    new.leader = ""


# ---- whom to ask ------------------------------------------------------------------------------


def test_the_order_of_questions() -> None:
    masters = Masters(["a", "b", "a", "c"])
    assert masters.known == ["a", "b", "c"]
    assert masters.in_order(()) == ["b", "c", "a"]
    assert masters.in_order(["c", "d"]) == ["c", "d", "b", "a"]
    masters.silent("c")
    assert masters.in_order(["c"]) == ["b", "a", "c"]
    assert (masters.patience_s("a"), masters.patience_s("c")) == (HELLO_S, SILENT_HELLO_S)
    masters.heard("c")
    assert masters.in_order(()) == ["b", "c", "a"]
    masters.choose("d")
    assert masters.known == ["d", "a", "b", "c"]
    for i in range(40):
        masters.choose(f"x{i}")
    assert len(masters.known) == 16


def test_leaders_are_followed_upwards_only() -> None:
    masters = Masters(["a", "b"])
    assert not masters.accepts(pb.HelloResponse(epoch=9, is_leader=False))
    assert masters.accepts(pb.HelloResponse(epoch=9, is_leader=True))
    masters.followed(pb.HelloResponse(epoch=9, is_leader=True))
    assert not masters.accepts(pb.HelloResponse(epoch=8, is_leader=True))
    assert masters.accepts(pb.HelloResponse(epoch=9, is_leader=True))
    masters.told(12)
    assert not masters.accepts(pb.HelloResponse(epoch=9, is_leader=True))
    lone = Masters(["a"])
    lone.followed(pb.HelloResponse(epoch=9, is_leader=True))
    assert lone.accepts(pb.HelloResponse(epoch=1, is_leader=True)), "its metadata was wiped"


def test_pauses_are_bounded() -> None:
    pauses = [seek_pause_s(attempt, 0.999) for attempt in range(1, 40)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.02
    assert pauses[-1] < 0.2
    assert seek_pause_s(1, 0.0) == 0.01


def test_finding_the_leader_where_it_was_ends_by_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After some rounds in vain it has waited long enough; it is asked at once."""
    now_s = 100.0
    answers = iter(["", "", "", "", "", "a:1"])

    class Closed:
        def is_set(self) -> bool:
            return False

        def wait(self, seconds: float) -> bool:
            nonlocal now_s
            now_s += seconds
            return False

    with monkeypatch.context() as patched:
        patched.setattr(master_stub, "time", SimpleNamespace(monotonic=lambda: now_s))
        patched.setattr(master_stub, "random", SimpleNamespace(random=lambda: 0.999))
        master = LaneMaster(["a:1", "b:1"], pb.HelloRequest())
        patched.setattr(master, "_closed", Closed())
        patched.setattr(master, "_ask_around", lambda *_, **__: next(answers))
        pauses_s = sum(seek_pause_s(attempt, 0.999) for attempt in range(1, 6))
        until_s = now_s + pauses_s + 0.05
        master.find_leader("a:1", Unavailable("it is gone"), until_s)
        assert now_s == pytest.approx(until_s - 0.05)


# ---- over lanes -------------------------------------------------------------------------------


def test_a_master_that_stops_answering_is_left_for_its_successor(
    served: MasterThread, other: MasterThread, connect: Connect
) -> None:
    other.leader = served.address
    client = connect(served.address, other.address)
    assert client.put("a", b"x").stored
    served.silent = True
    take_over(served, other)
    with ends_within(2.0):
        assert client.put("b", b"y").stored
    with ends_within(1.0):
        assert client.get_batch(["a", "b"]) == [b"x", b"y"]


def test_a_slow_leader_is_asked_again_and_not_left(
    served: MasterThread, other: MasterThread, connect: Connect
) -> None:
    other.leader = served.address
    client = connect(served.address, other.address)
    served.silent = True
    done: list[bool] = []
    call = threading.Thread(target=lambda: done.append(client.put("b", b"y").stored))
    call.start()
    wait_until(lambda: bool(other.hellos), what="it looks around")
    served.silent = False
    call.join(30)
    assert done == [True]
    assert client.session.master.addresses[0] == served.address  # type: ignore[attr-defined]


def test_a_call_waits_for_the_successor_within_its_deadline(
    served: MasterThread, other: MasterThread, connect: Connect
) -> None:
    other.leader = served.address
    client = connect(served.address, other.address)
    served.stop()
    seen = len(other.hellos)
    done: list[bool] = []
    call = threading.Thread(target=lambda: done.append(client.put("b", b"y").stored))
    call.start()
    wait_until(lambda: len(other.hellos) > seen + 3, what="it asks again and again")
    take_over(served, other)
    call.join(30)
    assert done == [True]


def test_with_no_leader_a_call_ends_by_its_deadline(
    served: MasterThread, other: MasterThread, connect: Connect
) -> None:
    other.leader = served.address
    client = connect(served.address, other.address)
    served.stop()
    for call in (
        lambda: client.put("a", b"x", deadline_s=0.6),
        lambda: client.get("a", deadline_s=0.6),
        lambda: client.remove("a", deadline_s=0.6),
        lambda: client.exists_batch(["a"] * 5000, deadline_s=0.6),
    ):
        with ends_within(0.7), pytest.raises(DeadlineExceeded):
            call()


def test_a_client_that_begins_during_a_failover_waits_for_the_leader(
    served: MasterThread, other: MasterThread, connect: Connect
) -> None:
    served.leader, other.leader = other.address, served.address
    timer = threading.Timer(0.3, take_over, (served, other))
    timer.start()
    client = connect(served.address, other.address)
    assert client.put("a", b"x").stored
    timer.join()


def test_an_old_leader_that_wakes_up_is_not_followed(
    served: MasterThread, other: MasterThread, connect: Connect
) -> None:
    served.epoch = 3
    other.leader = served.address
    client = connect(served.address, other.address)
    served.silent = True
    take_over(served, other)
    assert client.put("a", b"x").stored
    served.silent = False  # and takes itself for the leader
    other.stop()
    with pytest.raises(DeadlineExceeded):
        client.put("b", b"x", deadline_s=0.8)


def test_a_leader_past_its_tenure_serves_reads_and_is_left_by_writes(
    served: MasterThread, other: MasterThread, connect: Connect, master: FakeMaster
) -> None:
    other.leader = served.address
    client = connect(served.address, other.address)
    assert client.put("a", b"x").stored
    served.past_tenure = True
    client._space.locations.clear()
    assert client.get("a") == b"x"
    master.faults["put_start"] = [TenureEnded("no word from etcd")] * 100
    with ends_within(0.7), pytest.raises(DeadlineExceeded, match="no word from etcd"):
        client.put("b", b"x", deadline_s=0.6)
    client._space.locations.clear()
    assert client.get("a") == b"x"
    master.faults.clear()
    take_over(served, other)
    assert client.put("b", b"x").stored


def test_a_new_client_prefers_the_successor_of_a_leader_past_its_tenure(
    served: MasterThread, other: MasterThread, connect: Connect
) -> None:
    """Which answers lookups from what it knew: what was removed since is there."""
    served.past_tenure = True
    take_over(served, other)
    client = connect(served.address, other.address)
    assert not client.exists("a")
    assert client.session.master.addresses[0] == other.address  # type: ignore[attr-defined]


def test_a_new_client_reads_from_a_leader_past_its_tenure_where_nobody_else_leads(
    served: MasterThread, other: MasterThread, connect: Connect
) -> None:
    other.leader = served.address
    connect(served.address, other.address).put("a", b"x")
    served.past_tenure = True
    with ends_within(1.0):
        late = connect(served.address, other.address)
        assert late.get("a") == b"x"
    assert late.session.master.addresses[0] == served.address  # type: ignore[attr-defined]

    async def read() -> bytes | None:
        client = await AsyncClient.connect(f"{served.address},{other.address}")
        async with client:
            return await client.get("a")

    with ends_within(1.0):
        assert asyncio.run(read()) == b"x"


LOOKUPS: dict[str, Callable[[Client], object]] = {
    "exists": lambda client: client.exists("a"),
    "exists_batch": lambda client: client.exists_batch(["a", "b"]),
    "match": lambda client: client.match(["a"]),
    "get": lambda client: client.get("a"),
    "get_batch": lambda client: client.get_batch(["a", "b"]),
}


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_who_only_reads_leaves_a_leader_past_its_tenure_at_once(
    served: MasterThread, other: MasterThread, connect: Connect, lookup: str
) -> None:
    """Not with the next renewal of its session, which may be seconds away."""
    other.leader = served.address
    client = connect(served.address, other.address)
    assert client.put("a", b"x").stored
    served.past_tenure = True
    take_over(served, other)
    client._space.locations.clear()
    with ends_within(1.0):
        LOOKUPS[lookup](client)
        wait_until(
            lambda: client.session.master.addresses[0] == other.address,  # type: ignore[attr-defined]
            what="the client to follow",
        )


def test_a_leader_past_its_tenure_is_not_asked_where_a_later_one_is_known(
    served: MasterThread, other: MasterThread, connect: Connect, tmp_path: Path
) -> None:
    """Also where that one has just died: what it removed is still there at the one before."""
    served.past_tenure = True
    other.leader = str(tmp_path / "nobody.sock")
    other.epoch = served.epoch + 5
    with ends_within(1.0), pytest.raises((Unavailable, DeadlineExceeded)):
        connect(served.address, other.address, deadline_s=0.6)


def test_a_leader_past_its_tenure_is_remembered_however_it_was_met() -> None:
    """It said so when it was connected to; nobody goes back to the one before it."""
    master = LaneMaster(["a:1", "b:1"], pb.HelloRequest())
    newer = pb.HelloResponse(epoch=4, is_leader=True, past_tenure=True)
    with pytest.raises(NotLeader, match="can't prove"):
        master.greeted(newer.SerializeToString())
    older = pb.HelloResponse(epoch=3, is_leader=True)
    with pytest.raises(NotLeader, match="until epoch 4 began"):
        master.greeted(older.SerializeToString())


def test_many_threads_look_for_the_leader_once(
    served: MasterThread, other: MasterThread, connect: Connect
) -> None:
    other.leader = served.address
    client = connect(served.address, other.address)
    assert client.put("a", b"x").stored
    served.silent = True
    take_over(served, other)
    client._space.locations.clear()
    failed: list[CenoteError] = []

    def read() -> None:
        try:
            assert client.get("a") == b"x"
        except CenoteError as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not failed


def test_the_asyncio_face_leaves_a_silent_master(
    served: MasterThread, other: MasterThread, connect: Connect
) -> None:
    other.leader = served.address

    async def main() -> None:
        client = AsyncClient(connect(served.address, other.address))
        assert (await client.put("a", b"x")).stored
        served.silent = True
        with pytest.raises(DeadlineExceeded):
            await client.put("b", b"y", deadline_s=0.7)
        take_over(served, other)
        puts = [client.put(f"k{i}", b"y") for i in range(20)]
        assert all(result.stored for result in await asyncio.gather(*puts))
        await client.close()

    asyncio.run(main())
