"""The thread that keeps a master's place: a standby watches the leader's tenure, a leader proves
its own. `kv_election.py` decides; here is who asks the service when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, final

from cenote.api.errors import NotLeader, ResourceUnavailable
from cenote.kv.service import Delete, Kv, KvRefused, KvUnavailable, Modified, Put
from cenote.runtime.clock import Clock
from cenote.runtime.log import get_logger

from .kv_append import Fence
from .kv_election import (
    LOOKS_PER_TENURE,
    Candidacy,
    Observer,
    Seen,
    Tenure,
    read_seen,
    seen_from,
)
from .kv_keys import Keys, TenureRow, epoch_text
from .metadata import Leader, MasterRow
from .workers import Worker, Workers

__all__ = ["Keeper"]

CALL_TIMEOUT_S: Final = 2.0
RETRY_S: Final = 0.1
RESIGN_TIMEOUT_S: Final = 0.5
_log = get_logger("cenote.master.election")


@final
class Keeper:
    """`campaign` and `resign` in the caller's thread, the rest in one of its own."""

    def __init__(
        self,
        kv: Kv,
        keys: Keys,
        clock: Clock,
        workers: Workers,
        *,
        tenure_s: float,
        draw_nonce: Callable[[], str],
        first_epoch: int = 1,
    ) -> None:
        self._kv = kv
        self._keys = keys
        self._clock = clock
        self._workers = workers
        self._draw_nonce = draw_nonce
        self._first_epoch = first_epoch
        self._lock = threading.Lock()
        self._waker = workers.waker()
        self._looked = workers.waker()
        """Woken after each look at the rows."""
        self._observer = Observer()
        self._tenure = Tenure(tenure_s)
        self._worker: Worker | None = None
        self._closing = False
        self._resigned = False
        self.row = MasterRow("")
        self.fence: Fence | None = None
        """Set once this master leads."""
        self.lost: NotLeader | None = None
        self.trouble: ResourceUnavailable | None = None
        """Why the service did not answer, the last time."""
        self.durable_entry: Callable[[], int] = lambda: 0
        self.on_change: Callable[[], None] = lambda: None
        """Called, in this thread, when the place may have become vacant or the leader said more."""
        self.on_lost: Callable[[NotLeader], None] = lambda _error: None

    def start(self) -> None:
        self._worker = self._workers.spawn("cenote-election", self._run)

    # ---- what is known ----------------------------------------------------------------------

    @property
    def leader(self) -> Leader | None:
        """Who leads: this master, or who was seen to and may still."""
        if self.fence is not None and self.lost is None:
            return None if self._resigned else Leader(self.fence.epoch, self.row)
        with self._lock:
            return None if self._is_vacant() else self._observer.leader

    @property
    def vacant(self) -> bool:
        with self._lock:
            return self.fence is None and self._is_vacant()

    def _is_vacant(self) -> bool:
        return self._clock.monotonic_s() >= self._observer.vacant_at_s

    @property
    def vacant_at_s(self) -> float:
        """When the place becomes vacant if the leader says nothing more."""
        return self._observer.vacant_at_s

    @property
    def heard_entry(self) -> int:
        """The newest entry that a leader said to be durable."""
        return self._observer.entry

    @property
    def tenure_end_s(self) -> float:
        over = self.lost is not None or self._resigned or self.fence is None
        return float("-inf") if over else self._tenure.end_s

    def look_again(self) -> None:
        """Something has changed: look now. From any thread."""
        self._waker.wake()

    # ---- becoming the leader ----------------------------------------------------------------

    def campaign(self, timeout_s: float, entry: int) -> Candidacy | None:
        """The candidacy that won, `fence` being set; None where it did not within `timeout_s`."""
        end_s = self._clock.monotonic_s() + timeout_s
        while not self.vacant:
            now_s = self._clock.monotonic_s()
            if now_s >= end_s:
                return None
            self._looked.wait(min(end_s, max(self.vacant_at_s, now_s + 0.01)) - now_s)
        with self._lock:
            seen = self._observer.seen
        assert seen is not None
        candidacy = Candidacy(
            self._keys,
            seen,
            self.row,
            tenure_s=self._tenure.tenure_s,
            entry=entry,
            nonce=self._draw_nonce(),
            first_epoch=self._first_epoch,
        )
        sent_s = self._clock.monotonic_s()
        revision = self._stand(candidacy, max(end_s, sent_s + RETRY_S))
        if not revision:
            self.look_again()
            return None
        with self._lock:
            self._tenure.proven(sent_s)
            self.fence = Fence(candidacy.epoch, revision)
        self.look_again()
        return candidacy

    def _stand(self, candidacy: Candidacy, end_s: float) -> int:
        """The fence, or 0. Nothing is known until the service has said what became of it."""
        reads = read_seen(self._keys)
        while True:
            timeout_s = min(CALL_TIMEOUT_S, max(end_s - self._clock.monotonic_s(), RETRY_S))
            try:
                reply = self._kv.txn(
                    candidacy.conditions, candidacy.then, reads, timeout_s=timeout_s
                )
                if reply.succeeded:
                    return reply.revision
                return candidacy.won(seen_from(reply))
            except (KvUnavailable, KvRefused) as error:  # no answer; a full database, no permission
                self._note_trouble(error)
            if self._clock.monotonic_s() >= end_s:
                # Should it be carried out later nobody proves the tenure: it ends by itself.
                return 0
            self._waker.wait(RETRY_S)

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            leads = self.fence is not None
            began_s = self._clock.monotonic_s()
            try:
                answered = self._beat() if leads else self._look()
            except ResourceUnavailable as error:  # a password, a full database, rows not ours
                self._note_trouble(error)
                answered = False
            except Exception as error:  # whatever the bug is: without this thread the tenure ends
                _log.error("the election's thread failed", why=repr(error))
                self.trouble = ResourceUnavailable(f"the election's thread failed: {error!r}")
                raise
            if self.lost is not None:
                return
            pause_s = self._pause_s(leads) if answered else RETRY_S
            self._waker.wait(began_s + pause_s - self._clock.monotonic_s())

    def _note_trouble(self, error: ResourceUnavailable) -> None:
        if self.trouble is None or self.trouble.message != error.message:
            _log.warning("etcd does not answer as it should", why=error.message)
        self.trouble = error

    def _pause_s(self, leads: bool) -> float:
        pause_s = self._tenure.beat_s if leads else self._tenure.tenure_s / LOOKS_PER_TENURE
        if not leads:
            until_vacant_s = self._observer.vacant_at_s - self._clock.monotonic_s()
            if until_vacant_s > 0:
                pause_s = min(pause_s, until_vacant_s)
        return pause_s

    def _look(self) -> bool:
        """Whether the service has answered."""
        was_vacant = self.vacant
        before = self._observer.leader
        try:
            reply = self._kv.txn(
                (), read_seen(self._keys), timeout_s=min(CALL_TIMEOUT_S, self._tenure.tenure_s / 2)
            )
        except KvUnavailable as error:
            with self._lock:
                self._observer.failed()
            self._note_trouble(error)
            return False
        with self._lock:
            self._observer.saw(seen_from(reply), self._clock.monotonic_s())
        self.trouble = None
        if before != self._observer.leader and self._observer.leader is not None:
            leader = self._observer.leader
            _log.info("a leader is known", epoch=leader.epoch, master=leader.row.name)
        if self.vacant and not was_vacant:
            _log.info("nobody leads")
        self._looked.wake()
        self.on_change()
        return True

    def _beat(self) -> bool:
        """Prove the tenure; whether the service has answered."""
        fence = self.fence
        assert fence is not None
        if self._resigned:
            return True
        if self._clock.monotonic_s() >= self._tenure.end_s and not self._is_heard(fence):
            return False
        row = TenureRow(fence.epoch, round(self._tenure.tenure_s * 1000), self.durable_entry())
        sent_s = self._clock.monotonic_s()
        try:
            reply = self._kv.txn(
                [Modified(self._keys.epoch, fence.revision)],
                [Put(self._keys.tenure, row.to_bytes())],
                read_seen(self._keys),
                timeout_s=min(CALL_TIMEOUT_S, self._tenure.tenure_s / 2),
            )
        except KvUnavailable as error:
            self._note_trouble(error)
            return False
        self.trouble = None
        if reply.succeeded:
            self._tenure.proven(sent_s)
        elif not self._resigned:
            self.lose("another master was elected", seen_from(reply))
        return True

    def _is_heard(self, fence: Fence) -> bool:
        """Past the tenure: whether the service answers again, and nobody else was elected.

        Asked before anything is written. Where requests arrive and answers do not (so it is for
        seconds after a cut, until TCP sends again what was under way), blind heartbeats would keep
        the place for a leader that may not act.
        """
        try:
            reply = self._kv.txn(
                (),
                read_seen(self._keys),
                timeout_s=min(CALL_TIMEOUT_S, self._tenure.tenure_s / 2),
            )
        except KvUnavailable as error:
            self._note_trouble(error)
            return False
        seen = seen_from(reply)
        if seen.epoch is not None and seen.epoch.mod_revision == fence.revision:
            return True
        if not self._resigned:
            self.lose("another master was elected", seen)
        return False

    def lose(self, why: str, seen: Seen | None = None) -> NotLeader:
        """Another master leads; returns the error for it. From any thread."""
        with self._lock:
            if seen is not None:
                self._observer.saw(seen, self._clock.monotonic_s())
            if self.lost is None:
                leader = self._observer.leader if seen is not None else None
                epoch = self.fence.epoch if self.fence is not None else 0
                self.lost = NotLeader(
                    f"epoch {epoch} is over: {why}",
                    remedy="ask the leader",
                    addresses=leader.row.addresses if leader is not None else (),
                    epoch=leader.epoch if leader is not None else 0,
                )
                _log.error("this master leads no more", epoch=epoch, why=why)
            lost = self.lost
        self.on_lost(lost)
        self._waker.wake()
        return lost

    # ---- the end ----------------------------------------------------------------------------

    def resign(self) -> None:
        """Whoever stands by may lead at once. Best effort: where the service does not answer, they
        wait for the tenure to end."""
        fence = self.fence
        self._closing = True
        if fence is None or self.lost is not None:
            return
        self._resigned = True
        keys = self._keys
        # Written anew, its revision refuses what is still under way, such as a late heartbeat.
        refuse = Put(keys.epoch, epoch_text(fence.epoch))
        try:
            self._kv.txn(
                [Modified(keys.epoch, fence.revision)],
                [refuse, Delete(keys.leader), Delete(keys.tenure)],
                timeout_s=RESIGN_TIMEOUT_S if self.trouble is None else RETRY_S,
            )
        except ResourceUnavailable as error:
            _log.warning("could not resign in order", why=error.message)

    def join(self, timeout_s: float) -> None:
        """After `resign`, once the connection is closed."""
        self._closing = True
        self._waker.wake()
        if self._worker is not None:
            self._worker.join(timeout_s)
