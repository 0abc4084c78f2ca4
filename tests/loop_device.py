"""A block device of 64 MiB, made of a file; it takes root, and loop devices."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["MIB", "device", "run"]

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
