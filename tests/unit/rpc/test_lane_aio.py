"""The lane's client for coroutines: the same promises as the blocking one."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from cenote.api.errors import (
    AlreadyExists,
    ClientClosed,
    DeadlineExceeded,
    ForkedClient,
    InvalidArgument,
    ProtocolError,
    Unauthenticated,
    Unavailable,
)
from cenote.rpc.frames import REPLY, pack_frame
from cenote.rpc.lane_aio import AsyncLaneClient
from cenote.rpc.lane_server import LaneLimits
from promptness import ends_within
from unit.rpc.lane_testing import (
    ECHO,
    LATER,
    MANY_BYTES,
    NEVER,
    RAISE,
    LaneThread,
    ScriptedServer,
    open_sockets,
    silent,
)
from waiting import wait_until, wait_until_async


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[LaneThread]:
    with LaneThread(tmp_path, tcp=True) as started:
        yield started


Loops = pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def run(
    work: Callable[[], Coroutine[Any, Any, None]],
    make_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(work())


@Loops
def test_calls_over_tcp_and_unix(
    lane: LaneThread, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def work() -> None:
        for address in (lane.address, lane.tcp_address):
            replies: list[bytes] = []
            async with AsyncLaneClient(address, b"me", on_hello=replies.append) as client:
                for size in (0, 64, 70_000, 5_000_000):
                    body = random.Random(size).randbytes(size)
                    assert await client.call(ECHO, body, 5) == body
                bodies = [b"%d" % n for n in range(1000)]
                assert await client.call_many(ECHO, bodies, 10) == bodies
                assert await client.call_many(MANY_BYTES, [b"300000"] * 50, 10) == (
                    [b"z" * 300_000] * 50
                )
            assert replies == [b"welcome me"]

    run(work, make_loop)


def test_errors_are_typed(lane: LaneThread) -> None:
    async def work() -> None:
        async with AsyncLaneClient(lane.address, b"") as client:
            with pytest.raises(AlreadyExists) as caught:
                await client.call(RAISE, b"same", 5)
            assert caught.value.same_bytes is True
            results = await client.call_many(RAISE, [b"a", b"b"], 5)
            assert [type(result) for result in results] == [AlreadyExists] * 2
            with pytest.raises(InvalidArgument):
                await client.call(ECHO, bytes((16 << 20) + 1), 5)
            with pytest.raises(DeadlineExceeded):
                await client.call(ECHO, b"", 0)
        async with AsyncLaneClient(lane.address, b"stranger") as client:
            with pytest.raises(Unauthenticated):
                await client.call(ECHO, b"", 5)

    run(work)
    wait_until(lambda: not lane.server.connections, what="all connections gone")


def test_calls_share_one_connection_and_overtake(lane: LaneThread) -> None:
    async def work() -> None:
        async with AsyncLaneClient(lane.address, b"") as client:
            slow = [asyncio.create_task(client.call(LATER, b"%d" % n, 5)) for n in range(5)]
            await wait_until_async(lambda: len(lane.futures) == 5, what="all requests")
            assert await client.call(ECHO, b"quick", 5) == b"quick"
            for n in (3, 0, 4, 1, 2):
                lane.finish(b"%d" % n, b"r%d" % n)
            assert await asyncio.gather(*slow) == [b"r0", b"r1", b"r2", b"r3", b"r4"]
        assert len(lane.hellos) == 1

    run(work)


@Loops
def test_a_deadline_costs_no_connection(
    lane: LaneThread, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def work() -> None:
        async with AsyncLaneClient(lane.address, b"") as client:
            with (
                ends_within(0.1, at_least_s=0.1),
                pytest.raises(DeadlineExceeded) as caught,
            ):
                await client.call(LATER, b"a", 0.1)
            assert caught.value.maybe_executed
            lane.finish(b"a", b"late")
            assert await client.call(ECHO, b"mine", 5) == b"mine"
        assert len(lane.hellos) == 1

    run(work, make_loop)


def test_a_cancelled_call_harms_no_other(lane: LaneThread) -> None:
    async def work() -> None:
        async with AsyncLaneClient(lane.address, b"", inflight_max=2) as client:
            call = asyncio.create_task(client.call(LATER, b"a", 5))
            await wait_until_async(lambda: b"a" in lane.futures, what="the request")
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            lane.finish(b"a", b"nobody waits")
            # Its place among the calls under way is free again, too.
            assert await client.call_many(ECHO, [b"1", b"2", b"3"], 5) == [b"1", b"2", b"3"]
            many = asyncio.create_task(client.call_many(NEVER, [b"x", b"y", b"z"], 5))
            await wait_until_async(lambda: len(lane.futures) == 2, what="two requests")
            many.cancel()
            with pytest.raises(asyncio.CancelledError):
                await many
            assert await client.call(ECHO, b"x", 5) == b"x"

    run(work)


def test_cancelling_the_first_call_does_not_cancel_the_connection_of_others(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        address = f"unix://{tmp_path}/lane.sock"
        async with AsyncLaneClient(address, b"", connect_timeout_s=10) as client:
            first = asyncio.create_task(client.call(ECHO, b"1", 10))
            second = asyncio.create_task(client.call(ECHO, b"2", 10))
            await wait_until_async(lambda: client._opening is not None, what="connecting")
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            with LaneThread(tmp_path) as lane:
                assert await second == b"2"
                assert len(lane.hellos) == 1
                await client.close()

    run(work)


def test_more_calls_than_may_be_under_way_wait_within_their_deadline(lane: LaneThread) -> None:
    async def work() -> None:
        async with AsyncLaneClient(lane.address, b"", inflight_max=1) as client:
            first = asyncio.create_task(client.call(LATER, b"a", 5))
            await wait_until_async(lambda: b"a" in lane.futures, what="the request")
            with pytest.raises(DeadlineExceeded) as caught:
                await client.call(ECHO, b"", 0.05)
            assert not caught.value.maybe_executed
            lane.finish(b"a", b"done")
            assert await first == b"done"

    run(work)


@Loops
def test_a_broken_connection_ends_all_calls_and_is_made_again(
    tmp_path: Path, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    def hang_up_on_the_second(sock: socket.socket) -> None:
        if server.accepted == 1:
            sock.recv(1 << 16)
            sock.close()
            return
        sock.recv(1 << 16)
        sock.sendall(pack_frame(REPLY, 2, ECHO, body=b"again"))
        sock.recv(1)

    with ScriptedServer(tmp_path, hang_up_on_the_second) as server:

        async def work() -> None:
            async with AsyncLaneClient(server.address, b"") as client:
                results = await client.call_many(ECHO, [b"x"] * 3, 5)
                for result in results:
                    assert isinstance(result, Unavailable)
                    assert result.maybe_executed
                assert results[0] is not results[1]
                assert await client.call(ECHO, b"x", 5) == b"again"

        run(work, make_loop)


def test_nonsense_closes_the_connection(tmp_path: Path) -> None:
    def nonsense(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        sock.recv(1)

    async def work() -> None:
        for greet in (True, False):
            with ScriptedServer(tmp_path, nonsense, greet=greet) as server:
                async with AsyncLaneClient(server.address, b"") as client:
                    with pytest.raises(ProtocolError, match="400 B"):
                        await client.call(ECHO, b"x", 5)
            os.unlink(server.path)

    run(work)


@Loops
def test_nobody_there(tmp_path: Path, make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def work() -> None:
        address = f"unix://{tmp_path}/none.sock"
        async with AsyncLaneClient(address, b"", connect_timeout_s=0.1) as client:
            calls = await client.call_many(ECHO, [b""] * 3, 5)
            for error in calls:
                assert isinstance(error, Unavailable)
                assert address in str(error)
                assert not error.maybe_executed
            with pytest.raises(DeadlineExceeded):
                await client.call(ECHO, b"", 0.03)

    run(work, make_loop)


def test_a_silent_server_at_hello(tmp_path: Path) -> None:
    async def work() -> None:
        with ScriptedServer(tmp_path, silent, greet=False) as server:
            async with AsyncLaneClient(server.address, b"", connect_timeout_s=0.1) as client:
                with pytest.raises(Unavailable, match="nobody answered in time"):
                    await client.call(ECHO, b"", 5)

    run(work)


@Loops
def test_close_ends_everything(
    lane: LaneThread,
    tmp_path: Path,
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    sockets_before = open_sockets()

    async def work() -> None:
        client = AsyncLaneClient(lane.address, b"", inflight_max=2)
        calls = [asyncio.create_task(client.call(NEVER, b"%d" % n, 5)) for n in range(4)]
        await wait_until_async(lambda: len(lane.futures) == 2, what="two requests")
        await client.close()
        for call in calls:
            with pytest.raises(ClientClosed):
                await call
        with pytest.raises(ClientClosed):
            await client.call(ECHO, b"", 5)
        await client.close()
        # While it connects.
        client = AsyncLaneClient(f"unix://{tmp_path}/none.sock", b"")
        call = asyncio.create_task(client.call(ECHO, b"", 5))
        await wait_until_async(lambda: client._opening is not None, what="connecting")
        await client.close()
        with pytest.raises(ClientClosed):
            await call

    run(work, make_loop)
    wait_until(lambda: not lane.server.connections, what="the server's side")
    assert open_sockets() == sockets_before


def test_a_client_that_outruns_the_server_waits(tmp_path: Path) -> None:
    limits = LaneLimits(write_buffer_high_bytes=50_000)

    async def work() -> None:
        with LaneThread(tmp_path, limits) as lane:
            async with AsyncLaneClient(lane.address, b"") as client:
                bodies = [bytes([n]) * 1_000_000 for n in range(60)]
                assert await client.call_many(ECHO, bodies, 20) == bodies

    run(work)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused(lane: LaneThread) -> None:
    async def work() -> None:
        async with AsyncLaneClient(lane.address, b"") as client:
            assert await client.call(ECHO, b"x", 5) == b"x"
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    client.call(ECHO, b"", 5).send(None)
                except ForkedClient:
                    code = 42
                finally:
                    os._exit(code)
            assert exit_code(pid) == 42
            assert await client.call(ECHO, b"y", 5) == b"y"

    run(work)
