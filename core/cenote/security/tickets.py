"""What a master signs and daemons check: tickets of sessions, and proofs of grants.

Daemons know no tokens. The master looks at a session's token and gives it a *ticket*: who it is,
which namespaces are its own. A daemon believes it by its signature, and so it does the *proof* of a
grant: that this session may write to these extents. The keys are drawn by the leader, told to the
daemons that attach to it and with every heartbeat, and drawn anew now and then, without a clock
that both would have to agree about: what was signed counts as long as its key does.

    KEY     key id (u32), key (32 bytes)
    SIGNATURE   segment (u32), the first 16 bytes of an HMAC-SHA256
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from struct import Struct
from typing import Final, final

from google.protobuf.message import DecodeError

from cenote.api.errors import PermissionDenied, Unauthenticated, Unavailable
from cenote.v1 import store_pb2

__all__ = [
    "SIGNATURE_BYTES",
    "KeyRing",
    "check_proof",
    "keys_of",
    "open_ticket",
    "pack_proof",
    "proofs_of",
    "sign_ticket",
]

_KEY_BYTES: Final = 32
_KEY: Final = Struct(f"<I{_KEY_BYTES}s")
_TAG_BYTES: Final = 16
_PROOF: Final = Struct(f"<I{_TAG_BYTES}s")
SIGNATURE_BYTES: Final = _PROOF.size
_TICKET_MAC_BYTES: Final = 32
_SESSION_ID_BYTES: Final = 16
_TICKET_BYTES_MAX: Final = 32 << 10
# What is signed for one purpose is worth nothing for another.
_FOR_TICKETS: Final = b"cenote ticket\x00"
_GRANT: Final = Struct("<14s16sQI")
_FOR_GRANTS: Final = b"cenote grant\x00\x00"


@final
class KeyRing:
    """The leader's keys: the one before, the present one, and the next, which daemons are told of
    before anything is signed with it."""

    def __init__(self, rotation_s: float) -> None:
        self._rotation_s = rotation_s
        self._rotate_at_s = 0.0
        first = secrets.randbits(31)
        self._keys = [(first + i, secrets.token_bytes(_KEY_BYTES)) for i in range(2)]

    def tick(self, now_s: float) -> bool:
        """Draw a new key where it is time; whether it was."""
        if not self._rotate_at_s:
            self._rotate_at_s = now_s + self._rotation_s
        if now_s < self._rotate_at_s:
            return False
        self._rotate_at_s = now_s + self._rotation_s
        last_id = self._keys[-1][0]
        drawn = ((last_id + 1) & 0xFFFF_FFFF, secrets.token_bytes(_KEY_BYTES))
        self._keys = [*self._keys[-2:], drawn]
        return True

    @property
    def current(self) -> tuple[int, bytes]:
        """(id, key) to sign with."""
        return self._keys[-2]

    def packed(self) -> bytes:
        """KEY rows of all that count, the oldest first."""
        return b"".join(_KEY.pack(*pair) for pair in self._keys)


def keys_of(packed: bytes) -> dict[int, bytes]:
    """Keys by id, of KEY rows; the oldest first."""
    whole = len(packed) // _KEY.size * _KEY.size
    return dict(_KEY.iter_unpack(packed[:whole]))


def sign_ticket(ticket: store_pb2.AccessTicket, key: tuple[int, bytes]) -> bytes:
    """The ticket as its session shows it."""
    ticket.key_id = key[0]
    body = ticket.SerializeToString(deterministic=True)
    return body + hmac.digest(key[1], _FOR_TICKETS + body, "sha256")


def open_ticket(data: bytes, keys: Mapping[int, bytes]) -> store_pb2.AccessTicket:
    """The ticket, if a key of `keys` signed it.

    Raises Unauthenticated, and Unavailable where it names a key that is not known here (any more,
    or yet).
    """
    if not data:
        raise Unauthenticated(
            "a data connection needs the master's ticket",
            remedy="say hello to the master first; clients of cenote do, with their token",
        )
    body, mac = data[:-_TICKET_MAC_BYTES], data[-_TICKET_MAC_BYTES:]
    try:
        if len(data) > _TICKET_BYTES_MAX:
            raise DecodeError
        ticket = store_pb2.AccessTicket.FromString(body)
    except DecodeError:
        raise Unauthenticated("what was shown is no ticket") from None
    if len(ticket.session_id) != _SESSION_ID_BYTES or not ticket.holder:
        raise Unauthenticated("what was shown is no ticket")
    key = keys.get(ticket.key_id)
    if key is None:
        raise Unavailable(
            "the ticket is signed with a key that this daemon does not know (yet, or any more)"
        )
    if not hmac.compare_digest(mac, hmac.digest(key, _FOR_TICKETS + body, "sha256")):
        raise Unauthenticated("the ticket is forged")
    return ticket


def _tag(key: bytes, session_id: bytes, grant_id: int, namespace_id: int, rows: bytes) -> bytes:
    head = _GRANT.pack(_FOR_GRANTS, session_id, grant_id, namespace_id)
    return hmac.digest(key, head + rows, "sha256")[:_TAG_BYTES]


def pack_proof(
    key: bytes, session_id: bytes, grant_id: int, namespace_id: int, segment: int, rows: bytes
) -> bytes:
    """The SIGNATURE row of a grant's packed EXTENT rows in one segment."""
    return _PROOF.pack(segment, _tag(key, session_id, grant_id, namespace_id, rows))


def proofs_of(packed: bytes) -> dict[int, bytes]:
    """Signatures by segment, of SIGNATURE rows."""
    whole = len(packed) // SIGNATURE_BYTES * SIGNATURE_BYTES
    return dict(_PROOF.iter_unpack(packed[:whole]))


def check_proof(
    keys: Mapping[int, bytes],
    tag: bytes,
    session_id: bytes,
    grant_id: int,
    namespace_id: int,
    rows: bytes,
) -> int:
    """The id of the key that signed it. Raises PermissionDenied."""
    for key_id, key in keys.items():
        if hmac.compare_digest(tag, _tag(key, session_id, grant_id, namespace_id, rows)):
            return key_id
    raise PermissionDenied(f"grant {grant_id} is forged, another session's, or too old")
