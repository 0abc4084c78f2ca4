"""The connector as vLLM sees it: its calls, handed to the two halves. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from cenote.runtime.log import log_if_nobody_listens

from .blocks import BlockMemory
from .counters import Counters
from .engine_facts import (
    block_bytes_of,
    grouping_of,
    layers_of,
    shards_of_engine,
    space_maker,
)
from .kv_events import events_of, events_wanted, spec_kind_of
from .link import PoolLink
from .options import make_options
from .orders import Orders, Reports
from .scheduler import StoreScheduler
from .stats import CenoteConnectorStats, CenotePromMetrics, stats_of
from .worker import StoreWorker

__all__ = ["CenoteStoreConnector"]

_NO_ORDERS: Final = Orders()
_HIT_SOURCES: Final = {
    "memory": CacheHitSource.HOST,
    "peer": CacheHitSource.P2P,
    "disk": CacheHitSource.DISK,
}
"""By the names of `places.SOURCES`."""


@dataclass
class StepOrders(KVConnectorMetadata):
    """Orders, as vLLM carries them to its workers."""

    orders: Orders


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Reports, as vLLM carries them back."""

    reports: Reports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        assert isinstance(other, StepReports)
        self.reports.merge(other.reports)
        return self


class CenoteStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Finds prefixes in a cenote pool, loads them, and saves what is computed."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError: an option or a model that is not supported."""
        log_if_nobody_listens()
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        given = make_options(transfer.kv_connector_extra_config)
        options = replace(
            given,
            load=given.load and transfer.is_kv_consumer,
            save=given.save and transfer.is_kv_producer,
        )
        self._grouping = grouping_of(vllm_config, kv_cache_config)
        self._shards = shards_of_engine(vllm_config, kv_cache_config)
        self._options = options
        self._counters = Counters()
        self._scheduler: StoreScheduler | None = None
        self._worker: StoreWorker | None = None
        self._event_group: int | None = None
        """The KV group whose blocks' residency is told, where vLLM publishes events."""
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = StoreScheduler(
                options,
                self._grouping,
                [rank.shard for rank in self._shards],
                len(self._shards),
                block_bytes_of(self._grouping, kv_cache_config),
                space_maker(options, vllm_config, kv_cache_config, self._grouping),
                PoolLink(options, "vllm-scheduler", gives_way=True),
                self._counters,
            )
            self._scheduler.start()
            if events_wanted(vllm_config):
                self._event_group = self._scheduler.watch_residency()

    # ---- what it is --------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss later on, nothing more."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """By default a block's bytes of all layers side by side, so that it is copied in one piece.
        Backends that have no such layout keep their own; those for CPUs have none."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return make_options(extra).layout or None if current_platform.device_type != "cpu" else None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Staging memory is the host's, and stays; nothing of the KV cache is registered."""
        return True

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> CenoteConnectorStats | None:
        return CenoteConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> CenotePromMetrics:
        return CenotePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> CenoteConnectorStats | None:
        return stats_of(self._counters)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # ---- beside the scheduler ----------------------------------------------------------------

    @property
    def _planner(self) -> StoreScheduler:
        assert self._scheduler is not None, "a call for the scheduler's half"
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        adapter = request.lora_request
        self._planner.new_request(request, None if adapter is None else adapter.lora_path)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.skip_reading_prefix_cache:
            return 0, False
        tokens = self._planner.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planner.allocated(request, blocks.get_block_ids, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        found = self._planner.sources(request)
        sources = {_HIT_SOURCES[name]: tokens for name, tokens in found.items() if tokens}
        if sum(sources.values()) == num_external_tokens:
            return sources
        return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        if self._options.save:
            self._plan_saves(scheduler_output)
        return StepOrders(self._planner.take_orders(scheduler_output.total_num_scheduled_tokens))

    def _plan_saves(self, step: Any) -> None:
        new, cached = step.scheduled_new_reqs, step.scheduled_cached_reqs
        computed = [(each.req_id, each.num_computed_tokens) for each in new]
        computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        tables, scheduled = step.kv_connector_block_state, step.num_scheduled_tokens
        states, save = tables.boundary_state_offloads, self._planner.save
        for request_id, tokens in computed:
            save(
                request_id,
                tokens + scheduled[request_id],
                tables.get_block_ids,
                states.get(request_id, ()),
            )

    def update_connector_output(self, connector_output: Any) -> None:
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, StepReports):
            self._planner.reported(said.reports)
        self._planner.loaded(connector_output.finished_recving or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._planner.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._planner.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """This engine's weights have changed: it finds nothing any more of what was saved before.

        Nothing is asked of the pool, so that it can't fail; nobody else is touched.
        """
        self._planner.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        group = self._event_group
        if group is None:
            return ()
        changes = self._planner.residency_changes()
        kind = spec_kind_of(self._kv_cache_config, group) if changes else ""
        return events_of(changes, group, kind)

    # ---- in a worker -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        rank = get_pp_group().rank_in_group * self._tp_size + get_tensor_model_parallel_rank()
        layers = layers_of(self._grouping, self._kv_cache_config)
        memory = BlockMemory(
            kv_caches,
            {
                group: [name for name in names if name in kv_caches]
                for group, names in layers.items()
            },
            self._kv_cache_config.num_blocks,
        )
        if self._worker is not None:
            self._worker.close()
        self._worker = StoreWorker(
            self._options,
            self._shards[rank],
            f"vllm-worker-{rank}",
            self._counters,
        )
        self._worker.start(memory)

    def unregister_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.suspend()

    def restore_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.resume()

    @property
    def _tp_size(self) -> int:
        return int(self._vllm_config.parallel_config.tensor_parallel_size)

    def _orders(self) -> Orders:
        if not self.has_connector_metadata():
            return _NO_ORDERS
        bound = self._get_connector_metadata()
        assert isinstance(bound, StepOrders)
        return bound.orders

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.begin(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps, never in one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, at the end of the step that completes them."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        loaded, failed = self._worker.take_loaded()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def build_connector_worker_meta(self) -> StepReports | None:
        reports = None if self._worker is None else self._worker.take_reports()
        return None if reports is None else StepReports(reports)
