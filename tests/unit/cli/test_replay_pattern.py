"""Bytes that follow from a block's id."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import InvalidArgument
from cenote.cli.replay.pattern import BlockPattern


def filled(
    pattern: BlockPattern, ids: list[int]
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    blocks = np.empty((len(ids), pattern.block_bytes), np.uint8)
    pattern.fill(blocks, np.array(ids, np.int64))
    return blocks


@given(
    words=st.integers(1, 700),
    ids=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=40),
)
def test_what_was_filled_has_no_wrong_byte(words: int, ids: list[int]) -> None:
    pattern = BlockPattern(words * 8)
    assert BlockPattern(words * 8).wrong_bytes(filled(pattern, ids), np.array(ids)) == 0


@pytest.mark.parametrize("block_bytes", [8, 4096, 65536, 3 << 20])
def test_every_changed_byte_is_counted(block_bytes: int, rng: random.Random) -> None:
    pattern = BlockPattern(block_bytes)
    ids = list(range(3))
    blocks = filled(pattern, ids)
    places = {(rng.randrange(3), rng.randrange(block_bytes)) for _ in range(20)}
    for row, column in places:
        blocks[row, column] ^= rng.randrange(1, 256)
    assert pattern.wrong_bytes(blocks, np.array(ids)) == len(places)


def test_a_piece_of_another_block_or_place_is_found() -> None:
    pattern = BlockPattern(4096)
    first, second = filled(pattern, [10, 11])
    mixed = np.stack([first.copy()])
    mixed[0, 512:1024] = second[512:1024]
    assert pattern.wrong_bytes(mixed, np.array([10])) > 450
    shifted = np.stack([np.roll(first, 512)])
    assert pattern.wrong_bytes(shifted, np.array([10])) > 3_900
    assert pattern.wrong_bytes(np.zeros((1, 4096), np.uint8), np.array([10])) > 3_900


def test_a_block_is_whole_words() -> None:
    for size in (0, -8, 12):
        with pytest.raises(InvalidArgument, match="multiple of 8"):
            BlockPattern(size)
