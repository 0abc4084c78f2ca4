"""Counters and histograms that cost the hot path an integer addition.

A metric is a plain object with plain ints. Nothing is formatted, locked or looked up by name while
the program works; `Metrics.collect` walks them when somebody asks (`metrics_http` for Prometheus,
`snapshot` for the status command and tests).

An increment is not atomic across threads on a free-threaded Python; under the GIL, CPython does not
switch threads inside `value += n`. At worst a metric that several threads increment loses counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, final

__all__ = [
    "LATENCY_BOUNDS_S",
    "SIZE_BOUNDS_BYTES",
    "Counter",
    "Family",
    "Histogram",
    "Kind",
    "Metrics",
    "Row",
    "Sample",
]

# From a call over a Unix socket to a deadline.
LATENCY_BOUNDS_S: Final = (
    5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5,
    1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
# 256 B to 1 GiB in steps of four.
SIZE_BOUNDS_BYTES: Final = tuple(float(256 * 4**i) for i in range(12))

_SERIES_MAX: Final = (
    4096  # label sets are few and fixed; more is a key or an address used as a label
)
_LABEL_VALUE_CHARS_MAX: Final = 128
_ROWS_MAX: Final = 4096
"""Of a table; whoever makes one keeps it far below."""


@final
class Counter:
    """Something that only grows. The hot path may write `counter.value += n` itself."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, n: int = 1) -> None:
        """Count `n` more."""
        self.value += n


@final
class Histogram:
    """Counts per bucket, with a sum. `bounds` are inclusive upper bounds, ascending."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError("histogram bounds are ascending, and at least one")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one `value`, in the unit of the bounds."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_many(self, value: float, n: int) -> None:
        """Count `value` `n` times: a batch whose items took the same time each."""
        self.counts[bisect_left(self.bounds, value)] += n
        self.total += value * n

    def add(self, other: Histogram) -> None:
        """Count what another one of the same bounds has counted."""
        for index, count in enumerate(list(other.counts)):
            self.counts[index] += count
        self.total += other.total

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """An estimate of the `q` quantile (0..1), linear within its bucket; NaN where empty.

        Values above the last bound count as that bound.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile is within 0 and 1, not {q}")
        counts = list(self.counts)
        wanted, seen = q * sum(counts), 0
        if not wanted and not sum(counts):
            return math.nan
        for index, count in enumerate(counts[:-1]):
            if count and seen + count >= wanted:
                low = self.bounds[index - 1] if index else 0.0
                return low + (self.bounds[index] - low) * (wanted - seen) / count
            seen += count
        return self.bounds[-1]


Kind = Literal["counter", "gauge", "histogram"]
Sample = int | float | Histogram
Row = tuple[Sequence[str], Sample]
"""Label values, in the order of the names, and a value."""
_Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Family:
    """All series of one metric name: what `Metrics.collect` yields."""

    name: str
    help: str
    kind: Kind
    label_names: tuple[str, ...]
    series: dict[_Labels, Counter | Histogram | Callable[[], float]]
    rows: Callable[[], Iterable[Row]] | None = None
    """Of a table: makes all series anew at each scrape."""

    def samples(self) -> Iterator[tuple[tuple[str, ...], Sample]]:
        """Label values (in the order of `label_names`) and the current value of each series."""
        if self.rows is not None:
            for names, value in islice(self.rows(), _ROWS_MAX):
                yield tuple(names), value
            return
        for labels, metric in list(self.series.items()):
            values = tuple(value for _, value in labels)
            if isinstance(metric, Counter):
                yield values, metric.value
            elif isinstance(metric, Histogram):
                yield values, metric
            else:
                yield values, metric()


@final
class Metrics:
    """The metrics of one program: created once, while it starts, and then held by whoever counts.

    Asking again for the same name and labels gives the same object. Names carry their unit and, for
    counters, end in `_total`, as Prometheus wants: `cenote_store_read_bytes_total`. Raises
    ValueError for a name that is used with another kind, help, or label names, and where there are
    more series than a fixed set of labels can make.
    """

    __slots__ = ("_families", "_series_count", "before_collect")

    def __init__(self) -> None:
        self.before_collect: Callable[[], None] | None = None
        """Called at the begin of each scrape, in its thread: to take one look that all values are
        then of. Bounded in time."""
        self._families: dict[str, Family] = {}
        self._series_count = 0

    def counter(self, name: str, help: str, **labels: str) -> Counter:
        """The counter `name` for these label values."""
        if not name.endswith("_total"):
            raise ValueError(f"a counter's name ends in _total, unlike {name}")
        found = self._series(name, help, "counter", labels, Counter)
        if not isinstance(found, Counter):
            raise ValueError(f"the metric {name} is counted elsewhere")
        return found

    def gauge(self, name: str, help: str, read: Callable[[], float], **labels: str) -> None:
        """A value that `read` returns at scrape, from another thread: it must only read."""
        self._series(name, help, "gauge", labels, lambda: read, reads=True)

    def counted(self, name: str, help: str, read: Callable[[], float], **labels: str) -> None:
        """A count that is kept elsewhere and only grows; as `gauge` otherwise."""
        if not name.endswith("_total"):
            raise ValueError(f"a counter's name ends in _total, unlike {name}")
        if self._series(name, help, "counter", labels, lambda: read, reads=True) is not read:
            raise ValueError(f"the metric {name} is counted by a counter")

    def table(
        self,
        name: str,
        help: str,
        kind: Kind,
        label_names: Sequence[str],
        read: Callable[[], Iterable[Row]],
    ) -> None:
        """A family whose series come and go: `read` gives all of them at each scrape, from another
        thread. Whoever makes it bounds their number (`metrics_top` for namespaces)."""
        if kind == "counter" and not name.endswith("_total"):
            raise ValueError(f"a counter's name ends in _total, unlike {name}")
        if name in self._families:
            raise ValueError(f"the metric {name} exists already")
        self._families[name] = Family(name, help, kind, tuple(label_names), {}, read)

    def histogram(
        self, name: str, help: str, bounds: Sequence[float] = LATENCY_BOUNDS_S, **labels: str
    ) -> Histogram:
        """The histogram `name` for these label values."""
        found = self._series(name, help, "histogram", labels, lambda: Histogram(bounds))
        assert isinstance(found, Histogram)
        return found

    def build_info(self, component: str, version: str) -> None:
        """`cenote_build_info`: what runs here, as labels."""
        self.gauge(
            "cenote_build_info",
            "1; the labels say what runs, and of which release.",
            lambda: 1.0,
            component=component,
            version=version or "unknown",
        )

    def collect(self) -> Iterator[Family]:
        """Each family, in the order of creation."""
        if self.before_collect is not None:
            self.before_collect()
        yield from list(self._families.values())

    def snapshot(self) -> dict[str, float]:
        """Every value by `name` or `name{label="value"}`; a histogram gives `_count` and `_sum`."""
        values: dict[str, float] = {}
        for family in self.collect():
            for label_values, sample in family.samples():
                pairs = zip(family.label_names, label_values, strict=True)
                inner = ",".join(f'{k}="{v}"' for k, v in pairs)
                suffix = f"{{{inner}}}" if inner else ""
                if isinstance(sample, Histogram):
                    values[f"{family.name}_count{suffix}"] = sample.count
                    values[f"{family.name}_sum{suffix}"] = sample.total
                else:
                    values[f"{family.name}{suffix}"] = sample
        return values

    def _series(
        self,
        name: str,
        help: str,
        kind: Kind,
        labels: Mapping[str, str],
        make: Callable[[], Counter | Histogram | Callable[[], float]],
        *,
        reads: bool = False,
    ) -> Counter | Histogram | Callable[[], float]:
        ordered = tuple(sorted(labels.items()))
        names = tuple(k for k, _ in ordered)
        family = self._families.setdefault(name, Family(name, help, kind, names, {}))
        same = (family.kind, family.help, family.label_names) == (kind, help, names)
        if not same or family.rows is not None:
            raise ValueError(f"the metric {name} exists with another kind, help or label names")
        found = family.series.get(ordered)
        if found is not None and not (reads and callable(found)):
            return found  # a new reader takes over, and nothing else does
        if found is None:
            if self._series_count >= _SERIES_MAX:
                raise ValueError(f"more than {_SERIES_MAX} series: a label of {name} is unbounded")
            if any(len(value) > _LABEL_VALUE_CHARS_MAX for value in labels.values()):
                raise ValueError(f"a label of {name} is over {_LABEL_VALUE_CHARS_MAX} characters")
            self._series_count += 1
        family.series[ordered] = made = make()
        return made
