"""What the tests of puts into spare extents share."""

from __future__ import annotations

import os
from typing import Any

import pytest

from cenote.client import Client
from cenote.client.plan import spares as module
from cenote.client.plan.spares import Spares
from fake_pool import FakeMaster
from waiting import wait_until

__all__ = ["COUNTS", "Putter", "check_nothing_leaks", "make_eager", "ready", "sparing_master"]

COUNTS = pytest.mark.parametrize("count", [1, 3])


def make_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares are asked for after the first put that was stored, and stay while a test is slow."""
    monkeypatch.setattr(Spares, "credit_needed", 1)
    monkeypatch.setattr(module, "IDLE_S", 600.0)


def sparing_master() -> FakeMaster:
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
