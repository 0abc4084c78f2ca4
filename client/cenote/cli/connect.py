"""Ways from a command to the pool: the master's administration over gRPC, bytes over the SDK."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast, final

from cenote.api.errors import (
    AlreadyExists,
    CenoteError,
    DeadlineExceeded,
    InvalidArgument,
    NamespaceNotFound,
    NotLeader,
    TlsFailed,
    Unavailable,
)

from .admin_calls import AdminCalls

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from cenote.client import Client
    from cenote.security.tls import Tls
    from cenote.v1 import admin_pb2, common_pb2, store_pb2

__all__ = [
    "Admin",
    "grpc_addresses_of",
    "list_slots",
    "open_admin",
    "open_client",
    "store_status",
]

_GRPC_PORT_DEFAULT: Final = 5111
_LOOKUP: Final = re.compile(
    r"^gRPC .*(lookup failed|resolving|resolution)", re.IGNORECASE | re.DOTALL
)
_TLS: Final = re.compile(r"handshake|certificate|\bSSL|\bTLS", re.IGNORECASE)
# gRPC does not say what its server refused; a dead one's port would be closed instead.
_TURNED_AWAY: Final = re.compile(r"failed to connect.*(Socket closed|reset by peer)", re.DOTALL)
_TLS_REMEDY: Final = (
    "compare CENOTE_CLIENT_TLS_CA, _CERT, _KEY and _SERVER_NAME with the --tls-... of the daemon"
)
_LOOKUP_TIMEOUT_S: Final = 1.0
_ELECTION_PAUSE_S: Final = 0.2
_NO_MASTER: Final = "start a pool with `cenote up`, or say where it is: --master, CENOTE_MASTER"
M = TypeVar("M", bound="Message")


def grpc_addresses_of(master: str, grpc: str | None, deadline_s: float = 5.0) -> list[str]:
    """Those in `grpc`, or as etcd has them where `master` is its URL; else by convention the ports
    after those of the masters' lanes.

    Raises InvalidArgument, and what a look into etcd raises, within `deadline_s`.
    """
    if grpc:
        return grpc.split(",")
    if "etcd://" in master:
        from cenote.client.config import make_config

        directory = make_config(master, {}).directory()
        places = directory.wait(deadline_s) if directory is not None else ()
        found = (place.grpc or _grpc_address_of(place.addresses[0]) for place in places)
        return list(dict.fromkeys(found))
    return list(dict.fromkeys(map(_grpc_address_of, master.split(","))))


def _grpc_address_of(master: str) -> str:
    from cenote.rpc.address import parse_address

    address = parse_address(master)
    if address.path:
        return f"127.0.0.1:{_GRPC_PORT_DEFAULT}"
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{host}:{address.port + 1}"


def open_admin(master: str, grpc: str | None, deadline_s: float) -> Admin:
    """The master's administration, by the options of a command."""
    return Admin(grpc_addresses_of(master, grpc, deadline_s), deadline_s=deadline_s)


def _channel(address: str) -> Any:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors come as exceptions, once
    import grpc

    from cenote.rpc.grpc_util import channel_options

    tls = _tls()
    if tls is None:
        return grpc.insecure_channel(address, options=channel_options())
    from cenote.rpc.grpc_tls import channel_credentials, channel_tls_options

    options = [*channel_options(), *channel_tls_options(tls)]
    return grpc.secure_channel(address, channel_credentials(tls), options=options)


def _tls() -> Tls | None:
    """How the environment says to speak TLS, as the SDK reads it. Raises ConfigError."""
    from cenote.client.config import make_config

    return make_config(None, {}).tls()


def _credentials() -> tuple[tuple[str, str], ...]:
    """The token of the environment, as the SDK reads it. Raises ConfigError."""
    from cenote.client.config import make_config
    from cenote.rpc.grpc_auth import token_metadata

    return token_metadata(make_config(None, {}).credentials().token.decode())


@final
class Admin(AdminCalls):
    """The leader's AdminService. A context manager; every call ends within `deadline_s`.

    Of several masters those that do not lead, or do not answer, are passed over.
    """

    def __init__(self, addresses: Sequence[str], *, deadline_s: float = 5.0) -> None:
        self._addresses = list(addresses)
        self._deadline_s = deadline_s
        self._channels: dict[str, Any] = {}
        self._stubs: dict[tuple[str, Any], Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()

    @property
    def address(self) -> str:
        """The one that answered last."""
        return self._addresses[0]

    def _ask(self, address: str, method: str, request: Message, deadline_s: float) -> Any:
        import grpc

        from cenote.v1 import admin_pb2_grpc, master_pb2_grpc

        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = _channel(address)
        make_stub: Any = admin_pb2_grpc.AdminServiceStub
        if method in ("Drain", "Hello"):
            make_stub = master_pb2_grpc.MasterServiceStub
        # A stub makes all calls of its service: that takes longer than one of them.
        stub = self._stubs.get((address, make_stub))
        if stub is None:
            stub = self._stubs[address, make_stub] = make_stub(channel)
        try:
            call = getattr(stub, method)
            return call(request, timeout=deadline_s, metadata=_credentials())
        except grpc.RpcError as error:
            raise _typed(error, f"the master's gRPC address {address}", _NO_MASTER) from error

    def _call(self, method: str, request: Message, deadline_s: float | None = None) -> Any:
        """The leader's answer; while masters are there and none leads, one is waited for.

        Raises what the last master raised that was asked in vain.
        """
        until_s = time.monotonic() + (self._deadline_s if deadline_s is None else deadline_s)
        while True:
            try:
                return self._ask_around(method, request, until_s)
            except NotLeader:
                if time.monotonic() + _ELECTION_PAUSE_S >= until_s:
                    raise
            time.sleep(_ELECTION_PAUSE_S)

    def _ask_around(self, method: str, request: Message, until_s: float) -> Any:
        """`_call`, each master once."""
        todo = list(self._addresses)
        asked: set[str] = set()
        failure: CenoteError | None = None
        while todo:
            address = todo.pop(0)
            left_s = until_s - time.monotonic()
            if address in asked or left_s <= 0:
                continue
            asked.add(address)
            share_s = left_s if not todo else max(left_s / (1 + len(todo)), min(left_s, 0.5))
            try:
                reply = self._ask(address, method, request, share_s)
            except NotLeader as error:
                todo[:0] = [_grpc_address_of(leader) for leader in error.addresses]
                failure = error
            except (Unavailable, DeadlineExceeded) as error:
                failure = failure or error
            else:
                self._addresses = [address, *(a for a in self._addresses if a != address)]
                return reply
        assert failure is not None
        raise failure

    def status(self, *, deadline_s: float | None = None) -> admin_pb2.GetStatusResponse:
        """What the leader says of the pool as a whole; where none is found, a standby.

        `deadline_s`: another one than that of the other calls.
        """
        from cenote.v1 import admin_pb2

        request = admin_pb2.GetStatusRequest()
        reply: admin_pb2.GetStatusResponse = self._call("GetStatus", request, deadline_s)
        if reply.role == "leader":
            return reply
        known = [master.grpc for master in reply.masters if master.role == "leader"]
        for address in dict.fromkeys((*known, *self._addresses[1:])):
            try:
                limit_s = self._deadline_s if deadline_s is None else deadline_s
                other = self._ask(address, "GetStatus", request, min(limit_s, 1.0))
            except (Unavailable, DeadlineExceeded):
                continue
            if other.role == "leader":
                return cast("admin_pb2.GetStatusResponse", other)
        return reply

    def nodes(self) -> Sequence[admin_pb2.NodeStatus]:
        """All store daemons that the master knows, by name."""
        from cenote.v1 import admin_pb2

        reply = self._call("ListNodes", admin_pb2.ListNodesRequest())
        return sorted(reply.nodes, key=lambda node: (node.view.name, node.view.node_id))

    def segments(self) -> Sequence[admin_pb2.SegmentStatus]:
        """All segments, by node and index."""
        from cenote.v1 import admin_pb2

        reply = self._call("ListSegments", admin_pb2.ListSegmentsRequest())
        return sorted(reply.segments, key=lambda s: (s.node_name, s.view.node_segment_index))

    def ticket(self) -> bytes:
        """For the daemons' gRPC; empty where the pool asks nobody who he is."""
        from cenote.v1 import master_pb2

        if not _credentials() and _tls() is None:
            return b""
        hello = master_pb2.HelloRequest(
            session_id=os.urandom(16), client_name="cenote-cli", observer=True
        )
        return bytes(self._call("Hello", hello).ticket)

    def miss_ratios(self) -> admin_pb2.GetMissRatioCurvesResponse:
        """What other capacities and policies would hit."""
        from cenote.v1 import admin_pb2

        request = admin_pb2.GetMissRatioCurvesRequest()
        reply: admin_pb2.GetMissRatioCurvesResponse = self._call("GetMissRatioCurves", request)
        return reply

    def tasks(self) -> Sequence[admin_pb2.TaskStatus]:
        """What the master has in hand that takes longer."""
        from cenote.v1 import admin_pb2

        reply = self._call("ListTasks", admin_pb2.ListTasksRequest())
        return sorted(reply.tasks, key=lambda task: (task.kind, task.node_name))

    def drain(self, node_id: int, *, cancel: bool = False, bandwidth: int = 0) -> int:
        """Have a node left, or taken up again; bytes that it still holds."""
        from cenote.v1 import master_pb2

        request = master_pb2.DrainRequest(node_id=node_id, cancel=cancel, bandwidth=bandwidth)
        return int(self._call("Drain", request).remaining_bytes)

    def rebalance(self, *, cancel: bool = False, bandwidth: int = 0) -> None:
        """Even out how full nodes are, or end that. Raises InvalidArgument."""
        from cenote.v1 import admin_pb2

        self._call("Rebalance", admin_pb2.RebalanceRequest(cancel=cancel, bandwidth=bandwidth))

    def namespaces(self) -> Sequence[admin_pb2.NamespaceStatus]:
        """All namespaces, by name."""
        from cenote.v1 import admin_pb2

        reply = self._call("ListNamespaces", admin_pb2.ListNamespacesRequest())
        return sorted(reply.namespaces, key=lambda namespace: namespace.name)

    def namespace(self, name: str) -> admin_pb2.NamespaceStatus:
        """The namespace of this name. Raises NamespaceNotFound."""
        for namespace in self.namespaces():
            if namespace.name == name:
                return namespace
        raise NamespaceNotFound(
            f"there is no namespace {name!r}",
            remedy="`cenote namespaces` lists them, `cenote namespaces create` makes one",
        )

    def create_namespace(
        self, name: str, fingerprint: bytes, durability: int
    ) -> admin_pb2.NamespaceStatus:
        """Make a namespace, or find it. Raises FingerprintMismatch where it has another one."""
        from cenote.v1 import admin_pb2

        request = admin_pb2.CreateNamespaceRequest(
            name=name,
            fingerprint=fingerprint,
            durability=cast("common_pb2.Durability", durability),
        )
        try:
            reply = self._call("CreateNamespace", request)
        except AlreadyExists:  # with this fingerprint
            return self.namespace(name)
        return cast("admin_pb2.NamespaceStatus", reply.namespace)

    def reset_namespace(self, name: str) -> int:
        """Forget all its objects; its new generation. Raises NamespaceNotFound."""
        from cenote.v1 import admin_pb2

        return int(
            self._call("ResetNamespace", admin_pb2.ResetNamespaceRequest(name=name)).generation
        )

    def set_quota(
        self,
        name: str,
        *,
        dram_bytes: int | None = None,
        ssd_bytes: int | None = None,
        objects: int | None = None,
        priority: int = 0,
    ) -> admin_pb2.NamespaceStatus:
        """Change what is named; 0 takes a quota away. Raises NamespaceNotFound."""
        from cenote.v1 import admin_pb2

        request = admin_pb2.SetNamespaceQuotaRequest(
            name=name,
            dram_bytes=dram_bytes,
            ssd_bytes=ssd_bytes,
            objects=objects,
            priority=cast("common_pb2.Priority", priority),
        )
        reply = self._call("SetNamespaceQuota", request)
        return cast("admin_pb2.NamespaceStatus", reply.namespace)

    def stat(
        self, namespace: admin_pb2.NamespaceStatus, digests: bytes = b"", keys: Sequence[bytes] = ()
    ) -> admin_pb2.StatObjectResponse:
        """What the master knows of some objects, named by packed digests or by keys."""
        import numpy as np

        from cenote.v1 import admin_pb2, common_pb2

        batch = common_pb2.KeyBatch(
            namespace_id=namespace.namespace_id,
            generation=namespace.generation,
            digests=digests,
            keys=b"".join(keys),
            key_lengths=np.fromiter(map(len, keys), "<u2", len(keys)).tobytes(),
        )
        reply = self._call("StatObject", admin_pb2.StatObjectRequest(keys=batch))
        return cast("admin_pb2.StatObjectResponse", reply)


def list_slots(
    address: str,
    request: store_pb2.ListSlotsRequest,
    *,
    deadline_s: float,
    ticket: bytes = b"",
) -> Iterator[store_pb2.SlotEntry]:
    """Sealed slots of one store daemon, asked at its gRPC address."""
    import grpc

    from cenote.rpc.grpc_auth import ticket_metadata
    from cenote.v1 import store_pb2_grpc

    with _channel(address) as channel:
        make_stub: Any = store_pb2_grpc.StoreServiceStub
        try:
            replies = make_stub(channel).ListSlots(
                request, timeout=deadline_s, metadata=ticket_metadata(ticket)
            )
            for reply in replies:
                yield from reply.entries
        except grpc.RpcError as error:
            raise _typed(error, f"the store daemon at {address}", "") from error


def store_status(
    address: str, *, deadline_s: float, ticket: bytes = b""
) -> store_pb2.GetStoreStatusResponse:
    """What a store daemon at a gRPC address says of itself."""
    import grpc

    from cenote.rpc.grpc_auth import ticket_metadata
    from cenote.v1 import store_pb2, store_pb2_grpc

    with _channel(address) as channel:
        make_stub: Any = store_pb2_grpc.StoreServiceStub
        request = store_pb2.GetStoreStatusRequest()
        try:
            reply = make_stub(channel).GetStoreStatus(
                request, timeout=deadline_s, metadata=ticket_metadata(ticket)
            )
        except grpc.RpcError as error:
            raise _typed(error, f"the store daemon at {address}", "") from error
    return cast("store_pb2.GetStoreStatusResponse", reply)


def _typed(rpc_error: Any, whom: str, remedy: str) -> CenoteError:
    from cenote.rpc.grpc_util import typed_error

    error = typed_error(rpc_error)
    if type(error) is Unavailable and _LOOKUP.search(error.message):
        return _unresolved(whom, remedy)
    if type(error) is Unavailable and _TLS.search(error.message):
        why = error.message.removeprefix("gRPC UNAVAILABLE: ")
        return TlsFailed(f"no TLS connection to {whom}: {why}", remedy=_TLS_REMEDY)
    if type(error) is Unavailable and _TURNED_AWAY.search(error.message):
        return TlsFailed(
            f"{whom} closes connections at once: it wants TLS, or refuses our certificate",
            remedy=_TLS_REMEDY,
        )
    if type(error) is Unavailable and error.message.startswith("gRPC "):
        return Unavailable(f"nobody answers at {whom}", remedy=remedy)
    if type(error) is DeadlineExceeded and error.message.startswith("gRPC "):
        return DeadlineExceeded(f"no answer in time from {whom}", remedy=remedy)
    return error


def _unresolved(whom: str, remedy: str) -> CenoteError:
    """gRPC says at length that a name has no address; the resolver says why."""
    import socket
    import threading

    host = whom.rpartition(" ")[2].rpartition(":")[0].removeprefix("[").removesuffix("]")
    why = ["its name could not be looked up"]

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            why.append(error.strerror or str(error))

    # The resolver has no deadline of its own; the thread ends with the lookup or the process.
    thread = threading.Thread(target=look_up, name="cenote-resolve", daemon=True)
    thread.start()
    thread.join(_LOOKUP_TIMEOUT_S)
    return Unavailable(f"no connection to {whom}: {why[-1]}", remedy=remedy)


def open_client(
    master: str,
    admin: Admin,
    namespace: str,
    *,
    deadline_s: float,
    create: bool = False,
    fingerprint: bytes | None = None,
    **options: Any,
) -> Client:
    """A client in a namespace whose fingerprint it takes from the master.

    `create`: make the namespace with `fingerprint` where there is none, else raise
    NamespaceNotFound. Raises FingerprintMismatch where `fingerprint` is another one.
    """
    try:
        known = admin.namespace(namespace).fingerprint
    except NamespaceNotFound:
        if not create:
            raise
        known = fingerprint or b""
    from cenote.client import Client

    try:
        return Client(
            master.split(","),
            namespace=namespace,
            fingerprint=known if fingerprint is None else fingerprint,
            name="cenote-cli",
            deadline_s=deadline_s,
            **options,
        )
    except (Unavailable, DeadlineExceeded) as error:
        raise type(error)(error.message, remedy=error.remedy or _NO_MASTER) from error
    except InvalidArgument as error:
        raise type(error)(error.message, remedy=error.remedy or "check --master") from error
