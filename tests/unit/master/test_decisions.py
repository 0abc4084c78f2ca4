"""The bounded log of what became of keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cenote.master.decisions import DecisionLog, Fate, Why
from unit.master.state_kit import digests_of


def note(log: DecisionLog, *keys: int, at_s: float = 0.0, fate: Fate = Fate.EVICTED) -> None:
    stamps = np.array(keys, np.uint64) + np.uint64(1)
    log.note(fate, Why.AHEAD, digests_of(*keys), at_s, stamps, stamps)


def test_the_newest_decision_about_a_key_comes_first() -> None:
    log = DecisionLog(64)
    note(log, 1, 2, 3, at_s=1.0)
    note(log, 2, at_s=2.0, fate=Fate.REMOVED)
    found = log.find(digests_of(2)[0])
    assert [(d.fate, d.at_s, d.batch, d.stamp) for d in found] == [
        (Fate.REMOVED, 2.0, 1, 3),
        (Fate.EVICTED, 1.0, 3, 3),
    ]
    assert log.find(digests_of(9)[0]) == []
    assert (len(log), log.oldest_s()) == (4, 1.0)


def test_a_log_of_no_size_remembers_nothing() -> None:
    log = DecisionLog(0)
    note(log, 1)
    assert log.find(digests_of(1)[0]) == []
    assert (len(log), log.oldest_s()) == (0, None)


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=100), st.integers(1, 300))
def test_it_holds_the_last_keys_as_a_list_would(batches: list[list[int]], room: int) -> None:
    log = DecisionLog(room)
    naive: list[tuple[int, float]] = []
    for number, keys in enumerate(batches):
        note(log, *keys, at_s=float(number))
        naive += [(key, float(number)) for key in keys]
    kept_batches = max(64, room // 4)
    alive = [n for n, keys in enumerate(batches) if keys][-kept_batches:]
    naive = [entry for entry in naive[-room:] if entry[1] in alive]
    for key in range(10):
        expected = [at_s for k, at_s in reversed(naive) if k == key][:16]
        assert [d.at_s for d in log.find(digests_of(key)[0])] == expected
