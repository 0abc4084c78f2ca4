"""Calls that move no bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cenote.api.errors import FingerprintMismatch, InvalidKey, NamespaceReset, Unavailable
from cenote.client import Client
from fake_pool import FakeMaster

MakeClient = Callable[..., Client]


@pytest.fixture
def some(client: Client) -> list[str]:
    keys = [f"k{i}" for i in range(600)]
    client.put_batch(keys[::3], [b"x"] * 200).raise_for_errors()
    return keys


def test_exists(client: Client, some: list[str]) -> None:
    assert client.exists("k0")
    assert not client.exists("k1")
    found = client.exists_batch(some)
    assert found.tolist() == [True, False, False] * 200
    assert sum(client.exists_batch(some[::3] * 2)) == 400  # as bytes it wrapped around at 256
    assert client.exists_batch(some[:5]).tolist() == [1, 0, 0, 1, 0]
    assert client.exists_batch([]).tolist() == []
    with pytest.raises(InvalidKey, match="key 1"):
        client.exists_batch(["a", ""])


def test_long_batches_of_exists_are_sent_in_slices(
    make_client: MakeClient, some: list[str], master: FakeMaster
) -> None:
    master.batch_keys_max = 128
    client = make_client()
    client.exists_batch(some)
    assert [len(r.keys.digests) // 16 for r in master.requests["exists"]] == [128] * 4 + [88]


def test_a_failed_slice_is_asked_for_again(
    make_client: MakeClient, some: list[str], master: FakeMaster
) -> None:
    master.batch_keys_max = 128
    client = make_client()
    master.faults["exists"] = [Unavailable("once")]
    assert client.exists_batch(some).tolist() == [1, 0, 0] * 200
    assert client.stats().retries == 0
    master.reset()
    assert client.exists_batch(some).tolist() == [0] * 600
    master.faults["exists"] = [NamespaceReset("again and again")] * 100
    with pytest.raises(NamespaceReset):
        client.exists_batch(some)


def test_match(make_client: MakeClient, some: list[str], master: FakeMaster) -> None:
    for batch_keys_max in (16_384, 50):
        master.batch_keys_max = batch_keys_max
        client = make_client()
        result = client.match(some)
        assert result.prefix_keys == 1
        assert result.present.tolist() == [True, False, False] * 200
        assert client.match(some[::3]).prefix_keys == 200
        assert client.match([]).prefix_keys == 0
        client.prefetch(some[:3])
        assert master.requests["match"][-1].will_read
        assert not master.requests["match"][-2].will_read


def test_remove(client: Client, some: list[str]) -> None:
    client.get("k0")
    assert client.remove("k0")
    assert not client.remove("k0")
    assert client.get("k0") is None  # its cached location is forgotten
    for answer in (client.exists_batch, client.pin, client.unpin):
        for keys in (some[:2], []):
            assert answer(keys).dtype == np.bool_
    assert client.remove_batch([]).dtype == np.bool_
    assert client.remove_batch(some[:6]).tolist() == [0, 0, 0, 1, 0, 0]


def test_pins(client: Client, some: list[str], master: FakeMaster) -> None:
    assert client.pin(some[:4], ttl_s=2.0).tolist() == [1, 0, 0, 1]
    assert master.requests["pin"][-1].ttl_ms == 2000
    assert len(master.pinned) == 2
    assert client.unpin(some[:3]).tolist() == [1, 0, 0]
    assert client.unpin(some[:4]).tolist() == [0, 0, 0, 1]
    client.pin(some[:4])
    assert master.requests["pin"][-1].ttl_ms == 0


def test_namespaces_are_apart(client: Client, master: FakeMaster) -> None:
    one = client.namespace("one", fingerprint=b"bf16")
    two = client.namespace("two", fingerprint="fp8")
    one.put("k", b"1")
    two.put("k", b"2")
    assert (one.get("k"), two.get("k"), client.get("k")) == (b"1", b"2", None)
    assert (one.name, one.fingerprint, two.fingerprint) == ("one", b"bf16", b"fp8")
    opened = master.calls["open_namespace"]
    assert client.namespace("one", fingerprint=b"bf16").get("k") == b"1"
    assert master.calls["open_namespace"] == opened
    with pytest.raises(FingerprintMismatch):
        client.namespace("one", fingerprint=b"other")
    with pytest.raises(FingerprintMismatch):
        client.namespace("one")


def test_touches_go_to_their_namespace(client: Client, master: FakeMaster) -> None:
    one, two = client.namespace("one"), client.namespace("two")
    for space in (one, two):
        space.put("k", b"x")
        space.get("k")
        space.get("k")
    one.exists("k")
    assert master.requests["exists"][-1].piggyback.namespace_id == one._space.namespace_id
    assert len(master.requests["exists"][-1].piggyback.touched_digests) == 16
    two.exists("k")
    assert master.requests["exists"][-1].piggyback.namespace_id == two._space.namespace_id
