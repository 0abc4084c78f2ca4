"""The budget of writes: never more than it in any 24 hours, over restarts and clocks that jump."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import ConfigError, ResourceUnavailable
from cenote.api.rows import CopyStatus
from cenote.store.config import StoreConfig
from cenote.store.endurance import Endurance
from cenote.store.write_budget import DAY_S, RECORD_BYTES, WriteBudget
from cenote.v1 import master_pb2
from faulty_device import io_error
from ssd_node import MIB, SsdNode, payload_of

DAILY = 8_000_000
START_S = 1_800_000_000.0

steps = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 600.0, 7200.0, 40_000.0]), st.integers(1, 300_000)),
    max_size=120,
)


@given(steps, st.integers(0, 1 << 120))
def test_no_24_hours_see_more_than_the_budget(
    steps: list[tuple[float, int]], restarts: int
) -> None:
    now_s, budget = START_S, WriteBudget(DAILY, START_S)
    record = budget.pack(now_s)
    spent: list[tuple[float, int]] = []
    for number, (passed_s, size) in enumerate(steps):
        now_s += passed_s
        if budget.spend(size, now_s):
            spent.append((now_s, size))
        if budget.is_due:
            record = budget.pack(now_s)
        if restarts >> number & 1:  # killed: what was spent since the last record is in none
            budget = WriteBudget(DAILY, now_s)
            budget.unpack(record, now_s)
            record = budget.pack(now_s)
        within = sum(size for at_s, size in spent if now_s - at_s < DAY_S)
        assert within <= DAILY
        assert 0 <= budget.allowance_bytes(now_s) <= DAILY // 8


def test_the_allowance_comes_back_and_is_bounded() -> None:
    budget = WriteBudget(DAILY, START_S)
    assert budget.allowance_bytes(START_S) == DAILY // 8
    assert budget.spend(DAILY // 8, START_S)
    assert not budget.spend(1, START_S)
    assert budget.allowance_bytes(START_S + DAY_S / 24) == DAILY * 7 // 8 // 24
    assert budget.allowance_bytes(START_S + 10 * DAY_S) == DAILY // 8
    assert budget.allowance_bytes(START_S - DAY_S) == DAILY // 8  # a clock that was set back


def test_what_was_written_is_told_for_a_day() -> None:
    budget = WriteBudget(DAILY, START_S)
    budget.spend(1000, START_S)
    budget.spend(500, START_S + 3600)
    assert budget.written_bytes(START_S + 3600) == 1500
    assert budget.written_bytes(START_S + DAY_S + 3599) == 500
    assert budget.written_bytes(START_S + 40 * DAY_S) == 0
    assert budget.total_bytes == 1500


def test_a_record_brings_it_back() -> None:
    budget = WriteBudget(DAILY, START_S)
    budget.spend(DAILY // 16, START_S)
    record = budget.pack(START_S, is_last=True)
    assert len(record) == RECORD_BYTES
    again = WriteBudget(DAILY, START_S)
    again.unpack(record, START_S)
    assert again.allowance_bytes(START_S) == DAILY // 16
    assert (again.written_bytes(START_S), again.total_bytes) == (DAILY // 16, DAILY // 16)
    smaller = WriteBudget(DAILY // 8, START_S)
    smaller.unpack(record, START_S)
    assert smaller.allowance_bytes(START_S) == DAILY // 64


@pytest.mark.parametrize("at", [8, 20, 100, 200])
def test_a_torn_record_allows_nothing_before_time_has_passed(at: int) -> None:
    record = bytearray(WriteBudget(DAILY, START_S).pack(START_S))
    record[at] ^= 1
    budget = WriteBudget(DAILY, START_S)
    budget.unpack(bytes(record), START_S)
    assert budget.allowance_bytes(START_S) == 0
    assert budget.allowance_bytes(START_S + DAY_S) > 0
    fresh = WriteBudget(DAILY, START_S)
    fresh.unpack(bytes(RECORD_BYTES), START_S)
    assert fresh.allowance_bytes(START_S) == DAILY // 8


def test_copies_beyond_the_budget_are_not_written_also_after_a_restart(tmp_path: Path) -> None:
    with SsdNode(tmp_path, daily_writes=24 * MIB) as node:  # a burst of 3 MiB
        for slot in range(4):
            node.put(slot, payload_of(slot, MIB), [(slot * MIB, MIB)])
        ids = [node.copy([slot], slot, slot * MIB, MIB) for slot in range(4)]
        found = node.results(4)
        done = [found[i] for i in ids].count(CopyStatus.DONE)
        assert done == 2  # each with a page of slots
        assert [found[i] for i in ids].count(CopyStatus.FAILED) == 2
        assert len(node.table_slots) == done
        assert node.endurance is not None
        assert node.endurance.declined == 2
        stats = master_pb2.NodeStats()
        node.endurance.tell(stats)
        assert stats.ssd_write_budget_bytes == 24 * MIB
        assert 2 * MIB <= stats.ssd_written_day_bytes < 3 * MIB
        assert stats.ssd_write_allowance_bytes < MIB
    with SsdNode(tmp_path, daily_writes=24 * MIB) as again:
        assert again.endurance is not None
        again.endurance.tell(stats)
        assert stats.ssd_written_total_bytes >= 2 * MIB
        assert stats.ssd_write_allowance_bytes < MIB + MIB // 8


def test_a_device_that_takes_no_record_is_told_at_the_start(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        node.device.on_write = io_error
        with pytest.raises(ResourceUnavailable, match="can't write"):
            Endurance(node.device, 1 << 30)


def test_a_budget_without_an_ssd_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="ssd-daily-writes"):
        StoreConfig(ssd_daily_writes=1 << 40)
