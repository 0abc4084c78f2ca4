"""A cluster of real processes on loopback: the only place in the tests that starts daemons.

    with Cluster(stores=2, dram_bytes=64 << 20) as cluster:
        with cluster.client() as client:                # cenote.client.Client, on the lane
            client.put("k", b"v")
        cluster.stores[0].kill()                        # SIGKILL; kill(signal.SIGTERM) ... also
        cluster.stores[0].restart()                     # same name and memory; until ready
        cluster.master.restart(signal.SIGKILL)          # by this signal, then start, then ready
        extra = cluster.add_store(dram_bytes=256 << 20)
        cluster.master.pause(); cluster.master.resume() # SIGSTOP, SIGCONT
        cluster.lane, cluster.grpc                      # "127.0.0.1:port"
        cluster.environment                             # for a `cenote` command as a subprocess
        cluster.cli("status", "--json")                 # such a command: CompletedProcess, text
        cluster.wait_alive(2)                           # until the master sees so many nodes alive

    with Cluster(masters=2, metadata=etcd.url) as cluster:  # see `etcd.py`; or one URL for each
        cluster.leader()                                # the Process that leads, waited for
        cluster.lane                                    # all of them, with commas between

    Cluster(masters=2, places=network.masters)          # each in its own namespace: `network.py`

`Process`: name, pid, is_running, exit_code, ready (fields of the readiness line), log_text(),
start(), wait_ready(), stop(), kill(), restart(), pause(), resume(), wait_exit().

All ports are free ones that the daemons choose, and stay the same over a restart. Metadata lies in
`file:` (`metadata="memory"` for none), segments in a directory of the cluster's own in /dev/shm,
logs beside the metadata; all of it is removed at the end, or with the test process. When the block
ends with an exception, when a daemon died that nobody stopped, or when one logged a traceback (see
`allow_tracebacks`), the ends of all logs are printed and the test fails.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from cenote.cli.daemons import clean_environment, stop_all
from cenote.cli.scratch import MEMORY_DIRECTORY, scratch_directory
from cenote.cli.specs import master_spec, store_spec
from network import Place
from one_process import READY_TIMEOUT_S, Process
from waiting import wait_until

if TYPE_CHECKING:
    from cenote.client import Client

__all__ = ["Cluster", "CommandProcess", "Process", "run_cenote", "start_cenote", "start_program"]

CLOSE_TIMEOUT_S = 5.0
CLI_TIMEOUT_S = 60.0
PIPES: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
}


@final
class Cluster:
    """See the module's docstring. Flags are named as on the command line, but for the dashes."""

    def __init__(
        self,
        *,
        stores: int = 1,
        masters: int = 1,
        dram_bytes: int = 64 << 20,
        metadata: str | Sequence[str] = "file",
        master_flags: Mapping[str, object] | None = None,
        store_flags: Mapping[str, object] | None = None,
        allow_tracebacks: bool = False,
        ready_timeout_s: float = READY_TIMEOUT_S,
        places: Sequence[Place] = (),
        admin_token: str = "",
    ) -> None:
        """`places`: where each master runs; the stores run where the test does. `admin_token`: for
        commands, and for what is asked here, where the flags have the pool ask for tokens."""
        self._admin_token = admin_token
        self._places = places
        self._store_count = stores
        self._master_count = masters
        self._dram_bytes = dram_bytes
        self._metadata = metadata
        self._master_flags = dict(master_flags or {})
        self._store_flags = dict(store_flags or {})
        self._allow_tracebacks = allow_tracebacks
        self._ready_timeout_s = ready_timeout_s
        self._exit = ExitStack()
        self._daemon_environment = clean_environment()
        self.directory = Path()
        """Metadata, logs, sockets."""
        self.dram_directory = Path()
        """Segments, in memory."""
        self.stores: list[Process] = []
        self.masters: list[Process] = []

    # ---- life --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.directory = stack.enter_context(scratch_directory())
            self.dram_directory = stack.enter_context(scratch_directory(MEMORY_DIRECTORY))
            stack.callback(self._end_processes)
            try:
                self._start()
            except BaseException:
                self._print_logs()
                raise
            self._exit = stack.pop_all()
        return self

    def _start(self) -> None:
        own = {"memory": "memory:", "file": f"file:{self.directory}/metadata"}
        one = self._metadata
        each = [own.get(one, one)] * self._master_count if isinstance(one, str) else list(one)
        for number in range(self._master_count):
            self._start_master(each[number])
        for master in self.masters:
            self._settle_master(master)
        if each[0] not in own.values():
            self.leader()
        started = [self._new_store(self._dram_bytes, {}) for _ in range(self._store_count)]
        for store in started:
            store.wait_ready(self._ready_timeout_s)

    def _start_master(self, metadata: str) -> Process:
        number = len(self.masters)
        spec = master_spec(metadata=metadata, extra=self._master_flags)
        if self._master_count > 1:
            spec.name = f"master{number}"
        if self._places:
            place = self._places[number]
            spec.flags.update(listen=f"{place.host}:0", grpc=f"{place.host}:0", insecure=True)
            spec.launcher = place.launcher
        master = Process(spec, self.directory, self._daemon_environment)
        self.masters.append(master)
        master.start()
        return master

    def _settle_master(self, master: Process) -> None:
        master.wait_ready(self._ready_timeout_s)
        # The same ports after a restart, so that everybody finds it again.
        master.flags.update(
            listen=_host_port(master.ready["lane"]), grpc=_host_port(master.ready["grpc"])
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        complaints = [] if error is not None else self._complaints()
        if error is not None or complaints:
            self._print_logs()
        self._exit.close()
        assert not complaints, "; ".join(complaints)

    def _end_processes(self) -> None:
        end_s = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self.processes:
            if process.is_running:
                process.resume()
        stop_all([store.daemon for store in self.stores], end_s)
        stop_all([process.daemon for process in self.processes], end_s)

    def _complaints(self) -> list[str]:
        found = [
            f"{process.name} ended by itself with exit code {process.exit_code}"
            for process in self.processes
            if not process.is_running and not process.expected_down
        ]
        if not self._allow_tracebacks:
            found += [
                f"{process.name} logged a traceback"
                for process in self.processes
                if "Traceback (most recent call last)" in process.log_text()
            ]
        return found

    def _print_logs(self) -> None:
        for process in self.processes:
            state = "running" if process.is_running else f"exit code {process.exit_code}"
            print(f"---- {process.name} ({state})", process.log_text(), sep="\n", file=sys.stderr)

    # ---- parts -------------------------------------------------------------------------------

    @property
    def master(self) -> Process:
        """The only one."""
        (master,) = self.masters
        return master

    def leader(self, timeout_s: float = 20.0) -> Process:
        """The master that leads; waits until one does."""

        def find() -> Process | None:
            for master in self.masters:
                if master.is_running and not master.is_paused and self.role_of(master) == "leader":
                    return master
            return None

        found = wait_until(find, timeout_s, what="a master to lead")
        assert found is not None
        return found

    def role_of(self, master: Process) -> str:
        """`leader`, `standby`, or empty where it does not answer."""
        import grpc

        from cenote.rpc.grpc_auth import token_metadata
        from cenote.v1 import admin_pb2, admin_pb2_grpc

        metadata = token_metadata(self._admin_token)
        with grpc.insecure_channel(_host_port(master.ready["grpc"])) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
            with contextlib.suppress(grpc.RpcError):
                status = stub.GetStatus(
                    admin_pb2.GetStatusRequest(), timeout=1.0, metadata=metadata
                )
                return str(status.role)
        return ""

    @property
    def processes(self) -> list[Process]:
        """The masters, where they were started, and all stores."""
        return [*self.masters, *self.stores]

    @property
    def lane(self) -> str:
        """Address of the master's lane, or of all masters' with commas between."""
        return ",".join(_host_port(master.ready["lane"]) for master in self.masters)

    @property
    def grpc(self) -> str:
        """Address of the master's gRPC server, or of all masters' with commas between."""
        return ",".join(_host_port(master.ready["grpc"]) for master in self.masters)

    def add_master(self) -> Process:
        """One more over the same metadata, at an address that nobody was told; ready."""
        assert isinstance(self._metadata, str)
        assert self._master_count > 1
        master = self._start_master(self._metadata)
        self._settle_master(master)
        return master

    def add_store(
        self,
        *,
        dram_bytes: int | None = None,
        flags: Mapping[str, object] | None = None,
        launcher: Sequence[str] = (),
    ) -> Process:
        """One more store daemon, ready. The i-th one is called `s<i>`.

        `launcher`: a command that becomes the daemon, such as `prlimit --memlock=N`.
        """
        size_bytes = self._dram_bytes if dram_bytes is None else dram_bytes
        store = self._new_store(size_bytes, flags or {}, launcher)
        store.wait_ready(self._ready_timeout_s)
        return store

    def _new_store(
        self, dram_bytes: int, flags: Mapping[str, object], launcher: Sequence[str] = ()
    ) -> Process:
        spec = store_spec(
            f"s{len(self.stores)}",
            master=self.lane,
            dram_bytes=dram_bytes,
            dram_directory=self.dram_directory,
            socket_directory=self.directory,
            extra=self._store_flags | dict(flags),
        )
        spec.launcher = tuple(launcher)
        store = Process(spec, self.directory, self._daemon_environment)
        self.stores.append(store)
        store.start()
        return store

    # ---- use ---------------------------------------------------------------------------------

    def client(self, **options: Any) -> Client:
        """A `cenote.client.Client` of this cluster; the caller closes it."""
        from cenote.client import Client

        return Client(self.lane, **options)

    @property
    def environment(self) -> dict[str, str]:
        """For a `cenote` command that is to find this cluster."""
        token = {"CENOTE_CLIENT_TOKEN": self._admin_token} if self._admin_token else {}
        return {
            **clean_environment(),
            "CENOTE_MASTER": self.lane,
            "CENOTE_GRPC": self.grpc,
            **token,
        }

    def cli(
        self, *arguments: str, stdin: bytes | None = None, timeout_s: float = CLI_TIMEOUT_S
    ) -> subprocess.CompletedProcess[bytes]:
        """Run `cenote ARGUMENTS` against this cluster."""
        return run_cenote(
            *arguments, stdin=stdin, environment=self.environment, timeout_s=timeout_s
        )

    def mend(self, nodes: int) -> None:
        """Start what does not run, let go on what was stopped, and wait until so many nodes are
        alive: for a test that shares a cluster with others."""
        for process in self.processes:
            if process.is_running:
                process.resume()
            else:
                process.restart()
        self.wait_alive(nodes)

    def wait_alive(self, count: int, timeout_s: float = 30.0) -> None:
        """Until the master sees exactly so many nodes alive."""
        from cenote.api.errors import CenoteError
        from cenote.cli.connect import Admin

        with Admin(self.grpc.split(","), deadline_s=timeout_s) as admin:

            def alive() -> bool:
                with contextlib.suppress(CenoteError):  # a master that is just being restarted
                    return admin.status().nodes_alive == count
                return False

            wait_until(alive, timeout_s, what=f"{count} live nodes")


def _host_port(address: str) -> str:
    return address.removeprefix("tcp://")


# ---- the `cenote` command as a process ----------------------------------------------------------


class CommandProcess(subprocess.Popen[bytes]):
    """A Popen that is killed at the end of its `with` block, where it still runs."""

    def __exit__(self, *details: Any) -> None:
        if self.poll() is None:
            self.kill()
        super().__exit__(*details)


def start_cenote(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    interpreter_options: Sequence[str] = (),
    **options: Any,
) -> CommandProcess:
    """Start `cenote ARGUMENTS`, its output in pipes; options are Popen's. Use it in a `with` block.

    It ends with this process at the latest.
    """
    command = [sys.executable, *interpreter_options, "-m", "cenote.cli.child", str(os.getpid())]
    command += ["cenote.cli.main", *arguments]
    given = clean_environment() if environment is None else dict(environment)
    return CommandProcess(command, **{**PIPES, "env": given, **options})


def run_cenote(
    *arguments: str,
    stdin: bytes | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = CLI_TIMEOUT_S,
    **options: Any,
) -> subprocess.CompletedProcess[bytes]:
    """Run `cenote ARGUMENTS` to its end, killed after `timeout_s`."""
    if stdin is not None:
        options["stdin"] = subprocess.PIPE
    with start_cenote(*arguments, environment=environment, **options) as process:
        out, err = process.communicate(stdin, timeout=timeout_s)
    return subprocess.CompletedProcess(list(arguments), process.returncode, out, err)


# ---- programs of the tests' own -----------------------------------------------------------------


def start_program(
    name: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    place: Place | None = None,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start the program `name` of `programs.py`, which ends with this process at the latest.

    Its standard input and output are pipes; options are Popen's. The caller ends it: see
    `remote.Remote`.
    """
    given = clean_environment() if environment is None else dict(environment)
    paths = [str(Path(__file__).parent), given.get("PYTHONPATH", "")]
    given["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [*(place.launcher if place else ()), sys.executable]
    command += ["-m", "cenote.cli.child", str(os.getpid())]
    settings: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "env": given,
        **options,
    }
    return subprocess.Popen([*command, "programs", name, *arguments], **settings)


def start_module(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS` as `Daemon` would, but with its output in pipes."""
    command = [sys.executable, "-m", "cenote.cli.child", str(os.getpid()), module, *arguments]
    return subprocess.Popen(command, **{**PIPES, "env": clean_environment(), **options})


def run_module(
    module: str, *arguments: str, timeout_s: float = READY_TIMEOUT_S
) -> subprocess.CompletedProcess[bytes]:
    """Run a daemon that is to end by itself; killed after `timeout_s`."""
    with start_module(module, *arguments) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess([module, *arguments], process.returncode, out, err)
