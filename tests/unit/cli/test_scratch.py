"""Directories that leave nothing behind, also behind the dead."""

from __future__ import annotations

from pathlib import Path

import pytest

from cenote.api.errors import ResourceUnavailable
from cenote.cli.scratch import remove_abandoned, scratch_directory


def test_it_is_removed_with_everything_in_it(tmp_path: Path) -> None:
    with scratch_directory(tmp_path) as path:
        (path / "below").mkdir()
        (path / "below" / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_it_is_removed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), scratch_directory(tmp_path):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_owner_left_goes_and_what_lives_stays(tmp_path: Path) -> None:
    abandoned = tmp_path / "cenote-tmp-dead"
    abandoned.mkdir()
    (abandoned / "owner.lock").touch()
    (abandoned / "data").write_bytes(bytes(100))
    foreign = tmp_path / "cenote-tmp-unlocked-so-not-ours-to-judge"
    foreign.mkdir()
    with scratch_directory(tmp_path) as first:
        assert not abandoned.exists()
        with scratch_directory(tmp_path):
            assert first.exists()
        remove_abandoned(tmp_path)
        assert first.exists()
    assert foreign.exists()


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(ResourceUnavailable, match="can't make"), scratch_directory(tmp_path / "no"):
        pass
