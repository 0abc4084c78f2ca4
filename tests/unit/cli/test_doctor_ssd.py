"""What `cenote doctor` makes of an SSD, and of huge pages; and that it leaves all as it was."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from cenote.cli.doctor import ssd as ssd_module
from cenote.cli.doctor.findings import Finding, Verdict
from cenote.cli.doctor.huge import ThpFacts, huge_page_checks, judge_thp
from cenote.cli.doctor.ssd import (
    SsdFacts,
    judge_device,
    judge_direct,
    judge_place,
    judge_room,
    judge_use,
    read_ssd,
    ssd_checks,
)
from cenote.cli.doctor.ssd_speed import SsdSpeed, judge_speed, measure
from cenote.runtime.storage import BlockDevice, Mount, is_memory
from cenote.store.device import open_device

GIB, MIB = 1 << 30, 1 << 20
OK, WARN, FAIL, SKIPPED = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIPPED
SHM = Path("/dev/shm")
FILE = SsdFacts(
    "/data/ssd",
    mount=Mount("/data", "ext4", "/dev/nvme0n1p1"),
    device=BlockDevice("nvme0n1", False, "none"),
    direct=True,
    memory_align=512,
    free_bytes=100 * GIB,
    wipe="rm /data/ssd",
)
BLOCK = SsdFacts(
    "/dev/nvme1n1",
    is_block=True,
    exists=True,
    device=BlockDevice("nvme1n1", False, "none"),
    direct=True,
    memory_align=512,
    size_bytes=1000 * GIB,
    wipe="dd ...",
)
FAST = SsdSpeed(read=3e9, page_read_s=80e-6, write=2e9, flush_s=50e-6)


def assert_says(finding: Finding, verdict: Verdict, *parts: str) -> None:
    assert finding.verdict is verdict, finding
    for part in parts:
        assert part in f"{finding.found} {finding.remedy}", finding
    if verdict in (WARN, FAIL):
        assert finding.remedy, finding


# ---- where it lies -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "verdict", "parts"),
    [
        ("ext4", OK, ["a file on ext4 (/dev/nvme0n1p1, at /data)", "not there yet"]),
        ("tmpfs", WARN, ["in memory (tmpfs)", "lost with a reboot", "a file on a disk"]),
        ("ramfs", WARN, ["in memory (ramfs)"]),
        ("overlay", WARN, ["container", "volume"]),
        ("nfs4", WARN, ["network"]),
        ("fuse.sshfs", WARN, ["network"]),
        ("btrfs", WARN, ["chattr +C"]),
    ],
)
def test_file_systems(kind: str, verdict: Verdict, parts: list[str]) -> None:
    facts = replace(FILE, mount=Mount("/data", kind, "/dev/nvme0n1p1"))
    assert_says(judge_place(facts), verdict, *parts)


def test_devices_and_what_is_not_there() -> None:
    assert_says(judge_place(BLOCK), OK, "block device nvme1n1, 1000 GiB")
    ram = replace(BLOCK, device=BlockDevice("ram0", None, ""))
    assert_says(judge_place(ram), WARN, "RAM disk", "lost with a reboot")
    assert_says(judge_place(SsdFacts("x", "there is no directory /x")), FAIL, "/x", "--ssd")
    assert_says(judge_place(replace(FILE, mount=None)), OK, "unknown file system")


def test_who_has_it() -> None:
    assert_says(judge_use(FILE), OK, "nobody")
    assert_says(judge_use(replace(FILE, contents="ours")), OK, "what a store daemon left")
    assert_says(judge_use(replace(FILE, contents="other")), FAIL, "write over", "rm /data/ssd")
    assert_says(judge_use(replace(FILE, holder="cenote-store, pid 7")), OK, "pid 7")
    assert_says(judge_use(replace(FILE, holder="postgres, pid 7")), FAIL, "postgres, pid 7")
    assert_says(judge_use(replace(BLOCK, mounted_at="/home")), FAIL, "/home", "umount /home")
    assert_says(judge_use(replace(BLOCK, is_busy=True)), FAIL, "in use", "lsblk /dev/nvme1n1")
    part = replace(BLOCK, device=BlockDevice("nvme1n1", False, "none", ("md0",)))
    assert_says(judge_use(part), FAIL, "md0", "--ssd /dev/md0")
    # A file on a disk that is a part of something is nobody's concern.
    raid = replace(FILE, device=BlockDevice("nvme0n1", False, "none", ("md0",)))
    assert_says(judge_use(raid), OK)


def test_room() -> None:
    assert_says(judge_room(FILE, 60 * GIB), OK, "60 GiB can be had, 40 GiB are left")
    assert_says(judge_room(FILE, 101 * GIB), FAIL, "less than 101 GiB", "--ssd-size")
    kept = replace(FILE, had_bytes=50 * GIB)
    assert_says(judge_room(kept, 101 * GIB), OK, "101 GiB can be had, 49 GiB are left")
    assert_says(judge_room(FILE, 0), SKIPPED, "100 GiB are free", "--ssd-size")
    assert_says(judge_room(replace(kept, holder="cenote-store, pid 7"), 0), OK, "has 50 GiB")
    assert_says(judge_room(BLOCK, 0), OK, "1000 GiB of it would be used")
    assert_says(judge_room(BLOCK, 10 * GIB), OK, "10 GiB of it")
    assert_says(judge_room(BLOCK, 1001 * GIB), FAIL, "less than 1001 GiB")


def test_direct_io() -> None:
    assert_says(judge_direct(FILE), OK, "multiples of 512 bytes")
    assert_says(judge_direct(replace(FILE, memory_align=4096)), OK, "4096", "copied on their way")
    assert_says(judge_direct(replace(FILE, direct=False)), WARN, "page cache", "ext4 or xfs")


def test_the_disk_below() -> None:
    assert_says(judge_device(FILE, FAST), OK, "nvme0n1, scheduler none")
    assert_says(judge_device(replace(FILE, device=None), None), SKIPPED, "no disk below")
    spins = replace(FILE, device=BlockDevice("sda", True, "mq-deadline"))
    assert_says(judge_device(spins, None), SKIPPED, "spins", "not measured", "/data/try")
    slow = replace(FAST, page_read_s=0.008)
    assert_says(judge_device(spins, slow), WARN, "spins", "an SSD")
    assert_says(judge_device(spins, FAST), OK, "virtual disks")
    bfq = replace(FILE, device=BlockDevice("sda", False, "bfq"))
    assert_says(judge_device(bfq, FAST), WARN, "bfq", "/sys/block/sda/queue/scheduler")


def test_speed() -> None:
    assert_says(judge_speed(FAST), OK, "writes 2 GB/s", "reads 3 GB/s", "1 GB/s or more", "50 µs")
    assert_says(judge_speed("not measured: x"), SKIPPED, "not measured")
    assert_says(judge_speed(replace(FAST, read=3e8)), WARN, "300 MB/s", "compute")
    assert_says(judge_speed(replace(FAST, write=1e8)), WARN, "100 MB/s", "without a copy")
    assert_says(judge_speed(replace(FAST, flush_s=0.03)), WARN, "30 ms", "power-loss")
    device = SsdSpeed(read=3e9, page_read_s=80e-6)
    assert_says(judge_speed(device), OK, "not tried on a block device")


# ---- looking -----------------------------------------------------------------------------------


def by_name(path: Path, wanted_bytes: int = MIB, node: str = "") -> dict[str, Finding]:
    (check,) = ssd_checks(path, wanted_bytes, node)
    return {finding.check: finding for finding in check.look(0.2)}


def test_nothing_is_left_behind_and_nothing_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd_module, "_TRIED_BYTES_MAX", 16 * MIB)
    found = by_name(tmp_path / "ssd")
    assert not list(tmp_path.iterdir())
    assert_says(found["ssd"], WARN if is_memory(tmp_path) else found["ssd"].verdict, "not there")
    assert_says(found["ssd use"], OK, "nobody")
    assert_says(found["ssd room"], OK)
    if found["ssd direct I/O"].verdict is OK and not is_memory(tmp_path):
        assert found["ssd speed"].verdict in (OK, WARN)
        assert "writes" in found["ssd speed"].found
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"precious")
    assert_says(by_name(theirs)["ssd use"], FAIL, "no store daemon wrote", f"rm {theirs}")
    assert theirs.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [theirs]


def test_one_that_is_in_use_is_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    opened = open_device(path, MIB)
    try:
        found = by_name(path)
        ours = by_name(path, 0, "n1")
        facts = read_ssd(path)
        blind = read_ssd(path, locks=tmp_path / "none")
    finally:
        opened.close()
    assert f"pid {os.getpid()}" in facts.holder
    assert blind.holder == "another process"
    assert_says(found["ssd speed"], SKIPPED, "not measured", f"pid {os.getpid()}")
    assert found["ssd use"].verdict in (OK, FAIL)  # whether this process counts as a daemon
    assert [name.replace("ssd n1", "ssd") for name in ours] == list(found)
    assert read_ssd(path).holder == ""


@pytest.mark.parametrize("name", ["ssd", "/none/ssd", "/dev/null", "/"])
def test_paths_that_no_daemon_could_take(name: str) -> None:
    (check,) = ssd_checks(Path(name), 0)
    (finding,) = check.look(1.0)
    assert_says(finding, FAIL, name.removesuffix("/ssd"))


def test_memory_is_told_and_not_measured() -> None:
    if not SHM.is_dir() or not is_memory(SHM):
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        found = by_name(Path(directory) / "ssd")
        assert not list(Path(directory).iterdir())
    assert_says(found["ssd"], WARN, "in memory (tmpfs)")
    assert_says(found["ssd speed"], SKIPPED, "it is memory")


def test_a_disk_that_fails_while_it_is_measured_is_told(tmp_path: Path) -> None:
    read_only = tmp_path / "file"
    read_only.write_bytes(bytes(MIB))
    with pytest.raises(OSError, match="descriptor"):
        measure(read_only, os.open(read_only, os.O_RDONLY), MIB, 0.1, may_write=True)


# ---- huge pages --------------------------------------------------------------------------------


def thp(**changes: object) -> ThpFacts:
    return replace(ThpFacts("/dev/shm", "tmpfs"), **changes)  # type: ignore[arg-type]


def test_transparent_huge_pages() -> None:
    assert_says(judge_thp(thp()), OK, "2 MiB", "--huge-pages")
    assert_says(judge_thp(thp(kind="hugetlbfs")), OK, "hugetlbfs")
    assert_says(judge_thp(thp(kind="ext4")), SKIPPED, "is ext4")
    assert_says(judge_thp(thp(kind="")), SKIPPED, "no directory")
    assert_says(judge_thp(thp(trouble="No space left")), SKIPPED, "No space left")
    assert_says(judge_thp(thp(error=errno.ENOMEM)), WARN, "no huge page could be had", "compact")
    assert_says(judge_thp(thp(error=errno.EINVAL)), WARN, "6.1", "--dram-dir")
    assert_says(judge_thp(thp(error=errno.EINVAL, setting="deny")), WARN, "denied", "advise")


def test_huge_pages_are_tried_and_nothing_is_left(tmp_path: Path) -> None:
    for directory in (SHM, tmp_path, tmp_path / "none"):
        (check,) = huge_page_checks(directory)
        (finding,) = check.look(1.0)
        assert finding.verdict in (OK, WARN, SKIPPED)
        if not is_memory(directory):
            assert_says(finding, SKIPPED)
    assert not list(tmp_path.iterdir())
