"""Bugs that the simulator found in the SDK's reads, each in its smallest form."""

from __future__ import annotations

import pytest

from cenote.api.errors import StaleLocation, Unavailable
from cenote.client import Client
from cenote.client.plan.budgets import lease_ttl_ms
from fake_pool import FakeMaster
from waiting import wait_until


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


def test_a_view_that_begins_anew_keeps_nothing_of_the_generation_before(
    client: Client, master: FakeMaster
) -> None:
    """What the first attempt held was held for as long as the session lived, and what it saw was
    shown though it had ended with its generation."""
    client.put("seen", b"value")
    master.extent_bytes_max = 64
    client.put("copied", b"v" * 100)  # in pieces, which can't be seen
    node = master.nodes[1]

    def reset_meanwhile() -> None:
        node.on_copy = lambda: None
        node.statuses.append(StaleLocation.code)
        master.reset()

    node.on_copy = reset_meanwhile
    with client.view(["seen", "copied"]) as views:
        assert master.calls["acquire"] == 3  # a hold, the copy's second look, a hold
        assert views == [None, None]
    wait_until(lambda: not master.leases, what="all holds to end")
