"""The processes of a soak: each can be ended, stopped, begun anew."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from board import Board
from ledger import Ledger

from cenote.cli.daemons import Daemon, DaemonSpec, clean_environment
from cenote.cli.specs import master_spec, store_spec
from cenote.v1 import admin_pb2, admin_pb2_grpc

__all__ = ["Party", "Pool"]

HERE = Path(__file__).resolve().parent
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
STATUS_TIMEOUT_S = 5.0


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
    """`clients`: for each its options; `dram_bytes`, `stores`, `calls_per_s` ..."""
    parties: list[Party] = field(default_factory=list)
    lane: str = ""
    grpc: str = ""

    def start(self) -> None:
        """Until the daemons are ready and the clients run."""
        environment = clean_environment()
        spec = master_spec(metadata=f"file:{self.directory}/metadata")
        master = self._add(spec, "master", environment)
        ready = master.daemon.wait_ready(READY_TIMEOUT_S)
        self.lane = ready["lane"].removeprefix("tcp://")
        self.grpc = ready["grpc"].removeprefix("tcp://")
        spec.flags.update(listen=self.lane, grpc=self.grpc)  # the same after a restart
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
        """The master's GetStatusResponse, None where there is no answer."""
        with grpc.insecure_channel(self.grpc) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            try:
                return stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S)
            except grpc.RpcError:
                return None

    def end(self, board: Board) -> dict[str, int | None]:
        """Let clients end by themselves, then the daemons; exit codes by name."""
        board.give("stop", 1)
        for party in self.parties:
            party.send(signal.SIGCONT)
        codes: dict[str, int | None] = {}
        for party in self.of("client"):
            codes[party.name] = party.daemon.wait(STOP_TIMEOUT_S)
        for party in (*self.of("client"), *self.of("store"), *self.of("master")):
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
