"""The pools that `faults.py` harms: ours, and the peer's (its wheel is in vLLM's environment)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from bench_parts import HERE

from cluster import Cluster

sys.path.insert(0, str(HERE.parent / "peers"))

from peers import Daemons, free_port, wait_port

__all__ = ["POOLS", "FaultyPool", "open_pool"]

POOLS: Final = ("cenote", "mooncake")
OWNERS: Final = 2
OWNER_BYTES: Final = 512 << 20


class FaultyPool(Protocol):
    """Owners of blocks that can be killed, and a master that can be stopped."""

    transfer: dict[str, object]
    """As vLLM's KVTransferConfig, less the policy."""
    environment: dict[str, str]
    """Of the engine."""
    kills: list[tuple[float, str]]
    """When which owner was killed, and was gone; on the monotonic clock."""

    def kill_owners(self, together: bool = True) -> None:
        """All of them, at the same time or each when the one before is gone; returns when all are
        gone."""

    def hang_owners(self) -> None:
        """Stop all of them (SIGSTOP): their connections stay, as those of a process do that was
        killed and is not gone yet."""

    def revive(self) -> None:
        """Owners again, with nothing in them."""

    def stop_master(self) -> None: ...
    def continue_master(self) -> None: ...


@dataclass
class CenotePool:
    """A master and two store daemons; by TCP, so that a daemon's bytes die with it."""

    cluster: Cluster
    share: float | None
    kills: list[tuple[float, str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def transfer(self) -> dict[str, object]:
        extra: dict[str, object] = {
            "master": self.cluster.lane,
            "transports": ["tcp"],
            "staging_bytes": "256MiB",
        }
        if self.share is not None:
            extra["load_share"] = self.share
        return {
            "kv_connector": "CenoteStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def kill_owners(self, together: bool = True) -> None:
        self.kills.append((time.monotonic(), "owners killed"))
        for store in self.cluster.stores if together else ():
            store.send_signal(signal.SIGKILL)
        for store in self.cluster.stores:
            store.kill()
            self.kills.append((time.monotonic(), f"{store.name} is gone"))

    def hang_owners(self) -> None:
        self.kills.append((time.monotonic(), "owners stopped"))
        for store in self.cluster.stores:
            store.send_signal(signal.SIGSTOP)

    def revive(self) -> None:
        for store in self.cluster.stores:
            store.restart(signal.SIGKILL)
        self.cluster.wait_alive(len(self.cluster.stores))
        self.kills.clear()

    def stop_master(self) -> None:
        self.cluster.master.pause()

    def continue_master(self) -> None:
        self.cluster.master.resume()


class MooncakePool:
    """A master, and two client daemons that own the blocks (mode standalone-store)."""

    def __init__(self, directory: Path, bin_: Path) -> None:
        self._bin = bin_
        self._daemons = Daemons()
        self._daemons.dir = str(directory)
        self._started = 0
        self._owners: list[str] = []
        self._rpc = free_port()
        self.kills: list[tuple[float, str]] = []
        metrics = free_port()
        self._daemons.spawn(
            "master",
            [
                str(bin_ / "mooncake_master"),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self._rpc}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={metrics}",
            ],
        )
        wait_port(self._rpc)
        config = directory / "config.json"
        config.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": f"127.0.0.1:{self._rpc}",
                    "protocol": "tcp",
                    "device_name": "",
                    "mode": "standalone-store",
                    "global_segment_size": 0,
                    "local_buffer_size": 256 << 20,
                }
            )
        )
        self.environment = {"MOONCAKE_CONFIG_PATH": str(config), "GLOG_minloglevel": "3"}
        self.transfer: dict[str, object] = {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
        }
        self.revive()

    def revive(self) -> None:
        if self._owners:
            self.kill_owners()
        self._owners = [self._start_owner() for _ in range(OWNERS)]
        self.kills.clear()

    def _start_owner(self) -> str:
        self._started += 1
        name, port = f"owner{self._started}", free_port()
        self._daemons.spawn(
            name,
            [
                str(self._bin / "mooncake_client"),
                "--host=127.0.0.1",
                f"--port={port}",
                f"--global_segment_size={OWNER_BYTES >> 20}MB",
                f"--master_server_address=127.0.0.1:{self._rpc}",
                "--metadata_server=P2PHANDSHAKE",
                "--protocol=tcp",
                "--threads=2",
            ],
        )
        wait_port(port)
        return name

    def kill_owners(self, together: bool = True) -> None:
        pids = [self._daemons.pids[name] for name in self._owners]
        owners = [process for process in self._daemons.processes if process.pid in pids]
        self.kills.append((time.monotonic(), "owners killed"))
        for process in owners if together else ():
            process.kill()
        for process in owners:
            process.kill()
            process.wait(30)
            self.kills.append((time.monotonic(), f"process {process.pid} is gone"))

    def hang_owners(self) -> None:
        self.kills.append((time.monotonic(), "owners stopped"))
        for name in self._owners:
            os.kill(self._daemons.pids[name], signal.SIGSTOP)

    def stop_master(self) -> None:
        os.kill(self._daemons.pids["master"], signal.SIGSTOP)

    def continue_master(self) -> None:
        os.kill(self._daemons.pids["master"], signal.SIGCONT)

    def close(self) -> None:
        self.continue_master()
        self._daemons.stop()


@contextlib.contextmanager
def open_pool(
    kind: str, directory: Path, peer_bin: Path, share: float | None
) -> Iterator[FaultyPool]:
    """`kind`: of POOLS. `peer_bin`: where `mooncake_master` is. `share`: our `load_share`."""
    if kind == "cenote":
        with Cluster(stores=OWNERS, dram_bytes=OWNER_BYTES) as cluster:
            yield CenotePool(cluster, share)
        return
    directory.mkdir(parents=True)
    pool = MooncakePool(directory, peer_bin)
    try:
        yield pool
    finally:
        pool.close()
