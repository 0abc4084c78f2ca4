"""Real vLLM on CPUs shares prefixes through a pool, and hardly notices when the pool misbehaves."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Cluster
from with_vllm.engines import PROMPTS, Engine, Generated

FIRST_TIME = [0, 0, 256]
"""Tokens of the prompts that an engine has itself when it sees them for the first time."""
FROM_POOL = [256, 640, 512]
NOISE_S = 1.5
"""What a busy machine may add to a few hundred milliseconds of computing."""
PATIENT = {"lookup_deadline_s": "5s", "load_deadline_s": "10s", "load_share": 0}
"""A busy machine is no reason to miss, where a test is about hits."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(stores=2, dram_bytes=128 << 20) as made:
        yield made


@pytest.fixture(scope="module")
def plain(models: Path) -> Generated:
    """What an engine without connector says, and how long it takes once it is warm."""
    with Engine(models / "tiny") as engine:
        engine.generate()
        return engine.regenerate()


@pytest.fixture(scope="module")
def saved(models: Path, cluster: Cluster) -> Generated:
    """An engine that has computed the prompts and has exited since."""
    with Engine(models / "tiny", {"master": cluster.lane, **PATIENT}) as engine:
        engine.meet_pool()
        made = engine.generate()
        assert made.cached == FIRST_TIME
    return made


def test_an_instance_finds_what_another_one_computed_that_has_exited(
    models: Path, cluster: Cluster, plain: Generated, saved: Generated
) -> None:
    assert saved.tokens == plain.tokens
    with Engine(models / "tiny", {"master": cluster.lane, **PATIENT}) as engine:
        engine.meet_pool()
        before = Counter(engine.metrics())  # it may have met what the other one saved to meet it
        found = engine.generate()
        assert found.cached == FROM_POOL
        assert found.tokens == plain.tokens
        metrics = Counter(engine.metrics())
        metrics.subtract(before)
        assert metrics["vllm:cenote_loaded_tokens"] == sum(FROM_POOL) - 256
        here = "vllm:cenote_loaded_tokens_by_source memory"
        assert metrics[here] == metrics["vllm:cenote_loaded_tokens"], "the daemons are on this host"
        assert metrics["vllm:cenote_fetches loaded"] == 3


def test_the_same_model_elsewhere_shares_and_another_one_by_that_name_does_not(
    models: Path, cluster: Cluster, plain: Generated, saved: Generated, tmp_path: Path
) -> None:
    copied, other = tmp_path / "a" / "tiny", tmp_path / "b" / "tiny"
    shutil.copytree(models / "tiny", copied)
    shutil.copytree(models / "other", other)
    with Engine(copied, {"master": cluster.lane, **PATIENT}) as engine:
        engine.meet_pool()
        found = engine.generate()
        assert found.cached == FROM_POOL
        assert found.tokens == plain.tokens
    with Engine(other, {"master": cluster.lane, **PATIENT}) as engine:
        engine.meet_pool()
        first = engine.generate()
        assert first.cached == FIRST_TIME, "it computed all by itself, so the tokens are its own"
        assert first.tokens != plain.tokens
        engine.fill_pool()
        again = engine.generate()
        assert again.cached == FROM_POOL
        assert again.tokens == first.tokens


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_dead_owners_and_a_stopped_master_cost_misses(
    models: Path, plain: Generated, policy: str
) -> None:
    """Over TCP, so that a daemon that dies takes its bytes along while they are read."""
    with Cluster(stores=2, dram_bytes=128 << 20) as cluster:
        # So small a model computes a prompt in the time that a busy machine takes to wake a thread.
        extra = {
            "master": cluster.lane, "transports": ["tcp"],
            "lookup_deadline_s": "200ms", "load_share": 5,
        }  # fmt: skip
        with Engine(models / "tiny", extra, policy=policy) as engine:
            engine.meet_pool()
            engine.fill_pool()
            limit_s = 2 * plain.duration_s + NOISE_S

            def failed() -> float:
                metrics = engine.metrics()
                return metrics.get("vllm:cenote_fetches transfer_failed", 0) + metrics.get(
                    "vllm:cenote_fetches transfer_late", 0
                )

            def looked_up() -> float:
                metrics = engine.metrics().items()
                return sum(count for name, count in metrics if "cenote_fetches" in name)

            before, before_all = failed(), looked_up()
            for store in cluster.stores:
                store.pause()  # the master takes them for alive still: bytes are waited for
            killer = threading.Timer(0.3, lambda: [store.kill() for store in cluster.stores])
            killer.start()
            during = engine.regenerate()
            killer.join()
            assert during.tokens == plain.tokens
            assert during.duration_s < limit_s
            assert failed() > before, "they died while bytes were on their way"
            assert looked_up() == before_all + len(PROMPTS), "none is fetched for twice"
            dead = engine.regenerate()
            assert dead.tokens == plain.tokens
            assert dead.duration_s < limit_s

            for store in cluster.stores:
                store.restart()
            cluster.wait_alive(2)
            engine.fill_pool()
            for store in cluster.stores:
                store.kill()
            killed = engine.regenerate()
            assert killed.tokens == plain.tokens
            assert killed.duration_s < limit_s

            for store in cluster.stores:
                store.restart()
            cluster.wait_alive(2)
            engine.fill_pool()
            cluster.master.pause()
            for _ in range(2):
                stopped = engine.regenerate()
                assert stopped.tokens == plain.tokens
                assert stopped.duration_s < plain.duration_s + 1.0 + NOISE_S
            cluster.master.resume()
            engine.fill_pool()


def test_a_pool_that_is_absent_at_the_start_is_used_once_it_is_there(
    models: Path, plain: Generated
) -> None:
    with Cluster(stores=1, dram_bytes=128 << 20) as cluster:
        cluster.master.kill()
        with Engine(models / "tiny", {"master": cluster.lane, **PATIENT}) as engine:
            alone = engine.generate()
            assert alone.cached == FIRST_TIME
            assert alone.tokens == plain.tokens
            cluster.master.restart()
            cluster.wait_alive(1)
            engine.fill_pool()
            assert engine.regenerate(PROMPTS).tokens == plain.tokens
