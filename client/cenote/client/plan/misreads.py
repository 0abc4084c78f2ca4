"""Bytes that are not what was put: told from a location that was only stale, and reported.

An object that was evicted or replaced between the lookup and the read has another version, or
another place, when the master is asked again. Where the second answer is the first one, and the
bytes are wrong once more, they are wrong where they lie: the master drops that replica, so that the
next reader has another one, or a miss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cenote.api.rows import EXTENT_STRUCT
from cenote.v1 import master_pb2 as pb

from .asking import ask_master
from .state import Call
from .steps import Plan

if TYPE_CHECKING:
    from .fetches import Fetch

__all__ = ["Misreads"]

_Place = tuple[int, int, int, int]
"""(epoch, seq, segment, offset)."""


class Misreads:
    """Those of one read call."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[int, _Place] = {}
        """Position in the user's batch -> what was read there and was wrong."""

    def report_repeated(self, call: Call, fetch: Fetch, digest_of: list[bytes]) -> Plan[None]:
        """Have the master drop what this fetch misread, and an earlier one as well.

        `digest_of`: of each position in the user's batch that `fetch.misread` speaks of.
        """
        found: dict[int, tuple[list[bytes], list[bytes], list[bytes]]] = {}
        for digest, (row, (node, segment, offset)) in zip(
            digest_of, fetch.misread.items(), strict=True
        ):
            record = fetch.objects[row]
            place = int(record["epoch"]), int(record["seq"]), segment, offset
            position = int(fetch.positions[row])
            if self._seen.get(position) == place:
                digests, objects, places = found.setdefault(node, ([], [], []))
                digests.append(digest)
                objects.append(record.tobytes())
                places.append(EXTENT_STRUCT.pack(segment, 0, offset, int(record["size"])))
            self._seen[position] = place
        for node, (digests, objects, places) in found.items():
            request = pb.ReportFailureRequest(
                node_id=node,
                session_id=call.state.session_id,
                what="it holds other bytes than were put",
                misread_keys=call.key_batch(b"".join(digests)),
                misread_objects=b"".join(objects),
                misread_extents=b"".join(places),
            )
            yield from ask_master(call, "report_failure", request, pb.ReportFailureResponse)
            call.space.counters.misreads += len(digests)
            call.avoid.add(node)  # in this call: it may take until its readers are done
            call.failed.add(node)
