"""The daemon's side of writers' claims: who is told of, and for how long."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cenote.api.errors import ResourceUnavailable
from cenote.api.rows import CLAIM
from cenote.store import claims as claims_module
from cenote.store.claims import (
    Claim,
    ClaimFile,
    ClaimTable,
    claim_rows,
    membarrier,
    open_claims,
    survived,
)
from cenote.transport.claims import CLAIM_PAGE_BYTES, EVERYWHERE, ClaimPage
from cenote.transport.mapping import Mapping

ONE, OTHER = b"1" * 16, b"2" * 16


class Held:
    """Pages in this process's memory, and which of them somebody has."""

    def __init__(self, pages: int = 4) -> None:
        self.memory = memoryview(bytearray(pages * CLAIM_PAGE_BYTES))
        self.pages: set[int] = set()
        self.barriers = 0
        self.table = ClaimTable(self.memory, self.pages.__contains__, barrier=self._barrier)

    def _barrier(self) -> None:
        self.barriers += 1

    def open(self, session_id: bytes) -> tuple[int, ClaimPage]:
        page = self.table.take_page(session_id, self.pages.add)
        return page, self.page(page)

    def page(self, page: int) -> ClaimPage:
        return ClaimPage(self.memory[page * CLAIM_PAGE_BYTES : (page + 1) * CLAIM_PAGE_BYTES])


def test_what_is_under_way_when_grants_become_void_is_told_until_it_is_over() -> None:
    held = Held()
    _, one = held.open(ONE)
    _, other = held.open(OTHER)
    pen = one.claim_one(7, 0, 640, 64, 0.0)
    done = other.claim_one(7, 1, 0, 64, 0.0)
    other.withdraw(done)
    assert held.table.older() == []
    held.table.shut(8)
    assert held.barriers == 2
    (claim,) = held.table.older()
    assert (claim.session_id, claim.ranges) == (ONE, ((0, 640, 64),))
    assert one.claim_one(7, 0, 0, 1, 0.0) == other.claim_one(7, 0, 0, 1, 0.0) == -1
    held.table.admit(8)
    later = other.claim_one(8, 1, 0, 64, 0.0)
    assert held.table.older() == [claim], "a valid claim is nobody's business"
    assert held.barriers == 2
    one.withdraw(pen)
    assert held.table.older() == []
    assert held.barriers == 3, "its last stores have arrived"
    other.withdraw(later)


def test_views_are_told_too_and_told_apart() -> None:
    held = Held()
    _, page = held.open(ONE)
    write = page.claim_one(7 << 40, 0, 640, 64, 0.0)
    view = page.claim_view(7 << 40, np.array([(1, 0, 64), (2, 64, 64)], np.uint64))
    held.table.shut(8 << 40)
    assert [(c.is_view, c.ranges) for c in held.table.older()] == [
        (False, ((0, 640, 64),)),
        (True, ((1, 0, 64), (2, 64, 64))),
    ]
    rows = np.frombuffer(claim_rows(held.table.older(), {0: 1024, 1: 1024, 2: 96}), CLAIM)
    assert rows["is_view"].tolist() == [0, 1, 1]
    assert rows["length"].tolist() == [64, 64, 32]
    page.withdraw(write)
    assert [c.pen for c in held.table.older()] == [view]
    page.withdraw_view(view)
    assert held.table.older() == []


def test_the_same_pen_in_use_again_is_not_the_old_claim() -> None:
    held = Held()
    _, page = held.open(ONE)
    pen = page.claim_one(7, 0, 640, 64, 0.0)
    held.table.shut(8)
    page.withdraw(pen)
    assert page.claim_one(8, 0, 640, 64, 0.0) == pen
    assert held.table.older() == []


def test_what_a_dead_process_claimed_does_not_count() -> None:
    held = Held()
    number, page = held.open(ONE)
    page.claim_one(7, 0, 640, 64, 0.0)
    held.table.shut(8)
    held.pages.remove(number)
    assert held.table.older() == []
    held.table.shut(9)
    assert held.table.older() == []
    assert held.open(OTHER)[0] == number
    assert held.table.older() == []


def test_a_page_that_is_given_late_is_shut_as_well() -> None:
    held = Held()
    held.table.shut(8)
    _, page = held.open(ONE)
    assert page.claim_one(7, 0, 0, 1, 0.0) == -1
    assert page.claim_one(8, 0, 0, 1, 0.0) >= 0


def test_pages_are_bounded() -> None:
    held = Held(pages=2)
    held.open(ONE)
    held.open(ONE)
    with pytest.raises(ResourceUnavailable, match="2 channels write over shared memory"):
        held.open(ONE)


def mapped(file: ClaimFile, session_id: bytes) -> ClaimPage:
    fd, offset = file.open_page(session_id)
    mapping = Mapping(fd, CLAIM_PAGE_BYTES, CLAIM_PAGE_BYTES, b"", writable=True, offset=offset)
    os.close(fd)
    return ClaimPage(mapping.memory, mapping)


def test_the_file_outlives_its_daemon(tmp_path: Path) -> None:
    path = tmp_path / "n.claims"
    assert not survived(path)
    first = open_claims(path)
    assert survived(path)
    pages = [mapped(first, bytes([i]) * 16) for i in range(20)]  # more than fit at first
    assert pages[19].claim_one(7, 0, 64, 10, 0.0) >= 0
    first.close()
    again = open_claims(path)
    again.table.shut(1 << 60)
    (claim,) = again.table.older()
    assert (claim.session_id, claim.ranges) == (bytes([19]) * 16, ((0, 64, 10),))
    assert pages[3].claim_one(7, 0, 0, 1, 0.0) == -1
    del pages[19]  # with its mapping
    assert again.table.older() == []
    fd, offset = again.open_page(ONE)
    assert offset == 4096 + 19 * CLAIM_PAGE_BYTES
    os.close(fd)
    again.close()
    path.write_bytes(b"something else")
    assert not survived(path)


def test_a_page_that_cannot_be_marked_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_claims(tmp_path / "n.claims")

    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("cenote.store.claims.os.open", fail)
    with pytest.raises(ResourceUnavailable, match="ulimit"):
        file.open_page(ONE)
    monkeypatch.undo()
    fd, offset = file.open_page(ONE)
    assert offset == 4096
    os.close(fd)
    file.close()


def test_claims_are_told_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = [
        Claim(0, 0, 1, ONE, ((0, 64, 10), (1, 90, 100), (7, 0, 1))),
        Claim(0, 1, 1, ONE, ((0, 640, 10),)),
        Claim(1, 0, 1, OTHER, ((EVERYWHERE, 0, 0),)),
    ]
    sizes = {0: 1000, 1: 100}

    def told() -> list[tuple[bytes, int, int, int]]:
        rows = np.frombuffer(claim_rows(claims, sizes), CLAIM)
        return [(row[0].tobytes(), *row.tolist()[1:2], *row.tolist()[3:]) for row in rows]

    rest = [(OTHER, 0, 0, 1000), (OTHER, 1, 0, 100)]
    assert told() == [(ONE, 0, 64, 10), (ONE, 1, 90, 10), (ONE, 0, 640, 10), *rest]
    monkeypatch.setattr(claims_module, "CLAIM_ROWS_MAX", 4)
    assert told() == [(ONE, 0, 64, 586), (ONE, 1, 90, 10), *rest]
    assert claim_rows([], sizes) == b""


def test_the_barrier_returns() -> None:
    membarrier()
