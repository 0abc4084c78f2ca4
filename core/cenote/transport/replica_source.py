"""Another daemon as the source of copies: records of its slots, and bytes of its segments.

Over TCP, from memory and SSD alike; nothing is ever written there.
"""

from __future__ import annotations

from time import monotonic
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import ProtocolError
from cenote.security.tls import Tls

from . import wire
from .base import ExtentArray, SessionIdentity, U8Array, U64Array
from .opening import parse_target
from .pool import ConnectionPool, hello_for
from .tcp import TcpChannel

__all__ = ["RECORDS_MAX", "ReplicaSource"]

RECORDS_MAX: Final = 1_024
"""That one call asks for."""


@final
class ReplicaSource:
    """One connection, for one thread; `close` may be called from any, and interrupts a call.

    Calls raise Unavailable, DeadlineExceeded, ClientClosed, ProtocolError, and what a hello does.
    """

    def __init__(
        self, address: str, name: str, identity: SessionIdentity, tls: Tls | None = None
    ) -> None:
        """`address`: host:port of its data server, tls:// before it where it speaks TLS. Raises
        InvalidArgument. Does not connect yet."""
        self._pool = ConnectionPool(
            parse_target(address),
            name,
            hello_for(identity, 0, writer=False),
            1,
            access=identity.access,
            tls=tls,
        )
        self._channel = TcpChannel(self._pool, 0, 0)

    def records(self, wanted: NDArray[np.void], deadline_s: float) -> list[bytes | None]:
        """For SLOT_WANTED rows (RECORDS_MAX at most) the records of their slots, None where a slot
        does not hold that version."""
        now = monotonic()
        pool = self._pool
        connection = pool.take(now + deadline_s, now)
        try:
            call_id = connection.call_id = connection.call_id + 1 & 0xFFFF_FFFF
            body = np.ascontiguousarray(wanted).tobytes()
            head = wire.REQUEST.pack(wire.OP_SLOTS, 0, 0, len(wanted), call_id, 0, 0, len(body))
            connection.send_views([head, body])
            length, statuses = connection.receive_reply(wire.OP_SLOTS, call_id, len(wanted))
            size = wire.SLOT_RECORD_BYTES
            if length != statuses.count(0) * size:
                raise ProtocolError(f"{connection.name} sent {length} bytes of records")
            packed = bytearray(length)
            if length:
                connection.receive_view(memoryview(packed))
        except BaseException:  # whatever it was, the rest of the reply may still be on its way
            pool.discard(connection)
            raise
        pool.give_back(connection)
        found = (bytes(packed[at : at + size]) for at in range(0, length, size))
        return [None if status else next(found) for status in statuses]

    def read(self, extents: ExtentArray, addresses: U64Array, deadline_s: float) -> U8Array:
        """See `base.Channel.read`."""
        return self._channel.read(extents, addresses, deadline_s)

    def close(self) -> None:
        """Interrupt the call under way, and disconnect."""
        self._pool.close()
