"""What others were told exists is acknowledged: that version, and no later one of the same put."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cenote.api.rows import PUT, PutStatus
from cenote.master.effects import GoneReason
from sim.endings import expected
from sim.existing import check_answer
from sim.loop import Violation
from sim.oracle import Oracle
from sim.values import PutRecord
from sim.world import Options, World

FIRST, SECOND = (1, 15), (1, 40)


class _Rows:
    """A pool with one object."""

    def __init__(self, version: tuple[int, int]) -> None:
        self._version = version
        self.objects = SimpleNamespace(lookup=lambda digests: np.ones(len(digests), np.int64))

    def record_of(self, row: int) -> tuple[int, ...]:
        return 0, 0, self._version[1], self._version[0]


def answer(oracle: Oracle, version: tuple[int, int], status: PutStatus) -> None:
    """The master's, to whoever puts the key again."""
    puts = np.zeros(1, PUT)
    puts["status"] = status
    pool: Any = _Rows(version)
    check_answer(oracle, pool, np.ones((1, 2), np.uint64), SimpleNamespace(puts=puts.tobytes()))


@pytest.fixture
def oracle() -> Oracle:
    return World(Options(0)).oracle


@pytest.fixture
def put(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> PutRecord:
    """One that was decided, and is sealed."""
    made = oracle.new_put(5, 1, 64, 1)
    made.versions.append(FIRST)
    for number, version in enumerate((FIRST, SECOND), start=1):
        oracle._placed[version] = []
        oracle.numbers[version] = number
    monkeypatch.setattr(
        oracle, "surviving_replicas", lambda version: {0} if version == FIRST else set()
    )
    return made


def test_what_is_said_to_exist_is_acknowledged(oracle: Oracle, put: PutRecord) -> None:
    assert not oracle.acknowledged(put)
    answer(oracle, FIRST, PutStatus.UNSEALED)
    assert not oracle.acknowledged(put)
    answer(oracle, FIRST, PutStatus.EXISTS)
    assert oracle.acknowledged(put) == [FIRST]
    assert expected(oracle) == {5: put}


def test_what_is_not_sealed_is_not_said_to_exist(oracle: Oracle, put: PutRecord) -> None:
    put.versions.append(SECOND)
    with pytest.raises(Violation, match="was said to exist"):
        answer(oracle, SECOND, PutStatus.EXISTS)


def test_what_the_same_put_decides_later_is_acknowledged_to_nobody(
    oracle: Oracle, put: PutRecord
) -> None:
    """Seed 65 with quotas: what existed for others was removed before its writer, who had not heard
    of its seal, put it once more, and died before that was sealed."""
    answer(oracle, FIRST, PutStatus.EXISTS)
    oracle.gone[FIRST] = GoneReason.REMOVED
    put.versions.append(SECOND)
    assert not oracle.acknowledged(put)
    assert not expected(oracle)
    oracle._check_loss(SECOND, [])
    put.acked = True
    assert oracle.acknowledged(put) == [SECOND]
