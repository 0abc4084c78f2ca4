"""The conversation in which a daemon attaches: sums of its slot tables, and inventory where asked.

    sums of all blocks           ->
                                 <-  attached, or: the sums of these blocks differ
    sums, inventory of those     ->
                                 <-  attached, or once more: the master's table changed meanwhile

A table of a million slots is summed up in a fifteenth of the time that its inventory takes, and
after a change of leader the two nearly always agree. Where they don't in the end, or nothing is
to be compared (another pool's master), the inventory is sent as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.codec import unpack_rows
from cenote.api.errors import InternalError
from cenote.api.rows import BLOCK
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb

from .claims import claim_rows
from .master_link import MasterLink
from .segments import LocalSegments

__all__ = ["AgentIdentity", "Attacher"]

SLICE_S: Final = 10.0
ATTACH_S: Final = 60.0
"""For the last slice: the master goes through the whole inventory then."""
SLOTS_PER_BLOCK: Final = 256
"""Few enough that what was evicted lately costs little inventory, enough that sums are short."""
SUMMED_TRIES: Final = 3
"""Then the whole inventory is sent, whatever the sums say."""

Blocks = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """What the master is told of this daemon."""

    node_name: str
    node_uuid: bytes
    boot_id: str
    failure_domain: str
    process_id: int
    server_version: str
    start_number: int = 0
    """Rises with each start of this node's daemon."""
    endpoints: Sequence[common_pb2.Endpoint] = ()
    """A list may change later: then the master is told with the next heartbeat."""
    credentials: common_pb2.Credentials = field(default_factory=common_pb2.Credentials)


@final
class Attacher:
    """Attaches `segments`, again and again; one thread. `stopping` ends an attach under way."""

    def __init__(
        self,
        identity: AgentIdentity,
        segments: LocalSegments,
        stopping: threading.Event,
        slots_per_block: int = SLOTS_PER_BLOCK,
    ) -> None:
        self._identity = identity
        self._segments = segments
        self._stopping = stopping
        self._slots_per_block = slots_per_block
        self._attempts = 0
        self._master_pool_id = b""
        self.claiming: set[bytes] = set()
        """Sessions with claims that the last attach told of."""
        self.told_endpoints: tuple[common_pb2.Endpoint, ...] = ()
        """That the master knows."""
        self.told_slots = 0
        """Rows of inventory that the last attach told of."""

    def attach(
        self, link: MasterLink, master_pool_id: bytes, *, other_pool: bool
    ) -> pb.AttachResponse:
        """The master's answer to all of it. Raises CenoteError.

        `master_pool_id`: what its hello named. `other_pool`: its metadata are not those of the pool
        that this daemon belongs to.
        """
        self.told_slots = 0
        self._master_pool_id = master_pool_id
        told = np.zeros(0, BLOCK)
        for _ in range(0 if other_pool else SUMMED_TRIES):
            response = self._send(link, self._summed(told), self._parts_of(told))
            if not response.wanted_blocks:
                return response
            wanted = unpack_rows(response.wanted_blocks, BLOCK, "wanted_blocks")
            told = np.unique(np.concatenate((told, wanted)))
        first = self._first(other_pool=other_pool)
        first.segments.extend(segment.info() for segment in self._segments.all())
        parts = (s.table.inventory(s.index) for s in self._segments.all())
        return self._send(link, first, (rows for part in parts for rows in part))

    # ---- messages -----------------------------------------------------------------------------

    def _send(
        self, link: MasterLink, first: pb.AttachRequest, parts: Iterator[NDArray[np.void]]
    ) -> pb.AttachResponse:
        request, response = first, pb.AttachResponse()
        for rows, more in _slices(parts):
            if self._stopping.is_set():
                raise InternalError("stopped while attaching")
            if rows is not None:
                request.inventory = rows.tobytes()
                self.told_slots += len(rows)
            request.more = more
            response = link.attach(request, SLICE_S if more else ATTACH_S)
            request = self._request(request.slice + 1)
        return response

    def _summed(self, told: Blocks) -> pb.AttachRequest:
        first = self._first(other_pool=False)
        for segment in self._segments.all():
            info = segment.info()
            info.slot_sums = segment.table.sums(self._slots_per_block).tobytes()
            first.segments.append(info)
        first.slots_per_block = self._slots_per_block
        first.told_blocks = told.tobytes()
        return first

    def _parts_of(self, told: Blocks) -> Iterator[NDArray[np.void]]:
        for segment in self._segments.all():
            here = told["block"][told["segment_index"] == segment.index].astype(np.int64)
            if len(here):
                ranges = _ranges(here * self._slots_per_block, self._slots_per_block)
                yield from segment.table.inventory(segment.index, ranges)

    def _first(self, *, other_pool: bool) -> pb.AttachRequest:
        """The first slice, but for its segments and inventory."""
        segments = self._segments
        self._attempts += 1
        first = self._request(0)
        if other_pool:
            segments.forget_ids()
        if segments.pool.pool_id:
            first.pool.CopyFrom(segments.pool.told(namespaces=other_pool))
        claims = segments.claims.older()
        first.claims = claim_rows(claims, {s.index: s.size_bytes for s in segments.dram()})
        self.claiming = {claim.session_id for claim in claims}
        return first

    def _request(self, number: int) -> pb.AttachRequest:
        identity = self._identity
        if not number:
            self.told_endpoints = tuple(identity.endpoints)
        return pb.AttachRequest(
            credentials=identity.credentials,
            node_name=identity.node_name,
            node_uuid=identity.node_uuid,
            boot_id=identity.boot_id,
            failure_domain=identity.failure_domain,
            endpoints=self.told_endpoints,
            last_epoch=self._segments.epoch,
            process_id=identity.process_id,
            server_version=identity.server_version,
            start_number=identity.start_number,
            attempt=self._attempts,
            slice=number,
            master_pool_id=self._master_pool_id,
            ticket_key=self._segments.ticket_key,
        )


def _ranges(starts: NDArray[np.int64], length: int) -> list[tuple[int, int]]:
    """(first, end) of ranges that begin at these places, sorted, neighbours joined."""
    heads = np.flatnonzero(np.r_[True, starts[1:] != starts[:-1] + length])
    tails = np.r_[heads[1:], len(starts)] - 1
    return list(zip(starts[heads].tolist(), (starts[tails] + length).tolist(), strict=True))


def _slices(
    parts: Iterator[NDArray[np.void]],
) -> Iterator[tuple[NDArray[np.void] | None, bool]]:
    """Each part and whether more follow; one empty slice where there is none."""
    held: NDArray[np.void] | None = None
    for part in parts:
        if held is not None:
            yield held, True
        held = part
    yield held, False
