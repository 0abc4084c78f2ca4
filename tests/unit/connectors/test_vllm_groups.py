"""How much of a prompt can be resumed: prefixes, windows, states at exact boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.connectors.vllm.groups import Block, Group, Grouping

FULL = Grouping((Group(0, "full", 16),), 16, 16)
WINDOW = Grouping((Group(0, "window", 16, 32), Group(1, "full", 16)), 16, 16)
STATE = Grouping((Group(0, "full", 16), Group(2, "state", 64)), 64, 16)


def test_a_prefix_of_full_attention() -> None:
    assert FULL.single
    assert FULL.needed(48) == [(0, 0), (0, 1), (0, 2)]
    assert FULL.needed(48, have_tokens=32) == [(0, 2)]
    assert FULL.usable_tokens(100, {(0, 0), (0, 1), (0, 3)}.__contains__) == 32
    assert FULL.usable_tokens(100, {(0, 2), (0, 3)}.__contains__, have_tokens=32) == 64
    assert FULL.usable_tokens(100, {(0, 3)}.__contains__, have_tokens=32) == 0


def test_a_window_needs_what_the_next_token_sees() -> None:
    # After 64 tokens the next one is number 64 and sees 32, itself among them: 33 ... 64.
    assert WINDOW.needed(64) == [(1, 0), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]
    full = {(1, index) for index in range(4)}
    assert WINDOW.usable_tokens(64, (full | {(0, 2), (0, 3)}).__contains__) == 64
    # The window's block 2 is missing: resumed where windows do not reach it.
    assert WINDOW.usable_tokens(64, (full | {(0, 0), (0, 1), (0, 3)}).__contains__) == 32
    assert WINDOW.usable_tokens(64, full.__contains__) == 0


def test_a_state_is_needed_at_the_boundary_alone() -> None:
    assert (2, 1) in STATE.needed(128)
    assert (2, 0) not in STATE.needed(128)
    full = {(0, index) for index in range(12)}
    assert STATE.usable_tokens(192, (full | {(2, 1)}).__contains__) == 128
    assert STATE.usable_tokens(192, (full | {(2, 0), (2, 2)}).__contains__) == 192
    assert STATE.usable_tokens(191, (full | {(2, 2)}).__contains__) == 0


def test_hashes_are_those_of_the_blocks_ends() -> None:
    hashes = [bytes([i]) for i in range(12)]
    assert STATE.hash_of((0, 3), hashes) == b"\x03"
    assert STATE.hash_of((2, 0), hashes) == b"\x03"
    assert STATE.hash_of((2, 1), hashes) == b"\x07"


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="fit neither"):
        Grouping((Group(0, "full", 16),), 24, 16)


@given(
    st.sampled_from([FULL, WINDOW, STATE]),
    st.integers(0, 400),
    st.integers(0, 6),
    st.sets(st.tuples(st.sampled_from([0, 1, 2]), st.integers(0, 24))),
)
def test_what_is_usable_needs_only_what_is_there(
    grouping: Grouping, limit: int, have_units: int, present: set[Block]
) -> None:
    have = have_units * grouping.unit_tokens
    tokens = grouping.usable_tokens(limit, present.__contains__, have)
    assert tokens == 0 or have < tokens <= limit
    assert tokens % grouping.unit_tokens == 0
    assert set(grouping.needed(tokens, have)) <= present
    longer = tokens + grouping.unit_tokens if tokens else have + grouping.unit_tokens
    while longer <= limit:
        assert not set(grouping.needed(longer, have)) <= present
        longer += grouping.unit_tokens
