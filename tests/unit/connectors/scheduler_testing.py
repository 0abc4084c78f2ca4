"""A fake pool for the scheduler's half of the connector, and a worker that does what is ordered."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from cenote.api.rows import EXTENT, OBJECT
from cenote.api.types import MatchResult
from cenote.connectors.vllm.counters import Counters
from cenote.connectors.vllm.groups import Group, Grouping
from cenote.connectors.vllm.keys import object_keys
from cenote.connectors.vllm.options import make_options
from cenote.connectors.vllm.orders import Reports, SpaceName, StageReport
from cenote.connectors.vllm.scheduler import StoreScheduler
from waiting import wait_until

GROUPING = Grouping((Group(0, "full", 16),), 16, 16)
HASHES = [bytes([i]) * 32 for i in range(6)]


@dataclass
class Lease:
    """Of AcquiredLease, what is looked at."""

    present: Any
    lease_id: int = 7
    ttl_s: float = 60.0

    segments: Sequence[int] = ()
    """Of the keys that are present, in turn."""

    @property
    def prefix_keys(self) -> int:
        return int(np.append(self.present, False).argmin())

    @property
    def objects(self) -> bytes:
        rows = np.zeros(len(self.present), OBJECT)
        rows["extents"] = self.present
        return rows.tobytes()

    @property
    def extent_rows(self) -> Any:
        rows = np.zeros(int(np.count_nonzero(self.present)), EXTENT)
        rows["segment"] = np.resize(np.array(self.segments or [1]), len(rows))
        return rows


def one_host() -> Any:
    """Segment 1 is memory of this host, 2 an SSD of it, 3 memory of another one, 4 its SSD."""
    peers = SimpleNamespace(
        on_ssd=frozenset({2, 4}),
        nodes={7: SimpleNamespace(boot_id="here"), 8: SimpleNamespace(boot_id="there")},
        node_by_segment={1: 7, 2: 7, 3: 8, 4: 8},
    )
    state = SimpleNamespace(peers=peers)
    return SimpleNamespace(
        session=SimpleNamespace(state=state, identity=SimpleNamespace(boot_id="here"))
    )


@dataclass
class Space:
    """A namespace, and the way to it."""

    keys: set[bytes] = field(default_factory=set)
    error: Exception | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    asked: int = 0
    leases: int = 0
    client: object = "a client"
    calls: Any = field(default_factory=one_host)
    segments: Sequence[int] = ()
    hopeful: bool = True

    def start(self) -> None: ...
    def close(self) -> None: ...

    def space(self, space: SpaceName, deadline_s: float) -> Space:
        assert self.gate.wait(30.0)
        if self.error is not None:
            raise self.error
        return self

    def acquire(self, keys: Sequence[bytes], ttl_s: float, **options: object) -> Lease:
        self.asked += 1
        self.leases += 1
        return Lease(np.array([key in self.keys for key in keys]), segments=self.segments)

    def match(self, keys: Sequence[bytes], **options: object) -> MatchResult:
        return MatchResult(0, np.array([key in self.keys for key in keys]))

    def release(self, lease: Lease) -> None:
        self.leases -= 1


@dataclass
class Request:
    request_id: str = "r"
    num_tokens: int = 100
    num_prompt_tokens: int = 100
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    block_hashes: Sequence[bytes] = field(default_factory=lambda: list(HASHES))


class Half:
    """The scheduler's half, its fake pool, and a worker that brings all that is ordered."""

    def __init__(self, pool: Space, grouping: Grouping, ranks: int) -> None:
        self.pool = pool
        self.counters = Counters()
        self.ranks = ranks
        self.half = StoreScheduler(
            make_options({"lookup_deadline_s": 30.0, "load_deadline_s": 30.0}),
            grouping,
            list(range(ranks)),
            ranks,
            {group.number: 1000 for group in grouping.groups},
            lambda: SpaceName("vllm/x", b"x"),
            cast(Any, pool),
            self.counters,
        )
        self.half.start()
        wait_until(lambda: self.half.take_orders().space, what="the namespace's name")

    def ask(self, request: Request, have_tokens: int = 0) -> int:
        """Ask until there is an answer, doing what is ordered meanwhile."""

        def answer() -> tuple[int] | None:
            tokens = self.half.matched_tokens(request, have_tokens)
            if tokens is not None:
                return (tokens,)
            self.work()
            return None

        return wait_until(answer, what="an answer")[0]  # type: ignore[index]

    def work(self, missing: frozenset[tuple[int, int]] = frozenset()) -> None:
        orders = self.half.take_orders()
        for _ in range(self.ranks):
            staged = {order.ticket: StageReport(1, missing) for order in orders.stages}
            self.half.reported(Reports(staged))


def store(pool: Space, blocks: int, ranks: int = 1) -> None:
    pool.keys |= set(object_keys(HASHES[:blocks], [0] * blocks, list(range(ranks))))
    pool.gate.set()
