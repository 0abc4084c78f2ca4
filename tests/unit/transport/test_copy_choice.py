"""Whether long copies take helpers: told by what was measured lately."""

from __future__ import annotations

from cenote.transport.copying import _Choice


def play(choice: _Choice, copies: int, *, alone: float, helped: float) -> list[bool]:
    """So many copies at these rates; which of them had helpers."""
    taken = []
    for _ in range(copies):
        shared = choice.prefers_helpers()
        choice.learn(shared, helped if shared else alone)
        taken.append(shared)
    return taken


def test_helpers_that_help_are_used_but_for_a_look_now_and_then() -> None:
    taken = play(_Choice(), 100, alone=5.0, helped=9.0)
    assert taken[:3] == [True, True, True]
    assert taken.count(False) <= 10
    assert False in taken


def test_helpers_that_slow_it_down_are_done_without() -> None:
    taken = play(_Choice(), 100, alone=5.0, helped=3.0)
    assert taken[-50:].count(True) <= 4


def test_what_slow_first_copies_taught_is_soon_corrected() -> None:
    choice = _Choice()
    play(choice, 5, alone=2.0, helped=1.5)  # memory that is touched for the first time
    taken = play(choice, 40, alone=5.0, helped=9.0)
    assert taken[-30:].count(False) <= 3


def test_helpers_that_got_slow_are_left_and_taken_again() -> None:
    choice = _Choice()
    play(choice, 30, alone=5.0, helped=9.0)
    busy = play(choice, 60, alone=5.0, helped=2.0)
    assert busy[-30:].count(True) <= 3
    free = play(choice, 60, alone=5.0, helped=9.0)
    assert free[-30:].count(False) <= 3
