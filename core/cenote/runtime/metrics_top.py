"""Figures by namespace, for the few that matter, and the rest together.

A pool may have thousands of namespaces, and a label with thousands of values breaks a Prometheus.
So the busiest are shown by name, all others as one: `OTHER`. What only grows must go on growing in
every series, also when a namespace comes to be shown or is shown no more; hence what it counts from
then on is added to where it is shown then, and nothing moves from one series to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

__all__ = ["NAMESPACES_SHOWN", "OTHER", "TopNamespaces"]

NAMESPACES_SHOWN: Final = 20
OTHER: Final = "_other"
_MEMORY: Final = 0.9
"""How much of what a namespace did before one scrape counts at the next."""
_BETTER: Final = 2.0
"""So much busier must be who takes another one's place: else series would come and go."""


@final
class TopNamespaces:
    """Folds counts of all namespaces into those of at most `shown` of them and `OTHER`.

    Used from one thread, once a scrape.
    """

    def __init__(self, shown: int = NAMESPACES_SHOWN) -> None:
        self._shown = shown
        self._last: dict[str, tuple[float, ...]] = {}
        """What each had counted at the last scrape."""
        self._busy: dict[str, float] = {}
        self._sums: dict[str, list[float]] = {}
        """What is shown, by name; `OTHER` once there was something to it."""

    def fold(self, counts: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """The series to show. `counts`: of each namespace, as many numbers each time, that only
        grow; the first says how busy it is. One that has become smaller began anew."""
        grown: dict[str, tuple[float, ...]] = {}
        for name, now in counts.items():
            before = self._last.get(name)
            if before is None or any(n < b for n, b in zip(now, before, strict=True)):
                grown[name] = tuple(now)
            else:
                grown[name] = tuple(n - b for n, b in zip(now, before, strict=True))
        self._last = {name: tuple(now) for name, now in counts.items()}
        self._choose(grown)
        for name, more in grown.items():
            at = name if name in self._sums else OTHER
            sums = self._sums.setdefault(at, [0.0] * len(more))
            for i, n in enumerate(more):
                sums[i] += n
        return {name: list(sums) for name, sums in self._sums.items()}

    def gather(self, values: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """What is so now, rather than counted, under the names that `fold` has chosen."""
        found: dict[str, list[float]] = {}
        for name, now in values.items():
            sums = found.setdefault(name if name in self._sums else OTHER, [0.0] * len(now))
            for i, n in enumerate(now):
                sums[i] += n
        return found

    def _choose(self, grown: Mapping[str, Sequence[float]]) -> None:
        """Who is shown from now on: those that were, unless they are gone or others are much
        busier."""
        self._busy = {
            name: self._busy.get(name, 0.0) * _MEMORY + more[0] for name, more in grown.items()
        }
        members = [name for name in self._sums if name != OTHER]
        for name in members:
            if name not in grown:
                del self._sums[name]
        waiting = self._by_business(name for name in grown if name not in self._sums)
        for name in waiting:
            members = [member for member in self._sums if member != OTHER]
            if len(members) < self._shown:
                self._show(name, grown)
                continue
            least = min(members, key=lambda member: self._busy[member])
            if self._busy[name] <= _BETTER * self._busy[least]:
                break
            del self._sums[least]
            self._show(name, grown)

    def _show(self, name: str, grown: Mapping[str, Sequence[float]]) -> None:
        if name != OTHER:
            self._sums[name] = [0.0] * len(grown[name])

    def _by_business(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: (-self._busy[name], name))
