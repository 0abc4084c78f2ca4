"""Objects whose bytes the pool holds already: shown instead of sent.

    put_start with content digests --> DEDUPLICATED: proof to the daemon --> ticket --> commit, seal
                                                          | refused
                                                          +--> started anew, without digests

The digest lets the master find the bytes, the proof shows the daemon that we have them, too: see
`cenote.api.contents`. From there on it is a put like any other: decided by the master, sealed by
the daemons, each reference in a slot of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.contents import NO_CONTENT, TICKET_BYTES, proof_key
from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    GrantRevoked,
    ProtocolError,
    StaleEpoch,
    StaleLocation,
    error_from_code,
)
from cenote.api.rows import EXTENT, PROOF, PROOF_FAST, PROOF_STRONG, PUT, PutStatus
from cenote.transport.proofs import ProofBatch
from cenote.v1 import master_pb2 as pb

from .budgets import node_failed
from .granted import Granted
from .grants import Grant
from .peers import groups_by_node
from .pieces import place_replicas
from .state import Call
from .steps import HashWide, Plan, ProofPart, Proofs
from .stores import Store

__all__ = ["AliasStore", "Contents", "aliases_of"]

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

PROOFS_AT_ONCE_MAX: Final = 4096


@final
class Contents:
    """Of each key of a batch the digest of its bytes; zeros: these are sent, whoever has them."""

    def __init__(self, packed: bytes) -> None:
        self._rows = np.frombuffer(packed, f"V{len(NO_CONTENT)}").copy()
        self._were_refused = False

    def turns(self, todo: I64) -> Iterator[I64]:
        """`todo` in at most two turns: bytes that come several times in a batch are sent with the
        first, and referred to with the second."""
        _, first = np.unique(self._rows[todo], return_index=True)
        keep = np.zeros(len(todo), np.bool_)
        keep[first] = True
        yield todo[keep]
        if not keep.all():
            yield todo[~keep]

    def message(self, todo: I64) -> bytes:
        """For a PutStart of these."""
        return self._rows[todo].tobytes()

    def were_refused(self, positions: I64, *, failed: bool) -> bool:
        """There are no references for these; whether they are to be put at once. Where a node
        `failed` it is tried once more, maybe with another one; then their bytes are sent."""
        if not len(positions):
            return False
        tries_again = failed and not self._were_refused
        self._were_refused = True
        if not tries_again:
            self._rows[positions] = NO_CONTENT
        return not tries_again


def aliases_of(call: Call, reply: pb.PutStartResponse, lengths: I64) -> tuple[I64, Granted, U64]:
    """(positions in the request, what was granted for them, checksums of what lies there).

    `lengths`: payload bytes of each key of the request. Raises ProtocolError.
    """
    puts = np.frombuffer(reply.puts, PUT)
    at = np.flatnonzero(puts["status"] == PutStatus.DEDUPLICATED)
    checksums = np.frombuffer(reply.alias_checksums, "<u8")
    extents = np.frombuffer(reply.alias_extents, EXTENT)
    if len(checksums) != len(at) or not reply.alias_grant_id:
        raise ProtocolError(f"the master sent {len(checksums)} checksums for {len(at)} aliases")
    counts, replicas = (puts[name][at].astype(np.int64) for name in ("extents", "replicas"))
    placement = place_replicas(extents, counts, replicas, lengths[at])
    grant = Grant(reply.alias_grant_id, call.state.session_id)
    granted = Granted(grant, reply.epoch, placement, replicas, at)
    granted.named = False  # its commit says more than that of others: tickets
    return at, granted, checksums


class AliasStore(Store):
    """A grant whose extents hold the bytes already. Rows that are refused are left open."""

    _tickets: NDArray[np.void]

    def _move(self) -> Plan[U64]:
        """Show the bytes, each to the daemon of the first replica, instead of writing them."""
        call, placement = self.call, self.placement
        grant_id = self._grant.grant_id
        sizes = self.sizes.astype(np.uint64)
        # Where namespaces need not be of one mind only a cryptographic digest proves something.
        strong = bool(call.space.dedup_key)
        key = proof_key(grant_id) if strong else b""
        proofs: bytes = yield HashWide(self.pieces, sizes, grant_id, key)
        packed = np.frombuffer(proofs, "V16")
        self._tickets = np.zeros(len(self.keys), f"V{TICKET_BYTES}")
        refused = np.ones(len(self.keys), np.bool_)
        first = np.flatnonzero((placement.replica == 0) & ~self.lost)
        parts: list[ProofPart] = []
        members: list[I64] = []
        for node, where in groups_by_node(self.nodes[first]):
            some = first if where is None else first[where]
            for start in range(0, len(some), PROOFS_AT_ONCE_MAX):
                part = some[start : start + PROOFS_AT_ONCE_MAX]
                rows = np.zeros(len(part), PROOF)
                owner = placement.owner[part]
                for name in ("segment", "offset"):
                    rows[name] = placement.extents[name][part]
                rows["length"], rows["proof"] = sizes[owner], packed[owner]
                rows["kind"] = PROOF_STRONG if strong else PROOF_FAST
                budget_s = call.put_budget_s(node, int(sizes[owner].sum()))
                parts.append(ProofPart(node, ProofBatch(grant_id, rows.tobytes()), budget_s))
                members.append(owner)
        yield Proofs(parts)
        for proof, owner in zip(parts, members, strict=True):
            refused[owner] = self._refused(proof, owner)
        if self._cut:
            yield self._begin_another_session()
            raise self.last_error or GrantRevoked("this session was cut off")
        self.lost |= refused[placement.owner]
        assert self.checksums is not None
        return self.checksums

    def _refused(self, part: ProofPart, owner: I64) -> NDArray[np.bool_]:
        """Of which rows of this part there is no ticket."""
        error = part.error
        if error is None and part.statuses is not None:
            self._tickets[owner] = np.frombuffer(part.tickets, self._tickets.dtype)
            return np.asarray(part.statuses != 0)
        assert error is not None
        self._note(part.node_id, error)
        return np.ones(len(owner), np.bool_)

    def _note(self, node_id: int, error: CenoteError) -> None:
        self.last_error = error
        if isinstance(error, ClientClosed):
            raise error
        if isinstance(error, GrantRevoked):
            self._cut = True
        elif node_failed(error):
            self.call.node_failed(node_id, error)
            if self.call.remaining_s() <= 0:
                raise error
        elif not isinstance(error, StaleEpoch | StaleLocation):
            self.last_error = error_from_code(error.code, f"node {node_id} gave no ticket")

    def _name(self, request: pb.PutCommitRequest, rows: I64) -> None:
        """Say that a daemon has seen the bytes."""
        request.tickets = self._tickets[rows].tobytes()
