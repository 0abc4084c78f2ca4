"""Puts that use space granted ahead: whatever goes wrong is made good, and nothing leaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import (
    CenoteError,
    DeadlineExceeded,
    GrantRevoked,
    InternalError,
    StaleEpoch,
    StaleLocation,
    Unavailable,
)
from cenote.api.rows import SEAL
from cenote.client import Client
from cenote.client.aio import AsyncClient
from cenote.client.plan import spares as module
from cenote.client.plan.spares import Spares
from fake_nodes import FakeChannel, FakeTransport
from fake_pool import FakeMaster
from unit.client.spare_putter import (
    COUNTS,
    Putter,
    check_nothing_leaks,
    make_eager,
    ready,
    sparing_master,
)
from waiting import loop_turns, wait_until, wait_until_async

MakeClient = Callable[..., Client]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    make_eager(monkeypatch)


@pytest.fixture
def master() -> FakeMaster:
    return sparing_master()


def cut_off(client: Client, master: FakeMaster) -> None:
    master.nodes[1].cut_sessions = {client.session.state.session_id}


def die(client: Client, master: FakeMaster) -> None:
    master.nodes[1].fault = Unavailable("killed")


def once(error: CenoteError) -> Callable[[Client, FakeMaster], None]:
    """A transfer with node 1 ends so, once."""

    def fail(client: Client, master: FakeMaster) -> None:
        node = master.nodes[1]

        def raise_once() -> None:
            node.on_copy = lambda: None
            raise error

        node.on_copy = raise_once

    return fail


def status(code: int) -> Callable[[Client, FakeMaster], None]:
    """Node 1 answers the next item so."""
    return lambda client, master: master.nodes[1].statuses.append(code)


def commit_fails(*errors: CenoteError) -> Callable[[Client, FakeMaster], None]:
    return lambda client, master: master.faults["put_commit"].extend(errors)


def restart(client: Client, master: FakeMaster) -> None:
    master.forget_all()


def lose_grants(client: Client, master: FakeMaster) -> None:
    master.grants.clear()


def lose_sessions(client: Client, master: FakeMaster) -> None:
    master.known_sessions.clear()


def reset(client: Client, master: FakeMaster) -> None:
    master.reset()


def suspect(client: Client, master: FakeMaster) -> None:
    client.session.state.suspect(1, "a while ago")


def hide(client: Client, master: FakeMaster) -> None:
    master.down.add(1)
    master.view_version += 1
    client.session.refresh_view(1.0)


def another_session(client: Client, master: FakeMaster) -> None:
    client.session.replace_session(client.session.state.session_id, 1.0)


def heal(client: Client, master: FakeMaster) -> None:
    master.nodes[1].fault = None
    master.down.clear()
    master.view_version += 1
    client.session.refresh_view(1.0)


TROUBLE: dict[str, Callable[[Client, FakeMaster], None]] = {
    "cut off": cut_off,
    "node dies": die,
    "node fails once": once(Unavailable("reset by peer")),
    "node is slow once": once(DeadlineExceeded("slow")),
    "stale epoch": once(StaleEpoch("a change of epoch 1; this daemon follows epoch 2")),
    "stale location": once(StaleLocation("no such segment")),
    "write revoked": status(GrantRevoked.code),
    "write refused": status(StaleLocation.code),
    "commit revoked": commit_fails(GrantRevoked("cut off")),
    "commit's answer lost": commit_fails(Unavailable("reply lost"), Unavailable("again")),
    "master restarted": restart,
    "grants lost": lose_grants,
    "session lost": lose_sessions,
    "namespace reset": reset,
    "node suspected": suspect,
    "node hidden": hide,
    "another session": another_session,
}


@COUNTS
@pytest.mark.parametrize("by_lease", [True, False])
@pytest.mark.parametrize("what", TROUBLE)
def test_whatever_happens_the_put_is_stored(
    make_client: MakeClient,
    master: FakeMaster,
    what: str,
    count: int,
    by_lease: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = make_client(by_lease=by_lease)
    putter = ready(client, count)
    old = client.session.state.session_id
    assert master.spared
    TROUBLE[what](client, master)
    if what == "namespace reset":
        putter.values.clear()
    putter.put(3)
    heal(client, master)
    putter.check()
    replaced = client.session.state.session_id != old
    assert replaced == (what in ("cut off", "another session"))
    check_nothing_leaks(client, master, monkeypatch, old=old if replaced else b"")


@pytest.mark.parametrize("what", ["namespace reset", "another session", "master restarted"])
def test_those_of_another_life_are_given_back(
    client: Client, master: FakeMaster, what: str
) -> None:
    """Where they can be: also in a session that was replaced."""
    putter = ready(client)
    old = {i for i, grant in master.grants.items() if grant.spare_units}
    assert old
    TROUBLE[what](client, master)
    if what == "namespace reset":
        putter.values.clear()
    putter.put(3)
    wait_until(lambda: not old & set(master.grants), what="the old ones are given back")
    putter.check()
    assert client._space.spares.held


@COUNTS
def test_a_decided_put_without_a_slot_is_not_called_existing(
    client: Client, master: FakeMaster, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit in another spare extent finds the object that was decided and sealed nowhere: it
    must not be taken for somebody else's, which is stored."""
    ready(client, count)
    refused: list[int] = []
    original = FakeChannel.seal

    def refuse_once(self: FakeChannel, batch: Any, deadline_s: float) -> Any:
        if not refused:
            refused.append(1)
            return np.full(len(batch.rows) // SEAL.itemsize, StaleLocation.code, np.uint8)
        return original(self, batch, deadline_s)

    monkeypatch.setattr(FakeChannel, "seal", refuse_once)
    monkeypatch.setattr(Spares, "give_up", lambda self: None)  # another thread added some
    keys = [f"new-{i}" for i in range(count)]

    def put() -> None:
        if count == 1:
            client.put(keys[0], b"x" * 100, deadline_s=0.2)
        else:
            client.put_batch(keys, [b"x" * 100] * count, deadline_s=0.2).raise_for_errors()

    with pytest.raises(CenoteError):
        put()
    assert refused
    assert client.stats().existed == 0


def test_spares_belong_to_the_session_that_asked(
    client: Client, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that another thread replaced while the answer was on its way."""
    for count in (1, 2):
        client._space.spares.give_up()
        putter = Putter(client, count)
        putter.values = {f"before-{count}-{i}": b"" for i in range(5)}
        old = client.session.state.session_id
        asked: list[bytes] = []

        def replace(asked: list[bytes] = asked, old: bytes = old) -> None:
            request = master.requests["put_start"][-1]
            if request.spare_count and not asked:
                asked.append(request.session_id)
                threading.Thread(
                    target=client.session.replace_session, args=(old, 5.0), daemon=True
                ).start()
                wait_until(lambda: client.session.state.session_id != old, what="another session")

        master.hooks["put_start"] = replace
        keys = [f"{count}-{i}" for i in range(8)]
        for key in keys:
            if count == 1:
                assert client.put(key, b"x" * 100).stored
            else:
                assert client.put_batch([key, key + "b"], [b"x" * 100] * 2).stored_count == 2
        assert asked == [old]
        del master.hooks["put_start"]
        assert client.get_batch(keys) == [b"x" * 100] * 8
    monkeypatch.setattr(module, "IDLE_S", -1.0)
    client.session.state.wake()
    wait_until(lambda: master.spared == 0, what="all to be given back")


@COUNTS
@pytest.mark.parametrize("where", ["write", "put_commit", "put_start"])
def test_ctrl_c_loses_none(
    make_client: MakeClient,
    master: FakeMaster,
    where: str,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = make_client(by_lease=False)
    putter = ready(client, count)

    def interrupt() -> None:
        master.hooks.clear()
        master.nodes[1].on_copy = lambda: None
        raise KeyboardInterrupt

    if where == "write":
        master.nodes[1].on_copy = interrupt
    else:
        master.hooks[where] = interrupt
    with pytest.raises(KeyboardInterrupt):
        putter.put(50)
    if where != "put_start":
        wait_until(lambda: bool(master.aborted), what="the run is given back")
        assert master.aborted[0][1] is (where == "write")  # it may still be under way
    putter.put(3)
    putter.check()
    check_nothing_leaks(client, master, monkeypatch)


@COUNTS
def test_an_answer_that_was_never_seen_gave_nothing(
    client: Client, master: FakeMaster, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grants of both kinds that came with it are taken back."""
    putter = Putter(client, count)
    putter.put()
    original = master.put_start

    def lost(request: Any, deadline_s: float) -> Any:
        original(request, deadline_s)
        raise InternalError("the answer was lost")

    monkeypatch.setattr(master, "put_start", lost)
    with pytest.raises(InternalError):
        putter.put()
    assert master.spared
    monkeypatch.undo()
    wait_until(lambda: not master.grants, what="both to be taken back")


def test_nothing_is_left_after_close(make_client: MakeClient, master: FakeMaster) -> None:
    client = make_client()
    ready(client)
    assert master.spared
    client.close()
    assert master.grants == {}


def test_a_second_without_puts_gives_them_back(
    client: Client, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(client)
    assert master.spared
    monkeypatch.setattr(module, "IDLE_S", 0.2)
    wait_until(lambda: not master.grants, what="they are given back")
    assert client.put("more", b"x" * 100).stored
    assert master.requests["put_start"][-1].spare_count == 0  # it is to be seen anew if it pays


def test_what_cannot_be_given_back_is_not_used_either(
    client: Client, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    putter = ready(client)
    monkeypatch.setattr(module, "IDLE_S", -1.0)
    for method in ("renew_session", "put_abort"):
        master.faults[method] = [Unavailable("nobody there")] * 100
    starts = master.calls["put_start"]
    putter.put(2)
    assert master.calls["put_start"] == starts + 2
    putter.check()


def test_a_coroutine_that_is_cancelled_gives_its_extent_back(
    master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the asyncio face uses spares as threads do."""
    began, end = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        assert end.wait(10)

    async def main() -> None:
        over = [FakeTransport(master.nodes, by_lease=False)]
        async with await AsyncClient.embedded(master, over) as client:
            for i in range(20):
                assert (await client.put(f"k{i}", b"x" * 100)).stored
            assert master.calls["put_start"] < 6
            starts = master.calls["put_start"]
            master.nodes[1].on_copy = wait
            putting = asyncio.create_task(client.put("cancelled", b"y" * 100))
            await wait_until_async(began.is_set, what="the put is under way")
            assert master.calls["put_start"] == starts
            putting.cancel()
            await loop_turns(20)
            end.set()
            with pytest.raises(asyncio.CancelledError):
                await putting
            monkeypatch.setattr(module, "IDLE_S", -1.0)
            assert (await client.put("after", b"z" * 100)).stored
            await wait_until_async(lambda: not master.grants, what="all to be given back")
            assert await client.get("after") == b"z" * 100

    asyncio.run(main())
