"""A standby: follows the journal into a state of its own, and campaigns when nobody leads.

All of it is in one thread, which may wait for the metadata service; the master's loop meanwhile
says who leads (`front.py`). Snapshots are written here, too, where a state lies idle: the leader
never writes one. One that is under way is given up as soon as the leader's place is vacant.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

from cenote.api.errors import CenoteError
from cenote.runtime.log import get_logger

from .effects import DurableEffect, EpochStarted
from .journal import (
    FLAG_SNAPSHOT,
    Record,
    SnapshotEnd,
    parse_header,
    read_entries,
    snapshot_records,
)
from .metadata import MetadataBackend, Opened
from .state import MasterState
from .state_config import StateConfig

__all__ = ["SnapshotLimits", "Standby", "Won"]

FOLLOW_S: Final = 0.25
"""How long one wait for news lasts; a vacancy ends it earlier."""
CAMPAIGN_S: Final = 2.0
LOG_INTERVAL_S: Final = 5.0

_log = get_logger("cenote.master")


@dataclass(frozen=True, slots=True)
class SnapshotLimits:
    """When the journal is worth a snapshot: when it is so long, and this much of the snapshot."""

    journal_bytes: int = 32 << 20
    journal_share: float = 1.0
    interval_s: float = 10.0
    """Between two tries."""


@dataclass(frozen=True, slots=True)
class Won:
    """This master leads: the epoch that began, and what was followed before, for `Decider.load`."""

    opened: Opened
    followed: MasterState


class _GivenUp(Exception):
    """A snapshot was, for there is something better to do."""


@final
class Standby:
    """`run` once, in a thread; `stop` from any."""

    def __init__(
        self, backend: MetadataBackend, config: StateConfig, limits: SnapshotLimits | None = None
    ) -> None:
        self.backend = backend
        self._config = config
        self._limits = limits or SnapshotLimits()
        self._stopping = threading.Event()
        self._state = MasterState(config, epoch=0)
        self._epoch = 0
        self._journal_bytes = 0
        """Of records since the last snapshot."""
        self._snapshot_bytes = 0
        self._snapshot_at_s = 0.0
        self._logged_s = -LOG_INTERVAL_S
        self.caught_up = False
        """Whether all was followed that there was a moment ago."""
        self.snapshots = 0
        """Written by this standby."""

    @property
    def followed_entry(self) -> int:
        """The newest entry that was followed."""
        return self.backend.last_entry

    @property
    def objects(self) -> int:
        """About how many the followed state has."""
        return self._state.object_count

    def stop(self) -> None:
        """Have `run` end within a moment."""
        self._stopping.set()

    def run(self) -> Won | None:
        """Until this master leads; None where it was stopped before.

        Raises JournalCorrupt and ResourceUnavailable.
        """
        backend = self.backend
        while not self._stopping.is_set():
            self._follow()
            if not self.caught_up:
                continue
            if backend.vacant:
                if self._stopping.is_set() or not backend.campaign(CAMPAIGN_S):
                    continue
                return Won(backend.open(), self._state)
            self._snapshot_if_due()
        return None

    def _follow(self) -> None:
        followed = self.backend.follow(FOLLOW_S)
        if followed.anew:
            self._state = MasterState(self._config, epoch=0)
            self._journal_bytes = self._snapshot_bytes = 0
        for record in followed.records:
            self._note_size(record)
        state = self._state
        for entry in read_entries(iter(followed.records), verified=True):
            if isinstance(entry, SnapshotEnd):
                self._epoch = max(self._epoch, entry.epoch)
                continue
            if isinstance(entry, EpochStarted):
                self._epoch = max(self._epoch, entry.epoch)
            state.replay(entry)
        self.caught_up = followed.caught_up
        if not followed.records and not followed.caught_up:
            self._note_trouble()
            self._stopping.wait(FOLLOW_S / 5)

    def _note_size(self, record: Record) -> None:
        header = parse_header(record)
        if header is not None and header.flags & FLAG_SNAPSHOT:
            self._snapshot_bytes += len(record)
        else:
            self._journal_bytes += len(record)

    def _note_trouble(self) -> None:
        now_s = time.monotonic()
        refusal = self.backend.refusal
        if refusal is not None and now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            _log.warning("the journal can't be followed", why=str(refusal))

    # ---- snapshots ----------------------------------------------------------------------------

    def _snapshot_if_due(self) -> None:
        limits = self._limits
        now_s = time.monotonic()
        least = max(limits.journal_bytes, int(limits.journal_share * self._snapshot_bytes))
        if self._journal_bytes < least or now_s - self._snapshot_at_s < limits.interval_s:
            return
        self._snapshot_at_s = now_s
        covers = self.backend.last_entry
        effects = self._watched(self._state.snapshot())
        size_bytes = 0

        def records() -> Iterator[bytes]:
            nonlocal size_bytes
            for record in snapshot_records(effects, covers=covers, epoch=self._epoch):
                size_bytes += len(record)
                yield record

        try:
            self.backend.install_snapshot(records(), covers)
        except _GivenUp:
            return
        except CenoteError as error:
            _log.warning("a snapshot could not be written", why=str(error))
            return
        self.snapshots += 1
        self._journal_bytes, self._snapshot_bytes = 0, size_bytes
        _log.info(
            "snapshot written",
            covers=covers,
            size_bytes=size_bytes,
            seconds=round(time.monotonic() - now_s, 3),
        )

    def _watched(self, effects: Iterator[DurableEffect]) -> Iterator[DurableEffect]:
        for effect in effects:
            if self.backend.vacant or self._stopping.is_set():
                raise _GivenUp
            yield effect
