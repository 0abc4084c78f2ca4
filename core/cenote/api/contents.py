"""What content dedup knows objects' bytes by: digests, proofs, and the tickets that daemons give.

A *digest* (XXH3-128, seeded by the namespace) says which bytes a writer means to put; whoever has
heard it can say it, too. A *proof* is a digest of the same bytes with the number of a grant as its
seed: nobody can know it without them, since the number was never used before. A daemon that holds
bytes with the same proof gives a *ticket*, which its master recognises by a key that only these two
know.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct
from typing import Final

__all__ = ["NO_CONTENT", "PROOF_BYTES", "TICKET_BYTES", "TICKET_KEY_BYTES", "ticket_of"]

NO_CONTENT: Final = bytes(16)
"""In place of a digest: this object is put without dedup."""
PROOF_BYTES: Final = 16
TICKET_BYTES: Final = 16
TICKET_KEY_BYTES: Final = 16
_PLACE: Final = Struct("<QIQQ")


def ticket_of(key: bytes, grant_id: int, segment: int, offset: int, size: int) -> bytes:
    """What a daemon says of `size` bytes at `offset` of a segment: that it was shown, under this
    grant, that its writer has them."""
    place = _PLACE.pack(grant_id, segment, offset, size)
    return blake2b(place, digest_size=TICKET_BYTES, key=key).digest()
