"""What content dedup knows objects' bytes by: digests, proofs, and the tickets that daemons give.

A *digest* (XXH3-128, seeded by the namespace) says which bytes a writer means to put; whoever has
heard it can say it, too. A *proof* is a digest of the same bytes with the number of a grant as its
seed: nobody can know it without them, since the number was never used before. A daemon that holds
bytes with the same proof gives a *ticket*, which its master recognises by a key that only these two
know.

Among namespaces of one dedup domain, which an administrator has set up, both are BLAKE2b, keyed by
the domain and by the grant: they need not be of one mind, so that nobody is to be able to make
other bytes with a digest of somebody else's. Such a proof is *strong*, and its ticket says so.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct
from typing import Final

__all__ = [
    "NO_CONTENT",
    "PROOF_BYTES",
    "TICKET_BYTES",
    "TICKET_KEY_BYTES",
    "domain_key",
    "proof_key",
    "ticket_of",
]

NO_CONTENT: Final = bytes(16)
"""In place of a digest: this object is put without dedup."""
PROOF_BYTES: Final = 16
TICKET_BYTES: Final = 16
TICKET_KEY_BYTES: Final = 16
_PLACE: Final = Struct("<QIQQ")


def domain_key(pool_id: bytes, domain: str) -> bytes:
    """The key of the digests by which namespaces of a domain know what they put. No secret."""
    return blake2b(pool_id + domain.encode(), digest_size=16, person=b"cenote domain").digest()


def proof_key(grant_id: int) -> bytes:
    """The key of strong proofs under a grant."""
    return grant_id.to_bytes(8, "little")


def ticket_of(
    key: bytes, grant_id: int, segment: int, offset: int, size: int, *, strong: bool = False
) -> bytes:
    """What a daemon says of `size` bytes at `offset` of a segment: that it was shown, under this
    grant, that its writer has them; and that the proof was a strong one."""
    place = _PLACE.pack(grant_id, segment, offset, size)
    person = b"strong" if strong else b""
    return blake2b(place, digest_size=TICKET_BYTES, key=key, person=person).digest()
