"""Bits of a row's state, beside whether it lives."""

from __future__ import annotations

from typing import Final

__all__ = ["COPIED", "COPYING", "PARTIAL", "TOUCHED", "UNCOPYABLE", "UNSEALED"]

COPYING: Final = 0x04
"""A copy to another tier is under way."""
TOUCHED: Final = 0x08
"""It was asked for since it left memory."""
UNCOPYABLE: Final = 0x10
"""The bytes that were to be copied were not what was sealed."""
UNSEALED: Final = 0x20
"""Nobody has said that it is sealed (`sealing`)."""
PARTIAL: Final = 0x40
"""It ends a chain and is shorter than the block before it. A new leader has none of these."""
COPIED: Final = 0x80
"""It is on an SSD; seen lately (`victims`), so that it may be missing where it should be."""
