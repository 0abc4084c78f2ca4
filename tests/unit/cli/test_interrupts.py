"""Signals: an exception until somebody cleans up, then a flag."""

from __future__ import annotations

import os
import signal

import pytest

from cenote.cli.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_raises_and_later_ones_hurry(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    interrupts = Interrupts()
    with interrupts.catching():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert interrupts.number == number
        interrupts.take()
        assert not interrupts.hurry
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.hurry
    assert signal.getsignal(number) is before


def test_signals_raise_again_until_the_matter_is_taken() -> None:
    interrupts = Interrupts()
    with interrupts.catching():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
