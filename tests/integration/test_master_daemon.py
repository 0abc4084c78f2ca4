"""The master as a process: what it promises when it is stopped, killed, misused."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cenote.api.errors import CenoteError, NamespaceNotFound
from cenote.master.effects import SegmentGone
from cenote.master.file_backend import FileBackend
from cenote.master.journal import RecordWriter
from cenote.master.metadata import begin
from cenote.rpc.grpc_util import typed_error
from cenote.rpc.lane_client import LaneClient
from cenote.transport import wire
from cenote.v1 import admin_pb2, admin_pb2_grpc, common_pb2, master_pb2_grpc, store_pb2
from cenote.v1 import master_pb2 as pb
from cluster import Cluster
from master_pool import MIB, attach_request
from promptness import ends_within, wait_ended
from waiting import wait_until

pytestmark = pytest.mark.integration

M = TypeVar("M", bound=Message)
END_S = 2.0
"""Within which a master has to end."""


class LaneSession:
    """A client on the lane; the namespace "models" is open and a node is attached."""

    def __init__(self, address: str, session_id: bytes | None = None) -> None:
        self.session_id = session_id or os.urandom(16)
        hello = pb.HelloRequest(session_id=self.session_id, boot_id="here").SerializeToString()
        self.hello = pb.HelloResponse()
        self.lane = LaneClient(address, hello, on_hello=self._on_hello)
        self.namespace = self.call(
            pb.MASTER_METHOD_OPEN_NAMESPACE,
            pb.OpenNamespaceRequest(name="models", create=True),
            pb.OpenNamespaceResponse,
        )

    def _on_hello(self, payload: bytes) -> None:
        self.hello.ParseFromString(payload)

    def call(self, method: int, request: Message, reply: type[M], deadline_s: float = 5.0) -> M:
        return reply.FromString(self.lane.call(method, request.SerializeToString(), deadline_s))

    def attach(self, address: str = "127.0.0.1:1", **fields: object) -> pb.AttachResponse:
        request = attach_request(1, 64 * MIB, **fields)
        request.endpoints[0].address = address
        return self.call(pb.MASTER_METHOD_ATTACH, request, pb.AttachResponse)

    def batch(self, *keys: bytes) -> common_pb2.KeyBatch:
        return common_pb2.KeyBatch(
            namespace_id=self.namespace.namespace_id,
            generation=self.namespace.generation,
            keys=b"".join(keys),
            key_lengths=struct.pack(f"<{len(keys)}H", *map(len, keys)),
        )

    def put(self, *keys: bytes, durability: common_pb2.Durability | None = None) -> bytes:
        start = pb.PutStartRequest(
            keys=self.batch(*keys),
            sizes=struct.pack("<Q", 64),
            options=pb.PutOptions(durability=durability),
        )
        started = self.call(pb.MASTER_METHOD_PUT_START, start, pb.PutStartResponse)
        commit = pb.PutCommitRequest(grant_id=started.grant_id, checksums=bytes(8 * len(keys)))
        return self.call(pb.MASTER_METHOD_PUT_COMMIT, commit, pb.PutCommitResponse).statuses

    def exists(self, *keys: bytes) -> list[int]:
        request = pb.ExistsRequest(keys=self.batch(*keys))
        return list(self.call(pb.MASTER_METHOD_EXISTS, request, pb.ExistsResponse).present)

    def remove(self, *keys: bytes) -> bytes:
        request = pb.RemoveRequest(keys=self.batch(*keys))
        return self.call(pb.MASTER_METHOD_REMOVE, request, pb.RemoveResponse).removed

    def close(self) -> None:
        self.lane.close()

    def __enter__(self) -> LaneSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(stores=0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lasting() -> Iterator[Cluster]:
    """For tests that leave it as it was."""
    with Cluster(stores=0) as cluster:
        yield cluster


# ---- restarts -------------------------------------------------------------------------------


@pytest.fixture
def patient() -> Iterator[Cluster]:
    """Its master does not miss the heartbeats that nodes of this test don't send."""
    with Cluster(stores=0, master_flags={"node-dead-s": 100}) as cluster:
        yield cluster


def test_everything_acknowledged_survives_kill(patient: Cluster) -> None:
    cluster = patient
    acknowledged: list[bytes] = []
    killed = threading.Event()

    def put_until_it_dies(number: int) -> None:
        with LaneSession(cluster.lane) as client:
            for i in range(100_000):
                keys = [b"%d-%d-%d" % (number, i, n) for n in range(1 + i % 3)]
                try:
                    if client.put(*keys) == b"\1" * len(keys):
                        acknowledged.extend(keys)
                except CenoteError:
                    if killed.is_set():
                        return

    with LaneSession(cluster.lane) as client:
        first_epoch = client.hello.epoch
        client.attach()
        client.put(b"kept", b"removed")
        client.remove(b"removed")
    threads = [threading.Thread(target=put_until_it_dies, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(acknowledged) > 300, what="some puts")
    killed.set()
    cluster.master.restart(signal.SIGKILL)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    with LaneSession(cluster.lane) as client:
        assert client.hello.epoch == first_epoch + 1
        assert client.exists(b"kept", b"removed") == [1, 0]
        for a in range(0, len(acknowledged), 1000):
            keys = acknowledged[a : a + 1000]
            assert client.exists(*keys) == [1] * len(keys)


def test_a_stopped_master_ends_in_time_and_comes_back(cluster: Cluster) -> None:
    with LaneSession(cluster.lane) as client:
        client.attach()
        client.put(b"a", durability=common_pb2.DURABILITY_JOURNALED)
        for number in (signal.SIGTERM, signal.SIGINT):
            with ends_within(END_S):
                cluster.master.send_signal(number)
                assert cluster.master.wait_exit(END_S) == 0
            cluster.master.restart()
            with LaneSession(cluster.lane) as again:
                assert again.exists(b"a", b"b") == [1, 0]


def test_a_signal_while_the_journal_is_replayed_ends_it_in_time(tmp_path: Path) -> None:
    directory = tmp_path / "metadata"
    backend = FileBackend(directory)
    list(begin(backend).records)
    writer = RecordWriter(1, 1)
    for _ in range(100):
        records = []
        for number in range(1000):  # one record each: as slow to replay as it can be
            writer.add(SegmentGone(number))
            records += writer.take()
        backend.append(records)
    backend.close()
    epoch = directory / "epoch"
    first = int(epoch.read_bytes())
    flags = ["--metadata", f"file:{directory}", "--listen", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    with subprocess.Popen(
        [sys.executable, "-m", "cenote.master", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as master:
        try:
            wait_until(lambda: int(epoch.read_bytes()) == first + 1, what="the epoch to begin")
            with ends_within(END_S):
                master.send_signal(signal.SIGINT)
                assert wait_ended(master.pid, master.poll) == 0
        finally:
            master.kill()


def test_a_session_outlives_its_connection(lasting: Cluster) -> None:
    with LaneSession(lasting.lane) as first:
        first.attach()
        first.put(b"a")
        acquire = pb.AcquireRequest(keys=first.batch(b"a"), lease=True, ttl_ms=9000)
        lease = first.call(pb.MASTER_METHOD_ACQUIRE, acquire, pb.AcquireResponse).lease
    assert lease.lease_id
    renew = pb.RenewSessionRequest(lease_ids=struct.pack("<Q", lease.lease_id))
    with LaneSession(lasting.lane, first.session_id) as second:
        renewed = second.call(pb.MASTER_METHOD_RENEW_SESSION, renew, pb.RenewSessionResponse)
    assert renewed.lost_lease_ids == b""


# ---- nodes that do not answer ---------------------------------------------------------------


def test_a_reported_node_is_probed(lasting: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, LaneSession(lasting.lane) as client:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        node_id = client.attach(address).node_id
        client.put(b"a")
        report = pb.ReportFailureRequest(node_id=node_id, what="timeout")
        client.call(pb.MASTER_METHOD_REPORT_FAILURE, report, pb.ReportFailureResponse)
        listener.settimeout(5)
        with listener.accept()[0] as probe:
            probe.sendall(wire.encode_hello_reply(store_pb2.DataHelloResponse()))
        assert client.exists(b"a") == [1]
        listener.close()
        client.call(pb.MASTER_METHOD_REPORT_FAILURE, report, pb.ReportFailureResponse)
        wait_until(lambda: client.exists(b"a") == [0], 5, what="the node to be hidden")


# ---- gRPC -----------------------------------------------------------------------------------


def test_grpc_serves_all_of_it(cluster: Cluster) -> None:
    with LaneSession(cluster.lane) as client, grpc.insecure_channel(cluster.grpc) as channel:
        client.attach()
        client.put(b"a")
        master = master_pb2_grpc.MasterServiceStub(channel)  # type: ignore[no-untyped-call]
        found = master.Exists(pb.ExistsRequest(keys=client.batch(b"a", b"b")), timeout=5)
        assert list(found.present) == [1, 0]
        removed = master.Remove(pb.RemoveRequest(keys=client.batch(b"a")), timeout=5)
        assert removed.removed == b"\1"
        client.put(b"a")
        admin = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        status = admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=5)
        told = (status.objects, status.nodes_alive, status.epoch, status.role)
        assert told == (1, 1, client.hello.epoch, "leader")
        assert status.journal_bytes > 0
        assert status.metadata_backend.startswith("file:")
        (node,) = admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=5).nodes
        (segment,) = admin.ListSegments(admin_pb2.ListSegmentsRequest(), timeout=5).segments
        assert (node.view.name, segment.objects, segment.slots_used) == ("node-1", 1, 1)
        stat = admin.StatObject(
            admin_pb2.StatObjectRequest(keys=client.batch(b"a", b"b")), timeout=5
        )
        assert (len(stat.objects), len(stat.extents), len(stat.idle_s)) == (64, 24, 16)
        created = admin.CreateNamespace(
            admin_pb2.CreateNamespaceRequest(name="other", fingerprint=b"x"), timeout=5
        )
        assert created.namespace.name == "other"
        names = admin.ListNamespaces(admin_pb2.ListNamespacesRequest(), timeout=5).namespaces
        assert [(n.name, n.objects) for n in names] == [("models", 1), ("other", 0)]
        reset = admin.ResetNamespace(admin_pb2.ResetNamespaceRequest(name="models"), timeout=5)
        assert reset.generation == 2
        with pytest.raises(grpc.RpcError) as caught:
            admin.ResetNamespace(admin_pb2.ResetNamespaceRequest(name="none"), timeout=5)
        assert isinstance(typed_error(caught.value), NamespaceNotFound)
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(service="cenote.v1.MasterService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        services = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5
        )
        listed = {s.name for s in next(services).list_services_response.service}
        assert {"cenote.v1.MasterService", "cenote.v1.AdminService"} <= listed


# ---- misuse ---------------------------------------------------------------------------------


def test_garbage_on_every_port_harms_nobody(lasting: Cluster) -> None:
    with LaneSession(lasting.lane) as client:
        client.attach()
        for address in (lasting.lane, lasting.grpc):
            host, port = address.rsplit(":", 1)
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"cenote\0\1" + bytes(64)):
                with socket.create_connection((host, int(port)), timeout=5) as sock:
                    sock.sendall(garbage)
                    sock.shutdown(socket.SHUT_WR)
                    with contextlib.suppress(ConnectionError):
                        while sock.recv(65536):
                            pass
        assert client.put(b"a") == b"\1"
        assert client.exists(b"a") == [1]


def run_master(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cenote.master", *flags],
        capture_output=True,
        text=True,
        timeout=20,
        env=os.environ | environment,
    )


def test_a_second_master_on_the_same_directory_is_refused(lasting: Cluster) -> None:
    directory = lasting.master.flags["metadata"]
    free = ("--listen", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    ended = run_master("--metadata", str(directory), *free)
    assert ended.returncode == 3
    assert f"in use by the master with pid {lasting.master.pid}" in ended.stderr


def test_a_port_in_use_is_named(lasting: Cluster) -> None:
    ended = run_master("--metadata", "memory:", "--listen", lasting.lane)
    assert ended.returncode == 3
    assert f"can't listen on tcp://{lasting.lane}" in ended.stderr
    ended = run_master("--metadata", "memory:", "--listen", "127.0.0.1:0", "--grpc", lasting.grpc)
    assert ended.returncode == 3
    assert f"can't serve gRPC on {lasting.grpc}" in ended.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--metadata", "nfs:/etc"), "names no metadata backend"),
        (("--listen", "nowhere"), "--listen 'nowhere' is no address"),
        (("--lease-ttl", "soon"), "no duration"),
        (("--lease-ttl", "20s"), "above --lease-ttl-max-s"),
        (("--socket", "relative.sock"), "no absolute path"),
        (("--config", "/nonexistent.toml"), "can't read the configuration file"),
    ],
)
def test_wrong_flags_are_named(flags: tuple[str, str], says: str) -> None:
    ended = run_master(*flags)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_misspelt_variable_is_named() -> None:
    ended = run_master(CENOTE_MASTER_LEASE_TTL="5s")
    assert ended.returncode == 2
    assert "did you mean CENOTE_MASTER_LEASE_TTL_S?" in ended.stderr


def test_metrics_are_served_where_asked_for() -> None:
    flags = {"metrics-listen": "127.0.0.1:0"}
    with Cluster(stores=0, metadata="memory", master_flags=flags) as cluster:
        with LaneSession(cluster.lane) as client:
            client.exists(b"a")
        url = cluster.master.ready["metrics"]
        text = urllib.request.urlopen(url, timeout=5).read().decode()
        assert 'cenote_master_calls_total{method="exists"} 1.0' in text
        assert 'cenote_pool_exists_keys_total{result="absent"} 1.0' in text


def test_it_listens_on_loopback_only(lasting: Cluster) -> None:
    """By /proc: every listening TCP socket of the process is on 127.0.0.1."""
    listening = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            listening[fields[9]] = fields[1].split(":")[0]
    addresses = set()
    for fd in Path(f"/proc/{lasting.master.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(fd)
            if target.startswith("socket:["):
                addresses.add(listening.get(target[8:-1]))
    assert addresses - {None} == {"0100007F"}
