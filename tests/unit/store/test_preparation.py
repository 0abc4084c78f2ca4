"""Memory in the background: chunk by chunk for all segments, ended at once, failing once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cenote.api.errors import CenoteError, ResourceUnavailable
from cenote.runtime import memory
from cenote.runtime.units import format_size
from cenote.store import dram as dram_module
from cenote.store import preparation
from cenote.store.dram import DramSegment
from cenote.store.node_files import NodeFiles
from cenote.store.preparation import Preparation
from cenote.store.segments import LocalSegments, open_segments
from waiting import wait_until

BOOT = b"1" * 16
MIB = 1 << 20


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSegments]:
    monkeypatch.setattr(dram_module, "SEGMENT_BYTES_MAX", 4 * MIB)
    files = NodeFiles(tmp_path, "n1")
    opened = open_segments(files, 12 * MIB, BOOT)
    yield opened
    opened.close()
    files.close()


def no_failure(error: CenoteError) -> None:
    raise AssertionError(error)


@pytest.mark.parametrize("threads", [1, 3])
def test_all_segments_get_all_of_their_memory(segments: LocalSegments, threads: int) -> None:
    work = Preparation(segments.dram(), no_failure, threads=threads, chunk_bytes=MIB)
    assert work.wait(30)
    assert segments.ready
    assert all(s.allocated_bytes() >= s.size_bytes for s in segments.dram())
    work.stop()
    again = Preparation(segments.dram(), no_failure, chunk_bytes=MIB)
    assert again.wait(30)


def test_segments_take_turns(segments: LocalSegments, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    real = DramSegment.allocate_next

    def noted(self: DramSegment, chunk_bytes: int) -> tuple[int, int] | None:
        order.append(self.index)
        return real(self, chunk_bytes)

    monkeypatch.setattr(DramSegment, "allocate_next", noted)
    assert Preparation(segments.dram(), no_failure, threads=1, chunk_bytes=MIB).wait(30)
    assert order[:6] == [0, 1, 2, 0, 1, 2]


def test_it_can_be_stopped_in_the_middle(
    segments: LocalSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    real = DramSegment.allocate_next

    def slow(self: DramSegment, chunk_bytes: int) -> tuple[int, int] | None:
        assert go_on.wait(30)
        return real(self, chunk_bytes)

    monkeypatch.setattr(DramSegment, "allocate_next", slow)
    work = Preparation(segments.dram(), no_failure, threads=2, chunk_bytes=MIB)
    stopper = threading.Thread(target=work.stop)
    stopper.start()
    wait_until(lambda: work._stopping, what="the stop")
    go_on.set()
    stopper.join(30)
    assert work.done
    assert sum(s.ready_bytes for s in segments.dram()) <= 2 * MIB


def test_too_little_memory_is_told_once_and_ends_the_allocation(
    segments: LocalSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[CenoteError] = []
    real, calls = memory.allocate_file, []

    def scarce(*args: object, **kwargs: object) -> None:
        calls.append(args)
        if len(calls) > 2:
            raise ResourceUnavailable("no memory")
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(dram_module, "allocate_file", scarce)
    work = Preparation(segments.dram(), failures.append, threads=3, chunk_bytes=MIB)
    assert work.wait(30)
    assert [str(error) for error in failures] == ["no memory"]
    assert sum(s.ready_bytes for s in segments.dram()) == 2 * MIB


@pytest.mark.parametrize("how", ["unsupported", "failing"])
def test_memory_that_cannot_be_touched_is_used_all_the_same(
    segments: LocalSegments, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    calls = []

    def refuse(*args: object, **_: object) -> bool:
        calls.append(args)
        if how == "failing":
            raise ResourceUnavailable("poisoned page")
        return False

    monkeypatch.setattr(dram_module, "populate", refuse)
    assert Preparation(segments.dram(), no_failure, threads=1, chunk_bytes=MIB).wait(30)
    assert segments.ready
    assert len(calls) == 1


def test_huge_pages_are_given_up_where_there_are_none(
    segments: LocalSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def none_left(address: int, size_bytes: int) -> int:
        tries.append((address, size_bytes))
        return 0

    monkeypatch.setattr(dram_module, "collapse", none_left)
    monkeypatch.setattr(dram_module, "huge_part", lambda _, size_bytes: size_bytes)
    monkeypatch.setattr(preparation, "_TOUCH_STEP_BYTES", MIB // 4)
    work = Preparation(segments.dram(), no_failure, threads=1, chunk_bytes=MIB)
    assert work.wait(30)
    assert segments.ready
    assert len(tries) == preparation.HUGE_TRIES_IN_VAIN_MAX
    assert not work.huge_bytes
    tries.clear()
    assert Preparation(segments.dram(), no_failure, False, chunk_bytes=MIB).wait(30)
    assert not tries


def test_huge_pages_are_given_up_where_they_take_long(
    segments: LocalSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def found_at_last(address: int, size_bytes: int) -> int:
        tries.append(address)
        return size_bytes

    monkeypatch.setattr(dram_module, "collapse", found_at_last)
    monkeypatch.setattr(preparation, "HUGE_STEP_S_MAX", 0.0)
    monkeypatch.setattr(preparation, "_TOUCH_STEP_BYTES", MIB // 4)
    work = Preparation(segments.dram(), no_failure, threads=1, chunk_bytes=MIB)
    assert work.wait(30)
    assert len(tries) == preparation.HUGE_TRIES_IN_VAIN_MAX
    assert work.huge_bytes == len(tries) * MIB // 4


def test_memory_is_given_out_while_the_kernel_looks_for_huge_pages(
    segments: LocalSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first fill met calls of six seconds: who backed the next chunk waited for that."""
    segment = segments.dram()[0]
    assert segment.allocate_next(MIB) == (0, MIB)
    looking, found = threading.Event(), threading.Event()

    def look(address: int, size_bytes: int) -> int:
        looking.set()
        return size_bytes if found.wait(30) else 0

    monkeypatch.setattr(dram_module, "collapse", look)
    thread = threading.Thread(target=segment.make_huge, args=(0, MIB))
    thread.start()
    try:
        assert looking.wait(30)
        used: list[object] = []
        waiting = threading.Thread(
            target=lambda: used.append(segment.allocate_next(MIB)), daemon=True
        )
        waiting.start()
        waiting.join(10)
        assert used == [(MIB, MIB)]
        segment.attached(1, 2)
        segment.fence(4)
    finally:
        found.set()
        thread.join(30)


def test_given_up_data_gets_no_huge_pages(
    segments: LocalSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = segments.dram()[0]
    assert Preparation(segments.dram(), no_failure).wait(30)
    segment.retire(MIB, 64 << 10, segment.table.slots + 64)
    asked = []

    def noted(address: int, size_bytes: int) -> int:
        asked.append((address, size_bytes))
        return size_bytes

    monkeypatch.setattr(dram_module, "collapse", noted)
    assert segment.make_huge(0, 2 * MIB)
    base = segment.address
    assert asked == [(base, MIB), (base + MIB + (64 << 10), MIB - (64 << 10))]
    assert segment.huge_bytes >= 2 * MIB - (64 << 10)


@pytest.mark.parametrize("huge", [True, False])
def test_what_was_prepared_is_told_once(
    segments: LocalSegments,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    huge: bool,
) -> None:
    monkeypatch.setattr(dram_module, "collapse", lambda _, size_bytes: size_bytes)
    size_bytes = sum(segment.size_bytes for segment in segments.dram())
    with caplog.at_level(logging.INFO, "cenote.store.preparation"):
        work = Preparation(segments.dram(), no_failure, huge, threads=3, chunk_bytes=MIB)
        assert work.wait(30)
    (told,) = (r.__dict__["cenote_fields"] for r in caplog.records)
    assert told["size"] == format_size(size_bytes)
    assert told["on_huge_pages"] == format_size(size_bytes if huge else 0)
    assert work.huge_bytes == (size_bytes if huge else 0)
    assert told["took"]


def test_a_preparation_that_is_stopped_tells_nothing(
    segments: LocalSegments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, begun = threading.Event(), threading.Event()
    real = DramSegment.allocate_next

    def slow(self: DramSegment, chunk_bytes: int) -> tuple[int, int] | None:
        begun.set()
        assert go_on.wait(30)
        return real(self, chunk_bytes)

    monkeypatch.setattr(DramSegment, "allocate_next", slow)
    with caplog.at_level(logging.INFO, "cenote.store.preparation"):
        work = Preparation(segments.dram(), no_failure, threads=1, chunk_bytes=MIB)
        assert begun.wait(30)
        stopper = threading.Thread(target=work.stop)
        stopper.start()
        wait_until(lambda: work._stopping, what="the stop")
        go_on.set()
        stopper.join(30)
        assert work.wait(30)
    assert not caplog.records
