"""What goes wrong with SSDs, and what operators do that has objects move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from cenote.api.errors import CenoteError
from cenote.master.task_commands import Drain, Rebalance
from sim.clients import flood, put_anew, read_leased
from sim.disk import DiskWeather, SimDisk

if TYPE_CHECKING:
    from cenote.master.commands import Command
    from sim.faults import Faults
    from sim.stores import StoreHost
    from sim.world import World

__all__ = ["TierFaults"]

_SLOW_S: Final = (0.003, 0.03, 0.3, 3.0)
_STRIKES: Final = {"read": 0.3, "write": 0.1, "flush": 0.2}
"""Copies that come back are fewer; and before a flush is what a power cut takes."""
_CRAWLS_S: Final = (0.0, 0.1, 0.3, 1.0)
_COPY_STRIKES: Final = {"read": 4.0, "write": 1.0, "pull": 1.0}
_ERRORS: Final = (0.0, 0.2, 1.0)


class TierFaults:
    """As `Faults`, whose strikes these are."""

    def __init__(self, world: World, faults: Faults) -> None:
        self._world = world
        self._faults = faults

    def kinds(self) -> dict[str, tuple[int, Callable[[], None]]]:
        return {
            "disk-errors": (2, self._errors),
            "disk-slow": (2, self._slow),
            "disk-flip": (2, self._flip),
            "disk-loss": (1, self._loss),
            "power-cut": (2, self._power_cut),
            "drain": (4, self._drain),
            "rebalance": (1, self._rebalance),
        }

    def end(self) -> None:
        """Every SSD works, and no node is to be left any more."""
        for host in self._world.hosts.values():
            if host.disk is not None:
                host.disk.weather, host.disk.is_well = DiskWeather(), True
        self._undo_drains()

    def strike_device(self, host: StoreHost, what: str) -> float:
        """The daemon dies in the middle of a copy, or its host, or the master does. How much longer
        the request takes for it: it may go on under the next leader."""
        world, faults = self._world, self._faults
        dice = world.loop.dice
        if dice.random() > faults._malice * _STRIKES[what]:
            return 0.0
        act = dice.choice(("kill", "power", "master", "master"))
        delay_s = dice.expovariate(1 / dice.choice((0.0002, 0.002)))
        if act == "kill":
            faults._restart_soon(host, delay_s)
        elif act == "power" and "power-cut" in faults._kinds:
            faults._later(delay_s, lambda: self._cut_power(host))
        elif act == "master" and "master-crash" in faults._kinds:
            faults._later(delay_s, lambda: faults._master_down(orderly=False, away_s=0.01))
            return dice.choice(_CRAWLS_S)
        return 0.0

    def strike_pull(self) -> float:
        """A daemon has heard of a source's slots, and is about to ask for the bytes: they come much
        later, under another leader, or when memory is full of something else."""
        world, faults = self._world, self._faults
        dice = world.loop.dice
        if dice.random() > 3 * faults._malice:
            return 0.0
        if dice.random() < 0.5 and "master-crash" in faults._kinds:
            faults._later(0.001, lambda: faults._master_down(orderly=False, away_s=0.01))
            faults._later(0.2, self._flood)
        else:
            self._flood()
        return dice.choice(_CRAWLS_S)

    def _flood(self) -> None:
        """Somebody puts so much that what is cold leaves memory."""
        clients = self._world.living_clients()
        if clients:
            client = self._world.loop.dice.choice(clients)
            client.begin(flood)

    def strike_copy(self, key: int, host: StoreHost, what: str) -> None:
        """Its key is another's before it has ended, or its master is, or its place. `what` it is to
        do with the host's device; such a request may take longer for that."""
        world, faults = self._world, self._faults
        dice = world.loop.dice
        if dice.random() > faults._malice * _COPY_STRIKES[what]:
            return
        delay_s = dice.expovariate(1 / dice.choice((0.005, 0.05)))
        if host.disk is not None and dice.random() < 0.5:
            host.disk.crawl_s[what] = dice.choice(_CRAWLS_S)
        if dice.random() < 0.5 and "master-crash" in faults._kinds:
            faults._later(delay_s, lambda: faults._master_down(orderly=False, away_s=0.01))
            faults._later(delay_s + 0.2, self._flood)
            return
        clients = world.living_clients(key)
        if dice.random() < 0.5:
            faults._later(delay_s, self._flood)
        elif clients:
            client = dice.choice(clients)
            world.loop.after(delay_s, partial(client.begin, partial(put_anew, key)), client.party)

    # ---- devices --------------------------------------------------------------------------------

    def _some_disk(self) -> SimDisk | None:
        disks = [host.disk for host in self._world.hosts.values() if host.disk is not None]
        return self._world.loop.dice.choice(disks) if disks else None

    def _usual(self) -> DiskWeather:
        assert self._world.tiers is not None
        return self._world.tiers.usual_weather()

    def _with_weather(
        self, disk: SimDisk, what: str, change: Callable[[DiskWeather], None]
    ) -> None:
        weather = disk.weather = self._usual()
        change(weather)
        seconds = self._faults._span_s(2.0)
        self._world.loop.note(disk.host, f"its SSD is {what} for {seconds:.3f} s")

        def over() -> None:
            if disk.weather is weather:
                disk.weather = self._usual()

        self._world.loop.after(seconds, over)

    def _errors(self) -> None:
        disk, dice = self._some_disk(), self._world.loop.dice
        if disk is None:
            return

        def change(weather: DiskWeather) -> None:
            weather.read_errors, weather.write_errors, weather.flush_errors = (
                dice.choice(_ERRORS) for _ in range(3)
            )

        self._with_weather(disk, "failing", change)

    def _slow(self) -> None:
        disk, dice = self._some_disk(), self._world.loop.dice
        if disk is None:
            return

        def change(weather: DiskWeather) -> None:
            weather.latency_s = dice.choice(_SLOW_S)

        self._with_weather(disk, "slow", change)

    def _flip(self) -> None:
        disk, tiers = self._some_disk(), self._world.tiers
        alone = [] if disk is None or tiers is None else tiers.alone_on(disk.file)
        dice = self._world.loop.dice
        wanted = dice.choice(alone) if alone and dice.random() < 0.7 else None
        version = None if disk is None else disk.flip(wanted)
        put = self._world.oracle.put_of.get(version or (0, 0))
        clients = [] if put is None else self._world.living_clients(put.key)
        if put is not None and clients:
            # Somebody wants to know, some of them from the same host.
            here = [client for client in clients if disk and client.host == disk.host]
            client = dice.choice(here or clients)
            client.begin(partial(read_leased, put.key))

    def _loss(self) -> None:
        """A daemon dies, and its SSD is replaced."""
        faults, world = self._faults, self._world
        host = faults._some_host()
        if host is None or host.disk is None:
            return
        faults._kill_store(host)
        host.disk.wipe()
        world.loop.note(host.name, "loses its SSD")
        faults._later(faults._span_s(2.0), lambda: world.start_store(host))

    def _power_cut(self) -> None:
        host = self._faults._some_host()
        if host is not None:
            self._cut_power(host)

    def _cut_power(self, host: StoreHost) -> None:
        """Memory is lost, and of the SSD what was not flushed."""
        if host.process is not None and host.process.party.alive:
            self._faults._reboot(host)

    # ---- operators ------------------------------------------------------------------------------

    def _decide(self, command: Command) -> None:
        master = self._world.master
        if master is None or not master.party.alive or master.party.paused:
            return
        self._world.loop.note("admin", f"{command}")
        oracle = self._world.oracle

        def act() -> None:
            try:
                with oracle.watching("admin", master):
                    master.service.decider.apply(command)
            except CenoteError as error:
                self._world.loop.note("admin", f"{error}")
            master._answer(lambda _: None, b"")

        self._world.loop.after(0.0, act, master.party)

    def _drain(self) -> None:
        master, dice = self._world.master, self._world.loop.dice
        if master is None:
            return
        nodes = list(master.service.state._pool.nodes.by_id)
        if not nodes:
            return
        node_id = dice.choice(nodes)
        self._decide(Drain(node_id, bandwidth=dice.choice((0, 0, 20_000))))
        self._faults._later(self._faults._span_s(3.0), lambda: self._take_up(node_id))

    def _take_up(self, node_id: int) -> None:
        self._decide(Drain(node_id, cancel=True))

    def _undo_drains(self) -> None:
        """Again and again: whoever leads may not have heard."""
        world = self._world

        def again() -> None:
            master = world.master
            if master is not None:
                nodes = master.service.state._pool.nodes.by_id
                for node_id, node in list(nodes.items()):
                    if node.draining:
                        self._decide(Drain(node_id, cancel=True))
            if world.loop.now_s < until_s:
                world.loop.after(0.2, again)

        until_s = world.loop.now_s + 4.0
        again()

    def _rebalance(self) -> None:
        dice = self._world.loop.dice
        self._decide(Rebalance(cancel=dice.random() < 0.2, bandwidth=dice.choice((0, 20_000))))
