"""A client of a fake pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cenote.client import Client
from fake_pool import FakeMaster, FakeTransport
from master_thread import MasterThread

MakeClient = Callable[..., Client]


@pytest.fixture
def master() -> FakeMaster:
    return FakeMaster(nodes=3)


@pytest.fixture
def make_client(master: FakeMaster) -> Iterator[MakeClient]:
    """Clients of `master`; `by_lease=False` makes reads prove themselves by checksum, like TCP."""
    made: list[Client] = []

    def make(*, by_lease: bool = True, of: FakeMaster | None = None, **options: Any) -> Client:
        pool = of or master
        over = [FakeTransport(pool.nodes, by_lease=by_lease)]
        client = Client.embedded(pool, over, **options)
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(make_client: MakeClient) -> Client:
    return make_client()


@pytest.fixture
def served(master: FakeMaster, tmp_path: Path) -> Iterator[MasterThread]:
    with MasterThread(master, tmp_path / "one.sock") as thread:
        yield thread


@pytest.fixture
def connect(master: FakeMaster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Client]]:
    """Clients whose metadata goes over lanes and whose bytes go to the fake nodes."""
    made: list[Client] = []
    monkeypatch.setattr(
        "cenote.client.client.make_transports", lambda config, tls: [FakeTransport(master.nodes)]
    )

    def connect(*addresses: str, **options: float) -> Client:
        client = Client(list(addresses), **options)  # type: ignore[arg-type]
        made.append(client)
        return client

    yield connect
    for client in made:
        client.close()
