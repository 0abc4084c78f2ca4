"""What goes wrong, when, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from cenote.store.slot_format import SLOT_BYTES, SLOT_RECORD, STATE_SEALED
from sim.clients import read_evicted
from sim.data_connection import Write, seal_at
from sim.loop import Party
from sim.masters import MASTER, SimLog
from sim.network import Weather
from sim.tier_faults import TierFaults

if TYPE_CHECKING:
    from sim.masters import MasterProcess
    from sim.stores import SegmentFile, StoreHost
    from sim.world import World

__all__ = [
    "ALL_FAULTS",
    "WITH_HIDDEN_SOCKETS",
    "WITH_METADATA_LOSS",
    "WITH_POWER",
    "WITH_QUOTAS",
    "Faults",
]

MEAN_INTERVAL_S: Final = 0.35
PAUSES_S: Final = (0.02, 0.2, 0.6, 1.5, 3.0)
LONG_PAUSE_S: Final = 5.0
"""A session runs out, is cut off, and its space is another's."""
CRAWL_S: Final = 1.0
INHERITED_S: Final = 2.0
"""No lease lasts longer: by then a restarted master has given away what was leased before."""

ALL_FAULTS: Final = frozenset(
    [
        "cut",
        "weather",
        "pause",
        "client-crash",
        "store-crash",
        "store-stop",
        "store-reboot",
        "segment-loss",
        "torn-slot",
        "flipped-slot",
        "master-crash",
        "master-stop",
        "compact",
        "reset",
    ]
)
"""All kinds but `power`, `metadata-loss`, `hidden-sockets` and `quotas`."""
WITH_POWER: Final = ALL_FAULTS | {"power"}
"""The master's machine fails, too, and the journal's unsynced end is lost."""
WITH_METADATA_LOSS: Final = ALL_FAULTS | {"metadata-loss"}
"""The master's directory is lost at times."""
WITH_QUOTAS: Final = ALL_FAULTS | {"quotas"}
"""An administrator changes the namespace's quota at times: no fault, but it changes what goes."""

WITH_HIDDEN_SOCKETS: Final = ALL_FAULTS | {"hidden-sockets"}
"""At times nobody can see the daemons' Unix sockets: who connects then takes TCP, and changes over
to shared memory later."""
HIDDEN_S: Final = (0.3, 1.0, 3.0)


class Faults:
    """See the module. Kinds that are not chosen do not happen."""

    def __init__(self, world: World, kinds: frozenset[str]) -> None:
        self._world = world
        self._kinds = kinds
        self._over = False
        self.count = 0
        every: dict[str, tuple[int, Callable[[], None]]] = {
            "cut": (3, self._cut),
            "weather": (3, self._weather),
            "pause": (6, self._pause),
            "client-crash": (3, self._client_crash),
            "store-crash": (2, self._store_crash),
            "store-stop": (1, self._store_stop),
            "store-reboot": (1, self._store_reboot),
            "segment-loss": (1, self._segment_loss),
            "master-crash": (2, partial(self._master_down, orderly=False)),
            "master-stop": (1, partial(self._master_down, orderly=True)),
            "power": (2, self._power),
            "metadata-loss": (1, self._metadata_loss),
            "reset": (1, world.reset_namespace),
        }
        if "hidden-sockets" in kinds:
            every["hidden-sockets"] = (4, self._hide_sockets)
        if "quotas" in kinds:
            every["quotas"] = (6, world.quotas.change)
        self._tiers = TierFaults(world, self) if world.tiers is not None else None
        if self._tiers is not None:
            every |= self._tiers.kinds()
            self._kinds = kinds = kinds | set(self._tiers.kinds())
        self._every = every
        # Each run has its own mixture: some faults often, some never. What is left out changes
        # nothing about the others.
        dice = world.loop.dice
        self._weights = [weight * dice.choice((0, 1, 1, 3)) for weight, _ in every.values()]
        if "power" not in kinds:
            self._weights[list(every).index("power")] = 0
        self._malice = dice.choice((0.0, 0.02, 0.1, 0.2))
        self._interval_s = MEAN_INTERVAL_S * dice.choice((0.5, 1, 3))

    def begin(self) -> None:
        if any(self._weights):
            self._world.loop.after(self._next_s(), self._strike)

    def end(self) -> None:
        self._over = True
        if self._tiers is not None:
            self._tiers.end()

    @property
    def tiers(self) -> TierFaults | None:
        """Those that concern tiers, where there are any and until they end."""
        return None if self._over else self._tiers

    def _next_s(self) -> float:
        return self._world.loop.dice.expovariate(1 / self._interval_s)

    def _strike(self) -> None:
        if self._over:
            return
        kind = self._world.loop.dice.choices(list(self._every), self._weights)[0]
        if kind in self._kinds:
            self.count += 1
            self._every[kind][1]()
        self._world.loop.after(self._next_s(), self._strike)

    def strike_near(self, write: Write, *parties: Party) -> None:
        """Something has begun there that had better not be interrupted."""
        dice = self._world.loop.dice
        if self._over or dice.random() > self._malice:
            return
        party = dice.choice(parties)
        delay_s = dice.expovariate(1 / 0.005)
        if "pause" in self._kinds and dice.random() < 0.5:
            pause_s = dice.choice((*PAUSES_S, *(LONG_PAUSE_S,) * 6))
            if pause_s == LONG_PAUSE_S:
                write.crawl_s = CRAWL_S  # it goes on meanwhile, or afterwards
            self._world.loop.after(delay_s, lambda: self._stop(party, pause_s), party)
        elif "master-crash" in self._kinds and dice.random() < 0.5:
            write.crawl_s = CRAWL_S  # it goes on under the next epoch
            power = "power" in self._kinds and dice.random() < 0.5
            self._world.loop.after(delay_s, partial(self._crash_master, power=power))
        elif "client-crash" in self._kinds and party.name in self._world.clients:
            self._world.loop.after(delay_s, lambda: self._kill_client(party.name), party)

    def _crash_master(self, *, power: bool) -> None:
        away_s = self._world.loop.dice.random() * 0.1
        self._master_down(orderly=False, power=power, away_s=away_s)
        if power:  # what was evicted for a write may be said to be there again
            self._later(0.3, partial(read_evicted, self._world))

    def strike_before_write(self, party: Party, host: StoreHost) -> None:
        """A writer with a fresh grant oversleeps: its session ends, and its daemon may be another
        one by then."""
        world, dice = self._world, self._world.loop.dice
        if self._over or dice.random() > self._malice / 2 or "pause" not in self._kinds:
            return
        self._stop_for(party, dice.uniform(3, 5))
        if dice.random() < 0.8:
            self._restart_soon(host, dice.uniform(2.2, 3))
        world.loop.sleep(0.0)

    def strike_read(self, party: Party) -> None:
        """A reader under a lease sleeps in the middle of a copy. Meanwhile another master, which
        knows nothing of that lease, may give the space away."""
        world, dice = self._world, self._world.loop.dice
        if self._over or dice.random() > self._malice * 2 or party.name not in world.clients:
            return
        if not {"pause", "master-crash", "reset"} <= self._kinds:
            return
        self._stop_for(party, dice.uniform(0.6, 1.7))
        world.loop.after(0.001, lambda: self._master_down(orderly=False, away_s=0.01))
        self._later(dice.uniform(0.1, 0.3), world.reset_namespace)
        world.loop.sleep(0.0)

    def strike_daemon(self, host: StoreHost) -> None:
        """Something is about to be sealed there: the daemon is another one a moment later."""
        dice = self._world.loop.dice
        if not self._over and dice.random() < self._malice / 2:
            self._restart_soon(host, dice.expovariate(1 / dice.choice((0.0003, 0.002))))

    def repeats_attach(self) -> bool:
        """Whether a copy of an attach is read late, from a connection that was given up."""
        return not self._over and self._world.loop.dice.random() < 3 * self._malice

    def attach_delay_s(self) -> float:
        """How long an inventory is on its way, while clients may be sealing at that daemon."""
        dice = self._world.loop.dice
        slow = not self._over and dice.random() < 5 * self._malice
        return dice.random() * 0.2 if slow else 0.0

    def _restart_soon(self, host: StoreHost, delay_s: float) -> None:
        if "store-crash" not in self._kinds:
            return
        dice = self._world.loop.dice

        def strike() -> None:
            if host.process is not None and host.process.party.alive:
                self._kill_store(host)
                back_s = dice.expovariate(1 / dice.choice((0.0005, 0.01)))
                self._later(back_s, lambda: self._world.start_store(host))

        self._later(delay_s, strike)

    def strike_grant(self, name: str) -> None:
        """A client was granted something: it sleeps until that is another's."""
        world, dice = self._world, self._world.loop.dice
        kinds = {"pause", "master-crash"}
        if self._over or name not in world.clients or dice.random() > self._malice * 0.3:
            return
        if kinds <= self._kinds:
            party = world.clients[name].party
            seconds = INHERITED_S + dice.uniform(0.2, 0.9)
            world.loop.after(0.0, lambda: self._stop_for(party, seconds), party)
            world.loop.after(0.01, lambda: self._master_down(orderly=False, away_s=0.01))

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        """Unless all faults have ended by then, which mends everything."""

        def unless_over() -> None:
            if not self._over:
                act()

        self._world.loop.after(seconds, unless_over)

    def _span_s(self, most: float) -> float:
        dice = self._world.loop.dice
        return most * dice.random() ** 2 + 0.01

    # ---- network and time -----------------------------------------------------------------------

    def _names(self) -> list[str]:
        return [*self._world.master_names, *self._world.hosts, *self._world.clients]

    def _cut(self) -> None:
        dice = self._world.loop.dice
        one, other = dice.sample(self._names(), 2)
        seconds = self._span_s(3.0)
        self._world.loop.note("network", f"{one} | {other} for {seconds:.3f} s")
        self._world.network.cut(one, other, seconds)

    def _weather(self) -> None:
        dice, network = self._world.loop.dice, self._world.network
        network.weather = weather = Weather(
            loss=dice.choice((0, 0.02, 0.2)),
            doubled=dice.choice((0, 0.1)),
            late=dice.choice((0, 0.1, 0.5)),
            late_s=dice.choice((0.005, 0.05, 1.0)),
            broken=dice.choice((0, 0.1)),
        )
        seconds = self._span_s(2.0)
        self._world.loop.note("network", f"{weather} for {seconds:.3f} s")

        def over() -> None:
            if network.weather is weather:
                network.weather = Weather()

        self._world.loop.after(seconds, over)

    def _parties(self) -> list[Party]:
        world = self._world
        found = [client.party for client in world.clients.values() if client.party.alive]
        for host in world.hosts.values():
            if host.process is not None and host.process.party.alive:
                found.append(host.process.party)
        if world.masters and world.loop.dice.random() < 0.5:
            found.extend(master.party for master in world.masters.values())
        return found

    def _pause(self) -> None:
        world = self._world
        parties = self._parties()
        if not parties:
            return
        self._stop(world.loop.dice.choice(parties), world.loop.dice.choice(PAUSES_S))

    def _stop(self, party: Party, most_s: float) -> None:
        self._stop_for(party, most_s * (0.5 + self._world.loop.dice.random()))

    def _stop_for(self, party: Party, seconds: float) -> None:
        world = self._world
        if self._over or party.paused:
            return
        world.loop.note(party.name, f"is stopped for {seconds:.3f} s")
        client = world.clients.get(party.name)
        if client is not None:
            client.pauses += 1
        world.loop.pause(party)
        world.loop.after(seconds, lambda: world.loop.unpause(party))

    # ---- clients --------------------------------------------------------------------------------

    def _client_crash(self) -> None:
        world = self._world
        alive = [name for name, client in world.clients.items() if client.party.alive]
        if not alive:
            return
        self._kill_client(world.loop.dice.choice(alive))

    def _kill_client(self, name: str) -> None:
        world = self._world
        client = world.clients[name]
        if self._over or not client.party.alive:
            return
        world.loop.note(name, "is killed")
        world.loop.kill(client.party)
        successor = f"c{100 + world.new_number()}"
        self._later(self._span_s(1.0), lambda: world.start_client(successor, client.host))

    # ---- stores ---------------------------------------------------------------------------------

    def _some_host(self) -> StoreHost | None:
        world = self._world
        alive = [
            host
            for host in world.hosts.values()
            if host.process is not None and host.process.party.alive
        ]
        return world.loop.dice.choice(alive) if alive else None

    def _kill_store(self, host: StoreHost) -> None:
        world = self._world
        assert host.process is not None
        self._tear(host)
        world.loop.note(host.name, "is killed")
        world.loop.kill(host.process.party)
        host.process = None
        if "flipped-slot" in self._kinds and world.loop.dice.random() < 0.1:
            self._flip(host)

    def _store_crash(self) -> None:
        host = self._some_host()
        if host is not None:
            self._kill_store(host)
            self._later(self._span_s(3.0), lambda: self._world.start_store(host))

    def _store_stop(self) -> None:
        """SIGTERM: it takes leave, and comes back."""
        host, world = self._some_host(), self._world
        if host is None or host.process is None:
            return
        process = host.process
        world.loop.note(host.name, "stops")

        def stop() -> None:
            process.agent.stop(contents_survive=True)
            world.loop.after(0.0, stopped)

        def stopped() -> None:
            world.loop.kill(process.party)
            world.loop.after(self._span_s(2.0), lambda: world.start_store(host))

        world.loop.spawn(process.party, "stop", stop)

    def _store_reboot(self) -> None:
        host = self._some_host()
        if host is not None:
            self._reboot(host)

    def _reboot(self, host: StoreHost) -> None:
        """The host goes down, with all that is on it."""
        world = self._world
        self._kill_store(host)
        world.loop.note(host.name, "reboots: its memory is lost")
        host.reboot()
        for name, client in list(world.clients.items()):
            if client.host == host.name and client.party.alive:
                self._kill_client(name)
        self._later(self._span_s(2.0), lambda: world.start_store(host))

    def _segment_loss(self) -> None:
        """A daemon dies, and one of its segments does not survive."""
        host, world = self._some_host(), self._world
        if host is None or len(host.files) < 2:
            return
        self._kill_store(host)
        index = world.loop.dice.randrange(len(host.files))
        host.files[index].is_lost = True
        host.files[index] = world.new_file(host, index)
        world.loop.note(host.name, f"loses segment {index}")
        self._later(self._span_s(2.0), lambda: world.start_store(host))

    def _tear(self, host: StoreHost) -> None:
        """What the daemon was about to seal is written in part."""
        world = self._world
        pending = world.pending_seals.get(host.name)
        if "torn-slot" not in self._kinds or not pending or world.loop.dice.random() < 0.5:
            return
        assert host.process is not None
        before = [(file, bytes(file.table)) for file in host.files]
        seal_at(host.process, world.loop.dice.choice(pending))
        for file, old in before:
            if old == file.table:
                continue
            new = bytes(file.table)
            changed = [i for i in range(0, len(new), SLOT_BYTES) if new[i:][:192] != old[i:][:192]]
            torn = world.loop.dice.choice(changed)
            # Slots before it are whole, those behind it untouched.
            cut = torn + 8 * world.loop.dice.randrange(1, SLOT_BYTES // 8)
            file.table[:] = new[:cut] + old[cut:]
            world.loop.note(host.name, f"a slot is torn: {torn // SLOT_BYTES}")
            self._note_damage(file, old[torn:][:SLOT_BYTES])

    def _flip(self, host: StoreHost) -> None:
        """A bit of a sealed slot is not what it was."""
        dice = self._world.loop.dice
        file = dice.choice(host.files)
        records = np.frombuffer(bytes(file.table), SLOT_RECORD)
        sealed = np.flatnonzero(records["state"] == STATE_SEALED)
        if len(sealed):
            slot = int(dice.choice(sealed.tolist()))
            self._note_damage(file, records[slot : slot + 1].tobytes())
            file.table[slot * SLOT_BYTES + dice.randrange(SLOT_BYTES)] ^= 1 << dice.randrange(8)
            self._world.loop.note(host.name, f"a bit of slot {slot} flips")

    @staticmethod
    def _note_damage(file: SegmentFile, old: bytes) -> None:
        record = np.frombuffer(old, SLOT_RECORD)[0]
        file.damaged.add((int(record["epoch"]), int(record["seq"])))

    # ---- the master -----------------------------------------------------------------------------

    def _master_down(
        self,
        *,
        orderly: bool,
        power: bool = False,
        loss: bool = False,
        away_s: float | None = None,
    ) -> None:
        world = self._world
        master = self._victim()
        if self._over or master is None or (orderly and master.party.paused):
            return
        world.end_master(master, orderly=orderly)
        if power:
            world.oracle.power_failed = True
            lost = world.log.lose_power(lambda n: world.loop.dice.randint(0, n))
            world.loop.note(MASTER, f"its machine loses power: {lost} records are gone")
        if loss:
            self._lose_metadata()
        elif "compact" in self._kinds and world.loop.dice.random() < 0.3:
            self._compact()
        seconds = self._span_s(1.5) if away_s is None else away_s
        self._later(seconds, lambda: world.start_master(master.name))

    def _victim(self) -> MasterProcess | None:
        """Which master goes down."""
        return self._world.master

    def _compact(self) -> None:
        self._world.loop.note(MASTER, "the journal is compacted")
        self._world.log.compact()

    def _lose_metadata(self) -> None:
        """The next master begins with an empty directory. Not while one runs."""
        world = self._world
        world.loop.note(MASTER, "loses its metadata")
        # A directory begins with an epoch that is above, or at least, as the clock is.
        world.log = SimLog(epoch=world.log.epoch + world.loop.dice.choice((0, 1, 1000)))
        world.oracle.metadata_lost()

    def wipe_store(self, name: str) -> None:
        """What it holds belongs to a pool that is gone: its operator removes that."""
        world = self._world

        def wipe() -> None:
            host = world.hosts[name]
            if host.party is not None:
                world.loop.kill(host.party)
            host.wipe()
            world.start_store(host)

        world.loop.note(name, "is of a pool that is gone, and wiped")
        world.loop.after(0.0, wipe)

    def _hide_sockets(self) -> None:
        loop = self._world.loop
        until_s = loop.now_s + loop.dice.choice(HIDDEN_S)
        self._world.sockets_hidden_until_s = max(until_s, self._world.sockets_hidden_until_s)
        loop.note("all", "Unix sockets are hidden")

    def _metadata_loss(self) -> None:
        self._master_down(orderly=False, loss=True)

    def _power(self) -> None:
        self._master_down(orderly=False, power=True)
