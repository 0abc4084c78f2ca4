"""`forget_locations`: the next read asks the master again."""

from __future__ import annotations

import pytest

from cenote.client import Client


def test_a_read_after_forgetting_is_not_a_cached_one(client: Client) -> None:
    client.put("key", b"bytes")
    assert [client.get("key"), client.get("key")] == [b"bytes", b"bytes"]
    cached = client.stats().cached_reads
    assert cached > 0
    client.forget_locations()
    assert client.get("key") == b"bytes"
    assert client.stats().cached_reads == cached
    assert client.get("key") == b"bytes"
    assert client.stats().cached_reads == cached + 1


@pytest.mark.parametrize("batch", [True, False])
def test_what_this_client_removed_is_not_read_again(client: Client, batch: bool) -> None:
    """However it had learned where that was: a batch is remembered in another way than one key."""
    keys = [f"key{i}" for i in range(4)]
    client.put_batch(keys, [b"first"] * 4).raise_for_errors()
    if batch:
        client.get_into_batch(keys, [bytearray(5) for _ in keys]).raise_for_errors()
    else:
        assert [client.get(key) for key in keys] == [b"first"] * 4
    client.remove(keys[1])
    assert client.get(keys[1]) is None
    client.put(keys[1], b"second")
    assert client.get(keys[1]) == b"second"
    client.remove_batch(keys)
    assert client.get_batch(keys) == [None] * 4
