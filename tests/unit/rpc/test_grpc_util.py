"""gRPC helpers: errors cross the wire as what they were; health and reflection answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cenote.api.errors import (
    ERRORS_BY_CODE,
    AlreadyExists,
    CenoteError,
    DeadlineExceeded,
    InternalError,
    NoSpace,
    NotLeader,
    ProtocolError,
    ProtocolVersionMismatch,
    ResourceUnavailable,
    Unavailable,
)
from cenote.rpc.grpc_util import (
    REQUEST_ID_KEY,
    GrpcServer,
    channel_options,
    error_metadata,
    status_code,
    typed_error,
)
from cenote.runtime.log import REQUEST_ID
from waiting import loop_turns

SERVICE = "cenote.test.Echo"
PARSE = health_pb2.HealthCheckRequest.FromString
SERIALIZE = health_pb2.HealthCheckRequest.SerializeToString


class Echo:
    """A service by hand: what generated code would register."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    async def unary(self, request: bytes, context: Any) -> bytes:
        if self.error is not None:
            raise self.error
        return request

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        if self.error is not None:
            raise self.error

    async def slow(self, request: bytes, context: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    @staticmethod
    def add(servicer: Echo, server: Any) -> None:
        handlers = {
            "Unary": grpc.unary_unary_rpc_method_handler(servicer.unary),
            "Stream": grpc.unary_stream_rpc_method_handler(servicer.stream),
            "Slow": grpc.unary_unary_rpc_method_handler(servicer.slow),
            "Parsed": grpc.unary_unary_rpc_method_handler(servicer.unary, PARSE, SERIALIZE),
            "ParsedStream": grpc.unary_stream_rpc_method_handler(servicer.stream, PARSE, SERIALIZE),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def serve(
    work: Callable[[Echo, Any, GrpcServer], Awaitable[None]], servicer: Echo | None = None
) -> None:
    """Run `work` with a served Echo and a channel to it."""

    async def main() -> None:
        echo = servicer or Echo()
        server = GrpcServer(message_bytes_max=100_000)
        server.add_service(Echo.add, echo, SERVICE)
        port = server.listen("127.0.0.1:0")
        await server.start()
        target = f"127.0.0.1:{port}"
        try:
            async with grpc.aio.insecure_channel(target, options=channel_options()) as channel:
                await work(echo, channel, server)
        finally:
            await server.close(0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def failure_of(call: Awaitable[Any]) -> CenoteError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return typed_error(caught.value)


def test_every_error_comes_back_as_it_was() -> None:
    async def work(echo: Echo, channel: Any, _: GrpcServer) -> None:
        unary = channel.unary_unary(f"/{SERVICE}/Unary")
        assert await unary(b"hello") == b"hello"
        for kind in ERRORS_BY_CODE.values():
            echo.error = kind("what happened", remedy="do this")
            error = await failure_of(unary(b""))
            assert type(error) is kind
            assert (error.message, error.remedy) == ("what happened", "do this")
        echo.error = NotLeader("no", addresses=["tcp://a:1"])
        leader = await failure_of(unary(b""))
        assert isinstance(leader, NotLeader)
        assert leader.addresses == ("tcp://a:1",)
        echo.error = AlreadyExists("k", same_bytes=False)
        exists = await failure_of(unary(b""))
        assert isinstance(exists, AlreadyExists)
        assert exists.same_bytes is False

    serve(work)


def test_other_languages_see_status_and_text() -> None:
    async def work(echo: Echo, channel: Any, _: GrpcServer) -> None:
        echo.error = NoSpace("the pool is full", remedy="add ä store")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE}/Unary")(b"")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "the pool is full (add ä store)"
        echo.error = NoSpace("ä" * 100_000, remedy="b" * 100_000)
        endless = await failure_of(channel.unary_unary(f"/{SERVICE}/Unary")(b""))
        assert type(endless) is NoSpace
        assert endless.message.startswith("äää")

    serve(work)


def test_streams_end_with_typed_errors() -> None:
    async def work(echo: Echo, channel: Any, _: GrpcServer) -> None:
        echo.error = NoSpace("full")
        call = channel.unary_stream(f"/{SERVICE}/Stream")(b"first")
        assert await call.read() == b"first"
        error = await failure_of(call.read())
        assert type(error) is NoSpace

    serve(work)


def test_a_bug_is_an_internal_error_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work(echo: Echo, channel: Any, _: GrpcServer) -> None:
        echo.error = ZeroDivisionError("a bug, on purpose")
        error = await failure_of(channel.unary_unary(f"/{SERVICE}/Unary")(b""))
        assert type(error) is InternalError
        assert "ZeroDivisionError: a bug, on purpose" in str(error)

    with caplog.at_level(logging.ERROR):
        serve(work)
    assert "a bug, on purpose" in caplog.text


def test_a_request_that_is_no_message_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC alone would log a traceback for each, and say UNKNOWN."""

    async def work(_: Echo, channel: Any, __: GrpcServer) -> None:
        good = health_pb2.HealthCheckRequest(service="x").SerializeToString()
        assert await channel.unary_unary(f"/{SERVICE}/Parsed")(good) == good
        error = await failure_of(channel.unary_unary(f"/{SERVICE}/Parsed")(b"\xff" * 30))
        assert type(error) is ProtocolError
        assert "30 bytes" in str(error)
        stream = channel.unary_stream(f"/{SERVICE}/ParsedStream")(b"\xff" * 30)
        assert type(await failure_of(stream.read())) is ProtocolError

    with caplog.at_level(logging.DEBUG):
        serve(work)
    assert "Traceback" not in caplog.text
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_what_grpc_itself_says_is_typed_too() -> None:
    async def work(_: Echo, channel: Any, server: GrpcServer) -> None:
        missing = await failure_of(channel.unary_unary(f"/{SERVICE}/Missing")(b""))
        assert type(missing) is ProtocolVersionMismatch
        assert not missing.maybe_executed
        late = await failure_of(channel.unary_unary(f"/{SERVICE}/Slow")(b"", timeout=0.05))
        assert type(late) is DeadlineExceeded
        assert late.maybe_executed
        big = await failure_of(channel.unary_unary(f"/{SERVICE}/Unary")(b"x" * 200_000))
        assert type(big) is ResourceUnavailable
        await server.close(0)
        gone = await failure_of(channel.unary_unary(f"/{SERVICE}/Unary")(b""))
        assert type(gone) is Unavailable

    serve(work)


def test_health_and_reflection_answer() -> None:
    async def work(_: Echo, channel: Any, server: GrpcServer) -> None:
        health = health_pb2_grpc.HealthStub(channel)
        response_type = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == response_type.SERVING
        await server.set_serving(False)
        reply = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert reply.status == response_type.NOT_SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
        names = [s.name async for r in stream for s in r.list_services_response.service]
        assert SERVICE in names
        assert "grpc.health.v1.Health" in names

    serve(work)


def test_a_start_that_is_cancelled_anywhere_can_be_closed() -> None:
    """As by a SIGTERM while a daemon starts: `close` must not fail, or the rest is not closed."""

    async def cancelled_after(turns: int) -> bool:
        server = GrpcServer()
        server.listen("127.0.0.1:0")
        starting = asyncio.ensure_future(server.start())
        await loop_turns(turns)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        await server.close(0)
        return starting.cancelled()

    async def main() -> list[bool]:
        return [await cancelled_after(turns) for turns in range(12)]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert set(runner.run(main())) == {True, False}


def test_a_port_in_use_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    async def work(_: Echo, channel: Any, server: GrpcServer) -> None:
        taken = GrpcServer()
        port = taken.listen("127.0.0.1:0")
        await taken.start()
        other = GrpcServer()
        with pytest.raises(ResourceUnavailable, match=f"port {port} is in use .*--grpc"):
            other.listen(f"127.0.0.1:{port}")
        await taken.close(0)
        await other.close(0)
        assert "add_port.cc" not in capfd.readouterr().err

    serve(work)


def test_an_address_of_another_host_is_refused() -> None:
    async def work(_: Echo, channel: Any, server: GrpcServer) -> None:
        other = GrpcServer()
        with pytest.raises(ResourceUnavailable, match=r"Cannot assign .*an address of this host"):
            other.listen("192.0.2.1:5111")
        await other.close(0)

    serve(work)


def test_every_error_class_names_a_grpc_status() -> None:
    for kind in ERRORS_BY_CODE.values():
        assert isinstance(status_code(kind("x")), grpc.StatusCode)
        assert len(error_metadata(kind("x" * 5000, remedy="y" * 5000))[0][1]) < 4000


def request_ids(metadata: Any) -> list[str]:
    return [value for key, value in metadata if key == REQUEST_ID_KEY]


def test_a_call_keeps_the_name_that_it_came_with() -> None:
    seen: list[str] = []

    class Named(Echo):
        async def unary(self, request: bytes, context: Any) -> bytes:
            seen.append(REQUEST_ID.get())
            return await super().unary(request, context)

    async def work(echo: Echo, channel: Any, server: GrpcServer) -> None:
        unary = channel.unary_unary(f"/{SERVICE}/Unary")
        for given in ("order-66", "", "x" * 500):
            call = unary(b"a", metadata=((REQUEST_ID_KEY, given),) if given else ())
            assert await call == b"a"
            assert request_ids(await call.trailing_metadata()) == [seen[-1]]
        assert seen[0] == "order-66"
        assert len(seen[1]) == 16
        assert seen[2] == "x" * 64
        echo.error = NoSpace("full")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary(b"a", metadata=((REQUEST_ID_KEY, "order-67"),))
        assert request_ids(caught.value.trailing_metadata()) == ["order-67"]
        assert isinstance(typed_error(caught.value), NoSpace)
        assert REQUEST_ID.get() == ""

    serve(work, Named())
