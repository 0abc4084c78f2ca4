"""Loads that go on while daemons die, stop and come back, and what they report.

`steady` is a program (see `programs.py`): reads and puts in turn; every call is timed on the clock
that all processes of the machine share, every byte is checked. The test cuts the times into before,
during and after a fault.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cenote.api.errors import CenoteError
from cenote.client import Client
from payloads import payload_of

if TYPE_CHECKING:
    from programs import Control

__all__ = ["Report", "Sample", "quantile_ms", "steady", "summary"]

Sample = tuple[float, float, str]
"""(when it ended, on the monotonic clock; seconds it took; what it was)."""

OWN_KEYS_MAX = 200
READS_AT_ONCE = 8
PUTS_AT_ONCE = 4


@dataclass(slots=True)
class Report:
    """What one process saw."""

    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Reads and puts that failed, misses of what was stored, wrong bytes: by text."""
    misses: list[float] = field(default_factory=list)
    """When a key of the test's own was missed, where that is allowed."""
    stored: dict[str, int] = field(default_factory=dict)
    """Sizes of what was acknowledged and not removed."""
    removed: list[str] = field(default_factory=list)
    same_session: bool = False
    """Whether its session at the end was that of the beginning."""


class _Steady:
    def __init__(
        self,
        client: Client,
        seed: int,
        base: dict[str, int],
        put_options: dict[str, Any],
        misses_are_legal: bool,
        keep: bool,
    ) -> None:
        self.client = client
        self.rng = random.Random(seed)
        self.base = list(base.items())
        self.put_options = put_options
        self.misses_are_legal = misses_are_legal
        self.keep = keep
        self.report = Report()
        self.own: deque[tuple[str, int]] = deque()
        self.prefix = f"own{seed}-"
        self.number = 0

    def step(self) -> None:
        kind = self.rng.choice(("get", "get", "get_batch", "put", "put_batch"))
        began_s = time.monotonic()
        try:
            getattr(self, f"_{kind}")()
        except CenoteError as error:
            took_s = time.monotonic() - began_s
            self.report.failures.append(f"{kind} after {took_s:.3f} s: {error!r}")
        ended_s = time.monotonic()
        self.report.samples.append((ended_s, ended_s - began_s, kind))
        if not self.keep and len(self.own) > OWN_KEYS_MAX:
            self._remove_oldest()

    def _some(self, count: int) -> list[tuple[str, int]]:
        rng, own = self.rng, self.own
        return [
            rng.choice(own) if own and rng.random() < 0.4 else rng.choice(self.base)
            for _ in range(count)
        ]

    def _check(self, key: str, size: int, value: bytes | None) -> None:
        if value is None:
            self.report.misses.append(time.monotonic())
            if not self.misses_are_legal:
                self.report.failures.append(f"{key} was missed")
        elif value != payload_of(key, size):
            self.report.failures.append(f"{key} has wrong bytes")

    def _get(self) -> None:
        ((key, size),) = self._some(1)
        self._check(key, size, self.client.get(key))

    def _get_batch(self) -> None:
        some = self._some(READS_AT_ONCE)
        values = self.client.get_batch([key for key, _ in some])
        for (key, size), value in zip(some, values, strict=True):
            self._check(key, size, value)

    def _new(self, count: int) -> list[tuple[str, int]]:
        first, self.number = self.number, self.number + count
        return [
            (f"{self.prefix}{i}", self.rng.choice((100, 4096, 20_000)))
            for i in range(first, first + count)
        ]

    def _stored(self, key: str, size: int) -> None:
        self.own.append((key, size))
        self.report.stored[key] = size

    def _put(self) -> None:
        ((key, size),) = self._new(1)
        result = self.client.put(key, payload_of(key, size), **self.put_options)
        if result.stored:
            self._stored(key, size)
        else:
            self.report.failures.append(f"{key} was not stored: {result!r}")

    def _put_batch(self) -> None:
        new = self._new(PUTS_AT_ONCE)
        values = [payload_of(key, size) for key, size in new]
        results = self.client.put_batch([key for key, _ in new], values, **self.put_options)
        for (key, size), result in zip(new, results, strict=True):
            if result.stored:
                self._stored(key, size)
            else:
                self.report.failures.append(f"{key} was not stored: {result.error!r}")

    def _remove_oldest(self) -> None:
        oldest = [self.own.popleft()[0] for _ in range(OWN_KEYS_MAX // 4)]
        for key in oldest:
            del self.report.stored[key]
        try:
            self.client.remove_batch(oldest)
            self.report.removed += oldest
        except CenoteError as error:
            self.report.failures.append(f"remove: {error!r}")


def steady(
    control: Control,
    lane: str,
    seed: int,
    base: dict[str, int],
    options: dict[str, Any],
    put_options: dict[str, Any],
    settings: dict[str, bool],
) -> None:
    """Reads of `base` (key -> size) and of its own keys, and puts, until told to "stop"; says its
    Report. Told anything else, it says how many calls it has made.

    `settings`: `misses_are_legal`; `keep`: nothing is removed.
    """
    with Client(lane, **options) as client:
        run = _Steady(
            client,
            seed,
            base,
            put_options,
            settings.get("misses_are_legal", False),
            settings.get("keep", False),
        )
        session_id = client.session.identity.session_id
        control.say("ready")
        while True:
            if control.told:
                if control.hear() == "stop":
                    break
                control.say(len(run.report.samples))
            run.step()
        run.report.same_session = client.session.identity.session_id == session_id
        control.say(run.report)


def quantile_ms(samples: list[Sample], share: float) -> float:
    """Of the times; 0 where there are none."""
    return float(np.quantile([s[1] for s in samples], share)) * 1000 if samples else 0.0


def summary(samples: list[Sample]) -> str:
    """Calls, p50, p99 and maximum, for people."""
    p50, p99, most = (quantile_ms(samples, q) for q in (0.5, 0.99, 1.0))
    return f"{len(samples)} calls, p50 {p50:.2f} ms, p99 {p99:.1f} ms, max {most:.0f} ms"
