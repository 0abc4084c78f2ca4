"""`forget_locations`: the next read asks the master again."""

from __future__ import annotations

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
