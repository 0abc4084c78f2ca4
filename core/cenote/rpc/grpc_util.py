"""gRPC as this project serves it: health, reflection, bounds, the same typed errors as the lane.

An error travels as a gRPC status (so that any language sees something sensible) and, in the
trailing metadata `cenote-error-bin`, as u32 code and the body of the lane's ERROR frame, of which a
client of ours makes the same exception again.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    PermissionDenied,
    ProtocolError,
    ProtocolVersionMismatch,
    ResourceUnavailable,
    Unauthenticated,
    Unavailable,
)
from cenote.runtime.log import REQUEST_ID
from cenote.security.tls import Tls

from .frames import decode_error, encode_error
from .grpc_tls import server_credentials

__all__ = [
    "ERROR_METADATA_KEY",
    "MESSAGE_BYTES_MAX_DEFAULT",
    "REQUEST_ID_KEY",
    "ErrorInterceptor",
    "GrpcServer",
    "abort",
    "channel_options",
    "error_metadata",
    "server_options",
    "status_code",
    "typed_error",
]

ERROR_METADATA_KEY: Final = "cenote-error-bin"
REQUEST_ID_KEY: Final = "cenote-request-id"
"""Metadata: a caller's own name for its call, told again in the answer's trailing metadata, and a
field of all that the server logs of it. One that is not given is made."""
MESSAGE_BYTES_MAX_DEFAULT: Final = 16 << 20
_REQUEST_ID_CHARS_MAX: Final = 64

_TAKEN: Final = "stop the other program or choose another port (--grpc)"
_log = logging.getLogger(__name__)

_CODE: Final = struct.Struct("<I")
_DETAILS_CHARS_MAX: Final = 500  # percent-encoded in a header that shares 8 KiB with the metadata
_KEEPALIVE_TIME_MS: Final = 30_000
_KEEPALIVE_TIMEOUT_MS: Final = 10_000
_PING_INTERVAL_MS_MIN: Final = 10_000

Option = tuple[str, int]


def server_options(message_bytes_max: int = MESSAGE_BYTES_MAX_DEFAULT) -> list[Option]:
    """Options of a server: bounded messages, dead peers found, no port shared with a stranger."""
    return [
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MS_MIN),
        ("grpc.so_reuseport", 0),
    ]


def channel_options(message_bytes_max: int = MESSAGE_BYTES_MAX_DEFAULT) -> list[Option]:
    """Options of a channel that go with `server_options`."""
    return [
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.enable_http_proxy", 0),  # a proxy of the environment is meant for the web
    ]


# --- errors -------------------------------------------------------------------------------------


def status_code(error: CenoteError) -> grpc.StatusCode:
    """The gRPC status of an error's class."""
    code: grpc.StatusCode = grpc.StatusCode[type(error).grpc_status]
    return code


def error_metadata(error: CenoteError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata from which `typed_error` makes the error again."""
    return ((ERROR_METADATA_KEY, _CODE.pack(error.code) + encode_error(error)),)


async def abort(context: Any, error: CenoteError) -> NoReturn:
    """End a call of a grpc.aio server with `error`."""
    details = str(error)
    if len(details) > _DETAILS_CHARS_MAX:
        details = details[:_DETAILS_CHARS_MAX] + "…"
    request = REQUEST_ID.get()
    known = ((REQUEST_ID_KEY, request),) if request else ()
    await context.abort(status_code(error), details, (*error_metadata(error), *known))
    raise AssertionError("context.abort returned")


_BY_STATUS: Final[dict[grpc.StatusCode, type[CenoteError]]] = {
    grpc.StatusCode.CANCELLED: ClientClosed,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceUnavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolVersionMismatch,
}


def typed_error(rpc_error: Any) -> CenoteError:
    """The error that a failed call (grpc.RpcError, blocking or aio) stands for.

    One that the server raised comes back as it was. One that gRPC itself raised gets the class of
    its status; whether such a call was executed is not known.
    """
    for key, value in rpc_error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY and len(value) >= _CODE.size:
            (code,) = _CODE.unpack_from(value)
            return decode_error(code, value[_CODE.size :])
    status = rpc_error.code()
    details = rpc_error.details() or "no details"
    error = _BY_STATUS.get(status, CenoteError)(f"gRPC {status.name}: {details}")
    error.maybe_executed = status is not grpc.StatusCode.UNIMPLEMENTED
    return error


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns what handlers raise into statuses: CenoteError typed, anything else InternalError."""

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.request_streaming:
            behavior = handler.stream_stream or handler.stream_unary
        else:
            behavior = handler.unary_stream or handler.unary_unary
        # Functions that are not async belong to somebody else's services.
        if inspect.isasyncgenfunction(behavior):
            guarded: Any = _guard_stream(behavior, method)
        elif inspect.iscoroutinefunction(behavior):
            guarded = _guard_unary(behavior, method)
        else:
            return handler
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(
            guarded,
            request_deserializer=_guard_parser(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


class _NoMessage:
    """Stands for a request that could not be parsed, until the call can be told so."""

    def __init__(self, length: int) -> None:
        self.length = length

    def error(self, method: str) -> ProtocolError:
        return ProtocolError(
            f"the request of {method} is no message of its kind ({self.length} bytes)"
        )


def _guard_parser(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """gRPC would log a traceback, and say UNKNOWN."""
    if parse is None:
        return None

    def guarded(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _NoMessage(len(data))

    return guarded


def _take_request_id(context: Any) -> None:
    """For the context of this call, which is a task of its own."""
    given = next((v for k, v in context.invocation_metadata() or () if k == REQUEST_ID_KEY), "")
    known = isinstance(given, str) and given.isprintable() and given
    name = given[:_REQUEST_ID_CHARS_MAX] if known else secrets.token_hex(8)
    REQUEST_ID.set(name)
    context.set_trailing_metadata(((REQUEST_ID_KEY, name),))


def _guard_unary(
    behavior: Callable[[Any, Any], Awaitable[Any]], method: str
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: Any) -> Any:
        _take_request_id(context)
        try:
            if isinstance(request, _NoMessage):
                raise request.error(method)
            return await behavior(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # the border: a handler's bug must not look like gRPC's UNKNOWN
            await abort(context, _as_cenote_error(error, method))

    return guarded


def _guard_stream(
    behavior: Callable[[Any, Any], AsyncIterator[Any]], method: str
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        _take_request_id(context)
        try:
            if isinstance(request, _NoMessage):
                raise request.error(method)
            async for item in behavior(request, context):
                yield item
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # the border: a handler's bug must not look like gRPC's UNKNOWN
            await abort(context, _as_cenote_error(error, method))

    return guarded


def _as_cenote_error(error: Exception, method: str) -> CenoteError:
    if isinstance(error, CenoteError):
        return error
    _log.error("%s failed", method, exc_info=error)
    return InternalError(f"{method} failed: {type(error).__name__}: {error}")


# --- the server ---------------------------------------------------------------------------------


class GrpcServer:
    """A grpc.aio server with health, reflection and typed errors, on the running loop.

    `calls_max` bounds the calls under way; further ones are refused with RESOURCE_EXHAUSTED.
    """

    def __init__(
        self,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX_DEFAULT,
        calls_max: int = 1024,
        interceptors: Sequence[Any] = (),
    ) -> None:
        self.server: Any = grpc.aio.server(
            interceptors=(ErrorInterceptor(), *interceptors),
            options=server_options(message_bytes_max),
            maximum_concurrent_rpcs=calls_max,
        )
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    def add_service(
        self, add_to_server: Callable[[Any, Any], None], servicer: Any, full_name: str
    ) -> None:
        """Serve `servicer`; `add_to_server` is the generated `add_...Servicer_to_server`.

        `full_name` (`cenote.v1.MasterService`) is what reflection and health call it. Before start.
        """
        add_to_server(servicer, self.server)
        self._names.append(full_name)

    def listen(self, address: str, tls: Tls | None = None) -> int:
        """Listen on `host:port` or `unix:/path`, before `start`. Returns the port (0: a free one).
        With `tls`, who does not speak it is refused.

        Raises ResourceUnavailable.
        """
        _try_to_bind(address)
        try:
            port: int = (
                self.server.add_insecure_port(address)
                if tls is None
                else self.server.add_secure_port(address, server_credentials(tls))
            )
        except RuntimeError as error:  # taken meanwhile, or something that only gRPC refuses
            raise ResourceUnavailable(f"can't serve gRPC on {address}", remedy=_TAKEN) from error
        if port == 0:
            raise ResourceUnavailable(f"can't serve gRPC on {address}")
        return port

    async def start(self) -> None:
        """Serve, and say so to health checks."""
        names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.server)
        await self.set_serving(True)
        # To its end, also where this is cancelled: half a start can't be stopped (gRPC raises
        # InvalidStateError), and would keep its owner from stopping the rest.
        starting = asyncio.ensure_future(self.server.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await starting
            raise

    async def set_serving(self, serving: bool) -> None:
        """What health checks are told, for the whole server and for each service."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def close(self, grace_s: float = 1.0) -> None:
        """Tell health checks, take no more calls, cut those that last longer than `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def _try_to_bind(address: str) -> None:
    """Find out why a TCP port can't be had: gRPC would say so in a line of its C++ code only."""
    if address.startswith("unix:"):
        return
    host, _, port_text = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not host or not port_text.isdecimal() or int(port_text) == 0:
        return
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # What gRPC sets: a port in TIME_WAIT is free, one that somebody listens on is not. Its own
        # SO_REUSEPORT is off (server_options), and the probe never listens.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port_text)))
        except socket.gaierror as error:
            raise ResourceUnavailable(
                f"can't serve gRPC on {address}: {error.strerror}",
                remedy="write an address of this host (--grpc)",
            ) from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ResourceUnavailable(
                    f"can't serve gRPC on {address}: port {port_text} is in use", remedy=_TAKEN
                ) from error
            if error.errno == errno.EADDRNOTAVAIL:
                remedy = "write an address of this host (--grpc)"
            else:
                remedy = "choose another port (--grpc)"
            raise ResourceUnavailable(
                f"can't serve gRPC on {address}: {error.strerror}", remedy=remedy
            ) from error
