"""A fake pool, and the scheduler's half over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unit.connectors.scheduler_testing import GROUPING, Half, Space


@pytest.fixture
def pool() -> Space:
    return Space()


@pytest.fixture
def made(pool: Space) -> Iterator[Half]:
    half = Half(pool, GROUPING, 1)
    yield half
    pool.gate.set()
    half.half.close()
    assert pool.leases == 0, "all leases were given back"
