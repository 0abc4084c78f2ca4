"""Memory of GPUs through the SDK. What stands for a GPU is memory that no processor can touch."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import (
    BufferInUse,
    ClientClosed,
    DeadlineExceeded,
    InvalidBuffer,
    NoSpace,
    ResourceUnavailable,
    StaleEpoch,
)
from cenote.client import Client
from cenote.client.aio import AsyncClient
from cenote.client.devices import AREAS, DeviceStaging
from fake_gpu import FakeArray, FakeGpu, FakeTensor, no_gpu
from fake_pool import FakeMaster, FakeTransport
from promptness import ends_within
from waiting import wait_until, wait_until_async

BLOCK = 5000
COUNT = 40
STAGING_BYTES = 64 << 10
"""Areas of 16 KiB: three blocks each."""
MakeClient = Callable[..., Client]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(DeviceStaging.__init__, "__defaults__", (gpu.open,))
    return gpu


@pytest.fixture
def client(gpu: FakeGpu, make_client: MakeClient) -> Client:
    return make_client(device_staging_bytes=STAGING_BYTES)


def blocks(count: int = COUNT) -> tuple[list[str], bytes]:
    return [f"k{i}" for i in range(count)], os.urandom(count * BLOCK)


def test_one_object_there_and_back(client: Client, gpu: FakeGpu) -> None:
    """Put from a GPU, read to the host, and into a GPU; nothing but copies touched it."""
    data = os.urandom(BLOCK)
    source, target = gpu.array(BLOCK, data), gpu.array(BLOCK + 100)
    assert client.put_from("k", source).stored
    assert client.get("k") == data
    assert client.get_into("k", target) == BLOCK
    assert target.data[:BLOCK] == data
    assert target.data[BLOCK:] == bytes(100)
    assert client.get_into("absent", target) is None
    assert target.data[:BLOCK] == data
    assert client.put_from("k", source).existed
    stats = client.stats()
    assert (stats.device_staged_bytes, stats.device_direct_bytes) == (3 * BLOCK, 0)
    assert not gpu.under_way


def test_a_tensor(client: Client, gpu: FakeGpu) -> None:
    data = os.urandom(BLOCK)
    assert client.put("k", FakeTensor(gpu.array(BLOCK, data), "cuda")).stored
    target = gpu.array(BLOCK)
    assert client.get_into("k", FakeTensor(target, "cuda")) == BLOCK
    assert target.data == data
    assert set(gpu.waited_for) == {1}  # the stream that tensors are computed on


def test_batches_go_in_turns(client: Client, gpu: FakeGpu) -> None:
    """More than the staging memory holds: as many turns as it takes, one copied ahead of the other,
    neighbours as one copy, and no more areas than a call may use."""
    keys, data = blocks()
    source = gpu.array(len(data), data)
    client.put_from_batch(keys, source.rows(COUNT), chain=True).raise_for_errors()
    assert gpu.copies == -(-COUNT // 3)
    assert gpu.most_under_way == 1
    assert len(gpu.pinned) == 2
    target = gpu.array(len(data))
    results = client.get_into_batch(keys, target.rows(COUNT), chain=True)
    results.raise_for_errors()
    assert results.hit_count == COUNT
    assert target.data == data
    assert len(gpu.pinned) == 2
    assert not gpu.under_way


def test_scattered_and_mixed_objects(client: Client, gpu: FakeGpu) -> None:
    """Objects put together from pieces on a GPU and on the host."""
    data = os.urandom(3 * BLOCK)
    on_gpu = gpu.array(2 * BLOCK, data[: 2 * BLOCK])
    on_host = np.frombuffer(data[2 * BLOCK :], np.uint8)
    one = [on_gpu.part(0, BLOCK), on_host[:100], on_gpu.part(BLOCK, BLOCK)]
    whole = data[:BLOCK] + data[2 * BLOCK :][:100] + data[BLOCK : 2 * BLOCK]
    client.put_from_batch(["a", "b"], [one, on_host]).raise_for_errors()
    assert client.get("a") == whole
    assert client.get("b") == on_host.tobytes()
    there, here = gpu.array(2 * BLOCK + 50), np.zeros(BLOCK, np.uint8)
    pieces = [there.part(0, BLOCK + 50), here[:50], there.part(BLOCK + 50, BLOCK)]
    assert client.get_into("a", pieces) == len(whole)
    assert there.data == whole[: BLOCK + 50] + whole[BLOCK + 100 :]
    assert here[:50].tobytes() == whole[BLOCK + 50 : BLOCK + 100]
    assert client.get_into_batch(["b", "a"], [here, pieces]).hit_count == 2
    assert here[50:].tobytes() == on_host[50:].tobytes()


def test_misses_leave_the_rest(client: Client, gpu: FakeGpu) -> None:
    keys, data = blocks(9)
    client.put_batch(keys[::2], [data[i * BLOCK :][:BLOCK] for i in range(0, 9, 2)])
    target = gpu.array(len(data))
    results = client.get_into_batch(keys, target.rows(9))
    assert [results[i] for i in range(9)] == [BLOCK if i % 2 == 0 else None for i in range(9)]
    found = target.data
    for i in range(9):
        block = data[i * BLOCK :][:BLOCK] if i % 2 == 0 else bytes(BLOCK)
        assert found[i * BLOCK :][:BLOCK] == block
    before = client.stats()
    chain = client.get_into_batch(keys, target.rows(9), chain=True)
    assert [chain[i] for i in range(9)] == [BLOCK] + [None] * 8
    after = client.stats()
    assert (after.hits - before.hits, after.misses - before.misses) == (1, 8)


def test_under_a_lease(client: Client, gpu: FakeGpu) -> None:
    keys, data = blocks(9)
    client.put_batch(keys, [data[i * BLOCK :][:BLOCK] for i in range(9)]).raise_for_errors()
    lease = client.acquire(keys, 5.0)
    target = gpu.array(len(data))
    assert client.get_into_batch(keys, target.rows(9), lease=lease).hit_count == 9
    assert target.data == data
    client.release(lease)


def test_a_chain_is_touched_as_one(client: Client, master: FakeMaster, gpu: FakeGpu) -> None:
    """Cut into turns, its root is still the newest."""
    keys, data = blocks(9)
    source = gpu.array(len(data), data)
    client.put_from_batch(keys, source.rows(9), chain=True).raise_for_errors()
    wait_until(
        lambda: [len(each) // 16 for each in master.put_chains] == [6, 9],
        what="the chain to be told as it grows, and whole in the end",
    )
    assert not master.touched_chains


def test_addresses_of_registered_memory(client: Client, gpu: FakeGpu) -> None:
    keys, data = blocks(6)
    source, target = gpu.array(len(data), data), gpu.array(len(data))
    steps = np.arange(6, dtype=np.uint64) * np.uint64(BLOCK)
    with client.register(source) as one, client.register(target):
        assert not one.is_direct
        client.put_from_batch(
            keys, addresses=steps + np.uint64(source.address), lengths=BLOCK
        ).raise_for_errors()
        at = steps + np.uint64(target.address)
        assert client.get_into_batch(keys, addresses=at, lengths=BLOCK).hit_count == 6
    assert target.data == data
    assert not client.session.staging.knows_memory


def test_it_waits_for_the_owners_stream(client: Client, gpu: FakeGpu) -> None:
    array = gpu.array(BLOCK, os.urandom(BLOCK))
    client.put_from("a", array)
    assert gpu.waited_for == []  # version 3 of the interface: nothing is under way
    array.stream = 77
    client.put_from("b", array)
    assert gpu.waited_for == [77]


# ---- what can't be had --------------------------------------------------------------------------


def test_no_gpu_here(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceStaging.__init__, "__defaults__", (no_gpu,))
    client, array = make_client(), FakeArray(BLOCK)
    for call in (
        lambda: client.put_from("k", array),
        lambda: client.get_into("k", array),
        lambda: client.register(array),
        lambda: client.put_from_batch(["k"], [array]),
    ):
        with pytest.raises(ResourceUnavailable, match="no CUDA driver") as caught:
            call()
        assert "tensor.cpu()" in caught.value.remedy


def test_the_real_driver_says_so_where_there_is_none(make_client: MakeClient) -> None:
    if os.path.exists("/proc/driver/nvidia"):
        pytest.skip("this machine has an NVIDIA driver")
    with pytest.raises(ResourceUnavailable, match="no CUDA driver") as caught:
        make_client().put_from("k", FakeArray(BLOCK))
    assert "libcuda" in caught.value.remedy


def test_an_object_that_is_too_large(client: Client, gpu: FakeGpu) -> None:
    with pytest.raises(InvalidBuffer, match="can be staged at once") as caught:
        client.put_from_batch(["a", "b"], [gpu.array(10), gpu.array(STAGING_BYTES // AREAS + 1)])
    assert caught.value.message.startswith("buffer 1 of 16 KiB")
    assert "device_staging_bytes" in caught.value.remedy
    assert client.get("a") is None


def test_memory_that_can_not_be_pinned(client: Client, gpu: FakeGpu) -> None:
    gpu.pins = False
    data = os.urandom(BLOCK)
    client.put_from("k", gpu.array(BLOCK, data))
    assert client.get("k") == data
    assert not client.session.staging.pinned


def test_a_copy_that_fails(client: Client, gpu: FakeGpu) -> None:
    gpu.error = InvalidBuffer("5000 bytes can't be copied (CUDA error 700)")
    with pytest.raises(InvalidBuffer, match="CUDA error 700"):
        client.put_from("k", gpu.array(BLOCK, os.urandom(BLOCK)))
    assert client.get("k") is None
    client.put("k", b"x" * BLOCK)
    target = gpu.array(BLOCK)
    gpu.error = InvalidBuffer("CUDA error 700")
    with pytest.raises(InvalidBuffer, match="CUDA error 700"):
        client.get_into("k", target)
    assert client.get_into("k", target) == BLOCK
    assert target.data == b"x" * BLOCK


def test_a_pool_that_refuses(client: Client, master: FakeMaster, gpu: FakeGpu) -> None:
    """In the first turn the call's error, later each key's; nothing is left under way."""
    keys, data = blocks(9)
    source = gpu.array(len(data), data)
    master.faults["put_start"] = [NoSpace("full")]
    with pytest.raises(NoSpace):
        client.put_from_batch(keys, source.rows(9))
    assert not gpu.under_way
    fail = iter([None, NoSpace("full")])

    def hook() -> None:
        error = next(fail, None)
        if error is not None:
            raise error

    master.hooks["put_start"] = hook
    results = client.put_from_batch(keys, source.rows(9))
    assert [results[i].stored for i in range(9)] == [True] * 3 + [False] * 6
    assert client.stats().failed == 6
    assert not gpu.under_way


def test_a_gpu_that_does_not_come_to_it(client: Client, gpu: FakeGpu) -> None:
    """By the deadline the buffer is named as in use; it is kept, and all is well afterwards."""
    array = gpu.array(BLOCK, os.urandom(BLOCK))
    gpu.stuck = True
    for call in (
        lambda: client.put_from("k", array, deadline_s=0.3),
        lambda: client.put_from_batch(["k"], [array], deadline_s=0.3),
    ):
        with ends_within(0.3 + 0.2), pytest.raises(BufferInUse, match="GPU may still copy"):
            call()
    client.put("there", b"y" * BLOCK)
    target = gpu.array(BLOCK)
    with pytest.raises(BufferInUse):
        client.get_into("there", target, deadline_s=0.3)
    with pytest.raises(BufferInUse):
        client.put_from("k", array, deadline_s=0.1)
    with ends_within(0.1 + 0.2), pytest.raises(DeadlineExceeded, match="all staging memory"):
        client.put_from("k", array, deadline_s=0.1)
    gpu.stuck = False
    assert client.put_from("k", array).stored
    assert client.get_into("there", target) == BLOCK
    assert target.data == b"y" * BLOCK
    assert not gpu.under_way


def test_closing(client: Client, gpu: FakeGpu) -> None:
    array = gpu.array(BLOCK, os.urandom(BLOCK))
    client.put_from("k", array)
    assert gpu.pinned
    client.close()
    assert not gpu.pinned
    assert gpu.is_closed
    with pytest.raises(ClientClosed):
        client.put_from("k", array)


# ---- coroutines ---------------------------------------------------------------------------------


def test_coroutines(gpu: FakeGpu, master: FakeMaster) -> None:
    keys, data = blocks()

    async def main() -> None:
        over = [FakeTransport(master.nodes)]
        async with await AsyncClient.embedded(
            master, over, device_staging_bytes=STAGING_BYTES
        ) as client:
            source, target = gpu.array(len(data), data), gpu.array(len(data))
            (await client.put_from_batch(keys, source.rows(COUNT))).raise_for_errors()
            assert (await client.get_into_batch(keys, target.rows(COUNT))).hit_count == COUNT
            assert target.data == data
            assert (await client.put_from("one", source.part(0, BLOCK))).stored
            assert await client.get_into("one", target.part(BLOCK, BLOCK)) == BLOCK
            gpu.stuck = True
            task = asyncio.ensure_future(client.put_from("two", source.part(0, BLOCK)))
            await wait_until_async(lambda: bool(gpu.under_way), what="the copy to be begun")
            task.cancel()
            gpu.stuck = False
            with pytest.raises(asyncio.CancelledError):
                await task
            gc.collect()
            assert (await client.put_from("two", source.part(0, BLOCK))).stored

    asyncio.run(main())
    assert not gpu.under_way
    assert not gpu.pinned


# ---- straight from the NIC ----------------------------------------------------------------------


class Reaching(FakeTransport):
    """NICs that reach the GPU: its arrays are not guarded then."""

    kind = 3

    def __init__(self, nodes: Any) -> None:
        super().__init__(nodes, by_lease=False)
        self.registered: list[tuple[int, int]] = []
        self.directly = 0
        self.error: Exception | None = None

    def register_device(
        self, address: int, length: int, keeper: object, *, bus_address: str
    ) -> tuple[int, int]:
        assert bus_address == "0000:30:00.0"
        self.registered.append((address, length))
        return address, length

    def deregister(self, region: Any) -> None:
        if isinstance(region, tuple):
            self.registered.remove(region)

    def connect(self, *arguments: Any) -> Any:
        channel: Any = super().connect(*arguments)

        def read_direct(extents: Any, addresses: Any, lease_id: int, deadline_s: float) -> Any:
            assert lease_id
            if self.error is not None:
                raise self.error
            self.directly += 1
            return channel.read(extents, addresses, deadline_s)

        channel.read_direct = read_direct
        return channel


@pytest.fixture
def reaching(gpu: FakeGpu) -> Iterator[tuple[Client, Reaching]]:
    pool = FakeMaster(nodes=1)
    transport = Reaching(pool.nodes)
    with Client.embedded(pool, [transport], device_staging_bytes=STAGING_BYTES) as client:
        yield client, transport


def test_nics_read_into_registered_memory(reaching: tuple[Client, Reaching], gpu: FakeGpu) -> None:
    client, transport = reaching
    keys, data = blocks()
    source, target = gpu.array(len(data), data), gpu.array(len(data), guarded=False)
    client.put_from_batch(keys, source.rows(COUNT)).raise_for_errors()
    staged = client.stats().device_staged_bytes
    with client.register(target) as registration:
        assert registration.is_direct
        assert transport.registered == [(target.address, len(data))]
        target._map[:] = bytes(len(target._map))
        assert client.get_into_batch(keys, target.rows(COUNT)).hit_count == COUNT
        assert target.data == data
        assert client.get_into("k0", target.part(BLOCK, BLOCK)) == BLOCK
        lease = client.acquire(keys, 5.0)
        assert client.get_into_batch(keys, target.rows(COUNT), lease=lease).hit_count == COUNT
        assert (transport.directly, gpu.flushes) == (3, 3)
        stats = client.stats()
        assert stats.device_staged_bytes == staged
        assert stats.device_direct_bytes == (2 * COUNT + 1) * BLOCK
        assert target.data == data
    assert transport.registered == []


@pytest.mark.parametrize("error", [ResourceUnavailable("over TCP now"), StaleEpoch("replaced")])
def test_what_nics_can_not_do_is_staged(
    reaching: tuple[Client, Reaching], gpu: FakeGpu, error: Exception
) -> None:
    client, transport = reaching
    keys, data = blocks(9)
    client.put_batch(keys, [data[i * BLOCK :][:BLOCK] for i in range(9)]).raise_for_errors()
    target = gpu.array(len(data))
    with client.register(target):
        transport.error = error
        assert client.get_into_batch(keys, target.rows(9)).hit_count == 9
        assert target.data == data
        results = client.get_into_batch([*keys, "absent"], [*target.rows(9), gpu.array(BLOCK)])
        assert results.hit_count == 9
    assert transport.directly == 0


def test_checksums_where_they_are_wanted(gpu: FakeGpu) -> None:
    """`verify="checksum"`: through the host, where they are taken."""
    pool = FakeMaster(nodes=1)
    transport = Reaching(pool.nodes)
    with Client.embedded(pool, [transport], verify="checksum") as client:
        client.put("k", b"z" * BLOCK)
        target = gpu.array(BLOCK)
        with client.register(target):
            assert client.get_into("k", target) == BLOCK
        assert target.data == b"z" * BLOCK
        assert transport.directly == 0
