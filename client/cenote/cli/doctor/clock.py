"""Clocks. cenote goes by durations on the monotonic clock and never compares the time of day of two
machines; people who read logs side by side do, and so do certificates."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .findings import Check, Finding, Verdict

__all__ = ["ClockFacts", "clock_checks", "judge_clock", "judge_skew"]

WATCHED_S: Final = 0.25
STEP_S: Final = 0.005
"""What the time of day may gain or lose meanwhile; slewing changes it by 500 ppm at most."""
READ_SLOW_NS: Final = 500
SKEW_S: Final = 3.0
"""An HTTP date has whole seconds, so less than this may be none."""
_READS: Final = 2_000
_SLOW_SOURCES: Final = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"})
_SOURCE: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_TIMEX_BYTES: Final = 512  # struct timex has 208
_STA_UNSYNC: Final = 0x40
_STATUS_OFFSET: Final = 40  # after modes, offset, freq, maxerror, esterror


@dataclass(frozen=True, slots=True)
class ClockFacts:
    """Over a moment of watching."""

    source: str
    """The kernel's clock source; "" where it is not told."""
    went_back: bool
    """The monotonic clock did."""
    drift_s: float
    """How much more the time of day gained than the monotonic clock."""
    read_ns: float
    synchronized: bool | None
    """By NTP or PTP; None where it is not told."""


def clock_checks() -> list[Check]:
    """Of this host's own clocks."""
    return [Check("clock", lambda _: judge_clock(_watch()))]


def _watch() -> ClockFacts:
    began_ns, began_wall_ns = time.monotonic_ns(), time.time_ns()
    went_back, before_ns, reads = False, began_ns, 0
    until_ns = began_ns + int(WATCHED_S * 1e9)
    cheapest_ns = float("inf")
    while before_ns < until_ns:
        for _ in range(_READS):
            now_ns = time.monotonic_ns()
            went_back |= now_ns < before_ns
            before_ns = max(before_ns, now_ns)
        reads += _READS
        cheapest_ns = min(cheapest_ns, _read_cost_ns())
        time.sleep(0.01)
    elapsed_ns, wall_ns = time.monotonic_ns() - began_ns, time.time_ns() - began_wall_ns
    return ClockFacts(
        source=_SOURCE.read_text().strip() if _SOURCE.is_file() else "",
        went_back=went_back,
        drift_s=(wall_ns - elapsed_ns) / 1e9,
        read_ns=cheapest_ns,
        synchronized=_is_synchronized(),
    )


def _read_cost_ns() -> float:
    clock = time.monotonic_ns
    began = clock()
    for _ in range(99):
        clock()
    return (clock() - began) / 100


def _is_synchronized() -> bool | None:
    """What the kernel was told by whoever keeps the time (adjtimex)."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(buffer) < 0:
        return None
    status = int.from_bytes(buffer.raw[_STATUS_OFFSET : _STATUS_OFFSET + 4], "little")
    return not status & _STA_UNSYNC


def judge_clock(facts: ClockFacts) -> list[Finding]:
    """What is wrong with this host's clocks."""
    check = "clock"
    if facts.went_back:
        return [
            Finding(
                check,
                Verdict.FAIL,
                "the monotonic clock went back: leases and deadlines can't be trusted here",
                "another clock source (kernel option clocksource=), another hypervisor",
            )
        ]
    if abs(facts.drift_s) > STEP_S:
        return [
            Finding(
                check,
                Verdict.WARN,
                f"the time of day was stepped by {facts.drift_s * 1000:+.1f} ms while it was"
                " watched; leases don't mind, logs do",
                "let chrony or ntpd slew the clock instead of stepping it",
            )
        ]
    source = facts.source or "not told"
    text = f"source {source}, {facts.read_ns:.0f} ns a look"
    if facts.source in _SLOW_SOURCES or facts.read_ns > READ_SLOW_NS:
        return [
            Finding(
                check,
                Verdict.WARN,
                f"{text}: each call looks at it several times",
                "clocksource=tsc (or the hypervisor's own: kvm-clock, hyperv) as kernel option",
            )
        ]
    if facts.synchronized is False:
        return [
            Finding(
                check,
                Verdict.WARN,
                f"{text}; nobody keeps the time of day (NTP), which cenote does not need and"
                " certificates and logs do",
                "run chrony or systemd-timesyncd on the host",
            )
        ]
    return [Finding(check, Verdict.OK, text)]


def judge_skew(check: str, skew_s: float, uncertainty_s: float) -> Finding | None:
    """Of this host's time of day against another's; None where there is no fault to find."""
    if abs(skew_s) <= SKEW_S + uncertainty_s:
        return None
    return Finding(
        check,
        Verdict.WARN,
        f"its time of day is {skew_s:+.0f} s from this host's",
        "let both be kept by NTP; leases don't depend on it, certificates and logs do",
    )
