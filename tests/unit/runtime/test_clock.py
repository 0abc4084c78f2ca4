import time

import pytest

from cenote.runtime.clock import SYSTEM_CLOCK, Clock, ManualClock


def test_the_system_clock_is_the_monotonic_clock() -> None:
    clock: Clock = SYSTEM_CLOCK
    before = time.monotonic_ns()
    assert before <= clock.monotonic_ns() <= time.monotonic_ns()
    assert abs(clock.monotonic_s() - time.monotonic()) < 60


def test_a_manual_clock_moves_only_when_told_to() -> None:
    clock = ManualClock(5.0)
    assert clock.monotonic_s() == clock.monotonic_s() == 5.0
    for _ in range(1000):
        clock.advance_s(0.001)
    assert clock.monotonic_ns() == 6_000_000_000
    clock.advance_ns(0)
    assert clock.monotonic_s() == 6.0


def test_a_manual_clock_never_goes_back() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="can't go back"):
        clock.advance_s(-1e-9)
