"""StoreService over gRPC: what a daemon tells administrators."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, cast, final

from cenote.api.errors import InvalidArgument
from cenote.api.rows import KEY_BYTES_MAX
from cenote.v1 import common_pb2
from cenote.v1 import store_pb2 as pb

from .segments import LocalSegments
from .server import DataCounters

__all__ = ["STORE_SERVICE", "StoreGrpc"]

STORE_SERVICE: Final = "cenote.v1.StoreService"
LIST_LIMIT_DEFAULT: Final = 1_000
LIST_LIMIT_MAX: Final = 1_000_000
_ENTRIES_PER_MESSAGE: Final = 512


@final
class StoreGrpc:
    """The servicer. `counters` and `session_count` are those of the data server."""

    def __init__(
        self,
        segments: LocalSegments,
        counters: Callable[[], DataCounters],
        session_count: Callable[[], int],
    ) -> None:
        self._segments = segments
        self._counters = counters
        self._session_count = session_count

    async def GetStoreStatus(
        self, request: pb.GetStoreStatusRequest, context: Any
    ) -> pb.GetStoreStatusResponse:
        """What is served, and how much was."""
        counters = self._counters()
        return pb.GetStoreStatusResponse(
            node_id=self._segments.node_id,
            epoch=self._segments.epoch,
            segments=[
                pb.SharedSegment(
                    segment_id=segment.segment_id,
                    size_bytes=segment.size_bytes,
                    ready_bytes=segment.ready_bytes,
                    incarnation=segment.incarnation,
                    tier=cast("common_pb2.Tier", segment.tier),
                )
                for segment in self._segments.all()
            ],
            sealed_slots=sum(segment.table.sealed for segment in self._segments.all()),
            sessions=self._session_count(),
            read_bytes=counters.read_bytes,
            written_bytes=counters.written_bytes,
        )

    async def ListSlots(
        self, request: pb.ListSlotsRequest, context: Any
    ) -> AsyncIterator[pb.ListSlotsResponse]:
        """Keys of a namespace's generation, in no order. Raises InvalidArgument."""
        limit = request.limit or LIST_LIMIT_DEFAULT
        if limit > LIST_LIMIT_MAX:
            raise InvalidArgument(f"at most {LIST_LIMIT_MAX} slots are listed at once")
        if len(request.key_prefix) > KEY_BYTES_MAX:
            raise InvalidArgument(f"a key has at most {KEY_BYTES_MAX} bytes")
        entries = self._entries(request, limit)
        while True:
            # A look at many slots takes a while: not on the loop.
            some = await asyncio.to_thread(_take, entries)
            if some:
                yield pb.ListSlotsResponse(entries=some)
            if len(some) < _ENTRIES_PER_MESSAGE:
                return

    def _entries(self, request: pb.ListSlotsRequest, limit: int) -> Iterator[pb.SlotEntry]:
        for segment in self._segments.all():
            for found in segment.table.list_keys(
                request.namespace_id, request.generation, request.key_prefix, limit
            ):
                limit -= 1
                yield pb.SlotEntry(
                    key=found.key,
                    digest=found.digest,
                    size_bytes=found.object_size_bytes,
                    version=common_pb2.Version(epoch=found.epoch, seq=found.seq),
                    segment_id=segment.segment_id,
                    replica=found.replica,
                )


def _take(entries: Iterator[pb.SlotEntry]) -> list[pb.SlotEntry]:
    return list(itertools.islice(entries, _ENTRIES_PER_MESSAGE))
