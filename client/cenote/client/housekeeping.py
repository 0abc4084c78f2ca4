"""A client's one background thread: what can wait a moment, and what must be done in time.

Every 50 ms while there is something to tell: released leases and reads from cached locations that
no request took along, grants to abort, requests to cancel, failures to report. A third of the way
into each lifetime: the session, and the leases of transfers under way. When nothing is pending the
thread sleeps, and `wake` (called on the hot paths) is one look at a flag while it does not.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np

from cenote.api.errors import CenoteError, DeadlineExceeded, SessionUnknown, Unavailable
from cenote.runtime.scheduling import SLEEPERS
from cenote.v1 import master_pb2 as pb

from .plan.budgets import LEASE_SHARE
from .plan.grants import Grant, LeaseHold
from .plan.space import Space

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Housekeeper", "take_some"]

_log = logging.getLogger("cenote.client")

_TICK_S: Final = 0.05
_IDLE_LOOK_S: Final = 0.5  # how soon the end of the main thread or of the owner is seen
_CALL_S: Final = 1.0
_JOIN_S: Final = 3.0
_TOUCH_PERIOD_S: Final = 0.5
_TOUCHES_PER_REQUEST: Final = 4096
_IDS_PER_REQUEST: Final = 1024


def take_some(waiting: deque[int], count_max: int = _IDS_PER_REQUEST) -> list[int]:
    """The first of a queue that other threads may add to or clear; one message takes them all."""
    taken: list[int] = []
    with suppress(IndexError):
        while len(taken) < count_max:
            taken.append(waiting.popleft())
    return taken


class Housekeeper:
    """Starts with the first `wake` or `start`; ends with `close`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._owner: weakref.ref[object] | None = None
        self._signal: SimpleQueue[None] = SimpleQueue()
        self._asleep = True
        self._closing = False
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._start_lock = threading.Lock()
        self._renew_at_s = 0.0
        self._touch_at_s = 0.0
        self._seen_release = 0

    def watch(self, owner: object) -> None:
        """Close the session when `owner` is garbage."""
        self._owner = weakref.ref(owner)

    def start(self) -> None:
        """Begin to renew the session."""
        with self._start_lock:
            if self._thread is None and not self._closing:
                self._renew_at_s = time.monotonic() + self._renew_period_s()
                self._thread = threading.Thread(target=self._run, name="cenote-housekeeping")
                self._thread.start()

    def wake(self) -> None:
        """There is something to tell within 50 ms."""
        if self._asleep:
            self._asleep = False
            self._signal.put(None)

    def close(self) -> None:
        """End the thread, after what it is doing right now."""
        with self._start_lock:
            self._closing = True
            thread = self._thread
        self._signal.put(None)
        if thread is None or thread is threading.current_thread():
            return
        try:
            thread.join(_JOIN_S)
        except RuntimeError:  # Ctrl-C came while it was being started; it may run or not
            self._ended.wait(_TICK_S)

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        ident = threading.get_ident()
        SLEEPERS.add(ident)
        try:
            self._work()
        finally:
            SLEEPERS.discard(ident)
            self._ended.set()

    def _work(self) -> None:
        while not self._closing:
            if self._asleep:
                self._wait(min(_IDLE_LOOK_S, max(0.0, self._renew_at_s - time.monotonic())))
            if self._closing:
                return
            if not self._asleep:
                self._wait(_TICK_S)  # so that news can ride on requests of their own accord
            if self._closing:
                return
            if self._is_orphan():
                self._session.close()
                return
            try:
                pending = self._turn()
            except CenoteError as error:
                _log.debug("housekeeping will try again: %s", error)
                pending = True
            if not pending:
                self._asleep = True
                if self._has_news():  # it came between our look and the flag
                    self._asleep = False

    def _wait(self, timeout_s: float) -> None:
        try:
            self._signal.get(timeout=timeout_s)
        except Empty:
            return

    def _is_orphan(self) -> bool:
        """The program ended, or dropped its client, without closing it."""
        if not threading.main_thread().is_alive():
            return True
        return self._owner is not None and self._owner() is None

    def _has_news(self) -> bool:
        state = self._session.state
        return bool(
            state.released
            or state.failures
            or state.knows_newer_view
            or self._session.aborts
            or state.cancelled
            or state.commits.lost()
            or state.released_holds
            or any(
                space.touches or space.chain_touches or space.spares.held
                for space in self._spaces()
            )
        )

    def _spaces(self) -> list[Space]:
        return list(self._session.spaces.values())

    def _turn(self) -> bool:
        """Do what is due; whether there is more to come soon."""
        now_s = time.monotonic()
        self._give_spares_back(now_s)
        self._session.improve_ways()
        if now_s >= self._renew_at_s or self._holds_are_due(now_s) or self._leader_is_in_doubt():
            self._renew()
        self.flush_aborts()
        self._flush_cancelled()
        self._flush_holds()
        if self._session.state.knows_newer_view:
            self._session.refresh_view(_CALL_S)
        self._flush_failures()
        self._flush_releases()
        if now_s >= self._touch_at_s:
            self._flush_touches()
            self._touch_at_s = now_s + _TOUCH_PERIOD_S
        return self._has_news() or bool(self._session.state.holds)

    def _leader_is_in_doubt(self) -> bool:
        """Whether a leader past its tenure has answered: it refuses to renew the session, and who
        hears that looks for its successor, until there is one or the call's time is over."""
        doubt, self._session.state.leader_in_doubt = self._session.state.leader_in_doubt, False
        return doubt

    def _holds_are_due(self, now_s: float) -> bool:
        """Whether a third of a lease is over: it may have begun after the last renewal."""
        for hold in list(self._session.state.holds.values()):
            if hold.ttl_ms and now_s >= hold.end_s - LEASE_SHARE * hold.ttl_ms / 1500:
                return True
        return False

    def _renew_period_s(self) -> float:
        state = self._session.state
        periods = [state.limits.session_ttl_s / 3]
        periods += [hold.ttl_ms / 3000 for hold in list(state.holds.values()) if hold.ttl_ms]
        return max(min(periods), _TICK_S)

    def _renew(self) -> None:
        session = self._session
        holds: list[LeaseHold] = [h for h in list(session.state.holds.values()) if h.ttl_ms]
        ttl_ms = min((hold.ttl_ms for hold in holds), default=0)
        commits = session.state.commits
        request = pb.RenewSessionRequest(
            session_id=commits.session_id,
            lease_ttl_ms=ttl_ms,
            lease_ids=np.array([hold.lease_id for hold in holds], "<u8").tobytes(),
            sealed_through=commits.through(),
        )
        # Set first: after a failure it is tried again with the next tick, not in a tight loop.
        self._renew_at_s = time.monotonic() + _TICK_S
        asked_s = time.monotonic()
        try:
            reply = session.master.renew_session(request, _CALL_S)
        except SessionUnknown:
            session.reopen_session(_CALL_S)
        else:
            if reply.ticket:
                session.identity.access.ticket = reply.ticket
            lost = set(np.frombuffer(reply.lost_lease_ids, "<u8").tolist())
            for hold in holds:
                if hold.lease_id in lost:
                    session.state.holds.pop(hold.lease_id, None)
                else:
                    hold.end_s = asked_s + LEASE_SHARE * ttl_ms / 1000
            if reply.view_version > session.state.peers.view_version:
                session.refresh_view(_CALL_S)
        self._renew_at_s = time.monotonic() + self._renew_period_s()

    def _give_spares_back(self, now_s: float) -> None:
        """Space that was granted ahead and has not been used for a while."""
        for space in self._spaces():
            if space.spares.held:
                runs = space.spares.take_idle(now_s)
                self._session.aborts.extend(run.as_grant() for run in runs)

    def flush_aborts(self) -> bool:
        """Give back the grants that calls left open; whether all were."""
        session = self._session
        while session.aborts:
            grant: Grant = session.aborts.popleft()
            request = pb.PutAbortRequest(
                grant_id=grant.grant_id,
                indexes=grant.indexes,
                session_id=grant.session_id,
                unfenced=grant.is_unfenced(),
            )
            try:
                session.master.put_abort(request, _CALL_S)
            except (Unavailable, DeadlineExceeded):
                session.aborts.appendleft(grant)
                return False
            except CenoteError as error:  # ended already, with its session or by itself
                _log.debug("grant %d could not be aborted: %s", grant.grant_id, error)
        return True

    def _flush_cancelled(self) -> None:
        """Have the master take back what it gave in answers that were never seen."""
        session = self._session
        session_id = session.identity.session_id
        commits = session.state.commits
        lost = commits.lost() if commits.session_id == session_id else []
        taken = take_some(session.state.cancelled, _IDS_PER_REQUEST - len(lost))
        if not taken and not lost:
            return
        request = pb.RenewSessionRequest(
            session_id=session_id, cancelled_request_ids=np.array(taken + lost, "<u8").tobytes()
        )
        try:
            session.master.renew_session(request, _CALL_S)
        except (Unavailable, DeadlineExceeded):
            if session.identity.session_id == session_id:
                session.state.cancelled.extendleft(reversed(taken))
            raise
        except CenoteError as error:  # the session ended, and with it what it was given
            _log.debug("%d requests could not be cancelled: %s", len(taken), error)
        commits.were_told(lost)

    def _flush_holds(self) -> None:
        """Views that were closed: no time ends what they hold."""
        state = self._session.state
        taken = take_some(state.released_holds)
        if not taken:
            return
        news = pb.ReleaseRequest()
        news.piggyback.released_lease_ids = np.array(taken, "<u8").tobytes()
        try:
            self._session.master.release(news, _CALL_S)
        except (Unavailable, DeadlineExceeded):
            state.released_holds.extendleft(reversed(taken))
            raise
        except CenoteError as error:  # they ended with their session
            _log.debug("%d holds could not be released: %s", len(taken), error)

    def _flush_failures(self) -> None:
        session = self._session
        while session.state.failures:
            node_id, what = session.state.failures.popleft()
            request = pb.ReportFailureRequest(
                node_id=node_id, session_id=session.identity.session_id, what=what
            )
            session.master.report_failure(request, _CALL_S)

    def _flush_releases(self) -> None:
        """Leases that no request took along since the last tick."""
        state = self._session.state
        try:
            first = state.released[0]
        except IndexError:
            self._seen_release = 0
            return
        if first != self._seen_release:
            self._seen_release = first
            return
        spaces = self._spaces()
        if not spaces:
            return
        taken = state.take_releases()
        news = pb.ReleaseRequest()
        news.piggyback.released_lease_ids = np.array(taken, "<u8").tobytes()
        try:
            self._session.master.release(news, _CALL_S)
        except SessionUnknown:
            pass  # its leases ended with it
        except CenoteError:
            state.released.extendleft(reversed(taken))
            raise

    def _flush_touches(self) -> None:
        for space in self._spaces():
            while space.touches or space.chain_touches:
                news = self._session.state.piggyback(space, _TOUCHES_PER_REQUEST)
                if news is None:
                    break
                self._session.master.touch(pb.TouchRequest(piggyback=news), _CALL_S)
