"""The daemon's parts together in this process, with a master that is away."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cenote.api.errors import CenoteError, ResourceUnavailable
from cenote.runtime.config import load_config
from cenote.store import dram as dram_module
from cenote.store import memory_warnings
from cenote.store.config import ENV_PREFIX, StoreConfig
from cenote.store.daemon import StoreDaemon
from cenote.store.node_files import NodeFiles
from cenote.v1 import store_pb2, store_pb2_grpc
from promptness import ends_within
from slot_rows import Sealed, seal_arguments
from waiting import loop_turns, wait_until_async

MIB = 1 << 20


def config(directory: Path, **values: object) -> StoreConfig:
    defaults: dict[str, object] = {
        "name": "n1",
        "master": "127.0.0.1:1",  # nobody listens there
        "dram": 4 * MIB,
        "dram_dir": directory,
        "socket_dir": str(directory),
    }
    return load_config(StoreConfig, env_prefix=ENV_PREFIX, env={}, overrides=defaults | values)


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


FILES = {"cenote-n1.lock", "cenote-n1.claims", "cenote-n1-0.data", "cenote-n1-0.slots"}


@asynccontextmanager
async def running(
    directory: Path, **values: object
) -> AsyncIterator[tuple[StoreDaemon, Mapping[str, Any]]]:
    daemon = StoreDaemon(config(directory, **values), version="1.2")
    try:
        yield daemon, await daemon.start()
    finally:
        with ends_within(1.5):
            await daemon.stop()


def run(test: Any) -> None:
    asyncio.run(test)


def test_it_serves_without_a_master_and_keeps_its_files(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path, metrics_listen="127.0.0.1:0") as (daemon, fields):
            assert list(fields) == ["name", "data", "socket", "grpc", "metrics"]
            assert str(fields["data"]).startswith("tcp://127.0.0.1:")
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(fields["socket"]).removeprefix("unix://"))
            assert daemon.segments is not None
            segments = daemon.segments
            await wait_until_async(lambda: segments.ready, what="the memory")
            assert files(tmp_path) >= FILES
        assert files(tmp_path) == FILES

    run(test())


def test_what_was_sealed_is_there_after_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as (daemon, _):
            assert daemon.segments is not None
            segments = daemon.segments
            await wait_until_async(lambda: segments.ready, what="the memory")
            (segment,) = segments.dram()
            rows = [Sealed(i, key=b"key %d" % i) for i in range(600)]
            segment.table.admit(0, 0)  # as its master's answer would
            assert not segment.seal(1, 5, 3, *seal_arguments(rows)).any()
        async with (
            running(tmp_path) as (_, fields),
            grpc.aio.insecure_channel(fields["grpc"]) as channel,
        ):
            stub: Any = store_pb2_grpc.StoreServiceStub(channel)  # type: ignore[no-untyped-call]
            status = await stub.GetStoreStatus(store_pb2.GetStoreStatusRequest())
            assert status.sealed_slots == 600
            assert status.segments[0].ready_bytes == status.segments[0].size_bytes

            async def listed(prefix: bytes, limit: int) -> list[bytes]:
                request = store_pb2.ListSlotsRequest(
                    namespace_id=5, generation=3, key_prefix=prefix, limit=limit
                )
                answers = [answer async for answer in stub.ListSlots(request)]
                return [entry.key for answer in answers for entry in answer.entries]

            assert await listed(b"", 0) == [row.key for row in rows]
            assert await listed(b"key 59", 100) == [
                b"key 59",
                *(b"key 59%d" % i for i in range(10)),
            ]
            assert len(await listed(b"", 512)) == 512
            with pytest.raises(grpc.aio.AioRpcError, match="at most 1000000"):
                await listed(b"", 1_000_001)
            with pytest.raises(grpc.aio.AioRpcError, match="at most 512 bytes"):
                await listed(b"x" * 513, 1)
            health: Any = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(
                health_pb2.HealthCheckRequest(service="cenote.v1.StoreService")
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    run(test())


def test_files_go_where_they_are_not_to_survive(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path, wipe_on_exit=True):
            assert files(tmp_path) >= FILES
        assert files(tmp_path) == set()

    run(test())


def test_a_start_that_fails_leaves_nothing_new(tmp_path: Path) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            for name in ("listen", "grpc", "metrics_listen"):
                with pytest.raises(ResourceUnavailable, match=str(port)):
                    async with running(tmp_path, **{name: f"127.0.0.1:{port}"}):
                        pass
                assert files(tmp_path) == set()
            # ... but what an earlier life left stays.
            async with running(tmp_path):
                pass
            with pytest.raises(ResourceUnavailable, match=str(port)):
                async with running(tmp_path, listen=f"127.0.0.1:{port}"):
                    pass
            assert files(tmp_path) == FILES

    run(test())


def test_a_name_in_use_ends_the_start(tmp_path: Path) -> None:
    async def test() -> None:
        holder = NodeFiles(tmp_path, "n1")
        holder.announce(holder.node_uuid)
        with pytest.raises(ResourceUnavailable, match=f"pid {os.getpid()} holds"):
            async with running(tmp_path):
                pass
        holder.close()

    run(test())


def kept_for_others(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What was told of memory that is kept for daemons that don't run."""
    return [
        record.__dict__["cenote_fields"]
        for record in caplog.records
        if "memory is kept for a store daemon" in record.getMessage()
    ]


def test_memory_that_dead_daemons_hold_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_warnings, "GRACE_S", 0.0)

    async def test() -> None:
        async with running(tmp_path, name="old"):
            pass
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            async with running(tmp_path):
                await wait_until_async(lambda: bool(kept_for_others(caplog)), what="the warning")

    run(test())
    (told,) = kept_for_others(caplog)
    assert told["node"] == "old"
    assert told["remove_with"].startswith(f"rm {tmp_path}/cenote-old-0.data ")


def test_daemons_that_start_side_by_side_are_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_started = asyncio.Event()
    looked: list[str] = []

    async def when_all_are_there() -> None:
        await all_started.wait()

    def look(own: NodeFiles) -> None:
        warn(own)
        looked.append(own.name)

    warn = memory_warnings.warn_of_stale_memory
    monkeypatch.setattr(memory_warnings, "warn_of_stale_memory", look)
    monkeypatch.setattr(memory_warnings, "_let_others_start", when_all_are_there)

    async def test() -> None:
        async with running(tmp_path, name="a"), running(tmp_path, name="b"):
            pass
        with caplog.at_level(logging.WARNING):
            async with running(tmp_path, name="a"), running(tmp_path, name="b"):
                assert not looked
                all_started.set()
                await wait_until_async(lambda: sorted(looked) == ["a", "b"], what="both looks")

    run(test())
    assert not kept_for_others(caplog)


def test_memory_that_is_short_has_what_is_kept_told_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with running(tmp_path, name="old"):
            pass
        with caplog.at_level(logging.WARNING), pytest.raises(ResourceUnavailable):
            async with running(tmp_path, dram=1 << 42):
                pass

    run(test())
    assert [told["node"] for told in kept_for_others(caplog)] == ["old"]


@pytest.mark.parametrize("in_memory", [False, True])
def test_memory_on_a_disk_is_warned_of_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    in_memory: bool,
) -> None:
    monkeypatch.setattr("cenote.store.memory_warnings.is_memory", lambda _: in_memory)

    async def test() -> None:
        with caplog.at_level(logging.WARNING):
            async with running(tmp_path):
                pass

    run(test())
    told = [r for r in caplog.records if "--dram-dir is on a disk" in r.getMessage()]
    assert len(told) == (0 if in_memory else 1)


@pytest.mark.parametrize("allow_less", [False, True])
def test_memory_that_is_lost_to_others_while_it_is_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow_less: bool
) -> None:
    def scarce(*_: object, **__: object) -> None:
        raise ResourceUnavailable("no memory")

    async def test() -> None:
        monkeypatch.setattr(dram_module, "allocate_file", scarce)
        async with running(tmp_path, dram_allow_less=allow_less) as (daemon, _):
            if allow_less:
                await wait_until_async(lambda: not daemon._is_preparing(), what="the failure")
                assert daemon._failed is not None
                assert not daemon._failed.done()
                return
            with pytest.raises(ResourceUnavailable, match=r"of 3.75 MiB could be had: no memory"):
                await asyncio.wait_for(daemon.wait(), 10)

    run(test())


def test_it_can_be_stopped_while_it_starts(tmp_path: Path) -> None:
    """The start is cancelled after ever more turns of the loop, until it was done before."""

    async def is_done_after(turns: int) -> bool:
        daemon = StoreDaemon(config(tmp_path))
        start = asyncio.ensure_future(daemon.start())
        for _ in range(turns):
            if start.done():
                break
            await loop_turns()
        start.cancel()
        await asyncio.wait([start])
        await daemon.stop()
        return not start.cancelled()

    for exponent in range(24):
        if asyncio.run(is_done_after(int(1.8**exponent))):
            break
    else:
        pytest.fail("it never got to its end")
    assert exponent > 2, "it was never cancelled halfway"
    NodeFiles(tmp_path, "n1").close()


def test_an_error_of_the_agent_ends_the_daemon(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as (daemon, _):
            daemon._fail(CenoteError("refused"))
            daemon._fail(CenoteError("again"))
            with pytest.raises(CenoteError, match="refused"):
                await asyncio.wait_for(daemon.wait(), 10)

    run(test())
