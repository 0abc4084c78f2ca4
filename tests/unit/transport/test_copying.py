from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from time import monotonic
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from cenote.api.errors import DeadlineExceeded
from cenote.transport import copying
from cenote.transport.base import U64Array
from cenote.transport.copying import CopyTeam
from cenote.transport.testing_support import LocalMemory, payload


def columns(lengths: list[int], gaps: list[int], base: int) -> U64Array:
    """Addresses of items that lie behind each other with gaps."""
    places, at = [], base
    for gap, length in zip(gaps, lengths, strict=True):
        at += gap
        places.append(at)
        at += length
    return np.array(places, np.uint64)


@pytest.fixture(scope="module", params=[0, 1, 3])
def team(request: pytest.FixtureRequest) -> Iterator[CopyTeam]:
    team = CopyTeam(request.param)
    yield team
    team.close()


@settings(max_examples=25)
@given(
    items=st.lists(
        st.tuples(
            st.sampled_from([1, 100, 4096, 65_536, 300_000, 1_100_000]),
            st.sampled_from([0, 0, 5]),
            st.sampled_from([0, 0, 9]),
        ),
        min_size=1,
        max_size=25,
    ),
    hashed=st.booleans(),
)
def test_all_items_arrive_and_nothing_else(
    team: CopyTeam, items: list[tuple[int, int, int]], hashed: bool
) -> None:
    lengths = [item[0] for item in items]
    room = sum(map(sum, items))
    data = np.frombuffer(payload(room, len(items)), np.uint8)
    memory = LocalMemory(room)
    sources = columns(lengths, [item[1] for item in items], data.ctypes.data)
    targets = columns(lengths, [item[2] for item in items], memory.address)
    checksums = np.zeros(len(items), np.uint64) if hashed else None
    team.copy(targets, sources, np.array(lengths, np.uint64), monotonic() + 60, checksums)
    expected = np.full(room, 0xA5, np.uint8)
    for i, (s, t, n) in enumerate(zip(sources.tolist(), targets.tolist(), lengths, strict=True)):
        piece = data[s - data.ctypes.data :][:n]
        expected[t - memory.address :][:n] = piece
        if checksums is not None:
            assert int(checksums[i]) == xxh3_64_intdigest(piece.data)
    assert memory.bytes.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [1, 1 << 20, (2 << 20) + 1, (9 << 20) + 5])
def test_one_piece(team: CopyTeam, size: int) -> None:
    data = np.frombuffer(payload(size, 3), np.uint8)
    memory = LocalMemory(size + 1)
    team.copy_one(memory.address, data.ctypes.data, size, monotonic() + 60)
    assert memory.bytes[:size].tobytes() == data.tobytes()
    assert memory.untouched(size, size + 1)


def test_pieces_add_up_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_LARGE_PIECE_BYTES", 50)
    monkeypatch.setattr(copying, "_SHARED_PIECE_BYTES", 7)
    for cut in (copying._whole, copying._halves, copying._small):
        for size in (1, 6, 7, 49, 50, 51, 120, 150):
            pieces = list(cut(1000, 5000, size))
            assert [t - 1000 for t, _, _ in pieces] == [s - 5000 for _, s, _ in pieces]
            at = 0
            for target, _, length in pieces:
                assert target == 1000 + at
                at += length
            assert at == size


@pytest.mark.parametrize("hashed", [False, True])
def test_a_deadline_that_passed(team: CopyTeam, hashed: bool) -> None:
    memory = LocalMemory(16 << 20)
    offsets = np.arange(8, dtype=np.uint64) * np.uint64(1 << 20)
    lengths = np.full(8, 1 << 20, np.uint64)
    targets = offsets + np.uint64(memory.address)
    checksums = np.zeros(8, np.uint64) if hashed else None
    with pytest.raises(DeadlineExceeded):
        team.copy(targets, targets + np.uint64(8 << 20), lengths, monotonic() - 1, checksums)
    # The team is as good as before.
    team.copy(targets, targets + np.uint64(8 << 20), lengths, monotonic() + 60, checksums)


def test_several_callers_at_once_and_a_close_between_them() -> None:
    before = set(threading.enumerate())
    team = CopyTeam(1)
    size = 3 << 20
    data = np.frombuffer(payload(size, 3), np.uint8)
    bad: list[int] = []

    def work() -> None:
        memory = LocalMemory(size)
        for turn in range(10):
            memory.bytes[:] = 0
            team.copy_one(memory.address, data.ctypes.data, size, monotonic() + 60)
            if memory.bytes.tobytes() != data.tobytes():
                bad.append(turn)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    team.close()
    for thread in threads:
        thread.join(60)
    assert bad == []
    assert set(threading.enumerate()) <= before


class Interrupting:
    """A lock that is taken, and then the caller is interrupted before it can take note of it."""

    def __init__(self, lock: Any, times: int) -> None:
        self.lock = lock
        self.left = times

    def acquire(self, *arguments: Any, **keywords: Any) -> bool:
        taken: bool = self.lock.acquire(*arguments, **keywords)
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt
        return taken

    def release(self) -> None:
        self.lock.release()


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_between_being_woken_and_taking_note_of_it(times: int) -> None:
    """Such a call never ended."""
    team = CopyTeam(1)
    size = 8 << 20
    data, memory = payload(size, 1), LocalMemory(size)
    source = np.frombuffer(data, np.uint8).ctypes.data
    begun, go_on = threading.Event(), threading.Event()

    class Held(copying._Work):
        def work_off(self, take: object) -> None:
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                go_on.wait(30)

    team.copy_one(memory.address, source, size, monotonic() + 60)
    (helper,) = team._helpers
    helper._done = Interrupting(helper._done, times)  # type: ignore[assignment]
    work = Held(deque(), monotonic() + 60)
    threading.Timer(0.1, go_on.set).start()
    with pytest.raises(KeyboardInterrupt):
        team._do(work, shared=True)
    assert begun.is_set()
    assert helper._finished == helper._asked
    team.copy_one(memory.address, source, size, monotonic() + 60)
    assert memory.bytes.tobytes() == data
    team.close()
    assert not helper._thread.is_alive()


def test_a_team_whose_helpers_were_never_given_back_is_closed_all_the_same() -> None:
    team = CopyTeam(2)
    team._helpers = [copying._Helper() for _ in range(2)]
    threads = [helper._thread for helper in team._helpers]
    team._owner.acquire()
    team.close()
    assert not any(thread.is_alive() for thread in threads)
