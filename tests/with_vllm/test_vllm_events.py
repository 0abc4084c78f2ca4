"""What routers hear of the blocks that lie on an engine's host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from waiting import wait_until
from with_vllm.engines import PROMPTS, Engine

PATIENT = {"lookup_deadline_s": "5s", "load_deadline_s": "10s", "load_share": 0}


@pytest.mark.slow_engine
def test_blocks_on_this_host_are_told_and_told_when_they_are_gone(
    models: Path, tmp_path: Path
) -> None:
    prompts = [PROMPTS[1]]
    with Cluster(stores=1, dram_bytes=128 << 20) as cluster:
        extra = {"master": cluster.lane, **PATIENT}
        with Engine(models / "tiny", extra, events=f"ipc://{tmp_path}/events") as engine:
            engine.meet_pool()
            seen: list[dict[str, Any]] = []

            def told(kind: str, medium: str) -> set[str]:
                """Blocks of which it was told; each time the engine takes a step first, since
                vLLM publishes with its steps."""
                engine.generate([[7, 8, 9]], max_tokens=1)
                seen.extend(engine.ask(do="events")["events"])
                rows = [e for e in seen if (e["type"], e.get("medium")) == (kind, medium)]
                return {each for event in rows for each in event["block_hashes"]}

            def here(wanted: set[str]) -> None:
                wait_until(lambda: wanted <= told("BlockStored", "CPU"), 60, what="blocks here")

            told("BlockStored", "CPU")
            seen.clear()
            engine.generate(prompts)
            wait_until(lambda: len(told("BlockStored", "GPU")) >= 5, what="vLLM's own events")
            (own,) = {e["group_idx"] for e in seen if e.get("medium") == "GPU"}
            blocks = told("BlockStored", "GPU")
            here(blocks)
            event = next(e for e in seen if e.get("medium") == "CPU")
            assert event["token_ids"] == []
            assert event["group_idx"] == own, "a router counts it beside the engine's own cache"
            assert event["kv_cache_spec_kind"] == "full_attention"
            assert not told("BlockRemoved", "CPU")

            cluster.stores[0].kill()
            cluster.wait_alive(0)
            wait_until(lambda: blocks <= told("BlockRemoved", "CPU"), 60, what="them to be gone")
            cluster.stores[0].restart()
            cluster.wait_alive(1)
            seen.clear()
            engine.fill_pool(prompts, [640])
            here(blocks)  # it looks for what was found once a second
            seen.clear()
            engine.forget(connector=True)
            wait_until(lambda: blocks <= told("BlockRemoved", "CPU"), 60, what="a reset's events")
