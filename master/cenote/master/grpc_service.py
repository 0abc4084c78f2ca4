"""MasterService over gRPC: the same operations as on the lane, for any language."""

from __future__ import annotations

from typing import Any, Final, final

from google.protobuf.message import Message

from cenote.v1 import master_pb2 as pb

from .audit import audit
from .front import Front

__all__ = ["MASTER_SERVICE", "MasterGrpc", "deadline_of"]

MASTER_SERVICE: Final = "cenote.v1.MasterService"
DEADLINE_S_DEFAULT: Final = 5.0
DEADLINE_S_MAX: Final = 3600.0


def deadline_of(context: Any) -> float:
    """Seconds that the caller still waits."""
    remaining_s = context.time_remaining()
    return DEADLINE_S_DEFAULT if remaining_s is None else min(remaining_s, DEADLINE_S_MAX)


@final
class MasterGrpc:
    """The servicer; its methods (`Hello`, `Exists`, ...) are made below, one like the other."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def serve(self, request: Message, context: Any) -> Message:
        """Any method: the request's type tells which. Raises CenoteError."""
        reply = await self._front.call(request, deadline_of(context))
        if isinstance(request, pb.DrainRequest):
            audit(context, "drain", node_id=request.node_id, cancel=request.cancel)
        return reply


for _method in pb.DESCRIPTOR.services_by_name["MasterService"].methods:
    setattr(MasterGrpc, _method.name, MasterGrpc.serve)
