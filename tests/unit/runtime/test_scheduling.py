"""Sharing cores with others (cenote.runtime.scheduling)."""

from __future__ import annotations

from cenote.runtime.scheduling import CoreContention


def test_nobody_spins_for_longer_the_more_often_it_was_harmful() -> None:
    contention = CoreContention()
    now_s, held_off_s = 1000.0, []
    for _ in range(8):
        contention.note(now_s)
        held_off_s.append(round(contention.until_s - now_s, 6))
        now_s = contention.until_s + 0.001  # the next try
    assert held_off_s == [0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.32]


def test_threads_that_notice_it_together_count_once() -> None:
    contention = CoreContention()
    for _ in range(5):
        contention.note(1000.0)
    assert contention.until_s == 1000.005


def test_after_a_quiet_time_it_begins_anew() -> None:
    contention = CoreContention()
    for now_s in (1000.0, 1000.006, 1000.02, 1010.0):
        contention.note(now_s)
    assert contention.until_s == 1010.005
