"""What the processes of a soak take of the machine, over time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from processes import ETCD_DIRECTORY, Party, Pool

__all__ = ["FIELDS", "Sample", "Watch", "level"]

FIELDS = ("private_mib", "shared_mib", "fds", "threads")
MIB = 1 << 20


class Sample(NamedTuple):
    """Of one process at one time."""

    at_s: float
    name: str
    life: int
    private_mib: float
    """Resident memory of its own."""
    shared_mib: float
    """Resident memory of files and of shared memory: the pool's own bytes, mostly."""
    fds: int
    threads: int


class Watch:
    """Samples of all processes, and sizes of the directories."""

    def __init__(self, pool: Pool, began_s: float, every_s: float) -> None:
        self._pool = pool
        self._began_s = began_s
        self._every_s = every_s
        self._next_s = began_s
        self.samples: list[Sample] = []
        self.sizes: list[tuple[float, float, float, float]] = []
        """(when, MiB of object memory, of metadata and logs, of etcd's largest database)."""

    def step(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        at_s = now_s - self._began_s
        for party in self._pool.parties:
            sample = _sample(at_s, party)
            if sample is not None:
                self.samples.append(sample)
        etcd = self._pool.directory / ETCD_DIRECTORY
        self.sizes.append(
            (
                at_s,
                _used(self._pool.memory),
                _used(self._pool.directory) - _used(etcd),
                max((_used(one / "member" / "snap") for one in etcd.glob("m*")), default=0.0),
            )
        )

    def of(self, role: str) -> dict[tuple[str, int], list[Sample]]:
        """Samples by process, a process being a name and the number of its life."""
        names = {party.name for party in self._pool.of(role)}
        found: dict[tuple[str, int], list[Sample]] = {}
        for sample in self.samples:
            if sample.name in names:
                found.setdefault((sample.name, sample.life), []).append(sample)
        return found


def level(samples: list[Sample], field: str, from_s: float, to_s: float) -> float:
    """The median over all processes and samples of a time; NaN where there are none."""
    values = [getattr(s, field) for s in samples if from_s <= s.at_s <= to_s]
    return float(np.median(values)) if values else float("nan")


def _sample(at_s: float, party: Party) -> Sample | None:
    """None where it is not there just now."""
    process = Path(f"/proc/{party.daemon.pid}")
    try:
        lines = (process / "status").read_text().splitlines()
        fds = len(os.listdir(process / "fd"))
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    if "RssAnon" not in fields:  # a zombie
        return None
    kib = {k: int(fields[k].split()[0]) for k in ("RssAnon", "RssFile", "RssShmem")}
    return Sample(
        at_s,
        party.name,
        party.lives,
        kib["RssAnon"] / 1024,
        (kib["RssFile"] + kib["RssShmem"]) / 1024,
        fds,
        int(fields["Threads"]),
    )


def _used(directory: Path) -> float:
    """MiB that the files of a directory take."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except OSError:  # it is gone already
            continue
    return total / MIB
