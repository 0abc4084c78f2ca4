"""More of what real vLLM runs over a pool: hybrids, ranks, a full KV cache, the API server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from cluster import Cluster
from waiting import wait_until
from with_vllm.engines import ENVIRONMENT, PROMPTS, START_TIMEOUT_S, Engine, free_port, vllm_python

PATIENT = {"lookup_deadline_s": "5s", "load_deadline_s": "10s", "load_share": 0}


@pytest.mark.parametrize("name", ["window", "state"])
def test_a_hybrid_model_resumes_at_the_same_places_as_without_pool(models: Path, name: str) -> None:
    """One prompt alone: in a batch with others the last bits of what is computed differ."""
    prompts = [PROMPTS[1]]
    with (
        Cluster(stores=1, dram_bytes=256 << 20) as cluster,
        Engine(models / name, {"master": cluster.lane, **PATIENT}) as engine,
    ):
        engine.meet_pool()
        assert engine.generate(prompts).cached == [0]
        own = engine.generate(prompts)  # resumed from its own cache: states are rounded there, too
        assert own.cached == [640]
        engine.fill_pool(prompts, [640])
        loaded = engine.metrics()["vllm:cenote_loaded_tokens"]
        found = engine.generate(prompts)
        assert found.cached == [640]
        assert found.tokens == own.tokens
        assert engine.metrics()["vllm:cenote_loaded_tokens"] == loaded + 640


@pytest.mark.slow_engine
def test_two_ranks_share_each_block_between_them(models: Path) -> None:
    llm = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with (
        Cluster(stores=1, dram_bytes=128 << 20) as cluster,
        Engine(models / "tiny", {"master": cluster.lane, **PATIENT}, llm=llm) as engine,
    ):
        engine.meet_pool()
        first = engine.generate()
        engine.fill_pool()
        found = engine.generate()
        assert found.cached == [256, 640, 512]
        assert found.tokens == first.tokens


@pytest.mark.slow_engine
def test_latent_attention_is_saved_once_for_all_ranks(models: Path) -> None:
    """MLA's cache is the same at each rank: each saves a part of the blocks, of 16 tokens."""
    llm = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    prompts = [PROMPTS[1]]
    with (
        Cluster(stores=1, dram_bytes=128 << 20) as cluster,
        Engine(models / "latent", {"master": cluster.lane, **PATIENT}, llm=llm) as engine,
    ):
        first = engine.generate(prompts, 1)
        # Whatever vLLM keeps itself (on CPUs nothing, with MLA), the pool has all of it then.
        wait_until(
            lambda: engine.generate(prompts, 1).cached == [688], 120, what="all of its blocks"
        )
        assert engine.generate(prompts, 1).tokens == first.tokens
        metrics = engine.metrics()
        saved = metrics["vllm:cenote_saved_blocks"]
        assert saved <= 43, "by one of the two ranks each"
        # A save whose answer came late has failed, whatever the pool did.
        assert saved + metrics.get("vllm:cenote_unsaved_blocks", 0) >= 43


@pytest.mark.slow_engine
def test_beside_another_connector_whichever_has_the_prompt_loads_it(
    models: Path, tmp_path: Path
) -> None:
    """MultiConnector takes the first that has something; it saves to all."""
    with Cluster(stores=1, dram_bytes=128 << 20) as cluster:
        children: list[dict[str, object]] = [
            {
                "kv_connector": "CenoteStoreConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "master": cluster.lane, "staging_bytes": "64MiB", **PATIENT,
                },
            },
            {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
            },
        ]  # fmt: skip
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": children},
        }
        prompts = [PROMPTS[1]]
        with Engine(models / "tiny", transfer=transfer) as engine:
            engine.meet_pool()
            first = engine.generate(prompts)

            def loaded() -> float:
                return engine.metrics().get("vllm:cenote_loaded_tokens", 0)

            before = loaded()
            wait_until(
                lambda: engine.regenerate(prompts).tokens == first.tokens and loaded() > before,
                120,
                what="ours, which is asked first, to have it",
            )
            before = loaded()
            engine.forget(connector=True)  # ours has nothing then, the other one still does
            other = engine.generate(prompts)
            assert other.cached == [640]
            assert other.tokens == first.tokens
            assert loaded() == before


def test_chunked_prefill_and_preemption_in_a_small_cache(models: Path) -> None:
    """22 blocks for five prompts of up to six, computed in chunks of 256 tokens: some are preempted
    while they generate, and come back from the pool."""
    llm = {"num_gpu_blocks_override": 22, "max_num_batched_tokens": 256}
    prompts = [[(i * step + step) % 500 for i in range(600)] for step in (3, 7, 11, 13, 17)]
    with (
        Cluster(stores=1, dram_bytes=128 << 20) as cluster,
        Engine(models / "tiny", {"master": cluster.lane, **PATIENT}, llm=llm) as engine,
    ):
        engine.meet_pool()
        alone = [engine.generate([prompt]).tokens for prompt in prompts]
        engine.forget()
        # What a batch computes differs in the last bits: these tokens are not compared.
        together = engine.generate(prompts, 200)
        assert [len(tokens) for tokens in together.tokens] == [200] * 5
        for prompt, tokens in zip(prompts, alone, strict=True):
            engine.fill_pool([prompt], [512])
            found = engine.generate([prompt])
            assert found.cached == [512]
            assert found.tokens == tokens
        metrics = engine.metrics()
        assert metrics["vllm:num_preemptions"] > 0
        assert metrics["vllm:cenote_loaded_tokens"] > 0


@pytest.mark.slow_engine
def test_the_api_server_shows_metrics(models: Path, tmp_path: Path) -> None:
    with Cluster(stores=1, dram_bytes=128 << 20) as cluster:
        port = free_port()
        transfer = {
            "kv_connector": "CenoteStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "master": cluster.lane, "staging_bytes": "64MiB", **PATIENT,
            },
        }  # fmt: skip
        command = [str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(models / "tiny"), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--served-model-name", "m", "--max-model-len", "1024", "--enforce-eager"]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        environment |= {"VLLM_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment |= {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
        with (tmp_path / "log").open("wb") as log:
            server = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            wait_until(
                lambda: server.poll() is not None or answers(port),
                START_TIMEOUT_S,
                what="the server",
            )
            assert server.poll() is None, (tmp_path / "log").read_text()[-4000:]

            fresh = iter(range(1, 400))

            def told() -> bool:
                """What came of a save is told with a later step: the next request's."""
                step = next(fresh)
                complete(port, PROMPTS[1])
                complete(port, [(i * 3 + step) % 500 for i in range(300)])
                post(port, "/reset_prefix_cache")
                names = ("loaded_tokens", "saved_blocks", "fetches")
                return {f"vllm:cenote_{name}_total" for name in names} <= nonzero(port)

            wait_until(told, 120, what="a prompt to come from the pool")
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait(60)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def post(port: int, path: str, body: object = None) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode() if body is not None else b"",
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        found: bytes = reply.read()
    return found


def complete(port: int, prompt: list[int]) -> None:
    post(port, "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 4})


def nonzero(port: int) -> set[str]:
    """Names of the counters on /metrics that have counted something."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return {
        line.partition("{")[0]
        for line in lines
        if not line.startswith("#") and float(line.rpartition(" ")[2]) > 0
    }
