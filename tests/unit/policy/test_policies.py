"""What every policy owes its caller, and chains that are kept whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.policy.base import MAIN, STEP, Links
from cenote.policy.chains import parent_mark, tails_first
from cenote.policy.model import CacheModel, spread
from cenote.policy.names import POLICIES, new_policy, successor

CHAINED = [name for name in POLICIES if new_policy(name).chained]


@pytest.mark.parametrize("name", POLICIES)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 7), st.booleans()), max_size=90),
    count=st.integers(0, 100),
)
def test_victims_are_evictable_distinct_and_enough(
    name: str, rows: list[tuple[int, int, bool]], count: int
) -> None:
    policy = new_policy(name, 100 * STEP)
    stamps = np.array([tick * STEP + flags for tick, flags, _ in rows], np.uint64)
    evictable = np.array([can for *_, can in rows], np.bool_)
    links = Links(spread(np.arange(len(rows))), np.zeros(len(rows), np.uint32))
    chosen = policy.victims(stamps, evictable, count, links)
    assert len(set(chosen.tolist())) == len(chosen)
    assert evictable[chosen].all()
    assert len(chosen) >= min(count, int(evictable.sum()))


@pytest.mark.parametrize("name", POLICIES)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 7), st.booleans()), max_size=90),
    count=st.integers(0, 100),
)
def test_what_is_coldest_is_told_and_nothing_changes(
    name: str, rows: list[tuple[int, int, bool]], count: int
) -> None:
    policy = new_policy(name, 100 * STEP)
    stamps = np.array([tick * STEP + flags for tick, flags, _ in rows], np.uint64)
    before = stamps.copy()
    positions = np.flatnonzero(np.array([is_there for *_, is_there in rows], np.bool_))
    chosen = policy.coldest(stamps, positions, count)
    assert (stamps == before).all()
    assert policy.clock == 100 * STEP
    assert len(set(chosen.tolist())) == len(chosen)
    assert set(chosen.tolist()) <= set(positions.tolist())
    assert len(chosen) >= min(count, len(positions))
    if policy.by_age:
        assert (np.diff(stamps[chosen].astype(np.int64)) >= 0).all()
        assert not len(chosen) or stamps[chosen].max() <= np.delete(
            stamps[positions], np.searchsorted(positions, chosen)
        ).min(initial=2**63)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_coldest_is_what_goes(name: str) -> None:
    """Of a quarter of a cache, under skewed use and scans, when as much has gone."""
    rng, blocks = np.random.default_rng(3), np.arange(200_000)
    weights = 1 / np.arange(1, 8_001) ** 0.8
    draws = rng.choice(8_000, 60_000, p=weights / weights.sum())
    policy = new_policy(name)
    cache = CacheModel(policy, 2_000, spread(blocks))

    def use(number: int) -> None:
        fresh = 10_000 + number
        one = fresh if number % 3 == 0 else draws[number]
        cache.reference(np.array([one]), np.array([-1]))

    for number in range(30_000):
        use(number)
    live = np.flatnonzero(cache._live)
    told = cache._block_of[policy.coldest(cache._stamps, live, len(live) // 4)]
    by_age = cache._block_of[live[np.argsort(cache._stamps[live])[: len(told)]]]
    gone = cache.evicted_blocks
    while cache.evicted_blocks < gone + len(told):
        number += 1
        use(number)
    left, left_by_age = cache.is_kept(told).mean(), cache.is_kept(by_age).mean()
    assert left < 0.4
    assert policy.by_age or left < left_by_age - 0.5, "their age does not tell"


@pytest.mark.parametrize("name", POLICIES)
def test_policies_have_their_names_and_go_on_from_one_another(name: str) -> None:
    policy = new_policy(name)
    assert policy.name == name
    stamps = policy.admit(spread(np.arange(5)), True)
    assert (np.diff(stamps.astype(np.int64)) < 0).all(), "the root is newest"
    for other in POLICIES:
        heir = successor(policy, other)
        assert heir.name == other
        assert heir.clock >= policy.clock
        assert len(heir.victims(stamps, np.ones(5, np.bool_), 5)) == 5


@pytest.mark.parametrize("name", POLICIES)
def test_one_at_a_time_is_like_a_batch_of_one(name: str) -> None:
    one, many = new_policy(name), new_policy(name)
    stamps = np.zeros((2, 3), np.uint64)
    words = memoryview(stamps[0].data)
    stamps[0, 1] = one.admit_one(77)
    stamps[1, 1] = many.admit(np.array([77], np.uint64), False)[0]
    one.touch_one(words, 1)
    many.touch(stamps[1], np.array([1]), False)
    assert stamps[0].tolist() == stamps[1].tolist()
    assert one.clock == many.clock


@pytest.mark.parametrize("name", [name for name in POLICIES if new_policy(name).remembers])
def test_what_comes_back_soon_goes_to_the_main_queue(name: str) -> None:
    policy = new_policy(name)
    keys = spread(np.arange(20))
    stamps = policy.admit(keys, False)
    policy.touch(stamps, np.arange(10), False)  # ARC remembers as much as T2 holds
    gone = policy.victims(stamps, np.ones(20, np.bool_), 5)
    policy.evicted(keys[gone], stamps[gone])
    again = policy.admit(keys[gone], False)
    assert (again & np.uint64(MAIN)).all()
    assert policy.admit_one(int(spread(np.array([99]))[0])) & MAIN == 0
    assert policy.memory_bytes() > 0


@given(st.data())
def test_tails_first_against_the_obvious(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    parents = [data.draw(st.integers(-1, row - 1)) for row in range(count)]
    chosen = np.array(data.draw(st.permutations(range(count))))[: data.draw(st.integers(1, count))]
    keys = spread(np.arange(count))
    marks = np.array([0 if p < 0 else parent_mark(keys[[p]])[0] for p in parents], np.uint32)
    free, kept = tails_first(chosen, Links(keys, marks))
    must_stay: set[int] = set()
    for row in range(count - 1, -1, -1):
        if row not in set(chosen.tolist()) or row in must_stay:
            node = parents[row]
            while node >= 0:
                must_stay.add(node)
                node = parents[node]
    assert set(kept.tolist()) == must_stay & set(chosen.tolist())
    assert set(free.tolist()) == set(chosen.tolist()) - must_stay
    place = {row: at for at, row in enumerate(free.tolist())}
    for row, at in place.items():
        assert place.get(parents[row], at + 1) > at, "a block goes after its successors"


@pytest.mark.parametrize("name", CHAINED)
@given(seed=st.integers(0, 10_000))
def test_no_block_is_kept_whose_predecessor_is_gone(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # A tree of prompts: chains share prefixes; block b's predecessor is parents[b].
    blocks = 400
    parents = np.array([-1, *(int(rng.integers(max(-1, b - 9), b)) for b in range(1, blocks))])
    cache = CacheModel(new_policy(name), 60, spread(np.arange(blocks)))
    excused: set[int] = set()
    for _ in range(80):
        chain: list[int] = []
        node = int(rng.integers(0, blocks))
        while node >= 0 and len(chain) < 30:
            chain.append(node)
            node = int(parents[node])
        if node >= 0:
            continue
        cache.access(np.array(chain[::-1]))
        assert len(cache) <= 60
        kept = np.flatnonzero(cache.is_kept(np.arange(blocks)))
        alone = kept[(parents[kept] >= 0) & ~cache.is_kept(parents[kept])]
        # A chain may push out its own middle while its end is not stored yet.
        excused = (excused | set(chain)) & set(alone.tolist())
        assert set(alone.tolist()) <= excused
