"""Peers of the side-by-side benchmark, and what an adapter is.

An adapter class has
    name, python                 label; interpreter for its workers
    node_as_worker               True: the remote segment lives in a worker process (role "node")
    start(workdir, segment_bytes), stop()   daemons; `pids` maps label -> pid, "master" among them
    env(), cfg()                 extra environment; JSON handed to open_store in the worker
    open_store(cfg, role, segment_bytes, buffer_bytes) -> Store
and a Store has put, get, alloc(nbytes) -> address of registered memory, put_from, get_into,
batch_put_from, batch_get_into, exist, batch_exist, remove_all, close; optionally
forget_locations() (drop what is cached about placement) and remove_first(base, n).
Standard library only: workers of a peer run in that peer's own interpreter.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import pathlib
import socket
import subprocess
import time

HERE = pathlib.Path(__file__).resolve().parent
MOONCAKE_VENV = pathlib.Path(os.environ.get("MOONCAKE_VENV", HERE / "mooncake-venv"))
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# Realistic keys of about 100 bytes.
KEY_FORMAT = "meta-llama/Llama-3.1-70B@tp_rank:0@%s"


def make_key(base: str, i: int) -> str:
    return KEY_FORMAT % f"{base}{i:064x}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_port(port: int, timeout_s: float = 15) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 0.3).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"port {port} never opened")


class Daemons:
    """Starts processes with their logs in a folder, and stops them in reverse order."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.processes: list[subprocess.Popen] = []
        self.dir = ""

    def spawn(self, label: str, argv: list[str], env: dict[str, str] | None = None, **kwargs):
        with (
            open(os.path.join(self.dir, label + ".out"), "wb") as out,
            open(os.path.join(self.dir, label + ".err"), "wb") as err,
        ):
            kwargs.setdefault("stdout", out)
            process = subprocess.Popen(
                argv,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stderr=err,
                **kwargs,
            )
        self.processes.append(process)
        self.pids[label] = process.pid
        return process

    def stop(self) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes, self.pids = [], {}


class MooncakeAdapter(Daemons):
    """Embedded client, protocol tcp; one pure-server process holds the data."""

    name = "mooncake"
    node_as_worker = True
    master_flags: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.python = str(MOONCAKE_VENV / "bin" / "python")

    def start(self, workdir: str, segment_bytes: int) -> None:
        self.dir = workdir
        self.rpc, self.metrics = free_port(), free_port()
        self.spawn(
            "master",
            [
                str(MOONCAKE_VENV / "bin" / "mooncake_master"),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self.rpc}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={self.metrics}",
                *self.master_flags,
            ],
            self.env(),
        )
        wait_port(self.rpc)

    def env(self) -> dict[str, str]:
        return {"GLOG_minloglevel": "1"}

    def cfg(self) -> dict:
        return {"master": f"127.0.0.1:{self.rpc}"}

    @staticmethod
    def open_store(cfg, role, segment_bytes, buffer_bytes):
        return MooncakeStore(cfg, role, segment_bytes, buffer_bytes)


class MooncakeDaemonAdapter(MooncakeAdapter):
    """Its daemon holds the segment; the SDK reaches it over shared memory."""

    name = "mooncake-daemon"
    node_as_worker = False
    client_flags: tuple[str, ...] = ()

    def start(self, workdir: str, segment_bytes: int) -> None:
        super().start(workdir, segment_bytes)
        self.client_port = free_port()
        self.spawn(
            "client_daemon",
            [
                str(MOONCAKE_VENV / "bin" / "mooncake_client"),
                "--host=127.0.0.1",
                f"--port={self.client_port}",
                f"--global_segment_size={segment_bytes // MIB}MB",
                f"--master_server_address=127.0.0.1:{self.rpc}",
                "--metadata_server=P2PHANDSHAKE",
                "--protocol=tcp",
                "--threads=2",
                *self.client_flags,
            ],
            self.env(),
        )
        wait_port(self.client_port)
        time.sleep(1.0)  # it listens before its segment is mounted

    def cfg(self) -> dict:
        return {**super().cfg(), "daemon": f"127.0.0.1:{self.client_port}"}

    @staticmethod
    def open_store(cfg, role, segment_bytes, buffer_bytes):
        return MooncakeStore(cfg, "dummy", segment_bytes, buffer_bytes)


def _check(results, expected) -> None:
    bad = [r for r, e in zip(results, expected, strict=True) if r != e]
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(results)} failed, first code {bad[0]}")


class MooncakeStore:
    def __init__(self, cfg, role, segment_bytes, buffer_bytes):
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        self.role = role
        self.memory = []
        if role == "dummy":
            code = self.store.setup_dummy(buffer_bytes + 600 * MIB, buffer_bytes, cfg["daemon"])
        else:
            where = "127.0.0.1", "P2PHANDSHAKE", segment_bytes, buffer_bytes, "tcp", ""
            ssd = (None, role == "node", cfg["ssd"]) if "ssd" in cfg else ()
            code = self.store.setup(*where, cfg["master"], *ssd)
        if code != 0:
            raise RuntimeError(f"setup code {code}")

    def alloc(self, nbytes):
        if self.role == "dummy":
            address = self.store.alloc_from_mem_pool(nbytes)
            if not address:
                raise RuntimeError("alloc_from_mem_pool failed")
        else:
            memory = mmap.mmap(-1, nbytes)
            self.memory.append(memory)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        code = self.store.register_buffer(address, nbytes)
        if code != 0:
            raise RuntimeError(f"register_buffer code {code}")
        return address

    def put(self, key, value):
        _check([self.store.put(key, value)], [0])

    def get(self, key):
        return self.store.get(key)

    def put_from(self, key, address, nbytes):
        _check([self.store.put_from(key, address, nbytes)], [0])

    def get_into(self, key, address, nbytes):
        return self.store.get_into(key, address, nbytes)

    def batch_put_from(self, keys, addresses, sizes):
        _check(self.store.batch_put_from(keys, addresses, sizes), [0] * len(keys))

    def batch_get_into(self, keys, addresses, sizes):
        _check(self.store.batch_get_into(keys, addresses, sizes), sizes)

    def batch_get_what_is_there(self, keys, addresses, sizes):
        """Of each whether it came."""
        results = self.store.batch_get_into(keys, addresses, sizes)
        return [got == size for got, size in zip(results, sizes, strict=True)]

    def ssd_reads(self):
        return getattr(self.store, "get_offload_rpc_read_count", lambda: -1)()

    def exist(self, key):
        return self.store.is_exist(key) == 1

    def batch_exist(self, keys):
        return self.store.batch_is_exist(keys)

    def remove_all(self):
        if self.role == "dummy":
            return self.store.remove_by_regex(".*", True)
        return self.store.remove_all(True)

    def remove_first(self, base, n):
        for i in range(n):
            self.store.remove(make_key(base, i))

    def close(self):
        self.store.close()


ADAPTERS = {c.name: c for c in (MooncakeAdapter, MooncakeDaemonAdapter)}


def load_adapter(spec: str):
    """'mooncake' or 'label=/path/file.py:ClassName' -> (label, class)."""
    if spec in ADAPTERS:
        return spec, ADAPTERS[spec]
    label, _, rest = spec.partition("=")
    path, _, class_name = rest.partition(":")
    module_spec = importlib.util.spec_from_file_location("peer_adapter", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return label, getattr(module, class_name)
