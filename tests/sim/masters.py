"""The master as a process: the real service on a journal in memory, and the lane to it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import Message

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    NotLeader,
    PoolMismatch,
    Unavailable,
    error_from_code,
)
from cenote.client.master_stub import METHODS
from cenote.master.commands import ResetNamespace
from cenote.master.effects import EpochStarted
from cenote.master.journal import SnapshotEnd, entry_range, read_entries, snapshot_records
from cenote.master.memory_backend import MemoryBackend, MemoryLog
from cenote.master.metadata import begin
from cenote.master.operations import Later, Settings
from cenote.master.service import MasterService
from cenote.master.state import MasterState
from cenote.master.state_config import StateConfig
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb
from sim.loop import Loop, Party, Signal

if TYPE_CHECKING:
    from sim.world import World

__all__ = ["MASTER", "Lane", "MasterProcess", "SimMaster", "StoreLink"]

MASTER: Final = "master"
HELLO: Final = 0
RESET: Final = -1
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


@dataclass
class _Held:
    """A heartbeat held open."""

    again: Callable[[], Message]
    answer: Reply


@dataclass
class _Waiting:
    reply: Reply
    body: bytes | CenoteError
    until_durable: bool


@dataclass
class MasterProcess:
    """One life of the master. Messages are carried out one by one; what was decided is appended
    to the journal before any reply leaves, sometimes a moment later and for several at once."""

    world: World
    log: SimLog
    party: Party
    service: MasterService = field(init=False)
    out: list[_Waiting] = field(default_factory=list)
    held: dict[int, list[_Held]] = field(default_factory=dict)
    open_calls: dict[Signal, str] = field(default_factory=dict)
    flush_is_due: bool = False

    def start(self) -> None:
        world, loop = self.world, self.world.loop
        self.service = MasterService(
            SimBackend(self.log),
            replace(world.state_config, pool_id=loop.dice.randbytes(16)),
            Settings(location_ttl_ms=world.location_ttl_ms, heartbeat_interval_ms=300),
            clock=PartyClock(loop, self.party),
            draw_seed=lambda: loop.dice.getrandbits(64),
        )
        for _ in self.service.load():
            pass
        decider = self.service.decider
        decider.on_instructions = self._on_instructions
        decider.on_probe = self._on_probe
        world.oracle.master_started(self)
        loop.after(TICK_S, self._tick, self.party)
        loop.note(MASTER, f"serves epoch {self.service.epoch}, {decider.replayed_entries} entries")

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
            self._answer(reply, error_from_code(error.code, error.message, error.remedy))
            return
        if isinstance(result, Later) and result.again is not None:
            self._hold(result, reply)
        elif isinstance(result, Later):
            self._answer(reply, result.reply.SerializeToString(), until_durable=True)
        else:
            self._answer(reply, result.SerializeToString())

    def _execute(
        self, connection: LaneConnection, method: int, body: bytes, who: str
    ) -> Message | Later:
        service, oracle = self.service, self.world.oracle
        if method == RESET:
            seed = self.world.loop.dice.getrandbits(64)
            service.decider.apply(ResetNamespace(body.decode(), seed))
            return Later(pb.CloseSessionResponse())
        parse, operation = service._by_method[method]
        request = parse(body)
        result = operation(request, connection.session)
        if method == pb.MASTER_METHOD_PUT_START:
            oracle.granted(self, request, result.reply if isinstance(result, Later) else result)
            self.world.faults.strike_grant(who)
        return result

    def _answer(self, reply: Reply, body: bytes | CenoteError, until_durable: bool = False) -> None:
        self.out.append(_Waiting(reply, body, until_durable))
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
            if waiting.until_durable:
                self.service.decider.sync()
                delay_s = self.world.loop.dice.expovariate(1 / 0.002)
                self.world.loop.after(delay_s, partial(self._synced, waiting, entry), self.party)
            else:
                waiting.reply(waiting.body)

    def _synced(self, waiting: _Waiting, entry: int) -> None:
        self.log.durable = max(self.log.durable, entry)
        waiting.reply(waiting.body)

    # ---- heartbeats that are held open ----------------------------------------------------------

    def _hold(self, later: Later, reply: Reply) -> None:
        assert later.again is not None
        held = _Held(later.again, reply)
        self.held.setdefault(later.node_id, []).append(held)
        self._answer(lambda _: None, b"")  # what it reported is journaled all the same
        self.world.loop.after(
            later.wait_s, lambda: self._let_go(later.node_id, held, later.reply), self.party
        )

    def _let_go(self, node_id: int, held: _Held, reply: Message | None) -> None:
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
            answered = self.world.answers(address, MASTER)
            with self.world.oracle.watching("probe", self):
                self.service.note_probe(node_id, answered)
            self._answer(lambda _: None, b"")

        loop.after(0.3 if loop.dice.random() < 0.3 else 0.002, probed, self.party)


# ---- the lane's other end ---------------------------------------------------------------------


class Lane:
    """A process's connections to the master: each says hello first, as `LaneClient` does."""

    def __init__(
        self, world: World, party: Party, hello: bytes, on_hello: Callable[[bytes], None]
    ) -> None:
        self._world = world
        self._party = party
        self.hello = hello
        self._on_hello = on_hello
        self._master: MasterProcess | None = None
        self._connection = LaneConnection()
        self._closed = Signal(world.loop)

    def close(self) -> None:
        self._closed.set()

    def disconnect(self) -> None:
        """The next call connects, and says hello."""
        self._master = None

    def call(self, method: int, body: bytes, deadline_s: float) -> bytes:
        """One request. Raises what the master raises, Unavailable, DeadlineExceeded."""
        loop = self._world.loop
        if not deadline_s > 0:
            raise DeadlineExceeded(f"no time is left: deadline_s is {deadline_s}")
        until_s = loop.now_s + deadline_s
        self._world.step()
        master = self._world.master
        if self._master is not master or master is None:
            self._master = None
            self._connection = LaneConnection()
            answer = self._exchange(HELLO, self.hello, until_s)
            self._on_hello(answer)
            self._master = master
        reply = self._exchange(method, body, until_s)
        self._world.step()
        return reply

    def _exchange(self, method: int, body: bytes, until_s: float) -> bytes:
        world, loop, network = self._world, self._world.loop, self._world.network
        if self._closed.is_set:
            raise ClientClosed("the lane is closed")
        name = self._party.name
        master = world.master
        if master is None or not master.party.alive:
            loop.sleep(min(network.delay_s(), max(0.0, until_s - loop.now_s)))
            raise Unavailable("nobody listens at the master's address")
        signal = Signal(loop)
        connection, weather = self._connection, network.weather

        def reply(answer: bytes | CenoteError) -> None:
            network.send(MASTER, name, self._party, lambda: signal.set(answer), lost)

        def lost() -> None:
            self._world.loop.after(0.0, lambda: signal.set(_broken()), self._party)

        def arrive() -> None:
            master.receive(connection, method, body, reply, name)

        slow_s = world.faults.attach_delay_s() if method == pb.MASTER_METHOD_ATTACH else 0.0
        if slow_s:
            loop.after(slow_s, lambda: network.send(name, MASTER, master.party, arrive, lost))
        else:
            network.send(name, MASTER, master.party, arrive, lost)
        if weather.doubled and loop.dice.random() < weather.doubled:
            # One on a connection that was given up, read late: nobody waits for its reply.
            again = loop.dice.random() * 2 * max(weather.late_s, 0.01)
            loop.after(
                again,
                partial(self._arrive_again, master, method, body),
                master.party,
            )
        if method == pb.MASTER_METHOD_ATTACH and world.faults.repeats_attach():
            loop.after(
                loop.dice.random() * 3,
                partial(self._arrive_again, master, method, body),
                master.party,
            )
        if weather.broken and loop.dice.random() < weather.broken:
            loop.after(network.delay_s() * 2, lambda: signal.set(_broken()), self._party)
        master.open_calls[signal] = name
        ended = signal.wait(max(0.0, until_s - loop.now_s))
        master.open_calls.pop(signal, None)
        if self._closed.is_set:
            raise ClientClosed("the lane was closed during the call")
        if not ended:
            self.disconnect()
            error = DeadlineExceeded("the master did not answer in time")
            error.maybe_executed = True
            raise error
        if isinstance(signal.value, CenoteError):
            if signal.value.maybe_executed:
                self.disconnect()
            raise signal.value
        answer: bytes = signal.value
        return answer

    def _arrive_again(self, master: MasterProcess, method: int, body: bytes) -> None:
        master.receive(self._connection, method, body, lambda _: None, self._party.name)


def _broken() -> CenoteError:
    error = Unavailable("the connection to the master broke")
    error.maybe_executed = True
    return error


class SimMaster:
    """`MasterApi` over a `Lane`, for a client: what `LaneMaster` is for a real one."""

    def __init__(
        self,
        world: World,
        party: Party,
        hello: pb.HelloRequest,
        greeted: Callable[[pb.HelloResponse], None],
    ) -> None:
        self._said = pb.HelloResponse()
        self._greeted = greeted
        self._lane = Lane(world, party, hello.SerializeToString(), self._on_hello)

    def _on_hello(self, body: bytes) -> None:
        self._said = pb.HelloResponse.FromString(body)
        if not self._said.is_leader:
            raise NotLeader("this master is a standby")
        self._greeted(self._said)

    def hello(self, request: pb.HelloRequest, deadline_s: float) -> pb.HelloResponse:
        self._lane.hello = request.SerializeToString()
        self._lane.disconnect()
        view = pb.GetClusterViewRequest(known_view_version=_EVERY_VIEW)
        self._call("get_cluster_view", view, deadline_s)
        return self._said

    def _call(self, method: str, request: Message, deadline_s: float) -> Message:
        number, _, reply_type = METHODS[method]
        answer = self._lane.call(number, request.SerializeToString(), deadline_s)
        return reply_type.FromString(answer)

    def call_many(
        self, method: str, requests: list[Message], deadline_s: float
    ) -> list[Message | CenoteError]:
        found: list[Message | CenoteError] = []
        for request in requests:
            try:
                found.append(self._call(method, request, deadline_s))
            except CenoteError as error:
                found.append(error)
        return found

    def __getattr__(self, method: str) -> Any:
        if method not in METHODS:
            raise AttributeError(method)
        return lambda request, deadline_s: self._call(method, request, deadline_s)


class StoreLink:
    """`cenote.store.master_link.MasterLink` over a `Lane`."""

    def __init__(self, world: World, party: Party, hello: pb.HelloRequest) -> None:
        self._greeting = pb.HelloResponse()
        self._world, self._name = world, party.name
        self._said = pb.HelloRequest.FromString(hello.SerializeToString())
        self._lane = Lane(world, party, hello.SerializeToString(), self._on_hello)

    def _on_hello(self, body: bytes) -> None:
        self._greeting = pb.HelloResponse.FromString(body)

    def hello(self, deadline_s: float) -> pb.HelloResponse:
        view = pb.GetClusterViewRequest(known_view_version=_EVERY_VIEW)
        self._call("get_cluster_view", view, deadline_s)
        greeting = self._greeting
        strange = self._said.pool_id not in (b"", greeting.pool_id)
        if strange and greeting.epoch < self._said.last_epoch:
            self._world.faults.wipe_store(self._name)  # as its operator is told to
        return greeting

    def _call(self, method: str, request: Message, deadline_s: float) -> Any:
        number, _, reply_type = METHODS[method]
        return reply_type.FromString(
            self._lane.call(number, request.SerializeToString(), deadline_s)
        )

    def attach(self, request: pb.AttachRequest, deadline_s: float) -> Any:
        try:
            return self._call("attach", request, deadline_s)
        except PoolMismatch:
            self._world.faults.wipe_store(self._name)
            raise

    def heartbeat(self, request: pb.HeartbeatRequest, deadline_s: float) -> Any:
        return self._call("heartbeat", request, deadline_s)

    def detach(self, request: pb.DetachRequest, deadline_s: float) -> Any:
        return self._call("detach", request, deadline_s)

    def close(self) -> None:
        self._lane.close()
