"""Puts that use space granted ahead: what is saved, and what keys are told that exist."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from cenote.api.errors import (
    NoSpace,
)
from cenote.client import Client
from fake_pool import FakeMaster
from unit.client.spare_putter import (
    COUNTS,
    Putter,
    check_nothing_leaks,
    make_eager,
    ready,
    sparing_master,
)

MakeClient = Callable[..., Client]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    make_eager(monkeypatch)


@pytest.fixture
def master() -> FakeMaster:
    return sparing_master()


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


@COUNTS
def test_a_put_that_needs_the_room_gets_it(
    client: Client, master: FakeMaster, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing fails for lack of space that this client keeps for puts to come."""
    place = master._place

    def crowded(size: int, avoid: set[int], replicas: int) -> Any:
        return [] if size > 100_000 and master.spared else place(size, avoid, replicas)

    monkeypatch.setattr(master, "_place", crowded)
    putter = ready(client, count)
    large = os.urandom(200_000)
    if count == 1:
        assert client.put("large", large).stored
    else:
        assert client.put_batch(["large", "small"], [large, b"x"]).stored_count == 2
    assert master.spared == 0
    assert client.get("large") == large
    putter.put(3)
    putter.check()
    assert master.spared


def test_a_pool_that_is_full_says_so(client: Client, master: FakeMaster) -> None:
    ready(client)
    with pytest.raises(NoSpace):
        client.put("huge", bytes(2 << 20))
    assert master.spared == 0
