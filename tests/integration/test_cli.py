"""The `cenote` command against a real pool: what it prints, and its exit codes."""

from __future__ import annotations

import array
import fcntl
import io
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cenote.cli.main import main
from cluster import Cluster, run_cenote, start_cenote
from promptness import ends_within
from waiting import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
STOP_S = 2.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(stores=2, dram_bytes=48 * MIB) as started:
        started.wait_alive(2)
        yield started


@dataclass
class Result:
    code: int
    out: bytes
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


class Cenote:
    """`cenote ARGUMENTS` in this process."""

    def __init__(self, capture: pytest.CaptureFixture[bytes]) -> None:
        self._capture = capture

    def __call__(self, *arguments: str) -> Result:
        self._capture.readouterr()
        code = main(arguments)
        out, err = self._capture.readouterr()
        return Result(code, out, err.decode())


@pytest.fixture
def cenote(
    cluster: Cluster,
    capsysbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> Cenote:
    for name, value in cluster.environment.items():
        if name.startswith("CENOTE_"):
            monkeypatch.setenv(name, value)
    return Cenote(capsysbinary)


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """One of each test's own."""
    return str(request.node.name)


# ---- objects ---------------------------------------------------------------------------------


def test_an_object_from_put_to_rm(cenote: Cenote, namespace: str, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3 * MIB + 1)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(data)
    assert cenote("put", "-n", namespace, "a/b", str(source)).code == 0
    assert cenote("get", "-n", namespace, "a/b", str(target)).code == 0
    assert target.read_bytes() == data
    assert cenote("get", "-n", namespace, "a/b").out == data

    stat = cenote("stat", "-n", namespace, "a/b", "--json").json()
    assert (stat["size_bytes"], stat["replicas"], stat["lease_count"]) == (len(data), 1, 0)
    assert sum(extent["length_bytes"] for extent in stat["extents"]) == len(data)
    assert {extent["node"] for extent in stat["extents"]} <= {"s0", "s1"}
    shown = cenote("stat", "-n", namespace, "a/b").out.decode()
    assert "3 MiB" in shown
    assert stat["checksum"] in shown

    (listed,) = cenote("ls", "-n", namespace, "--json").json()
    assert (listed["key"], listed["size_bytes"]) == ("a/b", len(data))
    assert listed["version"] == stat["version"]

    removed = cenote("rm", "-n", namespace, "a/b", "--json")
    assert (removed.code, removed.json()) == (0, {"removed": 1, "missing": []})
    assert cenote("get", "-n", namespace, "a/b").code == 3
    assert cenote("stat", "-n", namespace, "a/b").code == 3
    assert cenote("ls", "-n", namespace, "--json").json() == []


def test_standard_input_and_keys_that_are_no_text(cluster: Cluster, namespace: str) -> None:
    key = "hex:00ff17"
    put = cluster.cli("put", "-n", namespace, key, "-", stdin=b"hello\n")
    assert put.returncode == 0, put.stderr
    got = cluster.cli("get", "-n", namespace, key, "-")
    assert (got.returncode, got.stdout) == (0, b"hello\n")
    listed = cluster.cli("ls", "-n", namespace, "hex:00", "--json")
    assert [entry["key"] for entry in json.loads(listed.stdout)] == [key]


def test_an_object_never_changes(cenote: Cenote, namespace: str, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("one")
    other.write_text("two")
    assert cenote("put", "-n", namespace, "k", str(one)).code == 0
    again = cenote("put", "-n", namespace, "k", str(one))
    assert again.code == 0
    assert "already" in again.err
    refused = cenote("put", "-n", namespace, "k", str(other))
    assert refused.code == 1
    assert "other bytes" in refused.err
    assert "cenote rm k" in refused.err
    assert cenote("get", "-n", namespace, "k").out == b"one"


def test_what_is_not_there_has_an_exit_code_of_its_own(cenote: Cenote, namespace: str) -> None:
    for command in (["get", "k"], ["stat", "k"], ["rm", "k"], ["ls"]):
        result = cenote(*command, "-n", "no-such-namespace")
        assert result.code == 3, command
        assert len(result.err.splitlines()) == 1
    assert cenote("namespaces", "create", namespace).code == 0
    assert cenote("get", "-n", namespace, "k").code == 3
    assert cenote("rm", "-n", namespace, "k").code == 3
    assert cenote("rm", "-n", namespace, "k", "--force").code == 0


def test_replicas_are_all_placed_or_refused(cenote: Cenote, namespace: str, tmp_path: Path) -> None:
    source = tmp_path / "x"
    source.write_bytes(b"x")
    refused = cenote("put", "-n", namespace, "k", str(source), "--replicas", "3")
    assert refused.code == 1
    assert "failure domains" in refused.err


def test_ls_shows_what_begins_with_a_prefix(
    cenote: Cenote, cluster: Cluster, namespace: str
) -> None:
    with cluster.client(namespace=namespace) as client:
        client.put_batch([f"{kind}/{i:03}" for kind in "ab" for i in range(150)], [b"v"] * 300)
        client.remove_batch([f"b/{i:03}" for i in range(100)])
        client.put("c" * 512, b"long key")
    assert len(cenote("ls", "-n", namespace, "a/", "--limit", "1000", "--json").json()) == 150
    b = cenote("ls", "-n", namespace, "b/", "--limit", "1000", "--json").json()
    assert [entry["key"] for entry in b] == [f"b/{i:03}" for i in range(100, 150)]
    (long,) = cenote("ls", "-n", namespace, "ccc", "--json").json()
    assert long["key"] == "c" * 512
    some = cenote("ls", "-n", namespace, "--limit", "10")
    assert len(some.out.splitlines()) == 12
    assert "more than 10 keys" in some.err


# ---- the pool --------------------------------------------------------------------------------


def test_listings_for_scripts(cenote: Cenote) -> None:
    status = cenote("status", "--json").json()
    assert (status["nodes_alive"], status["nodes_total"]) == (2, 2)
    assert status["capacity_bytes"] > 90 * MIB
    nodes = cenote("nodes", "--json").json()
    assert [(node["name"], node["state"]) for node in nodes] == [("s0", "alive"), ("s1", "alive")]
    assert {endpoint["kind"] for endpoint in nodes[0]["endpoints"]} == {"tcp", "shm", "grpc"}
    segments = cenote("segments", "--json").json()
    assert {segment["node_name"] for segment in segments} == {"s0", "s1"}
    assert all(segment["tier"] == "dram" for segment in segments)


def test_a_directory_is_no_object(cenote: Cenote, namespace: str, tmp_path: Path) -> None:
    put = cenote("put", "-n", namespace, "k", str(tmp_path))
    assert (put.code, put.err.startswith(f"cenote: {tmp_path} is a directory")) == (2, True)


def test_listings_for_people(cenote: Cenote) -> None:
    assert "2 of 2 alive" in cenote("status").out.decode()
    for command in ("nodes", "segments"):
        lines = cenote(command).out.decode().splitlines()
        assert len(lines) == 4, lines
        assert all(line == line.rstrip() for line in lines)
        assert not any("\x1b" in line for line in lines)


def test_namespaces_are_made_and_reset_one_by_one(
    cenote: Cenote, cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = f"{namespace}-other"
    made = cenote("namespaces", "create", namespace, "--fingerprint", "bf16", "--json")
    assert (made.code, made.json()["fingerprint"]) == (0, "bf16")
    assert cenote("namespaces", "create", namespace, "--fingerprint", "bf16").code == 0
    refused = cenote("namespaces", "create", namespace, "--fingerprint", "fp8")
    assert refused.code == 1
    assert "fingerprint" in refused.err
    with cluster.client(namespace=namespace, fingerprint="bf16") as client:
        client.put("k", b"v")
        client.namespace(other).put("k", b"v")
    assert cenote("get", "-n", namespace, "k").out == b"v"
    for answer in ("n\n", ""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        unsure = cenote("namespaces", "reset", namespace)
        assert unsure.code == 1
        assert f"nothing was done: {namespace} still has 1 object\n" in unsure.err
    assert cenote("namespaces", "reset", namespace, "--yes", "--json").json()["generation"] > 1
    assert cenote("get", "-n", namespace, "k").code == 3
    assert cenote("get", "-n", other, "k").out == b"v"
    listed = {each["name"]: each for each in cenote("namespaces", "--json").json()}
    assert listed[namespace]["objects"] == 0
    assert listed[other]["objects"] == 1
    assert cenote("namespaces", "reset", "no-such-namespace", "--yes").code == 3


def test_bench_measures_and_leaves_nothing(cenote: Cenote) -> None:
    result = cenote("bench", "--seconds", "0.05", "--size", "64KiB", "--json")
    assert result.code == 0, result.err
    cases = result.json()
    assert [case["operation"] for case in cases] == ["exists"] * 2 + ["put", "get"] * 3
    assert all(0 < case["p50_us"] <= case["p99_us"] for case in cases)
    listed = {each["name"]: each for each in cenote("namespaces", "--json").json()}
    assert listed["cenote-bench"]["objects"] == 0


# ---- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["get"],
        ["get", "k", "--no-such-option"],
        ["put", "k", "/no/such/file"],
        ["put", "", "-"],
        ["get", "hex:0"],
        ["up", "--dram", "4G"],
        ["replay", "/no/such/trace.jsonl"],
        ["replay", "--block-size", "12", __file__],
        ["replay", "--block-size", "0", __file__],
        ["bench", "--size", "0"],
        ["completion", "tcsh"],
    ],
)
def test_wrong_usage_is_one_line(cenote: Cenote, arguments: list[str]) -> None:
    result = cenote(*arguments)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1, result.err
    assert result.err.startswith("cenote: ")
    assert "Value error" not in result.err
    assert result.out == b""


@pytest.mark.parametrize("key", ["no such/key", "no -- such", "-no"])
def test_a_missing_key_is_told_with_the_command_that_explains_it(
    cenote: Cenote, namespace: str, key: str
) -> None:
    assert cenote("namespaces", "create", namespace).code == 0
    told = cenote("get", "-n", namespace, "--", key)
    command = told.err.partition("(why: ")[2].partition(")")[0]
    assert shlex.split(command)[-1] == key
    explained = cenote(*shlex.split(command)[1:])
    assert explained.code == 3
    assert b"absent" in explained.out


def test_a_namespace_that_is_not_there_is_told_with_a_command(cenote: Cenote) -> None:
    told = cenote("namespaces", "set-quota", "nobodys", "--dram", "1GiB")
    assert told.code == 3
    assert "`cenote namespaces create` makes one" in told.err
    told = cenote("mrc", "-n", "nobodys")
    assert told.code == 3
    assert "`cenote namespaces` lists them" in told.err


def test_a_pool_that_is_not_there(cenote: Cenote, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        monkeypatch.setenv("CENOTE_GRPC", address)
        for command in (["status"], ["nodes"], ["ls"], ["get", "k"], ["put", "k", __file__]):
            with ends_within(3):
                result = cenote(*command, "--master", address)
                assert result.code == 4, command
                assert len(result.err.splitlines()) == 1
                assert "cenote up" in result.err


def test_a_pool_that_does_not_answer_costs_the_deadline(
    cenote: Cenote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("CENOTE_GRPC", address)
        with ends_within(0.3, at_least_s=0.2, late_s=2.7):
            result = cenote("status", "--master", address, "--deadline", "0.3")
        assert result.code == 4


def test_help_costs_no_heavy_import() -> None:
    with start_cenote("--help", interpreter_options=["-X", "importtime"]) as process:
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"replay" in out
    imported = {line.rpartition(b"|")[2].strip() for line in err.splitlines()}
    assert b"typer" in imported
    assert not imported & {b"numpy", b"grpc", b"uvloop", b"google.protobuf"}


def test_a_pipe_that_closes_early_is_no_error(cluster: Cluster) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = run_cenote("nodes", "--json", environment=cluster.environment, stdout=writer)
    finally:
        os.close(writer)
    assert b"Traceback" not in result.stderr
    assert result.stderr == b""


def test_no_arguments_show_the_help(cenote: Cenote) -> None:
    result = cenote()
    assert result.code == 0
    assert b"Usage" in result.out
    assert b"Exit codes" in result.out
    assert cenote("--version").out.startswith(b"cenote ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "arguments", [["bench", "--seconds", "1"], ["put", "k", "-"], ["replay", "/dev/stdin"]]
)
def test_a_signal_ends_any_command(
    cluster: Cluster, arguments: list[str], number: signal.Signals
) -> None:
    with start_cenote(
        *arguments, environment=cluster.environment, stdin=subprocess.PIPE
    ) as process:
        if arguments[0] == "bench":
            wait_until(lambda: bench_objects(cluster), what="the bench to put")
        else:
            assert process.stdin is not None
            process.stdin.write(b"{")
            process.stdin.flush()
            wait_until(lambda: is_empty(process.stdin), what="it to read its input")
        end_by(process, number)
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 128 + number
    wait_until(lambda: not bench_objects(cluster), what="the bench to clean up")


def bench_objects(cluster: Cluster) -> bool:
    listed = json.loads(cluster.cli("namespaces", "--json").stdout)
    return any(each["name"] == "cenote-bench" and each["objects"] for each in listed)


def is_empty(pipe: Any) -> bool:
    """Whether all that was written to a pipe was read."""
    waiting = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, waiting)
    return not waiting[0]


def test_a_host_without_an_address_is_named_with_the_resolvers_error(cenote: Cenote) -> None:
    result = cenote("status", "--grpc", "no-such-host.invalid:5111")
    assert result.code == 4
    assert "no connection to " in result.err
    assert "no-such-host.invalid:5111: " in result.err
    assert "nobody answers" not in result.err


def end_by(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """End it by a signal; within the time that is promised for that."""
    with ends_within(STOP_S + 0.5):
        process.send_signal(number)
        process.wait(timeout=10)


# ---- daemons ---------------------------------------------------------------------------------


def test_master_and_store_are_the_daemons(cenote: Cenote) -> None:
    for command in ("master", "store"):
        with start_cenote(command, "--help") as process:
            out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert b"--listen" in out
