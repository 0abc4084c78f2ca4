"""One client of a replay, against a cache that can be told to fail."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cenote.api.errors import NoSpace, Unavailable
from cenote.api.types import Sameness
from cenote.cli.replay.player import Player, Tally
from cenote.cli.replay.trace import Trace

BLOCK_BYTES = 4096


def trace_of(*requests: list[int], tail_tokens: int = 0) -> Trace:
    lengths = [len(ids) for ids in requests]
    return Trace(
        name="t",
        timestamps_ms=np.zeros(len(requests), np.int64),
        input_tokens=np.array(lengths, np.int64) * 512 - tail_tokens,
        block_ids=np.array([i for ids in requests for i in ids], np.int64),
        starts=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
    )


class FakeCache:
    """A namespace that keeps everything in a dict."""

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.prefixes: list[int] = []
        self.match_error: Exception | None = None
        self.put_error: Exception | None = None
        self.lose_after_match: set[bytes] = set()

    def match(self, keys: Any) -> Any:
        if self.match_error is not None:
            raise self.match_error
        present = [key.tobytes() in self.objects for key in keys]
        for key in self.lose_after_match:
            self.objects.pop(key, None)
        return SimpleNamespace(prefix_keys=[*present, False].index(False))

    def get_into_batch(self, keys: Any, *, addresses: Any, lengths: Any, chain: bool) -> Any:
        assert chain
        limits = np.broadcast_to(lengths, len(keys)).tolist()
        hits, sizes = [], []
        for key, address, limit in zip(keys, addresses, limits, strict=True):
            value = self.objects.get(key.tobytes())
            hits.append(value is not None)
            sizes.append(len(value or b""))
            if value is not None:
                ctypes.memmove(int(address), value, min(len(value), limit))
        return SimpleNamespace(
            hits=np.array(hits), sizes=np.array(sizes, np.uint64), failed_count=0
        )

    def put_from_batch(
        self, keys: Any, *, addresses: Any, lengths: Any, chain: bool, prefix: Any, replicas: int
    ) -> Any:
        assert chain
        limits = np.broadcast_to(lengths, len(keys)).tolist()
        self.prefixes.append(len(prefix))
        failed = len(keys) if self.put_error is not None else 0
        sameness, stored = np.zeros(len(keys), np.uint8), 0
        for i, (key, address) in enumerate(zip(keys, addresses, strict=True)):
            if failed:
                continue
            value = ctypes.string_at(int(address), limits[i])
            if key.tobytes() in self.objects:
                same = self.objects[key.tobytes()] == value
                sameness[i] = Sameness.SAME if same else Sameness.DIFFERENT
            else:
                self.objects[key.tobytes()] = value
                stored += 1

        def raise_for_errors() -> None:
            assert self.put_error is not None
            raise self.put_error

        return SimpleNamespace(
            stored_count=stored,
            existed_count=len(keys) - stored - failed,
            failed_count=failed,
            sameness=sameness,
            raise_for_errors=raise_for_errors,
        )


def player_of(cache: FakeCache, trace: Trace, window: int = 4) -> Player:
    buffer = np.zeros((window, BLOCK_BYTES), np.uint8)
    return Player(cast(Any, cache), trace, buffer)


def key_of(block: int) -> bytes:
    return block.to_bytes(8, "little")


def test_hits_are_the_longest_prefix_and_the_rest_is_put() -> None:
    cache = FakeCache()
    trace = trace_of([1, 2, 3], [1, 2, 9], [5], [], tail_tokens=100)
    player = player_of(cache, trace)
    for request in range(3):
        player.play(request)
    tally = player.tally
    assert (tally.requests, tally.blocks, tally.hit_blocks) == (3, 7, 2)
    assert (tally.tokens, tally.hit_tokens) == (7 * 512 - 300, 1024)
    assert tally.read_bytes == 2 * BLOCK_BYTES
    # What ends a prompt within a block is shorter.
    assert {key: len(value) for key, value in cache.objects.items()} == {
        key_of(block): BLOCK_BYTES - 8 * (block in (3, 9, 5)) for block in (1, 2, 3, 9, 5)
    }
    player.play(1)
    assert (tally.hit_blocks, tally.wrong_bytes) == (5, 0)
    assert tally.written_bytes == 5 * BLOCK_BYTES
    assert (tally.errors, tally.wrong_bytes, tally.vanished_blocks) == (0, 0, 0)
    assert cache.prefixes == [0, 2, 0]


def test_tokens_of_a_partial_block_count_once() -> None:
    trace = trace_of([1, 2], [1, 2], tail_tokens=100)
    player = player_of(FakeCache(), trace)
    player.play(0)
    player.play(1)
    assert player.tally.hit_tokens == 1024 - 100


def test_a_long_prompt_goes_through_a_small_buffer() -> None:
    cache = FakeCache()
    trace = trace_of(list(range(11)), list(range(11)))
    player = player_of(cache, trace, window=4)
    player.play(0)
    assert cache.prefixes == [0, 4, 8]
    player.play(1)
    assert player.tally.hit_blocks == 11
    assert player.tally.wrong_bytes == 0
    assert len(player.tally.latencies_s["get"]) == 3


def test_wrong_bytes_and_wrong_sizes_are_counted() -> None:
    cache = FakeCache()
    player = player_of(cache, trace_of([1, 2, 3], [1, 2, 3]))
    player.play(0)
    cache.objects[key_of(2)] = bytes(8) + cache.objects[key_of(2)][8:]
    player.play(1)
    assert 0 < player.tally.wrong_bytes <= 8
    cache.objects[key_of(2)] = b"short"
    player.play(1)
    assert player.tally.wrong_bytes > BLOCK_BYTES


def test_what_was_evicted_meanwhile_ends_the_hit_and_is_put_again() -> None:
    cache = FakeCache()
    player = player_of(cache, trace_of([1, 2, 3], [1, 2, 3]))
    player.play(0)
    cache.lose_after_match = {key_of(2)}
    player.play(1)
    tally = player.tally
    assert (tally.hit_blocks, tally.vanished_blocks, tally.errors) == (1, 2, 0)
    assert tally.existed_blocks == 1  # block 3, which was still there
    assert key_of(2) in cache.objects


def test_failures_are_counted_and_do_not_end_the_play() -> None:
    cache = FakeCache()
    player = player_of(cache, trace_of([1, 2], [1, 2]))
    cache.put_error = NoSpace("full")
    player.play(0)
    cache.put_error = None
    cache.match_error = Unavailable("gone")
    player.play(1)
    assert player.tally.errors == 3
    assert "NoSpace" in player.tally.examples[0]
    assert "Unavailable" in player.tally.examples[1]


def test_an_object_with_other_bytes_is_an_error() -> None:
    cache = FakeCache()
    player = player_of(cache, trace_of([1, 2]))
    cache.objects[key_of(2)] = bytes(BLOCK_BYTES)
    player.play(0)
    assert player.tally.errors == 1


def test_tallies_add_up() -> None:
    one, other = Tally(requests=2, errors=1), Tally(requests=3, wrong_bytes=7)
    one.latencies_s["get"].append(1.0)
    other.latencies_s["get"].append(2.0)
    other.fail("x", 4)
    one.add(other)
    assert (one.requests, one.errors, one.wrong_bytes) == (5, 5, 7)
    assert one.latencies_s["get"] == [1.0, 2.0]
    assert one.examples == ["x"]


@pytest.mark.parametrize("count", [1, 3])
def test_only_a_few_examples_are_kept(count: int) -> None:
    tally = Tally()
    for _ in range(100):
        tally.fail("again", count)
    assert tally.errors == 100 * count
    assert len(tally.examples) < 10


def test_a_pool_that_is_gone_is_given_up() -> None:
    cache = FakeCache()
    player = player_of(cache, trace_of(*[[1]] * 30))
    cache.match_error = Unavailable("gone")
    for request in range(9):
        player.play(request)
    assert not player.hopeless
    cache.match_error = None
    player.play(9)
    cache.match_error = Unavailable("gone")
    for request in range(10, 20):
        assert not player.hopeless
        player.play(request)
    assert player.hopeless
