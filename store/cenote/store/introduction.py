"""What a daemon tells of itself when it attaches: who it is, and what it holds, in slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cenote.v1 import common_pb2

__all__ = ["AgentIdentity", "inventory_slices"]


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """What the master is told of this daemon."""

    node_name: str
    node_uuid: bytes
    boot_id: str
    failure_domain: str
    process_id: int
    server_version: str
    start_number: int = 0
    """Rises with each start of this node's daemon."""
    endpoints: Sequence[common_pb2.Endpoint] = ()
    credentials: common_pb2.Credentials = field(default_factory=common_pb2.Credentials)


def inventory_slices(parts: Iterator[NDArray[np.void]]) -> Iterator[tuple[bytes, bool]]:
    """Each part as bytes and whether more follow; one empty slice where there is none."""
    held: NDArray[np.void] | None = None
    for part in parts:
        if held is not None:
            yield held.tobytes(), True
        held = part
    yield b"" if held is None else held.tobytes(), False
