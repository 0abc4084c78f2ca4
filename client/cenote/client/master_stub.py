"""The master across the lane: `MasterApi` over bytes, following the leader among its addresses."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    NotLeader,
    ProtocolError,
    TenureEnded,
    Unavailable,
)
from cenote.kv.directory import LOOK_UP_S, EtcdDirectory
from cenote.rpc.address import parse_address
from cenote.rpc.lane_client import SPIN_POLLS_DEFAULT, LaneClient
from cenote.rpc.lane_socket import NotSent
from cenote.rpc.lane_tls_client import open_lane
from cenote.runtime.log import get_logger
from cenote.security.tls import Tls
from cenote.v1 import master_pb2 as pb

from .masters import HELLO_S, Masters, seek_pause_s

__all__ = ["METHODS", "LaneMaster", "decoded"]

M = TypeVar("M", bound=Message)
_log = get_logger(__name__)

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

_LONE_CONNECT_TIMEOUT_S: Final = 60.0  # to the only one: the call's deadline ends it earlier
_ATTEMPT_S: Final = 0.5
"""How long one of several masters may leave a request unanswered, before it is made sure that it
still leads; doubled each time. A stopped master looks like a slow one."""


class LaneMaster:
    """`cenote.api.master.MasterApi` for any number of threads.

    `addresses` are those of all masters: requests go to the one that leads. It is looked for when
    it says that it does not lead (and then whom it names is asked first), when its connection
    breaks, and when it leaves a request unanswered for a moment; the request is then sent again,
    and the same id keeps it from being decided twice. All of it is within the call's deadline. The
    hello (whose session the connections belong to) is sent on every connection that is made;
    `on_hello` gets each leader's reply. Where none of the masters leads, `directory` is asked for
    others, now and then.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        hello: pb.HelloRequest,
        *,
        on_hello: Callable[[pb.HelloResponse], None] | None = None,
        directory: EtcdDirectory | None = None,
        connections_max: int = 8,
        spin_polls: int = SPIN_POLLS_DEFAULT,
        tls: Tls | None = None,
    ) -> None:
        self.tls = tls
        for address in addresses:
            parse_address(address)  # a typing mistake shows now
        self._masters = Masters(addresses, more_to_find=directory is not None)
        self._directory = directory
        self._hello = hello.SerializeToString()
        self._on_hello = on_hello
        self._connections_max = connections_max
        self._spin_polls = spin_polls
        self._lock = threading.Lock()
        """Of replacing the lane: held for moments."""
        self._seeking = threading.Lock()
        """One thread looks for the leader, the others wait for what it finds."""
        self._closed = threading.Event()
        self._said: pb.HelloResponse | None = None
        self._hellos = 0
        self._lane: LaneClient
        self.call_lane: Callable[[int, bytes, float], bytes]
        """`call`; where there is one master only, without a detour."""
        self._replace_lane()

    def _replace_lane(self) -> None:
        self._lane = LaneClient(
            self._masters.known[0],
            self._hello,
            on_hello=self.greeted,
            connections_max=self._connections_max,
            connect_timeout_s=self.connect_timeout_s,
            spin_polls=self._spin_polls,
            tls=self.tls,
        )
        self.call_lane = self._lane.call if self._masters.is_lone else self.call

    @property
    def hello_bytes(self) -> bytes:
        """What every connection says first."""
        return self._hello

    def greeted(self, body: bytes) -> None:
        """The reply to a connection's hello. Raises NotLeader on a standby and an old leader, and
        on one past its tenure until the others were asked."""
        reply = decoded(pb.HelloResponse, body)
        masters = self._masters
        masters.told(reply.epoch)
        if not masters.accepts(reply):
            if reply.is_leader:
                raise NotLeader(f"this master led until epoch {masters.epoch} began")
            raise NotLeader(
                "this master is a standby", addresses=reply.leader_addresses, epoch=reply.epoch
            )
        if not masters.settles_for(reply):
            raise NotLeader("this master can't prove any more that it leads")
        masters.followed(reply)
        self._said = reply
        self._hellos += 1
        if self._on_hello is not None:
            self._on_hello(reply)

    @property
    def connect_timeout_s(self) -> float:
        """How long one address is tried before the next."""
        return _LONE_CONNECT_TIMEOUT_S if self._masters.is_lone else HELLO_S

    @property
    def is_lone(self) -> bool:
        """There is one master, and nobody to ask for others."""
        return self._masters.is_lone

    @property
    def addresses(self) -> tuple[str, ...]:
        """All known masters, the present one first."""
        return tuple(self._masters.known)

    @property
    def connections(self) -> int:
        return self._lane.connections

    def close(self) -> None:
        """End all calls with ClientClosed and close all sockets."""
        self._closed.set()
        self._lane.close()

    # ---- calls -------------------------------------------------------------------------------

    def call(self, method: int, body: bytes, deadline_s: float) -> bytes:
        """One request to whoever leads. Raises what the master raises, and `LaneClient.call`."""
        until_s = time.monotonic() + deadline_s
        failure: CenoteError = DeadlineExceeded("no master was found in time")
        for attempt in count():
            lane = self._lane
            left_s = until_s - time.monotonic()
            if attempt and left_s <= 0:
                raise failure
            limit_s = self.attempt_s(attempt, left_s)
            try:
                return lane.call(method, body, limit_s)
            except DeadlineExceeded as error:
                if limit_s >= left_s:
                    raise
                failure = error
            except ClientClosed:
                # Closed under us because another thread moved on to another master?
                if self._closed.is_set() or lane is self._lane:
                    raise
                continue
            except Unavailable as error:
                failure = error
                if self._masters.is_lone and not self._names_another(error):
                    raise
            self._find_leader(lane, failure, until_s)
        raise AssertionError("count() has no end")

    def attempt_s(self, attempt: int, left_s: float) -> float:
        """How long to wait for an answer in the `attempt`-th try, from 0, of a call that has
        `left_s`."""
        if self._masters.is_lone:
            return left_s
        return min(left_s, _ATTEMPT_S * 2.0 ** min(attempt, 10))

    def _names_another(self, error: CenoteError) -> bool:
        return isinstance(error, NotLeader) and any(
            address != self._masters.known[0] for address in error.addresses
        )

    # ---- the leader ----------------------------------------------------------------------------

    def find_leader(self, address: str, failure: CenoteError, until_s: float) -> None:
        """Look for the leader, if it still is the one at `address` that `failure` came from.

        Raises `failure` where none is found until `until_s`.
        """
        lane = self._lane
        if self._masters.known[0] == address:
            self._find_leader(lane, failure, until_s)

    def _find_leader(self, lane: LaneClient, failure: CenoteError, until_s: float) -> None:
        """Go to whoever leads, in place of `lane`, whose last call ended with `failure`.

        Returns also where it still is the same master, or another thread has found it. Raises
        `failure` at the end of the time, and ClientClosed.
        """
        if not self._seeking.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise failure
        try:
            hints = failure.addresses if isinstance(failure, NotLeader) else ()
            past_tenure = isinstance(failure, TenureEnded)
            for attempt in count(1):
                if lane is not self._lane:
                    return  # another thread did
                found = self._ask_around(hints, until_s, past_tenure=past_tenure)
                if found:
                    still = found == self._masters.known[0]
                    self._go_to(found)
                    if still and attempt == 1 and not isinstance(failure, DeadlineExceeded):
                        # It leads, and has just failed: not asked again at once.
                        left_s = max(until_s - time.monotonic(), 0.0)
                        self._closed.wait(min(seek_pause_s(attempt, random.random()), left_s))
                    return
                hints = ()
                pause_s = seek_pause_s(attempt, random.random())
                if time.monotonic() + pause_s >= until_s:
                    raise failure
                if self._closed.wait(pause_s):
                    raise ClientClosed()
        finally:
            self._seeking.release()

    def _ask_around(self, hints: Iterable[str], until_s: float, *, past_tenure: bool) -> str:
        """One round of hellos: the address of a leader, "" where none was found.

        `past_tenure`: one that is past its tenure is of no use now.
        """
        masters = self._masters
        todo = masters.in_order(hints)
        asked: set[str] = set()
        second_best: tuple[str, pb.HelloResponse] | None = None
        while todo or (todo := self._look_up_others(asked, until_s)):
            address = todo.pop(0)
            now_s = time.monotonic()
            if address in asked or now_s >= until_s or self._closed.is_set():
                continue
            asked.add(address)
            reply = self._hello_to(address, min(until_s, now_s + masters.patience_s(address)))
            if reply is None:
                masters.silent(address)
                continue
            masters.heard(address)
            behind = reply.epoch < masters.epoch
            masters.told(reply.epoch)
            if not reply.is_leader and not behind:
                todo[:0] = reply.leader_addresses
            elif masters.accepts(reply):
                if not reply.past_tenure:
                    return address
                second_best = second_best or (address, reply)
        if past_tenure or second_best is None or not masters.accepts(second_best[1]):
            return ""
        masters.settle_for(second_best[1])
        return second_best[0]

    def _look_up_others(self, asked: set[str], until_s: float) -> list[str]:
        """Masters that were not asked yet, by the directory, where there is one."""
        directory, left_s = self._directory, until_s - time.monotonic()
        if directory is None or not directory.is_due or left_s <= 0 or self._closed.is_set():
            return []
        try:
            places = directory.look_up(min(LOOK_UP_S, left_s))
        except CenoteError as error:
            _log.warning("other masters can't be looked up", why=error)
            return []
        found = [address for place in places for address in place.addresses]
        self._masters.learn(found)
        return [address for address in found if address not in asked]

    def _hello_to(self, address: str, until_s: float) -> pb.HelloResponse | None:
        """What this master says of itself; None where it does not answer."""
        try:
            lane = open_lane(
                parse_address(address),
                self._hello,
                until_s,
                spin_polls=0,
                clock=time.monotonic,
                cancelled=self._closed.is_set,
                tls=self.tls,
            )
        except NotLeader as error:  # a hello may be refused instead of answered
            return pb.HelloResponse(epoch=error.epoch, leader_addresses=error.addresses)
        except (CenoteError, NotSent):
            return None
        lane.close()
        return decoded(pb.HelloResponse, lane.hello_reply)

    def _go_to(self, address: str) -> None:
        with self._lock:
            if self._closed.is_set():
                raise ClientClosed()
            if address == self._masters.known[0]:
                return
            old = self._lane
            self._masters.choose(address)
            self._replace_lane()
        old.close()

    def call_many(
        self, method: str, requests: Sequence[Message], deadline_s: float
    ) -> list[Message | CenoteError]:
        """Requests of one method, pipelined: a reply or an error for each. Of several masters the
        present one is asked, for a moment."""
        number, _, reply_type = METHODS[method]
        bodies = [request.SerializeToString() for request in requests]
        lane = self._lane
        try:
            answers = lane.call_many(number, bodies, self.attempt_s(2, deadline_s))
        except ClientClosed as error:
            if self._closed.is_set() or lane is self._lane:
                raise
            moved = Unavailable("another master leads now")
            moved.maybe_executed = error.maybe_executed
            return [moved for _ in bodies]
        except (Unavailable, DeadlineExceeded) as error:
            if self._masters.is_lone:
                raise
            return [error for _ in bodies]
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
            if self._closed.is_set():
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
