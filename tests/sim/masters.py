"""The master as a process: the real service on a journal in memory, and the lane to it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from google.protobuf.message import Message

from cenote.api.errors import (
    CenoteError,
    error_from_code,
)
from cenote.master.commands import ResetNamespace
from cenote.master.effects import EpochStarted
from cenote.master.journal import SnapshotEnd, entry_range, read_entries, snapshot_records
from cenote.master.memory_backend import MemoryBackend, MemoryLog
from cenote.master.metadata import MetadataBackend, begin
from cenote.master.operations import Later, Settings
from cenote.master.pool import Pool
from cenote.master.service import MasterService
from cenote.master.state import MasterState
from cenote.master.state_config import StateConfig
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb
from sim.loop import Loop, Party, Signal
from sim.quotas import quota_command

if TYPE_CHECKING:
    from sim.world import World

__all__ = [
    "HELLO",
    "MASTER",
    "Held",
    "LaneConnection",
    "MasterProcess",
    "PartyClock",
    "Reply",
    "SimLog",
    "Waiting",
]

MASTER: Final = "master"
HELLO: Final = 0
RESET: Final = -1
SET_QUOTA: Final = -2
TICK_S: Final = 0.1
_EVERY_VIEW: Final = (1 << 64) - 1

Reply = Callable[[bytes | CenoteError], None]


class PartyClock:
    """A `Clock` of one process."""

    def __init__(self, loop: Loop, party: Party) -> None:
        self._loop = loop
        self._party = party

    def monotonic_s(self) -> float:
        return self._party.clock_s(self._loop.now_s)

    def monotonic_ns(self) -> int:
        return round(self.monotonic_s() * 1e9)

    def unix_s(self) -> float:
        return self._loop.now_s


@dataclass(slots=True)
class SimLog(MemoryLog):
    durable: int = 0
    """The last entry that a power failure can't take back."""

    def lose_power(self, keep: Callable[[int], int]) -> int:
        """Forget `keep(n)` .. n of the n records that were not synced; returns how many."""
        loose = [
            i for i, record in enumerate(self.records) if entry_range(record)[1] > self.durable
        ]
        if not loose:
            return 0
        kept = keep(len(loose))
        lost = len(loose) - kept
        del self.records[loose[0] + kept :]
        return lost

    def compact(self) -> None:
        """What the compactor does, between two lives of a master."""
        if not self.records:
            return
        state = MasterState(StateConfig(), epoch=0)
        epoch = 0
        backend = MemoryBackend(self)
        opened = begin(backend)
        self.epoch -= 1
        for entry in read_entries(opened.records, verified=True):
            if isinstance(entry, SnapshotEnd | EpochStarted):
                epoch = max(epoch, entry.epoch)
            if not isinstance(entry, SnapshotEnd):
                state.replay(entry)
        covers = backend.last_entry
        self.leader = None
        records = list(snapshot_records(state.snapshot(), covers=covers, epoch=epoch))
        self.snapshot, self.covers, self.records = records, covers, []


class SimBackend(MemoryBackend):
    """Its disk is as slow as the simulation wants."""

    shared = False
    """One master, like `file:`: what was appended survives it."""

    def __init__(self, log: SimLog) -> None:
        super().__init__(log)
        self.log = log

    @property
    def durable_entry(self) -> int:
        return self.log.durable

    def sync(self, entry: int) -> Future[None]:
        return super().sync(entry)  # whoever asked waits for `MasterProcess.synced`


@dataclass
class LaneConnection:
    """What the service wants to know of a connection."""

    session: bytes = b""
    principal: None = None
    """There are no tokens here."""
    peer: str = ""


@dataclass
class Held:
    """A heartbeat held open."""

    again: Callable[[], Message]
    answer: Reply


@dataclass
class Waiting:
    reply: Reply
    body: bytes | CenoteError
    until_durable: bool
    entry: int = 0
    """Which must be durable; 0: all that was decided."""


@dataclass
class MasterProcess:
    """One life of the master. Messages are carried out one by one; what was decided is appended
    to the journal before any reply leaves, sometimes a moment later and for several at once."""

    world: World
    log: SimLog
    party: Party
    service: MasterService = field(init=False)
    """While it leads."""
    out: list[Waiting] = field(default_factory=list)
    held: dict[int, list[Held]] = field(default_factory=dict)
    open_calls: dict[Signal, str] = field(default_factory=dict)
    flush_is_due: bool = False

    @property
    def name(self) -> str:
        return self.party.name

    @property
    def leads(self) -> bool:
        return True

    @property
    def pool(self) -> Pool:
        """All that it knows, while it leads."""
        return self.service.state._pool

    def settings(self) -> Settings:
        return Settings(
            addresses=(f"{self.name}:1",),
            location_ttl_ms=self.world.location_ttl_ms,
            heartbeat_interval_ms=300,
        )

    def make_service(self, backend: MetadataBackend, config: StateConfig) -> MasterService:
        loop = self.world.loop
        return MasterService(
            backend,
            config,
            self.settings(),
            clock=PartyClock(loop, self.party),
            draw_seed=lambda: loop.dice.getrandbits(64),
        )

    def start(self) -> None:
        pool_id = self.world.loop.dice.randbytes(16)
        config = replace(self.world.state_config, pool_id=pool_id)
        service = self.make_service(SimBackend(self.log), config)
        for _ in service.load():
            pass
        self.lead(service)

    def lead(self, service: MasterService) -> None:
        """Begin to serve."""
        world, loop = self.world, self.world.loop
        self.service = service
        decider = service.decider
        decider.on_instructions = self._on_instructions
        decider.on_probe = self._on_probe
        world.oracle.master_started(self)
        loop.after(TICK_S, self._tick, self.party)
        loop.note(self.name, f"serves epoch {service.epoch}, {decider.replayed_entries} entries")

    def stop(self) -> None:
        """It ends in order. Nobody reaches it any more."""
        self.service.close()
        self.world.loop.kill(self.party)

    def _tick(self) -> None:
        with self.world.oracle.watching("tick", self):
            self.service.tick()
        self.world.loop.after(
            TICK_S * (0.5 + self.world.loop.dice.random()), self._tick, self.party
        )

    # ---- requests -----------------------------------------------------------------------------

    def receive(
        self, connection: LaneConnection, method: int, body: bytes, reply: Reply, who: str
    ) -> None:
        """Carry out a request that has arrived."""
        service = self.service
        try:
            with self.world.oracle.watching(who, self):
                if method == HELLO:
                    answer = service.lane_hello(connection, body)  # type: ignore[arg-type]
                    self._answer(reply, answer)
                    return
                result = self._execute(connection, method, body, who)
        except CenoteError as error:
            self._answer(reply, self.refused(error))
            return
        if isinstance(result, Later) and result.again is not None:
            self._hold(result, reply)
        elif isinstance(result, Later):
            self._answer(reply, result.reply.SerializeToString(), True, result.entry)
        else:
            self._answer(reply, result.SerializeToString())

    def refused(self, error: CenoteError) -> CenoteError:
        """As it arrives at the other end."""
        return error_from_code(error.code, error.message, error.remedy)

    def _execute(
        self, connection: LaneConnection, method: int, body: bytes, who: str
    ) -> Message | Later:
        service, oracle = self.service, self.world.oracle
        if method == RESET:
            seed = self.world.loop.dice.getrandbits(64)
            service.decider.apply(ResetNamespace(body.decode(), seed))
            return Later(pb.CloseSessionResponse())
        if method == SET_QUOTA:
            service.decider.apply(quota_command(body))
            return Later(pb.CloseSessionResponse())
        parse, operation = service._by_method[method]
        request = parse(body)
        result = operation(request, connection.session)
        if method == pb.MASTER_METHOD_PUT_START:
            oracle.granted(self, request, result.reply if isinstance(result, Later) else result)
            self.world.faults.strike_grant(who)
        return result

    def _answer(
        self,
        reply: Reply,
        body: bytes | CenoteError,
        until_durable: bool = False,
        entry: int = 0,
    ) -> None:
        self.out.append(Waiting(reply, body, until_durable, entry))
        if self.flush_is_due:
            return
        dice = self.world.loop.dice
        if dice.random() < 0.7:
            self._flush()
        else:
            self.flush_is_due = True
            self.world.loop.after(dice.random() * 0.002, self._flush, self.party)

    def _flush(self) -> None:
        self.flush_is_due = False
        self.service.flush()
        out, self.out = self.out, []
        entry = self.service.decider.backend.last_entry
        for waiting in out:
            if waiting.entry:  # a namespace that another client has just opened: takes no time
                self._synced(waiting, waiting.entry)
            elif waiting.until_durable:
                self.service.decider.sync()
                delay_s = self.world.loop.dice.expovariate(1 / 0.002)
                self.world.loop.after(delay_s, partial(self._synced, waiting, entry), self.party)
            else:
                waiting.reply(waiting.body)

    def _synced(self, waiting: Waiting, entry: int) -> None:
        self.log.durable = max(self.log.durable, entry)
        waiting.reply(waiting.body)

    # ---- heartbeats that are held open ----------------------------------------------------------

    def _hold(self, later: Later, reply: Reply) -> None:
        assert later.again is not None
        held = Held(later.again, reply)
        self.held.setdefault(later.node_id, []).append(held)
        self._answer(lambda _: None, b"")  # what it reported is journaled all the same
        self.world.loop.after(
            later.wait_s, lambda: self._let_go(later.node_id, held, later.reply), self.party
        )

    def _let_go(self, node_id: int, held: Held, reply: Message | None) -> None:
        if held not in self.held.get(node_id, []):
            return
        self.held[node_id].remove(held)
        if reply is not None:
            self._answer(held.answer, reply.SerializeToString())
            return
        try:
            with self.world.oracle.watching("heartbeat", self):
                body: bytes | CenoteError = held.again().SerializeToString()
        except CenoteError as error:
            body = error
        self._answer(held.answer, body)

    def _on_instructions(self, node_id: int) -> None:
        for held in list(self.held.get(node_id, [])):
            self.world.loop.after(0.0, partial(self._let_go, node_id, held, None), self.party)

    def _on_probe(self, node_id: int) -> None:
        loop = self.world.loop
        address = self.service.endpoint_of(node_id, common_pb2.TRANSPORT_KIND_TCP)
        if not address:
            return  # it has not said where it listens: its heartbeats tell whether it lives

        def probed() -> None:
            answered = self.world.answers(address, self.name)
            with self.world.oracle.watching("probe", self):
                self.service.note_probe(node_id, answered)
            self._answer(lambda _: None, b"")

        loop.after(0.3 if loop.dice.random() < 0.3 else 0.002, probed, self.party)
