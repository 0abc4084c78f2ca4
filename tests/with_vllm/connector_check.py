"""What the connector tells vLLM, without an engine. Runs in vLLM's environment. Ends with an
AssertionError where that is not as it should be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from cenote.connectors.vllm import connector
from cenote.connectors.vllm.kv_events import events_of
from cenote.connectors.vllm.residency import Change

Connector = connector.CenoteStoreConnector
module: Any = connector


def config(**extra: object) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))


def check_layouts() -> None:
    assert Connector.get_required_kvcache_layout(config()) is None, "there is one for CPUs"
    before = module.current_platform
    module.current_platform = SimpleNamespace(device_type="cuda")
    try:
        assert Connector.get_required_kvcache_layout(config()) == "BLHNC"
        assert Connector.get_required_kvcache_layout(config(layout="LBHNC")) == "LBHNC"
        assert Connector.get_required_kvcache_layout(config(layout="")) is None
    finally:
        module.current_platform = before


def made(**parts: Any) -> Any:
    """A connector of parts, without an engine."""
    half = Connector.__new__(Connector)
    half._scheduler = half._worker = half._event_group = None
    for name, value in parts.items():
        setattr(half, name, value)
    return half


def check_hit_sources() -> None:
    found = {"memory": 32, "peer": 16, "disk": 0}
    half = made(_scheduler=SimpleNamespace(sources=lambda request: found))
    told = half.get_external_cache_hit_sources(None, 48)
    assert told == {CacheHitSource.HOST: 32, CacheHitSource.P2P: 16}, told
    assert half.get_external_cache_hit_sources(None, 64) == {CacheHitSource.HOST: 64}
    assert half.get_external_cache_hit_sources(None, 0) == {}


def check_sleep() -> None:
    calls: list[str] = []
    worker = SimpleNamespace(
        suspend=lambda: calls.append("suspend"), resume=lambda: calls.append("resume")
    )
    assert Connector.supports_sleep_mode(SimpleNamespace())
    for half in (made(), made(_worker=worker)):
        half.unregister_kv_caches()
        half.restore_kv_caches()
    assert calls == ["suspend", "resume"]


def check_reset() -> None:
    calls: list[str] = []
    half = made(_scheduler=SimpleNamespace(reset=lambda: calls.append("reset")))
    assert half.reset_cache() is True
    assert calls == ["reset"]


def check_events() -> None:
    """As llm-d's router reads them: MessagePack, a map whose `type` is the event's."""
    assert made().take_events() == ()
    changes = [Change(True, "memory", (b"h" * 32,)), Change(False, "disk", (b"i" * 32,))]
    stored, removed = (
        msgspec.msgpack.decode(msgspec.msgpack.encode(event))
        for event in events_of(changes, 2, "full_attention")
    )
    assert stored["type"] == "BlockStored"
    assert stored["medium"] == "CPU"
    assert stored["token_ids"] == []
    assert stored["group_idx"] == 2
    assert stored["kv_cache_spec_kind"] == "full_attention"
    assert not stored.get("locality"), "where routers keep snapshots they refuse events with one"
    assert removed["type"] == "BlockRemoved"
    assert removed["medium"] == "STORAGE"
    assert len(stored["block_hashes"]) == len(removed["block_hashes"]) == 1


def main() -> None:
    check_layouts()
    check_hit_sources()
    check_sleep()
    check_reset()
    check_events()
    print("checked")


if __name__ == "__main__":
    main()
