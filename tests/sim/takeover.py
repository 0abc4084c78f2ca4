"""Several masters over one journal: production backends, standbys and fronts, one model of etcd.

What `MasterServer` does around them is done here in virtual time: a master stands by, leads, and
begins anew when another one may lead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import Message

from cenote.api.errors import CenoteError, NotLeader, ResourceUnavailable, Unavailable
from cenote.master.front import Front
from cenote.master.kv_backend import KvBackend
from cenote.master.metadata import MasterRow
from cenote.master.service import MasterService
from cenote.master.standby import SnapshotLimits, Standby, Won
from kv_model import KvModel
from sim.kv import KvWeather, PartyClock, SimKv, SimWorkers
from sim.loop import Signal, Violation
from sim.masters import HELLO, Held, LaneConnection, MasterProcess, Reply, Waiting

if TYPE_CHECKING:
    from sim.world import World

__all__ = ["TENURE_S", "SharedMaster", "share_metadata"]

TENURE_S: Final = 0.6
RETRY_S: Final = 0.2
STOP_S: Final = 2.0
PREFIX: Final = "/p"


def share_metadata(world: World) -> None:
    """This world has several masters."""
    dice = world.loop.dice
    service = KvModel(lease_lateness_s=dice.choice((0.0, 0.5)))
    service.revision = 10
    world.kv = KvWeather(world.loop, service)
    world.master_names = [f"m{i}" for i in range(1, dice.choice((2, 2, 3)) + 1)]
    world.oracle.journal_lags = True


@dataclass
class SharedMaster(MasterProcess):
    """One life of one of several masters."""

    front: Front = field(init=False)
    over: Signal = field(init=False)
    """Set when another master may lead."""
    ended: Signal = field(init=False)
    standby: Standby | None = None
    stopping: bool = False

    @property
    def leads(self) -> bool:
        """Or thinks so."""
        service = self.front.leading
        return service is not None and service.decider.lost is None

    def start(self) -> None:
        self.front = Front(self._backend(), self.settings())
        self.world.loop.note(self.name, "starts")
        self.ended = self.world.loop.spawn(self.party, "standby", self._live)

    def _backend(self) -> KvBackend:
        loop, kv = self.world.loop, self.world.kv
        assert kv is not None
        return KvBackend(
            SimKv(kv, self.party),
            name="sim:",
            prefix=PREFIX,
            tenure_s=TENURE_S,
            clock=PartyClock(loop, self.party),
            workers=SimWorkers(loop, self.party),
            draw_nonce=lambda: f"{loop.dice.getrandbits(32):08x}",
        )

    def stop(self) -> None:
        """It resigns, if it leads; another one may begin at once."""
        self.stopping = True
        service, self.front.leading = self.front.leading, None
        loop = self.world.loop

        def close() -> None:
            if service is None and self.standby is not None:
                self.standby.stop()
                self.ended.wait(STOP_S)
            leading = service or self.front.leading  # it may have won just now
            with contextlib.suppress(CenoteError):
                (self.front.backend if leading is None else leading).close()
            loop.after(0.0, lambda: loop.kill(self.party))

        loop.spawn(self.party, "stop", close)

    # ---- two roles ------------------------------------------------------------------------------

    def _live(self) -> None:
        loop, front = self.world.loop, self.front
        row = MasterRow(f"{self.name}:1", (f"{self.name}:1",))
        limits = SnapshotLimits(loop.dice.choice((2_000, 1 << 20)), interval_s=0.5)
        while not self.stopping:
            front.backend.join(row)
            try:
                standby = Standby(front.backend, self.world.state_config, limits)
                self.standby = standby
                won = standby.run()
                if won is None:
                    return
                self._take_over(won)
            except (NotLeader, ResourceUnavailable) as error:
                loop.note(self.name, f"could not begin to lead: {error}")
                loop.sleep(RETRY_S)
            else:
                self.over.wait()
                loop.note(self.name, f"leads no more: {front.backend.lost}")
                self._step_down()
            with contextlib.suppress(CenoteError):
                front.backend.close()
            front.backend = self._backend()

    def _take_over(self, won: Won) -> None:
        service = self.make_service(self.front.backend, self.world.state_config)
        for _ in service.load(won.opened, won.followed):
            pass
        self.over = Signal(self.world.loop)
        self.front.leading = service
        self.lead(service)

    def _step_down(self) -> None:
        self.front.leading = None
        held = [one for waiting in self.held.values() for one in waiting]
        self.held.clear()
        for one in held:
            one.answer(_broken())
        out, self.out = self.out, []
        for waiting in out:
            waiting.reply(_broken())

    def _tick(self) -> None:
        service = self.front.leading
        if service is None or service is not self.service:
            return
        if service.decider.lost is not None:
            self.over.set()
            return
        super()._tick()

    # ---- requests -------------------------------------------------------------------------------

    def receive(
        self, connection: LaneConnection, method: int, body: bytes, reply: Reply, who: str
    ) -> None:
        service = self.front.leading
        if service is not None:
            if service.decider.is_past_tenure:
                self.world.oracle.following.unproven(who)
            super().receive(connection, method, body, reply, who)
        elif method == HELLO:
            connection.session = b""
            reply(self.front.lane_hello(connection, body))  # type: ignore[arg-type]
        else:
            reply(self.front.not_leader())

    def refused(self, error: CenoteError) -> CenoteError:
        return error if isinstance(error, NotLeader) else super().refused(error)

    def _flush(self) -> None:
        self.flush_is_due = False
        service = self.front.leading
        out, self.out = self.out, []
        try:
            if service is None:
                raise _broken()
            service.flush()
        except CenoteError:
            for waiting in out:  # no reply leaves that rests on what can't be written down
                waiting.reply(_broken())
            return
        for waiting in out:
            if waiting.until_durable:
                durable = service.decider.sync_to(waiting.entry)
                durable.add_done_callback(partial(self._settled, waiting))
            else:
                waiting.reply(waiting.body)

    def _settled(self, waiting: Waiting, durable: Future[None]) -> None:
        error = durable.exception()
        if error is None:
            waiting.reply(waiting.body)
        elif isinstance(error, ResourceUnavailable):
            waiting.reply(_broken())
        elif isinstance(error, CenoteError):
            waiting.reply(error)
        else:
            raise Violation(f"a journal failed with {error!r}")

    def _let_go(self, node_id: int, held: Held, reply: Message | None) -> None:
        service: MasterService | None = self.front.leading
        if service is None or held not in self.held.get(node_id, []):
            return
        if reply is None and (entry := service.decider.unsettled_entry):
            # Space may be given up for slots.
            go_on: Callable[[Any], None] = lambda _: self._go_on(service, node_id, held)  # noqa: E731
            service.decider.sync_to(entry).add_done_callback(go_on)
            return
        super()._let_go(node_id, held, reply)

    def _go_on(self, service: MasterService, node_id: int, held: Held) -> None:
        if service is self.front.leading:
            super()._let_go(node_id, held, None)


def _broken() -> CenoteError:
    error = Unavailable("the master could not write down what it decided")
    error.maybe_executed = True
    return error
