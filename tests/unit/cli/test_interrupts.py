"""Signals: an exception until somebody cleans up, then a flag."""

from __future__ import annotations

import os
import signal

import pytest

from cenote.cli.interrupts import Interrupts


class Clock:
    """The time that signals are seen at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("cenote.cli.interrupts.time.monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_raises_and_later_ones_hurry(number: signal.Signals, clock: Clock) -> None:
    before = signal.getsignal(number)
    interrupts = Interrupts()
    with interrupts.catching():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert interrupts.number == number
        interrupts.take()
        assert not interrupts.hurry
        clock.now_s += 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.hurry
    assert signal.getsignal(number) is before


def test_signals_raise_again_until_the_matter_is_taken(clock: Clock) -> None:
    interrupts = Interrupts()
    with interrupts.catching():
        for _ in range(2):
            clock.now_s += 1
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_comes_twice_at_once_is_one(clock: Clock) -> None:
    interrupts = Interrupts()
    with interrupts.catching():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        clock.now_s += 0.05
        signal.raise_signal(signal.SIGTERM)
        interrupts.take()
        signal.raise_signal(signal.SIGTERM)
        assert not interrupts.hurry
        clock.now_s += 0.06
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.hurry


def test_who_owes_a_result_holds_signals_back(clock: Clock) -> None:
    interrupts = Interrupts()
    with interrupts.catching():
        with interrupts.holding():
            assert not interrupts.number
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
                assert interrupts.exit_code == 128 + signal.SIGTERM
                clock.now_s += 1
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            clock.now_s += 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_one_signal_is_let_through_to_a_call_that_waits(clock: Clock) -> None:
    interrupts = Interrupts()
    with interrupts.catching(), interrupts.holding():
        with interrupts.raising():
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            clock.now_s += 1
            signal.raise_signal(signal.SIGTERM)
        clock.now_s += 1
        signal.raise_signal(signal.SIGINT)
    assert interrupts.name == "SIGTERM"


def test_an_exception_that_was_lost_is_made_up_for() -> None:
    interrupts = Interrupts()
    interrupts.check()
    with interrupts.catching():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.take()
        interrupts.check()
