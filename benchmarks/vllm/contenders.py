"""Engines to compare: without connector, with ours, with the peer's; each with its pool."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench_parts import HERE

from cluster import Cluster
from with_vllm.engines import Engine

sys.path.insert(0, str(HERE.parent / "peers"))

from peers import Daemons, free_port, wait_port

__all__ = ["KINDS", "Contender", "contender"]

KINDS: Final = ("none", "cenote-shm", "cenote-tcp", "mooncake-standalone", "mooncake-embedded")
POOL_BYTES: Final = 1 << 30
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass
class Contender:
    """One engine, and the processes of its pool."""

    name: str
    engine: Engine
    pool_pids: list[int] = field(default_factory=list)
    cluster: Cluster | None = None

    def pool_cpu_s(self) -> float:
        """Processor time that the pool's processes have taken so far."""
        ticks = 0
        for pid in self.pool_pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / TICKS_PER_S


@contextlib.contextmanager
def contender(
    kind: str,
    model: Path,
    scratch: Path,
    llm: Mapping[str, object],
    peer_bin: Path,
    apart: bool = False,
) -> Iterator[Contender]:
    """`kind`: of KINDS. `peer_bin`: where `mooncake_master` is. `apart`: the engine has one core,
    everything else another one."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        if apart:
            stack.callback(os.sched_setaffinity, 0, cores)
            os.sched_setaffinity(0, cores[1:])
        cluster: Cluster | None = None
        pids: list[int] = []
        transfer: dict[str, object] | None = None
        environment: dict[str, str] = {}
        if kind.startswith("cenote"):
            cluster = stack.enter_context(Cluster(stores=1, dram_bytes=POOL_BYTES))
            pids = [process.pid for process in cluster.processes]
            transfer = our_transfer(cluster, kind.removeprefix("cenote-"))
        elif kind != "none":
            directory = scratch / kind
            directory.mkdir(parents=True)
            pids, environment = stack.enter_context(peer_pool(kind, directory, peer_bin))
            transfer = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
        if apart:
            os.sched_setaffinity(0, cores[:1])
            environment = {**environment, "OMP_NUM_THREADS": "1"}
        engine = Engine(
            model,
            transfer=transfer,
            llm=llm,
            program=HERE / "bench_engine.py",
            environment=environment,
        )
        stack.enter_context(engine)
        if apart:
            os.sched_setaffinity(0, cores)
            for pid in children_of(engine.pid):
                for task in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(task), cores[1:])
        yield Contender(kind, engine, pids, cluster)


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def our_transfer(cluster: Cluster, transport: str) -> dict[str, object]:
    transports = ["shm", "tcp"] if transport == "shm" else [transport]
    return {
        "kv_connector": "CenoteStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "master": cluster.lane,
            "transports": transports,
            "staging_bytes": "256MiB",
        },
    }


@contextlib.contextmanager
def peer_pool(
    kind: str, directory: Path, peer_bin: Path
) -> Iterator[tuple[list[int], dict[str, str]]]:
    """The peer's master, and its client daemon where the pool is not in the engine. Its pids, and
    what the engine's environment needs."""
    daemons = Daemons()
    daemons.dir = str(directory)
    rpc, metrics, client = free_port(), free_port(), free_port()
    try:
        daemons.spawn(
            "master",
            [
                str(peer_bin / "mooncake_master"),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={rpc}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={metrics}",
            ],
        )
        wait_port(rpc)
        embedded = kind.endswith("embedded")
        if not embedded:
            daemons.spawn(
                "client",
                [
                    str(peer_bin / "mooncake_client"),
                    "--host=127.0.0.1",
                    f"--port={client}",
                    f"--global_segment_size={POOL_BYTES >> 20}MB",
                    f"--master_server_address=127.0.0.1:{rpc}",
                    "--metadata_server=P2PHANDSHAKE",
                    "--protocol=tcp",
                    "--threads=2",
                ],
            )
            wait_port(client)
        config = directory / "config.json"
        config.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": f"127.0.0.1:{rpc}",
                    "protocol": "tcp",
                    "device_name": "",
                    "mode": "embedded" if embedded else "standalone-store",
                    "global_segment_size": POOL_BYTES if embedded else 0,
                    "local_buffer_size": 256 << 20,
                }
            )
        )
        yield (
            list(daemons.pids.values()),
            {"MOONCAKE_CONFIG_PATH": str(config), "GLOG_minloglevel": "2"},
        )
    finally:
        daemons.stop()
