"""Slot numbers against a plain set of those in use."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cenote.master.slots import SlotNumbers


class SlotNumbersMachine(RuleBasedStateMachine):
    @initialize(total=st.sampled_from([0, 1, 5, 64]))
    def start(self, total: int) -> None:
        self.total = total
        self.numbers = SlotNumbers(total)
        self.used: set[int] = set()

    def _taken(self, numbers: list[int]) -> None:
        assert len(set(numbers)) == len(numbers)
        assert not self.used & set(numbers)
        assert all(0 <= number < self.total for number in numbers)
        self.used |= set(numbers)

    @rule()
    def take_one(self) -> None:
        number = self.numbers.take_one()
        if len(self.used) == self.total:
            assert number == -1
        else:
            self._taken([number])

    @rule(count=st.integers(1, 80))
    def take(self, count: int) -> None:
        taken = self.numbers.take(count)
        if count > self.total - len(self.used):
            assert taken is None
        else:
            assert taken is not None
            assert len(taken) == count
            self._taken(taken.tolist())

    @rule(data=st.data(), one=st.booleans())
    def give(self, data: st.DataObject, one: bool) -> None:
        if not self.used:
            return
        given = data.draw(st.sets(st.sampled_from(sorted(self.used)), min_size=1))
        self.used -= given
        if one:
            for number in given:
                self.numbers.give_one(number)
        else:
            self.numbers.give(np.array(list(given), np.uint32))

    @rule(claimed=st.sets(st.integers(0, 90), max_size=10))
    def claim(self, claimed: set[int]) -> None:
        """A daemon's inventory names slots: they are in use, and the table is as long as that."""
        self.numbers.claim(np.array(sorted(claimed), np.uint32))
        self.used |= claimed
        self.total = max([self.total, *(number + 1 for number in claimed)])

    @rule(more=st.integers(1, 40))
    def grow(self, more: int) -> None:
        self.total += more
        self.numbers.total += more

    @invariant()
    def counts(self) -> None:
        assert self.numbers.total == self.total
        assert self.numbers.used == len(self.used)
        assert self.numbers.free == self.total - len(self.used)
        assert max(self.used, default=-1) < self.numbers.high <= self.total or not self.used


TestSlotNumbers = SlotNumbersMachine.TestCase


def test_low_numbers_are_given_first() -> None:
    """Tables stay short."""
    numbers = SlotNumbers(10)
    assert numbers.take(6) is not None
    numbers.give(np.array([4, 1, 3], np.uint32))
    assert [numbers.take_one() for _ in range(4)] == [1, 3, 4, 6]
