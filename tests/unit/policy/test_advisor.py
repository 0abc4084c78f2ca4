"""Shadow caches over sampled keys: curves, the choice of a policy, bounds."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from cenote.policy.advisor import CURVE_FACTORS, Advisor
from cenote.policy.model import spread


def lru_rates(references: list[int], capacities: list[int]) -> list[float]:
    rates = []
    for capacity in capacities:
        kept: OrderedDict[int, None] = OrderedDict()
        hits = 0
        for block in references:
            hits += block in kept
            kept[block] = None
            kept.move_to_end(block)
            if len(kept) > capacity:
                kept.popitem(last=False)
        rates.append(hits / len(references))
    return rates


@pytest.mark.parametrize(("capacity", "tolerance"), [(1_000, 0.03), (20_000, 0.05)])
def test_the_curve_is_that_of_lru(capacity: int, tolerance: float) -> None:
    advisor = Advisor(compares=False)
    advisor.resize(capacity)
    rng = np.random.default_rng(6)
    references = (rng.exponential(capacity, 20 * min(capacity, 5_000)).astype(np.int64)).tolist()
    words = spread(np.array(references))
    for word in words[(words & np.uint64(advisor.mask)) == 0].tolist():
        advisor.note_one(word, 3)
        if advisor.waiting >= 200:
            advisor.work(200)
    curve = advisor.curve(3)
    assert curve is not None
    assert (np.diff(curve) >= -1e-9).all()
    expected = lru_rates(references, [int(capacity * factor) for factor in CURVE_FACTORS])
    # Where little came back the cold start weighs: old counts are halved, the model's are not.
    assert curve == pytest.approx(expected, abs=tolerance)


def test_namespaces_are_told_apart() -> None:
    advisor = Advisor(compares=False)
    advisor.resize(1_000)
    for step in range(40):
        advisor.note(spread(np.arange(50)), 1)  # always the same
        advisor.note(spread(np.arange(50) + 1_000 * (step + 1)), 2)  # never
        advisor.work(1_000)
    same, never = advisor.curve(1), advisor.curve(2)
    assert same is not None
    assert never is not None
    assert same[5] > 0.9
    assert never[5] == 0
    assert advisor.references(1) == 2_000
    assert advisor.curve(9) is None


def test_a_scan_beside_a_hot_set_makes_it_leave_lru() -> None:
    advisor = Advisor()
    advisor.resize(600)
    hot = np.arange(400)
    rng = np.random.default_rng(1)
    fresh = 10_000
    for _ in range(400):
        advisor.note(spread(rng.choice(hot, 40, replace=False)), 0)
        advisor.note(spread(np.arange(fresh, fresh + 80)), 0)
        fresh += 80
        advisor.work(1_000)
    rates = advisor.hit_rates()
    assert advisor.choice != "lru"
    assert advisor.switches >= 1
    assert rates[advisor.choice] > rates["lru"] + 0.007


def test_the_policy_of_the_start_is_left_sooner_than_one_that_was_chosen() -> None:
    """A pool that turns its contents over slowly is not to wait for what is plain."""
    advisor = Advisor()
    advisor.resize(600)
    rng = np.random.default_rng(2)
    for step in range(25):  # 5 turnovers
        advisor.note(spread(rng.choice(400, 40, replace=False)), 0)
        advisor.note(spread(np.arange(80) + 10_000 + 80 * step), 0)
        advisor.work(1_000)
    assert (advisor.choice != "lru", advisor.switches) == (True, 1)


def test_it_stays_where_nothing_is_better() -> None:
    advisor = Advisor()
    advisor.resize(500)
    for step in range(200):
        advisor.note(spread(np.arange(50) + 25 * step), 0)
        advisor.work(1_000)
    assert (advisor.choice, advisor.switches) == ("lru", 0)


def test_what_comes_too_fast_is_dropped_and_fewer_keys_are_sampled() -> None:
    advisor = Advisor()
    advisor.resize(1_000)
    assert advisor.sampling_rate == 1.0
    for step in range(30):
        advisor.note(spread(np.arange(1_000) + 1_000 * step), 0)
    assert advisor.dropped > 0
    advisor.work(100)
    assert advisor.sampling_rate == 0.5
    assert advisor.memory_bytes() < 16 << 20


def test_work_is_bounded_by_batches_where_few_objects_fit() -> None:
    """A batch takes 0.1 ms, also where it is one reference."""
    advisor = Advisor()
    advisor.resize(10)
    advisor.note(spread(np.arange(500)), 0)
    assert advisor.work(128, 8) == 8
    assert advisor.work(128) == 128


def test_nothing_is_sampled_before_the_capacity_is_known() -> None:
    advisor = Advisor()
    advisor.note(spread(np.arange(100)), 0)
    assert advisor.work(1_000) == 0
    assert advisor.curve() is None
    assert advisor.hit_rates() == {}


def test_ids_are_used_again() -> None:
    advisor = Advisor(compares=False)
    advisor.resize(1_000)
    for step in range(400):
        advisor.note(spread(np.arange(200) + 200 * step), 0)
        advisor.work(1_000)
    advisor.note(spread(np.arange(200) + 200 * 399), 0)
    advisor.work(1_000)
    assert advisor.memory_bytes() < 16 << 20
