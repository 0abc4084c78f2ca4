"""What a tick does for each segment is done less often where there are many."""

from __future__ import annotations

import pytest

from cenote.api.rows import CommitStatus
from cenote.master import eviction, housekeeping
from cenote.master.pool import Pool
from master_pool import MasterPool

TICK_S = 0.02


@pytest.mark.parametrize(("nodes", "least", "most"), [(3, 50, 50), (300, 15, 18)])
def test_the_more_segments_the_fewer_surveys(
    nodes: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    surveys = 0

    def counted(pool: Pool) -> int:
        nonlocal surveys
        surveys += 1
        return eviction.evict_ahead(pool)

    monkeypatch.setattr(housekeeping, "evict_ahead", counted)
    pool = MasterPool(nodes=nodes, size_bytes=1 << 16)
    surveys = 0
    for _ in range(50):
        pool.clock.advance_s(TICK_S)
        pool.service.tick()
    assert least <= surveys <= most


def test_a_full_pool_of_many_nodes_takes_puts() -> None:
    """Between two surveys room is made where it is needed."""
    pool = MasterPool(nodes=120, size_bytes=1 << 16)
    for number in range(400):
        committed = pool.put_commit(pool.put_start(b"%d" % number, size=40_000))
        assert list(committed.statuses) == [CommitStatus.DECIDED]
        if number % 10 == 0:
            pool.clock.advance_s(TICK_S)
            pool.service.tick()
