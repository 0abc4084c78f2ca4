"""Objects seen in place: memoryviews of the pool's own memory, held by a lease without an end."""

from __future__ import annotations

import math
import weakref
from contextlib import suppress
from types import TracebackType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    BufferInUse,
    CenoteError,
    InvalidArgument,
    NamespaceReset,
    StaleLocation,
)
from cenote.api.keys import digest_keys
from cenote.api.rows import EXTENT, OBJECT, ObjectStatus
from cenote.api.types import AcquiredLease, GetStatus
from cenote.transport.base import ExtentArray, Seen

from .calls import VIEW, Calls
from .driver import BlockingDriver
from .plan.asking import reopening
from .plan.counters import FETCH, LOOKUP, READ
from .plan.pieces import place_replicas
from .plan.reads import ReadOptions, acquire, read_objects
from .plan.state import Call
from .plan.steps import Plan

__all__ = ["View"]


class View:
    """Made by `Namespace.view`; a context manager whose value is a list of memoryviews."""

    def __init__(
        self,
        calls: Calls,
        driver: BlockingDriver,
        keys: list[bytes],
        copy: bool,
        deadline_s: float | None,
    ) -> None:
        self._calls = calls
        self._driver = driver
        self._keys = keys
        self._copy = copy
        self._deadline_s = deadline_s
        self._views: list[memoryview | None] = []
        self._exporters: list[weakref.ref[NDArray[np.uint8]]] = []
        self._lease_id = 0
        self._seen: list[Seen] = []
        """Claims of what is looked at."""
        self.copied_count = 0
        """How many of the objects were copied, since they can't be seen from here."""

    def __enter__(self) -> list[memoryview | None]:
        call = self._calls.begin(self._deadline_s, VIEW)
        if self._keys:
            try:
                self._driver.run(call, reopening(call, lambda: self._open(call)))
            except BaseException:
                self._close()
                raise
        return self._views

    def _open(self, call: Call) -> Plan[None]:
        self._close()  # what an attempt of the generation before held, and saw
        self._views = [None] * len(self._keys)
        self.copied_count = 0
        space, session = self._calls.space, self._calls.session
        digests = digest_keys(self._keys, space.seed)
        ttl_ms = int(call.state.limits.session_ttl_s * 1000)
        counters = space.counters
        try:
            reply, hold = yield from acquire(call, digests, ttl_ms, hold=True)
        except CenoteError as error:
            counters.fail(READ, LOOKUP, error, len(self._keys))
            raise
        self._lease_id = hold.lease_id if hold else 0
        objects = np.frombuffer(reply.objects, OBJECT)
        extents = np.frombuffer(reply.extents, EXTENT)
        unseen = self._look(call, objects, extents)
        absent = int(np.count_nonzero(objects["status"] == ObjectStatus.MISS))
        counters.misses += absent
        counters.hits += len(objects) - absent - len(unseen)
        if not unseen:
            return
        if not self._copy:
            refusal = InvalidArgument(
                f"key {unseen[0]} and {len(unseen) - 1} more can't be seen from here",
                remedy="view on a host that holds a replica, or allow copy=True",
            )
            counters.fail(READ, FETCH, refusal, len(unseen))
            raise refusal
        lease = AcquiredLease(
            namespace=space.name,
            namespace_id=space.namespace_id,
            generation=space.generation,
            digest_seed=space.seed,
            lease_id=self._lease_id,
            ttl_s=math.inf,
            end_s=math.inf,
            clock_id=session.clock_id,
            digests=digests,
            objects=reply.objects,
            extents=reply.extents,
        )
        wanted = digest_keys([self._keys[i] for i in unseen], space.seed)
        options = ReadOptions(lease=lease, verify=self._calls.config.verify)
        outcome = yield from read_objects(call, wanted, None, options)
        assert outcome.values is not None
        for row, position in enumerate(unseen):
            if outcome.statuses[row] == GetStatus.FAILED:
                raise outcome.errors[int(outcome.codes[row])]
            value = outcome.values[row]
            if value is not None:
                self._views[position] = memoryview(value)
                self.copied_count += 1

    def _look(self, call: Call, objects: np.ndarray, extents: np.ndarray) -> list[int]:
        """Map what can be mapped; positions of hits that can't."""
        hits = np.flatnonzero(objects["status"] != ObjectStatus.MISS)
        if not len(hits):
            return []
        found = objects[hits]
        sizes = found["size"].astype(np.int64)
        placement = place_replicas(
            extents, found["extents"].astype(np.int64), found["replicas"].astype(np.int64), sizes
        )
        nodes = call.state.peers.nodes_of(placement.extents["segment"])
        usable = (placement.extents["length"].astype(np.int64) == sizes[placement.owner]) & (
            found["status"] == ObjectStatus.LEASED
        )[placement.owner]
        done = np.zeros(len(hits), np.bool_)
        avoid = call.avoid | call.state.peers.down
        for node in dict.fromkeys(nodes[usable].tolist()):
            if node < 0 or node in avoid:
                continue
            at = np.flatnonzero(usable & (nodes == node) & ~done[placement.owner])
            rows, first = np.unique(placement.owner[at], return_index=True)
            views = self._see(call, node, placement.extents[at[first]])
            for row, view in zip(rows.tolist(), views, strict=True):
                if view is not None:
                    self._views[int(hits[row])] = self._tracked(view)
                    done[row] = True
        unseen: list[int] = hits[~done].tolist()
        return unseen

    def _tracked(self, mapped: memoryview) -> memoryview:
        """The same memory by way of an array that lives as long as anything made from the view.

        Releasing a memoryview says nothing about slices of it, nor about `np.frombuffer(view)`.
        """
        exporter = np.frombuffer(mapped, np.uint8)
        self._exporters.append(weakref.ref(exporter))
        return memoryview(cast("Any", exporter))

    def _see(self, call: Call, node: int, extents: ExtentArray) -> list[memoryview | None]:
        try:
            channel = self._calls.session.channel(node, call.remaining_s())
            seen = channel.view(extents, self._lease_id, call.remaining_s())
        except (NamespaceReset, StaleLocation):
            return [None] * len(extents)
        except CenoteError as error:
            call.node_failed(node, error)
            return [None] * len(extents)
        views = seen.views
        self._seen.append(seen)
        return views

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        exported = self._close()
        if exported and error is None:
            raise BufferInUse(
                f"{exported} of {len(self._keys)} views are still exported",
                remedy="drop arrays and memoryviews made from a view before its block ends",
            )

    def _close(self) -> int:
        """Give the views back; how many of them something still exports."""
        for view in self._views:
            if view is not None:
                with suppress(BufferError):  # exported: seen below
                    view.release()
        self._views.clear()
        state, lease_id = self._calls.session.state, self._lease_id
        self._lease_id = 0
        claims, self._seen = self._seen, []
        for claim in claims:
            claim.views = []
        alive = [exporter for each in self._exporters if (exporter := each()) is not None]
        self._exporters.clear()

        def ended() -> None:
            for claim in claims:
                claim.end()
            state.release_hold(lease_id)

        if not alive:
            ended()
            return 0
        left = [len(alive)]
        session = self._calls.session
        session.exports += len(alive)

        def gone() -> None:
            left[0] -= 1
            session.exports -= 1
            if not left[0]:
                ended()

        for exporter in alive:
            weakref.finalize(exporter, gone).atexit = False
        return len(alive)
