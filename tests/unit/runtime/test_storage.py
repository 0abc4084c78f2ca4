"""Which file system and which disk a path lies on, from tables as kernels write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cenote.runtime.storage import (
    block_device_of,
    is_memory,
    mount_of,
    read_block_device,
    read_mounts,
)

TABLE = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
24 22 0:21 / /dev rw,nosuid shared:2 - devtmpfs udev rw,size=24G
25 24 0:22 / /dev/shm rw,nosuid shared:3 - tmpfs tmpfs rw
30 22 0:30 / /mnt/with\040space rw shared:9 - nfs4 10.0.0.1:/x rw
31 22 0:31 / /data rw - xfs /dev/md0 rw
32 31 0:32 / /data rw - overlay overlay rw,lowerdir=/a
torn
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    return path


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [
        ("/var/none/at/all", "/", "ext4"),
        ("/dev/shm/x", "/dev/shm", "tmpfs"),
        ("/dev/shmx", "/dev", "devtmpfs"),
        ("/mnt/with space/ssd", "/mnt/with space", "nfs4"),
        ("/data/ssd", "/data", "overlay"),
    ],
)
def test_the_mount_of_a_path(table: Path, path: str, point: str, kind: str) -> None:
    mount = mount_of(Path(path), table)
    assert mount is not None
    assert (mount.point, mount.kind) == (point, kind)


def test_a_host_that_tells_nothing(tmp_path: Path) -> None:
    assert read_mounts(tmp_path / "none") == []
    assert mount_of(Path("/x"), tmp_path / "none") is None
    assert read_block_device(os.makedev(1, 2), tmp_path) is None


def test_a_disk_and_a_part_of_it(tmp_path: Path) -> None:
    disk = tmp_path / "devices" / "pci0" / "sda"
    part = disk / "sda1"
    for path in (disk / "queue", disk / "holders", part / "holders" / "dm-0"):
        path.mkdir(parents=True)
    (disk / "queue" / "rotational").write_text("1\n")
    (disk / "queue" / "scheduler").write_text("none mq-deadline [bfq]\n")
    (part / "partition").write_text("1\n")
    links = tmp_path / "dev" / "block"
    links.mkdir(parents=True)
    (links / "8:0").symlink_to(disk)
    (links / "8:1").symlink_to(part)
    whole = read_block_device(os.makedev(8, 0), tmp_path)
    half = read_block_device(os.makedev(8, 1), tmp_path)
    assert whole is not None
    assert half is not None
    assert (whole.name, whole.rotational, whole.scheduler, whole.users) == ("sda", True, "bfq", ())
    assert (half.name, half.users) == ("sda", ("dm-0",))
    assert not whole.in_memory


def test_ram_disks_are_memory(tmp_path: Path) -> None:
    links = tmp_path / "dev" / "block"
    links.mkdir(parents=True)
    for number, name in enumerate(("ram0", "zram12", "nvme0n1", "pmem0")):
        (tmp_path / name).mkdir()
        (links / f"1:{number}").symlink_to(tmp_path / name)
    found = [read_block_device(os.makedev(1, number), tmp_path) for number in range(4)]
    assert [each is not None and each.in_memory for each in found] == [True, True, False, False]
    assert found[0] is not None
    assert (found[0].rotational, found[0].scheduler) == (None, "")


def test_this_host(tmp_path: Path) -> None:
    assert block_device_of(tmp_path / "none") is None
    if Path("/dev/shm").is_dir():
        mount = mount_of(Path("/dev/shm"))
        assert mount is not None
        assert is_memory(Path("/dev/shm/none")) == (mount.kind == "tmpfs")
    assert not is_memory(Path("/proc"))
