"""Whose blocks may be taken for whose: what a namespace's name and fingerprint are made of.

A block's hash stands for tokens, never for the model: two models have equal hashes for equal
prompts. So all that the bytes depend on besides the tokens is digested here, and goes into the
namespace: its contents, never where they lie or what the user calls them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from .orders import SpaceName

__all__ = ["space_of"]

_FORMAT: Final = 1
"""Of the objects. Raised when bytes mean something else, so that old ones are not found."""


def space_of(prefix: str, facts: Mapping[str, object]) -> SpaceName:
    """The namespace for blocks that depend on `facts` (values as JSON would take them).

    The name ends in a digest of the facts, the fingerprint is a longer one, so that not even two
    models whose names were equal by accident would share a namespace.
    """
    described = json.dumps({"format": _FORMAT, **facts}, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(described.encode(), digest_size=32).hexdigest()
    return SpaceName(f"{prefix}/{digest[:24]}", digest.encode())
