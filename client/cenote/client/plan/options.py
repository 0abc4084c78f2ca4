"""What a put asks for."""

from __future__ import annotations

from dataclasses import dataclass

from cenote.v1 import common_pb2, master_pb2

__all__ = ["PutOptions"]


@dataclass(frozen=True, slots=True)
class PutOptions:
    """What a put asks for; see `Namespace.put_batch`."""

    replicas: int = 1
    min_replicas: int = 1
    durability: int = 0
    local_first: bool = False
    chain: bool = False
    ttl_ms: int = 0
    pin: bool = False
    dedup: bool = False
    """Bytes that the namespace holds already are not moved: see `aliases`."""

    def takes_spares(self) -> bool:
        """Whether it is content with what spare extents are."""
        return (
            self.replicas <= 1
            and self.min_replicas <= 1
            and not (self.durability or self.local_first or self.ttl_ms or self.pin or self.dedup)
        )

    def message(self, avoid_node_ids: bytes = b"") -> master_pb2.PutOptions:
        """As it is sent."""
        return master_pb2.PutOptions(
            replicas=self.replicas,
            min_replicas=self.min_replicas,
            durability=self.durability,  # type: ignore[arg-type]
            tier=common_pb2.TIER_DRAM,
            local_first=self.local_first,
            ttl_ms=self.ttl_ms,
            pin=self.pin,
            chain=self.chain,
            avoid_node_ids=avoid_node_ids,
        )
