"""Credentials of gRPC calls: in the metadata, and looked at before a handler sees the call.

`authorization: Bearer TOKEN` for a master; `cenote-ticket-bin` for a store daemon, which knows no
tokens. Health checks are answered to anybody (Kubernetes' probes can say nothing); reflection is
not.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, final

import grpc

__all__ = [
    "TICKET_METADATA_KEY",
    "CredentialsInterceptor",
    "bearer_token",
    "ticket_metadata",
    "token_metadata",
]

TICKET_METADATA_KEY: Final = "cenote-ticket-bin"
_AUTHORIZATION: Final = "authorization"
_BEARER: Final = "Bearer "
_HEALTH: Final = "/grpc.health.v1.Health/"

Metadata = Sequence[tuple[str, Any]]


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a call to a master carries."""
    return ((_AUTHORIZATION, _BEARER + token),) if token else ()


def ticket_metadata(ticket: bytes) -> tuple[tuple[str, bytes], ...]:
    """What a call to a store daemon carries."""
    return ((TICKET_METADATA_KEY, ticket),) if ticket else ()


def bearer_token(metadata: Metadata) -> bytes:
    """The token that a call carries, empty where it has none."""
    for key, value in metadata:
        if key == _AUTHORIZATION and str(value).startswith(_BEARER):
            return str(value).removeprefix(_BEARER).strip().encode()
    return b""


@final
class CredentialsInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """`admit(method, metadata, peer, identities)` lets a call pass, or raises a CenoteError;
    `enter(caller)` gets what it returned, in the task of the handler. `identities` are those of the
    client's certificate, where it showed one. To stand behind `ErrorInterceptor`."""

    def __init__(
        self,
        admit: Callable[[str, Metadata, str, tuple[str, ...]], Any],
        enter: Callable[[Any, str, Any], None],
    ) -> None:
        """`enter(caller, method, request)` may raise, too; the request of a stream is None."""
        self._admit = admit
        self._enter = enter

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(_HEALTH):
            return handler
        method = details.method
        metadata = [(str(key), value) for key, value in details.invocation_metadata or ()]
        if handler.request_streaming:
            behavior = handler.stream_stream or handler.stream_unary
        else:
            behavior = handler.unary_stream or handler.unary_unary

        def pass_in(request: Any, context: Any) -> None:
            caller = self._admit(method, metadata, context.peer(), _identities_of(context))
            self._enter(caller, method, None if handler.request_streaming else request)

        if handler.response_streaming:
            guarded: Any = _stream(behavior, pass_in)
        else:
            guarded = _unary(behavior, pass_in)
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(
            guarded,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _identities_of(context: Any) -> tuple[str, ...]:
    """As `cenote.security.tls.identities_of`, of what gRPC has checked."""
    said = context.auth_context()
    return tuple(
        f"{kind}:{value.decode('utf-8', 'replace')}"
        for kind, name in (("uri", "peer_uri"), ("dns", "peer_dns"), ("cn", "x509_common_name"))
        for value in said.get(name, ())
    )


def _unary(behavior: Any, pass_in: Callable[[Any, Any], None]) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        pass_in(request, context)
        reply = behavior(request, context)
        return await reply if inspect.isawaitable(reply) else reply

    return guarded


def _stream(behavior: Any, pass_in: Callable[[Any, Any], None]) -> Any:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        pass_in(request, context)
        replies = behavior(request, context)
        if hasattr(replies, "__aiter__"):
            async for reply in replies:
                yield reply
        else:  # somebody else's service, such as reflection, in threads' style
            for reply in replies:
                yield reply

    return guarded
