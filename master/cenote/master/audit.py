"""One line in the log for everything that an administrator has changed: what, and from where."""

from __future__ import annotations

from typing import Any, Final

from cenote.runtime.log import get_logger

from .guard import GRPC_CALLER

__all__ = ["audit"]

_log: Final = get_logger("cenote.audit")


def audit(context: Any, action: str, **fields: object) -> None:
    """`context`: of the gRPC call. To be called once the change is durable."""
    caller = GRPC_CALLER.get()
    who = {} if caller is None else {"holder": caller.name, "token": caller.token_id}
    _log.info(action, peer=context.peer(), **who, **fields)
