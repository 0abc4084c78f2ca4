"""Transparent huge pages: whether the kernel puts them behind files in memory (`--huge-pages`)."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cenote.runtime.mapped_file import HUGE_PAGE_BYTES, MappedFile, collapse_error
from cenote.runtime.storage import mount_of
from cenote.runtime.units import format_size

from .findings import Check, Finding, Verdict

__all__ = ["ThpFacts", "huge_page_checks", "judge_thp", "probe_thp"]

_CHECK: Final = "transparent huge pages"
_SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_TMPFS: Final = "tmpfs"
_HUGETLBFS: Final = "hugetlbfs"


@dataclass(frozen=True, slots=True)
class ThpFacts:
    """Of the directory that a store daemon's memory is taken from."""

    directory: str
    kind: str
    """Of its file system; "" where the directory is not there."""
    error: int = 0
    """What came of trying (errno): 0 where a huge page was had."""
    trouble: str = ""
    """Why nothing could be tried."""
    setting: str = ""
    """Of the system, for files in memory: advise, always, never, deny ...; "" where it has none."""


def huge_page_checks(directory: Path) -> list[Check]:
    """A file of one huge page is made there, without a name, and is gone again."""
    return [Check(_CHECK, lambda _: [judge_thp(_read_thp(directory))])]


def _read_thp(directory: Path, setting: Path = _SETTING) -> ThpFacts:
    mount = mount_of(directory) if directory.is_dir() else None
    kind = "" if mount is None else mount.kind
    chosen = setting.read_text() if setting.is_file() else ""
    chosen = chosen.partition("[")[2].partition("]")[0]
    if kind != _TMPFS:
        return ThpFacts(str(directory), kind, setting=chosen)
    try:
        error = probe_thp(directory)
    except OSError as failure:
        return ThpFacts(str(directory), kind, 0, failure.strerror or str(failure), chosen)
    return ThpFacts(str(directory), kind, error, "", chosen)


def probe_thp(directory: Path) -> int:
    """0 where a huge page can be put behind a file in `directory`, else why not (errno). Raises
    OSError where no such file can be made."""
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, HUGE_PAGE_BYTES)
        mapped = MappedFile(file.fileno(), HUGE_PAGE_BYTES)
        mapped.memory[0] = 1
        return collapse_error(mapped.address, HUGE_PAGE_BYTES)


def judge_thp(facts: ThpFacts) -> Finding:
    """Whether a store daemon's memory would lie on huge pages."""
    where = facts.directory
    if facts.kind == _HUGETLBFS:
        text = f"{where} is a hugetlbfs mount: all of it is of huge pages"
        return Finding(_CHECK, Verdict.OK, text)
    if facts.kind != _TMPFS:
        text = f"there is no directory {where}" if not facts.kind else f"{where} is {facts.kind}"
        return Finding(_CHECK, Verdict.SKIPPED, f"{text}; only a tmpfs has them")
    if facts.trouble:
        return Finding(_CHECK, Verdict.SKIPPED, f"no file can be made in {where}: {facts.trouble}")
    if not facts.error:
        size = format_size(HUGE_PAGE_BYTES)
        text = f"this kernel puts pages of {size} behind files in {where} (--huge-pages)"
        return Finding(_CHECK, Verdict.OK, text)
    costs = "SSDs and NICs look up 512 times as many pages, which costs processor time and speed"
    if facts.error in (errno.ENOMEM, errno.EAGAIN, errno.EBUSY):
        return Finding(
            _CHECK,
            Verdict.WARN,
            f"no huge page could be had for {where} ({os.strerror(facts.error)}): {costs}",
            "memory is in small pieces, or its control group full: start daemons soon after boot,"
            " sysctl vm.compact_memory=1, or reserve pages and name a hugetlbfs (--dram-dir)",
        )
    if facts.setting == "deny":
        return Finding(
            _CHECK,
            Verdict.WARN,
            f"huge pages for files in memory are denied by the system: {costs}",
            f"echo advise > {_SETTING}",
        )
    return Finding(
        _CHECK,
        Verdict.WARN,
        f"this kernel puts none behind files in {where} ({os.strerror(facts.error)}): {costs}",
        "Linux 6.1 or later with transparent huge pages, or a hugetlbfs mount (--dram-dir)",
    )
