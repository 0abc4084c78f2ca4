"""What is saved when, the circuit breaker, and the slots of the staging memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cenote.connectors.vllm.breaker import CircuitBreaker
from cenote.connectors.vllm.groups import Group, Grouping
from cenote.connectors.vllm.saves import SaveProgress
from cenote.connectors.vllm.slots import Slots

FULL = Grouping((Group(0, "full", 16),), 16, 16)
HYBRID = Grouping((Group(0, "window", 16, 16), Group(1, "full", 16), Group(2, "state", 32)), 32, 16)
HASHES = [bytes([i]) * 4 for i in range(8)]


def test_blocks_are_saved_once_when_they_are_full() -> None:
    progress = SaveProgress()
    assert progress.advance(FULL, HASHES, 15, [[7]]) is None
    order = progress.advance(FULL, HASHES, 40, [[7, 8, 9]])
    assert order is not None
    assert order.blocks == ((0, 0), (0, 1))
    assert order.block_ids == (7, 8)
    assert order.hashes == (HASHES[0], HASHES[1])
    order = progress.advance(FULL, HASHES, 48, [[7, 8, 9]])
    assert order is not None
    assert order.block_ids == (9,)
    assert progress.advance(FULL, HASHES, 48, [[7, 8, 9]]) is None


def test_most_steps_have_nothing_to_save_and_need_no_tables() -> None:
    progress = SaveProgress()
    due = [tokens for tokens in range(1, 65) if step_is_due(progress, tokens)]
    assert due == [16, 32, 48, 64]
    assert progress.due(HYBRID, HASHES, 65, [(2, 11, 32)]), "a state is handed out"
    assert not progress.due(FULL, HASHES[:4], 200), "there are no hashes beyond 64 tokens"


def step_is_due(progress: SaveProgress, tokens: int) -> bool:
    due = progress.due(FULL, HASHES, tokens)
    order = progress.advance(FULL, HASHES, tokens, [[7, 8, 9, 10]])
    assert (order is not None) == due
    return due


def test_what_the_pool_has_is_not_saved_and_tokens_without_hash_are_not() -> None:
    progress = SaveProgress()
    progress.skip(FULL, 32)
    order = progress.advance(FULL, HASHES[:3], 200, [list(range(1, 13))])
    assert order is not None
    assert order.blocks == ((0, 2),)


def test_a_window_leaves_out_what_has_left_it_and_states_come_by_themselves() -> None:
    progress = SaveProgress()
    tables = [[0, 0, 3, 4], [5, 6, 7, 8], [0, 0]]
    order = progress.advance(HYBRID, HASHES, 64, tables, [(2, 11, 32), (2, 12, 40), (2, 13, 96)])
    assert order is not None
    assert order.blocks == ((0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0))
    assert order.block_ids == (3, 4, 5, 6, 7, 8, 11)
    assert order.hashes[-1] == HASHES[1]


def test_the_breaker_opens_after_some_failures_and_lets_one_try() -> None:
    breaker = CircuitBreaker(failures_max=2)
    breaker.failed(0.0)
    assert breaker.admit(0.0)
    breaker.failed(0.0)
    assert breaker.is_open(0.1)
    assert not breaker.admit(0.1)
    assert breaker.admit(0.6)
    assert not breaker.admit(0.6), "one is under way"
    breaker.failed(0.7)
    assert not breaker.admit(1.5), "the pause doubled"
    assert breaker.admit(1.8)
    breaker.succeeded()
    assert breaker.admit(1.8)
    assert not breaker.is_open(1.8)
    assert breaker.opened == 1


def test_the_pause_of_a_breaker_is_bounded() -> None:
    breaker = CircuitBreaker(failures_max=1)
    now_s = 0.0
    for _ in range(20):
        breaker.failed(now_s)
        now_s += 15.0
        assert breaker.admit(now_s)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_slots_add_up_and_saves_leave_half_of_them(steps: list[tuple[bool, int]]) -> None:
    slots = Slots(16)
    loads: list[list[int]] = []
    saves: list[list[int]] = []
    for save, count in steps:
        if save:
            saves.append(slots.take_for_save(count))
        else:
            loads.append(slots.take(count))
        taken = [slot for run in loads + saves for slot in run]
        assert len(set(taken)) == len(taken)
        assert len(taken) + slots.free == 16
        assert sum(map(len, saves)) <= 8
    for run in saves:
        slots.give_from_save(run)
    for run in loads:
        slots.give(run)
    assert slots.free == 16
    assert len(slots.take_for_save(16)) == 8
