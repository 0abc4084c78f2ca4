"""The simulator with content dedup: the same bytes under several keys, and writers who lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sim.contents import DEDUP
from sim.dedup_mutations import DEDUP_MUTATIONS, TWIN_MUTATIONS
from sim.faults import ALL_FAULTS, WITH_METADATA_LOSS, WITH_POWER
from sim.takeover_faults import TAKEOVER
from sim.test_sim import BROKEN
from sim.tiers import TIERS
from sim.world import Options, Report, simulate
from unit.store import test_copies_beside

pytestmark = pytest.mark.timeout(600)

CLEAN_SEEDS = 12
MUTATION_SEEDS = 200
NOTICED_AT = {
    "copies beside keep their share": 37,
    "foreign bytes are one's own": 4,
    "holders on SSDs are forgotten": 4,
    "twins are anywhere": 33,
    "twins hold nothing": 1,
}
"""Where to begin, to save time: the first seed that noticed it when this was written, if not 0."""
RARE: dict[str, Callable[[Path], None]] = {
    "daemons do not look": test_copies_beside.test_no_slot_is_made_for_other_bytes,
}
"""Not noticed by the first 118 seeds; a scenario of its own does."""


def told(report: Report) -> str:
    return "\n".join([*report.trace[-60:], "", report.failure, f"again: {report.reproduction}"])


@pytest.mark.parametrize(
    "faults",
    [ALL_FAULTS, WITH_POWER, WITH_METADATA_LOSS, ALL_FAULTS | {TAKEOVER}],
    ids=["", "power", "metadata", "takeover"],
)
def test_seeds_are_clean(faults: frozenset[str]) -> None:
    references = foreign = 0
    for seed in range(CLEAN_SEEDS // 4 if faults is not ALL_FAULTS else CLEAN_SEEDS):
        report = simulate(Options(seed, faults=faults | {DEDUP}))
        if report.failure:
            pytest.fail(told(report), pytrace=False)
        references += report.counts["references"]
        foreign += report.counts["foreign"]
    assert references
    if faults is ALL_FAULTS:  # there are few seeds of the others
        assert foreign


@pytest.mark.parametrize("name", RARE)
def test_bugs_that_seeds_hardly_notice_fail_a_scenario(name: str, tmp_path: Path) -> None:
    with TWIN_MUTATIONS[name](), pytest.raises(AssertionError):
        RARE[name](tmp_path)


@pytest.mark.parametrize("name", [n for n in (*DEDUP_MUTATIONS, *TWIN_MUTATIONS) if n not in RARE])
def test_bugs_on_purpose_are_noticed(name: str) -> None:
    faults = ALL_FAULTS | {DEDUP} | ({TIERS} if name in TWIN_MUTATIONS else set())
    first = NOTICED_AT.get(name, 0)
    with (DEDUP_MUTATIONS | TWIN_MUTATIONS)[name]():
        for seed in (*range(first, MUTATION_SEEDS), *range(first)):
            report = simulate(Options(seed, faults=faults))
            if report.failure:
                break
    assert report.failure, f"{name!r} was not noticed in {MUTATION_SEEDS} seeds"
    print(f"{name!r} was noticed by seed {report.seed}")
    assert not BROKEN.search(report.failure), report.failure
    assert not simulate(Options(report.seed, faults=faults)).failure, "and it was not the mutation"
