"""The master across the lane: `MasterApi` over bytes, following the leader among its addresses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from cenote.api.errors import CenoteError, ClientClosed, NotLeader, ProtocolError, Unavailable
from cenote.rpc.address import parse_address
from cenote.rpc.lane_client import SPIN_POLLS_DEFAULT, LaneClient
from cenote.v1 import master_pb2 as pb

__all__ = ["METHODS", "LaneMaster", "decoded"]

M = TypeVar("M", bound=Message)

# Methods by name: lane number, the types of request and reply.
METHODS: Final[dict[str, tuple[int, type[Message], type[Message]]]] = {
    "renew_session": (
        pb.MASTER_METHOD_RENEW_SESSION,
        pb.RenewSessionRequest,
        pb.RenewSessionResponse,
    ),
    "close_session": (
        pb.MASTER_METHOD_CLOSE_SESSION,
        pb.CloseSessionRequest,
        pb.CloseSessionResponse,
    ),
    "get_cluster_view": (
        pb.MASTER_METHOD_GET_CLUSTER_VIEW,
        pb.GetClusterViewRequest,
        pb.GetClusterViewResponse,
    ),
    "open_namespace": (
        pb.MASTER_METHOD_OPEN_NAMESPACE,
        pb.OpenNamespaceRequest,
        pb.OpenNamespaceResponse,
    ),
    "exists": (pb.MASTER_METHOD_EXISTS, pb.ExistsRequest, pb.ExistsResponse),
    "match": (pb.MASTER_METHOD_MATCH, pb.MatchRequest, pb.MatchResponse),
    "acquire": (pb.MASTER_METHOD_ACQUIRE, pb.AcquireRequest, pb.AcquireResponse),
    "release": (pb.MASTER_METHOD_RELEASE, pb.ReleaseRequest, pb.ReleaseResponse),
    "touch": (pb.MASTER_METHOD_TOUCH, pb.TouchRequest, pb.TouchResponse),
    "put_start": (pb.MASTER_METHOD_PUT_START, pb.PutStartRequest, pb.PutStartResponse),
    "put_commit": (pb.MASTER_METHOD_PUT_COMMIT, pb.PutCommitRequest, pb.PutCommitResponse),
    "put_abort": (pb.MASTER_METHOD_PUT_ABORT, pb.PutAbortRequest, pb.PutAbortResponse),
    "remove": (pb.MASTER_METHOD_REMOVE, pb.RemoveRequest, pb.RemoveResponse),
    "pin": (pb.MASTER_METHOD_PIN, pb.PinRequest, pb.PinResponse),
    "unpin": (pb.MASTER_METHOD_UNPIN, pb.UnpinRequest, pb.UnpinResponse),
    "report_failure": (
        pb.MASTER_METHOD_REPORT_FAILURE,
        pb.ReportFailureRequest,
        pb.ReportFailureResponse,
    ),
    "attach": (pb.MASTER_METHOD_ATTACH, pb.AttachRequest, pb.AttachResponse),
    "heartbeat": (pb.MASTER_METHOD_HEARTBEAT, pb.HeartbeatRequest, pb.HeartbeatResponse),
    "detach": (pb.MASTER_METHOD_DETACH, pb.DetachRequest, pb.DetachResponse),
    "drain": (pb.MASTER_METHOD_DRAIN, pb.DrainRequest, pb.DrainResponse),
}

_CONNECT_TIMEOUT_S: Final = 0.3  # to one of several masters
_LONE_CONNECT_TIMEOUT_S: Final = 60.0  # to the only one: the call's deadline ends it earlier
_FOLLOWS_MAX: Final = 4


class LaneMaster:
    """`cenote.api.master.MasterApi` for any number of threads.

    `addresses` are tried in turn; an answer of `NotLeader` is followed to the leader that it names.
    The hello (whose session the connections belong to) is sent on every connection that is made;
    `on_hello` gets each reply.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        hello: pb.HelloRequest,
        *,
        on_hello: Callable[[pb.HelloResponse], None] | None = None,
        connections_max: int = 8,
        spin_polls: int = SPIN_POLLS_DEFAULT,
    ) -> None:
        for address in addresses:
            parse_address(address)  # a typing mistake shows now
        self._addresses = list(dict.fromkeys(addresses))
        self._hello = hello.SerializeToString()
        self._on_hello = on_hello
        self._connections_max = connections_max
        self._spin_polls = spin_polls
        self._lock = threading.Lock()
        self._closed = False
        self._said: pb.HelloResponse | None = None
        self._hellos = 0
        self._lane = self._make_lane(self._addresses[0])
        self.call_lane = self._lane.call
        """`LaneClient.call` of the present leader: bytes in, bytes out, no retry."""

    def _make_lane(self, address: str) -> LaneClient:
        return LaneClient(
            address,
            self._hello,
            on_hello=self.greeted,
            connections_max=self._connections_max,
            connect_timeout_s=self.connect_timeout_s,
            spin_polls=self._spin_polls,
        )

    @property
    def hello_bytes(self) -> bytes:
        """What every connection says first."""
        return self._hello

    def greeted(self, body: bytes) -> None:
        """The reply to a connection's hello. Raises NotLeader on a standby."""
        reply = decoded(pb.HelloResponse, body)
        if not reply.is_leader:
            raise NotLeader("this master is a standby", leader=reply.leader)
        self._said = reply
        self._hellos += 1
        if self._on_hello is not None:
            self._on_hello(reply)

    @property
    def connect_timeout_s(self) -> float:
        """How long one address is tried before the next."""
        return _LONE_CONNECT_TIMEOUT_S if len(self._addresses) == 1 else _CONNECT_TIMEOUT_S

    @property
    def addresses(self) -> tuple[str, ...]:
        """All known masters, the present one first."""
        return tuple(self._addresses)

    @property
    def connections(self) -> int:
        return self._lane.connections

    def close(self) -> None:
        """End all calls with ClientClosed and close all sockets."""
        self._closed = True
        self._lane.close()

    # ---- calls -------------------------------------------------------------------------------

    def call(self, method: int, body: bytes, deadline_s: float) -> bytes:
        """One request to whoever leads. Raises what the master raises, and `LaneClient.call`."""
        until_s = time.monotonic() + deadline_s
        tries = max(len(self._addresses), _FOLLOWS_MAX)
        while True:
            lane = self._lane
            try:
                return lane.call(method, body, until_s - time.monotonic())
            except NotLeader as error:
                tries -= 1
                if not tries or not self._follow(lane, error.leader):
                    raise
            except ClientClosed:
                # Closed under us because another thread moved on to another master?
                if self._closed or lane is self._lane:
                    raise
            except Unavailable:
                tries -= 1
                if not tries or not self._follow(lane, ""):
                    raise

    def _follow(self, lane: LaneClient, leader: str) -> bool:
        """Go to `leader`, or to the next address; False where there is no other."""
        with self._lock:
            if self._closed:
                return False
            if lane is not self._lane:
                return True  # another thread did
            if leader and leader != self._addresses[0]:
                parse_address(leader)
                rest = [address for address in self._addresses if address != leader]
                self._addresses = [leader, *rest]
            elif len(self._addresses) > 1:
                self._addresses = [*self._addresses[1:], self._addresses[0]]
            else:
                return False
            self._replace_lane()
        lane.close()
        return True

    def _replace_lane(self) -> None:
        self._lane = self._make_lane(self._addresses[0])
        self.call_lane = self._lane.call

    def call_many(
        self, method: str, requests: Sequence[Message], deadline_s: float
    ) -> list[Message | CenoteError]:
        """Requests of one method, pipelined: a reply or an error for each."""
        number, _, reply_type = METHODS[method]
        bodies = [request.SerializeToString() for request in requests]
        answers = self._lane.call_many(number, bodies, deadline_s)
        return [
            answer if isinstance(answer, CenoteError) else decoded(reply_type, answer)
            for answer in answers
        ]

    def _send(self, method: str, request: Message, reply_type: type[M], deadline_s: float) -> M:
        number = METHODS[method][0]
        return decoded(reply_type, self.call(number, request.SerializeToString(), deadline_s))

    # ---- MasterApi ---------------------------------------------------------------------------

    def hello(self, request: pb.HelloRequest, deadline_s: float) -> pb.HelloResponse:
        """Say hello anew, on new connections. `request` replaces what was said before."""
        body = request.SerializeToString()
        with self._lock:
            if self._closed:
                raise ClientClosed()
            old = None
            if self._hellos or body != self._hello:
                self._hello = body
                old = self._lane
                self._replace_lane()
        if old is not None:
            old.close()
        view = pb.GetClusterViewRequest(known_view_version=(1 << 64) - 1)
        self.get_cluster_view(view, deadline_s)
        assert self._said is not None
        return self._said

    def renew_session(
        self, request: pb.RenewSessionRequest, deadline_s: float
    ) -> pb.RenewSessionResponse:
        return self._send("renew_session", request, pb.RenewSessionResponse, deadline_s)

    def close_session(
        self, request: pb.CloseSessionRequest, deadline_s: float
    ) -> pb.CloseSessionResponse:
        return self._send("close_session", request, pb.CloseSessionResponse, deadline_s)

    def get_cluster_view(
        self, request: pb.GetClusterViewRequest, deadline_s: float
    ) -> pb.GetClusterViewResponse:
        return self._send("get_cluster_view", request, pb.GetClusterViewResponse, deadline_s)

    def open_namespace(
        self, request: pb.OpenNamespaceRequest, deadline_s: float
    ) -> pb.OpenNamespaceResponse:
        return self._send("open_namespace", request, pb.OpenNamespaceResponse, deadline_s)

    def exists(self, request: pb.ExistsRequest, deadline_s: float) -> pb.ExistsResponse:
        return self._send("exists", request, pb.ExistsResponse, deadline_s)

    def match(self, request: pb.MatchRequest, deadline_s: float) -> pb.MatchResponse:
        return self._send("match", request, pb.MatchResponse, deadline_s)

    def acquire(self, request: pb.AcquireRequest, deadline_s: float) -> pb.AcquireResponse:
        return self._send("acquire", request, pb.AcquireResponse, deadline_s)

    def release(self, request: pb.ReleaseRequest, deadline_s: float) -> pb.ReleaseResponse:
        return self._send("release", request, pb.ReleaseResponse, deadline_s)

    def touch(self, request: pb.TouchRequest, deadline_s: float) -> pb.TouchResponse:
        return self._send("touch", request, pb.TouchResponse, deadline_s)

    def put_start(self, request: pb.PutStartRequest, deadline_s: float) -> pb.PutStartResponse:
        return self._send("put_start", request, pb.PutStartResponse, deadline_s)

    def put_commit(self, request: pb.PutCommitRequest, deadline_s: float) -> pb.PutCommitResponse:
        return self._send("put_commit", request, pb.PutCommitResponse, deadline_s)

    def put_abort(self, request: pb.PutAbortRequest, deadline_s: float) -> pb.PutAbortResponse:
        return self._send("put_abort", request, pb.PutAbortResponse, deadline_s)

    def remove(self, request: pb.RemoveRequest, deadline_s: float) -> pb.RemoveResponse:
        return self._send("remove", request, pb.RemoveResponse, deadline_s)

    def pin(self, request: pb.PinRequest, deadline_s: float) -> pb.PinResponse:
        return self._send("pin", request, pb.PinResponse, deadline_s)

    def unpin(self, request: pb.UnpinRequest, deadline_s: float) -> pb.UnpinResponse:
        return self._send("unpin", request, pb.UnpinResponse, deadline_s)

    def report_failure(
        self, request: pb.ReportFailureRequest, deadline_s: float
    ) -> pb.ReportFailureResponse:
        return self._send("report_failure", request, pb.ReportFailureResponse, deadline_s)

    def attach(self, request: pb.AttachRequest, deadline_s: float) -> pb.AttachResponse:
        return self._send("attach", request, pb.AttachResponse, deadline_s)

    def heartbeat(self, request: pb.HeartbeatRequest, deadline_s: float) -> pb.HeartbeatResponse:
        return self._send("heartbeat", request, pb.HeartbeatResponse, deadline_s)

    def detach(self, request: pb.DetachRequest, deadline_s: float) -> pb.DetachResponse:
        return self._send("detach", request, pb.DetachResponse, deadline_s)

    def drain(self, request: pb.DrainRequest, deadline_s: float) -> pb.DrainResponse:
        return self._send("drain", request, pb.DrainResponse, deadline_s)


def decoded(reply_type: type[M], body: bytes) -> M:
    """A reply's message. Raises ProtocolError."""
    try:
        return reply_type.FromString(body)
    except DecodeError as error:
        raise ProtocolError(f"the master's reply is no {reply_type.__name__}") from error
