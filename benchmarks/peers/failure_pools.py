"""Pools of several nodes whose parts can be killed, stopped and started again: ours and the peer's.

Both: one master, nodes that are processes of their own, block bytes over TCP, default settings. The
peer is set up as its documentation recommends for a start (P2PHANDSHAKE, no other service);
`MooncakeSnapshots` has its master's snapshots too, every 5 s instead of every 600.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from peers import HERE, MIB, MOONCAKE_VENV, free_port, wait_port

START_TIMEOUT_S = 60


class Process:
    """A process with its logs in a folder."""

    def __init__(self, name, argv, directory, env=None, **options):
        with open(os.path.join(directory, f"{name}.log"), "ab") as log:
            settings = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, **options}
            self.popen = subprocess.Popen(argv, env={**os.environ, **(env or {})}, **settings)
        self.name = name

    def send(self, number) -> None:
        self.popen.send_signal(number)

    def kill(self, number=signal.SIGKILL) -> None:
        """And wait for its end; by SIGKILL where it does not come within 10 s."""
        self.send(number)
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class Client(Process):
    """A worker: JSON lines to it, samples and answers from it."""

    def __init__(self, pool, name, role="client"):
        argv = [pool.python, str(HERE / "failure_worker.py"), "--peer", pool.peer, "--role", role]
        argv += ["--cfg", json.dumps(pool.cfg())]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        super().__init__(name, argv, pool.directory, pool.env, **pipes)
        self.samples: list[list] = []
        self.answers: queue.Queue = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        hello = self.answer(START_TIMEOUT_S)
        if "error" in hello:
            raise RuntimeError(f"{pool.label} {name}: {hello['error']}")

    def _listen(self) -> None:
        for line in self.popen.stdout:
            message = json.loads(line)
            if "sample" in message:
                self.samples.append(message["sample"])
            else:
                self.answers.put(message)
        self.answers.put({"error": "the process ended"})

    def tell(self, **case) -> None:
        self.popen.stdin.write(json.dumps(case) + "\n")
        self.popen.stdin.flush()

    def answer(self, timeout_s) -> dict:
        """What it said; {"error": "hung ..."} where it says nothing in time."""
        try:
            message = self.answers.get(timeout=timeout_s)
        except queue.Empty:
            return {"error": f"hung > {timeout_s:.0f} s"}
        return message.get("done", message)

    def call(self, timeout_s, **case) -> dict:
        self.tell(**case)
        return self.answer(timeout_s)


class Pool:
    """What both have in common."""

    label = peer = python = ""
    env: Mapping[str, str] = {}

    def __init__(self, directory, *, nodes, node_bytes, replicas):
        self.directory = str(directory)
        os.makedirs(self.directory, exist_ok=True)
        self.node_bytes, self.replicas = node_bytes, replicas
        self.extra: list[Process] = []
        self.nodes: list[Process] = []
        self.rpc, self.admin = free_port(), free_port()
        self.master: Process | None = None
        try:
            self.master = self.start_master()
            for i in range(nodes):
                self.nodes.append(self.start_node(i))
            self.wait_nodes(nodes)
        except BaseException:  # whatever it was, no process may stay
            self.stop()
            raise

    @property
    def address(self) -> str:
        """Of the master, as clients and nodes are given it."""
        return f"127.0.0.1:{self.rpc}"

    def cfg(self) -> dict:
        return {
            "master": self.address,
            "node_bytes": self.node_bytes,
            "buffer_bytes": 512 * MIB,
            "replicas": self.replicas,
        }

    def client(self, name) -> Client:
        client = Client(self, name)
        self.extra.append(client)
        return client

    def restart_master(self) -> None:
        self.master = self.start_master()

    def restart_node(self, i) -> None:
        self.nodes[i] = self.start_node(i)

    def stop(self) -> None:
        """All of it, by force: nothing of it is needed any more."""
        for process in [*self.extra, *self.nodes, self.master]:
            if process is not None and process.popen.poll() is None:
                process.send(signal.SIGCONT)
                process.kill()


class Mooncake(Pool):
    label = peer = "mooncake"
    python = str(MOONCAKE_VENV / "bin" / "python")
    env: Mapping[str, str] = {"GLOG_minloglevel": "1"}
    flags: tuple[str, ...] = ()

    def start_master(self) -> Process:
        argv = [
            str(MOONCAKE_VENV / "bin" / "mooncake_master"),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.rpc}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self.admin}",
            *self.flags,
        ]
        env = {"MOONCAKE_SNAPSHOT_LOCAL_PATH": f"{self.directory}/snapshots"}
        process = Process("master", argv, self.directory, env)
        wait_port(self.rpc)
        return process

    def start_node(self, i) -> Process:
        return Client(self, f"node{i}", "node")

    def wait_nodes(self, count) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while self._metric("master_total_capacity_bytes") < count * self.node_bytes:
            if time.monotonic() > end:
                raise RuntimeError("the peer's nodes did not come up")
            time.sleep(0.1)

    def _metric(self, name) -> float:
        url = f"http://127.0.0.1:{self.admin}/metrics"
        with urllib.request.urlopen(url, timeout=5) as reply:
            for line in reply.read().decode().splitlines():
                if line.split(" ")[0].split("{")[0] == name:
                    return float(line.split(" ")[-1])
        return 0.0

    def held_bytes(self) -> float:
        """All that can't be given to others."""
        return self._metric("master_allocated_bytes")


class MooncakeSnapshots(Mooncake):
    label = "mooncake, snapshots every 5 s"
    flags = (
        "--enable_snapshot=true",
        "--enable_snapshot_restore=true",
        "--snapshot_interval_seconds=5",
        "--snapshot_object_store_type=local",
    )


class Cenote(Pool):
    label = peer = "cenote"
    python = sys.executable

    def start_master(self) -> Process:
        argv = [
            str(Path(sys.executable).parent / "cenote-master"),
            f"--listen=127.0.0.1:{self.rpc}",
            f"--grpc=127.0.0.1:{self.admin}",
            f"--metadata=file:{self.directory}/metadata",
        ]
        process = Process("master", argv, self.directory)
        wait_port(self.rpc)
        return process

    def start_node(self, i) -> Process:
        memory = Path("/dev/shm") / f"cenote-failures-{os.getpid()}"
        memory.mkdir(exist_ok=True)
        argv = [
            str(Path(sys.executable).parent / "cenote-store"),
            f"--master={self.address}",
            f"--name=node{i}",
            f"--failure-domain=domain{i}",
            f"--dram={self.node_bytes}",
            f"--dram-dir={memory}",
            "--listen=127.0.0.1:0",
            "--grpc=127.0.0.1:0",
            f"--socket={self.directory}/node{i}.sock",
        ]
        return Process(f"node{i}", argv, self.directory)

    def _status(self):
        import grpc

        from cenote.v1 import admin_pb2, admin_pb2_grpc

        with grpc.insecure_channel(f"127.0.0.1:{self.admin}") as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            return stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=5, wait_for_ready=True)

    def wait_nodes(self, count) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while self._status().nodes_alive < count:
            if time.monotonic() > end:
                raise RuntimeError("our nodes did not come up")
            time.sleep(0.1)

    def held_bytes(self) -> float:
        status = self._status()
        return (
            status.used_bytes
            + status.granted_bytes
            + status.quarantined_bytes
            + status.condemned_bytes
        )

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(f"/dev/shm/cenote-failures-{os.getpid()}", ignore_errors=True)


POOLS = {"mooncake": Mooncake, "mooncake-snapshots": MooncakeSnapshots, "cenote": Cenote}
