"""What a session may show daemons: its ticket, and the proofs of its grants."""

from __future__ import annotations

from typing import Final, NamedTuple, final

from cenote.v1 import master_pb2

__all__ = ["GRANTS_MAX", "NO_MAPPING", "Access", "ProvenGrant"]

GRANTS_MAX: Final = 8192
"""Older ones are forgotten: their space is sealed, or given back."""
NO_MAPPING: Final = "the token is for some namespaces only, and memory has those of others, too"


class ProvenGrant(NamedTuple):
    """A grant as daemons are shown it."""

    namespace_id: int
    extents: bytes
    """EXTENT rows, as the master sent them."""
    signatures: bytes


@final
class Access:
    """Safe from several threads. Empty where the pool asks nobody who he is."""

    def __init__(self) -> None:
        self.ticket = b""
        self.no_mapping = False
        """Neither shared memory nor RDMA is for this session."""
        self.grants: dict[int, ProvenGrant] = {}
        """Oldest first."""

    def greeted(self, reply: master_pb2.HelloResponse) -> None:
        """What a master's hello says of it."""
        self.ticket, self.no_mapping = reply.ticket, reply.no_mapping

    def keep(self, reply: master_pb2.PutStartResponse, namespace_id: int) -> None:
        """The grants that this session was given."""
        for grant_id, extents, signatures in (
            (reply.grant_id, reply.extents, reply.grant_signatures),
            (reply.spare_grant_id, reply.spare_extents, reply.spare_signatures),
        ):
            if signatures:
                self.grants[grant_id] = ProvenGrant(namespace_id, extents, signatures)
        while len(self.grants) > GRANTS_MAX:
            self.grants.pop(next(iter(self.grants), 0), None)
