"""The master across a lane: messages as bytes, standbys followed, sessions opened again."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cenote.api.errors import (
    ClientClosed,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidArgument,
    NotLeader,
    ProtocolError,
    SessionUnknown,
    Unavailable,
)
from cenote.client.aio import AsyncClient
from cenote.client.client import Client
from cenote.client.master_stub import LaneMaster
from fake_pool import FakeMaster
from master_thread import MasterThread
from waiting import wait_until


def stub_of(client: Client) -> LaneMaster:
    master = client.session.master
    assert isinstance(master, LaneMaster)
    return master


def test_every_call_crosses_the_lane(
    served: MasterThread, connect: Callable[..., Client], master: FakeMaster
) -> None:
    client = connect(served.address)
    keys = [f"k{i}" for i in range(300)]
    values = [os.urandom(40) for _ in keys]
    assert client.put("one", b"x").stored
    assert client.put("one", b"x").existed
    assert client.put_batch(keys, values, replicas=2).stored_count == 300
    assert client.get("one") == b"x"
    assert client.get("none") is None
    assert client.get_batch(keys) == values
    assert client.exists("one")
    assert client.exists_batch(keys).all()
    assert client.match(keys).prefix_keys == 300
    client.release(client.acquire(keys, 2.0))
    assert client.pin(["one"]).tolist() == [1]
    assert client.unpin(["one"]).tolist() == [1]
    assert client.remove("one")
    with pytest.raises(FingerprintMismatch):
        client.namespace("default", fingerprint=b"other")
    master.batch_keys_max = 100
    assert connect(served.address).exists_batch(keys).tolist() == [1] * 300
    wait_until(lambda: not master.leases, what="the leases are released")
    client.close()
    with pytest.raises(ClientClosed):
        client.get("one")


def test_a_standby_names_the_leader(
    served: MasterThread, connect: Callable[..., Client], master: FakeMaster, tmp_path: Path
) -> None:
    with MasterThread(FakeMaster(), tmp_path / "standby.sock") as standby:
        standby.leader = served.address
        client = connect(standby.address)  # it knows only the standby
        assert client.put("a", b"x").stored
        assert master.objects
        assert stub_of(client).addresses == (served.address, standby.address)
        assert standby.hellos


def test_the_next_address_is_tried(
    served: MasterThread, connect: Callable[..., Client], tmp_path: Path
) -> None:
    client = connect(f"unix://{tmp_path}/nobody.sock", served.address)
    assert client.put("a", b"x").stored


def test_nobody_there(connect: Callable[..., Client], tmp_path: Path) -> None:
    nobody = f"unix://{tmp_path}/nobody.sock"
    with pytest.raises((Unavailable, DeadlineExceeded), match=r"nobody\.sock"):
        connect(nobody, deadline_s=0.1)
    with pytest.raises((Unavailable, DeadlineExceeded), match="nobody"):
        connect(nobody, f"unix://{tmp_path}/nobody2.sock", deadline_s=1.0)
    assert [t for t in threading.enumerate() if t.name.startswith("cenote")] == []


def test_standbys_without_a_leader(connect: Callable[..., Client], tmp_path: Path) -> None:
    with (
        MasterThread(FakeMaster(), tmp_path / "a.sock") as one,
        MasterThread(FakeMaster(), tmp_path / "b.sock") as two,
    ):
        one.leader, two.leader = two.address, one.address
        with pytest.raises((NotLeader, DeadlineExceeded)):
            connect(one.address, two.address, deadline_s=0.5)


def test_a_leader_that_goes_is_replaced(
    served: MasterThread, connect: Callable[..., Client], master: FakeMaster, tmp_path: Path
) -> None:
    with MasterThread(master, tmp_path / "next.sock") as successor:
        client = connect(served.address, successor.address)
        assert client.put("a", b"x").stored
        served.stop()
        assert client.put("b", b"x").stored
        assert client.exists_batch(["a", "b"]).tolist() == [1, 1]
        assert set(successor.hellos) == {client.session.identity.session_id}


def test_a_lost_session_says_hello_on_new_connections(
    served: MasterThread, connect: Callable[..., Client], master: FakeMaster
) -> None:
    client = connect(served.address)
    client.put("a", b"x")
    hellos = len(served.hellos)
    master.known_sessions.clear()
    client._space.locations.clear()
    assert client.get_batch(["a"]) == [b"x"]
    assert len(served.hellos) > hellos
    master.faults["acquire"] = [SessionUnknown("again")] * 100
    client._space.locations.clear()
    with pytest.raises(SessionUnknown):
        client.get("a")


def test_garbage_is_a_protocol_error(served: MasterThread, connect: Callable[..., Client]) -> None:
    client = connect(served.address)
    served.garbage = True
    for use in (
        lambda: client.get("a"),
        lambda: client.exists("a"),
        lambda: client.put("a", b"x"),
        lambda: client.match(["a"]),
        lambda: client.exists_batch(["a"] * 5000),
    ):
        with pytest.raises(ProtocolError, match=r"no \w+Response"):
            use()
    served.garbage = False


def test_addresses_are_checked_at_once() -> None:
    with pytest.raises(InvalidArgument, match="nonsense"):
        Client("nonsense", deadline_s=0.1)


def test_the_asyncio_face_follows_the_leader(
    served: MasterThread,
    connect: Callable[..., Client],
    master: FakeMaster,
    tmp_path: Path,
) -> None:
    async def main() -> None:
        with MasterThread(master, tmp_path / "next.sock") as successor:
            client = AsyncClient(connect(served.address, successor.address))
            assert (await client.put("a", b"x")).stored
            keys = [f"k{i}" for i in range(10)]
            assert (await client.put_batch(keys, keys_as_values(keys))).ok
            assert (await client.exists_batch(keys)).all()
            await asyncio.to_thread(served.stop)
            assert await client.get("a") == b"x"
            assert (await client.put("b", b"y")).stored
            assert await client.get_batch(["a", "b"]) == [b"x", b"y"]
            await client.close()

    asyncio.run(main())


def keys_as_values(keys: list[str]) -> list[bytes]:
    return [key.encode() for key in keys]
