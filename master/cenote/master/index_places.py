"""Places in the buckets of an index, a batch at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["PLACES", "Vacancies", "first_place"]

PLACES = 16
"""In each bucket: as many as there are bits in a word of the table below."""

_U16 = np.dtype(np.uint16)


def _lowest_places() -> npt.NDArray[np.uint8]:
    """For 16 bits packed by np.packbits and read as uint16: the first that is set, 16 for none."""
    bits = np.unpackbits(np.arange(1 << 16, dtype="<u2").view(np.uint8)).reshape(-1, PLACES)
    return np.where(bits.any(axis=1), bits.argmax(axis=1), PLACES).astype(np.uint8)


_LOWEST_PLACE = _lowest_places()


def first_place(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """The first place that is True in each bucket of bool[n, 16]; 16 where none is.

    By a table, since a branch that is mispredicted once a key costs more than all the rest.
    """
    return _LOWEST_PLACE.take(np.packbits(flags).view(_U16))


@dataclass(frozen=True, slots=True)
class Vacancies:
    """Where digests go that are all absent, as long as the index stays as it is."""

    buckets: npt.NDArray[np.int64]
    tags: npt.NDArray[np.uint16]
    picked: npt.NDArray[np.uint8]
    state: tuple[int, int]
