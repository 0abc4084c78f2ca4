"""What stands behind a master's sockets, whichever role it has: it leads, or says who does."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable
from typing import Final, Literal, final

from google.protobuf.message import DecodeError, Message

from cenote.api.errors import NotLeader, ProtocolError, Unauthenticated
from cenote.rpc.lane_server import LaneConnection
from cenote.security.tokens import Principal
from cenote.v1 import master_pb2 as pb

from .guard import GRPC_CALLER, Guard
from .metadata import MetadataBackend
from .operations import Settings
from .service import MasterService

__all__ = ["ADMIN_SERVICE", "LEADER", "STANDBY", "Front", "Role"]

Role = Literal["leader", "standby"]
LEADER: Final = "leader"
STANDBY: Final = "standby"
ADMIN_SERVICE: Final = "cenote.v1.AdminService"


@final
class Front:
    """Handlers of the lane and of gRPC. One thread, but for the backend's properties.

    `leading` is the service while this master leads. `backend` is the present one.
    """

    def __init__(self, backend: MetadataBackend, settings: Settings) -> None:
        self.backend = backend
        self.settings = settings
        self.leading: MasterService | None = None
        self.opening: MasterService | None = None
        """While a master with metadata of its own starts."""
        self.guard: Guard | None = None
        """Who may do what; None: all may do all."""
        self.started_s = time.monotonic()

    def set_addresses(self, addresses: tuple[str, ...]) -> None:
        """What clients are told, once it is known."""
        self.settings = dataclasses.replace(self.settings, addresses=addresses)
        if self.leading is not None:
            self.leading.set_addresses(addresses)

    @property
    def role(self) -> Role:
        return STANDBY if self.leading is None else LEADER

    def not_leader(self) -> NotLeader:
        """Where to go instead."""
        leader = self.backend.leader
        if leader is None or not leader.row.addresses or self._is_own(leader.row.addresses):
            return NotLeader("this master is a standby, and no master leads now")
        return NotLeader(
            f"this master is a standby, {leader.row.name} leads",
            addresses=leader.row.addresses,
            epoch=leader.epoch,
        )

    def _is_own(self, addresses: tuple[str, ...]) -> bool:
        """The backend may name this master while it begins or ceases to lead."""
        return addresses == tuple(self.settings.addresses)

    def service(self) -> MasterService:
        """The leader's. Raises NotLeader on a standby."""
        service = self.leading
        if service is None:
            raise self.not_leader()
        return service

    # ---- the lane -----------------------------------------------------------------------------

    def lane_hello(self, connection: LaneConnection, payload: bytes) -> bytes:
        """See `MasterService.lane_hello`; a standby says who leads."""
        service = self.leading
        if service is not None and self.guard is None:
            return service.lane_hello(connection, payload)
        try:
            request = pb.HelloRequest.FromString(payload)
        except DecodeError:
            raise ProtocolError("the payload of hello is no message of its kind") from None
        if self.guard is not None:
            connection.principal = self.guard.authenticate(
                request.credentials.token, "lane", connection.peer, connection.identities
            )
            if service is not None:
                return service.lane_hello(connection, payload)
        connection.session = request.session_id
        return self._standby_hello().SerializeToString()

    def _standby_hello(self) -> pb.HelloResponse:
        told = self.not_leader()
        return pb.HelloResponse(
            epoch=told.epoch,
            is_leader=False,
            leader_addresses=told.addresses,
            cluster_name=self.settings.cluster_name,
            server_version=self.settings.server_version,
        )

    def dispatch(
        self, connection: LaneConnection, method: int, body: bytes, deadline_ms: int
    ) -> bytes | Awaitable[bytes]:
        """See `MasterService.dispatch`. Raises NotLeader on a standby."""
        service = self.leading
        if service is None:
            raise self.not_leader()
        return service.dispatch(connection, method, body, deadline_ms)

    def flush_urgent(self) -> None:
        if self.leading is not None:
            self.leading.flush_urgent()

    def flush_soon(self) -> None:
        if self.leading is not None:
            self.leading.flush_soon()

    # ---- credentials --------------------------------------------------------------------------

    def enter_call(self, caller: Principal, method: str, request: Message | None) -> None:
        """A gRPC call begins: it is `caller`'s. Requests of MasterService are judged as they are
        carried out. Raises PermissionDenied."""
        GRPC_CALLER.set(caller)
        guard, service = self.guard, self.leading
        if request is None or guard is None or service is None or ADMIN_SERVICE not in method:
            return
        guard.check(caller, request, b"", service.state, "grpc", caller.name)

    # ---- gRPC ---------------------------------------------------------------------------------

    async def call(self, request: Message, deadline_s: float) -> Message:
        """See `MasterService.call`. Raises NotLeader on a standby, but for a hello."""
        service = self.leading
        if service is None:
            if self.guard is not None and GRPC_CALLER.get() is None:
                raise Unauthenticated("this pool wants a token")
            if isinstance(request, pb.HelloRequest):
                return self._standby_hello()
            raise self.not_leader()
        return await service.call(request, deadline_s)
