"""`cenote doctor` looks at real block devices, which it does not write to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cenote.cli.doctor.findings import Finding, Verdict
from cenote.cli.doctor.ssd import ssd_checks
from cenote.store.device import open_device
from loop_device import MIB, device, run

__all__ = ["device"]


def look(path: Path, wanted_bytes: int = 0) -> dict[str, Finding]:
    (check,) = ssd_checks(path, wanted_bytes)
    return {finding.check: finding for finding in check.look(0.3)}


def test_a_device_is_looked_at_and_not_written_to(device: Path, tmp_path: Path) -> None:
    before = (tmp_path / "image").read_bytes()
    found = look(device)
    assert "block device loop" in found["ssd"].found
    assert found["ssd use"].verdict is Verdict.OK
    assert "64 MiB of it" in found["ssd room"].found
    assert look(device, 65 * MIB)["ssd room"].verdict is Verdict.FAIL
    if found["ssd direct I/O"].verdict is Verdict.OK:
        assert "not tried on a block device" in found["ssd speed"].found
    assert (tmp_path / "image").read_bytes() == before

    opened = open_device(device, 0)
    try:
        in_use = look(device)
    finally:
        opened.close()
    assert f"pid {os.getpid()}" in in_use["ssd use"].found
    assert in_use["ssd speed"].verdict is Verdict.SKIPPED

    run("mkfs.ext4", "-q", device)
    assert look(device)["ssd use"].verdict is Verdict.FAIL
    place = tmp_path / "mounted"
    place.mkdir()
    try:
        run("mount", device, place)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"nothing can be mounted: {error.stderr}")
    try:
        mounted = look(device)["ssd use"]
    finally:
        run("umount", place)
    assert mounted.verdict is Verdict.FAIL
    assert str(place) in mounted.found
    assert f"umount {place}" in mounted.remedy
