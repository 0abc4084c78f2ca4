"""What a check finds, and running checks side by side, each with a deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cenote.api.errors import CenoteError

__all__ = ["Check", "Finding", "Verdict", "run_checks"]

_PARALLEL_MAX: Final = 16
_SLACK_S: Final = 0.5  # for what a check does besides waiting for others


class Verdict(StrEnum):
    """What a finding means."""

    OK = "ok"
    WARN = "warn"
    """It works, and not as well as it could; or it will stop working."""
    FAIL = "fail"
    SKIPPED = "skipped"
    """Not looked at, and why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


Look = Callable[[float], Sequence[Finding]]
"""Takes the seconds that it has, returns what it found."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look at."""

    name: str
    look: Look


def run_checks(checks: Sequence[Check], deadline_s: float) -> list[Finding]:
    """All findings, in the order of the checks; returns about `deadline_s` later at the latest.

    A check gets a thread of its own, since what it asks (a resolver, a file system, a device) may
    never answer; one that does not end in time is a failure, and its thread ends with the process.
    """
    todo: queue.SimpleQueue[tuple[int, Check] | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Sequence[Finding]]] = queue.SimpleQueue()
    for entry in enumerate(checks):
        todo.put(entry)
    until_s = time.monotonic() + deadline_s + _SLACK_S
    for _ in range(min(_PARALLEL_MAX, len(checks))):
        todo.put(None)
        threading.Thread(
            target=_work, args=(todo, done, deadline_s), name="cenote-doctor", daemon=True
        ).start()
    found: dict[int, Sequence[Finding]] = {}
    while len(found) < len(checks):
        try:
            number, findings = done.get(timeout=max(0.001, until_s - time.monotonic()))
        except queue.Empty:
            break
        found[number] = findings
    return [
        finding
        for number, check in enumerate(checks)
        for finding in found.get(number) or [_late(check, deadline_s)]
    ]


def _late(check: Check, deadline_s: float) -> Finding:
    return Finding(
        check.name,
        Verdict.FAIL,
        f"no answer within {deadline_s:g} s",
        "see what it hangs in; --deadline gives it more time",
    )


def _work(
    todo: queue.SimpleQueue[tuple[int, Check] | None],
    done: queue.SimpleQueue[tuple[int, Sequence[Finding]]],
    deadline_s: float,
) -> None:
    while (entry := todo.get()) is not None:
        number, check = entry
        try:
            findings = list(check.look(deadline_s))
        except CenoteError as error:
            findings = [Finding(check.name, Verdict.FAIL, error.message, error.remedy)]
        except Exception as error:  # a doctor that dies of one finding would tell none
            text = f"the check itself failed: {type(error).__name__}: {error}"
            findings = [Finding(check.name, Verdict.FAIL, text, "please report this")]
        skipped = [Finding(check.name, Verdict.SKIPPED, "there is nothing to look at")]
        done.put((number, findings or skipped))
