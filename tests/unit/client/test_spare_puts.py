"""Puts that use space granted ahead: what is saved, and that whatever goes wrong is made good."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest, xxh3_128_digest

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
from cenote.client.plan import spares as module
from cenote.client.plan.spares import Spares
from fake_nodes import FakeChannel
from fake_pool import FakeMaster
from waiting import wait_until

MakeClient = Callable[..., Client]
COUNTS = pytest.mark.parametrize("count", [1, 3])


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares are asked for after the first put that was stored, and stay while a test is slow."""
    monkeypatch.setattr(Spares, "credit_needed", 1)
    monkeypatch.setattr(module, "IDLE_S", 600.0)


@pytest.fixture
def master() -> FakeMaster:
    made = FakeMaster(nodes=3)
    made.spares = 16
    return made


class Putter:
    """Puts new keys of 100 bytes, `count` at a time, and knows what it put."""

    def __init__(self, client: Client, count: int) -> None:
        self.client = client
        self.count = count
        self.values: dict[str, bytes] = {}

    def put(self, times: int = 1) -> None:
        for _ in range(times):
            new = {f"key-{len(self.values) + i}": os.urandom(100) for i in range(self.count)}
            if self.count == 1:
                ((key, value),) = new.items()
                assert self.client.put(key, value).stored
            else:
                results = self.client.put_batch(list(new), list(new.values()))
                results.raise_for_errors()
                assert results.stored_count == self.count
            self.values |= new

    def check(self) -> None:
        self.client._space.locations.clear()
        assert self.client.get_batch(list(self.values)) == list(self.values.values())


def ready(client: Client, count: int = 1) -> Putter:
    """One that has spares."""
    putter = Putter(client, count)
    putter.put(2)
    assert client._space.spares.held
    return putter


def check_nothing_leaks(
    client: Client, master: FakeMaster, monkeypatch: pytest.MonkeyPatch, *, old: bytes = b""
) -> None:
    """After a second without puts the master has nothing more granted, but to the session `old`
    that is to run out."""
    monkeypatch.setattr(module, "IDLE_S", -1.0)
    client.session.state.wake()

    def left() -> dict[int, Any]:
        return {i: g for i, g in master.grants.items() if g.session_id != old}

    wait_until(lambda: not left(), what=f"no grants, but {left()}")
    assert not client._space.spares.held


# ---- what is saved ---------------------------------------------------------------------------


@COUNTS
@pytest.mark.parametrize("by_lease", [True, False])
def test_most_puts_start_nothing(
    make_client: MakeClient,
    master: FakeMaster,
    count: int,
    by_lease: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = make_client(by_lease=by_lease)
    putter = Putter(client, count)
    putter.put(60)
    assert master.calls["put_start"] <= 2 + 60 * count // (16 - count + 1)
    assert master.calls["put_commit"] == 60
    putter.check()
    sealed = {key: checksum for key, _, checksum in master.nodes[1].sealed.values()}
    assert sealed == {k.encode(): xxh3_64_intdigest(v) for k, v in putter.values.items()}
    seqs = [seq for _, seq, _ in master.nodes[1].sealed.values()]
    assert len(set(seqs)) == len(seqs)
    assert client.stats().stored == 60 * count
    check_nothing_leaks(client, master, monkeypatch)
    putter.put(3)
    putter.check()


def test_long_keys_and_sizes_that_differ(
    client: Client, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {}
    for i in range(40):
        for key, size in ((f"s{i}", 65 + i), (f"{i:0100}", 28 - i % 28)):  # 128 bytes with the key
            values[key] = os.urandom(size)
            assert client.put(key, values[key]).stored
    for i in range(20):
        keys = [f"{i}-{j}-".ljust(64 + j, "k") for j in range(4)]
        batch = {key: os.urandom(128 - (len(key) if len(key) > 64 else 0)) for key in keys}
        assert client.put_batch(list(batch), list(batch.values())).stored_count == 4
        values |= batch
    assert master.calls["put_start"] < 40
    client._space.locations.clear()
    assert client.get_batch(list(values)) == list(values.values())
    check_nothing_leaks(client, master, monkeypatch)


def test_options_that_spares_do_not_have(client: Client, master: FakeMaster) -> None:
    putter = ready(client)
    spared = master.spared
    for i, options in enumerate(
        ({"replicas": 2}, {"ttl_s": 5.0}, {"durability": "journaled"}, {"local_first": True})
    ):
        starts = master.calls["put_start"]
        assert client.put(f"o{i}", b"x" * 100, **options).stored  # type: ignore[arg-type]
        assert client.put_batch([f"p{i}", f"q{i}"], [b"x" * 100] * 2, **options).stored_count == 2  # type: ignore[arg-type]
        assert master.calls["put_start"] == starts + 2
        assert not any(request.spare_count for request in master.requests["put_start"][-2:])
    assert master.spared == spared
    putter.put(5)
    putter.check()


def test_a_chain_is_told_at_the_commit(client: Client, master: FakeMaster) -> None:
    ready(client, 3)
    starts = master.calls["put_start"]
    assert client.put_batch(["a", "b"], [b"x" * 100] * 2, chain=True).stored_count == 2
    assert master.calls["put_start"] == starts
    assert master.requests["put_commit"][-1].names.chain


def test_a_master_without_any_is_not_asked_each_time(client: Client, master: FakeMaster) -> None:
    master.spares = 0
    putter = Putter(client, 1)
    putter.put(100)
    asked = [request.spare_count for request in master.requests["put_start"]]
    assert sum(count > 0 for count in asked) == 1
    putter.check()


def test_threads_share_them(
    client: Client, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    master.spares = 40
    putters = [Putter(client, count) for count in (1, 1, 1, 2)]
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for i in range(100):
                key = f"{number}-{i}"
                assert client.put(key, key.encode().ljust(100)).stored
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(putters))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for number in range(len(putters)):
        for i in range(100):
            assert client.get(f"{number}-{i}") == f"{number}-{i}".encode().ljust(100)
    assert master.calls["put_start"] < 150
    check_nothing_leaks(client, master, monkeypatch)


# ---- keys that exist -------------------------------------------------------------------------


@COUNTS
def test_a_key_that_exists(
    client: Client, master: FakeMaster, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    master.spares = 100
    putter = ready(client, count)
    putter.put(10)
    key = "key-0"
    starts = master.calls["put_start"]
    if count == 1:
        results = [client.put(key, putter.values[key]), client.put(key, b"y" * 100)]
    else:
        first = client.put_batch([key, "new"], [putter.values[key], b"n" * 100])
        master.rival_bytes[xxh3_128_digest(b"rival", master.seed)] = b"r" * 100
        second = client.put_batch([key, "new2", "rival"], [b"y" * 100, b"m" * 100, b"r" * 100])
        results = [first[0], second[0]]
        assert first[1].stored
        assert second[1].stored
        assert second[2].existed
        assert second[2].same_bytes
        assert client.get_batch(["new", "new2"]) == [b"n" * 100, b"m" * 100]
    assert master.calls["put_start"] == starts
    assert [(r.existed, r.same_bytes) for r in results] == [(True, True), (True, False)]
    putter.check()
    check_nothing_leaks(client, master, monkeypatch)


def test_a_key_twice_in_a_batch(client: Client, master: FakeMaster) -> None:
    ready(client, 3)
    starts = master.calls["put_start"]
    values = [b"1" * 100, b"2" * 100, b"1" * 100]
    results = client.put_batch(["a", "a", "a"], values)
    assert master.calls["put_start"] == starts
    assert [(r.stored, r.existed, r.same_bytes) for r in results] == [
        (True, False, None), (False, True, False), (False, True, True),
    ]  # fmt: skip
    assert client.get("a") == b"1" * 100


def test_where_keys_mostly_exist_nothing_is_written_in_vain(
    client: Client, master: FakeMaster
) -> None:
    putter = ready(client)
    writes = master.nodes[1].writes
    for _ in range(50):
        client.put("key-0", putter.values["key-0"])
    assert master.nodes[1].writes - writes < 5


# ---- what goes wrong -------------------------------------------------------------------------


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


def test_a_master_that_is_down_does_not_keep_them_usable(
    client: Client, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be given back is not used either: their space may be another's by then."""
    putter = ready(client)
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    for method in ("renew_session", "put_abort"):
        master.faults[method] = [Unavailable("nobody there")] * 100
    starts = master.calls["put_start"]
    putter.put(2)
    assert master.calls["put_start"] == starts + 2
    putter.check()
