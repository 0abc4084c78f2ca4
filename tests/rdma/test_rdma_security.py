"""Tokens over RDMA: remote keys and queue pairs are for sessions that may have all of the memory,
and for nobody else; they end with the session. Real devices, real daemons.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cenote.api.errors import CenoteError, PermissionDenied, Unauthenticated, Unavailable
from cenote.client import Client
from cenote.security.tokens import Role
from cenote.transport import wire
from cenote.transport.nics.advertised import decode_ports
from cenote.v1 import common_pb2, store_pb2
from cluster import Cluster
from rdma.links import kernel_resources
from rdma_daemon import rdma_nics
from security_kit import DataSocket, Tokens, hello_over_grpc
from waiting import wait_until

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(1800)]

MIB = 1 << 20
SLOW_S = 300.0
"""The machine is emulated; see test_paths_rdma."""
CALL_S = 60.0


class Secured(NamedTuple):
    cluster: Cluster
    tokens: Tokens

    def client(self, holder: str, namespace: str, *transports: str, **options: Any) -> Client:
        return self.cluster.client(
            token=self.tokens[holder],
            namespace=namespace,
            transports=transports,
            deadline_s=CALL_S,
            **options,
        )

    def socket(self) -> DataSocket:
        return DataSocket(str(self.cluster.stores[0].ready["data"]).removeprefix("tcp://"))

    def ticket(self, holder: str) -> tuple[bytes, bytes]:
        """(session id, its ticket)."""
        session_id = os.urandom(16)
        token = self.tokens[holder]
        return session_id, hello_over_grpc(self.cluster.grpc, token, session_id).ticket

    def refusals(self, reason: str) -> float:
        """That the store daemon has counted."""
        url = str(self.cluster.stores[0].ready["metrics"])
        with urllib.request.urlopen(url, timeout=CALL_S) as reply:
            lines = reply.read().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith("cenote_store_refusals_total{") and f'reason="{reason}"' in line
        )

    def working_pairs(self) -> int:
        """Queue pairs of others than this process that can still take something: the daemon's."""
        own = os.listdir("/proc/self/task")
        rows = [row for row in kernel_resources("qp") if str(row.get("pid")) not in own]
        return sum(row.get("state") not in ("ERR", "RESET") for row in rows)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    rdma_nics("auto").close()
    tokens = Tokens(tmp_path_factory.mktemp("security"))
    tokens.add("all-reader", Role.READ, ["*"])
    with Cluster(
        stores=1,
        dram_bytes=48 * MIB,
        ready_timeout_s=SLOW_S,
        master_flags={"tokens": tokens.path, "node-dead-s": 60},
        store_flags={
            "token-file": tokens.node_file,
            "rdma": "on",
            "metrics-listen": "127.0.0.1:0",
        },
    ) as cluster:
        yield Secured(cluster, tokens)


def ask_for_keys(raw: DataSocket, wanted: store_pb2.RdmaRequest | None = None) -> Any:
    body = wire.encode_rdma_request(wanted or store_pb2.RdmaRequest())
    _, payload = raw.ask(wire.OP_RDMA, 1, body)
    return wire.decode_rdma_reply(bytearray(payload))


def put_once_it_can(client: Client, key: str, data: bytes) -> None:
    def put() -> bool:
        try:
            client.put(key, data)
        except Unavailable:  # of a daemon that has just begun, or is slow for somebody
            return False
        return True

    wait_until(put, SLOW_S, what=f"{key} to be put")


def is_read(client: Client, key: str, data: bytes) -> bool:
    """Also where a slow daemon is a miss for a moment; other bytes it never is."""
    found = client.get(key)
    assert found in (None, data)
    return found == data


@pytest.mark.parametrize("library", ["ibverbs", "pyverbs"])
def test_who_has_all_namespaces_goes_over_rdma(secured: Secured, library: str) -> None:
    """And who has not goes over TCP, is told why, and sees the same bytes."""
    data = {name: os.urandom(MIB) for name in ("wide", "ann")}
    keys = {name: f"{library} {name}" for name in data}
    with (
        secured.client("wide", "ann/llama", "rdma", verbs=library) as wide,
        secured.client("ann", "ann/llama", "rdma", "tcp", verbs=library) as ann,
    ):
        put_once_it_can(wide, keys["wide"], data["wide"])
        put_once_it_can(ann, keys["ann"], data["ann"])
        for client in (wide, ann):
            for name, key in keys.items():
                wait_until(
                    lambda at=(client, key, name): is_read(at[0], at[1], data[at[2]]),  # type: ignore[misc]
                    SLOW_S,
                    what=f"{key} to be read",
                )
        stats = wide.stats()
        assert stats.rdma_written_bytes >= MIB
        assert stats.rdma_read_bytes >= 2 * MIB
        assert stats.rdma_calls_over_tcp == 0
        [path] = wide.paths(deadline_s=CALL_S)
        assert path.path == "rdma"
        stats = ann.stats()
        assert stats.rdma_read_bytes == stats.rdma_written_bytes == 0
        [path] = ann.paths(deadline_s=CALL_S)
        assert path.path == "tcp"
        [reason] = [found.reason for found in path.obstacles if found.path == "rdma"]
        assert "token" in reason, reason


def test_keys_are_told_to_nobody_else(secured: Secured) -> None:
    """No ticket, a forged one, another session's, one tenant's: no key, no queue pair; noted."""
    session_id, ticket = secured.ticket("wide")
    with secured.socket() as raw:
        raw.hello(session_id, ticket)
        registered = ask_for_keys(raw).registrations
    assert sum(found.length for found in registered) > 40 * MIB
    assert all(key for found in registered for key in found.remote_keys)

    wait_until(lambda: not secured.working_pairs(), SLOW_S, what="earlier clients to be gone")
    before = secured.refusals("Unauthenticated")
    other_id, other_ticket = secured.ticket("wide")
    for wrong in (b"", b"x" * len(ticket), ticket[:-1] + bytes([ticket[-1] ^ 1]), other_ticket):
        with secured.socket() as raw, pytest.raises(Unauthenticated):
            raw.hello(session_id, wrong)
    assert other_id != session_id
    assert secured.refusals("Unauthenticated") >= before + 4

    before = secured.refusals("PermissionDenied")
    for holder in ("ann", "ann-reader"):
        with secured.socket() as raw:
            raw.hello(*secured.ticket(holder))
            with pytest.raises(PermissionDenied, match="RDMA"):
                ask_for_keys(raw)
    assert secured.refusals("PermissionDenied") >= before + 2
    assert secured.working_pairs() == 0


def test_who_only_reads_gets_no_pair_that_writes(secured: Secured) -> None:
    [node] = nodes_of(secured)
    [endpoint] = [e for e in node.endpoints if e.kind == common_pb2.TRANSPORT_KIND_RDMA]
    port = decode_ports(endpoint.device_info)[0]
    wait_until(lambda: not secured.working_pairs(), SLOW_S, what="earlier clients to be gone")
    with secured.socket() as raw:
        raw.hello(*secured.ticket("all-reader"))
        assert ask_for_keys(raw).registrations
        wanted = store_pb2.RdmaRequest(lane_id=77)
        wanted.queue_pairs.add(device=port.device, port=port.port, writes=True)
        with pytest.raises(PermissionDenied):
            ask_for_keys(raw, wanted)
    assert secured.working_pairs() == 0


def nodes_of(secured: Secured) -> list[common_pb2.NodeView]:
    with secured.client("wide", "default", "tcp") as client:
        client.paths(deadline_s=CALL_S)
        return list(client.session.state.peers.nodes.values())


def test_a_revoked_token_loses_its_queue_pairs(secured: Secured) -> None:
    """In the middle of writing and reading: the daemon ends them, whatever the client does."""
    secured.tokens.add("carl", Role.WRITE, ["*"])
    data = os.urandom(MIB)
    wait_until(lambda: not secured.working_pairs(), SLOW_S, what="earlier clients to be gone")
    with secured.client("carl", "carl/llama", "rdma") as carl:
        put_once_it_can(carl, "key", data)
        wait_until(lambda: is_read(carl, "key", data), SLOW_S, what="a read")
        assert carl.stats().rdma_read_bytes >= MIB
        assert secured.working_pairs() > 0
        turns = 0

        def is_refused() -> bool:
            """Once more, over RDMA where it still may."""
            nonlocal turns
            turns += 1
            if turns == 5:
                secured.tokens.revoke("carl")
            try:
                assert carl.get("key") in (None, data)
                carl.put(f"more {turns % 8}", data)
                carl.remove(f"more {turns % 8}")
            except Unauthenticated:
                return True
            except CenoteError:  # cut off in the middle of something; or too slow a machine
                return False
            return False

        wait_until(is_refused, SLOW_S, what="the client to be refused")
        wait_until(lambda: not secured.working_pairs(), SLOW_S, what="the pairs to end")
        with pytest.raises(Unauthenticated):
            carl.put("late", data)


def test_a_pool_that_trusts_its_tenants(tmp_path: Path) -> None:
    """With `--isolation pool` all who have a token get RDMA, and no other namespace's keys."""
    rdma_nics("auto").close()
    tokens = Tokens(tmp_path)
    with Cluster(
        stores=1,
        dram_bytes=48 * MIB,
        ready_timeout_s=SLOW_S,
        master_flags={"tokens": tokens.path, "isolation": "pool", "node-dead-s": 60},
        store_flags={"token-file": tokens.node_file, "rdma": "on"},
    ) as cluster:
        secured = Secured(cluster, tokens)
        data = os.urandom(MIB)
        with secured.client("ann", "ann/llama", "rdma") as ann:
            put_once_it_can(ann, "key", data)
            wait_until(lambda: is_read(ann, "key", data), SLOW_S, what="a read")
            assert ann.stats().rdma_read_bytes >= MIB
        with pytest.raises(PermissionDenied):
            secured.client("bob", "ann/llama", "rdma")
