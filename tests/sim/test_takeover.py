"""The simulator with several masters: seeds are clean, leaders change, and bugs are noticed."""

from __future__ import annotations

import pytest

from sim.takeover_faults import WITH_TAKEOVER
from sim.takeover_mutations import TAKEOVER_MUTATIONS
from sim.test_sim import BROKEN, MUTATION_SEEDS, PER_TEST, told
from sim.world import Options, simulate

CLEAN_SEEDS = 60
NOTICED_AT = {
    "clients stay behind": 16,
    "evictions are not awaited": 43,
    "nothing is adopted": 4,
    "removals are not awaited": 24,
    "seeds are not awaited": 104,
    "standbys are impatient": 353,
    "tenures never end": 3,
    "what was evicted comes back": 164,
}
"""As in `test_sim.py`: where to begin, to save time."""


@pytest.mark.parametrize("first", range(0, CLEAN_SEEDS, PER_TEST))
def test_seeds_with_several_masters_are_clean(first: int) -> None:
    totals: dict[str, int] = {}
    for seed in range(first, first + PER_TEST):
        report = simulate(Options(seed, faults=WITH_TAKEOVER))
        if report.failure:
            pytest.fail(told(report), pytrace=False)
        for what, count in report.counts.items():
            totals[what] = totals.get(what, 0) + count
    assert totals["leaders"] > 3 * PER_TEST, "leaders change"
    assert totals["acks"] > 10 * PER_TEST
    assert totals["hits"] > 10 * PER_TEST


def test_a_seed_with_several_masters_is_the_same_run_again() -> None:
    one, other = (simulate(Options(1, faults=WITH_TAKEOVER)) for _ in range(2))
    assert (one.fingerprint, one.events) == (other.fingerprint, other.events)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(TAKEOVER_MUTATIONS))
def test_bugs_on_purpose_are_noticed_where_leaders_change(name: str) -> None:
    first = NOTICED_AT.get(name, 0)
    with TAKEOVER_MUTATIONS[name]():
        for seed in (*range(first, MUTATION_SEEDS), *range(first)):
            report = simulate(Options(seed, faults=WITH_TAKEOVER))
            if report.failure:
                break
    assert report.failure, f"{name!r} was not noticed in {MUTATION_SEEDS} seeds"
    print(f"{name!r} was noticed by seed {report.seed}")
    assert not BROKEN.search(report.failure), report.failure
    clean = not simulate(Options(report.seed, faults=WITH_TAKEOVER)).failure
    assert clean, "and it was not the mutation that failed"
