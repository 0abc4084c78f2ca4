"""The simulator with SSDs and objects that move: seeds are clean, copies are made, bugs noticed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cenote.api.rows import CopyStatus
from cenote.runtime.memory import address_of
from cenote.transport.memory_access import MEMORY
from sim.contents import DEDUP
from sim.disk import SECTOR_BYTES, SimDisk
from sim.faults import ALL_FAULTS, WITH_HIDDEN_SOCKETS, WITH_METADATA_LOSS, WITH_POWER, WITH_QUOTAS
from sim.loop import Loop, Party
from sim.takeover_faults import WITH_TAKEOVER
from sim.test_sim import BROKEN, MUTATION_SEEDS, told
from sim.tier_mutations import TIER_MUTATIONS
from sim.tiers import TIERS
from sim.world import Options, simulate
from unit.master import test_sources_that_leave
from unit.store import test_puller, test_ssd, test_ssd_faults

WITH_TIERS = ALL_FAULTS | {TIERS}
CLEAN_SEEDS = 40
PER_TEST = 20
COMBINED = {
    "power": WITH_POWER,
    "metadata": WITH_METADATA_LOSS,
    "both": WITH_POWER | WITH_METADATA_LOSS,
    "takeover": WITH_TAKEOVER,
    "quotas": WITH_QUOTAS | WITH_HIDDEN_SOCKETS,
}
"""What goes wrong beside SSDs."""
COMBINED_SEEDS = 5
NOTICED_AT = {
    "changes are mixed up": 1,
    "disks are leased": 4,
    "failed writes count": 61,
    "pins are overlooked": 4,
    "slots are not flushed": 1,
    "untold copies are cleared": 1,
    "versions are not compared": 1,
}
"""As in `test_sim.py`: where to begin, to save time."""
FAULTS_OF = {"untold copies are cleared": WITH_POWER | {TIERS, DEDUP}}
"""For bugs that other faults are needed for."""


def _with_two(scenario: Callable[[test_puller.Two], None], path: Path) -> None:
    two = test_puller.Two(path)
    try:
        scenario(two)
    finally:
        two.close()


RARE: dict[str, Callable[[Path], None]] = {
    "copies outlive tenures": test_ssd_faults.test_copies_of_an_earlier_leader_do_not_land,
    "demotions are not proven": test_ssd.test_a_source_that_changed_makes_no_copy,
    "pulls are not proven": partial(
        _with_two, test_puller.test_what_is_not_what_was_sealed_becomes_no_slot
    ),
    "pulls outlive tenures": partial(
        _with_two, test_puller.test_nothing_of_an_earlier_leader_lands
    ),
    "sources may leave": lambda _: test_sources_that_leave.test_it_does_not_count(CopyStatus.DONE),
}
"""No seed is known that notices these now, of the first 29 to 70 (as the simulator was an hour
before, seed 16 noticed pulls that are not proven); a scenario of its own does."""


@pytest.mark.parametrize("first", range(0, CLEAN_SEEDS, PER_TEST))
def test_seeds_with_tiers_are_clean(first: int) -> None:
    totals: dict[str, int] = {}
    for seed in range(first, first + PER_TEST):
        report = simulate(Options(seed, faults=WITH_TIERS))
        if report.failure:
            pytest.fail(told(report), pytrace=False)
        for what, count in report.counts.items():
            totals[what] = totals.get(what, 0) + count
    assert totals["demoted"] > 5 * PER_TEST
    assert totals["promoted"] > PER_TEST
    assert totals["pulled"] > PER_TEST / 2
    assert totals["disk failed"] > 0
    assert totals["hits"] > 10 * PER_TEST


@pytest.mark.parametrize("more", [frozenset(), {DEDUP}], ids=["", "dedup"])
@pytest.mark.parametrize("kind", COMBINED)
def test_seeds_with_tiers_and_more_are_clean(kind: str, more: frozenset[str]) -> None:
    totals: dict[str, int] = {}
    for seed in range(COMBINED_SEEDS):
        report = simulate(Options(seed, faults=COMBINED[kind] | {TIERS} | more))
        if report.failure:
            pytest.fail(told(report), pytrace=False)
        for what, count in report.counts.items():
            totals[what] = totals.get(what, 0) + count
    assert totals["demoted"] > COMBINED_SEEDS
    assert totals["hits"] > 10 * COMBINED_SEEDS
    assert bool(totals["references"]) == bool(more)


def test_a_seed_with_tiers_is_the_same_run_again() -> None:
    one, other = (simulate(Options(1, faults=WITH_TIERS)) for _ in range(2))
    assert (one.fingerprint, one.events) == (other.fingerprint, other.events)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in TIER_MUTATIONS if name not in RARE])
def test_bugs_on_purpose_in_copies_are_noticed(name: str) -> None:
    first, faults = NOTICED_AT.get(name, 0), FAULTS_OF.get(name, WITH_TIERS)
    with TIER_MUTATIONS[name]():
        for seed in (*range(first, MUTATION_SEEDS), *range(first)):
            report = simulate(Options(seed, faults=faults))
            if report.failure:
                break
    assert report.failure, f"{name!r} was not noticed in {MUTATION_SEEDS} seeds"
    print(f"{name!r} was noticed by seed {report.seed}")
    assert not BROKEN.search(report.failure), report.failure
    clean = not simulate(Options(report.seed, faults=faults)).failure
    assert clean, "and it was not the mutation that failed"


@pytest.mark.parametrize("name", RARE)
def test_bugs_that_seeds_hardly_notice_fail_a_scenario(name: str, tmp_path: Path) -> None:
    with TIER_MUTATIONS[name](), pytest.raises(AssertionError):
        RARE[name](tmp_path)


def test_what_was_flushed_survives_a_power_cut_and_the_rest_as_it_happens() -> None:
    """The model of a device, that all of this rests on."""
    cuts = set()
    for seed in range(20):
        loop = Loop(seed)
        disk = SimDisk(loop, "h1", 12, 16)
        party = Party("h1")
        source = bytearray(16 * SECTOR_BYTES)
        source[:] = bytes([1]) * len(source)
        at = disk.plan.data_at

        def run(disk: SimDisk = disk, source: bytearray = source, at: int = at) -> None:
            place = address_of(source)
            disk.write([(place, 8 * SECTOR_BYTES)], at)
            disk.flush()
            disk.write([(place, 16 * SECTOR_BYTES)], at + 8 * SECTOR_BYTES)
            read = bytearray(16 * SECTOR_BYTES)
            disk.read(address_of(read), len(read), at)
            assert read == source

        loop.spawn(party, "daemon", run)
        loop.run()
        disk.cut_power()
        assert disk.content == disk.durable
        assert disk.content[at : at + 8 * SECTOR_BYTES] == source[: 8 * SECTOR_BYTES]
        left = disk.content[at + 8 * SECTOR_BYTES : at + 24 * SECTOR_BYTES]
        sectors = [left[i : i + SECTOR_BYTES] for i in range(0, len(left), SECTOR_BYTES)]
        assert all(sector in (bytes(SECTOR_BYTES), source[:SECTOR_BYTES]) for sector in sectors)
        cuts.add(sum(any(sector) for sector in sectors))
    assert {0, 16} < cuts, "nothing of it, all of it, and a part"


def test_a_daemon_that_is_killed_leaves_a_part_of_what_it_was_writing() -> None:
    parts = set()
    for seed in range(20):
        loop = Loop(seed)
        disk = SimDisk(loop, "h1", 12, 16)
        disk.weather.latency_s = 1.0
        party = Party("h1")
        source = bytearray(b"\x01" * 16 * SECTOR_BYTES)
        place = address_of(source)
        write = [(place, len(source))]
        loop.spawn(party, "daemon", partial(disk.write, write, disk.plan.data_at))
        loop.after(0.5, partial(loop.kill, party))
        loop.run()
        assert MEMORY[place] == 1  # the memory was there all the time
        parts.add(disk.content.count(b"\x01") // SECTOR_BYTES)
    assert len(parts) > 2
    assert max(parts) <= 16
