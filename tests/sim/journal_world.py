"""A simulated cluster of masters over one journal: elections, appends, snapshots, and what they
must come to. The masters' backends are the production code; what they decide is a number.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from cenote.api.errors import CenoteError, InternalError
from cenote.master.effects import SegmentGone
from cenote.master.journal import (
    Record,
    RecordWriter,
    SnapshotEnd,
    entry_range,
    parse_header,
    read_entries,
    snapshot_records,
    verify_record,
)
from cenote.master.journal_layout import JournalCorrupt
from cenote.master.kv_backend import KvBackend
from cenote.master.kv_follow import split_records
from cenote.master.kv_keys import SnapshotRow
from cenote.master.metadata import MasterRow
from kv_model import KvModel
from sim.kv import KvWeather, PartyClock, SimKv, SimWorkers
from sim.loop import START_S, Loop, Party, Violation

__all__ = ["JournalReport", "JournalWorld", "simulate_journal"]

MASTERS = 3
ACTIVE_S = 40.0
RECOVERY_S = 12.0
TENURE_S = 1.0
PREFIX = "/p"
FAULTS = (
    "kill",
    "pause",
    "cut off",
    "outage",
    "weather",
    "weather",
    "slow",
    "compact",
    "watches",
    "elect",
)


@dataclass
class JournalReport:
    seed: int
    failure: str
    counts: dict[str, int]
    trace: list[str]
    fingerprint: int

    @property
    def reproduction(self) -> str:
        return f"python tests/sim/run_journal.py --seed {self.seed}"


@dataclass
class _Master:
    """One life of a master."""

    number: int
    party: Party
    backend: KvBackend
    values: list[int] = field(default_factory=list)
    """What it has followed and appended: entry n is `values[n - 1]`."""
    leads: bool = False
    epoch: int = 0


class JournalWorld:
    """See the module. Value = the order in which numbers were drawn: never the same twice."""

    def __init__(self, seed: int) -> None:
        self.loop = Loop(seed)
        self.dice = self.loop.dice
        self.service = KvModel(lease_lateness_s=self.dice.choice((0.0, 0.5)))
        self.service.revision = 10
        self.weather = KvWeather(self.loop, self.service)
        self.masters: list[_Master | None] = [None] * MASTERS
        self.counts = dict.fromkeys(
            ("acts", "synced", "epochs", "snapshots", "faults", "anew", "lost"), 0
        )
        self.healing = False
        self._drawn = 0
        self._acted_epoch = 0
        self._synced: dict[int, int] = {}
        """Entry -> value, of what was said to be durable."""
        self._lives = 0

    # ---- what must hold -------------------------------------------------------------------------

    def truth(self) -> list[int]:
        """The journal as it is now: each entry's value, of the newest snapshot and what follows."""
        self.service.advance_to(self.loop.now_s)
        rows = {key.decode(): row.value for key, row in self.service.rows.items()}
        values: list[int] = []
        head = rows.get(f"{PREFIX}/snapshot")
        keys = sorted(key for key in rows if key.startswith(f"{PREFIX}/journal/"))
        covers = 0
        if head is not None:
            row = SnapshotRow.parse(head)
            covers = row.covers
            prefix = f"{PREFIX}/snapshots/{row.covers:020d}-{row.nonce}/"
            parts = [rows[key] for key in sorted(rows) if key.startswith(prefix)]
            if len(parts) != row.chunks:
                raise Violation("a snapshot is in force whose parts are missing")
            values = _values([record for part in parts for record in split_records(part)])
            if len(values) != covers:
                raise Violation(f"a snapshot of entry {covers} has {len(values)}")
        epoch = 0
        for key in keys:
            for record in split_records(rows[key]):
                first, last = entry_range(record)
                header = parse_header(record)
                assert header is not None
                if last <= covers:
                    continue
                if first != len(values) + 1:
                    raise Violation(f"entry {len(values) + 1} is missing before {first}")
                if header.epoch < epoch:
                    raise Violation(f"epoch {header.epoch} was appended to after {epoch}")
                epoch = header.epoch
                values += _values([record])
        return values

    def check(self) -> None:
        values = self.truth()
        for entry, value in self._synced.items():
            if entry > len(values) or values[entry - 1] != value:
                raise Violation(f"entry {entry} was durable and is gone")
        if len(set(values)) != len(values):
            raise Violation("a decision is in the journal twice")

    def acted(self, master: _Master) -> None:
        """A master has decided something that it will answer for."""
        self.counts["acts"] += 1
        if master.epoch < self._acted_epoch:
            raise Violation(f"epoch {master.epoch} acts after {self._acted_epoch}")
        self._acted_epoch = master.epoch

    def draw(self) -> int:
        self._drawn += 1
        return self._drawn

    # ---- a master -------------------------------------------------------------------------------

    def start(self, number: int) -> None:
        self._lives += 1
        party = Party(
            f"m{number}",
            offset_s=self.dice.uniform(0, 1e4),
            rate=1 + self.dice.uniform(-0.02, 0.02),
        )
        loop = self.loop
        backend = KvBackend(
            SimKv(self.weather, party),
            name="sim:",
            prefix=PREFIX,
            tenure_s=TENURE_S,
            clock=PartyClock(loop, party),
            workers=SimWorkers(loop, party),
            draw_nonce=lambda: f"{self.dice.getrandbits(32):08x}",
        )
        master = _Master(number, party, backend)
        self.masters[number] = master
        loop.spawn(party, f"m{number}", partial(self._guarded, self._live, master))

    def _guarded(self, run: Callable[[_Master], None], master: _Master) -> None:
        try:
            run(master)
        except (JournalCorrupt, InternalError) as error:
            raise Violation(f"m{master.number} finds what can't be: {error}") from error
        except CenoteError as error:
            self._end(master, f"gives up: {error}")

    def _end(self, master: _Master, why: str) -> None:
        """This life is over; the next begins soon."""
        self.loop.note(master.party.name, why)
        master.leads = False
        with contextlib.suppress(CenoteError):
            master.backend.close()
        if self.masters[master.number] is master:
            self.masters[master.number] = None
            self.loop.after(self.dice.random(), partial(self._restart, master.number))
        self.loop.after(0.0, lambda: self.loop.kill(master.party))

    def _restart(self, number: int) -> None:
        if self.masters[number] is None:
            self.start(number)

    def _live(self, master: _Master) -> None:
        backend = master.backend
        backend.join(MasterRow(f"m{master.number}", (f"m{master.number}:1",)))
        while True:
            step = backend.follow(0.3)
            self._take(master, step.records, anew=step.anew)
            if step.caught_up and backend.vacant and backend.campaign(1.0):
                break
            if step.caught_up and self.dice.random() < 0.02:
                self._snapshot(master)
        opened = backend.open()
        found = list(opened.records)
        self._take(master, found, anew=opened.anew)
        master.epoch, master.leads = opened.epoch, True
        self.counts["epochs"] += 1
        self.loop.note(
            master.party.name, f"leads epoch {opened.epoch}, {len(master.values)} entries"
        )
        if master.values != self.truth() and backend.lost is None:
            self._compare(master)
        if self.dice.random() < 0.5:
            self.loop.sleep(self.dice.random())  # as replaying takes its time
        self._lead(master)

    def _compare(self, master: _Master) -> None:
        """A leader has all that was durable; what it has is the journal."""
        for entry, value in self._synced.items():
            if entry > len(master.values) or master.values[entry - 1] != value:
                raise Violation(f"m{master.number} leads without entry {entry}")
        truth = self.truth()
        if truth[: len(master.values)] != master.values:
            raise Violation(f"m{master.number} leads with what is not the journal")

    def _take(self, master: _Master, records: Sequence[Record], *, anew: bool) -> None:
        if anew:
            self.counts["anew"] += 1
            master.values = []
        master.values += _values(records)
        if len(master.values) > self._drawn:
            raise Violation("more entries than decisions")

    def _lead(self, master: _Master) -> None:
        backend, clock = master.backend, PartyClock(self.loop, master.party)
        writer = RecordWriter(master.epoch, backend.last_entry + 1)
        while True:
            if backend.lost is not None:
                self.counts["lost"] += 1
                raise backend.lost
            refusal = backend.refusal
            if isinstance(refusal, InternalError):
                raise refusal
            if clock.monotonic_s() < backend.tenure_end_s and refusal is None:
                for _ in range(self.dice.randrange(1, 4)):
                    writer.add(SegmentGone(value := self.draw()))
                    master.values.append(value)
                self.acted(master)
                entry = backend.append(writer.take(backend.durable_entry))
                if self.dice.random() < 0.5:
                    said = dict(enumerate(master.values, 1))
                    future = backend.sync(entry)
                    future.add_done_callback(partial(self._done, entry, said))
            self.loop.sleep(self.dice.expovariate(1 / 0.05))
            if self.dice.random() < 0.005 and not self.healing:
                backend.close()
                self._end(master, "ends in order")
                return

    def _done(self, entry: int, said: dict[int, int], future: Future[None]) -> None:
        if future.exception() is None:
            self.counts["synced"] += 1
            for number in range(max(1, entry - 3), entry + 1):
                self._synced[number] = said[number]

    def _snapshot(self, master: _Master) -> None:
        values, covers = list(master.values), master.backend.last_entry
        if not covers:
            return
        effects = [SegmentGone(value) for value in values]
        records = snapshot_records(effects, covers=covers, epoch=1)
        with contextlib.suppress(CenoteError):
            master.backend.install_snapshot(records, covers)
            self.counts["snapshots"] += 1
            self.loop.note(master.party.name, f"made a snapshot of entry {covers}")

    # ---- faults ---------------------------------------------------------------------------------

    def strike(self) -> None:
        """One fault, and the next one later."""
        if self.healing:
            return
        dice, loop, weather = self.dice, self.loop, self.weather
        living = [master for master in self.masters if master is not None and master.party.alive]
        leaders = [master for master in living if master.leads]
        likely = leaders if leaders and dice.random() < 0.6 else living
        victim = dice.choice(likely) if likely else None
        kind = dice.choice(FAULTS)
        loop.note("fault", f"{kind} {victim.party.name if victim else ''}")
        self.counts["faults"] += 1
        span_s = dice.choice((0.2, 1.0, 1.5, 3.0)) * dice.random() * 2
        if kind == "kill" and victim is not None:
            loop.kill(victim.party)
            self.masters[victim.number] = None
            loop.after(dice.random() * 2, partial(self._restart, victim.number))
        elif kind == "pause" and victim is not None:
            loop.pause(victim.party)
            loop.after(span_s, partial(loop.unpause, victim.party))
        elif kind == "cut off" and victim is not None:
            name = victim.party.name
            weather.cut_off.add(name)
            loop.after(span_s, lambda: weather.cut_off.discard(name))
        elif kind == "outage":
            self.service.reachable = False
            loop.after(span_s, self._reach)
        elif kind == "weather":
            weather.lost, weather.unknown, weather.late, weather.twice = (
                dice.random() * dice.choice((0.0, 0.4)) for _ in range(4)
            )
            loop.after(span_s * 2, self._calm)
        elif kind == "slow":
            weather.latency_s = dice.choice((0.05, 0.3))
            loop.after(span_s, self._calm)
        elif kind == "compact":
            self.service.compact(self.service.revision)
        elif kind == "watches":
            weather.drop_watches()
        else:
            self.service.elect()
        loop.after(dice.expovariate(1 / 1.2), self.strike)

    def _reach(self) -> None:
        self.service.reachable = True

    def _calm(self) -> None:
        self.weather.lost = self.weather.unknown = self.weather.late = self.weather.twice = 0.0
        self.weather.latency_s = 0.002

    def heal(self) -> None:
        self.healing = True
        self._calm()
        self._reach()
        self.weather.cut_off.clear()
        for master in self.masters:
            if master is not None:
                self.loop.unpause(master.party)

    # ---- a life ---------------------------------------------------------------------------------

    def run(self) -> None:
        for number in range(MASTERS):
            self.loop.after(self.dice.random(), partial(self._restart, number))
        self.loop.after(1.0, self.strike)
        at_s = START_S
        while at_s < START_S + ACTIVE_S:
            at_s += 1.0
            self.loop.run(at_s)
            self.check()
        self.heal()
        self.loop.run(at_s + RECOVERY_S)
        self.check()
        leaders = [m for m in self.masters if m is not None and m.leads and m.backend.lost is None]
        if len(leaders) != 1:
            raise Violation(f"{len(leaders)} lead at the end")
        (leader,) = leaders
        if leader.backend.refusal is not None:
            raise Violation(f"the leader takes nothing at the end: {leader.backend.refusal}")
        truth = self.truth()
        for master in self.masters:
            if master is None:
                raise Violation("a master is missing at the end")
            values = master.values
            if truth[: len(values)] != values[: len(truth)] or len(truth) - len(values) > 40:
                raise Violation(f"m{master.number} has {len(values)} entries of {len(truth)}")


def _values(records: Sequence[Record]) -> list[int]:
    for record in records:
        verify_record(record)
    return [
        entry.segment_id
        for entry in read_entries(records, verified=True)
        if not isinstance(entry, SnapshotEnd) and isinstance(entry, SegmentGone)
    ]


def simulate_journal(seed: int) -> JournalReport:
    """One cluster's life."""
    world = JournalWorld(seed)
    failure = ""
    try:
        world.run()
    except Violation as violation:
        failure = f"violation: {violation}"
    except Exception:  # a bug anywhere, of which the report tells
        failure = traceback.format_exc()
    finally:
        for master in world.masters:
            if master is not None:
                world.loop.kill(master.party)
    return JournalReport(seed, failure, world.counts, list(world.loop.log), world.loop.fingerprint)
