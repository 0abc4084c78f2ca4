"""Who holds which bytes: found, forgotten when gone, bounded."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from cenote.master.blobs import BlobTable

U64 = NDArray[np.uint64]


def words(numbers: list[int]) -> U64:
    mixed = [(n * 0x9E37_79B9_7F4A_7C15 % 2**64, n) for n in numbers]
    return np.array(mixed, np.uint64).reshape(-1, 2)


def add(table: BlobTable, contents: list[int], keys: list[int], seqs: list[int]) -> None:
    table.add(words(contents), words(keys), np.array(seqs, np.uint64))


def found(table: BlobTable, content: int) -> set[int]:
    return {seq for _, _, seq in table.find(*words([content])[0].tolist())}


def everything(digests: U64, seqs: U64) -> NDArray[np.bool_]:
    return np.ones(len(seqs), np.bool_)


def test_holders_of_the_same_bytes_are_found() -> None:
    table = BlobTable(everything)
    add(table, [1, 2, 1], [10, 11, 12], [1, 2, 3])
    assert found(table, 1) == {1, 3}
    assert found(table, 2) == {2}
    assert found(table, 3) == set()


def test_no_digest_is_no_content() -> None:
    table = BlobTable(everything)
    table.add(np.zeros((1, 2), np.uint64), words([10]), np.array([1], np.uint64))
    assert not table.count


def test_a_key_that_is_put_again_is_found_in_its_last_version() -> None:
    table = BlobTable(everything)
    add(table, [1, 1], [10, 10], [1, 2])
    assert found(table, 1) == {2}


def test_many_holders_of_the_same_bytes_displace_each_other() -> None:
    table = BlobTable(everything)
    add(table, [1] * 100, list(range(100)), list(range(1, 101)))
    assert len(found(table, 1)) == 8
    assert table.count == 8


def test_it_grows_and_forgets_what_has_gone() -> None:
    alive: set[int] = set()

    def are_alive(digests: U64, seqs: U64) -> NDArray[np.bool_]:
        return np.array([seq in alive for seq in seqs.tolist()], np.bool_)

    table = BlobTable(are_alive)
    dice = random.Random(1)
    for seq in range(1, 20_001):
        alive.add(seq)
        add(table, [seq], [seq], [seq])
        if len(alive) > 1500:
            alive.discard(dice.choice(list(alive)))
    kept = sum(found(table, seq) == {seq} for seq in alive)
    assert kept > 0.95 * len(alive)
    assert table.memory_bytes < 40 * 16 * len(alive)
    contents, digests, seqs = table.entries()
    assert set(seqs.tolist()) <= alive
    assert (contents == digests).all()
    alive.clear()
    add(table, list(range(30_000, 40_000)), list(range(10_000)), list(range(30_000, 40_000)))
    assert table.memory_bytes < 200_000
