"""What a worker asks of the process that moves its bytes, and what that answers.

They travel pickled over socket pairs that nobody else has an end of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cenote.api.types import AcquiredLease

from .options import ConnectorOptions
from .orders import SpaceName

__all__ = ["LANES", "Answer", "Batch", "Setting"]

LANES: tuple[Literal["get", "put"], ...] = ("get", "put")
"""Each is a connection of its own with a thread behind it: reads don't wait for writes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The first message: who the process is."""

    options: ConnectorOptions
    name: str
    size_bytes: int
    """Of the staging memory."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Objects to read into staging memory (`get`) or to save from there (`put`)."""

    what: Literal["get", "put"]
    space: SpaceName
    keys: list[bytes]
    offsets: NDArray[np.uint64]
    """Where each lies in the staging memory."""
    lengths: NDArray[np.uint64]
    deadline_s: float
    """Seconds from when it is read."""
    lease: AcquiredLease | None = None
    chain: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """`done`: of each key, whether its bytes are now where they should be, in whole. `stored`: of
    each key of a put, whether this did it."""

    done: NDArray[np.bool_]
    stored: NDArray[np.bool_]
    existed_count: int = 0
    failed_count: int = 0
