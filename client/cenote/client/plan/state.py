"""What the plans of one client share: plain data, changed in place, no I/O and no lock.

Single operations on dicts and deques are atomic under the interpreter lock; where threads may race
the loser's loss is named.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError, DeadlineExceeded
from cenote.api.rows import DIGEST_BYTES
from cenote.runtime.metrics import Histogram
from cenote.transport.access import Access
from cenote.v1 import common_pb2, master_pb2

from .budgets import OVERSLEPT_S, PROBE_WAIT_S, attempt_budget_s
from .commits import Commits
from .counters import CALL_KINDS, Counters
from .grants import Grant, LeaseHold
from .options import PutOptions
from .peers import Peers
from .space import Space
from .spares import SpareGrant

__all__ = ["TIMED_MASK", "Call", "ClientState", "Limits", "pick_digests"]

_PIGGYBACK_TOUCHES_MAX: Final = 256
_PIGGYBACK_RELEASES_MAX: Final = 512
_TAILS_MAX: Final = 64
_CANCELLED_MAX: Final = 1024
TIMED_MASK: Final = 15
"""One call of sixteen has its time taken, the first one among them."""
_SUSPECT_FIRST_S: Final = 0.5
_SUSPECT_MAX_S: Final = 5.0


@dataclass(slots=True)
class Limits:
    """What the master said in its hello."""

    epoch: int = 0
    session_ttl_s: float = 10.0
    location_ttl_s: float = 1.0
    lease_ttl_max_ms: int = 0
    batch_keys_max: int = 16_384


class ClientState:
    """All of it.

    `_acquire_tails` and `_put_tails` are ready bytes of requests for one key, by what varies.
    """

    def __init__(
        self,
        session_id: bytes,
        now: Callable[[], float],
        credentials: common_pb2.Credentials | None = None,
    ) -> None:
        self.session_id = session_id
        self.now = now
        self.credentials = credentials or common_pb2.Credentials()
        self.access = Access()  # what the master gave, for daemons to see
        self.limits = Limits()
        self.peers = Peers(common_pb2.ClusterView())
        self.counters = Counters()
        self.calls = [0] * len(CALL_KINDS)
        """Of each kind, ended."""
        self.seconds = [Histogram() for _ in CALL_KINDS]
        """How long calls took, of every sixteenth of its kind."""
        self.moved: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        """By node: bytes read and written over the transport that is taken to it, whose list it
        is; those of a transport are shared by its nodes."""
        self.view_seen = 0
        """The newest cluster view that a reply spoke of."""
        self.leader_in_doubt = False
        """It answered past its tenure; see `doubt_leader`."""
        self.released: deque[int] = deque()
        """Leases that nobody needs any more; bounded by what was acquired."""
        self.released_holds: deque[int] = deque()
        """Likewise those that no time ends: told until the master has answered."""
        self.holds: dict[int, LeaseHold] = {}
        self.suspects: dict[int, tuple[float, float]] = {}
        """Node -> (until when it is avoided, for how long the last time)."""
        self.lease_proven: set[int] = set()
        """Nodes whose reads are proven by a lease alone (shm): no checksum is taken there."""
        self.failures: deque[tuple[int, str]] = deque(maxlen=64)
        """Failures to report: (node, what)."""
        self.request_ids = itertools.count(1)
        self.commits = Commits(session_id, self.request_ids)
        # Of more than so many the oldest keep what they were given until the session ends.
        self.cancelled: deque[int] = deque(maxlen=_CANCELLED_MAX)
        """Requests whose answers were never seen: the master takes back what it granted."""
        self._acquire_tails: dict[int, bytes] = {}
        self._put_tails: dict[object, bytes] = {}
        self.wake: Callable[[], None] = lambda: None
        """Tell the background thread that there is something to flush."""

    def begin_session(self, session_id: bytes) -> None:
        """Another session: what the old one held runs out by itself."""
        self.session_id = session_id
        # Others, since a thread may just be adding one of the session before to these.
        self._acquire_tails = {}
        self._put_tails = {}
        self.released.clear()
        self.released_holds.clear()
        self.holds.clear()
        self.cancelled.clear()
        self.commits = Commits(session_id, self.request_ids)

    # ---- news for the master -----------------------------------------------------------------

    def release(self, lease_id: int) -> None:
        """The lease isn't needed any more; told with the next request."""
        if lease_id:
            self.released.append(lease_id)
            self.wake()

    def release_hold(self, lease_id: int) -> None:
        """Likewise for a view's lease. As no time ends it, it is told once more, and until that was
        answered: the request that it rides on may get lost."""
        if lease_id:
            self.released_holds.append(lease_id)
            self.release(lease_id)

    def take_releases(self, count_max: int = _PIGGYBACK_RELEASES_MAX) -> list[int]:
        taken: list[int] = []
        for _ in range(min(len(self.released), count_max)):
            try:
                taken.append(self.released.popleft())
            except IndexError:  # another thread was faster
                break
        return taken

    def piggyback(
        self, space: Space, touches_max: int = _PIGGYBACK_TOUCHES_MAX
    ) -> common_pb2.Piggyback | None:
        """News that the next request takes along, None where there is none."""
        if not self.released and not space.touches and not space.chain_touches:
            return None
        news = common_pb2.Piggyback()
        if self.released:
            news.released_lease_ids = np.array(self.take_releases(), "<u8").tobytes()
        if space.touches:
            news.touched_digests = space.take_touches(touches_max)
        if space.chain_touches:
            with suppress(IndexError):  # another thread may be faster
                chain, was_read = space.chain_touches.popleft()
                if was_read:
                    news.touched_chain_digests = chain
                else:
                    news.chained_digests = chain
        if news.touched_digests or news.touched_chain_digests or news.chained_digests:
            news.namespace_id = space.namespace_id
            news.generation = space.generation
        return news

    def packed_piggyback(self, space: Space) -> bytes:
        """The same as a message's bytes, empty where there is no news."""
        if not self.released and not space.touches and not space.chain_touches:
            return b""
        if len(self.released) == 1 and not space.touches and not space.chain_touches:
            try:
                return b"\x0a\x08" + self.released.popleft().to_bytes(8, "little")
            except IndexError:  # another thread was faster
                return b""
        news = self.piggyback(space)
        return b"" if news is None else news.SerializeToString()

    # ---- ready bytes -------------------------------------------------------------------------

    def acquire_tail(self, ttl_ms: int) -> bytes:
        """An AcquireRequest without its keys; `ttl_ms` 0: for no lease."""
        tails = self._acquire_tails
        tail = tails.get(ttl_ms)
        if tail is None:
            if len(tails) >= _TAILS_MAX:
                tails.clear()
            request = master_pb2.AcquireRequest(
                ttl_ms=ttl_ms, lease=ttl_ms > 0, session_id=self.session_id
            )
            tail = tails[ttl_ms] = request.SerializeToString()
        return tail

    def put_tail(self, options: PutOptions) -> bytes:
        """A PutStartRequest without keys, sizes and request id."""
        tails = self._put_tails
        tail = tails.get(options)
        if tail is None:
            if len(tails) >= _TAILS_MAX:
                tails.clear()
            request = master_pb2.PutStartRequest(
                options=options.message(),
                session_id=self.session_id,
                credentials=self.credentials,
            )
            tail = tails[options] = request.SerializeToString()
        return tail

    def use_peers(self, peers: Peers) -> None:
        """Another cluster view: who is down in it is avoided until a later one says otherwise; who
        is not may be back, whatever was seen of it before."""
        self.peers = peers
        self.view_seen = 0
        self.suspects = dict.fromkeys(peers.down, (math.inf, 0.0))

    @property
    def knows_newer_view(self) -> bool:
        """Whether a reply spoke of a view that is not here yet."""
        return self.view_seen > self.peers.view_version

    def see_view(self, view_version: int) -> None:
        """A reply spoke of this view; a newer one than ours is fetched in the background."""
        if view_version > self.peers.view_version:
            self.view_seen = max(self.view_seen, view_version)
            self.wake()

    def doubt_leader(self) -> None:
        """A lookup was answered by a leader past its tenure: another one is looked for in the
        background."""
        self.leader_in_doubt = True
        self.wake()

    def cancel(self, request_id: int) -> None:
        """Nobody waits for the answer to this request any more."""
        self.cancelled.append(request_id)
        self.wake()

    def note_call(self, call: Call) -> None:
        """It has ended."""
        kind = call.kind
        count = self.calls[kind] = self.calls[kind] + 1
        if count & TIMED_MASK == 1:
            self.seconds[kind].observe(self.now() - call.end_s + call.deadline_s)

    # ---- suspects ----------------------------------------------------------------------------

    def suspect(self, node_id: int, what: str) -> None:
        """This node failed a moment ago: avoid it for a while, longer each time, and report it."""
        self.counters.node_failures += 1
        now_s = self.now()
        until_s, last_s = self.suspects.get(node_id, (0.0, 0.0))
        if now_s < until_s:
            return
        pause_s = min(max(2 * last_s, _SUSPECT_FIRST_S), _SUSPECT_MAX_S)
        self.suspects[node_id] = (now_s + pause_s, pause_s)
        self.failures.append((node_id, what))
        self.wake()

    def trust(self, node_id: int) -> None:
        """It works (again)."""
        if node_id in self.suspects:
            self.suspects.pop(node_id, None)

    def avoided(self) -> set[int]:
        """Nodes to avoid now, beside those that are down in the view: the master knows of them."""
        if not self.suspects:
            return set()
        now_s = self.now()
        known = list(self.suspects.items())
        return {node for node, (until_s, _) in known if now_s < until_s < math.inf}

    def fresh_suspects(self) -> set[int]:
        """Nodes that failed once, a moment ago, and not again after they were given time."""
        known = list(self.suspects.items())
        return {node for node, (_, pause_s) in known if 0.0 < pause_s <= _SUSPECT_FIRST_S}


class Call:
    """One call of a user: its deadline, its namespace, and what must be cleaned up after it."""

    __slots__ = (
        "_commits",
        "avoid",
        "chances",
        "committing",
        "deadline_s",
        "end_s",
        "failed",
        "generation",
        "grants",
        "key_head",
        "kind",
        "last_tries",
        "namespace_id",
        "now",
        "peers",
        "space",
        "stalled",
        "state",
        "unanswered",
    )

    def __init__(self, state: ClientState, space: Space, deadline_s: float, kind: int = 0) -> None:
        self.state = state
        self.space = space
        self.kind = kind
        """Of `CALL_KINDS`."""
        self.deadline_s = deadline_s
        self.end_s = state.now() + deadline_s
        self.now = state.now
        self.avoid = state.avoided()
        """Nodes not to be used by this call."""
        self.failed: set[int] = set()
        """Those of them that failed in this very call."""
        self.peers = state.peers
        """By what view of the cluster they failed."""
        self.stalled: set[int] = set()
        """Those of them that did not answer in time, and were not tried once more."""
        self.last_tries: set[int] = set()
        """Those that were given up, and are tried once more."""
        self.chances: set[int] = set()
        """Those that failed for another call just now, and are tried since nothing else has what is
        wanted: briefly, and without having the master look at them, as that call does."""
        self.grants: dict[object, Grant] = {}
        """Open grants: whoever drives the plan aborts what is left here when it ended."""
        self.unanswered = 0
        """A request that gives something that no time takes back; whoever drives the plan cancels
        what is left here when it ended."""
        self._commits = state.commits
        self.committing = 0
        """A commit that is not known to be sealed: lost, if it is left here when the plan ended."""
        self.namespace_id = space.namespace_id
        self.generation = space.generation
        self.key_head = space.key_head

    def commits(self, session_id: bytes) -> tuple[int, int]:
        """(the id of a commit that is sent next, for this session, what is told with it; see
        `Commits`). `sealed` is to be called when all that it decided is sealed."""
        self.lose_commit()
        commits = self._commits = self.state.commits
        self.committing, through = commits.begin()
        return self.committing, through if session_id == commits.session_id else 0

    def sealed(self) -> None:
        """What the commit decided, if anything."""
        self._commits.end(self.committing)
        self.committing = 0

    def lose_commit(self) -> None:
        """Nobody will say of it that it is sealed."""
        if self.committing:
            self._commits.lose(self.committing)
            self.committing = 0
            self.state.wake()

    def asks(self) -> int:
        """The id of a request that is sent next, which grants or holds something. `unanswered` is
        to be cleared when its answer is there."""
        if self.unanswered:
            self.state.cancel(self.unanswered)
        self.unanswered = next(self.state.request_ids)
        return self.unanswered

    def begin_anew(self) -> None:
        """Digests are made next, with the namespace's present seed. What is sent says that it is
        of the present generation, also after another thread learned of a newer one: a digest of
        one generation must never be sent as one of another. (Nor of another namespace, which may
        have the name now: metadata may have been lost.)"""
        self.namespace_id = self.space.namespace_id
        self.generation = self.space.generation
        self.key_head = self.space.key_head

    def remaining_s(self) -> float:
        return self.end_s - self.now()

    def started(self, reply: master_pb2.PutStartResponse) -> None:
        """What each answer to a PutStart tells: the newest view, and what proves its grants."""
        self.state.see_view(reply.view_version)
        if reply.grant_signatures or reply.spare_signatures:
            self.state.access.keep(reply, self.namespace_id)
        if reply.alias_grant_id:  # whether its turn comes before the call ends, or not
            self.grants[reply.alias_grant_id] = Grant(reply.alias_grant_id, self.state.session_id)

    def keep_spares(
        self, reply: master_pb2.PutStartResponse, session_id: bytes, count: int
    ) -> None:
        """Take up the spare extents that a PutStart of this session, of `count` objects, was
        answered with, for puts to come."""
        state = self.state
        spare = None
        if reply.spare_grant_id:
            spare = SpareGrant(reply, session_id, (self.namespace_id, self.generation))
            state.wake()
        self.space.spares.add(spare, count, state.now())

    def key_batch(self, digests: bytes) -> common_pb2.KeyBatch:
        return common_pb2.KeyBatch(
            namespace_id=self.namespace_id, generation=self.generation, digests=digests
        )

    def node_failed(
        self,
        node_id: int,
        error: CenoteError,
        *,
        alone: bool = False,
        until_s: float = math.inf,
    ) -> None:
        """A node did not do what it was to do: this call avoids it from now on.

        `alone`: nothing else has what was wanted of it. Where it was only slow other calls do not
        avoid it yet: it is tried once more, and the master looks at it before. `until_s`: when it
        was to be done; long after that it is not the node that failed.
        """
        if self.now() > min(until_s, self.end_s) + OVERSLEPT_S:
            return
        self.avoid.add(node_id)
        self.failed.add(node_id)
        if self.state.peers is not self.peers:  # by a newer view it is somewhere else, maybe
            return
        tried_before = node_id in self.last_tries or node_id in self.chances
        if isinstance(error, DeadlineExceeded) and not tried_before:
            self.stalled.add(node_id)
            if alone:
                return
        self.state.suspect(node_id, str(error))

    @property
    def knows_newer_view(self) -> bool:
        """Whether there is a newer view than the one by which nodes failed in this call: a reply
        spoke of it, or the background, another thread, has it already."""
        return self.state.knows_newer_view or self.state.peers is not self.peers

    def look_again(self) -> None:
        """A newer view has come: whoever failed may be somewhere else by now."""
        self.peers = self.state.peers
        self.avoid = self.state.avoided()
        self.failed.clear()
        self.stalled.clear()

    def try_once_more(self, node_ids: set[int]) -> None:
        """These fell silent, and nothing else has what is wanted: a last attempt."""
        self.stalled -= node_ids
        self.avoid -= node_ids
        self.failed -= node_ids
        self.last_tries |= node_ids

    def may_try_once_more(self) -> bool:
        """Whether nodes fell silent, and there is time to have the master look, and for more."""
        return bool(self.stalled) and self.remaining_s() > 2 * PROBE_WAIT_S

    def has_other_nodes(self) -> bool:
        """Whether a put could go elsewhere if one node failed."""
        peers = self.state.peers
        return len(peers.nodes) - len(self.avoid | peers.down) > 1

    def put_budget_s(self, node_id: int, size_bytes: int) -> float:
        """Time for writing so much to one node; those that are tried once more share what is left.

        Raises DeadlineExceeded."""
        remaining_s = self.remaining_s()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed before the bytes were sent")
        if node_id in self.last_tries:
            return attempt_budget_s(
                remaining_s / len(self.last_tries), size_bytes, alternatives=False, last=True
            )
        others = self.has_other_nodes()
        return attempt_budget_s(remaining_s, size_bytes, alternatives=others, last=not others)

    def give_suspects_a_chance(self) -> bool:
        """Avoid only what failed in this very call; whether that is fewer nodes."""
        if self.avoid == self.failed:
            return False
        self.avoid = set(self.failed)
        return True

    def try_fresh_suspects(self, node_ids: set[int]) -> bool:
        """Of these nodes, which alone have what is wanted, those that another call met in trouble a
        moment ago, for the first time, are avoided no longer: a daemon that was just restarted is
        met through what was left of the one before. Whether there are any."""
        fresh = (self.avoid - self.failed) & node_ids & self.state.fresh_suspects()
        self.avoid -= fresh
        self.chances |= fresh
        return bool(fresh)

    def avoided_ids(self) -> bytes:
        """Packed u32 for a request."""
        return np.array(sorted(self.avoid), "<u4").tobytes() if self.avoid else b""


def pick_digests(digests: bytes, indexes: Iterable[int] | NDArray[np.int64]) -> bytes:
    """Some of packed digests, in the order of `indexes`."""
    rows = np.frombuffer(digests, f"V{DIGEST_BYTES}")
    return rows[np.asarray(indexes, np.int64)].tobytes()
