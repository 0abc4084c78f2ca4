"""Which blocks are on this host, as events that vLLM publishes and llm-d's router reads.

They name blocks by vLLM's hashes and say no tokens: the router knows these from the events of the
engine's own cache, where each block was before it was saved, or is after it was loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from .residency import Change, Medium

__all__ = ["events_of", "events_wanted", "spec_kind_of"]

_MEDIUMS: Final[dict[Medium, str]] = {"memory": MEDIUM_CPU, "disk": MEDIUM_STORAGE}


def events_wanted(vllm_config: Any) -> bool:
    """Whether vLLM publishes events (--kv-events-config)."""
    config = getattr(vllm_config, "kv_events_config", None)
    return bool(config is not None and config.enable_kv_cache_events)


def spec_kind_of(kv_cache_config: Any, group: int) -> str:
    """What vLLM calls the kind of attention of a KV group."""
    return str(get_kv_cache_spec_kind(kv_cache_config.kv_cache_groups[group].kv_cache_spec).value)


def events_of(changes: Iterable[Change], group: int, kind: str) -> list[KVCacheEvent]:
    """`group`: number of the KV group that the blocks are of; `kind`: see `spec_kind_of`."""
    events: list[KVCacheEvent] = []
    for change in changes:
        hashes = [maybe_convert_block_hash(BlockHash(each)) for each in change.block_hashes]
        medium = _MEDIUMS[change.medium]
        if not change.here:
            events.append(BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group))
            continue
        events.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=None,
                token_ids=[],
                block_size=0,
                lora_id=None,
                medium=medium,
                lora_name=None,
                group_idx=group,
                kv_cache_spec_kind=kind,
            )
        )
    return events
