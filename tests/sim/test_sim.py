"""The simulator: a range of seeds is clean, the same seed is the same run, and it can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cenote.api.errors import DeadlineExceeded
from cenote.client.ways import Ways
from cenote.master import replay
from cenote.master.effects import QuotaSet
from cenote.master.quotas import Quotas
from cenote.transport.base import SessionIdentity
from cenote.v1 import common_pb2
from sim.data_connection import DataConnection, open_connection
from sim.faults import (
    ALL_FAULTS,
    WITH_HIDDEN_SOCKETS,
    WITH_METADATA_LOSS,
    WITH_POWER,
    WITH_QUOTAS,
)
from sim.loop import Loop, Party, Signal
from sim.mutations import MUTATIONS, mutated
from sim.network import Weather
from sim.stores import StoreHost
from sim.world import Options, Report, World, simulate
from unit.master import test_damage
from unit.master.state_kit import Kit, new_node

ROOT = Path(__file__).absolute().parents[2]
CLEAN_SEEDS = 200
POWER_SEEDS = 40
HIDDEN_SOCKETS_SEEDS = 20
QUOTA_SEEDS = 20
PARTS = replay._parts
PER_TEST = 20
MUTATION_SEEDS = 500
"""A bug that is not noticed within so many seeds is not noticed."""
NOTICED_AT = {
    "adopt everything": 3,
    "cached reads are not verified": 1,
    "claims are overlooked": 62,
    "claims end by themselves": 9,
    "commits seal": 32,
    "cut is a word": 9,
    "free leased": 1,
    "free on expiry": 229,
    "free unfenced": 10,
    "grants outlive daemons": 2,
    "late attaches count": 25,
    "leases never end": 1,
    "leases outlive tenures": 2,
    "locations do not end": 1,
    "no version check": 186,
    "nothing is cancelled": 44,
    "older writes go on": 5,
    "seals before the attach": 178,
    "seals of what was dropped": 23,
    "queue pairs outlive epochs": 25,
    "second commit wins": 1,
    "sums are not compared": 21,
    "tombstones are forgotten": 137,
    "unfenced is forgotten": 33,
    "views are overlooked": 207,
    "the unsealed exist": 1,
    "void grants are used": 242,
    "what exists is taken back": 64,
}
"""Where to begin, to save time: the first seed that noticed it when this was written, if not 0. Who
changes what a seed does may have to look for new ones: the test says where it found it."""
POWER = {"nothing is verified again", "sums are not compared", "tombstones are forgotten"}
"""Only to be noticed where the journal's end is lost."""
RARE = {
    "attaches are for anybody",
    "leases are believed for ever",
    "mappings are overlooked",
    "nothing is verified again",
}
"""Not looked for here: no seed (or one in hundreds) has noticed them, as the simulator is now.
Attaches that are for anybody were noticed where metadata were lost, by seeds 6078, 6490 and 7108;
these don't notice them any more, nor do seeds 0 to 499 where none are lost. What is not verified
again: of the first 40 with `--power`; there is a scenario below."""
BROKEN = re.compile(r"\b(TypeError|AttributeError|NameError|ImportError)\b")
"""Such an error says that the mutation does not fit the code any more."""


def told(report: Report) -> str:
    return "\n".join([*report.trace[-60:], "", report.failure, f"again: {report.reproduction}"])


@pytest.mark.parametrize("first", range(0, CLEAN_SEEDS, PER_TEST))
def test_seeds_are_clean(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        report = simulate(Options(seed))
        if report.failure:
            pytest.fail(told(report), pytrace=False)
        assert report.counts["reads"] or report.counts["faults"]


@pytest.mark.parametrize("faults", [WITH_POWER, WITH_METADATA_LOSS], ids=["end", "all of it"])
@pytest.mark.parametrize("first", range(0, POWER_SEEDS, PER_TEST))
def test_seeds_are_clean_where_the_journal_is_lost(first: int, faults: frozenset[str]) -> None:
    for seed in range(first, first + PER_TEST):
        report = simulate(Options(seed, faults=faults))
        if report.failure:
            pytest.fail(told(report), pytrace=False)


@pytest.mark.parametrize("first", range(0, HIDDEN_SOCKETS_SEEDS, PER_TEST))
def test_seeds_are_clean_where_clients_change_over_to_shared_memory(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    better = []
    improve = Ways.improve

    def counted(*arguments: Any) -> Any:
        channel = improve(*arguments)
        better.append(channel is not None)
        return channel

    monkeypatch.setattr(Ways, "improve", counted)
    for seed in range(first, first + PER_TEST):
        report = simulate(Options(seed, faults=WITH_HIDDEN_SOCKETS))
        if report.failure:
            pytest.fail(told(report), pytrace=False)
    assert any(better)


@pytest.mark.parametrize("first", range(0, QUOTA_SEEDS, PER_TEST))
def test_seeds_are_clean_where_quotas_change(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = []
    apply = Quotas.apply

    def counted(quotas: Quotas, quota: QuotaSet) -> None:
        changed.append(quota)
        apply(quotas, quota)

    monkeypatch.setattr(Quotas, "apply", counted)
    for seed in range(first, first + PER_TEST):
        report = simulate(Options(seed, faults=WITH_QUOTAS))
        if report.failure:
            pytest.fail(told(report), pytrace=False)
    assert len(changed) > PER_TEST


def _no_quotas(pool: Any) -> Iterator[Any]:
    return (effect for effect in PARTS(pool) if not isinstance(effect, QuotaSet))


@pytest.mark.parametrize("bug", ["quotas are not replayed", "snapshots have no quotas"])
def test_quotas_that_are_forgotten_are_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "quotas are not replayed":
        monkeypatch.setitem(replay._REPLAY, QuotaSet, lambda pool, effect: None)
    else:
        monkeypatch.setattr(replay, "_parts", _no_quotas)
    for seed in range(MUTATION_SEEDS):
        report = simulate(Options(seed, faults=WITH_QUOTAS))
        if report.failure:
            break
    assert "the quota is" in report.failure
    monkeypatch.undo()
    assert not simulate(Options(report.seed, faults=WITH_QUOTAS)).failure


def test_seeds_do_something() -> None:
    """Not a simulator that is clean because nothing happens in it."""
    totals: dict[str, int] = {}
    for seed in range(12):
        for what, count in simulate(Options(seed)).counts.items():
            totals[what] = totals.get(what, 0) + count
    assert totals["acks"] > 100
    assert totals["hits"] > 300
    assert totals["faults"] > 50
    assert totals["evicted"] > 0
    assert totals["lost"] > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in RARE])
def test_bugs_on_purpose_are_noticed(name: str) -> None:
    first = NOTICED_AT.get(name, 0)
    faults = WITH_POWER if name in POWER else ALL_FAULTS
    with mutated(name):
        for seed in (*range(first, MUTATION_SEEDS), *range(first)):
            report = simulate(Options(seed, faults=faults))
            if report.failure:
                break
    assert report.failure, f"{name!r} was not noticed in {MUTATION_SEEDS} seeds"
    print(f"{name!r} was noticed by seed {report.seed}")
    assert not BROKEN.search(report.failure), report.failure
    clean = not simulate(Options(report.seed, faults=faults)).failure
    assert clean, "and it was not the mutation that failed"


def test_leases_on_what_was_not_verified_again_fail_a_scenario() -> None:
    """After a write that was torn, with the master or the daemon that knew of it."""
    with mutated("nothing is verified again"), pytest.raises(AssertionError):
        test_damage.test_nobody_gets_a_lease_on_what_was_not_looked_at(
            Kit().with_nodes(new_node(1), new_node(2)).with_session()
        )


def test_a_seed_is_the_same_run_in_any_process() -> None:
    """Whatever the hashes of bytes and the addresses of objects are there."""
    command = [sys.executable, str(ROOT / "tests/sim/run.py"), "--seed", "3"]
    said = {
        subprocess.run(
            command,
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(said) == 1
    assert "clean" in said.pop()


def test_a_task_waits_in_its_partys_own_time() -> None:
    loop = Loop(0)
    party = Party("p", offset_s=50.0, rate=2.0)
    seen: list[tuple[float, float]] = []

    def run() -> None:
        loop.sleep(1.0)
        seen.append((loop.now_s, loop.local_clock_s()))

    began_s = loop.now_s
    loop.spawn(party, "task", run)
    loop.run()
    ((now_s, local_s),) = seen
    assert now_s - began_s == pytest.approx(0.5, abs=1e-3)
    assert local_s == pytest.approx(now_s * 2 + 50)


def test_a_paused_party_goes_on_where_it_was_and_a_dead_one_does_not() -> None:
    loop = Loop(0)
    one, other = Party("one"), Party("other")
    seen: list[str] = []
    signal = Signal(loop)

    def run(name: str) -> None:
        try:
            signal.wait(10.0)
            seen.append(f"{name} {loop.now_s - began_s:.0f}")
        finally:
            seen.append(f"{name} left")

    began_s = loop.now_s
    loop.spawn(one, "a", lambda: run("one"))
    loop.spawn(other, "b", lambda: run("other"))
    loop.after(1.0, lambda: loop.pause(one))
    loop.after(2.0, signal.set)
    loop.after(1.5, lambda: loop.kill(other))
    loop.after(5.0, lambda: loop.unpause(one))
    loop.run()
    assert seen == ["other left", "one 5", "one left"]


def test_connecting_to_a_dead_daemon_takes_no_longer_than_it_may() -> None:
    """However late the answer that nobody listens: seeds 806 and 823 waited for it."""
    world = World(Options(0))
    world.network.weather = Weather(late=1.0, late_s=1000.0)
    identity = SessionIdentity(b"s" * 16, "boot", 1, common_pb2.Credentials())
    took_s: list[float] = []

    def run() -> None:
        began_s = world.loop.now_s
        with pytest.raises(DeadlineExceeded):
            open_connection(world, party, "h1", identity, began_s + 0.2, DataConnection)
        took_s.append(world.loop.now_s - began_s)

    party = Party("c1")
    world.loop.spawn(party, "user", run)
    world.loop.run()
    assert took_s == [pytest.approx(0.2, abs=1e-3)]


def test_one_daemon_at_a_time_has_a_nodes_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As their lock sees to, even before the first has begun: seed 5976 had two, and the earlier
    one was told that it is superseded."""
    begun: list[Party] = []

    def begin(world: World, host: StoreHost, party: Party, number: int) -> Any:
        begun.append(party)
        return SimpleNamespace(party=party)

    monkeypatch.setattr("sim.world.StoreProcess", begin)
    monkeypatch.setattr("sim.world._watch_agent", lambda process: None)
    world = World(Options(0))
    host = world.hosts["h1"]
    world.start_store(host)
    world.start_store(host)  # as when all faults end, at the same moment
    world.loop.run(world.loop.now_s + 1)
    assert begun == [host.party]
    world.loop.kill(begun[0])
    world.start_store(host)
    world.faults.wipe_store("h1")  # while that one is starting, too
    world.loop.run(world.loop.now_s + 1)
    assert [party.alive for party in begun] == [False, True]
    assert begun[1] is host.party
    assert host.files
