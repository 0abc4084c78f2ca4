"""Batches over several NICs: every byte once, NICs done at the same time, failures made good."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.transport.nics.striping import (
    CUT_BYTES,
    SHARE_BYTES_MIN,
    Lane,
    Pieces,
    Share,
    plan_stripes,
    unfinished,
    whole,
)

MIB = 1 << 20


def batch(*lengths: int) -> Pieces:
    return whole(np.array(lengths, np.uint64))


def covered(shares: list[Share]) -> dict[int, list[tuple[int, int]]]:
    """Ranges of each item that some share moves, in order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for share in shares:
        for item, start, length in zip(
            share.pieces.items.tolist(),
            share.pieces.starts.tolist(),
            share.pieces.lengths.tolist(),
            strict=True,
        ):
            found.setdefault(item, []).append((start, length))
    return {item: sorted(ranges) for item, ranges in found.items()}


def assert_every_byte_once(shares: list[Share], lengths: list[int]) -> None:
    ranges = covered(shares)
    for item, length in enumerate(lengths):
        at = 0
        for start, size in ranges[item]:
            assert start == at
            assert size or not length
            at += size
        assert at == length


def sizes(shares: list[Share]) -> dict[int, int]:
    return {share.lane: share.pieces.total_bytes for share in shares}


def test_a_large_batch_is_shared_out_evenly_as_runs_of_neighbours() -> None:
    shares = plan_stripes(batch(*[2560 << 10] * 64), [Lane(0), Lane(1)])
    assert [share.lane for share in shares] == [0, 1]
    assert shares[0].pieces.items.tolist() == list(range(32))
    assert shares[1].pieces.items.tolist() == list(range(32, 64))


def test_by_speed() -> None:
    found = sizes(plan_stripes(batch(*[MIB] * 100), [Lane(7, 400.0), Lane(3, 100.0)]))
    assert found[7] == 80 * MIB
    assert found[3] == 20 * MIB


def test_by_what_is_under_way() -> None:
    lanes = [Lane(0, 100.0, 60 * MIB), Lane(1, 100.0, 20 * MIB)]
    assert sizes(plan_stripes(batch(*[MIB] * 100), lanes)) == {0: 30 * MIB, 1: 70 * MIB}
    assert sizes(plan_stripes(batch(*[MIB] * 30), lanes)) == {1: 30 * MIB}


def test_one_large_extent_is_cut() -> None:
    shares = plan_stripes(batch(64 * MIB), [Lane(0), Lane(1), Lane(2)])
    assert len(shares) == 3
    assert_every_byte_once(shares, [64 * MIB])
    for share in shares[:-1]:
        assert share.pieces.total_bytes % CUT_BYTES == 0


def test_small_batches_stay_on_the_lane_that_has_least_to_do() -> None:
    lanes = [Lane(0, 100.0, MIB), Lane(1, 100.0, 0), Lane(2, 100.0, 2 * MIB)]
    assert sizes(plan_stripes(batch(4096, 4096), lanes)) == {1: 8192}
    assert sizes(plan_stripes(batch(*[4096] * 64), [Lane(0), Lane(1)])) == {0: 64 * 4096}


def test_far_lanes_are_used_when_no_near_one_is_left() -> None:
    near, far = Lane(0), Lane(1, standby=True)
    assert set(sizes(plan_stripes(batch(64 * MIB), [near, far]))) == {0}
    assert set(sizes(plan_stripes(batch(64 * MIB), [far]))) == {1}


def test_without_a_lane_there_is_no_share() -> None:
    assert plan_stripes(batch(1, 2), []) == []
    assert plan_stripes(batch(), [Lane(0)]) == []


def test_the_share_of_a_failed_nic_is_finished_by_the_others() -> None:
    lengths = [MIB] * 30
    lanes = [Lane(0), Lane(1), Lane(2)]
    shares = plan_stripes(batch(*lengths), lanes)
    lost = shares[1]
    completed = np.zeros(len(lost.pieces), bool)
    completed[:4] = True
    again = plan_stripes(unfinished(lost, completed), [lanes[0], lanes[2]])
    assert {share.lane for share in again} == {0, 2}
    done = [shares[0], shares[2], Share(1, lost.pieces[completed]), *again]
    assert_every_byte_once(done, lengths)


LANES = st.lists(
    st.builds(
        Lane,
        st.integers(0, 1_000),
        st.sampled_from([0.0, 25.0, 100.0, 200.0, 400.0]),
        st.integers(0, 64 * MIB),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda lane: lane.index,
)
LENGTHS = st.lists(
    st.one_of(st.integers(0, 8192), st.integers(0, 4 * MIB), st.just(64 * MIB)),
    min_size=1,
    max_size=60,
)


@given(LENGTHS, LANES)
def test_every_byte_is_moved_once_whatever_the_lanes(lengths: list[int], lanes: list[Lane]) -> None:
    shares = plan_stripes(batch(*lengths), lanes)
    assert_every_byte_once(shares, lengths)
    used = [share.lane for share in shares]
    assert len(set(used)) == len(used)
    near = {lane.index for lane in lanes if not lane.standby}
    assert set(used) <= (near or {lane.index for lane in lanes})
    order = [item for share in shares for item in share.pieces.items.tolist()]
    assert order == sorted(order)  # each share is a run of neighbours


@given(LENGTHS, LANES)
def test_lanes_end_at_about_the_same_time(lengths: list[int], lanes: list[Lane]) -> None:
    shares = sizes(plan_stripes(batch(*lengths), lanes))
    by_index = {lane.index: lane for lane in lanes}
    slack = SHARE_BYTES_MIN * len(lanes) + 4 * CUT_BYTES
    ends = []
    for index, amount in shares.items():
        lane = by_index[index]
        rate = lane.rate_gbps or 100.0
        ends.append(((lane.outstanding_bytes + amount) / rate, rate))
    for end, rate in ends:
        for other, other_rate in ends:
            assert end - other <= slack / min(rate, other_rate)


@given(LENGTHS, LANES, st.data())
def test_whatever_fails_in_whatever_order_all_bytes_arrive(
    lengths: list[int], lanes: list[Lane], data: st.DataObject
) -> None:
    done: list[Share] = []
    alive = list(lanes)
    todo = [batch(*lengths)]
    while todo and alive:
        shares = plan_stripes(todo.pop(), alive)
        for share in shares:
            if data.draw(st.integers(0, 2)):
                done.append(share)
                continue
            completed = np.array(
                data.draw(
                    st.lists(st.booleans(), min_size=len(share.pieces), max_size=len(share.pieces))
                ),
                bool,
            )
            done.append(Share(share.lane, share.pieces[completed]))
            todo.append(unfinished(share, completed))
            alive = [lane for lane in alive if lane.index != share.lane]
    rest = [Share(-1, pieces) for pieces in todo if len(pieces)]  # over TCP
    assert_every_byte_once([*done, *rest], lengths)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_extents_of_no_bytes_are_kept(count: int) -> None:
    shares = plan_stripes(batch(*[0] * count), [Lane(0), Lane(1)])
    assert covered(shares) == {item: [(0, 0)] for item in range(count)}
