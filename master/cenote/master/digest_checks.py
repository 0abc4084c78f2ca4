"""What the state refuses of keys' digests, whoever made the command."""

from __future__ import annotations

import numpy as np

from cenote.api.errors import InvalidArgument

from .commands import Digests

__all__ = ["check_digests"]


def check_digests(digests: Digests) -> None:
    """Raises InvalidArgument."""
    if digests.ndim != 2 or digests.shape[1] != 2 or digests.dtype != np.uint64:
        raise InvalidArgument(f"digests must be uint64[n, 2], not {digests.dtype}{digests.shape}")
