"""The table of leases against a plain dict of deadlines."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cenote.master.leases import LeaseTable

FOREVER_S = float("inf")
durations = st.sampled_from([0.0, 0.001, 0.1, 0.26, 1.0, 5.0, FOREVER_S])
FIRST_ID = 7 << 40


class LeaseTableMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.table = LeaseTable(FIRST_ID)
        self.deadlines: dict[int, float] = {}
        self.ids: list[int] = []
        self.now_s = 1000.0

    @rule(duration_s=durations)
    def give(self, duration_s: float) -> None:
        deadline_s = self.now_s + duration_s
        lease = self.table.give(len(self.ids), deadline_s, b"s" * 16)
        assert lease.lease_id == FIRST_ID + len(self.ids)
        assert lease.is_hold == (duration_s == FOREVER_S)
        self.ids.append(lease.lease_id)
        self.deadlines[lease.lease_id] = deadline_s

    @rule(data=st.data(), duration_s=durations.filter(lambda s: s != FOREVER_S))
    def renew(self, data: st.DataObject, duration_s: float) -> None:
        if not self.ids:
            return
        lease_id = data.draw(st.sampled_from(self.ids))
        known = lease_id in self.deadlines
        assert self.table.renew(lease_id, self.now_s + duration_s) == known
        if known:  # it never ends sooner
            self.deadlines[lease_id] = max(self.deadlines[lease_id], self.now_s + duration_s)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.deadlines:
            lease_id = data.draw(st.sampled_from(sorted(self.deadlines)))
            del self.deadlines[lease_id]
            del self.table.by_id[lease_id]

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 2.0]), limit=st.sampled_from([1, 2, 100]))
    def time_passes(self, seconds: float, limit: int) -> None:
        self.now_s += seconds
        ended = self.table.due(self.now_s, limit)
        assert len(ended) <= limit
        for lease in ended:
            assert self.deadlines.pop(lease.lease_id) <= self.now_s, "it ended too early"
        if len(ended) < limit:
            # Deadlines are rounded up a little, to be looked at together.
            late_s = [self.now_s - at_s for at_s in self.deadlines.values()]
            assert max(late_s, default=0.0) < 0.3

    @invariant()
    def the_same_are_there(self) -> None:
        assert set(self.table.by_id) == set(self.deadlines)


TestLeaseTable = LeaseTableMachine.TestCase
