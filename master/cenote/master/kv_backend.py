"""The shared journal: several masters over one key-value service. What `etcd:` names.

Its parts: `kv_keeper` (who leads, and until when), `kv_follow` (reading), `kv_append` (writing, in
order and once), `kv_upkeep` (rows for people, making room), `kv_snapshot`, `kv_compaction`.
docs/internals/journal.md has the keys, and why no two masters can both acknowledge.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Final, final

from cenote.api.errors import (
    CenoteError,
    InternalError,
    InvalidArgument,
    NotLeader,
    ResourceUnavailable,
)
from cenote.kv.service import Kv
from cenote.runtime.clock import SYSTEM_CLOCK, Clock

from .journal import JournalCorrupt, Record
from .kv_append import Appender
from .kv_compaction import CompactorCommand, KvCompaction, KvCompactionLimits
from .kv_election import Candidacy
from .kv_follow import Follower
from .kv_keeper import Keeper
from .kv_keys import Keys
from .kv_snapshot import write_snapshot
from .kv_upkeep import Upkeep
from .metadata import Backlog, Followed, Leader, MasterRow, Opened
from .workers import ThreadWorkers, Workers

__all__ = ["TENURE_S", "KvBackend"]

TENURE_S: Final = 1.5
OPEN_TIMEOUT_S: Final = 10.0
"""Of a service that does not answer while what is left of the journal is read."""
RETRY_S: Final = 0.1
CLOSE_TIMEOUT_S: Final = 0.8
"""For what is queued; a daemon is to end within two seconds."""
JOIN_TIMEOUT_S: Final = 1.0
SNAPSHOT_REST_S_MAX: Final = 0.1


def _nonce() -> str:
    return secrets.token_hex(8)


@final
class KvBackend:
    """See `MetadataBackend`."""

    def __init__(
        self,
        kv: Kv,
        *,
        name: str,
        prefix: str,
        tenure_s: float = TENURE_S,
        clock: Clock = SYSTEM_CLOCK,
        workers: Workers | None = None,
        draw_nonce: Callable[[], str] = _nonce,
        first_epoch: int = 1,
        compactor: CompactorCommand | None = None,
        compaction: KvCompactionLimits | None = None,
    ) -> None:
        """`tenure_s`: how long a leader may act after its last proof, and others wait for it.
        `first_epoch`: with which one a prefix begins in which nothing is.
        `compactor`: None where a leader without standbys makes no snapshots. It takes over `kv`,
        and closes it."""
        self.name = name
        self._kv = kv
        self._keys = Keys(prefix)
        self._draw_nonce = draw_nonce
        workers = workers if workers is not None else ThreadWorkers()
        self._clock = clock
        self._workers = workers
        self._keeper = Keeper(
            kv,
            self._keys,
            clock,
            workers,
            tenure_s=tenure_s,
            draw_nonce=draw_nonce,
            first_epoch=first_epoch,
        )
        self._follower = Follower(kv, self._keys, clock, workers)
        self._appender = Appender(kv, self._keys, clock, workers, self._keeper.lose)
        self._upkeep = Upkeep(kv, self._keys, clock, workers)
        self._compaction = (
            None
            if compactor is None
            else KvCompaction(compactor, compaction or KvCompactionLimits(), clock)
        )
        self._covers = 0
        """Of the newest snapshot that was seen, and how much had been appended then."""
        self._covered_bytes = self._covered_values = 0
        self._candidacy: Candidacy | None = None
        self._joined = self._ready = self._closed = False
        self._follower.on_leader = self._keeper.look_again
        self._keeper.on_change = self._on_change
        self._keeper.on_lost = self._on_lost
        self._keeper.durable_entry = lambda: self.durable_entry
        self._upkeep.entry = lambda: self.last_entry
        self._upkeep.on_step = self._compact

    # ---- from the keeper's thread -----------------------------------------------------------

    def _on_change(self) -> None:
        heard = self._keeper.heard_entry
        if heard > self._follower.last:
            self._follower.heard(heard)
        if self._keeper.vacant:
            self._follower.wake()

    def _on_lost(self, error: NotLeader) -> None:
        self._upkeep.lost = True
        self._appender.fail(error)

    def _compact(self) -> None:
        """In the thread of upkeep: have a snapshot made, where nobody else does."""
        if self._compaction is None or not self._ready or self._closed:
            return
        upkeep, appender, follower = self._upkeep, self._appender, self._follower
        snapshot = upkeep.snapshot
        if snapshot is not None and snapshot.covers > max(self._covers, follower.covers):
            self._covers = snapshot.covers
            self._covered_bytes = follower.journal_bytes + appender.bytes_written
            self._covered_values = follower.journal_values + appender.values_written
        self._compaction.step(
            journal_bytes=follower.journal_bytes + appender.bytes_written - self._covered_bytes,
            journal_values=follower.journal_values + appender.values_written - self._covered_values,
            snapshot_bytes=snapshot.size_bytes if snapshot is not None else 0,
            has_standby=any(row.details.get("role") == "standby" for row in upkeep.masters),
        )

    # ---- standing by ------------------------------------------------------------------------

    def join(self, row: MasterRow) -> None:
        self._keeper.row = row
        self._upkeep.change_row(row)
        if not self._joined:
            self._joined = True
            self._keeper.start()
            self._upkeep.start()

    @property
    def shared(self) -> bool:
        return True

    @property
    def leader(self) -> Leader | None:
        return self._keeper.leader

    @property
    def masters(self) -> Sequence[MasterRow]:
        return self._upkeep.masters

    def follow(self, timeout_s: float) -> Followed:
        if self._candidacy is not None or self._closed:
            raise InternalError("follow is for a standby")
        now_s = self._clock.monotonic_s()
        wait_s = min(timeout_s, max(self._keeper.vacant_at_s - now_s, 0.0))
        return self._follower.follow(wait_s)

    @property
    def vacant(self) -> bool:
        return not self._closed and self._keeper.vacant

    def campaign(self, timeout_s: float) -> bool:
        if not self._joined or self._candidacy is not None or self._closed:
            raise InternalError("a backend campaigns after it joined, and leads once")
        self._candidacy = self._keeper.campaign(timeout_s, self._follower.last)
        return self._candidacy is not None

    @property
    def tenure_end_s(self) -> float:
        return self._keeper.tenure_end_s

    @property
    def lost(self) -> NotLeader | None:
        return self._keeper.lost

    # ---- leading ----------------------------------------------------------------------------

    def open(self) -> Opened:
        candidacy = self._candidacy
        if candidacy is None or self._ready or self._closed:
            raise InternalError("open without a campaign that succeeded")
        self._raise_if_lost()
        until_s = self._clock.monotonic_s() + OPEN_TIMEOUT_S
        while True:
            try:
                anew = self._follower.is_void()
                break
            except ResourceUnavailable as error:
                self._raise_if_lost()
                if isinstance(error, JournalCorrupt) or self._clock.monotonic_s() >= until_s:
                    raise
                self._workers.waker().wait(RETRY_S)
        return Opened(candidacy.epoch, self._rest(), anew)

    def _rest(self) -> Iterator[Record]:
        yield from self._follower.rest(OPEN_TIMEOUT_S)
        self._raise_if_lost()
        fence = self._keeper.fence
        assert fence is not None
        self._appender.start(fence, self._follower.last)
        self._upkeep.fence = fence
        self._ready = True

    def _raise_if_lost(self) -> None:
        lost = self._keeper.lost
        if lost is not None:
            raise lost

    def raise_epoch(self, above: int) -> int:
        raise InternalError("epochs in etcd rise with each leader, and with nothing else")

    @property
    def last_entry(self) -> int:
        return self._appender.last if self._ready else self._follower.last

    @property
    def durable_entry(self) -> int:
        return self._appender.durable if self._ready else self._follower.last

    @property
    def is_syncing(self) -> bool:
        return False

    @property
    def backlog(self) -> Backlog:
        return self._appender.backlog

    def append(self, records: Sequence[bytes]) -> int:
        if not self._ready or self._closed:
            raise InternalError("append to a journal that was not read to its end, or is closed")
        return self._appender.append(records)

    def sync(self, entry: int) -> Future[None]:
        return self._appender.sync(entry)

    @property
    def refusal(self) -> CenoteError | None:
        if self._keeper.lost is not None:
            return self._keeper.lost
        if self._ready:
            return self._appender.refusal or self._overdue()
        return self._keeper.trouble or self._follower.trouble

    def _overdue(self) -> ResourceUnavailable | None:
        if self._clock.monotonic_s() < self._keeper.tenure_end_s:
            return None
        why = self._keeper.trouble
        return ResourceUnavailable(
            "the metadata service does not confirm this master's lead"
            + (f": {why.message}" if why is not None else ""),
            remedy="check etcd: `etcdctl endpoint health`" if why is None else why.remedy,
        )

    def publish(self, rows: Mapping[str, str | None]) -> None:
        self._upkeep.publish(rows)

    def request_snapshot(self) -> int:
        if self._compaction is None:
            raise InvalidArgument("this master makes no snapshots of its own")
        self._compaction.ask()
        return self.durable_entry

    @property
    def snapshot_entry(self) -> int:
        snapshot = self._upkeep.snapshot
        return 0 if snapshot is None else snapshot.covers

    def install_snapshot(self, records: Iterable[bytes], covers: int) -> None:
        if self._ready:
            self._appender.sync(covers).result()  # which ends by itself
        waker, began_s = self._workers.waker(), self._clock.monotonic_s()

        def rest() -> None:
            """As long as the write took: half of what the service can do is the journal's."""
            nonlocal began_s
            waker.wait(min(self._clock.monotonic_s() - began_s, SNAPSHOT_REST_S_MAX))
            began_s = self._clock.monotonic_s()

        write_snapshot(self._kv, self._keys, records, covers, self._draw_nonce(), rest)
        self._upkeep.hurry()

    @property
    def bytes_used(self) -> int:
        return self._upkeep.database_bytes

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._upkeep.stop()
        if self._ready:
            self._appender.end(CLOSE_TIMEOUT_S)
        self._keeper.resign()
        self._upkeep.leave()
        self._follower.close()
        self._kv.close()  # what is still under way ends now
        for part in (self._appender, self._keeper, self._upkeep):
            part.join(JOIN_TIMEOUT_S)
        if self._compaction is not None:
            self._compaction.stop()
        self._raise_if_lost()
        if self._ready:
            self._appender.raise_unless_empty()
