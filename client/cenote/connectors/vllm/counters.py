"""Counters and durations of one half, handed to vLLM with each step as plain numbers."""

from __future__ import annotations

from typing import Final, final

__all__ = ["BUCKETS_S", "Counters"]

BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_SAMPLES_MAX: Final = 1000
"""Durations kept between two steps that are asked for; more are counted, not kept."""


@final
class Counters:
    """Threads may lose a count to each other now and then."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._durations: dict[str, list[float]] = {}

    def add(self, name: str, count: float) -> None:
        if count:
            self._counts[name] = self._counts.get(name, 0) + count

    def observe(self, name: str, duration_s: float) -> None:
        samples = self._durations.setdefault(name, [])
        if len(samples) < _SAMPLES_MAX:
            samples.append(duration_s)

    def take(self) -> dict[str, float | list[float]]:
        """What came together since the last call: counts, and `NAME_s` lists of seconds."""
        counts, self._counts = self._counts, {}
        durations, self._durations = self._durations, {}
        found: dict[str, float | list[float]] = dict(counts)
        found.update({f"{name}_s": samples for name, samples in durations.items()})
        return found
