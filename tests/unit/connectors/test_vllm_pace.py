"""What a token costs to compute, as the engine's steps tell it."""

from __future__ import annotations

import pytest

from cenote.connectors.vllm.pace import ComputePace


def test_it_is_learned_from_steps_of_many_tokens() -> None:
    pace = ComputePace()
    assert pace.began(0.0, 8) == 0, "all fixed cost"
    assert pace.compute_s(100) is None
    pace.ended(0.2, pace.began(0.0, 1000))
    assert pace.compute_s(100) == pytest.approx(0.02)


def test_faster_steps_count_for_more_than_slower_ones() -> None:
    pace = ComputePace()
    pace.ended(1.0, pace.began(0.0, 1000))
    pace.ended(12.0, pace.began(10.0, 1000))
    assert pace.token_s == pytest.approx(0.0011)
    pace.ended(20.1, pace.began(20.0, 1000))
    assert pace.token_s == pytest.approx(0.0006)


def test_a_step_that_is_ordered_while_another_one_runs_begins_with_that_one_s_end() -> None:
    pace = ComputePace()
    first, second = pace.began(0.0, 1000), pace.began(0.1, 1000)
    pace.ended(1.0, first)
    pace.ended(2.0, second)
    assert pace.token_s == pytest.approx(0.001)


def test_steps_whose_end_nobody_reports_are_forgotten() -> None:
    pace = ComputePace()
    numbers = [pace.began(float(at), 100) for at in range(20)]
    pace.ended(20.0, numbers[-1])
    assert pace.token_s == pytest.approx(0.01)
    pace.ended(21.0, numbers[3])
    assert pace.token_s == pytest.approx(0.01)
