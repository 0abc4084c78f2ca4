"""The asyncio face: the same results, and what a cancelled call leaves behind."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import ClientClosed, FingerprintMismatch, InvalidBuffer, NoSpace, Unavailable
from cenote.client.aio import AsyncClient
from fake_pool import FakeMaster, FakeTransport
from waiting import loop_turns, wait_until_async


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


async def connect(master: FakeMaster, **options: Any) -> AsyncClient:
    by_lease = options.pop("by_lease", True)
    over = [FakeTransport(master.nodes, by_lease=by_lease)]
    return await AsyncClient.embedded(master, over, **options)


@pytest.mark.parametrize("by_lease", [True, False])
def test_every_call(master: FakeMaster, by_lease: bool) -> None:
    async def main() -> None:
        async with await connect(master, by_lease=by_lease) as client:
            assert (await client.put("a", b"x")).stored
            assert (await client.put_from("a", b"x")).existed
            for _ in range(2):
                assert await client.get("a") == b"x"
                assert await client.get("b") is None
                assert await client.get_into("a", bytearray(1)) == 1
                assert await client.get_into("b", bytearray(1)) is None
                assert await client.get_into("a", [bytearray(1), bytearray(1)]) == 1
            keys = [f"k{i}" for i in range(50)]
            values = [os.urandom(300) for _ in keys]
            assert (await client.put_batch(keys, values, replicas=2)).stored_count == 50
            assert (await client.put_from_batch(keys, values)).existed_count == 50
            assert await client.get_batch([*keys, "z"]) == [*values, None]
            block = np.zeros((50, 300), np.uint8)
            assert (await client.get_into_batch(keys, block)).hit_count == 50
            assert block.tobytes() == b"".join(values)
            assert (await client.exists_batch([*keys, "z"])).tolist() == [1] * 50 + [0]
            assert await client.exists("k1")
            assert (await client.match([*keys, "z"])).prefix_keys == 50
            assert (await client.prefetch(keys)).prefix_keys == 50
            lease = await client.acquire(keys, 3.0)
            assert (await client.get_into_batch(keys, block, lease=lease)).ok
            client.release(lease)
            assert (await client.pin(keys[:2])).tolist() == [1, 1]
            assert (await client.unpin(keys[:2])).tolist() == [1, 1]
            assert await client.remove("a")
            assert (await client.remove_batch(["a", "k0"])).tolist() == [0, 1]
            other = await client.namespace("other", fingerprint=b"f")
            assert await other.get("k1") is None
            assert (other.name, other.fingerprint, client.name) == ("other", b"f", "default")
            assert len(client.alloc(10)) == 10
            client.register(bytearray(4)).deregister()
            assert client.stats().stored == 51
            assert client.config.namespace == "default"
            with pytest.raises(NoSpace):
                await client.put("huge", bytes(2 << 20))
            with pytest.raises(InvalidBuffer):
                await client.get_into("k1", b"readonly")
            with pytest.raises(FingerprintMismatch):
                await client.namespace("other")
        assert client.closed
        with pytest.raises(ClientClosed):
            await client.get("a")

    run(main())
    assert [t for t in threading.enumerate() if t.name.startswith("cenote")] == []


def test_many_calls_at_once(master: FakeMaster) -> None:
    async def main() -> None:
        async with await connect(master, by_lease=False) as client:

            async def one(i: int) -> None:
                key, value = f"k{i}", bytes([i]) * 100
                assert (await client.put(key, value)).stored
                assert await client.get(key) == value

            await asyncio.gather(*[one(i) for i in range(100)])

    run(main())


def test_retries_do_not_block_the_loop(master: FakeMaster) -> None:
    async def main() -> None:
        async with await connect(master) as client:
            master.faults["acquire"] = [Unavailable("not yet")] * 5
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await loop_turns()

            counting = asyncio.create_task(count())
            assert await client.get("a") is None
            counting.cancel()
            assert turns > 20

    run(main())


def blocked(master: FakeMaster) -> tuple[threading.Event, threading.Event, Callable[[], None]]:
    """Transfers that wait: (one began, let them end, the hook)."""
    began, end = threading.Event(), threading.Event()

    def on_copy() -> None:
        began.set()
        assert end.wait(10)

    master.nodes[1].on_copy = on_copy
    return began, end, on_copy


def test_a_cancelled_read_has_ended_when_it_raises(master: FakeMaster) -> None:
    async def main() -> None:
        async with await connect(master, by_lease=False) as client:
            await client.put("a", b"x" * 100)
            began, end, _ = blocked(master)
            target = bytearray(100)
            reading = asyncio.create_task(client.get_into("a", target))
            await wait_until_async(began.is_set, what="the transfer runs")
            reading.cancel()
            await loop_turns()
            reading.cancel()  # twice does not get it out either
            await loop_turns(20)
            assert not reading.done()
            end.set()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert await client.get("a") == b"x" * 100

    run(main())


def test_a_cancelled_put_gives_its_grant_back(master: FakeMaster) -> None:
    async def main() -> None:
        async with await connect(master, by_lease=False) as client:
            began, end, _ = blocked(master)
            putting = asyncio.create_task(client.put("a", b"x"))
            await wait_until_async(began.is_set, what="the transfer runs")
            putting.cancel()
            end.set()
            with pytest.raises(asyncio.CancelledError):
                await putting
            await wait_until_async(lambda: len(master.aborted) == 1, what="the grant is aborted")
            assert master.aborted[0][1] is False  # the call waited for the write to end
            assert (await client.put("a", b"x")).stored

    run(main())


def test_what_hangs_is_cut_off_after_a_cancel(master: FakeMaster) -> None:
    async def main() -> None:
        async with await connect(master, by_lease=False) as client:
            await client.put("a", b"x")
            began, end, _ = blocked(master)
            reading = asyncio.create_task(client.get("a"))
            await wait_until_async(began.is_set, what="the transfer runs")
            used = client.blocking.session.channels[1]
            reading.cancel()
            await wait_until_async(lambda: used.closed, what="its channel is closed")  # type: ignore[attr-defined]
            end.set()
            with pytest.raises(asyncio.CancelledError):
                await reading

    run(main())
