"""The row space against a plain set of used rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cenote.api.errors import ResourceUnavailable
from cenote.master.columns import RESERVED, Reservation, RowSpace

USED = 1


class RowSpaceMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(1, 40))
    def start(self, blocks: int) -> None:
        self.capacity = 64 * blocks
        mark = Reservation(np.uint8, self.capacity)
        self.mark = mark.array.view(np.uint8)
        self.space = RowSpace(mark, [Reservation(np.uint64, self.capacity)], self.capacity)
        self.used: set[int] = set()

    def _taken(self, rows: list[int]) -> None:
        assert len(set(rows)) == len(rows)
        assert not self.used & set(rows)
        assert all(0 < row < self.space.high_water for row in rows)
        self.mark[rows] = USED
        self.used |= set(rows)

    @rule(count=st.integers(0, 700))
    def take(self, count: int) -> None:
        if count > self.capacity - 1 - len(self.used):
            with pytest.raises(ResourceUnavailable):
                self.space.take(count)
        else:
            rows = self.space.take(count)
            assert len(rows) == count
            self._taken(rows.tolist())

    @rule()
    def take_one(self) -> None:
        if len(self.used) == self.capacity - 1:
            with pytest.raises(ResourceUnavailable):
                self.space.take_one()
        else:
            self._taken([self.space.take_one()])

    @rule(data=st.data(), share=st.sampled_from([0.02, 0.5, 1.0]), one=st.booleans())
    def give(self, data: st.DataObject, share: float, one: bool) -> None:
        rows = sorted(self.used)
        seed = data.draw(st.integers(0, 1 << 30))
        chosen = np.random.default_rng(seed).permutation(rows)[: int(len(rows) * share)]
        chosen = chosen.astype(np.int64)
        self.used -= set(chosen.tolist())
        if one:
            for row in chosen.tolist():
                self.space.give_one(row)
        else:
            self.space.give(chosen)

    @rule(count=st.integers(0, 100), limit=st.integers(1, 2000))
    def take_below(self, count: int, limit: int) -> None:
        free = [row for row in range(1, self.space.high_water) if row not in self.used]
        rows = self.space.take_below(count, limit).tolist()
        assert rows == [row for row in free[:count] if row < limit]
        self._taken(rows)

    @rule(rows_max=st.integers(1, 500))
    def trim(self, rows_max: int) -> None:
        before = self.space.high_water
        dropped = self.space.trim(rows_max)
        assert self.space.high_water == before - dropped
        last = max(self.used, default=0)
        assert self.space.high_water == max(last + 1, before - rows_max)

    @rule()
    def flush(self) -> None:
        self.space.flush_ready()

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "space"):
            assert self.space.used_rows == len(self.used)
            self.space.check()
            assert self.mark[0] == RESERVED


RowSpaceMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRowSpaceMachine = RowSpaceMachine.TestCase
