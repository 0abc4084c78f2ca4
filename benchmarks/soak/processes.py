"""The processes of a soak: each can be ended, stopped, begun anew."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from board import Board
from ledger import Ledger

from cenote.api.errors import CenoteError
from cenote.cli.connect import Admin
from cenote.cli.daemons import Daemon, DaemonSpec, clean_environment
from cenote.cli.specs import master_spec, store_spec

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"

__all__ = ["ETCD_DIRECTORY", "Party", "Pool"]

ETCD_DIRECTORY = "etcd"
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
STATUS_TIMEOUT_S = 5.0
ENDED_IN_ORDER = ("client", "store", "master", "etcd")


class Party:
    """One process that can be disturbed, through all its lives."""

    def __init__(self, name: str, role: str, daemon: Daemon, client: int = -1) -> None:
        self.name = name
        self.role = role
        self.daemon = daemon
        self.client = client
        """Its number; -1: no client."""
        self.lives = 0
        self.down = False
        """Ended by us, to be begun again."""
        self.stopped = False
        self.until_s = 0.0

    @property
    def disturbed(self) -> bool:
        return self.down or self.stopped

    @property
    def running(self) -> bool:
        return self.daemon.is_running

    def start(self) -> None:
        self.daemon.start()
        self.lives += 1
        self.down = False

    def send(self, number: signal.Signals) -> None:
        self.daemon.send_signal(number)


@dataclass
class Pool:
    """Everything of one soak, in `directory`; object memory is in `memory`."""

    directory: Path
    memory: Path
    seed: int
    options: dict[str, Any]
    """`clients`: for each its options; `dram_bytes`, `stores`, `calls_per_s` ...; `etcd_members`
    and `masters`: 0 and 1 for a pool with its metadata in files."""
    parties: list[Party] = field(default_factory=list)
    lane: str = ""
    """Of all masters, with commas between."""
    grpc: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Until the daemons are ready and the clients run."""
        environment = clean_environment()
        metadata = self._start_etcd(environment) or f"file:{self.directory}/metadata"
        for number in range(self.options["masters"]):
            spec = master_spec(metadata=metadata)
            spec.name = "master" if self.options["masters"] == 1 else f"master{number}"
            ready = self._add(spec, "master", environment).daemon.wait_ready(READY_TIMEOUT_S)
            lane, grpc = (ready[name].removeprefix("tcp://") for name in ("lane", "grpc"))
            spec.flags.update(listen=lane, grpc=grpc)  # the same after a restart
            self.lane = f"{self.lane},{lane}".removeprefix(",")
            self.grpc.append(grpc)
        for number in range(self.options["stores"]):
            spec = store_spec(
                f"s{number}",
                master=self.lane,
                dram_bytes=self.options["dram_bytes"],
                dram_directory=self.memory,
                socket_directory=self.directory,
                extra={"failure-domain": f"domain{number}"},
            )
            self._add(spec, "store", environment)
        for party in self.of("store"):
            party.daemon.wait_ready(READY_TIMEOUT_S)
        for number in range(len(self.options["clients"])):
            Ledger(self.directory / f"ledger{number}", self.options["keys"], owner=True)
        environment = environment | {"PYTHONPATH": str(HERE)}
        for number in range(len(self.options["clients"])):
            self._add(self._client_spec(number), "client", environment, number)

    def _start_etcd(self, environment: dict[str, str]) -> str:
        """The URL of the metadata, '' where there is to be no etcd."""
        if not self.options["etcd_members"]:
            return ""
        sys.path.append(str(TESTS))
        from etcd import EtcdCluster

        directory = self.directory / ETCD_DIRECTORY
        cluster = EtcdCluster(directory, members=self.options["etcd_members"])
        for member in cluster.members:
            spec = DaemonSpec(f"etcd-{member.name}", "etcd_member", {}, before=member.command)
            self._add(spec, "etcd", environment | {"PYTHONPATH": str(HERE)})
        cluster.wait_healthy()
        return cluster.url

    def _client_spec(self, number: int) -> DaemonSpec:
        options = {
            **{k: self.options[k] for k in ("keys", "pinned_keys", "calls_per_s")},
            "location_ttl_s": self.options["location_ttl_s"],
            "clients": len(self.options["clients"]),
            "client": self.options["clients"][number],
        }
        words = [str(self.directory), str(number), self.lane]
        words += [str(self.seed * 1000 + number), json.dumps(options)]
        return DaemonSpec(f"c{number}", "soak_client", {}, before=words)

    def _add(
        self, spec: DaemonSpec, role: str, environment: dict[str, str], client: int = -1
    ) -> Party:
        party = Party(
            spec.name, role, Daemon(spec, self.directory, environment=environment), client
        )
        self.parties.append(party)
        party.start()
        return party

    def of(self, role: str) -> list[Party]:
        return [party for party in self.parties if party.role == role]

    def status(self) -> Any:
        """The leading master's GetStatusResponse, None where there is no answer."""
        with (
            contextlib.suppress(CenoteError),
            Admin(self.grpc, deadline_s=STATUS_TIMEOUT_S) as pool,
        ):
            status = pool.status()
            return status if status.role == "leader" else None
        return None

    def end(self, board: Board) -> dict[str, int | None]:
        """Let clients end by themselves, then the daemons; exit codes by name."""
        board.give("stop", 1)
        for party in self.parties:
            party.send(signal.SIGCONT)
        codes: dict[str, int | None] = {}
        for party in self.of("client"):
            codes[party.name] = party.daemon.wait(STOP_TIMEOUT_S)
        for party in (p for role in ENDED_IN_ORDER for p in self.of(role)):
            if party.running:
                code = party.daemon.stop(STOP_TIMEOUT_S)
                codes.setdefault(party.name, code)
        return codes

    def wait_for(self, what: Any, timeout_s: float) -> bool:
        """Poll; whether it came to be."""
        end_s = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > end_s:
                return False
            time.sleep(0.1)
        return True
