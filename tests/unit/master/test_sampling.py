"""When the use of keys begins to be sampled."""

from __future__ import annotations

from cenote.master.pool import NO_SAMPLES
from master_pool import MasterPool

TICK_S = 0.02


def test_sampling_begins_as_soon_as_it_is_known_how_much_fits() -> None:
    """Not at the next full second: what a short run asked in its first one was followed by
    nobody."""
    pool = MasterPool(nodes=1, size_bytes=1 << 20)
    state = pool.service.state
    for _ in range(3):
        pool.clock.advance_s(TICK_S)
        pool.service.tick()
    assert state._pool.sample_mask == NO_SAMPLES
    for number in range(20):
        pool.put_commit(pool.put_start(b"%d" % number, size=10_000))
    pool.clock.advance_s(TICK_S)
    pool.service.tick()
    assert state._pool.sample_mask != NO_SAMPLES
