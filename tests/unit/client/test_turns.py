"""Turns: one thread at a time, bounded waiting, nothing left behind by an interrupt."""

from __future__ import annotations

import threading
import time

import pytest

from cenote.api.errors import DeadlineExceeded
from cenote.client.turns import Turn
from waiting import wait_until


def test_one_thread_at_a_time() -> None:
    turn = Turn()
    inside, most, done = [0], [0], [0]

    def work() -> None:
        for _ in range(50):
            try:
                turn.take(time.monotonic() + 10, "busy")
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1
            finally:
                turn.give()
        done[0] += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most[0], done[0]) == (1, 4)


def test_waiting_ends_by_the_deadline() -> None:
    turn = Turn()
    turn.take(0.0, "free: no waiting")
    turn.take(0.0, "mine already")
    failed: list[str] = []

    def wait() -> None:
        try:
            turn.take(time.monotonic() + 0.02, "somebody has it")
        except DeadlineExceeded as error:
            failed.append(error.message)
        finally:
            turn.give()  # not ours to give

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert failed == ["somebody has it"]
    thread = threading.Thread(target=lambda: turn.take(time.monotonic() + 10, "waits"))
    thread.start()
    turn.give()
    wait_until(lambda: not thread.is_alive(), what="the next one has it")


def test_an_interrupt_inside_leaves_nothing() -> None:
    turn = Turn()

    def interrupted() -> None:
        try:
            turn.take(time.monotonic() + 1, "busy")
            raise KeyboardInterrupt
        finally:
            turn.give()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    thread = threading.Thread(target=lambda: turn.take(0.0, "must be free"))
    thread.start()
    thread.join()
    with pytest.raises(DeadlineExceeded):
        turn.take(0.0, "the thread has it")
