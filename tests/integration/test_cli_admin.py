"""Administration of a real pool: by the `cenote` command, and by any gRPC client."""

from __future__ import annotations

import json
import os
import random
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cenote.cli.main import main
from cenote.client import Client
from cluster import Cluster, start_cenote
from waiting import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster(stores=2, dram_bytes=24 * MIB) as started:
        yield started


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """Whole, and with the settings that it began with, whatever the test before (which may be an
    earlier try of the same one) left behind."""
    shared.mend(2)
    changed = [
        v["name"] for v in json.loads(shared.cli("config", "get", "--json").stdout) if v["changed"]
    ]
    if changed:
        assert shared.cli("config", "unset", *changed, "--yes").returncode == 0
    return shared


class Cenote:
    """`cenote ARGUMENTS` in this process: (exit code, standard output, standard error)."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._capture.readouterr()
        code = main(arguments)
        out, err = self._capture.readouterr()
        return code, out, err

    def json(self, *arguments: str, code: int = 0) -> Any:
        found, out, err = self(*arguments, "--json")
        assert found == code, err
        return json.loads(out)


@pytest.fixture
def cenote(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Cenote:
    for name, value in cluster.environment.items():
        if name.startswith("CENOTE_"):
            monkeypatch.setenv(name, value)
    return Cenote(capsys)


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """One that no test had before, not even an earlier try of this one."""
    return f"{request.node.name}-{os.urandom(4).hex()}"


@pytest.fixture
def client(cluster: Cluster, namespace: str) -> Iterator[Client]:
    with cluster.client(namespace=namespace, fingerprint="f") as opened:
        yield opened


def test_a_missing_key_is_explained(cenote: Cenote, client: Client, namespace: str) -> None:
    data = random.Random(1).randbytes(MIB)
    client.put("first", data)
    found = cenote.json("explain", "-n", namespace, "first")
    assert (found["state"], found["size_bytes"]) == ("present", MIB)
    assert found["places"][0]["node"] in ("s0", "s1")
    for number in range(60):
        client.put(f"more/{number}", data)
    gone = cenote.json("explain", "-n", namespace, "first", code=3)
    assert gone["state"] == "absent"
    assert gone["decisions"][0]["fate"] == "evicted"
    assert gone["decisions"][0]["cause"] in ("on_demand", "ahead", "nearby")
    assert gone["decisions"][0]["idle_s"] is not None
    client.remove("more/59")
    code, out, _ = cenote("explain", "-n", namespace, "more/59")
    assert code == 3
    assert "somebody removed it" in out
    client.namespace(f"{namespace}-other").put("elsewhere", b"x")
    assert cenote.json("explain", "-n", namespace, "elsewhere", code=3)["found_in"] == [
        f"{namespace}-other"
    ]
    assert cenote.json("explain", "-n", namespace, "never", code=3)["decisions"] == []
    code, _, err = cenote("explain", "-n", "nosuch", "key")
    assert code == 3
    assert "cenote namespaces" in err


def test_who_holds_what_is_listed(cenote: Cenote, client: Client) -> None:
    client.put("k", b"v" * 4096)
    with client.view(["k"]):
        found = cenote.json("leases")["sessions"]
        assert [(s["leases"], s["views"], s["leased_objects"]) for s in found] == [(1, 1, 1)]
        assert found[0]["leased_bytes"] == 4096
        assert "leased" in cenote("leases")[1]
    wait_until(lambda: not cenote.json("leases")["sessions"], what="the view is let go")


def test_objects_are_evicted_on_request_but_for_what_is_pinned(
    cenote: Cenote, client: Client, namespace: str
) -> None:
    for key in ("a", "b", "c"):
        client.put(key, b"x" * 4096)
    client.pin(["b"])
    code, _, err = cenote("evict", "-n", namespace, "a", "b", "nosuch", "--yes")
    assert code == 0
    assert "evicted 1 object, 4 KiB; 1 pinned, 1 not there" in err
    assert client.exists_batch(["a", "b", "c"]).tolist() == [False, True, True]
    assert cenote.json("evict", "-n", namespace, "--all", "--yes")["objects"] == 1
    assert client.exists_batch(["b", "c"]).tolist() == [True, False]
    assert cenote("evict", "-n", namespace, "gone", "--yes")[0] == 3
    for wrong in (("evict",), ("evict", "k", "--all"), ("evict", "--size", "nonsense", "-y")):
        assert cenote(*wrong)[0] == 2


def test_a_namespace_is_deleted(
    cenote: Cenote, client: Client, namespace: str, cluster: Cluster
) -> None:
    client.put("k", b"v")
    assert cenote.json("namespaces", "delete", namespace, "--yes") == {
        "name": namespace,
        "objects": 1,
    }
    assert namespace not in {n["name"] for n in cenote.json("namespaces")}
    audited = [line for line in cluster.master.log_text().splitlines() if "audit" in line]
    assert any("namespace deleted" in line and namespace in line for line in audited)
    code, _, err = cenote("namespaces", "delete", namespace, "--yes")
    assert code == 3
    assert "cenote namespaces" in err


def test_limits_change_while_the_master_runs_and_outlive_it(
    cenote: Cenote, cluster: Cluster
) -> None:
    before = cenote("config", "get", "pinned_share_max")[1].strip()
    assert cenote("config", "set", "pinned-share-max=0.05", "repair_after_s=45s", "--yes")[0] == 0
    assert cenote("config", "get", "pinned_share_max")[1].strip() == "0.05"
    cluster.master.stop()
    cluster.master.start()
    cluster.master.wait_ready()
    cluster.wait_alive(2)
    found = {v["name"]: v for v in cenote.json("config", "get", "--dynamic")}
    assert found["repair_after_s"]["value"] == "45s"
    assert found["pinned_share_max"]["started_with"] == before
    assert cenote("config", "unset", "pinned_share_max", "repair_after_s", "--yes")[0] == 0
    assert not any(v["changed"] for v in cenote.json("config", "get"))
    for unknown in (("get", "polici"), ("set", "polici=arc", "--yes"), ("unset", "x", "--yes")):
        code, _, err = cenote("config", *unknown)
        assert code == 3
        assert "there is no setting" in err
    code, _, err = cenote("config", "set", "policy=arc", "--yes")
    assert code == 2
    assert "cenote-master" in err
    assert cenote("config", "set", "pinned_share_max=2", "--yes")[0] == 2
    assert cenote("config", "set", "pinned_share_max", "--yes")[0] == 2


def test_a_snapshot_is_made_on_request(cenote: Cenote, client: Client) -> None:
    client.put("k", b"v")
    found = cenote.json("snapshot", "--wait")
    assert found["covered_entry"] >= found["wanted_entry"] > 0


def test_a_dump_holds_what_every_process_says_of_itself(cenote: Cenote, tmp_path: Path) -> None:
    target = tmp_path / "dump.tar.gz"
    found = cenote.json("debug", "dump", str(target))
    assert found["errors"] == []
    with tarfile.open(target) as archive:
        names = {name.removeprefix("cenote-debug/") for name in archive.getnames()}
        master = next(name for name in names if name.startswith("masters/"))
        opened = archive.extractfile(f"cenote-debug/{master}")
        assert opened is not None
        facts = json.load(opened)
    assert {"status.json", "sessions.json", "nodes/s0.json", "nodes/s1.json"} <= names
    assert facts["role"] == "leader"
    assert facts["threads"]
    assert "etcd_password" not in facts["config"]


def test_listings_are_watched_until_ctrl_c(cluster: Cluster) -> None:
    for command in (("top", "-i", "0.2"), ("nodes", "--watch", "0.2"), ("tasks", "--watch", "0.2")):
        process = start_cenote(*command, "--json", environment=cluster.environment)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert process.returncode == 0, err
        assert all(json.loads(line) is not None for line in lines)


# ---- the service by itself -------------------------------------------------------------------


def test_any_grpc_client_finds_its_way_by_reflection(cluster: Cluster) -> None:
    """What grpcurl does: ask which services there are, fetch their schema, call a method."""
    import grpc
    from google.protobuf import descriptor_pool, message_factory
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    service = "cenote.v1.AdminService"
    with grpc.insecure_channel(cluster.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=5
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest
        replies = list(
            stub.ServerReflectionInfo(
                iter([ask(list_services=""), ask(file_containing_symbol=service)]), timeout=5
            )
        )
        assert service in {s.name for s in replies[0].list_services_response.service}
        pool = descriptor_pool.DescriptorPool()
        files = {}
        for data in replies[1].file_descriptor_response.file_descriptor_proto:
            file = FileDescriptorProto.FromString(data)
            files[file.name] = file
        added: set[str] = set()
        while len(added) < len(files):  # a file after those that it imports
            for name in [n for n in files if n not in added]:
                absent = [d for d in files[name].dependency if d not in files]
                for reply in stub.ServerReflectionInfo(
                    iter([ask(file_by_filename=one) for one in absent]), timeout=5
                ):
                    for data in reply.file_descriptor_response.file_descriptor_proto:
                        file = FileDescriptorProto.FromString(data)
                        files[file.name] = file
                if added.issuperset(files[name].dependency):
                    pool.Add(files[name])
                    added.add(name)
        methods = {m.name: m for m in pool.FindServiceByName(service).methods}
        assert {"GetStatus", "Explain", "EvictObjects", "SetConfig", "DebugDump"} <= set(methods)
        method = methods["ListNodes"]
        make = message_factory.GetMessageClass
        call = channel.unary_unary(
            f"/{service}/ListNodes",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=make(method.output_type).FromString,
        )
        reply = call(make(method.input_type)(), timeout=5)
        assert {node.view.name for node in reply.nodes} == {"s0", "s1"}
