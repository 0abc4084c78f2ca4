"""The simulator with several masters: seeds are clean, leaders change, and bugs are noticed."""

from __future__ import annotations

import pytest

from sim.takeover_faults import WITH_TAKEOVER
from sim.takeover_mutations import TAKEOVER_MUTATIONS
from sim.test_sim import BROKEN, MUTATION_SEEDS, PER_TEST, told
from sim.world import Options, simulate
from unit.master import test_state_replay as replaying

CLEAN_SEEDS = 60
NOTICED_AT = {
    "clients stay behind": 16,
    "evictions are not awaited": 43,
    "nothing is adopted": 4,
    "removals are not awaited": 24,
    "seeds are not awaited": 104,
    "standbys are impatient": 353,
    "tenures never end": 3,
}
"""As in `test_sim.py`: where to begin, to save time."""
RARE = {"what was evicted comes back"}
"""Not looked for here: seeds 0 to 599 did not notice it. A scenario of its own does, below."""


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
@pytest.mark.parametrize("name", [name for name in TAKEOVER_MUTATIONS if name not in RARE])
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


@pytest.mark.parametrize("snapshot", [False, True], ids=["journal", "snapshot"])
def test_what_was_evicted_and_comes_back_is_noticed(snapshot: bool) -> None:
    scenario = replaying.test_what_was_adopted_and_evicted_is_not_adopted_again
    scenario(snapshot)
    with (
        TAKEOVER_MUTATIONS["what was evicted comes back"](),
        pytest.raises(AssertionError, match=r"assert \(1, "),
    ):
        scenario(snapshot)
