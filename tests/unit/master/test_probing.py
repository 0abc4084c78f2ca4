"""Probes: whether a node answers, and not whether its kernel accepts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from cenote.api.errors import Unauthenticated
from cenote.master.probing import Prober, answers
from cenote.transport import wire
from cenote.v1 import store_pb2
from waiting import wait_until_async

HELLO_REPLY = wire.encode_hello_reply(store_pb2.DataHelloResponse(node_id=1))
REFUSAL = wire.encode_hello_error(Unauthenticated("who are you?"))


@contextmanager
def silent_listener() -> Iterator[int]:
    """Accepts by its kernel alone, as a stopped process does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


async def probed(reply: bytes) -> bool:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readexactly(wire.HELLO.size)
        await reader.readexactly(wire.hello_length(head))
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        return await answers("127.0.0.1", server.sockets[0].getsockname()[1], 5.0)


def test_any_answer_counts() -> None:
    assert asyncio.run(probed(HELLO_REPLY))
    assert asyncio.run(probed(REFUSAL))


def test_silence_does_not() -> None:
    assert not asyncio.run(probed(b"\0"))
    with silent_listener() as port:
        assert not asyncio.run(answers("127.0.0.1", port, 0.05))
    assert not asyncio.run(answers("127.0.0.1", port, 5.0))  # nobody listens any more


def test_one_probe_a_node_and_one_more_where_it_was_asked_for_meanwhile() -> None:
    asked: list[int] = []
    came: list[tuple[int, bool]] = []

    def endpoint_of(node_id: int) -> str:
        asked.append(node_id)
        return f"127.0.0.1:{port}" if node_id == 1 else ""

    async def scenario() -> None:
        prober = Prober(endpoint_of, lambda node_id, answered: came.append((node_id, answered)))
        prober.probe(7)  # it told no address
        for _ in range(3):
            prober.probe(1)
        await wait_until_async(lambda: len(came) == 2, what="two probes")
        prober.close()
        prober.probe(1)
        prober.close()

    with silent_listener() as port:
        pass
    asyncio.run(scenario())
    assert came == [(1, False)] * 2
    assert asked == [7, 1, 1]


def test_an_answer_that_is_late_counts_after_all() -> None:
    """As of a node on a slow machine: hidden at first, and back with its answer."""
    came: list[bool] = []

    async def scenario() -> None:
        hidden = asyncio.Event()

        def note(_node_id: int, answered: bool) -> None:
            came.append(answered)
            hidden.set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await hidden.wait()
            writer.write(HELLO_REPLY)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            prober = Prober(lambda _: f"127.0.0.1:{port}", note)
            prober.probe(1)
            await wait_until_async(lambda: len(came) == 2, what="both verdicts")
            prober.close()

    asyncio.run(scenario())
    assert came == [False, True]


def test_closing_ends_a_probe_that_waits() -> None:
    came: list[bool] = []

    async def scenario(port: int) -> None:
        prober = Prober(lambda _: f"127.0.0.1:{port}", lambda _, answered: came.append(answered))
        prober.probe(1)
        await wait_until_async(lambda: came, what="the first verdict")
        prober.close()
        await wait_until_async(lambda: len(asyncio.all_tasks()) == 1, what="its tasks to end")

    with silent_listener() as port:
        asyncio.run(scenario(port))
    assert came == [False]
