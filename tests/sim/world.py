"""One simulated cluster: its parts, its life, and what it must have come to at the end."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from cenote.api.errors import CenoteError, Unavailable
from cenote.api.keys import digest_key
from cenote.api.rows import UNIT_BYTES
from cenote.client.plan.spares import Spares
from cenote.master.effects import GoneReason
from cenote.master.state_config import StateConfig
from cenote.store.agent_steps import Failed
from cenote.store.slot_format import SLOT_BYTES
from cenote.transport.base import SealBatch
from sim.clients import ClientProcess, key_bytes
from sim.contents import DOMAIN, KEYS_EACH, draw_namespaces
from sim.data_connection import Write
from sim.endings import check_contents, check_liveness, check_rest, check_unused
from sim.faults import ALL_FAULTS, Faults
from sim.kv import KvWeather
from sim.lanes import SimLaneClient, SimLaneSocket
from sim.loop import START_S, Loop, Party, Violation
from sim.machine import inhabited, uncollected
from sim.masters import MASTER, RESET, LaneConnection, MasterProcess, SimLog
from sim.network import Network
from sim.oracle import Oracle
from sim.quotas import QuotaAdmin
from sim.stores import SLOTS_FIRST, SegmentFile, StoreHost, StoreProcess
from sim.takeover import SharedMaster, share_metadata
from sim.takeover_faults import TAKEOVER, TakeoverFaults
from sim.tiers import TIERS, Tiers

__all__ = ["Options", "Report", "World", "simulate"]

ACTIVE_S: Final = 8.0
RECOVERY_S: Final = 6.0
REST_S: Final = 2.0
FAREWELL_S: Final = 5.0
KIB: Final = 1 << 10


@dataclass(frozen=True)
class Options:
    seed: int
    steps: int = 1 << 40
    """Events before the faults end; a run that fails earlier ends earlier."""
    faults: frozenset[str] = ALL_FAULTS
    active_s: float = ACTIVE_S


@dataclass
class Report:
    seed: int
    failure: str
    """Empty where all went well."""
    events: int
    virtual_s: float
    trace: list[str]
    fingerprint: int
    counts: dict[str, int]
    faults: frozenset[str] = ALL_FAULTS

    @property
    def reproduction(self) -> str:
        more = "".join(f" --{kind}" for kind in sorted(self.faults - ALL_FAULTS))
        return f"python tests/sim/run.py --seed {self.seed}{more}"


class World:
    """See the module."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.loop = loop = Loop(options.seed)
        dice = loop.dice
        self.hosts = {
            f"h{i}": StoreHost(f"h{i}") for i in range(1, dice.choice((1, 2, 2, 3, 3)) + 1)
        }
        self.boots: dict[str, int] = {}
        self.client_hosts: dict[str, str] = {}
        self.network = Network(loop, self.host_of)
        self.files: dict[bytes, Any] = {}
        """By incarnation: a `SegmentFile`, or `DiskFile`, each."""
        self.oracle = Oracle(self)
        self.namespaces = draw_namespaces(options.faults, dice)
        self.quotas = QuotaAdmin(self, self.namespaces[0])
        self.log = SimLog()
        self.master_names = [MASTER]
        self.masters: dict[str, MasterProcess] = {}
        """Those that live."""
        self.kv: KvWeather | None = None
        """What they share, if they are several: several_masters."""
        self.clients: dict[str, ClientProcess] = {}
        self.calm = False
        self.slack_s = 0.0
        self.keys = dice.choice((4, 12, 40, 60))
        self.sizes = dice.choice((4, 7, 9))
        self.haste = dice.choice((0.0, 0.02, 0.1))
        """How often a task is stopped for a moment between two steps."""
        self.slowness_s = dice.choice((20e-6, 200e-6, 2e-3))
        self.crawl_share = dice.choice((0.0, 0.02, 0.1))
        self.location_ttl_ms = dice.choice((100, 500))
        self.seeds: set[int] = set()
        self.pending_seals: dict[str, list[SealBatch]] = {}
        self.segment_bytes = dice.choice((32, 32, 64)) * KIB
        self.state_config = StateConfig(
            objects_max=4096,
            session_ttl_s=2.0,
            lease_ttl_default_s=0.5,
            lease_ttl_max_s=2.0,
            node_dead_s=1.0,
            node_forget_s=8.0,
            suspect_s=0.5,
            adoption_window_s=30.0,
            session_granted_share_max=0.5,
            run_bytes=dice.choice((4 * KIB, 1024 * KIB)),
            spares_share_max=0.5,
            spares_free_share_max=0.5,
            dedup_domains=DOMAIN if len(self.namespaces) > 1 else "",
        )
        self._processes = 0
        # There are few puts here.
        Spares.credit_needed = dice.choice((1, 8))
        self.sockets_hidden_until_s = 0.0
        several = TAKEOVER in options.faults
        if several:
            share_metadata(self)
        self.tiers = Tiers(self) if TIERS in options.faults else None
        if self.tiers is not None:
            self.state_config = self.tiers.config(self.state_config)
            # Memory that is soon full, so that what was copied goes, and comes back.
            self.keys = max(self.keys, 40)
            self.segment_bytes = dice.choice((12, 16, 32)) * KIB
        self.faults = (TakeoverFaults if several else Faults)(self, options.faults)

    # ---- names and places ---------------------------------------------------------------------

    def host_of(self, name: str) -> str:
        return self.client_hosts.get(name, name)

    def boot_id_of(self, host: str) -> str:
        known = self.hosts.get(host)
        return f"{host}.1" if known is None else known.boot_id

    def new_party(self, name: str) -> Party:
        dice = self.loop.dice
        return Party(name, dice.uniform(-500, 5000), dice.uniform(0.99, 1.01))

    def new_number(self) -> int:
        self._processes += 1
        return self._processes

    def learn_seed(self, seed: int) -> None:
        if seed in self.seeds:
            return
        self.seeds.add(seed)
        for key in range(KEYS_EACH * len(self.namespaces)):
            self.oracle.digests.setdefault(key, set()).add(digest_key(key_bytes(key), seed))

    # ---- small chances ------------------------------------------------------------------------

    def step(self) -> None:
        """A process may be stopped between any two steps."""
        if self.haste and self.loop.dice.random() < self.haste:
            self.loop.sleep(self.loop.dice.expovariate(1 / 0.005))

    def crawl_s(self) -> float:
        """What a piece takes where a transfer is very slow, as some are while there are faults."""
        return 0.15 if not self.calm and self.loop.dice.random() < self.crawl_share else 0.0

    def piece_delay_s(self, crawl_s: float = 0.0) -> float:
        return self.loop.dice.expovariate(1 / (crawl_s or self.slowness_s))

    def write_begins(self, write: Write, *parties: Party) -> None:
        """The moment that faults like best."""
        write.crawl_s = self.crawl_s()
        self.oracle.write_begun(write)
        self.faults.strike_near(write, *parties)

    @contextlib.contextmanager
    def sealing(self, host: str, batch: SealBatch) -> Iterator[None]:
        pending = self.pending_seals.setdefault(host, [])
        pending.append(batch)
        try:
            yield
        finally:
            pending.remove(batch)

    def answers(self, address: str, asker: str) -> bool:
        """Whether a store process there answers a hello at once."""
        host = self.hosts[address.partition(":")[0]]
        process = host.process
        if process is None or process.address != address:
            return False
        awake = process.party.alive and not process.party.paused
        return awake and not self.network.is_cut(asker, host.name)

    # ---- processes ----------------------------------------------------------------------------

    @property
    def master(self) -> MasterProcess | None:
        """The one that leads, as far as that can be said from outside."""
        leading = [master for master in self.masters.values() if master.leads]
        return max(leading, key=lambda master: master.service.epoch, default=None)

    def start_master(self, name: str = MASTER) -> None:
        if name in self.masters:
            return
        party = self.new_party(name)
        kind = MasterProcess if self.kv is None else SharedMaster
        self.masters[name] = master = kind(self, self.log, party)
        master.start()

    def end_master(self, master: MasterProcess, *, orderly: bool) -> None:
        if self.masters.get(master.name) is not master:
            return
        self.loop.note(master.name, "stops" if orderly else "is killed")
        del self.masters[master.name]
        if orderly:
            master.stop()
        else:
            self.loop.kill(master.party)
        self.log.leader = None
        for signal in list(master.open_calls):
            error = Unavailable("the master is gone")
            error.maybe_executed = True
            self.loop.after(self.network.delay_s(), partial(signal.set, error))

    def new_file(self, host: StoreHost, index: int) -> SegmentFile:
        dice = self.loop.dice
        size = self.segment_bytes
        file = SegmentFile(
            f"{host.name}[{index}]",
            dice.randbytes(16),
            size,
            np.zeros(size, np.uint8),
            bytearray((SLOTS_FIRST + size // SLOT_BYTES) * SLOT_BYTES),
        )
        file.ready_bytes = dice.choice((size, size, size // 2)) // UNIT_BYTES * UNIT_BYTES
        self.files[file.incarnation] = file
        return file

    def start_store(self, host: StoreHost) -> None:
        if host.party is not None and host.party.alive:
            return
        if not host.files:
            if host.disk is None or host.disk.file is None:
                host.node_uuid = self.loop.dice.randbytes(16)
            count = self.loop.dice.choice((1, 1, 2))
            host.files = [self.new_file(host, i) for i in range(count)]
        party = host.party = self.new_party(host.name)
        number = self.new_number()

        def begin() -> None:
            process = StoreProcess(self, host, party, number)
            host.process = process
            _watch_agent(process)

        self.loop.note(host.name, f"starts as process {number}")
        self.loop.spawn(party, "start", begin)

    def start_client(self, name: str, host: str) -> None:
        self.client_hosts[name] = host
        party = self.new_party(name)
        client = ClientProcess(self, party, host, int(name[1:]))
        self.clients[name] = client
        users = self.loop.dice.choice((1, 1, 2))
        self.loop.spawn(party, "main", lambda: client.run(users))

    # ---- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        dice = self.loop.dice
        for name in self.master_names:
            self.start_master(name)
        for host in self.hosts.values():
            self.start_store(host)
        places = [*self.hosts, "x1"]
        for number in range(1, dice.choice((2, 3, 4)) + 1):
            self.start_client(f"c{number}", dice.choice(places))

    def recover(self) -> None:
        """All faults end, and everything that is dead begins again."""
        self.calm = True
        self.loop.note("world", "all faults end")
        self.faults.end()
        self.slowness_s = 20e-6
        self.network.heal()
        if self.kv is not None:
            self.kv.calm()
        for name in self.master_names:
            self.start_master(name)
            self.loop.unpause(self.masters[name].party)
        for host in self.hosts.values():
            if host.party is None or not host.party.alive:
                self.start_store(host)
            else:
                self.loop.unpause(host.party)
        for client in self.clients.values():
            self.loop.unpause(client.party)

    def leader(self) -> MasterProcess:
        if self.master is None:
            raise Violation("no master leads after all faults have ended")
        return self.master

    def living_clients(self, key: int | None = None) -> list[ClientProcess]:
        """All, or those of a key's namespace."""
        living = [c for c in self.clients.values() if c.party.alive and c.client is not None]
        return [c for c in living if key is None or key // KEYS_EACH == c.space]

    def run(self) -> None:
        loop = self.loop
        self.start()
        self.faults.begin()
        end_s = START_S + self.options.active_s
        loop.run(end_s, self.options.steps)
        self.recover()
        loop.run(loop.now_s + RECOVERY_S)
        check_contents(self)
        check_liveness(self)
        if self.master is not None and "metadata-loss" not in self.options.faults:
            self.quotas.check(self.master.service.state)
        loop.run(loop.now_s + REST_S)
        check_unused(self)
        for client in self.living_clients():
            loop.spawn(client.party, "close", client.sdk.close)
        loop.run(loop.now_s + FAREWELL_S)
        check_rest(self)

    def reset_namespace(self) -> None:
        """An administrator's command."""
        began_s = self.loop.now_s
        several = len(self.namespaces) > 1
        name = self.loop.dice.choice(self.namespaces) if several else self.namespaces[0]

        def reply(answer: bytes | CenoteError) -> None:
            if not isinstance(answer, CenoteError):
                self.oracle.reset(name, began_s)

        master = self.master
        if master is not None:
            self.loop.note("admin", f"resets namespace {name}")
            connection = LaneConnection()
            self.loop.after(
                0.0,
                lambda: master.receive(connection, RESET, name.encode(), reply, "admin"),
                master.party,
            )


def _watch_agent(process: StoreProcess) -> None:
    """A bug in the daemon's agent is tried again there, and fails the run here."""
    core = process.agent._core
    handle = core.handle

    def watched(event: Any) -> Any:
        failed = isinstance(event, Failed) and event.error.reason == "InternalError"
        if failed and not process.agent._stopping.is_set():
            raise Violation(f"the agent of {process.host.name} failed: {event.error}")
        return handle(event)

    core.handle = watched  # type: ignore[method-assign]


def simulate(options: Options) -> Report:
    """Run one seed."""
    with uncollected():
        return _simulate(options)


def _simulate(options: Options) -> Report:
    world = World(options)
    loop = world.loop

    def is_mapped(segment: Any, session_id: bytes) -> bool:
        return bool(segment.file.mapped_by[session_id] > 0)

    def boot_id() -> str:
        return world.boot_id_of(world.host_of(loop.present_party().name))

    failure = ""

    def open_lane(
        address: Any, hello: bytes, until_s: float, clock: Any, **_: object
    ) -> SimLaneSocket:
        return SimLaneSocket.open(world, address, hello, until_s, clock)

    more = () if world.tiers is None else world.tiers.places()
    with inhabited(loop, boot_id, is_mapped, partial(SimLaneClient, world), open_lane, more):
        try:
            world.run()
        except Violation as violation:
            failure = str(violation)
        except Exception:  # a bug anywhere, of which the report tells all that is known
            failure = traceback.format_exc()
        finally:
            for client in list(world.clients.values()):
                loop.kill(client.party)
            for host in world.hosts.values():
                if host.party is not None:
                    loop.kill(host.party)
            for master in world.masters.values():
                loop.kill(master.party)
    oracle = world.oracle
    counts = {
        "calls": sum(c.calls for c in world.clients.values()),
        "acks": oracle.acks,
        "hits": oracle.hits,
        "reads": oracle.reads,
        "lost": oracle.lost,
        "leaders": oracle.leaders,
        "faults": world.faults.count,
        "evicted": list(oracle.gone.values()).count(GoneReason.EVICTED),
        "references": oracle.references,
        "foreign": oracle.foreign_references,
    }
    if world.tiers is not None:
        counts |= world.tiers.counts
    return Report(
        options.seed,
        failure,
        loop.events,
        loop.now_s - START_S,
        list(loop.log),
        loop.fingerprint,
        counts,
        options.faults,
    )
