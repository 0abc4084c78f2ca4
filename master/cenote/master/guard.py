"""Who may do what: asked of every request before it is carried out, where the pool has tokens.

    hello       the token says who it is; the session belongs to the holder of that name
    a request   of that holder's session, with the role that it needs, for namespaces of theirs
    a reply     to a hello or renewal: the session's ticket; to a PutStart: proofs of its grants;
                to a daemon: the keys by which it knows them

Without tokens there is no Guard, and nothing is asked.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np
from google.protobuf.message import Message

from cenote.api.errors import CenoteError, PermissionDenied, Unauthenticated
from cenote.api.rows import EXTENT
from cenote.rpc.grpc_auth import bearer_token
from cenote.runtime.log import get_logger
from cenote.security.refusals import Refusals, is_refusal
from cenote.security.tickets import KeyRing, pack_proof, sign_ticket
from cenote.security.tokens import Principal, Role, TokenFile
from cenote.v1 import admin_pb2 as admin
from cenote.v1 import common_pb2, store_pb2
from cenote.v1 import master_pb2 as pb

from .operations import Later
from .state import MasterState

__all__ = ["GRPC_CALLER", "PORTS", "Guard"]

PORTS: Final = ("lane", "grpc")
LOOK_S: Final = 1.0
"""Between looks at the file of tokens."""
OWNERS_SLACK: Final = 1024

GRPC_CALLER: contextvars.ContextVar[Principal | None] = contextvars.ContextVar(
    "GRPC_CALLER", default=None
)
"""Who makes the call that this task serves."""

_ANYBODY: Final = frozenset(
    (
        pb.HelloRequest,
        pb.RenewSessionRequest,
        pb.CloseSessionRequest,
        pb.GetClusterViewRequest,
        pb.ReportFailureRequest,
        admin.GetStatusRequest,
        admin.ListNodesRequest,
        admin.ListSegmentsRequest,
        admin.ListNamespacesRequest,
        admin.ListTasksRequest,
    )
)
"""For whoever has a token."""
_ROLES: Final[dict[type[Message], Role]] = {
    pb.OpenNamespaceRequest: Role.READ,
    pb.ExistsRequest: Role.READ,
    pb.MatchRequest: Role.READ,
    pb.AcquireRequest: Role.READ,
    pb.ReleaseRequest: Role.READ,
    pb.TouchRequest: Role.READ,
    pb.PutStartRequest: Role.WRITE,
    pb.PutCommitRequest: Role.WRITE,
    pb.PutAbortRequest: Role.WRITE,
    pb.RemoveRequest: Role.WRITE,
    pb.PinRequest: Role.WRITE,
    pb.UnpinRequest: Role.WRITE,
    pb.AttachRequest: Role.STORE,
    pb.HeartbeatRequest: Role.STORE,
    pb.DetachRequest: Role.STORE,
    admin.StatObjectRequest: Role.READ,
    admin.ExplainRequest: Role.READ,
    admin.CreateNamespaceRequest: Role.WRITE,
    admin.SetNamespaceQuotaRequest: Role.ADMIN,
    admin.ResetNamespaceRequest: Role.ADMIN,
    admin.DeleteNamespaceRequest: Role.ADMIN,
    admin.EvictObjectsRequest: Role.ADMIN,
}
"""For whom the namespaces are that it names. What stands nowhere here is about the whole pool, and
needs ADMIN of all namespaces."""
_NAMES: Final[dict[type[Message], str]] = {
    pb.OpenNamespaceRequest: "name",
    admin.ExplainRequest: "namespace",
    admin.CreateNamespaceRequest: "name",
    admin.SetNamespaceQuotaRequest: "name",
    admin.ResetNamespaceRequest: "name",
    admin.DeleteNamespaceRequest: "name",
    admin.EvictObjectsRequest: "namespace",
}
"""The field that has the namespace's name; others have its number, in what they name keys by."""

_log = get_logger("cenote.security")


@final
class Guard:
    """Of one master, whichever role it has. One thread."""

    def __init__(
        self,
        tokens: TokenFile,
        *,
        isolation: Literal["strict", "pool"] = "strict",
        key_rotation_s: float = 300.0,
    ) -> None:
        self._tokens = tokens
        self._isolation = isolation
        self._key_rotation_s = key_rotation_s
        self.keys = KeyRing(key_rotation_s)
        self.refusals = Refusals(_log, PORTS)
        self._owners: dict[bytes, Principal] = {}
        """Of sessions."""
        self._look_at_s = 0.0

    @classmethod
    def from_file(
        cls, path: str, *, isolation: Literal["strict", "pool"], rotation_s: float
    ) -> Guard:
        """Raises ConfigError."""
        tokens = TokenFile(Path(path).expanduser())
        return cls(tokens, isolation=isolation, key_rotation_s=rotation_s)

    # ---- who it is ----------------------------------------------------------------------------

    def authenticate(
        self, token: bytes, port: str, peer: object, identities: Sequence[str] = ()
    ) -> Principal:
        """By its token, else by its certificate's identities. Raises Unauthenticated."""
        try:
            return self._tokens.authenticate(token, identities)
        except CenoteError as error:
            self.refusals.note(port, error, peer)
            raise

    def adopt(self, session_id: bytes, principal: Principal) -> None:
        """The session is this one's from now on. Raises PermissionDenied where it is another's."""
        owner = self._owners.get(session_id)
        if owner is not None and owner.name != principal.name:
            raise PermissionDenied("this session is another token's")
        self._owners[session_id] = principal

    def tick(self, now_s: float, state: MasterState | None) -> list[bytes]:
        """Look at the file of tokens, and renew keys, where it is time; sessions to be cut off,
        whose tokens count no more."""
        self.keys.tick(now_s)
        if now_s < self._look_at_s:
            return []
        self._look_at_s = now_s + LOOK_S
        if self._tokens.refresh():
            _log.info("tokens read anew", tokens=len(self._tokens.entries))
        if state is not None and len(self._owners) > 2 * state.session_count + OWNERS_SLACK:
            known = state.has_session
            self._owners = {s: who for s, who in self._owners.items() if known(s)}
        still = {who: self.still_counts(who) for who in set(self._owners.values())}
        ended = [session for session, who in self._owners.items() if not still[who]]
        for session in ended:
            who = self._owners.pop(session)
            _log.warning("session ended with its token", token=who.token_id, holder=who.name)
        return ended

    def still_counts(self, principal: Principal) -> bool:
        """Whether its token was neither revoked nor changed, and has not expired."""
        return self._tokens.still_counts(principal)

    # ---- over gRPC ----------------------------------------------------------------------------

    def admit_call(
        self,
        _method: str,
        metadata: Sequence[tuple[str, Any]],
        peer: str,
        identities: Sequence[str] = (),
    ) -> Principal:
        """Who makes a call. Raises Unauthenticated."""
        return self.authenticate(bearer_token(metadata), "grpc", peer, identities)

    # ---- what it may --------------------------------------------------------------------------

    def check(
        self,
        principal: Principal | None,
        request: Message,
        session: bytes,
        state: MasterState,
        port: str,
        peer: object,
    ) -> None:
        """Raises Unauthenticated and PermissionDenied."""
        try:
            self._check(principal, request, session, state)
        except CenoteError as error:
            if is_refusal(error):
                self.refusals.note(port, error, peer)
            raise

    def _check(
        self, principal: Principal | None, request: Message, session: bytes, state: MasterState
    ) -> None:
        if principal is None:
            raise Unauthenticated("this pool wants a token")
        kind = type(request)
        if kind not in _ANYBODY:
            role = _ROLES.get(kind, Role.ADMIN)
            if not principal.may(role):
                raise PermissionDenied(
                    f"token {principal.name} has the role {principal.role.name.lower()};"
                    f" {kind.__name__.removesuffix('Request')} needs {role.name.lower()}"
                )
        if kind is pb.HelloRequest:
            self.adopt(request.session_id, principal)  # type: ignore[attr-defined]
            return
        said = getattr(request, "session_id", b"")
        if said and said != session:
            owner = self._owners.get(said)
            if owner is not None and owner.name != principal.name:
                raise PermissionDenied("this session is another token's")
        if not principal.is_pool_wide:
            self._check_namespaces(principal, request, state)
            if isinstance(request, pb.PutStartRequest):
                # What is there already may be another tenant's, and it would tell that it is.
                request.ClearField("content_digests")
        if isinstance(request, pb.OpenNamespaceRequest):
            makes_it = request.create and not state.has_namespace(request.name)
            if makes_it and not principal.may(Role.WRITE):
                raise PermissionDenied(f"token {principal.name} may make no namespace")

    def _check_namespaces(self, principal: Principal, request: Message, state: MasterState) -> None:
        kind = type(request)
        if kind not in _ROLES and kind not in _ANYBODY:
            raise PermissionDenied(f"token {principal.name} is for some namespaces only")
        if kind in _NAMES:
            name: str = getattr(request, _NAMES[kind])
            if not principal.covers(name):
                raise PermissionDenied(f"namespace {name!r} is not one of token {principal.name}")
            return
        for namespace_id in _namespaces_in(request):
            name = state.namespace_name(namespace_id)
            # One that nobody has is the state's to refuse: the client opens it anew.
            if name and not principal.covers(name):
                raise PermissionDenied(f"that namespace is not one of token {principal.name}")

    # ---- what replies carry -------------------------------------------------------------------

    def complete(
        self, principal: Principal | None, request: Message, session: bytes, reply: Message | Later
    ) -> None:
        """Add to a reply what its receiver needs."""
        if principal is None:
            return
        if isinstance(reply, Later):
            self.complete(principal, request, session, reply.reply)
            if reply.again is not None:
                reply.again = self._completed(principal, request, session, reply.again)
            return
        kind = type(reply)
        if kind is pb.PutStartResponse:
            assert isinstance(request, pb.PutStartRequest)
            assert isinstance(reply, pb.PutStartResponse)
            self._prove(request, session, reply)
        elif kind is pb.HelloResponse:
            assert isinstance(request, pb.HelloRequest)
            assert isinstance(reply, pb.HelloResponse)
            reply.ticket = self.ticket(request.session_id, principal)
            reply.no_mapping = not self._may_map(principal)
        elif kind is pb.RenewSessionResponse:
            assert isinstance(request, pb.RenewSessionRequest)
            assert isinstance(reply, pb.RenewSessionResponse)
            reply.ticket = self.ticket(request.session_id or session, principal)
        elif kind in (pb.AttachResponse, pb.HeartbeatResponse):
            assert isinstance(reply, pb.AttachResponse | pb.HeartbeatResponse)
            reply.access_keys = self.keys.packed()
        elif kind is admin.ListNamespacesResponse and not principal.is_pool_wide:
            assert isinstance(reply, admin.ListNamespacesResponse)
            mine = [one for one in reply.namespaces if principal.covers(one.name)]
            del reply.namespaces[:]
            reply.namespaces.extend(mine)
        elif kind is admin.ExplainResponse and not principal.is_pool_wide:
            assert isinstance(reply, admin.ExplainResponse)
            known = [name for name in reply.found_in if principal.covers(name)]
            reply.found_in[:] = known

    def _completed(
        self, principal: Principal, request: Message, session: bytes, again: Callable[[], Message]
    ) -> Callable[[], Message]:
        def completed() -> Message:
            reply = again()
            self.complete(principal, request, session, reply)
            return reply

        return completed

    def _may_map(self, principal: Principal) -> bool:
        return principal.is_pool_wide or self._isolation == "pool"

    def ticket(self, session_id: bytes, principal: Principal) -> bytes:
        """What the session shows daemons."""
        ticket = store_pb2.AccessTicket(
            session_id=session_id,
            holder=principal.name,
            role=principal.role,
            namespaces=principal.namespaces,
            may_map=self._may_map(principal),
        )
        return sign_ticket(ticket, self.keys.current)

    def own_ticket(self, session_id: bytes) -> bytes:
        """For the master's own hellos to daemons."""
        return self.ticket(session_id, Principal("", "master", Role.STORE, ("*",)))

    def _prove(
        self, request: pb.PutStartRequest, session: bytes, reply: pb.PutStartResponse
    ) -> None:
        session_id = request.session_id or session
        namespace_id = request.keys.namespace_id
        key = self.keys.current[1]
        for grant_id, packed, name in (
            (reply.grant_id, reply.extents, "grant_signatures"),
            (reply.spare_grant_id, reply.spare_extents, "spare_signatures"),
        ):
            if not packed:
                continue
            rows = np.frombuffer(packed, EXTENT)
            segments = rows["segment"]
            found = [int(segments[0])]
            if (segments != segments[0]).any():
                found = np.unique(segments).tolist()
            proofs = []
            for segment in found:
                part = packed if len(found) == 1 else rows[segments == segment].tobytes()
                proofs.append(pack_proof(key, session_id, grant_id, namespace_id, segment, part))
            setattr(reply, name, b"".join(proofs))


def _namespaces_in(request: Any) -> set[int]:
    """Of all keys that a request names."""
    found = set()
    for field, value in request.ListFields():
        if field.message_type is None or field.label == field.LABEL_REPEATED:
            continue
        if field.message_type.full_name in _KEYED:
            found.add(value.namespace_id)
        elif field.message_type.full_name == pb.SpareNames.DESCRIPTOR.full_name:
            found.add(value.keys.namespace_id)
    found.discard(0)
    return found


_KEYED: Final = frozenset(
    (common_pb2.KeyBatch.DESCRIPTOR.full_name, common_pb2.Piggyback.DESCRIPTOR.full_name)
)
