"""Snapshots made beside a working master: whatever dies when, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from cenote.api.errors import CenoteError, ResourceUnavailable
from cenote.master import compaction
from cenote.master.compaction import CompactionLimits
from cenote.master.compactor import compact
from cenote.master.file_backend import FileBackend
from cenote.master.journal_files import list_directory
from cenote.master.metadata import begin
from cenote.v1 import master_pb2 as pb
from master_pool import MIB, MasterPool
from waiting import wait_until

ROTATE_BYTES = 20_000
NEVER = CompactionLimits(journal_bytes_min=1 << 40, journal_files_max=1 << 20)
EAGER = CompactionLimits(journal_bytes_min=3 * ROTATE_BYTES, retry_s=0.01)
TIMEOUT_S = 30.0


class Crash(Exception):
    """Stands for the process's end at one step."""


def churn(pool: MasterPool, rounds: int, *, first: int = 0) -> dict[bytes, int]:
    """Puts and removes; what `exists` has to say of every key afterwards."""
    present: dict[bytes, int] = {}
    for i in range(first, first + rounds):
        keys = [b"key-%d-%d" % (i, n) for n in range(20)]
        pool.put(*keys)
        pool.remove(*keys[:5])
        present |= {key: int(n >= 5) for n, key in enumerate(keys)}
    return present


def check(directory: Path, present: dict[bytes, int]) -> None:
    """A master that starts on a copy of the directory knows just that."""
    copy = directory.with_name(directory.name + "-copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy)
    pool = MasterPool(FileBackend(copy, compaction=NEVER), bare=True)
    try:
        pool.hello()
        pool.namespace = pool.service.open_namespace(
            pb.OpenNamespaceRequest(name="models", fingerprint=b"f"), 1.0
        )
        keys = list(present)
        found: list[int] = []
        for a in range(0, len(keys), 1000):
            found += pool.exists(*keys[a : a + 1000])
        wrong = [key for key, there in zip(keys, found, strict=True) if there != present[key]]
        assert not wrong
    finally:
        pool.service.close()


def written(directory: Path, rounds: int = 60) -> tuple[dict[bytes, int], int]:
    """A closed directory with several journal files; what is in it, and the last closed entry."""
    backend = FileBackend(directory, rotate_bytes=ROTATE_BYTES, compaction=NEVER)
    pool = MasterPool(backend, size_bytes=64 * MIB)
    with contextlib.closing(pool.service):
        present = churn(pool, rounds)
    journals = list_directory(directory).journals
    assert len(journals) > 4
    return present, journals[-1].first - 1


@contextlib.contextmanager
def opened(directory: Path, limits: CompactionLimits) -> Iterator[FileBackend]:
    """A backend at work; whatever happens, it leaves no thread and no process behind."""
    with contextlib.closing(
        FileBackend(directory, rotate_bytes=ROTATE_BYTES, compaction=limits)
    ) as backend:
        list(begin(backend).records)
        yield backend


STEPS = ["read", "write", "written", "rename", "done"]


@pytest.mark.parametrize("crash_at", STEPS)
def test_a_compactor_that_dies_at_any_step_loses_nothing(tmp_path: Path, crash_at: str) -> None:
    directory = tmp_path / "journal"
    present, through = written(directory)

    def on_step(step: str) -> None:
        if step == crash_at:
            raise Crash(step)

    with pytest.raises(Crash):
        compact(directory, through, on_step=on_step)
    assert (list_directory(directory).snapshot is not None) == (crash_at == "done")
    check(directory, present)
    if crash_at != "done":
        compact(directory, through)
    check(directory, present)


@pytest.mark.parametrize("rounds", [60, 90])
def test_snapshots_follow_upon_snapshots(tmp_path: Path, rounds: int) -> None:
    directory = tmp_path / "journal"
    present, through = written(directory, rounds)
    middle = list_directory(directory).journals[2].first - 1
    compact(directory, middle)
    check(directory, present)
    compact(directory, through)
    check(directory, present)
    size_bytes = sum(file.size_bytes for file in list_directory(directory).journals)
    with opened(directory, NEVER) as backend:
        assert backend.bytes_used < size_bytes
        assert len(list_directory(directory).journals) == 1
        assert len(list_directory(directory).snapshots) == 1


def test_a_damaged_journal_gives_no_snapshot(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    _, through = written(directory)
    path = list_directory(directory).journals[1].path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CenoteError, match="damaged"):
        compact(directory, through)
    assert list_directory(directory).snapshot is None
    assert not list_directory(directory).temporary


def test_only_whole_files_are_compacted(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    _, through = written(directory)
    with pytest.raises(CenoteError, match="not the last one of a closed journal file"):
        compact(directory, through - 1)
    compact(directory, through)
    with pytest.raises(ResourceUnavailable, match="already"):
        compact(directory, through)


def test_one_compactor_at_a_time(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    _, through = written(directory)

    def second(step: str) -> None:
        if step == "read":
            with pytest.raises(ResourceUnavailable, match="another compactor"):
                compact(directory, through)

    compact(directory, through, on_step=second)


@pytest.mark.integration
def test_the_program_says_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cenote.master.compactor", str(tmp_path), "--through", "5"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 3
    assert "JournalCorrupt: entry 5 is not" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.integration
def test_a_working_master_compacts_and_its_compactor_may_be_killed(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    backend = FileBackend(directory, rotate_bytes=ROTATE_BYTES, compaction=EAGER)
    pool = MasterPool(backend, size_bytes=64 * MIB)
    with contextlib.closing(pool.service):
        present = killed_once(pool, backend, directory)
    check(directory, present)


def killed_once(pool: MasterPool, backend: FileBackend, directory: Path) -> dict[bytes, int]:
    """Puts and removes until one compactor was killed and another one wrote a snapshot."""
    present: dict[bytes, int] = {}
    killed, rounds = set[int](), 0
    for _ in range(1000):
        present |= churn(pool, 5, first=rounds)
        rounds += 5
        pid = backend.compactor_pid
        if pid is not None and not killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        if killed and list_directory(directory).snapshot is not None:
            break
    wait_until(lambda: list_directory(directory).snapshot is not None, TIMEOUT_S, what="a snapshot")
    assert killed
    wait_until(
        lambda: not list_directory(directory).covered(), TIMEOUT_S, what="covered files to go"
    )
    check(directory, present)
    return present


@pytest.mark.integration
def test_a_master_that_ends_takes_its_compactor_along(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    present, _ = written(directory)
    limits = CompactionLimits(journal_bytes_min=1)
    with opened(directory, limits) as backend:
        pid = wait_until(lambda: backend.compactor_pid, TIMEOUT_S, what="a compactor") or 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    check(directory, present)


def other_pids(backend: FileBackend, known: frozenset[int]) -> set[int]:
    """The compactor's, where it is not one of these."""
    return {backend.compactor_pid or 0} - known


@pytest.mark.integration
def test_a_compactor_that_takes_too_long_is_ended_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that never ends: how fast a real one is must not matter here."""
    directory = tmp_path / "journal"
    present, _ = written(directory)
    endless = tmp_path / "endless"
    endless.write_text("#!/bin/sh\nexec sleep 1000\n")
    endless.chmod(0o700)
    interpreter = SimpleNamespace(executable=str(endless))
    monkeypatch.setattr(compaction, "sys", interpreter)
    limits = CompactionLimits(journal_bytes_min=1, timeout_s=0.1, retry_s=0.01)
    with opened(directory, limits) as backend:
        seen = {0}
        while len(seen) < 4:
            number = f"attempt {len(seen)}"
            old = frozenset(seen)
            seen |= wait_until(partial(other_pids, backend, old), TIMEOUT_S, what=number)
            for ended in old - {0}:
                with pytest.raises(ProcessLookupError):
                    os.kill(ended, 0)
        assert list_directory(directory).snapshot is None
        interpreter.executable = sys.executable
        monkeypatch.setattr(backend._compaction, "_limits", replace(limits, timeout_s=600.0))
        wait_until(lambda: list_directory(directory).snapshot, TIMEOUT_S, what="a snapshot")
    check(directory, present)
