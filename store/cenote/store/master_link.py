"""A store daemon's connection to one master over the lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeVar, final

from google.protobuf.message import DecodeError, Message

from cenote.api.errors import ProtocolError
from cenote.rpc.lane_client import LaneClient
from cenote.security.tls import Tls
from cenote.v1 import master_pb2 as pb

__all__ = ["LaneMasterLink", "MasterLink"]

_CONNECT_S: Final = 1.0
_EVERY_VIEW: Final = (1 << 64) - 1

Reply = TypeVar("Reply", bound=Message)


class MasterLink(Protocol):
    """What the agent needs of a master; calls end within `deadline_s` or raise a CenoteError."""

    def hello(self, deadline_s: float) -> pb.HelloResponse:
        """Connect, where that was not done yet, and learn who the master is."""
        ...

    def attach(self, request: pb.AttachRequest, deadline_s: float) -> pb.AttachResponse: ...

    def heartbeat(
        self, request: pb.HeartbeatRequest, deadline_s: float
    ) -> pb.HeartbeatResponse: ...

    def detach(self, request: pb.DetachRequest, deadline_s: float) -> pb.DetachResponse: ...

    def close(self) -> None:
        """End calls under way. Any thread may call it."""
        ...


@final
class LaneMasterLink:
    """Implements `MasterLink` by a LaneClient of its own."""

    def __init__(
        self,
        address: str,
        request: pb.HelloRequest,
        on_hello: Callable[[pb.HelloResponse], None] = lambda _: None,
        tls: Tls | None = None,
    ) -> None:
        """`request` is the hello of each connection, `on_hello` gets the answers.

        Raises InvalidArgument for a bad address.
        """
        self._tell = on_hello
        self._greeting = pb.HelloResponse()
        """What the master said last."""
        self._client = LaneClient(
            address,
            request.SerializeToString(),
            connect_timeout_s=_CONNECT_S,
            connections_max=2,
            spin_polls=0,
            on_hello=self._on_hello,
            tls=tls,
        )

    def _on_hello(self, payload: bytes) -> None:
        self._greeting = _parsed(payload, pb.HelloResponse.FromString)
        self._tell(self._greeting)

    def hello(self, deadline_s: float) -> pb.HelloResponse:
        # The lane connects when it is first called; this call asks for nothing else.
        body = pb.GetClusterViewRequest(known_view_version=_EVERY_VIEW).SerializeToString()
        self._client.call(pb.MASTER_METHOD_GET_CLUSTER_VIEW, body, deadline_s)
        return self._greeting

    def attach(self, request: pb.AttachRequest, deadline_s: float) -> pb.AttachResponse:
        reply = self._call(pb.MASTER_METHOD_ATTACH, request, deadline_s)
        return _parsed(reply, pb.AttachResponse.FromString)

    def heartbeat(self, request: pb.HeartbeatRequest, deadline_s: float) -> pb.HeartbeatResponse:
        reply = self._call(pb.MASTER_METHOD_HEARTBEAT, request, deadline_s)
        return _parsed(reply, pb.HeartbeatResponse.FromString)

    def detach(self, request: pb.DetachRequest, deadline_s: float) -> pb.DetachResponse:
        reply = self._call(pb.MASTER_METHOD_DETACH, request, deadline_s)
        return _parsed(reply, pb.DetachResponse.FromString)

    def close(self) -> None:
        self._client.close()

    def _call(self, method: int, request: Message, deadline_s: float) -> bytes:
        return self._client.call(method, request.SerializeToString(), deadline_s)


def _parsed(body: bytes, parse: Callable[[bytes], Reply]) -> Reply:
    try:
        return parse(body)
    except DecodeError as error:
        raise ProtocolError(f"the master's answer is no message: {error}") from error
