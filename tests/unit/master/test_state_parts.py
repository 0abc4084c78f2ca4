"""The parts of the state that stand alone: slot numbers, leases, namespaces, shares, spans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import (
    FingerprintMismatch,
    InvalidArgument,
    NamespaceNotFound,
    NamespaceReset,
    ResourceUnavailable,
)
from cenote.master.effects import NamespaceOpened
from cenote.master.leases import LeaseTable
from cenote.master.namespaces import Namespaces
from cenote.master.placement import _capped_shares
from cenote.master.slots import SlotNumbers
from cenote.master.spans import by_segment, distinct, from_placed, to_placed

# ---- slot numbers ---------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["take", "one", "give", "claim"]), st.integers(1, 9))))
def test_slot_numbers_are_given_once(steps: list[tuple[str, int]]) -> None:
    slots, used = SlotNumbers(40), set[int]()
    for what, count in steps:
        if what == "take":
            taken = slots.take(count)
            assert (taken is None) == (count > slots.total - len(used))
            fresh = set() if taken is None else set(taken.tolist())
            assert not fresh & used
            assert taken is None or len(fresh) == count
            used |= fresh
        elif what == "one":
            one = slots.take_one()
            assert (one < 0) == (len(used) == slots.total)
            assert one not in used
            used |= {one} if one >= 0 else set()
        elif what == "give" and used:
            back = sorted(used)[:: max(1, count // 2)]
            used -= set(back)
            if len(back) == 1:
                slots.give_one(back[0])
            else:
                slots.give(np.array(back, np.uint32))
        elif what == "claim":
            some = {(7 * count) % 40, count}
            slots.claim(np.array(sorted(some), np.uint32))
            used |= some
        assert slots.used == len(used)
        assert slots.free == slots.total - len(used)


def test_low_slot_numbers_are_reused_first() -> None:
    slots = SlotNumbers(100)
    slots.take(10)
    slots.give(np.array([2, 7, 3], np.uint32))
    assert [slots.take_one() for _ in range(4)] == [2, 3, 7, 10]
    slots.give(np.arange(11, dtype=np.uint32))
    assert slots.high == 0


# ---- leases ---------------------------------------------------------------------------------


def test_leases_come_due_in_their_time() -> None:
    table = LeaseTable(1)
    early = table.give(1, 10.0, b"a")
    late = table.give(np.array([2, 3]), 12.0, b"a")
    hold = table.give(4, float("inf"), b"a")
    assert hold.is_hold
    assert table.due(10.0, 10) == []  # its bucket is not over yet
    assert table.due(10.1, 10) == [early]
    assert table.renew(late.lease_id, 20.0)
    assert not table.renew(early.lease_id, 20.0)
    assert table.due(15.0, 10) == []
    assert table.due(20.1, 10) == [late]
    assert len(table) == 1
    assert not table._buckets
    assert not table._heap


def test_only_so_many_leases_end_at_once() -> None:
    table = LeaseTable(1)
    for i in range(10):
        table.give(i, 1.0 + i / 1000, b"a")
    assert len(table.due(5.0, 4)) == 4
    assert len(table.due(5.0, 100)) == 6


# ---- namespaces -----------------------------------------------------------------------------


def test_a_namespace_opens_with_its_fingerprint_only() -> None:
    names = Namespaces()
    with pytest.raises(NamespaceNotFound):
        names.open("a", b"\x01", False, 1, 5, 10)
    first, created = names.open("a", b"\x01" * 40, True, 1, 5, 10)
    assert created
    assert names.open("a", b"\x01" * 40, True, 1, 6, 10) == (first, False)
    with pytest.raises(FingerprintMismatch) as caught:
        names.open("a", b"\x02", True, 1, 6, 10)
    assert "'a'" in str(caught.value)
    assert "010101" in str(caught.value)
    assert "02" in str(caught.value)
    assert len(str(caught.value)) < 250
    names.open("t", b"bf16;block=16", True, 1, 6, 10)
    with pytest.raises(FingerprintMismatch, match=r"fingerprint 'bf16;block=16', not 'bf16'"):
        names.open("t", b"bf16", True, 1, 6, 10)
    with pytest.raises(InvalidArgument):
        names.open("", b"", True, 1, 6, 10)
    with pytest.raises(InvalidArgument):
        names.open("x" * 300, b"", True, 1, 6, 10)
    with pytest.raises(ResourceUnavailable):
        names.open("b", b"", True, 1, 6, 1)


def test_ids_are_never_reused_and_generations_are_checked() -> None:
    names = Namespaces()
    first, _ = names.open("a", b"", True, 1, 5, 10)
    second, _ = names.open("b", b"", True, 0, 6, 10)
    assert (first.namespace_id, second.namespace_id, second.durability) == (1, 2, 1)
    assert names.check(1, 1) is first
    with pytest.raises(NamespaceReset):
        names.check(9, 1)
    reset = names.apply(NamespaceOpened("a", 1, 2, b"", 99, 1))
    with pytest.raises(NamespaceReset, match="generation 2"):
        names.check(1, 1)
    assert names.check(1, 2) is reset
    assert names.apply(NamespaceOpened("a", 1, 1, b"", 5, 1)) is reset


def test_numbers_of_incarnations_come_back_when_nothing_is_left() -> None:
    names = Namespaces()
    names.open("a", b"", True, 1, 5, 10)
    for generation in range(2, 200):
        names.apply(NamespaceOpened("a", 1, generation, b"", generation, 1))
    assert names.count <= 4
    names.objects[names.by_id[1].incarnation] = 3
    names.apply(NamespaceOpened("a", 1, 200, b"", 200, 1))
    assert names.stale_objects == 3
    old = int(np.flatnonzero(names.objects)[0])
    names.apply(NamespaceOpened("a", 1, 201, b"", 201, 1))
    assert names.by_id[1].incarnation != old


# ---- shares and spans -----------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0.02, 2.0)), min_size=1, max_size=12))
def test_shares_add_up_and_are_capped(nodes: list[tuple[int, float]]) -> None:
    sizes = [size for size, _ in nodes]
    total = sum(sizes)
    caps = [1.8 * size / total for size in sizes]
    shares = _capped_shares([size * ratio for size, ratio in nodes], caps)
    assert abs(sum(shares) - 1) < 1e-6
    for share, cap in zip(shares, caps, strict=True):
        assert share <= cap + 1e-6


def test_shares_follow_the_weights() -> None:
    assert _capped_shares([1, 1, 2], [9, 9, 9]) == [0.25, 0.25, 0.5]
    assert _capped_shares([1, 9], [1.0, 0.5]) == [0.5, 0.5]
    # Where caps leave less than everything, they give way evenly.
    assert sum(_capped_shares([1.0], [0.5])) == pytest.approx(0.5)


def test_spans_survive_the_journals_format() -> None:
    spans = np.array([(7 | 2 << 16, 5, 1 << 31, 9), (65535, 0, 3, 4)], np.uint32)
    placed = to_placed(spans)
    assert placed["segment"].tolist() == [7, 65535]
    assert placed["replica"].tolist() == [2, 0]
    assert (from_placed(placed) == spans).all()


@given(st.lists(st.integers(1, 4), max_size=30))
def test_spans_are_grouped_by_segment(segments: list[int]) -> None:
    spans = np.array([(s, i, i, 1) for i, s in enumerate(segments)], np.uint32).reshape(-1, 4)
    groups = dict(by_segment(spans))
    assert sorted(groups) == sorted(set(segments))
    for segment, part in groups.items():
        assert part[:, 1].tolist() == [i for i, s in enumerate(segments) if s == segment]
    assert distinct(np.array(segments, np.int64)).tolist() == sorted(set(segments))
