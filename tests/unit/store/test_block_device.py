"""A real block device as an SSD: nothing on it is lost that a store daemon did not write."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cenote.api.errors import InvalidArgument, ResourceUnavailable
from cenote.store.device import open_device
from loop_device import MIB, device, run

__all__ = ["device"]


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
