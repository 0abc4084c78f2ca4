"""Files as SSDs: what is warned of, and what a lock does."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import pytest

from cenote.api.errors import ResourceUnavailable
from cenote.runtime.storage import is_memory
from cenote.store.device import contents_of, open_device, wipe_command

MIB = 1 << 20
SHM = Path("/dev/shm")


def test_an_ssd_in_memory_is_warned_of_and_works(caplog: pytest.LogCaptureFixture) -> None:
    if not SHM.is_dir() or not is_memory(SHM):
        pytest.skip("/dev/shm is no tmpfs here")
    with (
        tempfile.TemporaryDirectory(dir=SHM) as directory,
        caplog.at_level(logging.WARNING),
    ):
        opened = open_device(Path(directory) / "ssd", MIB)
        assert opened.size_bytes == MIB
        opened.close()
    (record,) = (r for r in caplog.records if r.name == "cenote.store.device")
    assert "--ssd is in memory" in record.getMessage()
    assert record.__dict__["cenote_fields"]["path"] == f"{directory}/ssd"


def test_an_ssd_on_a_disk_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if is_memory(tmp_path):
        pytest.skip(f"{tmp_path} is in memory")
    with caplog.at_level(logging.WARNING):
        open_device(tmp_path / "ssd", MIB).close()
    assert "in memory" not in caplog.text


def test_a_second_one_is_refused(tmp_path: Path) -> None:
    opened = open_device(tmp_path / "ssd", MIB)
    with pytest.raises(ResourceUnavailable, match="another process has"):
        open_device(tmp_path / "ssd", MIB)
    opened.close()
    open_device(tmp_path / "ssd", MIB).close()


def test_what_a_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    found = []
    for data in (b"", bytes(1 << 12), bytes(300 << 10) + b"far behind", b"x", bytes(4095) + b"x"):
        path.write_bytes(data)
        fd = os.open(path, os.O_RDONLY)
        found.append(contents_of(fd))
        os.close(fd)
    assert found == ["none", "none", "none", "other", "other"]
    assert wipe_command(path) == f"rm {path}"
