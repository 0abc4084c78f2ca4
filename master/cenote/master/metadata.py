"""What keeps the journal: the border between the master and its metadata backends.

A backend starts an epoch, gives back what was appended before, and takes more. It knows records
(`journal.py`), not what they say. Backends: `memory:` (nothing outlives the process), `file:DIR`
(one master, no other service). tests/contract/test_metadata_contract.py holds them to this page.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cenote.api.errors import CenoteError, ConfigError

from .journal import Record

__all__ = ["MetadataBackend", "Opened", "open_backend"]


@dataclass(frozen=True, slots=True)
class Opened:
    """An epoch that has begun."""

    epoch: int
    """Larger than every earlier one, and durable before anybody learns it."""
    records: Iterator[Record]
    """Verified records: those of the newest snapshot, then the journal's, in order. To be read to
    the end before the first `append`. Raises JournalCorrupt where promised ones are missing."""


class MetadataBackend(Protocol):
    """Keeper of the journal. One thread calls it, but for `sync`'s futures, which end in any."""

    @property
    def name(self) -> str:
        """As in the configuration, such as `file:/var/lib/cenote`."""
        ...

    def open(self) -> Opened:
        """Take exclusive hold and start an epoch.

        Raises ResourceUnavailable (in use, no such device, no permission) and JournalCorrupt.
        """
        ...

    @property
    def last_entry(self) -> int:
        """Number of the newest entry, appended or read; 0 where there is none."""
        ...

    def append(self, records: Sequence[bytes]) -> int:
        """Add records, all or none, numbered from `last_entry` + 1; returns their last entry.

        When it returns, `file:` has handed them to the operating system: they survive the process,
        not yet a power failure. It does not wait for a disk or a network. Raises
        ResourceUnavailable where they can't be stored; the same records may be appended later.
        """
        ...

    @property
    def durable_entry(self) -> int:
        """The newest entry that is known to survive a power failure."""
        ...

    def sync(self, entry: int) -> Future[None]:
        """Done when everything up to `entry` survives a power failure; several share one wait.

        The future fails with ResourceUnavailable where that can't be had.
        """
        ...

    @property
    def refusal(self) -> CenoteError | None:
        """Why nothing new should be decided now (full disk, failed device), or None.

        Some room is kept for what must be written nevertheless.
        """
        ...

    def install_snapshot(self, records: Iterable[bytes], covers: int) -> None:
        """Replace the journal up to and including entry `covers` by a snapshot. Blocks: not for
        the master's loop. `covers` is the end of a record. Raises ResourceUnavailable."""
        ...

    @property
    def bytes_used(self) -> int:
        """Of journal and snapshot together."""
        ...

    def close(self) -> None:
        """Sync, then let go. Idempotent. What was appended is then durable, or it raises."""
        ...


def open_backend(url: str) -> MetadataBackend:
    """The backend that `url` names: `memory:` or `file:DIR`. Raises ConfigError."""
    from .file_backend import FileBackend
    from .memory_backend import MemoryBackend

    if url == "memory:":
        return MemoryBackend(epoch_before=int(time.time()))
    scheme, _, rest = url.partition(":")
    if scheme == "file" and rest:
        path = rest.removeprefix("//")
        if path and "\0" not in path:
            if Path(path).expanduser().is_file():
                raise ConfigError(f"what {url!r} names is a file", remedy="name a directory")
            return FileBackend(Path(path).expanduser())
    raise ConfigError(f"{url!r} names no metadata backend", remedy="write memory: or file:DIR")
