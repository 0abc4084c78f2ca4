"""`Spares`: whether it pays, who gets what, and that nothing is lost between threads."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cenote.api.rows import EXTENT
from cenote.client.plan.spares import SPARE_BYTES_MAX, SpareGrant, SpareRun, Spares, units_of
from cenote.v1 import master_pb2 as pb

SESSION = b"s" * 16
NOW = 100.0
NUMBERS = itertools.count(1)
Place = tuple[int, int]
"""(grant id, position)."""


def grant(
    count: int, length: int = 64, *, epoch: int = 1, session: bytes = SESSION, generation: int = 1
) -> SpareGrant:
    rows = np.zeros(count, EXTENT)
    rows["segment"], rows["slot"], rows["length"] = 3, np.arange(count), length
    rows["offset"] = np.arange(count) * 4096
    reply = pb.PutStartResponse(
        spare_grant_id=next(NUMBERS), spare_extents=rows.tobytes(), epoch=epoch
    )
    return SpareGrant(reply, session, (7, generation))


def eager(count: int = 100) -> Spares:
    """With credit for many."""
    spares = Spares()
    spares.note_stored(count, NOW)
    return spares


def take(
    spares: Spares,
    count: int = 1,
    units: int = 1,
    now_s: float = NOW,
    *,
    epoch: int = 1,
    session: bytes = SESSION,
    generation: int = 1,
) -> SpareRun | None:
    return spares.take(units, count, epoch, session, (7, generation), now_s)


def places(*runs: SpareRun | None) -> list[Place]:
    return [
        (run.grant.grant_id, i)
        for run in runs
        if run is not None
        for i in range(run.start, run.stop)
    ]


def all_of(granted: SpareGrant) -> list[Place]:
    return [(granted.grant_id, i) for i in range(len(granted.extents))]


# ---- whether it pays -------------------------------------------------------------------------


def test_they_are_asked_for_after_some_puts() -> None:
    spares = Spares()
    for i in range(Spares.credit_needed):
        assert spares.wanted(1, 1) == 0
        spares.note_stored(1, NOW + i / 10)
    assert spares.wanted(1, 1) == 16
    assert spares.wanted(1, 16) == 128


def test_a_pause_ends_the_credit() -> None:
    spares = eager()
    spares.note_stored(1, NOW + 1.1)
    assert spares.wanted(1, 1) == 0
    spares.note_stored(7, NOW + 1.2)
    assert spares.wanted(1, 1) == 16


def test_existing_keys_cost_credit() -> None:
    spares = eager(8)
    spares.add(grant(4), 1, NOW)
    spares.note_existed()
    assert spares.wanted(1, 1) == 0
    assert take(spares) is not None  # what is here may be used while it is not below 0
    for _ in range(100):
        spares.note_existed()
    assert take(spares) is None
    for _ in range(16):
        assert take(spares) is None
        spares.note_stored(1, NOW)
    assert take(spares) is not None


def test_much_credit_does_not_outweigh_keys_that_exist() -> None:
    spares = eager(1_000_000)
    for _ in range(17):
        spares.note_existed()
    assert spares.wanted(1, 1) == 0


def test_a_refusal_counts_for_many_puts() -> None:
    spares = eager()
    spares.add(None, 1, NOW)
    spares.note_existed()  # which does not make it better
    spares.note_stored(200, NOW)
    assert spares.wanted(1, 1) == 0
    spares.note_stored(70, NOW)
    assert spares.wanted(1, 1) == 16


def test_too_few_for_a_batch_are_as_good_as_none() -> None:
    spares = eager()
    few = grant(9)
    spares.add(few, 10, NOW)
    assert places(*spares.take_idle(NOW)) == all_of(few)
    assert spares.wanted(1, 10) == 0
    spares.note_stored(300, NOW)
    spares.add(grant(10), 10, NOW)
    assert take(spares, 10) is not None


def test_more_are_asked_for_each_time_up_to_a_bound() -> None:
    spares = eager()
    asked = []
    for _ in range(10):
        asked.append(spares.wanted(1, 1))
        spares.add(grant(1), 1, NOW)
    assert asked == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 4096]
    assert spares.wanted(64, 1) == 1024  # 4 KiB each
    assert spares.wanted(65, 1) == (4 << 20) // (65 * 64)
    assert spares.wanted(1, 4000) == 4096
    assert spares.wanted(1, 4096) == 4096
    assert spares.wanted(1, 4097) == 0  # they would not do for this very batch
    spares.give_up()
    assert spares.wanted(1, 1) == 16


def test_large_objects_have_none() -> None:
    spares = eager()
    assert spares.wanted(units_of(SPARE_BYTES_MAX), 1) == 16
    assert spares.wanted(units_of(SPARE_BYTES_MAX), 64) == 64
    assert spares.wanted(units_of(SPARE_BYTES_MAX), 65) == 0
    assert spares.wanted(units_of(SPARE_BYTES_MAX + 1), 1) == 0


def test_a_few_sizes_are_kept() -> None:
    spares = eager()
    granted = [grant(2, 64 * units) for units in range(1, 5)]
    for one in granted:
        spares.add(one, 1, NOW)
    assert spares.wanted(4, 1)
    assert not spares.unwanted
    assert spares.wanted(5, 1)  # the smallest makes room
    assert places(*spares.take_idle(NOW)) == all_of(granted[0])
    assert take(spares, units=1) is None
    assert take(spares, units=4) is not None


# ---- taking ----------------------------------------------------------------------------------


def test_each_is_taken_once_in_order() -> None:
    spares = eager()
    granted = grant(5)
    spares.add(granted, 1, NOW)
    runs = [take(spares), take(spares, 2), take(spares), take(spares)]
    assert places(*runs) == all_of(granted)
    assert take(spares) is None
    first = runs[1]
    assert first is not None
    assert granted.extent(first.start) == (3, 1, 4096, 64)
    assert first.as_grant().indexes == np.array([1, 2], "<u4").tobytes()
    assert first.as_grant().grant_id == granted.grant_id


def test_what_is_too_short_for_a_batch_is_given_back() -> None:
    spares = eager()
    short, long = grant(3), grant(8)
    spares.add(long, 1, NOW)
    spares.add(short, 1, NOW)
    assert places(take(spares, 4)) == all_of(long)[:4]
    assert places(*spares.take_idle(NOW)) == all_of(short)
    assert take(spares, 5) is None
    assert places(*spares.take_idle(NOW)) == all_of(long)[4:]


def test_sizes_are_kept_apart() -> None:
    spares = eager()
    small, large = grant(2, 64), grant(2, 65)
    spares.add(small, 1, NOW)
    spares.add(large, 1, NOW)
    assert places(take(spares, units=2)) == all_of(large)[:1]
    assert places(take(spares, units=1)) == all_of(small)[:1]
    assert take(spares, units=3) is None


@pytest.mark.parametrize(
    "other", [{"epoch": 2}, {"session": b"t" * 16}, {"generation": 2}], ids=lambda d: next(iter(d))
)
def test_those_of_another_life_are_given_back(other: dict[str, Any]) -> None:
    spares = eager()
    old, new = grant(3), grant(3, **other)
    spares.add(new, 1, NOW)
    spares.add(old, 1, NOW)
    assert places(take(spares, **other)) == all_of(new)[:1]
    assert places(*spares.take_idle(NOW)) == all_of(old)
    assert take(spares) is None
    (back,) = spares.take_idle(NOW)
    assert places(back) == all_of(new)[1:]
    assert back.as_grant().session_id == new.session_id  # in the session that has it


def test_after_a_pause_they_are_not_used() -> None:
    """Also where nobody has taken them back: with a master that is down, or in a process that was
    stopped."""
    spares = eager()
    granted = grant(10)
    spares.add(granted, 1, NOW)
    assert take(spares, now_s=NOW + 0.9) is not None
    assert take(spares, now_s=NOW + 1.8) is not None
    assert take(spares, now_s=NOW + 2.9) is None
    assert take(spares, now_s=NOW + 2.9) is None
    assert places(*spares.take_idle(NOW + 2.9)) == all_of(granted)[2:]


def test_what_is_idle_is_given_back_size_by_size() -> None:
    spares = eager()
    small, large = grant(4, 64), grant(4, 128)
    spares.add(small, 1, NOW)
    spares.add(large, 1, NOW)
    assert spares.held
    assert spares.take_idle(NOW + 0.9) == []
    for tenth in range(5, 25, 5):
        assert take(spares, units=1, now_s=NOW + tenth / 10) is not None
    assert places(*spares.take_idle(NOW + 2)) == all_of(large)
    assert spares.held
    assert spares.wanted(1, 1)
    spares.add(small, 1, NOW + 2)
    assert places(*spares.take_idle(NOW + 3.1)) == all_of(small)
    assert not spares.held
    assert spares.wanted(1, 1) == 0  # after a pause it is to be seen anew


def test_used_up_ones_are_nothing_to_look_after_for_long() -> None:
    spares = eager()
    spares.add(grant(1), 1, NOW)
    take(spares)
    assert spares.take_idle(NOW + 1.1) == []
    assert not spares.held


# ---- threads ---------------------------------------------------------------------------------


def test_what_is_added_while_all_is_given_up_is_not_lost() -> None:
    spares = eager()

    class Racing(dict[int, "deque[SpareRun]"]):
        def setdefault(self, key: int, default: Any = None) -> Any:
            found = super().setdefault(key, default)
            spares.give_up()  # by another thread
            return found

    spares._runs = Racing()
    granted = grant(3)
    spares.add(granted, 1, NOW)
    left = [take(spares, 3)]
    assert places(*left, *spares.take_idle(NOW)) == all_of(granted)


def test_what_is_put_back_while_all_is_given_up_is_not_lost() -> None:
    spares = eager()
    granted = grant(5)
    spares.add(granted, 1, NOW)

    class Racing(deque[SpareRun]):
        def pop(self) -> SpareRun:  # type: ignore[override]
            run = super().pop()
            if spares._runs:
                spares.give_up()  # by another thread
            return run

    spares._runs[1] = Racing(spares._runs[1])
    taken = take(spares, 2)
    assert sorted(places(taken, *spares.take_idle(NOW))) == all_of(granted)


def test_sizes_may_be_given_up_while_one_is_chosen() -> None:
    spares = eager()

    class Racing(dict[int, "deque[SpareRun]"]):
        def __len__(self) -> int:
            count = super().__len__()
            if count == 4:
                self.clear()  # by another thread
            return count

    spares._runs = Racing({units: deque() for units in range(1, 5)})
    assert spares.wanted(9, 1) == 16


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_racing_threads_lose_nothing_and_share_nothing() -> None:
    spares = eager()
    granted: list[SpareGrant] = []
    taken: list[SpareRun] = []
    back: list[SpareRun] = []
    failures: list[BaseException] = []
    until_s = time.monotonic() + 0.8

    def write(seed: int) -> None:
        dice = random.Random(seed)
        try:
            while time.monotonic() < until_s:
                units = dice.choice((1, 1, 2, 3, 4, 5, 6))
                spares.note_stored(4, NOW)
                run = take(spares, dice.choice((1, 1, 1, 3)), units)
                if run is not None:
                    taken.append(run)
                elif spares.wanted(units, 1):
                    made = grant(dice.randint(1, 12), 64 * units)
                    granted.append(made)
                    spares.add(made, 1, NOW)
                if dice.random() < 0.05:
                    spares.give_up()
                if dice.random() < 0.01:
                    taken.extend(spares.take_all())
                if dice.random() < 0.05:
                    spares.note_existed()
        except BaseException as error:
            failures.append(error)
            raise

    def keep_house() -> None:
        try:
            for turn in itertools.count():
                back.extend(spares.take_idle(NOW + 2 * (turn % 3 == 0)))
                if time.monotonic() >= until_s:
                    return
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    threads.append(threading.Thread(target=keep_house))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    spares.give_up()
    back.extend(spares.take_idle(NOW))
    assert not spares.held
    seen = Counter(places(*taken, *back))
    assert set(seen.values()) == {1}, "one was given twice"
    assert set(seen) == {place for each in granted for place in all_of(each)}
    assert len(taken) > 100
    assert len(granted) > 10


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 9), st.integers(1, 6)),
        st.tuples(st.just("take"), st.integers(1, 5), st.integers(1, 6)),
        st.tuples(st.just("idle"), st.sampled_from([0, 1, 2, 30]), st.just(0)),
        st.tuples(st.just("stored"), st.integers(1, 40), st.just(0)),
        st.tuples(st.just("existed"), st.just(0), st.just(0)),
        st.tuples(st.just("refused"), st.just(0), st.just(0)),
        st.tuples(st.just("wanted"), st.integers(1, 9), st.integers(1, 6)),
        st.tuples(st.just("give_up"), st.just(0), st.just(0)),
        st.tuples(st.just("all"), st.just(0), st.just(0)),
        st.tuples(st.just("life"), st.integers(1, 3), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(actions=ACTIONS)
def test_whatever_happens_each_extent_is_somewhere(actions: list[tuple[str, int, int]]) -> None:
    spares = Spares()
    here: set[Place] = set()
    now_s, life = NOW, 1
    lives: dict[int, int] = {}
    for what, a, b in actions:
        if what == "add":
            made = grant(a, 64 * b, epoch=life)
            lives[made.grant_id] = life
            spares.add(made, 1, now_s)
            here |= set(all_of(made))
        elif what == "take":
            run = take(spares, a, b, now_s, epoch=life)
            if run is not None:
                got = places(run)
                assert len(got) == a
                assert run.grant.units == b
                assert lives[run.grant.grant_id] == life
                assert set(got) <= here
                here -= set(got)
        elif what == "idle":
            now_s += a / 20
            got = places(*spares.take_idle(now_s))
            assert len(set(got)) == len(got)
            assert set(got) <= here
            here -= set(got)
        elif what == "stored":
            spares.note_stored(a, now_s)
        elif what == "existed":
            spares.note_existed()
        elif what == "refused":
            spares.add(None, 1, now_s)
        elif what == "wanted":
            asked = spares.wanted(b, a)
            assert asked == 0 or a <= asked <= 4096
        elif what == "give_up":
            spares.give_up()
        elif what == "all":
            assert sorted(places(*spares.take_all())) == sorted(here)
            assert not spares.held
            here = set()
        else:
            life = a
        assert spares.held or not here
        assert len(spares._runs) <= 6
    got = places(*spares.take_idle(now_s + 1.1))
    assert sorted(got) == sorted(here)
    assert not spares.held
