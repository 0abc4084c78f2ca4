"""What goes wrong where several masters share their metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.faults import ALL_FAULTS, Faults
from sim.kv import KvWeather
from sim.masters import MasterProcess

if TYPE_CHECKING:
    from sim.world import World

__all__ = ["TAKEOVER", "WITH_TAKEOVER", "TakeoverFaults"]

TAKEOVER: Final = "takeover"
WITH_TAKEOVER: Final = ALL_FAULTS | {TAKEOVER}
"""Several masters; they are cut off from what they share, or that is slow, or away."""


class TakeoverFaults(Faults):
    """See the module. The leader is what happens to the most."""

    def __init__(self, world: World, kinds: frozenset[str]) -> None:
        super().__init__(world, kinds)
        dice = world.loop.dice
        more = {
            "kv-cut": (4, self._kv_cut),
            "kv-weather": (2, self._kv_weather),
            "kv-outage": (1, self._kv_outage),
            "leader-stop": (3, self._leader_stop),
        }
        self._every |= more
        self._weights += [weight * dice.choice((0, 1, 1, 3)) for weight, _ in more.values()]
        self._kinds = kinds | set(more)

    @property
    def _kv(self) -> KvWeather:
        kv = self._world.kv
        assert kv is not None
        return kv

    def _victim(self) -> MasterProcess | None:
        world = self._world
        if world.masters and world.loop.dice.random() < 0.2:
            return world.loop.dice.choice(list(world.masters.values()))
        return world.master

    def _compact(self) -> None:
        self._kv.service.compact(self._kv.service.revision)

    def _kv_cut(self) -> None:
        """It hears everybody but what it shares with the others."""
        master = self._victim()
        if master is None:
            return
        kv, name = self._kv, master.name
        seconds = self._span_s(3.0)
        self._world.loop.note(name, f"is cut off from the metadata for {seconds:.3f} s")
        kv.cut_off.add(name)
        self._world.loop.after(seconds, lambda: kv.cut_off.discard(name))

    def _kv_weather(self) -> None:
        dice, kv = self._world.loop.dice, self._kv
        kv.lost, kv.unknown, kv.late, kv.twice = (
            dice.random() * dice.choice((0.0, 0.3)) for _ in range(4)
        )
        kv.latency_s = dice.choice((0.002, 0.02, 0.1))
        seconds = self._span_s(2.0)
        self._world.loop.note("metadata", f"are bad for {seconds:.3f} s")
        self._world.loop.after(seconds, self._kv_fair)

    def _kv_fair(self) -> None:
        kv = self._kv
        kv.lost = kv.unknown = kv.late = kv.twice = 0.0
        kv.latency_s = 0.002

    def _kv_outage(self) -> None:
        service = self._kv.service
        seconds = self._span_s(1.5)
        self._world.loop.note("metadata", f"are away for {seconds:.3f} s")
        service.reachable = False

        def back() -> None:
            service.reachable = True

        self._world.loop.after(seconds, back)

    def _leader_stop(self) -> None:
        """SIGSTOP: it goes on when another one leads."""
        master = self._world.master
        if master is not None:
            self._stop_for(master.party, self._world.loop.dice.uniform(0.3, 2.5))
