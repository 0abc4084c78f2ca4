"""Who has no right is refused: on every port, with a typed error, in the log and in the metrics."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cenote.api.errors import (
    CenoteError,
    GrantRevoked,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from cenote.api.rows import EXTENT
from cenote.client import Client
from cenote.rpc.grpc_auth import ticket_metadata, token_metadata
from cenote.rpc.lane_client import LaneClient
from cenote.security.tokens import Role
from cenote.transport import wire
from cenote.v1 import admin_pb2, admin_pb2_grpc, common_pb2, store_pb2, store_pb2_grpc
from cenote.v1 import master_pb2 as pb
from cluster import Cluster, run_cenote
from security_kit import DataSocket, Tokens, call, hello_over_grpc
from waiting import wait_until

pytestmark = pytest.mark.integration

SECRET = b"what only ann's engines may read " * 64
NOBODY = {
    "none": "",
    "wrong": "cenote_0123456789ab_" + "x" * 43,
    "garbage": "\N{SNOWMAN}" * 3,
}


class Secured(NamedTuple):
    cluster: Cluster
    tokens: Tokens
    lane_socket: str

    def client(self, holder: str, namespace: str, **options: Any) -> Client:
        token = self.tokens[holder]
        return self.cluster.client(token=token, namespace=namespace, **options)

    @property
    def grpc(self) -> str:
        return self.cluster.grpc

    @property
    def store_grpc(self) -> str:
        return str(self.cluster.stores[0].ready["grpc"])

    @property
    def data(self) -> str:
        return str(self.cluster.stores[0].ready["data"]).removeprefix("tcp://")

    @property
    def data_socket(self) -> str:
        return str(self.cluster.stores[0].ready["socket"]).removeprefix("unix://")

    def refusals(self) -> float:
        """That masters and daemons have counted."""
        return sum(
            float(line.rpartition(" ")[2])
            for process in self.cluster.processes
            for line in scraped(str(process.ready["metrics"])).splitlines()
            if line.startswith(("cenote_master_refusals_total{", "cenote_store_refusals_total{"))
        )

    def ticket(self, holder: str) -> tuple[bytes, bytes]:
        """(session id, its ticket)."""
        session_id = os.urandom(16)
        return session_id, hello_over_grpc(self.grpc, self.tokens[holder], session_id).ticket


def scraped(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as reply:
        return str(reply.read().decode())


@pytest.fixture
def secured(shared: Secured) -> Secured:
    """Whole, whatever the test before (which may be an earlier try of the same) left behind."""
    for process in shared.cluster.processes:
        if process.is_running:
            process.resume()
        else:
            process.restart()
    return shared


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("security")
    tokens = Tokens(folder)
    lane_socket = f"/tmp/cenote-lane-{os.getpid()}.sock"
    master = {
        "tokens": tokens.path, "metrics-listen": "127.0.0.1:0", "socket": lane_socket,
        "key-rotation-s": 5,
    }  # fmt: skip
    store = {"token-file": tokens.node_file, "metrics-listen": "127.0.0.1:0"}
    with Cluster(stores=1, master_flags=master, store_flags=store) as cluster:
        made = Secured(cluster, tokens, lane_socket)
        with made.client("ann", "ann/llama") as ann:
            ann.put("secret", SECRET)
        with made.client("bob", "bob/llama") as bob:
            bob.put("own", b"bob's")
        yield made
    Path(lane_socket).unlink(missing_ok=True)


def lane_hello(address: str, token: str) -> None:
    """One call over a lane of its own."""
    request = pb.HelloRequest(
        session_id=os.urandom(16), credentials=common_pb2.Credentials(token=token.encode())
    )
    with LaneClient(address, request.SerializeToString(), connections_max=1) as lane:
        view = pb.GetClusterViewRequest().SerializeToString()
        lane.call(pb.MASTER_METHOD_GET_CLUSTER_VIEW, view, 20.0)


def try_ports(secured: Secured, token: str, ticket: bytes) -> dict[str, CenoteError | None]:
    """What each port says to this token, or this ticket."""
    session_id = os.urandom(16)

    def on_data(address: str) -> None:
        with DataSocket(address) as raw:
            raw.hello(session_id, ticket)

    attempts: dict[str, Callable[[], object]] = {
        "lane": lambda: lane_hello(secured.cluster.lane, token),
        "lane socket": lambda: lane_hello(f"unix://{secured.lane_socket}", token),
        "grpc": lambda: hello_over_grpc(secured.grpc, token, session_id),
        "admin": lambda: call(
            admin_pb2_grpc.AdminServiceStub,
            secured.grpc,
            "GetStatus",
            admin_pb2.GetStatusRequest(),
            token_metadata(token),
        ),
        "store grpc": lambda: call(
            store_pb2_grpc.StoreServiceStub,
            secured.store_grpc,
            "GetStoreStatus",
            store_pb2.GetStoreStatusRequest(),
            ticket_metadata(ticket),
        ),
        "data": lambda: on_data(secured.data),
        "data socket": lambda: on_data(secured.data_socket),
    }
    found: dict[str, CenoteError | None] = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except CenoteError as error:
            found[name] = error
        else:
            found[name] = None
    return found


@pytest.mark.parametrize("token", ["none", "wrong"])
def test_nobody_is_let_in(secured: Secured, token: str) -> None:
    before = secured.refusals()
    found = try_ports(secured, NOBODY[token], b"" if token == "none" else b"x" * 80)
    assert {name: type(error) for name, error in found.items()} == dict.fromkeys(
        found, Unauthenticated
    )
    assert secured.refusals() - before >= len(found)
    for process in secured.cluster.processes:
        assert "WARNING cenote.security refused" in process.log_text()


def test_a_client_with_a_wrong_token_says_so(secured: Secured) -> None:
    for token in NOBODY.values():
        with pytest.raises(Unauthenticated):
            secured.cluster.client(token=token)


def test_the_own_namespace_works(secured: Secured) -> None:
    with secured.client("ann", "ann/llama") as ann:
        assert ann.get("secret") == SECRET
        paths = [path.path for path in ann.paths()]
        assert paths == ["tcp"]  # memory has other tenants' bytes, too
        values = [bytes([i]) * 3000 for i in range(40)]
        mark = os.urandom(4).hex()  # another one each time
        keys = [f"key {mark} {i}" for i in range(40)]
        ann.put_batch(keys, values).raise_for_errors()
        assert ann.get_batch(keys) == values
        for key in keys:  # spare extents
            assert ann.put(f"{key} alone", b"x" * 100).error is None
            assert ann.get(f"{key} alone") == b"x" * 100
    with secured.client("ann-reader", "ann/llama") as reader:
        assert reader.get("secret") == SECRET
        with pytest.raises(PermissionDenied):
            reader.put("secret 2", b"x")
        with pytest.raises(PermissionDenied):
            reader.remove("secret")


def test_all_namespaces_go_over_shared_memory(secured: Secured) -> None:
    with secured.client("wide", "ann/llama") as wide:
        assert wide.get("secret") == SECRET
        assert [path.path for path in wide.paths()] == ["shm"]
        key = f"from memory {os.urandom(4).hex()}"
        assert wide.put(key, b"y" * 500).error is None
    with secured.client("ann", "ann/llama") as ann:
        assert ann.get(key) == b"y" * 500


def test_another_namespace_is_refused_by_the_master(secured: Secured) -> None:
    with pytest.raises(PermissionDenied):
        secured.client("bob", "ann/llama")
    listed = call(
        admin_pb2_grpc.AdminServiceStub, secured.grpc, "ListNamespaces",
        admin_pb2.ListNamespacesRequest(), token_metadata(secured.tokens["root"]),
    )  # fmt: skip
    by_name = {one.name: one for one in listed.namespaces}
    own = call(
        admin_pb2_grpc.AdminServiceStub, secured.grpc, "ListNamespaces",
        admin_pb2.ListNamespacesRequest(), token_metadata(secured.tokens["bob"]),
    )  # fmt: skip
    assert [one.name for one in own.namespaces] == ["bob/llama"]
    # By its number, which anybody can guess.
    foreign = by_name["ann/llama"]
    keys = common_pb2.KeyBatch(
        namespace_id=foreign.namespace_id, generation=foreign.generation, digests=os.urandom(16)
    )
    session_id = os.urandom(16)
    hello = pb.HelloRequest(
        session_id=session_id,
        credentials=common_pb2.Credentials(token=secured.tokens["bob"].encode()),
    )
    requests = [
        (pb.MASTER_METHOD_EXISTS, pb.ExistsRequest(keys=keys)),
        (pb.MASTER_METHOD_ACQUIRE, pb.AcquireRequest(keys=keys)),
        (pb.MASTER_METHOD_PUT_START, pb.PutStartRequest(keys=keys, sizes=b"\1" + bytes(7))),
        (pb.MASTER_METHOD_REMOVE, pb.RemoveRequest(keys=keys)),
        (pb.MASTER_METHOD_PIN, pb.PinRequest(keys=keys)),
    ]
    for address in (secured.cluster.lane, f"unix://{secured.lane_socket}"):
        with LaneClient(address, hello.SerializeToString(), connections_max=1) as lane:
            for method, request in requests:
                with pytest.raises(PermissionDenied):
                    lane.call(method, request.SerializeToString(), 20.0)


def test_administration_needs_its_role(secured: Secured) -> None:
    admin = admin_pb2_grpc.AdminServiceStub
    for holder, method, request in (
        ("wide", "Rebalance", admin_pb2.RebalanceRequest()),
        ("wide", "ResetNamespace", admin_pb2.ResetNamespaceRequest(name="ann/llama")),
        ("ann", "SetNamespaceQuota", admin_pb2.SetNamespaceQuotaRequest(name="ann/llama")),
        ("ann", "GetMissRatioCurves", admin_pb2.GetMissRatioCurvesRequest()),
        ("ann", "EvictObjects", admin_pb2.EvictObjectsRequest(namespace="ann/llama")),
        ("wide", "SetConfig", admin_pb2.SetConfigRequest()),
        ("wide", "DebugDump", admin_pb2.DebugDumpRequest()),
        ("bob", "Explain", admin_pb2.ExplainRequest(namespace="ann/llama")),
        ("bob", "CreateNamespace", admin_pb2.CreateNamespaceRequest(name="ann/more")),
    ):
        with pytest.raises(PermissionDenied):
            call(admin, secured.grpc, method, request, token_metadata(secured.tokens[holder]))
    root = token_metadata(secured.tokens["root"])
    call(admin, secured.grpc, "Rebalance", admin_pb2.RebalanceRequest(), root)
    assert " holder=root token=" in secured.cluster.master.log_text()  # the audit log


def test_explain_names_no_namespace_of_others(secured: Secured) -> None:
    key = f"a key of ann {os.urandom(4).hex()}"
    with secured.client("ann", "ann/llama") as ann, secured.client("bob", "bob/llama"):
        assert ann.put(key, b"x").stored
        for holder, named in (("bob", []), ("root", ["ann/llama"])):
            found = call(
                admin_pb2_grpc.AdminServiceStub, secured.grpc, "Explain",
                admin_pb2.ExplainRequest(namespace="bob/llama", key=key.encode()),
                token_metadata(secured.tokens[holder]),
            )  # fmt: skip
            assert list(found.found_in) == named


def test_a_dump_has_what_the_daemons_say(secured: Secured, tmp_path: Path) -> None:
    dump = tmp_path / "dump.tar.gz"
    environment = secured.cluster.environment | {"CENOTE_CLIENT_TOKEN": secured.tokens["root"]}
    ended = run_cenote("debug", "dump", str(dump), "--json", environment=environment)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["errors"] == []


def everywhere(secured: Secured) -> bytes:
    """EXTENT rows of the whole segment, in pieces, as somebody would guess them."""
    pieces = [(1, 0, offset, 4096) for offset in range(0, 16 << 20, 4096)]
    return np.array(pieces, EXTENT).tobytes()


@pytest.mark.parametrize("where", ["data", "data_socket"])
def test_guessed_addresses_read_nothing(secured: Secured, where: str) -> None:
    session_id, ticket = secured.ticket("bob")
    rows = everywhere(secured)
    with DataSocket(getattr(secured, where)) as raw:
        raw.hello(session_id, ticket)
        statuses, payload = raw.ask(wire.OP_READ, len(rows) // 24, rows)
        assert SECRET[:33] not in payload
        assert statuses.count(PermissionDenied.code) > len(statuses) * 0.99
        for at in range(0, 4):  # one by one
            one = np.array([(1, 0, at * 64, 64)], EXTENT).tobytes()
            statuses, payload = raw.ask(wire.OP_READ, 1, one)
            assert (statuses, payload) == ([PermissionDenied.code], b"") or b"ann" not in payload
    # Not in a vacuum: who may, does.
    session_id, ticket = secured.ticket("wide")
    with DataSocket(getattr(secured, where)) as raw:
        raw.hello(session_id, ticket)
        assert SECRET[:33] in raw.ask(wire.OP_READ, len(rows) // 24, rows)[1]


def test_memory_and_slots_are_not_for_one_tenant(secured: Secured) -> None:
    session_id, ticket = secured.ticket("ann")
    with DataSocket(secured.data_socket) as raw, pytest.raises(PermissionDenied):
        raw.hello(session_id, ticket, want_descriptors=True)
    for op in (wire.OP_SLOTS, wire.OP_RDMA):
        with DataSocket(secured.data) as raw:
            raw.hello(session_id, ticket)
            with pytest.raises(PermissionDenied):
                raw.ask(op, 1, bytes(24))


def put_started(secured: Secured, holder: str, namespace: str) -> tuple[bytes, bytes, Any, int]:
    """(session id, ticket, answer to a PutStart of one object of 4 KiB, the namespace's id)."""
    session_id, ticket = secured.ticket(holder)
    hello = pb.HelloRequest(
        session_id=session_id,
        credentials=common_pb2.Credentials(token=secured.tokens[holder].encode()),
    )
    with LaneClient(secured.cluster.lane, hello.SerializeToString(), connections_max=1) as lane:
        opening = pb.OpenNamespaceRequest(name=namespace)
        body = lane.call(pb.MASTER_METHOD_OPEN_NAMESPACE, opening.SerializeToString(), 20.0)
        opened = pb.OpenNamespaceResponse.FromString(body)
        keys = common_pb2.KeyBatch(
            namespace_id=opened.namespace_id,
            generation=opened.generation,
            digests=os.urandom(16),
        )
        start = pb.PutStartRequest(keys=keys, sizes=(4096).to_bytes(8, "little"))
        body = lane.call(pb.MASTER_METHOD_PUT_START, start.SerializeToString(), 20.0)
        return session_id, ticket, pb.PutStartResponse.FromString(body), opened.namespace_id


def shown(started: Any, namespace_id: int, proofs: bytes | None = None) -> bytes:
    """The body of a GRANT request."""
    proofs = started.grant_signatures if proofs is None else proofs
    packed: bytes = proofs + started.extents
    return wire.GRANT_PREFIX.pack(namespace_id, len(proofs)) + packed


@pytest.mark.parametrize("where", ["data", "data_socket"])
def test_grants(secured: Secured, where: str) -> None:
    address = getattr(secured, where)
    session_id, ticket, started, namespace_id = put_started(secured, "ann", "ann/llama")
    write = started.extents + b"p" * 4096
    settings = {"epoch": started.epoch, "grant_id": started.grant_id}
    with DataSocket(address) as raw:
        raw.hello(session_id, ticket)
        # Not shown; forged; then shown; then by another number.
        assert raw.ask(wire.OP_WRITE, 1, write, **settings)[0] == [PermissionDenied.code]
        raw_proofs = started.grant_signatures[:4] + bytes(16)
        with pytest.raises(PermissionDenied, match="forged"):
            raw.ask(wire.OP_GRANT, 1, shown(started, namespace_id, raw_proofs), **settings)
    with DataSocket(address) as raw:
        raw.hello(session_id, ticket)
        assert raw.ask(wire.OP_GRANT, 1, shown(started, namespace_id), **settings)[0] == [0]
        assert raw.ask(wire.OP_WRITE, 1, write, **settings)[0] == [0]
        other = settings | {"grant_id": started.grant_id + 1}
        assert raw.ask(wire.OP_WRITE, 1, write, **other)[0] == [PermissionDenied.code]
        beside = np.frombuffer(started.extents, EXTENT).copy()
        beside["offset"] += 4096
        wrong = beside.tobytes() + b"p" * 4096
        assert raw.ask(wire.OP_WRITE, 1, wrong, **settings)[0] == [PermissionDenied.code]
    # Another session, another tenant, another namespace: it is not theirs.
    for holder, space in (("ann", namespace_id), ("bob", namespace_id), ("bob", namespace_id + 1)):
        other_id, other_ticket = secured.ticket(holder)
        with DataSocket(address) as raw:
            raw.hello(other_id, other_ticket)
            with pytest.raises(PermissionDenied):
                raw.ask(wire.OP_GRANT, 1, shown(started, space), **settings)
    # What is seen of a write before it is sealed: its own namespace's.
    bob_id, bob_ticket = secured.ticket("bob")
    with DataSocket(address) as raw:
        raw.hello(bob_id, bob_ticket)
        assert raw.ask(wire.OP_READ, 1, started.extents) == ([PermissionDenied.code], b"")


def test_tickets_are_signed(secured: Secured) -> None:
    session_id, ticket = secured.ticket("bob")
    opened = store_pb2.AccessTicket.FromString(ticket[:-32])
    assert opened.holder == "bob"
    opened.namespaces[:] = ["*"]
    opened.may_map = True
    widened = opened.SerializeToString() + ticket[-32:]
    other_id, other_ticket = secured.ticket("ann")
    for shown_id, forged in (
        (session_id, widened),
        (session_id, ticket[:-1] + bytes([ticket[-1] ^ 1])),
        (session_id, other_ticket),  # another session's
        (other_id, ticket),
        (session_id, ticket[:-32]),
    ):
        for address in (secured.data, secured.data_socket):
            with DataSocket(address) as raw, pytest.raises(Unauthenticated):
                raw.hello(shown_id, forged)


def test_a_ticket_ends_with_its_key(secured: Secured) -> None:
    session_id, ticket = secured.ticket("ann")

    def is_refused() -> bool:
        with DataSocket(secured.data) as raw:
            try:
                raw.hello(session_id, ticket)
            except Unavailable:  # its key is not known any more
                return True
        return False

    with secured.client("ann", "ann/llama") as ann:
        wait_until(is_refused, 60.0, what="the key to be replaced twice")
        ann.put("after the rotation", b"still here")
        assert ann.get("after the rotation") == b"still here"
        for channel in list(ann._session.channels.values()):  # so that it connects anew
            ann._session.drop_channel(channel.node_id, channel)
        assert ann.get("secret") == SECRET


def test_a_revoked_token_ends_its_sessions(secured: Secured) -> None:
    secured.tokens.add("carl", Role.WRITE, ["carl/*"])
    with secured.client("carl", "carl/llama") as carl:
        carl.put("key", b"value")
        session_id = carl._session.identity.session_id
        ticket = carl._session.identity.access.ticket
        with DataSocket(secured.data) as raw:
            raw.hello(session_id, ticket)
            secured.tokens.revoke("carl")

            def is_refused() -> bool:
                try:
                    carl.put(os.urandom(8), b"value")
                except Unauthenticated:
                    return True
                except CenoteError:
                    return False
                return False

            wait_until(is_refused, 30.0, what="the master to end the session")

            def is_cut() -> bool:
                with DataSocket(secured.data) as again:
                    try:
                        again.hello(session_id, ticket)
                    except (GrantRevoked, Unavailable):
                        return True
                return False

            wait_until(is_cut, 30.0, what="the daemon to cut the session off")
            with pytest.raises((CenoteError, ConnectionError)):
                raw.ask(wire.OP_READ, 1, np.array([(1, 0, 0, 64)], EXTENT).tobytes())
    found = try_ports(secured, secured.tokens["carl"], b"")
    assert all(isinstance(error, Unauthenticated) for error in found.values())


def test_an_expired_token(secured: Secured) -> None:
    token = secured.tokens.add("dora", Role.WRITE, ["dora/*"], ttl_s=0.001)
    with pytest.raises(Unauthenticated):
        secured.cluster.client(token=token)


def test_a_daemon_without_a_token_does_not_attach(secured: Secured, tmp_path: Path) -> None:
    from cluster import run_module

    for flags in ((), ("--token-file", str(tmp_path / "bob.token"))):
        (tmp_path / "bob.token").write_text(secured.tokens["bob"])
        done = run_module(
            "cenote.store", "--master", secured.cluster.lane, "--name", "stranger",
            "--dram", "16MiB", "--dram-dir", str(tmp_path), "--socket-dir", str(tmp_path), *flags,
        )  # fmt: skip
        assert done.returncode != 0
        assert b"token" in done.stderr


def test_what_is_sealed_survives_a_restart_as_whose_it_is(secured: Secured) -> None:
    store = secured.cluster.stores[0]
    store.restart()
    with secured.client("ann", "ann/llama") as ann:
        assert ann.get("secret", deadline_s=20.0) == SECRET
    test_guessed_addresses_read_nothing(secured, "data")
