"""Weights that are not those of the model's files: adapters, and engines that get new ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cluster import Cluster
from with_vllm.engines import PROMPTS, Engine

PATIENT = {"lookup_deadline_s": "5s", "load_deadline_s": "10s", "load_share": 0}
FIRST_TIME = [0, 0, 256]
FROM_POOL = [256, 640, 512]


def test_a_reset_hides_what_one_engine_saved_before_from_it_alone(models: Path) -> None:
    with Cluster(stores=1, dram_bytes=256 << 20) as cluster:
        extra = {"master": cluster.lane, **PATIENT}
        with Engine(models / "tiny", extra) as engine:
            engine.meet_pool()
            first = engine.generate()
            engine.fill_pool()
            engine.forget(connector=True)
            after = engine.generate()
            assert after.cached == FIRST_TIME, "its weights are not what they were"
            assert after.tokens == first.tokens
            engine.fill_pool()  # what it computes from then on, it finds
            engine.forget(connector=True)
            assert engine.generate().cached == FIRST_TIME
        with Engine(models / "tiny", extra) as engine:
            engine.meet_pool()
            found = engine.generate()
            assert found.cached == FROM_POOL, "others have what was saved before the reset"
            assert found.tokens == first.tokens


@pytest.mark.slow_engine
def test_adapters_share_with_their_like_alone(models: Path, tmp_path: Path) -> None:
    """The second engine has another adapter by the first one's name, in the same place: vLLM's
    hashes take it for the same."""
    llm = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    one: dict[str, object] = {"name": "adapter-a", "id": 1, "path": str(tmp_path / "a")}
    two: dict[str, object] = {"name": "adapter-b", "id": 2, "path": str(tmp_path / "b")}
    prompts = [PROMPTS[1]]
    for each in (one, two):
        shutil.copytree(models / str(each["name"]), Path(str(each["path"])))
    with Cluster(stores=1, dram_bytes=256 << 20) as cluster:
        extra = {"master": cluster.lane, **PATIENT}
        with Engine(models / "tiny", extra, llm=llm) as engine:
            engine.meet_pool()
            tokens = {}
            cases: dict[str, dict[str, object] | None] = {"none": None, "one": one, "two": two}
            for name, adapter in cases.items():
                made = engine.generate(prompts, adapter=adapter)
                assert made.cached == [0], name
                tokens[name] = made.tokens
                engine.fill_pool(prompts, [640], adapter=adapter)
                found = engine.generate(prompts, adapter=adapter)
                assert found.cached == [640]
                assert found.tokens == made.tokens
            assert len({str(each) for each in tokens.values()}) == 3
        shutil.rmtree(str(one["path"]))
        shutil.copytree(models / "adapter-b", str(one["path"]))
        with Engine(models / "tiny", extra, llm=llm) as engine:
            engine.meet_pool()
            same = engine.generate(prompts, adapter=two)
            assert same.cached == [640], "the same adapter, by the same name"
            assert same.tokens == tokens["two"]
            replaced = engine.generate(prompts, adapter=one)
            assert replaced.cached == [0]
            assert replaced.tokens == tokens["two"]
