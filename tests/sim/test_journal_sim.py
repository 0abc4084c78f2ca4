"""Several masters over one journal, in virtual time: seeds are clean, and bugs are noticed."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from sim.journal_mutations import MUTATIONS, mutated
from sim.journal_world import JournalReport, simulate_journal

CLEAN_SEEDS = 80
PER_TEST = 10
MUTATION_SEEDS = 200
"""A bug that is not noticed within so many seeds is not noticed."""
NOTICED_AT = {
    "appends are not fenced": 18,
    "appends overwrite": 1,
    "elections are blind": 20,
    "elections are free for all": 37,
    "gaps are fine": 4,
    "leaders act for too long": 4,
    "leaders are deaf": 1,
    "leaders read old news": 26,
    "no read back": 18,
    "positions get lost": 1,
}
"""Where to begin, to save time: the first seed that noticed it when this was written, if not 0 or
nearly. Who changes what a seed does may have to look for new ones: the test says where it was."""


RARE = {"snapshots before their parts", "tenures count from the answer"}
"""Not looked for here: one in hundreds of seeds notices them, as the simulator is now."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Troubles are what the simulator is made of: nobody reads of thousands of them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def told(report: JournalReport) -> str:
    return "\n".join([*report.trace[-60:], "", report.failure, f"again: {report.reproduction}"])


@pytest.mark.parametrize("first", range(0, CLEAN_SEEDS, PER_TEST))
def test_seeds_of_journals_are_clean(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        report = simulate_journal(seed)
        if report.failure:
            pytest.fail(told(report), pytrace=False)
        assert report.counts["faults"] > 5


def test_seeds_of_journals_do_something() -> None:
    totals: dict[str, int] = {}
    for seed in range(5):
        for what, count in simulate_journal(seed).counts.items():
            totals[what] = totals.get(what, 0) + count
    assert totals["acts"] > 1000
    assert totals["synced"] > 500
    assert totals["epochs"] > 15
    assert totals["snapshots"] > 20
    assert totals["lost"] > 0


def test_the_same_seed_is_the_same_journal() -> None:
    first, second = simulate_journal(11), simulate_journal(11)
    assert (first.counts, first.trace) == (second.counts, second.trace)
    assert simulate_journal(12).trace != first.trace


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in RARE])
def test_bugs_of_the_journal_are_noticed(name: str) -> None:
    first = NOTICED_AT.get(name, 0)
    with mutated(name):
        for seed in (*range(first, MUTATION_SEEDS), *range(first)):
            report = simulate_journal(seed)
            if report.failure:
                assert "Traceback" not in report.failure, report.failure
                print(f"noticed at seed {seed}")
                return
    pytest.fail(f"no seed up to {MUTATION_SEEDS} noticed: {name}")
