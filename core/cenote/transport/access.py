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
    proofs: bytes


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

    def keep(self, grant_id: int, namespace_id: int, extents: bytes, proofs: bytes) -> None:
        """A grant that this session was given."""
        if proofs:
            self.grants[grant_id] = ProvenGrant(namespace_id, extents, proofs)
            while len(self.grants) > GRANTS_MAX:
                self.grants.pop(next(iter(self.grants), 0), None)
