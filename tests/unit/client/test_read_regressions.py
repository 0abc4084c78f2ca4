"""Bugs that the simulator found in the SDK's reads, each in its smallest form."""

from __future__ import annotations

import pytest

from cenote.api.errors import Unavailable
from cenote.client import Client
from cenote.client.plan.budgets import lease_ttl_ms
from fake_pool import FakeMaster


def test_a_location_read_under_a_lease_is_not_remembered(
    client: Client, master: FakeMaster
) -> None:
    """It would be used for another `location_ttl_s` after the object was removed."""
    client.put("key", b"value")
    lease = client.acquire(["key"], ttl_s=5)
    master.objects.clear()  # another client removes it
    buffer = bytearray(5)
    assert client.get_into_batch(["key"], [buffer], lease=lease).sizes.tolist() == [5]
    assert buffer == b"value"
    assert client.get("key") is None


def test_a_deadline_that_passed_meanwhile_is_no_negative_lease() -> None:
    assert lease_ttl_ms(-1.0, 0) == lease_ttl_ms(0.0, 0) > 0
    assert 0 < lease_ttl_ms(-1.0, 10_000) < 1000


@pytest.mark.parametrize("what", ["generation", "namespace"])
def test_a_digest_is_never_sent_as_one_of_another(
    client: Client, master: FakeMaster, what: str
) -> None:
    """Another thread learns of a reset, or of a namespace that has the name now, while a put is
    under way, which then starts anew."""
    node = next(iter(master.nodes.values()))
    node.fault = Unavailable("gone")

    def reset_behind_its_back() -> None:
        node.on_copy = lambda: None
        (master.reset if what == "generation" else master.rebuild)()
        client.session.reopen_space(client._space, 1.0)

    node.on_copy = reset_behind_its_back
    assert client.put("key", b"value").stored
    assert client.get("key") == b"value"
