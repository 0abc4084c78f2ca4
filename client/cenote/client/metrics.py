"""What the clients of this process show to Prometheus: `cenote_client_*`.

    from cenote.client import metrics

    metrics.register()                      # in the default registry: the program serves /metrics
    metrics.serve(9400)                     # or on a port of its own, loopback unless told so

Clients that come and go need no word, and what closed ones counted stays. With
`CENOTE_CLIENT_METRICS_LISTEN=host:port` the first client of a process does the latter by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, final

from prometheus_client import REGISTRY, CollectorRegistry

from cenote.api.errors import ConfigError, ResourceUnavailable
from cenote.kv.calls import register_calls
from cenote.runtime.log import get_logger
from cenote.runtime.metrics import Metrics, Row
from cenote.runtime.metrics_http import MetricsCollector, MetricsServer
from cenote.runtime.metrics_top import TopNamespaces

from .plan.counters import CALL_KINDS
from .tally import COLUMNS, TALLY, Tally, Totals

__all__ = ["client_metrics", "register", "serve", "serve_once"]

_AT: Final = {name: index for index, name in enumerate(COLUMNS)}
_STAGES: Final = ("asked", "present", "fetched", "verified")
_lock = threading.Lock()
_registered: list[CollectorRegistry] = []
_served: dict[str, MetricsServer] = {}
"""By where it was asked for; until the process ends."""
_log = get_logger(__name__)


@final
class _Look:
    """What was counted as of the last scrape."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._lock = threading.Lock()
        self._top = TopNamespaces()
        self.totals = Totals()
        self.spaces: dict[str, list[float]] = {}
        self.clients = 0
        self.nodes = 0

    def refresh(self) -> None:
        """Before a scrape."""
        with self._lock:
            self.totals, self.clients, self.nodes = self._tally.take()
            self.spaces = self._top.fold(self.totals.spaces)

    def column(self, name: str) -> list[Row]:
        """By namespace."""
        return [((space,), values[_AT[name]]) for space, values in self.spaces.items()]


def client_metrics(tally: Tally = TALLY) -> Metrics:
    """The metrics of the clients that `tally` knows."""
    metrics, look = Metrics(), _Look(tally)
    metrics.before_collect = look.refresh
    metrics.gauge("cenote_client_clients", "Open clients of this process.", lambda: look.clients)
    metrics.gauge(
        "cenote_client_connected_nodes",
        "Connections of clients to store daemons.",
        lambda: look.nodes,
    )
    _register_funnel(metrics, look)
    _register_calls(metrics, look)
    for name, text in (
        ("cached_reads", "Reads that took one round trip, since the location was cached."),
        ("stale_locations", "Locations that were not right any more, so the master was asked."),
        ("misreads", "Replicas whose bytes were not what was put, reported to the master."),
        ("stored", "Keys stored."),
        ("existed", "Keys that were put and existed."),
        ("read_bytes", "Payload of hits."),
        ("written_bytes", "Payload stored."),
    ):
        suffix = "" if name.endswith(("bytes", "reads", "locations")) else "_keys"
        metrics.table(
            f"cenote_client_{name}{suffix}_total",
            text,
            "counter",
            ("namespace",),
            lambda name=name: look.column(name),  # type: ignore[misc]
        )
    metrics.counted(
        "cenote_client_retries_total",
        "Requests to masters that were sent again.",
        lambda: look.totals.retries,
    )
    metrics.counted(
        "cenote_client_node_failures_total",
        "Times that a store daemon did not do what it was to do.",
        lambda: look.totals.node_failures,
    )
    register_calls(metrics)
    return metrics


def _register_funnel(metrics: Metrics, look: _Look) -> None:
    def stages() -> Iterable[Row]:
        for space, values in look.spaces.items():
            for stage in _STAGES:
                yield (space, stage), values[_AT[stage]]

    def results() -> Iterable[Row]:
        for space, values in look.spaces.items():
            yield (space, "dram"), values[_AT["verified"]] - values[_AT["verified_ssd"]]
            yield (space, "ssd"), values[_AT["verified_ssd"]]
            yield (space, "absent"), values[_AT["absent"]]
            yield (space, "unreachable"), values[_AT["unreachable"]]

    metrics.table(
        "cenote_client_funnel_keys_total",
        "Keys that were read, by how far they got: asked, present, fetched, verified.",
        "counter",
        ("namespace", "stage"),
        stages,
    )
    metrics.table(
        "cenote_client_read_keys_total",
        "What came of keys that were read: a hit by tier, absent, unreachable.",
        "counter",
        ("namespace", "result"),
        results,
    )
    metrics.table(
        "cenote_client_failed_keys_total",
        "Keys that got an error, by what was done, where it failed, and the error's class.",
        "counter",
        ("operation", "stage", "reason"),
        lambda: list(look.totals.failures.items()),
    )


def _register_calls(metrics: Metrics, look: _Look) -> None:
    metrics.table(
        "cenote_client_calls_total",
        "Calls that ended, by kind.",
        "counter",
        ("call",),
        lambda: [((name,), look.totals.calls[kind]) for kind, name in enumerate(CALL_KINDS)],
    )
    metrics.table(
        "cenote_client_call_seconds",
        "How long calls took, of every sixteenth of its kind.",
        "histogram",
        ("call",),
        lambda: [((name,), look.totals.seconds[kind]) for kind, name in enumerate(CALL_KINDS)],
    )

    def moved() -> Iterable[Row]:
        for name, (read, written) in look.totals.moved.items():
            yield (name, "read"), read
            yield (name, "written"), written

    metrics.table(
        "cenote_client_moved_bytes_total",
        "Payload moved to or from daemons, by the transport taken, repeated reads included.",
        "counter",
        ("transport", "direction"),
        moved,
    )


def register(registry: CollectorRegistry = REGISTRY) -> None:
    """Have a prometheus_client registry show `cenote_client_*`; once for each registry, however
    often it is called."""
    with _lock:
        if all(known is not registry for known in _registered):
            registry.register(MetricsCollector(client_metrics()))
            _registered.append(registry)


def serve(port: int, host: str = "127.0.0.1") -> MetricsServer:
    """Serve `/metrics` of this process until `close`; `port` 0 takes a free one.

    Raises ResourceUnavailable.
    """
    return MetricsServer(client_metrics(), port, host)


def serve_once(listen: str) -> None:
    """`serve` at host:port, unless this process does so already. Where another process has that
    port, as the next worker of an engine finds it, a warning says so and nothing is served.

    Raises ConfigError where it is no address.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"metrics_listen {listen!r} is no address", remedy="write host:port")
    with _lock:
        if listen in _served:
            return
        try:
            _served[listen] = serve(int(port), host.removeprefix("[").removesuffix("]"))
        except ResourceUnavailable as error:
            _log.warning("metrics of clients are not shown", listen=listen, why=error)
