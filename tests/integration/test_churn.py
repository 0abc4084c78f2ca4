"""Mixed sizes (70 % 4 KiB, 20 % 256 KiB, 10 % 3 MiB) churned at a full pool.

The million operations of `benchmarks/churn.py` take a minute; here are some tens of thousands of
them, and the same mix through real daemons. CENOTE_TEST_FULL=1 runs the million.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from admin import admin_of
from cluster import Cluster
from payloads import payload_of
from waiting import wait_until

MIB = 1 << 20
GIB = 1 << 30
FULL = os.environ.get("CENOTE_TEST_FULL") == "1"
UTILISATION_MIN = 0.93


@pytest.fixture(scope="module")
def churn() -> ModuleType:
    """benchmarks/churn.py, which is in no package."""
    path = Path(__file__).parents[2] / "benchmarks" / "churn.py"
    spec = importlib.util.spec_from_file_location("benchmarks_churn", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("capacity", "nodes", "batch"), [(16 * GIB, 1, 32), (4 * GIB, 3, 16), (2 * GIB, 1, 1)]
)
def test_the_state_keeps_a_full_pool_full_and_refuses_nothing(
    churn: ModuleType, seed: int, capacity: int, nodes: int, batch: int
) -> None:
    run = churn.Churn(capacity, nodes, batch, seed)
    run.fill()
    report = run.run(1_000_000 if FULL else 20_000)
    run.check()
    assert report.failed == {}
    assert report.utilisation_min >= UTILISATION_MIN, [t.utilisation_min for t in report.tenths]
    assert all(tenth.evicted for tenth in report.tenths)


@pytest.mark.integration
def test_a_real_pool_stays_full_and_gives_the_right_bytes(rng_numpy: np.random.Generator) -> None:
    sizes = np.array([4 << 10, 256 << 10, 3 << 20])
    pool_bytes, batch, batches = 1 * GIB, 16, 400
    pieces = {int(size): payload_of("pattern", int(size)) for size in sizes}
    with Cluster(stores=2, dram_bytes=pool_bytes // 2) as cluster, admin_of(cluster) as admin:
        wait_until(
            lambda: admin.status().capacity_bytes > 0.98 * pool_bytes, 30.0, what="the memory"
        )
        with cluster.client(transports=("shm",)) as client:
            used: list[float] = []
            recent: list[tuple[str, int]] = []
            for number in range(batches):
                keys = [f"{number}-{i}" for i in range(batch)]
                chosen = rng_numpy.choice(sizes, batch, p=[0.7, 0.2, 0.1]).tolist()
                # What depends on the key stands in front: a mix-up of objects would show.
                values = [
                    payload_of(k, 64) + pieces[s][64:] for k, s in zip(keys, chosen, strict=True)
                ]
                results = client.put_batch(keys, values)
                assert results.stored_count == batch, [r.error for r in results if r.error]
                recent = [*recent[-200:], *zip(keys, chosen, strict=True)]
                status = admin.status()
                if status.evicted_objects:
                    used.append(status.used_bytes / pool_bytes)
                if number % 20 == 0:
                    for key, size in recent[-8:]:
                        expected = payload_of(key, 64) + pieces[size][64:]
                        assert client.get(key) == expected
                    client.remove_batch([key for key, _ in recent[-40:-36]])
            assert len(used) > batches // 8, "the pool was not full for long"
            assert min(used) >= UTILISATION_MIN
            assert client.stats().failed == 0


@pytest.fixture
def rng_numpy(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
