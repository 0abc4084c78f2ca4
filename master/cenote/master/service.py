"""The master as a service: one object behind the lane, gRPC, and calls in the same process.

All of it runs on one thread. A reply leaves only after what was decided for it has been appended to
the journal: on the lane once for each batch of replies (`flush_urgent` as the server's
`before_flush`), elsewhere before the call returns. Commits alone are appended right after it, or
with the next reply or tick where the disk is just at work: the daemons' slots tell of them, too.
Removes and `journaled` commits also wait for the disk.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Final, TypeVar, cast, final

from google.protobuf.message import DecodeError, Message

from cenote.api.errors import (
    CenoteError,
    DeadlineExceeded,
    InvalidArgument,
    NotLeader,
    ProtocolError,
    ResourceUnavailable,
    Unavailable,
)
from cenote.rpc.lane_server import LaneConnection
from cenote.runtime.clock import SYSTEM_CLOCK, Clock
from cenote.runtime.metrics import Histogram
from cenote.v1 import master_pb2 as pb

from .commands import CutSession, NodeProbed
from .decider import Decider
from .guard import GRPC_CALLER, Guard
from .longpoll import LongPolls
from .metadata import MetadataBackend, Opened
from .operations import Later, Operations, Settings
from .request_log import SLOW_S, RequestLog, log_lane_drain
from .requests import RequestReader
from .state import MasterState
from .state_config import StateConfig

__all__ = ["MasterService"]

M = TypeVar("M", bound=Message)
_TIMED_MASK: Final = 15
"""One request of sixteen, of each method, has its time taken: enough for quantiles."""
_REPLY_SLACK_S: Final = 0.05
"""A held heartbeat is answered this long before its deadline."""


def _draw_seed() -> int:
    return secrets.randbits(64)


@final
class MasterService:
    """Implements `cenote.api.master.MasterApi` in process; see there for what each call raises.

    In process a call ends at once, but for the wait for a disk, which `deadline_s` bounds; a
    heartbeat is not held open. `load` must be run to its end first, and `tick` be called every 10
    to 50 ms.
    """

    def __init__(
        self,
        backend: MetadataBackend,
        config: StateConfig | None = None,
        settings: Settings | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        draw_seed: Callable[[], int] = _draw_seed,
    ) -> None:
        self._decider = Decider(backend, config or StateConfig(), clock)
        self._operations = operations = Operations(self._decider, settings or Settings(), draw_seed)
        self.polls = LongPolls()
        """Heartbeats that are held open."""
        self._decider.on_instructions = self.polls.wake
        self._log = RequestLog(lambda session_id: self.state.client_of(session_id))
        self.guard: Guard | None = None
        """Who may do what; None: all may do all."""
        self.calls = [0] * (max(pb.MasterMethod.values()) + 1)
        """Of each lane method since start, whichever way they came."""
        self.seconds = [Histogram() for _ in self.calls]
        """Of each method: how long the loop was busy with one request, of every sixteenth."""
        ops: dict[int, tuple[type[Message], Callable[..., Message | Later]]] = {
            pb.MASTER_METHOD_RENEW_SESSION: (pb.RenewSessionRequest, operations.renew_session),
            pb.MASTER_METHOD_CLOSE_SESSION: (pb.CloseSessionRequest, operations.close_session),
            pb.MASTER_METHOD_GET_CLUSTER_VIEW: (
                pb.GetClusterViewRequest,
                operations.get_cluster_view,
            ),
            pb.MASTER_METHOD_OPEN_NAMESPACE: (pb.OpenNamespaceRequest, operations.open_namespace),
            pb.MASTER_METHOD_EXISTS: (pb.ExistsRequest, operations.exists),
            pb.MASTER_METHOD_MATCH: (pb.MatchRequest, operations.match),
            pb.MASTER_METHOD_ACQUIRE: (pb.AcquireRequest, operations.acquire),
            pb.MASTER_METHOD_RELEASE: (pb.ReleaseRequest, operations.release),
            pb.MASTER_METHOD_TOUCH: (pb.TouchRequest, operations.touch),
            pb.MASTER_METHOD_PUT_START: (pb.PutStartRequest, operations.put_start),
            pb.MASTER_METHOD_PUT_COMMIT: (pb.PutCommitRequest, operations.put_commit),
            pb.MASTER_METHOD_PUT_ABORT: (pb.PutAbortRequest, operations.put_abort),
            pb.MASTER_METHOD_REMOVE: (pb.RemoveRequest, operations.remove),
            pb.MASTER_METHOD_PIN: (pb.PinRequest, operations.pin),
            pb.MASTER_METHOD_UNPIN: (pb.UnpinRequest, operations.unpin),
            pb.MASTER_METHOD_REPORT_FAILURE: (pb.ReportFailureRequest, operations.report_failure),
            pb.MASTER_METHOD_ATTACH: (pb.AttachRequest, operations.attach),
            pb.MASTER_METHOD_HEARTBEAT: (pb.HeartbeatRequest, operations.heartbeat),
            pb.MASTER_METHOD_DETACH: (pb.DetachRequest, operations.detach),
            pb.MASTER_METHOD_DRAIN: (pb.DrainRequest, operations.drain),
        }
        self._by_type = {request: (method, op) for method, (request, op) in ops.items()}
        self._by_type[pb.HelloRequest] = (0, operations.hello)
        self._by_method = {
            method: (request.FromString, op) for method, (request, op) in ops.items()
        }

    # ---- life -------------------------------------------------------------------------------

    def load(
        self, opened: Opened | None = None, followed: MasterState | None = None
    ) -> Iterator[None]:
        """Start an epoch and replay the journal, yielding after each batch of effects; see
        `Decider.load`.

        Raises ResourceUnavailable, JournalCorrupt, NotLeader.
        """
        yield from self._decider.load(opened, followed)

    def tick(self) -> None:
        """Housekeeping, bounded: leases, sessions, eviction ahead of need."""
        self._decider.tick()

    def flush(self) -> None:
        """Append what was decided to the journal. Raises ResourceUnavailable."""
        self._decider.flush()
        self._decider.evict_ahead()

    def flush_soon(self) -> None:
        """`flush`, or a few milliseconds later where the journal's disk is at work."""
        self._decider.flush_soon()
        self._decider.evict_ahead()

    def flush_urgent(self) -> None:
        """`flush`, if something was decided that must be in the journal before anybody hears of
        it. Raises ResourceUnavailable: then no reply that rests on it may leave."""
        self._decider.flush_urgent()

    def release_waiting(self) -> None:
        """Answer all heartbeats that are held open, and hold none any more."""
        self.polls.close()

    def close(self) -> None:
        """Append, sync, let go of the backend. Raises ResourceUnavailable where that fails."""
        self.polls.close()
        self._decider.close()

    @property
    def state(self) -> MasterState:
        """For reading only."""
        return self._decider.state

    @property
    def decider(self) -> Decider:
        """For the admin service and the shell."""
        return self._decider

    @property
    def reader(self) -> RequestReader:
        """For the admin service."""
        return self._operations.reader

    @property
    def settings(self) -> Settings:
        """What hello tells clients."""
        return self._operations.settings

    @property
    def is_shared(self) -> bool:
        """Whether other masters may stand by."""
        return self._decider.backend.shared

    def set_addresses(self, addresses: tuple[str, ...]) -> None:
        """What hello tells clients, once it is known."""
        operations = self._operations
        operations.settings = dataclasses.replace(operations.settings, addresses=addresses)

    def endpoint_of(self, node_id: int, kind: int) -> str:
        """Where a node listens for a transport, "" where that is not known."""
        for node in self.state.nodes(self._decider.clock.monotonic_s()):
            if node.node_id == node_id:
                found = (e.address for e in node.endpoints if e.kind == kind)
                return next(found, "")
        return ""

    def note_probe(self, node_id: int, answered: bool) -> None:
        """What came of `on_probe`: no answer hides the node for all until it answers again."""
        with contextlib.suppress(NotLeader):  # past the tenure nothing follows from it
            self._decider.apply(NodeProbed(node_id, answered))

    @property
    def epoch(self) -> int:
        return self._decider.epoch

    # ---- the lane ---------------------------------------------------------------------------

    def lane_hello(self, connection: LaneConnection, payload: bytes) -> bytes:
        """The `hello` of a LaneServer: opens or resumes the session that the payload names.

        Losing the connection does not end the session, silence does.
        """
        try:
            request = pb.HelloRequest.FromString(payload)
        except DecodeError:
            raise _no_message("the payload of hello", payload) from None
        guard, who = self.guard, connection.principal
        if guard is not None:
            guard.check(who, request, b"", self.state, "lane", connection.peer)
        response = self._operations.hello(request)
        connection.session = request.session_id
        if guard is not None:
            guard.complete(who, request, b"", response)
        return response.SerializeToString()

    def dispatch(
        self, connection: LaneConnection, method: int, body: bytes, deadline_ms: int
    ) -> bytes | Awaitable[bytes]:
        """The `dispatch` of a LaneServer, whose `before_flush` is `flush_urgent`, and
        `after_flush` `flush_soon`."""
        known = self._by_method.get(method)
        if known is None:
            raise InvalidArgument(
                f"the lane has no method {method}",
                remedy="use gRPC, or the same cenote release on both ends",
            )
        parse, operation = known
        calls = self.calls
        count = calls[method] = calls[method] + 1
        began_s = time.perf_counter()
        try:
            request = parse(body)
        except DecodeError:
            raise _no_message(f"the body of method {method}", body) from None
        try:
            if self.guard is not None:
                reply = self._guarded(operation, request, connection)
            else:
                reply = operation(request, connection.session)
        except CenoteError as error:
            self._log.failed(connection, method, request, error)
            raise
        took_s = time.perf_counter() - began_s
        if not count & _TIMED_MASK:
            self.seconds[method].observe(took_s)
        if took_s > SLOW_S:
            self._log.slow(connection, method, request, took_s, "the loop")
        if method == pb.MASTER_METHOD_DRAIN:
            log_lane_drain(connection, request)
        if type(reply) is Later:
            slow = partial(self._log.slow, connection, method, request)
            return self._serialized_later(reply, deadline_ms / 1000, slow)
        return reply.SerializeToString()  # type: ignore[union-attr]

    def _guarded(
        self,
        operation: Callable[..., Message | Later],
        request: Message,
        connection: LaneConnection,
    ) -> Message | Later:
        guard, who, session = self.guard, connection.principal, connection.session
        assert guard is not None
        guard.check(who, request, session, self.state, "lane", connection.peer)
        reply = operation(request, session)
        guard.complete(who, request, session, reply)
        return reply

    def cut_sessions(self, session_ids: list[bytes]) -> None:
        """These sessions' tokens count no more: they end, here and at all daemons."""
        for session_id in session_ids:
            with contextlib.suppress(NotLeader):  # past the tenure: the next leader knows none
                self._decider.apply(CutSession(session_id))

    def _serialized_later(
        self, later: Later, deadline_s: float, slow: Callable[[float, str], None]
    ) -> bytes | Awaitable[bytes]:
        if later.again is None:
            durable = self._decider.sync_to(later.entry)
            if durable.done():
                durable.result()
                return later.reply.SerializeToString()
            return self._when_durable(durable, later.reply, slow)
        return self._when_woken(later, deadline_s)

    async def _when_durable(
        self,
        durable: concurrent.futures.Future[None],
        reply: Message,
        slow: Callable[[float, str], None],
    ) -> bytes:
        began_s = time.perf_counter()
        try:
            await asyncio.wrap_future(durable)  # the lane server ends it at the deadline
        except ResourceUnavailable as error:
            if not self._decider.backend.shared:
                raise
            # A service that may answer in a moment: whoever asks again has the same decision.
            later = Unavailable(error.message, remedy=error.remedy)
            later.maybe_executed = True
            raise later from error
        finally:  # cancelled: its deadline was over
            took_s = time.perf_counter() - began_s
            if took_s > SLOW_S:
                slow(took_s, "the journal")
        return reply.SerializeToString()

    async def _when_woken(self, later: Later, deadline_s: float) -> bytes:
        try:
            return (await self._woken(later, deadline_s)).SerializeToString()
        except asyncio.CancelledError:
            # The daemon's connection broke while it was waiting: it may be gone.
            self._decider.on_probe(later.node_id)
            raise

    async def _woken(self, later: Later, deadline_s: float) -> Message:
        assert later.again is not None
        wait_s = min(later.wait_s, deadline_s - _REPLY_SLACK_S)
        if wait_s > 0 and await self.polls.wait(later.node_id, wait_s):
            entry = self._decider.unsettled_entry
            if entry:
                await asyncio.wrap_future(self._decider.sync_to(entry))
            return later.again()
        return later.reply

    # ---- gRPC -------------------------------------------------------------------------------

    async def call(self, request: Message, deadline_s: float) -> Message:
        """Any request of MasterService, on the running loop. Raises CenoteError."""
        method, operation = self._by_type[type(request)]
        self.calls[method] += 1
        guard, who = self.guard, GRPC_CALLER.get()
        if guard is not None:
            guard.check(who, request, b"", self.state, "grpc", "")
        reply = operation(request, b"")
        if guard is not None:
            guard.complete(who, request, b"", reply)
        if type(reply) is not Later:
            self._decider.flush()
            return reply  # type: ignore[return-value]
        if reply.again is not None:
            self._decider.flush()
            answer = await self._woken(reply, deadline_s)
            self._decider.flush()
            return answer
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wrap_future(self._decider.sync_to(reply.entry))
        except TimeoutError:
            raise _not_confirmed(deadline_s) from None
        return reply.reply

    async def make_durable(self, deadline_s: float) -> None:
        """Wait until everything decided so far survives a power failure. Raises CenoteError."""
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wrap_future(self._decider.sync())
        except TimeoutError:
            raise _not_confirmed(deadline_s) from None

    # ---- in process -------------------------------------------------------------------------

    def _served(self, request: Message, deadline_s: float, _response: type[M]) -> M:
        method, operation = self._by_type[type(request)]
        self.calls[method] += 1
        reply = operation(request, b"")
        if type(reply) is not Later:
            self._decider.flush()
            return cast(M, reply)
        if reply.again is not None:
            self._decider.flush()
            return cast(M, reply.reply)
        durable = self._decider.sync_to(reply.entry)
        try:
            durable.result(deadline_s)
        except concurrent.futures.TimeoutError:
            raise _not_confirmed(deadline_s) from None
        return cast(M, reply.reply)

    def hello(self, request: pb.HelloRequest, deadline_s: float) -> pb.HelloResponse:
        return self._served(request, deadline_s, pb.HelloResponse)

    def renew_session(
        self, request: pb.RenewSessionRequest, deadline_s: float
    ) -> pb.RenewSessionResponse:
        return self._served(request, deadline_s, pb.RenewSessionResponse)

    def close_session(
        self, request: pb.CloseSessionRequest, deadline_s: float
    ) -> pb.CloseSessionResponse:
        return self._served(request, deadline_s, pb.CloseSessionResponse)

    def get_cluster_view(
        self, request: pb.GetClusterViewRequest, deadline_s: float
    ) -> pb.GetClusterViewResponse:
        return self._served(request, deadline_s, pb.GetClusterViewResponse)

    def open_namespace(
        self, request: pb.OpenNamespaceRequest, deadline_s: float
    ) -> pb.OpenNamespaceResponse:
        return self._served(request, deadline_s, pb.OpenNamespaceResponse)

    def exists(self, request: pb.ExistsRequest, deadline_s: float) -> pb.ExistsResponse:
        return self._served(request, deadline_s, pb.ExistsResponse)

    def match(self, request: pb.MatchRequest, deadline_s: float) -> pb.MatchResponse:
        return self._served(request, deadline_s, pb.MatchResponse)

    def acquire(self, request: pb.AcquireRequest, deadline_s: float) -> pb.AcquireResponse:
        return self._served(request, deadline_s, pb.AcquireResponse)

    def release(self, request: pb.ReleaseRequest, deadline_s: float) -> pb.ReleaseResponse:
        return self._served(request, deadline_s, pb.ReleaseResponse)

    def touch(self, request: pb.TouchRequest, deadline_s: float) -> pb.TouchResponse:
        return self._served(request, deadline_s, pb.TouchResponse)

    def put_start(self, request: pb.PutStartRequest, deadline_s: float) -> pb.PutStartResponse:
        return self._served(request, deadline_s, pb.PutStartResponse)

    def put_commit(self, request: pb.PutCommitRequest, deadline_s: float) -> pb.PutCommitResponse:
        return self._served(request, deadline_s, pb.PutCommitResponse)

    def put_abort(self, request: pb.PutAbortRequest, deadline_s: float) -> pb.PutAbortResponse:
        return self._served(request, deadline_s, pb.PutAbortResponse)

    def remove(self, request: pb.RemoveRequest, deadline_s: float) -> pb.RemoveResponse:
        return self._served(request, deadline_s, pb.RemoveResponse)

    def pin(self, request: pb.PinRequest, deadline_s: float) -> pb.PinResponse:
        return self._served(request, deadline_s, pb.PinResponse)

    def unpin(self, request: pb.UnpinRequest, deadline_s: float) -> pb.UnpinResponse:
        return self._served(request, deadline_s, pb.UnpinResponse)

    def report_failure(
        self, request: pb.ReportFailureRequest, deadline_s: float
    ) -> pb.ReportFailureResponse:
        return self._served(request, deadline_s, pb.ReportFailureResponse)

    def attach(self, request: pb.AttachRequest, deadline_s: float) -> pb.AttachResponse:
        return self._served(request, deadline_s, pb.AttachResponse)

    def heartbeat(self, request: pb.HeartbeatRequest, deadline_s: float) -> pb.HeartbeatResponse:
        return self._served(request, deadline_s, pb.HeartbeatResponse)

    def detach(self, request: pb.DetachRequest, deadline_s: float) -> pb.DetachResponse:
        return self._served(request, deadline_s, pb.DetachResponse)

    def drain(self, request: pb.DrainRequest, deadline_s: float) -> pb.DrainResponse:
        return self._served(request, deadline_s, pb.DrainResponse)


def _no_message(what: str, body: bytes) -> ProtocolError:
    return ProtocolError(f"{what} is no message of its kind ({len(body)} bytes)")


def _not_confirmed(deadline_s: float) -> CenoteError:
    error = DeadlineExceeded(
        f"the journal's disk did not confirm within {deadline_s:g} s: it was decided, and may or "
        "may not survive a power failure"
    )
    error.maybe_executed = True
    return error
