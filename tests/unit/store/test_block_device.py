"""A real block device as an SSD: nothing on it is lost that a store daemon did not write."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cenote.api.errors import InvalidArgument, ResourceUnavailable
from cenote.store.device import open_device

MIB = 1 << 20
TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")


def run(*words: object) -> str:
    return subprocess.run(
        list(map(str, words)), check=True, capture_output=True, text=True, timeout=30
    ).stdout.strip()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        pytest.skip(f"needs root and {', '.join(TOOLS)}")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    try:
        path = run("losetup", "-f", "--show", image)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device can be made: {error.stderr}")
    yield Path(path)
    run("losetup", "-d", path)


def test_a_file_system_is_not_written_over(device: Path, tmp_path: Path) -> None:
    opened = open_device(device, 0)
    assert opened.size_bytes == 64 * MIB
    with pytest.raises(ResourceUnavailable, match="in use"):
        open_device(device, 0)
    opened.close()
    run("mkfs.ext4", "-q", device)
    with pytest.raises(InvalidArgument, match="no store daemon wrote"):
        open_device(device, 0)
    place = tmp_path / "mounted"
    place.mkdir()
    try:
        run("mount", device, place)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"nothing can be mounted: {error.stderr}")
    try:
        with pytest.raises(ResourceUnavailable, match="mounted"):
            open_device(device, 0)
    finally:
        run("umount", place)
    # As the error says.
    run("dd", "if=/dev/zero", f"of={device}", "bs=1M", "count=1", "status=none")
    open_device(device, 0).close()
