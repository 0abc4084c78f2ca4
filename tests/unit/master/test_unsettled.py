"""What freed which space and which keys, against a list of all that was said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cenote.api.rows import EXTENT, UNIT_BYTES
from cenote.master import unsettled as unsettled_module
from cenote.master.effects import Gone, GoneReason, SegmentGone
from cenote.master.spans import pack_span
from cenote.master.unsettled import Unsettled

SEGMENTS = st.integers(1, 2)
PLACES = st.integers(0, 20)


def gone(*keys: int) -> Gone:
    digests = np.array([(key, 7) for key in keys], np.uint64).reshape(-1, 2)
    return Gone(1, digests, np.ones(len(keys), np.uint64), GoneReason.REMOVED)


def digests(*keys: int) -> np.ndarray:
    return np.array([(key, 9) for key in keys], np.uint64).reshape(-1, 2)


def grant(*extents: tuple[int, int, int]) -> bytes:
    rows = [(s, 0, at * UNIT_BYTES, n * UNIT_BYTES - 1) for s, at, n in extents]
    return np.array(rows, EXTENT).tobytes() if rows else b""


def test_settled_from_the_beginning() -> None:
    unsettled = Unsettled()
    unsettled.note(SegmentGone(3))
    unsettled.decided(5)
    assert unsettled.entry_under(digests(1), grant((1, 0, 9)), b"") == 0


@pytest.mark.parametrize("parts_max", [1, 64])
@given(data=st.data())
@settings(max_examples=60)
def test_whatever_overlaps_waits_and_little_else(parts_max: int, data: st.DataObject) -> None:
    unsettled = Unsettled()
    log: list[tuple[int, set[tuple[int, int]], set[int]]] = []
    entry = durable = 0
    told: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unsettled_module, "PARTS_MAX", parts_max)
        for _ in range(data.draw(st.integers(1, 6))):
            entry += 1
            spans = data.draw(st.lists(st.tuples(SEGMENTS, PLACES, st.integers(1, 4)), max_size=3))
            keys = data.draw(st.lists(st.integers(0, 9), max_size=2))
            unsettled.note_freed([pack_span(s, 1, 0, at, n) for s, at, n in spans], 10 * entry)
            if keys:
                unsettled.note(gone(*keys))
            unsettled.decided(entry)
            log.append((entry, {(s, at + i) for s, at, n in spans for i in range(n)}, set(keys)))
            durable = max(durable, data.draw(st.integers(durable, entry)))
            number = unsettled.settled(durable)
            told.append(number) if number else None
            at, length = data.draw(PLACES), data.draw(st.integers(1, 4))
            segment, key = data.draw(SEGMENTS), data.draw(st.integers(0, 9))
            other = (3, 0, 1)
            found = unsettled.entry_under(
                digests(key, 77), grant((segment, at, length)), grant(other)
            )
            mine = {(segment, at + i) for i in range(length)}
            due = [e for e, units, of in log if e > durable and (units & mine or key in of)]
            assert found >= max(due, default=0)
            if parts_max > 1:
                assert found == max(due, default=0)
        number = unsettled.settled(entry)
        told.append(number) if number else None
    assert told == sorted(told)
    last = max((e for e, units, of in log if units or of), default=0)
    assert max(told, default=0) == 10 * last
    assert len(unsettled) == 0
    assert unsettled.entry_under(digests(*range(10)), grant((1, 0, 30))) == 0


def test_more_than_is_worth_looking_at_keeps_all_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsettled_module, "PIECES_MAX", 10)
    unsettled = Unsettled()
    unsettled.note(gone(*range(11)))
    unsettled.decided(4)
    assert len(unsettled) == 0
    assert unsettled.entry_under(digests(99), grant((1, 0, 1))) == 4
    unsettled.settled(3)
    assert unsettled.entry_under(digests(99)) == 4
    unsettled.settled(4)
    assert unsettled.entry_under(digests(5), grant((1, 0, 1))) == 0
