"""Snapshots that somebody asks for, whether they are due or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from cenote.api.errors import InvalidArgument
from cenote.master.compaction import Compaction, CompactionLimits
from cenote.master.kv_compaction import CompactorCommand, KvCompaction, KvCompactionLimits
from cenote.master.memory_backend import MemoryBackend
from cenote.runtime.clock import ManualClock


def test_a_leader_with_standbys_makes_one_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    compaction = KvCompaction(CompactorCommand("", ""), KvCompactionLimits(), ManualClock())
    started: list[bool] = []

    def start() -> None:
        started.append(True)
        compaction._asked = False

    monkeypatch.setattr(compaction, "_start", start)
    few = {"journal_bytes": 10, "journal_values": 1, "snapshot_bytes": 0, "has_standby": True}
    compaction.step(**few)  # type: ignore[arg-type]
    assert not started
    compaction.ask()
    compaction.step(**few)  # type: ignore[arg-type]
    compaction.step(**few)  # type: ignore[arg-type]
    assert started == [True]


def test_a_journal_of_files_is_compacted_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compaction = Compaction(tmp_path, CompactionLimits())
    started: list[bool] = []
    monkeypatch.setattr(compaction, "_start", lambda: started.append(True))
    compaction.rotated(None)
    compaction.ask()
    assert not compaction.step(), "no file is closed: there is nothing to do yet"
    compaction.rotated(100)
    assert compaction.step()
    assert started == [True]


def test_metadata_that_are_not_kept_have_no_snapshot() -> None:
    with pytest.raises(InvalidArgument, match="memory"):
        MemoryBackend().request_snapshot()
