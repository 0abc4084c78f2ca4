"""The rules by which a soak judges what it reads: each kind of wrong is noticed."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak"
TTL_S = 10.0
KEY = 3


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its modules, by name."""
    monkeypatch.syspath_prepend(str(SOAK))
    yield importlib.import_module
    for name in ("ledger", "payload", "board"):
        sys.modules.pop(name, None)


@pytest.fixture
def ledger(soak: Any, tmp_path: Path) -> Any:
    return soak("ledger").Ledger(tmp_path / "ledger", 10, owner=True)


def read(soak: Any, ledger: Any, seen: int, began_s: float, *, own: bool = False) -> str:
    row = ledger.row(KEY)
    verdict: str = soak("ledger").judge_read(row, row, seen, began_s, TTL_S, own=own)
    return verdict


def test_bytes_say_whose_they_are(soak: Any) -> None:
    payload = soak("payload")
    for size in (64, 65, 1000, 4 << 20):
        data = payload.make(1, KEY, 2, size)
        assert payload.check(data, 1, KEY) == (2, "")
        assert len(data) == size
        for wrong in (data[:-1], payload.make(1, KEY + 1, 2, size), payload.make(0, KEY, 2, size)):
            assert payload.check(wrong, 1, KEY).wrong
        for at in (0, 8, size // 2, size - 1):
            flipped = data.copy()
            flipped[at] ^= 1
            assert payload.check(flipped, 1, KEY).wrong, f"a bit at {at}"
    mixed = payload.make(1, KEY, 2, 1000)
    mixed[512:] = payload.make(1, KEY, 3, 1000)[512:]
    assert payload.check(mixed, 1, KEY).wrong.startswith("version 2: ")
    assert payload.check(np.zeros(100, np.uint8), 1, KEY).wrong


def test_what_was_acknowledged_is_there(soak: Any, ledger: Any) -> None:
    assert read(soak, ledger, 0, 1.0) == "miss"
    assert ledger.will_put(KEY, 100) == 1
    assert read(soak, ledger, 0, 1.0) == "miss"
    assert read(soak, ledger, 1, 1.0) == "hit"
    ledger.was_put(KEY)
    assert read(soak, ledger, 0, 1.0) == "missed"
    ledger.was_pinned(KEY)
    assert read(soak, ledger, 0, 1.0) == "missed pinned"
    assert read(soak, ledger, 1, 1.0) == "hit"
    assert read(soak, ledger, 2, 1.0) == "from nowhere"


def test_what_was_removed_stays_away(soak: Any, ledger: Any) -> None:
    ledger.will_put(KEY, 100)
    ledger.was_put(KEY)
    ledger.will_remove(KEY)
    assert read(soak, ledger, 1, 99.0) == "hit", "nobody knows yet"
    ledger.was_removed(KEY, 100.0)
    assert read(soak, ledger, 1, 99.9) == "hit", "it began before"
    assert read(soak, ledger, 1, 105.0) == "old"
    assert read(soak, ledger, 1, 111.0) == "removed key back"
    assert read(soak, ledger, 1, 100.1, own=True) == "removed key back"
    exists = soak("ledger").judge_exists
    assert exists(ledger.row(KEY), ledger.row(KEY), True) == "removed key back"
    assert exists(ledger.row(KEY), ledger.row(KEY), False) == "miss"
    for version in range(2, 7):
        assert ledger.will_put(KEY, 100) == version
        ledger.was_put(KEY)
        assert read(soak, ledger, version, 200.0) == "hit"
        assert read(soak, ledger, version - 1, 300.0) == "removed key back"
        assert read(soak, ledger, 1, 300.0) == "removed key back"
        ledger.was_removed(KEY, 200.0)


def test_the_next_process_knows_what_nobody_can_know(soak: Any, ledger: Any) -> None:
    module = soak("ledger")
    ledger.will_put(1, 100)
    ledger.will_put(2, 100)
    ledger.was_put(2)
    ledger.will_put(3, 100)
    ledger.was_put(3)
    ledger.will_remove(3)
    ledger.after_a_crash(50.0)
    assert ledger.where(module.State.DOUBT) == [1, 3]
    assert ledger.where(module.State.PRESENT) == [2]
    assert ledger.due(50.0 + module.DOUBT_S - 1) == []
    assert ledger.due(50.0 + module.DOUBT_S + 1) == [1, 3]
    assert ledger.row(3).gone_s(1) == math.inf
    for seen in (0, 1):
        assert read(soak, ledger, seen, 60.0) in ("hit", "miss")
