"""A batch through the process that moves a vLLM worker's bytes, and what came of it."""

from __future__ import annotations

import time

import numpy as np

from cenote.api.errors import CenoteError
from cenote.connectors.vllm.mover import Mover
from cenote.connectors.vllm.moves import Answer, Batch
from cenote.connectors.vllm.orders import SpaceName
from waiting import wait_until

__all__ = ["get", "moved", "put"]

Column = np.ndarray[tuple[int], np.dtype[np.uint64]]


def moved(mover: Mover, batch: Batch, limit_s: float = 60.0) -> Answer:
    """Wait for its end. Raises the error that there was."""
    came: list[Answer | CenoteError] = []
    mover.begin(batch, came.append)

    def ended() -> bool:
        mover.poll()
        return bool(came)

    wait_until(ended, limit_s, what="the end of a batch")
    (answer,) = came
    if isinstance(answer, CenoteError):
        raise answer
    return answer


def get(
    mover: Mover, space: SpaceName, keys: list[bytes], offsets: Column, lengths: Column,
    deadline_s: float,
) -> Answer:  # fmt: skip
    until_s = time.monotonic() + deadline_s
    return moved(mover, Batch("get", space, keys, offsets, lengths, until_s))


def put(
    mover: Mover, space: SpaceName, keys: list[bytes], offsets: Column, lengths: Column,
    deadline_s: float, chain: bool = False,
) -> Answer:  # fmt: skip
    until_s = time.monotonic() + deadline_s
    return moved(mover, Batch("put", space, keys, offsets, lengths, until_s, chain=chain))
