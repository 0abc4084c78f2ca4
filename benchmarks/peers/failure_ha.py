"""Pools with two masters over an etcd of one member: ours and the peer's.

Defaults on both sides, but for what turns high availability on, and everybody is given etcd's
address. The peer's metadata die with its leader unless `--enable_oplog` is set; `MooncakeOplog` has
it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from failure_pools import Cenote, Mooncake, Process
from peers import HERE, MOONCAKE_VENV, free_port

sys.path.append(str(HERE.parents[1] / "tests"))  # who starts etcd for tests starts it here

from etcd import EtcdCluster

__all__ = ["HA_POOLS", "MASTERS"]

MASTERS = 2
LEADER_LIMIT_S = 60
LEADER_KEYS = {
    "mooncake": "mooncake-store/mooncake_cluster/master_view",
    "cenote": "/cenote/leader",
}


class HighlyAvailable:
    """What both have in common; beside `Pool`, whose master is any of these."""

    etcd: EtcdCluster | None = None

    def start_master(self) -> Process:
        self.etcd = EtcdCluster(Path(self.directory) / "etcd")
        self.etcd.__enter__()
        self.masters: dict[int, tuple[int, Process]] = {}
        for number in range(MASTERS):
            rpc, admin = free_port(), free_port()
            argv = self.master_argv(rpc, admin)
            process = Process(f"master{number}", argv, self.directory)
            self.masters[rpc] = (admin, process)
            self.extra.append(process)
        self.admin, process = self.leader()
        return process

    def leader(self) -> tuple[int, Process]:
        """(its port for people, it), as etcd has it; waited for."""
        end = time.monotonic() + LEADER_LIMIT_S
        while time.monotonic() < end:
            found = self.etcd.ctl("get", "--print-value-only", LEADER_KEYS[self.peer]).strip()
            if found.startswith("{"):
                found = json.loads(found)["addresses"][0]
            if found:
                return self.masters[int(found.rpartition(":")[2])]
            time.sleep(0.1)
        raise RuntimeError(f"{self.label}: no master leads")

    @property
    def etcd_endpoint(self) -> str:
        return f"127.0.0.1:{self.etcd.members[0].port}"

    @property
    def address(self) -> str:
        """What clients and nodes are given."""
        return f"etcd://{self.etcd_endpoint}"

    def stop(self) -> None:
        super().stop()
        if self.etcd is not None:
            self.etcd.close()


class MooncakeHa(HighlyAvailable, Mooncake):
    label = "mooncake, HA"

    def master_argv(self, rpc, admin) -> list[str]:
        return [
            str(MOONCAKE_VENV / "bin" / "mooncake_master"),
            "--enable_ha=true",
            f"--etcd_endpoints={self.etcd_endpoint}",
            "--rpc_address=127.0.0.1",
            f"--rpc_port={rpc}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={admin}",
            *self.flags,
        ]


class MooncakeOplog(MooncakeHa):
    label = "mooncake, HA with its oplog"
    flags = ("--enable_oplog=true",)


class CenoteHa(HighlyAvailable, Cenote):
    label = "cenote, 2 masters"

    def master_argv(self, rpc, admin) -> list[str]:
        return [
            os.fspath(Path(sys.executable).parent / "cenote-master"),
            f"--listen=127.0.0.1:{rpc}",
            f"--grpc=127.0.0.1:{admin}",
            f"--metadata={self.address}",
        ]


HA_POOLS = {"mooncake-ha": MooncakeHa, "mooncake-oplog": MooncakeOplog, "cenote-ha": CenoteHa}
