"""A full pool, overwritten several times at full speed while somebody looks at all of it."""

from __future__ import annotations

import pytest

from admin import admin_of
from cluster import Cluster
from remote import Remote

pytestmark = pytest.mark.integration

MIB = 1 << 20
KIB = 1 << 10
TIMES = 5


@pytest.mark.parametrize(
    ("pool_bytes", "size", "batch", "stores", "writers"),
    [
        pytest.param(256 * MIB, 256 * KIB, 16, 1, 1, id="256KiB-batches-1node"),
        pytest.param(256 * MIB, 64 * KIB, 64, 2, 1, id="64KiB-batches-2nodes"),
        # One at a time: each put waits for a look at everything, so there is less of it.
        pytest.param(48 * MIB, 64 * KIB, 1, 1, 1, id="64KiB-single-1node"),
        pytest.param(256 * MIB, 256 * KIB, 8, 2, 2, id="256KiB-2writers-2nodes"),
    ],
)
def test_no_put_fails_while_anything_can_be_evicted(
    pool_bytes: int, size: int, batch: int, stores: int, writers: int
) -> None:
    each = TIMES * pool_bytes // size // writers
    keys = [f"{writer}-{i}" for writer in range(writers) for i in range(each)]
    with Cluster(stores=stores, dram_bytes=pool_bytes // stores) as cluster:
        running = [
            Remote("overwrite", cluster.lane, f"{writer}-", each, size, batch)
            for writer in range(writers)
        ]
        with Remote("look", cluster.lane, keys, {}) as looker:
            looker.expect("ready")
            for program in running:
                program.__enter__().expect("ready")
            for program in running:
                program.say("go")
            failures = [failure for program in running for failure in program.hear()]
            for program in running:
                program.__exit__(None, None, None)
            looker.say("stop")
            seen = looker.hear()
        with admin_of(cluster) as admin:
            status = admin.status()
        assert failures == []
        assert seen["errors"] == 0, seen
        assert seen["rounds"] >= 3
        # It did look at a full pool, and what was overwritten did go.
        fit = pool_bytes // size
        assert seen["most"] >= 0.9 * fit
        assert status.evicted_objects >= (TIMES - 1.2) * fit
        assert status.used_bytes >= 0.95 * status.capacity_bytes
        # The newest are there, and nothing else takes their place.
        with cluster.client() as client:
            newest = keys[each - fit // 2 : each] if writers == 1 else keys[each - fit // 4 : each]
            assert client.exists_batch(newest).all()
            assert not client.exists_batch(keys[: fit // 4]).any()
