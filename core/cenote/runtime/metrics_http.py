"""Metrics for Prometheus: the names and values of a `Metrics`, rendered when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, final

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from cenote.api.errors import ResourceUnavailable

from .metrics import Family, Histogram, Metrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["MetricsCollector", "MetricsServer"]


@final
class MetricsCollector(Collector):
    """Gives a `Metrics` to a prometheus_client registry, the caller's own if it has one."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """One Prometheus family per family of ours."""
        for family in self._metrics.collect():
            yield _rendered(family)


def _rendered(family: Family) -> Metric:
    labels = family.label_names
    if family.kind == "histogram":
        histograms = HistogramMetricFamily(family.name, family.help, labels=labels)
        for values, sample in family.samples():
            assert isinstance(sample, Histogram)
            histograms.add_metric(values, _cumulative(sample), sum_value=sample.total)
        return histograms
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    numbers = make(family.name, family.help, labels=labels)
    for values, sample in family.samples():
        assert not isinstance(sample, Histogram)
        numbers.add_metric(values, sample)
    return numbers


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    seen = 0
    names = [str(bound) for bound in histogram.bounds] + ["+Inf"]
    for name, count in zip(names, list(histogram.counts), strict=True):
        seen += count
        buckets.append((name, seen))
    return buckets


@final
class MetricsServer:
    """Serves `/metrics` over HTTP from a thread of its own until `close`.

    Only on loopback unless `host` says otherwise; `port` 0 takes a free one. Raises
    ResourceUnavailable where the port can't be had.
    """

    def __init__(self, metrics: Metrics, port: int, host: str = "127.0.0.1") -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(MetricsCollector(metrics))
        ProcessCollector(registry=registry)  # memory, CPU time, descriptors of this process
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ResourceUnavailable(
                f"can't serve metrics on {host}:{port}: {error.strerror or error}",
                remedy="choose another --metrics-port",
            ) from error
        self.host = host
        self.port = int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening and end the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
