"""cenote as a peer of the benchmark: a master with the embedded `file:` backend, a store daemon."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers import Daemons, free_port, make_key

BIN = Path(sys.executable).parent


class _Cenote(Daemons):
    node_as_worker = False
    store_flags: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.python = sys.executable

    def _ready(self, label: str, *argv: str) -> None:
        """Start a daemon and wait for the line that says it serves."""
        process = self.spawn(label, [str(BIN / argv[0]), *argv[1:]], stdout=subprocess.PIPE)
        line = process.stdout.readline().decode()
        if not line.startswith("ready"):
            raise RuntimeError(f"{label} did not start: {line!r}")

    def start(self, workdir: str, segment_bytes: int) -> None:
        self.dir = workdir
        # Unix socket paths are limited to 107 bytes.
        self.sockets = tempfile.mkdtemp(prefix="cn-")
        self.lane, grpc = free_port(), free_port()
        self.grpc = f"127.0.0.1:{grpc}"
        self._ready(
            "master",
            "cenote-master",
            f"--listen=127.0.0.1:{self.lane}",
            f"--grpc=127.0.0.1:{grpc}",
            f"--socket={self.sockets}/master.sock",
            f"--metadata=file:{workdir}/metadata",
        )
        self._ready(
            "store",
            "cenote-store",
            f"--master=127.0.0.1:{self.lane}",
            f"--name=bench-{os.getpid()}-{self.name}",
            f"--dram={segment_bytes}",
            "--listen=127.0.0.1:0",
            "--grpc=127.0.0.1:0",
            f"--socket={self.sockets}/store.sock",
            "--wipe-on-exit",
            *self.store_flags,
        )

    def stop(self) -> None:
        super().stop()
        for name in os.listdir(self.sockets):
            os.unlink(os.path.join(self.sockets, name))
        os.rmdir(self.sockets)

    def env(self) -> dict[str, str]:
        return {}

    @staticmethod
    def open_store(cfg, role, segment_bytes, buffer_bytes):
        return CenoteStore(cfg)


class CenoteTcp(_Cenote):
    """Metadata over TCP, block bytes over TCP: as between two machines."""

    name = "cenote"

    def cfg(self) -> dict:
        return {"master": f"127.0.0.1:{self.lane}", "grpc": self.grpc, "transports": ["tcp"]}


class CenoteShm(_Cenote):
    """Metadata over the Unix socket, block bytes over shared memory: as on one host."""

    name = "cenote-shm"

    def cfg(self) -> dict:
        lane = f"unix://{self.sockets}/master.sock"
        return {"master": lane, "grpc": self.grpc, "transports": ["shm"]}


class CenoteStore:
    def __init__(self, cfg) -> None:
        from cenote.client import Client, RawBuffer

        self.client = Client(
            cfg["master"], transports=tuple(cfg["transports"]), namespace="bench", deadline_s=30
        )
        self.cfg, self.admin = cfg, None
        self.put_bytes, self.copied_before = 1 << 60, 0
        self.raw = RawBuffer
        self.keys: list[str] = []

    def alloc(self, nbytes: int) -> int:
        return self.client.alloc(nbytes).address

    def put(self, key, value) -> None:
        self.client.put(key, value)
        self.keys.append(key)

    def get(self, key):
        return self.client.get(key)

    def put_from(self, key, address, nbytes) -> None:
        self.client.put_from(key, self.raw(address, nbytes))
        self.keys.append(key)

    def get_into(self, key, address, nbytes):
        return self.client.get_into(key, self.raw(address, nbytes))

    def batch_put_from(self, keys, addresses, sizes) -> None:
        results = self.client.put_from_batch(keys, addresses=addresses, lengths=sizes)
        results.raise_for_errors()
        self.keys.extend(keys)

    def batch_get_into(self, keys, addresses, sizes) -> None:
        results = self.client.get_into_batch(keys, addresses=addresses, lengths=sizes)
        results.raise_for_errors()
        if results.hit_count != len(keys):
            raise RuntimeError("a key is missing")

    def batch_get_what_is_there(self, keys, addresses, sizes):
        results = self.client.get_into_batch(keys, addresses=addresses, lengths=sizes)
        results.raise_for_errors()
        return results.hits.tolist()

    def keep_up(self, put_bytes: int) -> None:
        """Wait until no more is left to copy than memory has room for: who puts faster than the SSD
        takes it has the oldest evicted."""
        from cenote.cli.connect import open_admin

        if self.admin is None:
            self.admin = open_admin(self.cfg["master"], self.cfg["grpc"], 30.0)
        status = self.admin.status()
        if put_bytes <= self.put_bytes:  # another round
            self.copied_before = status.demoted_bytes
        self.put_bytes = put_bytes
        ahead_max = status.capacity_bytes * 7 // 10
        while status.demoted_bytes - self.copied_before < put_bytes - ahead_max:
            time.sleep(0.004)
            status = self.admin.status()

    def ssd_reads(self) -> int:
        return self.client.stats().ssd_hits

    def exist(self, key):
        return self.client.exists(key)

    def batch_exist(self, keys):
        return self.client.exists_batch(keys).tolist()

    def forget_locations(self) -> None:
        self.client.forget_locations()

    def remove_all(self) -> int:
        keys, self.keys = self.keys, []
        for first in range(0, len(keys), 8192):
            self.client.remove_batch(keys[first : first + 8192])
        return len(keys)

    def remove_first(self, base, n) -> None:
        for first in range(0, n, 8192):
            self.client.remove_batch(
                [make_key(base, i) for i in range(first, min(n, first + 8192))]
            )

    def close(self) -> None:
        if self.admin is not None:
            self.admin.__exit__()
        self.client.close()
