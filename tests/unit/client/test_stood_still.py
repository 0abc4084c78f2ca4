"""A process that stood still (stopped, or its machine was) does not blame nodes for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from cenote.api.errors import CenoteError, DeadlineExceeded, Unavailable
from cenote.client import Client
from fake_pool import FakeMaster

MakeClient = Callable[..., Client]
LATE = DeadlineExceeded("it did not finish before the deadline")
GONE = Unavailable("the connection was closed")
STOPPED_S = 10.0


class Standstill:
    """Stops this process, as far as its client's clock goes, in the middle of a step."""

    def __init__(self, client: Client, master: FakeMaster) -> None:
        self._skew_s = 0.0
        self._master = master
        client.session.state.now = lambda: time.monotonic() + self._skew_s

    def stop(self) -> None:
        self._skew_s += STOPPED_S

    def in_next_transfer(self, error: CenoteError) -> None:
        """Or seal: which fails then."""

        def stop() -> None:
            self.stop()
            for node in self._master.nodes.values():
                node.on_copy = node.on_seal = lambda: None
            raise error

        for node in self._master.nodes.values():
            node.on_copy = node.on_seal = stop


VALUES = {f"k{i}": bytes([i]) * 100 for i in range(3)}
READS: dict[str, Callable[[Client], Any]] = {
    "get": lambda client: [client.get("k0")] == [VALUES["k0"]],
    "get_batch": lambda client: client.get_batch(list(VALUES)) == list(VALUES.values()),
    "get_into_batch": lambda client: all(
        size == 100
        for size in client.get_into_batch(list(VALUES), [bytearray(100) for _ in VALUES])
    ),
}
PUTS: dict[str, Callable[[Client], Any]] = {
    "put": lambda client: client.put("new", b"x" * 100).stored,
    "two replicas": lambda client: client.put("new", b"x" * 100, replicas=2).stored,
    "put_batch": lambda client: all(r.stored for r in client.put_batch(["a", "b"], [b"1", b"2"])),
}


@pytest.mark.parametrize("error", [LATE, GONE], ids=["late", "closed"])
@pytest.mark.parametrize("name", [*READS, *PUTS])
def test_who_stood_still_in_a_transfer_tries_again_and_blames_nobody(
    make_client: MakeClient, master: FakeMaster, name: str, error: CenoteError
) -> None:
    client = make_client(by_lease=False, deadline_s=60.0, location_cache_entries=0)
    client.put_batch(list(VALUES), list(VALUES.values())).raise_for_errors()
    Standstill(client, master).in_next_transfer(error)
    assert (READS | PUTS)[name](client)
    assert client.stats().node_failures == 0
    assert client.stats().unreachable_misses == 0
    assert client.session.state.suspects == {}
    assert master.failures == []


@pytest.mark.parametrize("name", list(PUTS))
def test_who_stood_still_in_a_seal_blames_nobody(
    make_client: MakeClient, master: FakeMaster, name: str
) -> None:
    client = make_client(deadline_s=60.0)
    standstill = Standstill(client, master)
    master.hooks["put_commit"] = lambda: standstill.in_next_transfer(LATE)
    assert PUTS[name](client)
    assert client.stats().node_failures == 0
    assert master.failures == []


@pytest.mark.parametrize("name", ["put", "two replicas"])
def test_a_put_that_has_no_time_left_sends_no_bytes_and_blames_nobody(
    make_client: MakeClient, master: FakeMaster, name: str
) -> None:
    client = make_client(deadline_s=0.9 * STOPPED_S)
    master.hooks["put_start"] = Standstill(client, master).stop
    with pytest.raises(DeadlineExceeded):
        PUTS[name](client)
    assert sum(node.writes for node in master.nodes.values()) == 0
    assert client.stats().node_failures == 0
    assert master.failures == []
