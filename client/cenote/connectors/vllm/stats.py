"""The connector's counters in the form that vLLM logs and exports."""

from __future__ import annotations

from statistics import fmean
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from .counters import BUCKETS_S, Counters

__all__ = ["CenoteConnectorStats", "CenotePromMetrics", "stats_of"]

_COUNTERS: Final = {
    "loaded_tokens": "Tokens that were loaded from the pool instead of being computed.",
    "staged_bytes": "Bytes that were read from the pool.",
    "missing_blocks": "Blocks that the pool was to have and that did not arrive.",
    "unstaged_blocks": "Blocks that were not fetched because staging_bytes is too small for them.",
    "saved_blocks": "Blocks that were saved to the pool.",
    "saved_bytes": "Bytes that were saved to the pool.",
    "existing_blocks": "Blocks that were not saved because the pool has them.",
    "unsaved_blocks": "Blocks that could not be saved.",
}
_DURATIONS: Final = {
    "lookup": "Time to ask the pool for a prompt.",
    "stage": "Time to read a prompt's blocks from the pool.",
    "load": "Time to copy a prompt's blocks into the KV cache.",
    "copy": "Time to copy a step's blocks out of the KV cache; the engine waits for it.",
    "save": "Time to put a step's blocks into the pool.",
}


class CenoteConnectorStats(KVConnectorStats):
    """Sums of counts, and lists of durations; plain data, since it travels between processes."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            mine = self.data.get(name)
            self.data[name] = value if mine is None else mine + value
        return self

    def reduce(self) -> dict[str, int | float]:
        reduced: dict[str, int | float] = {}
        for name, value in sorted(self.data.items()):
            if isinstance(value, list):
                reduced[f"{name.removesuffix('_s')}_avg_ms"] = round(fmean(value) * 1e3, 3)
            else:
                reduced[name] = value
        return reduced


def stats_of(counters: Counters) -> CenoteConnectorStats | None:
    """What was counted since the last call, None for nothing."""
    found = counters.take()
    return CenoteConnectorStats(data=found) if found else None


class CenotePromMetrics(KVConnectorPromMetrics):
    """`vllm:cenote_...` on the engine's /metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:cenote_{name}", documentation=text, labelnames=labelnames
            )
            for name, text in _COUNTERS.items()
        }
        self._fetches = self._counter_cls(
            name="vllm:cenote_fetches",
            documentation="Prompts that were looked up, by what became of it.",
            labelnames=[*labelnames, "outcome"],
        )
        self._sources = self._counter_cls(
            name="vllm:cenote_loaded_tokens_by_source",
            documentation="Tokens that were loaded, by where in the pool their blocks were: memory "
            "of this host, of a peer, an SSD.",
            labelnames=[*labelnames, "source"],
        )
        self._durations = {
            name: self._histogram_cls(
                name=f"vllm:cenote_{name}_seconds",
                documentation=text,
                buckets=list(BUCKETS_S),
                labelnames=labelnames,
            )
            for name, text in _DURATIONS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any] | None, engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in (transfer_stats_data or {}).items():
            outcome = name.removeprefix("fetches_")
            source = name.removeprefix("loaded_from_")
            if source != name:
                self._sources.labels(*labels, source).inc(value)
            elif outcome != name:
                self._fetches.labels(*labels, outcome).inc(value)
            elif name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            elif name.removesuffix("_s") in self._durations:
                for duration_s in value:
                    self._durations[name.removesuffix("_s")].labels(*labels).observe(duration_s)
