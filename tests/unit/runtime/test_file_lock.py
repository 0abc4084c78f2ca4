"""Locks of files: one has them, who only looks keeps nobody from them."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from cenote.runtime.file_lock import is_locked, lock_exclusively


def test_one_has_it_and_others_see_that(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert not is_locked(second)
    assert lock_exclusively(first)
    assert is_locked(second)
    assert not lock_exclusively(second, patience_s=0.02)
    os.close(first)
    assert not is_locked(second)
    assert lock_exclusively(second)
    os.close(second)


def test_who_looks_for_a_moment_keeps_nobody_from_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    mine, looking = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    fcntl.flock(looking, fcntl.LOCK_SH)
    got: list[bool] = []
    waiting = threading.Event()

    def take() -> None:
        waiting.set()
        got.append(lock_exclusively(mine, patience_s=30.0))

    thread = threading.Thread(target=take)
    thread.start()
    assert waiting.wait(30)
    fcntl.flock(looking, fcntl.LOCK_UN)
    thread.join(30)
    assert got == [True]
    os.close(mine)
    os.close(looking)
