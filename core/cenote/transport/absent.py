"""What stands for a transport that this machine does not have: it says why, and does nothing."""

from __future__ import annotations

from typing import NoReturn, final

from cenote.api.errors import Unavailable
from cenote.v1 import common_pb2

from .base import Region, SessionIdentity

__all__ = ["AbsentTransport"]


@final
class AbsentTransport:
    """See `base.Transport`. In the way to every node is `reason`."""

    def __init__(self, kind: int, reason: str) -> None:
        self._kind = kind
        self._reason = reason

    @property
    def kind(self) -> int:
        return self._kind

    def obstacle(self, node: common_pb2.NodeView, identity: SessionIdentity) -> str | None:
        return self._reason

    def register(self, address: int, length: int, keeper: object) -> Region:
        return Region(address, length, keeper)

    def deregister(self, region: Region) -> None:
        """Nothing to do: nothing was registered."""

    def connect(
        self, node: common_pb2.NodeView, identity: SessionIdentity, epoch: int, deadline_s: float
    ) -> NoReturn:
        raise Unavailable(self._reason)

    def close(self) -> None:
        """Nothing to do."""
