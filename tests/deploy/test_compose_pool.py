"""The compose file's pool, brought up by its own command lines: as processes on loopback.

A container engine gives each service a host name and memory of its own; here each address becomes
one on loopback, and each directory one of this test's. All other words stand as they are written.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cenote.cli.daemons import clean_environment
from cenote.cli.scratch import MEMORY_DIRECTORY, scratch_directory
from cluster import run_cenote, start_module
from deployment import COMPOSE
from etcd import etcd_program, free_ports
from waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
START_S = 60.0
TAKEOVER_S = 30.0
FIRST_PORTS = {"etcd": 2379, "master": 5110, "store": 5120}


class Compose:
    """The services whose names begin with etcd, master and store. `with Compose() as pool:`"""

    def __init__(self, directory: Path, memory: Path) -> None:
        self.directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._memory = memory
        self._services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
        self._names = [n for n in self._services if re.match(r"(etcd|master|store)\d", n)]
        # A master's gRPC server is looked for at the port after its lane's, so ports stay together.
        bases = iter(neighbours(len(self._names)))
        self._bases = {name: next(bases) for name in self._names}

    def __enter__(self) -> Compose:
        program, *words = self._services["tokens"]["command"]
        assert program == "cenote"
        for _ in range(2):  # `up` runs it each time
            made = run_cenote(*(self.here(word, "tokens") for word in words))
            assert made.returncode == 0, made.stderr
        try:
            for name in self._names:
                self._start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *details: object) -> None:
        for name in self.processes:
            self.kill(name)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(10)

    def address(self, name: str, port: int) -> str:
        """Where `name:port` of the compose file is here."""
        return f"127.0.0.1:{self._bases[name] + port - FIRST_PORTS[name[:-1]]}"

    def here(self, word: str, own: str) -> str:
        """A word of the compose file, with addresses and directories of this test's."""
        word = word.replace("0.0.0.0:", f"{own}:")
        word = re.sub(
            r"\b((?:etcd|master|store)\d):(\d+)", lambda m: self.address(m[1], int(m[2])), word
        )
        word = re.sub(r"^--advertise=store\d$", "--advertise=127.0.0.1", word)
        word = word.replace("=/run/cenote", f"={self.directory}")
        word = word.replace("=/var/lib/etcd", f"={self.directory / own}")
        word = word.replace("/etc/cenote/auth", f"{self.directory}/auth")
        return word.replace("--dram=1GiB", "--dram=64MiB")  # of a small test machine

    def _start(self, name: str) -> None:
        program, *words = (self.here(word, name) for word in self._services[name]["command"])
        with (self.directory / f"{name}.log").open("wb") as log:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            if program == "etcd":
                self.processes[name] = subprocess.Popen([etcd_program(), *words], **options)
                return
            if program == "cenote-store":
                words.append(f"--dram-dir={self._memory}")  # a container has a /dev/shm of its own
            self.processes[name] = start_module(program.replace("-", "."), *words, **options)

    def variables(self, name: str) -> dict[str, str]:
        """The environment of a service."""
        given = self._services[name].get("environment", {})
        return clean_environment() | {k: self.here(v, name) for k, v in given.items()}

    def service(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._services[name]
        return found

    def cli(
        self, *arguments: str, stdin: bytes | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """`docker compose run --rm cli ARGUMENTS`"""
        service = self._services["cli"]
        assert service["entrypoint"] == ["cenote"]
        return run_cenote(*arguments, stdin=stdin, environment=self.variables("cli"))

    def logs(self) -> str:
        files = sorted(self.directory.glob("*.log"))
        return "\n".join(f"-- {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in files)


def neighbours(count: int) -> list[int]:
    """Ports of which the two after each are free as well."""
    found: list[int] = []
    for base in free_ports(20 * count):
        taken = {port + i for port in found for i in range(3)}
        with ExitStack() as held:
            try:
                for port in (base, base + 1, base + 2):
                    sock = held.enter_context(socket.socket())
                    sock.bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
        if not taken & {base, base + 1, base + 2}:
            found.append(base)
    return found[:count]


@pytest.fixture
def pool() -> Iterator[Compose]:
    etcd_program()  # or skip
    with (
        scratch_directory() as directory,
        scratch_directory(MEMORY_DIRECTORY) as memory,
        Compose(directory, memory) as compose,
    ):
        yield compose


def alive(pool: Compose) -> list[str] | None:
    """Names of the nodes that are alive, or None where nobody answers."""
    done = pool.cli("nodes", "--json")
    if done.returncode:
        return None
    nodes = json.loads(done.stdout)
    return sorted(node["name"] for node in nodes if node["state"] == "alive")


def test_the_compose_files_pool_comes_up_and_survives_a_master(pool: Compose) -> None:
    wait_until(
        lambda: alive(pool) == ["store1", "store2"], START_S, what=f"both nodes\n{pool.logs()}"
    )
    assert pool.cli("put", "greeting", "-", "--replicas", "2", stdin=b"hello").returncode == 0
    for name, port in (("master1", 5112), ("master2", 5112), ("store1", 5122), ("store2", 5122)):
        with urllib.request.urlopen(f"http://{pool.address(name, port)}/metrics", timeout=10) as r:
            assert b"cenote_" in r.read()
    check_health(pool)
    pool.kill("master1")
    wait_until(
        lambda: pool.cli("get", "greeting").stdout == b"hello",
        TAKEOVER_S,
        what=f"the object from the other master\n{pool.logs()}",
    )
    assert pool.cli("put", "again", "-", stdin=b"x").returncode == 0
    check_what_the_chart_does_around_a_pods_end(pool)
    for name in ("store1", "master2"):
        pool.processes[name].send_signal(signal.SIGTERM)
        assert pool.processes[name].wait(10) == 0


def check_health(pool: Compose) -> None:
    """What compose asks a master, leader or standby, and what Kubernetes asks any daemon."""
    for name in ("master1", "master2"):
        _, program, *words = pool.service(name)["healthcheck"]["test"]
        assert program == "cenote"
        words = [word.replace("127.0.0.1:5110", pool.address(name, 5110)) for word in words]
        asked = run_cenote(*words, environment=pool.variables(name))
        assert asked.returncode == 0, asked.stderr
        stranger = run_cenote(*words)
        assert stranger.returncode == 1, stranger.stdout
        assert b"token" in stranger.stderr
    for name, port in (("master1", 5111), ("master2", 5111), ("store1", 5121), ("store2", 5121)):
        with grpc.insecure_channel(pool.address(name, port)) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=10
            )
            assert reply.status == health_pb2.HealthCheckResponse.SERVING, name


def check_what_the_chart_does_around_a_pods_end(pool: Compose) -> None:
    """preStop drains, and the next pod's init container takes the drain back before its daemon is
    there. On a node that is new to the pool that is exit code 3, which it takes for done."""
    assert pool.cli("undrain", "no-such-node").returncode == 3
    drained = pool.cli("drain", "store2", "--wait")
    assert drained.returncode == 0, drained.stderr
    pool.kill("store2")
    taken_back = pool.cli("undrain", "store2")
    assert taken_back.returncode == 0, taken_back.stderr
    nodes = json.loads(pool.cli("nodes", "--json").stdout)
    assert "drain" not in json.dumps([n["state"] for n in nodes])
    assert pool.cli("get", "greeting").stdout == b"hello"
