"""This host: memory, limits, kernel."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cenote.api.errors import CenoteError
from cenote.runtime.memlock import REMEDY as MEMLOCK_REMEDY
from cenote.runtime.memlock import MemlockFacts, read_memlock
from cenote.runtime.memory import available_bytes
from cenote.runtime.storage import is_memory
from cenote.runtime.units import format_size
from cenote.store.claims import membarrier

from .findings import Check, Finding, Verdict
from .huge import huge_page_checks

__all__ = [
    "DramFacts",
    "HugePageFacts",
    "host_checks",
    "judge_dram",
    "judge_files",
    "judge_huge_pages",
    "judge_kernel",
    "judge_memlock",
]

DRAM_DEFAULT_BYTES: Final = 1 << 30
FILES_MIN: Final = 512
"""A daemon's 256 data connections, its listeners and segments; a client's connections."""
FILES_ENOUGH: Final = 4096
_POPULATE_SINCE: Final = (5, 14)
_HUGETLBFS: Final = "hugetlbfs"


def host_checks(dram_dir: Path, dram_bytes: int | None, has_rdma: bool) -> list[Check]:
    """All that needs no network. `dram_bytes`: what a store daemon is to give, where known."""
    return [
        Check("kernel", lambda _: judge_kernel(sys.version_info[:3], platform.release())),
        Check("memory barrier", lambda _: _look_at_membarrier()),
        Check("shared memory", lambda _: [judge_dram(_read_dram(dram_dir), dram_bytes)]),
        Check(
            "huge pages",
            lambda _: [judge_huge_pages(_read_huge_pages(dram_dir), str(dram_dir), dram_bytes)],
        ),
        *huge_page_checks(dram_dir),
        Check("locked memory", lambda _: [judge_memlock(read_memlock(), has_rdma, dram_bytes)]),
        Check("open files", lambda _: [judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE))]),
    ]


# ---- kernel ------------------------------------------------------------------------------------


def judge_kernel(python: Sequence[int], release: str) -> list[Finding]:
    """Python's version, and what this kernel lacks."""
    found = f"Linux {release}, Python {'.'.join(map(str, python))}"
    version = tuple(int(part) for part in release.split(".")[:2] if part.isdigit())
    if len(version) == 2 and version < _POPULATE_SINCE:
        return [
            Finding(
                "kernel",
                Verdict.WARN,
                f"{found}: it can't fill page tables ahead (MADV_POPULATE), so first reads and"
                " writes of a segment are slower",
                "Linux 5.14 or later",
            )
        ]
    return [Finding("kernel", Verdict.OK, found)]


def _look_at_membarrier() -> list[Finding]:
    try:
        membarrier()
    except CenoteError as error:
        return [Finding("memory barrier", Verdict.FAIL, error.message, error.remedy)]
    return [Finding("memory barrier", Verdict.OK, "the system call membarrier works")]


# ---- memory that a daemon gives ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DramFacts:
    """Of the directory that a store daemon's memory is taken from."""

    directory: str
    exists: bool
    in_memory: bool = False
    writable: bool = False
    total_bytes: int = 0
    """Of the file system; 0: no limit of its own."""
    free_bytes: int = 0
    """Of the file system."""
    available_bytes: int = 0
    """What can be had now: of file system, machine and container the least."""
    held_bytes: int = 0
    """Memory of store daemons' files, which they find again."""


def _read_dram(directory: Path) -> DramFacts:
    if not directory.is_dir():
        return DramFacts(str(directory), exists=False)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        stats = os.fstatvfs(fd)
        return DramFacts(
            str(directory),
            exists=True,
            in_memory=is_memory(directory),
            writable=os.access(directory, os.W_OK | os.X_OK),
            total_bytes=stats.f_blocks * stats.f_frsize,
            free_bytes=stats.f_bavail * stats.f_frsize,
            available_bytes=available_bytes(fd),
            held_bytes=_held_bytes(directory),
        )
    finally:
        os.close(fd)


def _held_bytes(directory: Path) -> int:
    held = 0
    for path in (*directory.glob("cenote-*.data"), *directory.glob("cenote-*.slots")):
        with contextlib.suppress(OSError):  # gone meanwhile
            held += path.stat().st_blocks * 512
    return held


def judge_dram(facts: DramFacts, wanted_bytes: int | None) -> Finding:
    """Whether a store daemon could give `wanted_bytes` from there; None: its default at least."""
    where, check = facts.directory, "shared memory"
    if not facts.exists:
        return Finding(check, Verdict.FAIL, f"there is no directory {where}", "name it: --dram-dir")
    if not facts.in_memory:
        return Finding(
            check,
            Verdict.FAIL,
            f"{where} is on a disk",
            "name a tmpfs or hugetlbfs mount: --dram-dir /dev/shm",
        )
    if not facts.writable:
        return Finding(check, Verdict.FAIL, f"{where} can't be written to", "check its owner")
    size = format_size(facts.total_bytes) if facts.total_bytes else "no limit of its own"
    found = f"{where}: {size}, {format_size(facts.available_bytes)} can be had now"
    if facts.held_bytes:
        found += f", {format_size(facts.held_bytes)} are in files of store daemons"
    need = wanted_bytes or DRAM_DEFAULT_BYTES
    if facts.available_bytes + facts.held_bytes >= need:
        return Finding(check, Verdict.OK, found)
    text = f"{found}, less than {format_size(need)}"
    text += "" if wanted_bytes else " (the default of --dram)"
    verdict = Verdict.FAIL if wanted_bytes else Verdict.WARN
    if facts.available_bytes < facts.free_bytes:
        return Finding(
            check,
            verdict,
            f"{text}: the machine or its control group has no more",
            "give less (--dram), or the container more memory",
        )
    return Finding(
        check,
        verdict,
        text,
        f"mount -o remount,size={need // (1 << 20) + 1}M {where}; in a container --shm-size, or an"
        " emptyDir with medium: Memory",
    )


@dataclass(frozen=True, slots=True)
class HugePageFacts:
    """Of the kernel's pool of pages of the default size, and where it is mounted."""

    page_bytes: int = 0
    total: int = 0
    free: int = 0
    mounts: tuple[str, ...] = ()
    held_bytes: int = 0
    """Of store daemons' files, which they find again."""


def _read_huge_pages(
    directory: Path, meminfo: Path = Path("/proc/meminfo"), mounts: Path = Path("/proc/self/mounts")
) -> HugePageFacts:
    rows = [line.split() for line in meminfo.read_text().splitlines()]
    numbers = {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) >= 2}
    fields = [line.split() for line in mounts.read_text().splitlines()]
    return HugePageFacts(
        page_bytes=1024 * numbers.get("Hugepagesize", 0),
        total=numbers.get("HugePages_Total", 0),
        free=numbers.get("HugePages_Free", 0),
        mounts=tuple(row[1] for row in fields if len(row) > 2 and row[2] == _HUGETLBFS),
        held_bytes=_held_bytes(directory),
    )


def judge_huge_pages(facts: HugePageFacts, dram_dir: str, wanted_bytes: int | None) -> Finding:
    """Whether huge pages are wanted, and there."""
    check = "huge pages"
    wanted = any(dram_dir == m or dram_dir.startswith(m.rstrip("/") + "/") for m in facts.mounts)
    found = f"{facts.free} of {facts.total} free, {format_size(facts.page_bytes)} each"
    if not facts.total:
        if wanted:
            return Finding(
                check,
                Verdict.FAIL,
                f"{dram_dir} is a hugetlbfs mount, and no page is reserved",
                "sysctl vm.nr_hugepages=N",
            )
        return Finding(check, Verdict.OK, f"none is reserved, and {dram_dir} needs none")
    if not wanted:
        where = facts.mounts[0] if facts.mounts else ""
        return Finding(
            check,
            Verdict.WARN if facts.free else Verdict.OK,
            f"{found}; the free ones lie idle, since {dram_dir} does not use them",
            f"--dram-dir {where or 'of a hugetlbfs mount'}, or give them back",
        )
    wanted_bytes = max(0, (wanted_bytes or facts.page_bytes) - facts.held_bytes)
    need = -(-wanted_bytes // max(1, facts.page_bytes))
    if facts.free < need:
        return Finding(
            check,
            Verdict.FAIL,
            f"{found}; {need} are needed",
            f"sysctl vm.nr_hugepages={facts.total - facts.free + need}, best soon after boot",
        )
    return Finding(check, Verdict.OK, found)


# ---- limits ------------------------------------------------------------------------------------


def judge_memlock(facts: MemlockFacts, has_rdma: bool, wanted_bytes: int | None) -> Finding:
    """Whether RDMA could register what it has to. Segments and clients' buffers are pinned."""
    check = "locked memory"
    if facts.exempt:
        return Finding(check, Verdict.OK, "no limit (CAP_IPC_LOCK)")
    if facts.soft_bytes is None:
        return Finding(check, Verdict.OK, "no limit")
    found = f"the limit is {format_size(facts.soft_bytes)}"
    if facts.user_namespace:
        found += " (CAP_IPC_LOCK of a user namespace does not count)"
    if not has_rdma:
        return Finding(check, Verdict.OK, f"{found}; only RDMA needs more, and there is no device")
    need = wanted_bytes or DRAM_DEFAULT_BYTES
    if facts.soft_bytes >= need:
        return Finding(check, Verdict.OK, f"{found}, for segments and buffers of each process")
    return Finding(
        check,
        Verdict.WARN,
        f"{found}, less than RDMA needs to register {format_size(need)}: bytes would go over TCP",
        MEMLOCK_REMEDY,
    )


def judge_files(soft: int, hard: int) -> Finding:
    """Open files of a process: one a connection, one or two a segment."""
    check, unlimited = "open files", resource.RLIM_INFINITY
    if soft == unlimited or soft >= FILES_ENOUGH:
        return Finding(check, Verdict.OK, "no limit" if soft == unlimited else f"up to {soft}")
    room = hard == unlimited or hard >= FILES_ENOUGH
    remedy = f"ulimit -n {FILES_ENOUGH}" + (
        "" if room else " after raising nofile in /etc/security/limits.conf, or LimitNOFILE="
    )
    if soft < FILES_MIN:
        return Finding(
            check,
            Verdict.FAIL,
            f"up to {soft}: a store daemon with its 256 data connections needs {FILES_MIN}",
            remedy,
        )
    return Finding(
        check,
        Verdict.OK if soft >= 1024 else Verdict.WARN,
        f"up to {soft}: enough for the defaults; a master serves up to 4096 connections",
        remedy,
    )
