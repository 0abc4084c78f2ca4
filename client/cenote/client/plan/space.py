"""An open namespace, as the plans of one client see it: plain data, changed in place."""

from __future__ import annotations

from collections import deque
from typing import Final

from cenote.api.errors import InvalidArgument
from cenote.api.rows import DIGEST_BYTES
from cenote.client.locations import LocationCache
from cenote.v1 import common_pb2, master_pb2

from .counters import SpaceCounters
from .spares import Spares

__all__ = ["Space", "varint"]

_TOUCHES_MAX: Final = 16_384


def varint(value: int) -> bytes:
    """A protobuf varint."""
    if value < 128:
        return value.to_bytes(1, "little")
    parts = bytearray()
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


class Space:
    """An open namespace. A reset replaces generation and seed in place."""

    __slots__ = (
        "chain_touches",
        "counters",
        "dedup_key",
        "durability",
        "fingerprint",
        "generation",
        "key_head",
        "locations",
        "name",
        "namespace_id",
        "seed",
        "size_seen",
        "spares",
        "touches",
    )

    def __init__(self, name: str, fingerprint: bytes, location_entries_max: int) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.namespace_id = 0
        self.generation = 0
        self.seed = 0
        self.durability = 0
        self.size_seen = 0  # of the last object that was read alone: blocks are mostly alike
        self.key_head = b""
        """A request's field 1, a KeyBatch of one digest, up to that digest."""
        self.dedup_key = b""
        """Of content digests, where others' bytes may be referred to (a dedup domain)."""
        self.locations = LocationCache(location_entries_max)
        self.counters = SpaceCounters()
        self.spares = Spares()
        # Of more than so many unreported reads the oldest are forgotten: they only order evictions.
        self.touches: deque[bytes] = deque(maxlen=_TOUCHES_MAX)
        self.chain_touches: deque[tuple[bytes, bool]] = deque(maxlen=64)
        """Each entry: the packed digests of one chain, and whether it was read (else put)."""

    @classmethod
    def nameless(cls) -> Space:
        """Of a client that has none of its own: as one that was deleted, and never comes back."""
        space = cls("", b"", 0)
        space.opened(master_pb2.OpenNamespaceResponse())
        return space

    def check_name(self) -> None:
        """Raises InvalidArgument where it is nobody's."""
        if not self.name:
            raise InvalidArgument(
                "this client has no namespace of its own",
                remedy="use what its `namespace(NAME)` gives, or Client(namespace=NAME)",
            )

    def opened(self, reply: master_pb2.OpenNamespaceResponse) -> None:
        """Take over what the master answered."""
        if (reply.namespace_id, reply.generation) != (self.namespace_id, self.generation):
            self.locations.clear()
            self.touches.clear()
            self.chain_touches.clear()
        head = common_pb2.KeyBatch(namespace_id=reply.namespace_id, generation=reply.generation)
        packed = head.SerializeToString() + b"\x1a\x10"
        # First, so that whoever sees the new generation sees its seed.
        self.seed = reply.digest_seed
        self.dedup_key = reply.dedup_key
        self.key_head = b"\x0a" + varint(len(packed) + DIGEST_BYTES) + packed
        self.namespace_id = reply.namespace_id
        self.generation = reply.generation
        self.durability = reply.durability

    def take_touches(self, count_max: int) -> bytes:
        """Digests read from cached locations, oldest first, each once."""
        taken: dict[bytes, None] = {}
        for _ in range(min(len(self.touches), count_max)):
            try:
                digest = self.touches.popleft()
            except IndexError:  # another thread was faster
                break
            taken.pop(digest, None)
            taken[digest] = None
        return b"".join(taken)
