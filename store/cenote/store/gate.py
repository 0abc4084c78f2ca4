"""Who is let in to the data, and to what: a daemon with a token of its own asks everybody.

A connection shows its session's ticket, which the master signed (`cenote.security.tickets`). What
it may touch then:

    whose ticket says `may_map`   descriptors, RDMA; reads of anything
    others                        reads of what is sealed or granted in their namespaces (`holders`)
    everybody who writes          writes to extents of a grant that was proven here, seals of such

A daemon copies from others with a ticket of its own, of the role STORE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError, PermissionDenied, Unauthenticated, Unavailable
from cenote.rpc.grpc_auth import TICKET_METADATA_KEY, CredentialsInterceptor
from cenote.runtime.log import get_logger
from cenote.security.refusals import Refusals
from cenote.security.tickets import check_proof, keys_of, open_ticket, proofs_of
from cenote.security.tokens import Role, covers
from cenote.v1 import store_pb2

from .holders import Holders
from .segment import Segment, SegmentSet
from .segments import LocalSegments
from .slot_format import SLOT_RECORD

__all__ = ["OPEN", "PORTS", "Gate", "Pass"]

OPEN: Final = (
    "the data server is open to the network, and asks nobody who he is (--insecure): give"
    " --token-file, and --tokens to the master"
)
PORTS: Final = ("tcp", "unix", "grpc")
_DENIED: Final = PermissionDenied.code

_log = get_logger("cenote.security")


@final
class Gate:
    """Of a daemon. Safe from several threads."""

    def __init__(self, segments: SegmentSet) -> None:
        self._segments = segments
        self.holders = Holders(segments)
        self.refusals = Refusals(_log, PORTS)
        self._packed = b""
        self._keys: Mapping[int, bytes] = {}
        self._periods: dict[int, int] = {}
        """In which order keys came to be known, by their ids."""

    # ---- keys ---------------------------------------------------------------------------------

    def learn(self, packed: bytes) -> None:
        """The keys of the leader that this daemon follows."""
        if packed == self._packed:
            return
        keys = keys_of(packed)
        if not keys:
            _log.warning("the master gave no keys, so nobody is let in: has it --tokens?")
        for key_id in keys:
            self._periods.setdefault(key_id, len(self._periods) + 1)
        self._keys = keys
        self._packed = packed

    @property
    def period(self) -> int:
        """Of the key that is signed with now, as far as is known here."""
        current = list(self._keys)[-2:]
        return self._periods[current[0]] if current else 0

    # ---- who it is ----------------------------------------------------------------------------

    def admit(self, ticket: bytes, session_id: bytes | None = None) -> Pass:
        """What a connection of this session (None: of any) may do.

        Raises Unauthenticated, and Unavailable where this daemon can't tell yet.
        """
        if not self._keys:
            raise Unavailable(
                "this daemon has no keys to check tickets with, yet: it has not attached to a"
                " master, or to one that asks for no tokens"
            )
        opened = open_ticket(ticket, self._keys)
        if session_id is not None and opened.session_id != session_id:
            raise Unauthenticated("the ticket is another session's")
        return Pass(self, opened)

    def interceptors(self) -> tuple[CredentialsInterceptor]:
        """For the daemon's gRPC server."""
        return (CredentialsInterceptor(self.admit_call, self.enter_call),)

    def admit_call(
        self,
        _method: str,
        metadata: Sequence[tuple[str, Any]],
        peer: str,
        _identities: Sequence[str] = (),
    ) -> Pass:
        """Who makes a gRPC call. Raises Unauthenticated and Unavailable."""
        ticket = next((value for key, value in metadata if key == TICKET_METADATA_KEY), b"")
        try:
            return self.admit(ticket)
        except CenoteError as error:
            self.refusals.note("grpc", error, peer)
            raise

    def enter_call(self, caller: Pass, _method: str, request: Any) -> None:
        """A gRPC call begins. Raises PermissionDenied."""
        if isinstance(request, store_pb2.ListSlotsRequest) and not caller.covers(
            request.namespace_id
        ):
            error = PermissionDenied(f"that namespace is not one of token {caller.holder}")
            self.refusals.note("grpc", error, caller.holder)
            raise error

    def name_of(self, namespace_id: int) -> str:
        """ "" where that is not known here."""
        return self._segments.namespace_name(namespace_id)

    def segment(self, segment_id: int) -> Segment | None:
        return self._segments.by_id(segment_id)

    # ---- grants -------------------------------------------------------------------------------

    def prove(
        self,
        session_id: bytes,
        grant_id: int,
        namespace_id: int,
        rows: NDArray[np.void],
        packed_proofs: bytes,
    ) -> None:
        """A session shows a grant. Raises PermissionDenied and GrantRevoked."""
        keys = dict(reversed(list(self._keys.items())))  # the present one is near the end
        proven, period = [], 0
        ids = rows["segment"]
        for segment_id, tag in proofs_of(packed_proofs).items():
            if self._segments.by_id(segment_id) is None:
                continue
            part = rows[ids == segment_id]
            key_id = check_proof(keys, tag, session_id, grant_id, namespace_id, part.tobytes())
            period = self._periods[key_id]
            proven.append(part)
        if proven:
            self.holders.show(session_id, grant_id, namespace_id, np.concatenate(proven), period)

    def take_up(self, segments: LocalSegments) -> None:
        """What is sealed already, of an earlier life; and from now on what is copied here."""
        for segment in segments.all():
            parts = list(segment.table.inventory(segment.index))
            if parts:
                rows = np.concatenate(parts)
                order = np.lexsort((rows["seq"], rows["epoch"]))  # the latest wins
                names = ("namespace_id", "offset", "length")
                columns = (rows[name][order].tolist() for name in names)
                for namespace_id, offset, length in zip(*columns, strict=True):
                    self.holders.sealed(segment, namespace_id, offset, length, 0)
            segment.table.on_placed = partial(self._placed, segment)

    def _placed(self, segment: Segment, record: bytes) -> None:
        row = np.frombuffer(record, SLOT_RECORD)[0]
        place = int(row["offset"]), int(row["length"])
        self.holders.sealed(segment, int(row["namespace_id"]), *place, self.period)

    def sealed(self, namespace_id: int, rows: NDArray[np.void]) -> None:
        """These SEAL rows were written into slots."""
        period = self.period
        columns = (rows[name].tolist() for name in ("segment", "offset", "length"))
        for segment_id, offset, length in zip(*columns, strict=True):
            segment = self._segments.by_id(segment_id)
            if segment is not None:
                self.holders.sealed(segment, namespace_id, offset, length, period)


@final
class Pass:
    """What one session may do."""

    def __init__(self, gate: Gate, ticket: store_pb2.AccessTicket) -> None:
        self._gate = gate
        self.holder: str = ticket.holder
        self.session_id: bytes = ticket.session_id
        self.role = Role(ticket.role)
        self._namespaces = tuple(ticket.namespaces)
        self.is_store = self.role is Role.STORE
        self.may_map = ticket.may_map or self.is_store
        self.reads_all = self.is_store or "*" in self._namespaces
        self.may_write = self.role >= Role.WRITE and not self.is_store
        self._mine: set[int] = set()

    def covers(self, namespace_id: int) -> bool:
        """Whether the namespace of this id is one of the session's."""
        if namespace_id in self._mine or self.reads_all:
            return True
        name = self._gate.name_of(namespace_id)
        if not name or not covers(self._namespaces, name):
            return False
        self._mine.add(namespace_id)
        return True

    def may_read(self, segment: Segment, offset: int, length: int) -> bool:
        """Whether all of these bytes are of namespaces of the session's."""
        if self.reads_all:
            return True
        found = self._gate.holders.namespaces_of(segment, offset, length)
        return found <= self._mine or all(map(self.covers, found))

    def deny_reads(
        self, rows: NDArray[np.void], statuses: NDArray[np.uint8], segments: SegmentSet
    ) -> int:
        """Set the status of EXTENT rows that it may not read; how many."""
        if self.reads_all:
            return 0
        found = self._gate.holders.namespaces_in(rows[statuses == 0])
        if found <= self._mine or all(map(self.covers, found)):
            return 0
        denied = 0
        for i, (segment_id, _, offset, length) in enumerate(rows.tolist()):
            segment = segments.by_id(segment_id)
            if segment is None or statuses[i]:
                continue
            if not self.may_read(segment, offset, length):
                statuses[i] = _DENIED
                denied += 1
        return denied

    def may_write_at(self, grant_id: int, rows: NDArray[np.void]) -> bool:
        """Whether these EXTENT rows are of a grant that it has shown."""
        return self._gate.holders.may_write(self.session_id, grant_id, rows)

    def may_write_one(self, grant_id: int, segment_id: int, offset: int, length: int) -> bool:
        """The same for one extent."""
        segment = self._gate.segment(segment_id)
        holders = self._gate.holders
        return segment is not None and holders.may_write_one(
            self.session_id, grant_id, segment, offset, length
        )

    def may_seal(self, namespace_id: int, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which of these SEAL rows it may have written into slots of this namespace."""
        if not self.may_write or not self.covers(namespace_id):
            return np.zeros(len(rows), np.bool_)
        if self.may_map:
            return np.ones(len(rows), np.bool_)
        columns = (rows[name].tolist() for name in ("segment", "slot", "offset", "length"))
        seals = self._gate.holders.may_seal
        return np.fromiter(
            (seals(namespace_id, row) for row in zip(*columns, strict=True)), np.bool_, len(rows)
        )
