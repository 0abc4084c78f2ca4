"""What the plans of one client share: plain data, changed in place, no I/O and no lock.

Single operations on dicts and deques are atomic under the interpreter lock; where threads may race
the loser's loss is named.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import DIGEST_BYTES
from cenote.client.locations import LocationCache
from cenote.v1 import common_pb2, master_pb2

__all__ = ["Call", "ClientState", "Counters", "Grant", "LeaseHold", "Limits", "Peers", "Space"]

_TOUCHES_MAX: Final = 16_384
_PIGGYBACK_TOUCHES_MAX: Final = 256
_PIGGYBACK_RELEASES_MAX: Final = 512
_SUSPECT_FIRST_S: Final = 0.5
_SUSPECT_MAX_S: Final = 5.0


class Peers:
    """The cluster view as lookups from segments to nodes. Replaced as a whole, never changed."""

    __slots__ = ("_table", "node_by_segment", "nodes", "view_version")

    def __init__(self, view: common_pb2.ClusterView) -> None:
        self.view_version = view.view_version
        self.nodes: dict[int, common_pb2.NodeView] = {node.node_id: node for node in view.nodes}
        self.node_by_segment: dict[int, int] = {
            segment.segment_id: segment.node_id for segment in view.segments
        }
        ids = np.array(sorted(self.node_by_segment), np.uint32)
        nodes = np.array([self.node_by_segment[i] for i in ids.tolist()], np.int64)
        self._table = (ids, nodes)

    def nodes_of(self, segments: NDArray[np.uint32]) -> NDArray[np.int64]:
        """The node of each segment, -1 where this view does not know the segment."""
        ids, nodes = self._table
        if not len(ids):
            return np.full(len(segments), -1, np.int64)
        at = np.searchsorted(ids, segments)
        at[at == len(ids)] = 0
        found: NDArray[np.int64] = np.where(ids[at] == segments, nodes[at], -1)
        return found


@dataclass(slots=True)
class Limits:
    """What the master said in its hello."""

    epoch: int = 0
    session_ttl_s: float = 10.0
    location_ttl_s: float = 1.0
    lease_ttl_max_ms: int = 0
    batch_keys_max: int = 16_384


class Space:
    """An open namespace. A reset replaces generation and seed in place."""

    __slots__ = (
        "chain_touches",
        "durability",
        "fingerprint",
        "generation",
        "locations",
        "name",
        "namespace_id",
        "seed",
        "touches",
    )

    def __init__(self, name: str, fingerprint: bytes, location_entries_max: int) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.namespace_id = 0
        self.generation = 0
        self.seed = 0
        self.durability = 0
        self.locations = LocationCache(location_entries_max)
        # Of more than so many unreported reads the oldest are forgotten: they only order evictions.
        self.touches: deque[bytes] = deque(maxlen=_TOUCHES_MAX)
        self.chain_touches: deque[bytes] = deque(maxlen=64)
        """Each entry: the packed digests of one chain."""

    def opened(self, reply: master_pb2.OpenNamespaceResponse) -> None:
        """Take over what the master answered."""
        if (reply.namespace_id, reply.generation) != (self.namespace_id, self.generation):
            self.locations.clear()
            self.touches.clear()
            self.chain_touches.clear()
        self.namespace_id = reply.namespace_id
        self.generation = reply.generation
        self.seed = reply.digest_seed
        self.durability = reply.durability

    def take_touches(self, count_max: int) -> bytes:
        """Digests read from cached locations, oldest first, each once."""
        taken: dict[bytes, None] = {}
        for _ in range(min(len(self.touches), count_max)):
            try:
                digest = self.touches.popleft()
            except IndexError:  # another thread was faster
                break
            taken.pop(digest, None)
            taken[digest] = None
        return b"".join(taken)


@dataclass(slots=True)
class LeaseHold:
    """A lease that is renewed for as long as it is held. `end_s` moves on with each renewal."""

    lease_id: int
    ttl_ms: int
    end_s: float


@dataclass(slots=True)
class Grant:
    """Space that was granted to a put and is neither committed nor given back."""

    grant_id: int
    unfenced: bool = False
    """A transfer did not end in order: its bytes may still arrive."""


@dataclass(slots=True)
class Counters:
    """Plain counters; see `cenote.api.types.ClientStats`."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    existed: int = 0
    failed: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    cached_reads: int = 0
    stale_locations: int = 0
    node_failures: int = 0
    unreachable_misses: int = 0
    retries: int = 0


class ClientState:
    """All of it."""

    def __init__(
        self,
        session_id: bytes,
        now: Callable[[], float],
        credentials: common_pb2.Credentials | None = None,
    ) -> None:
        self.session_id = session_id
        self.now = now
        self.credentials = credentials or common_pb2.Credentials()
        self.limits = Limits()
        self.peers = Peers(common_pb2.ClusterView())
        self.counters = Counters()
        self.released: deque[int] = deque()
        """Leases that nobody needs any more; bounded by what was acquired."""
        self.holds: dict[int, LeaseHold] = {}
        self.suspects: dict[int, tuple[float, float]] = {}
        """Node -> (until when it is avoided, for how long the last time)."""
        self.lease_proven: set[int] = set()
        """Nodes whose reads are proven by a lease alone (shm): no checksum is taken there."""
        self.failures: deque[tuple[int, str]] = deque(maxlen=64)
        """Failures to report: (node, what)."""
        self.request_ids = itertools.count(1)
        self.wake: Callable[[], None] = lambda: None
        """Tell the background thread that there is something to flush."""

    # ---- news for the master -----------------------------------------------------------------

    def release(self, lease_id: int) -> None:
        """The lease isn't needed any more; told with the next request."""
        if lease_id:
            self.released.append(lease_id)
            self.wake()

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
                news.touched_chain_digests = space.chain_touches.popleft()
        if news.touched_digests or news.touched_chain_digests:
            news.namespace_id = space.namespace_id
            news.generation = space.generation
        return news

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
        """Nodes to avoid now."""
        if not self.suspects:
            return set()
        now_s = self.now()
        return {node for node, (until_s, _) in list(self.suspects.items()) if now_s < until_s}


class Call:
    """One call of a user: its deadline, its namespace, and what must be cleaned up after it."""

    __slots__ = ("avoid", "end_s", "grants", "now", "space", "state")

    def __init__(self, state: ClientState, space: Space, end_s: float) -> None:
        self.state = state
        self.space = space
        self.end_s = end_s
        self.now = state.now
        self.avoid = state.avoided()
        """Nodes not to be used by this call."""
        self.grants: dict[int, Grant] = {}
        """Open grants: whoever drives the plan aborts what is left here when it ended."""

    def remaining_s(self) -> float:
        return self.end_s - self.now()

    def key_batch(self, digests: bytes) -> common_pb2.KeyBatch:
        space = self.space
        return common_pb2.KeyBatch(
            namespace_id=space.namespace_id, generation=space.generation, digests=digests
        )

    def node_failed(self, node_id: int, what: str) -> None:
        self.avoid.add(node_id)
        self.state.suspect(node_id, what)

    def avoided_ids(self) -> bytes:
        """Packed u32 for a request."""
        return np.array(sorted(self.avoid), "<u4").tobytes() if self.avoid else b""


def pick_digests(digests: bytes, indexes: Iterable[int] | NDArray[np.int64]) -> bytes:
    """Some of packed digests, in the order of `indexes`."""
    rows = np.frombuffer(digests, f"V{DIGEST_BYTES}")
    return rows[np.asarray(indexes, np.int64)].tobytes()
