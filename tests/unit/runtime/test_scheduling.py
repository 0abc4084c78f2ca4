"""Sharing cores with others (cenote.runtime.scheduling)."""

from __future__ import annotations

import platform
import subprocess
import sys
import textwrap

import pytest

from cenote.runtime.scheduling import TIME_SLICE_NS, CoreContention

_ASK = """
import ctypes, os, struct, sys, threading
from cenote.runtime.scheduling import shorten_time_slice

def slice_ns(thread_id):
    buffer = ctypes.create_string_buffer(56)
    assert ctypes.CDLL(None).syscall({getattr_number}, thread_id, buffer, 56, 0) == 0
    return struct.unpack_from("=Q", buffer, 24)[0]
"""


def _told_by(script: str) -> str:
    number = {"x86_64": 315, "aarch64": 275}.get(platform.machine())
    if number is None:
        pytest.skip(f"the number of sched_getattr on {platform.machine()} is not known here")
    whole = _ASK.format(getattr_number=number) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", whole], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_daemon_and_its_threads_have_short_time_slices_and_keep_their_priority() -> None:
    told = _told_by("""
        nice = os.nice(3)
        assert shorten_time_slice()
        seen = []
        thread = threading.Thread(target=lambda: seen.append(slice_ns(0)))
        thread.start()
        thread.join()
        print(slice_ns(0), seen[0], os.getpriority(os.PRIO_PROCESS, 0) - nice)
    """)
    mine, threads, change = map(int, told.split())
    if mine != TIME_SLICE_NS:
        pytest.skip(f"Linux {platform.release()} has no time slices to choose (6.12 and later do)")
    assert (threads, change) == (TIME_SLICE_NS, 0)


def test_another_scheduling_class_is_left_alone() -> None:
    told = _told_by("""
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        print(shorten_time_slice(), os.sched_getscheduler(0) == os.SCHED_BATCH)
    """)
    assert told == "False True"


def test_without_the_system_call_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    from cenote.runtime import scheduling

    monkeypatch.setattr(platform, "machine", lambda: "abacus")
    assert scheduling.shorten_time_slice() is False


def test_nobody_spins_for_longer_the_more_often_it_was_harmful() -> None:
    contention = CoreContention()
    now_s, held_off_s = 1000.0, []
    for _ in range(8):
        contention.note(now_s)
        held_off_s.append(round(contention.until_s - now_s, 6))
        now_s = contention.until_s + 0.001  # the next try
    assert held_off_s == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.32, 0.32]


def test_threads_that_notice_it_together_count_once() -> None:
    contention = CoreContention()
    for _ in range(5):
        contention.note(1000.0)
    assert contention.until_s == 1000.01


def test_after_a_quiet_time_it_begins_anew() -> None:
    contention = CoreContention()
    for now_s in (1000.0, 1000.011, 1000.04, 1010.0):
        contention.note(now_s)
    assert contention.until_s == 1010.01
