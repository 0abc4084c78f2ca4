"""Results of batches: columns underneath, an object per key only where one is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError, error_from_code
from cenote.api.types import GetStatus, PutResult, PutStatus, Sameness

from .plan.outcomes import PutOutcome
from .plan.reads import ReadOutcome

__all__ = ["GetResults", "PutResults"]

_SAME_BYTES = {Sameness.UNKNOWN: None, Sameness.SAME: True, Sameness.DIFFERENT: False}


class _Errors:
    """Errors of a batch's keys: one code per key, one example per code."""

    __slots__ = ("_codes", "_errors", "_failed", "_keys")

    def __init__(
        self,
        keys: Sequence[bytes],
        codes: NDArray[np.uint16],
        errors: dict[int, CenoteError],
        failed: NDArray[np.bool_],
    ) -> None:
        self._keys = keys
        self._codes = codes
        self._errors = errors
        self._failed = failed

    def error(self, position: int) -> CenoteError | None:
        """The typed error of the key at `position`, None where it has none."""
        if not self._failed[position]:
            return None
        code = int(self._codes[position])
        example = self._errors.get(code)
        if example is None:
            return error_from_code(code, f"key {position} failed")
        return example

    def raise_for_errors(self) -> None:
        """Raise the first failed key's error; its message says which key and how many failed."""
        where = np.flatnonzero(self._failed)
        if not len(where):
            return
        position = int(where[0])
        error = self.error(position)
        assert error is not None
        total = len(self._failed)
        message = (
            f"{len(where)} of {total} keys failed, first key {position}"
            f" ({self._keys[position][:40]!r}): {error.message}"
        )
        raise error_from_code(error.code, message, error.remedy) from error


class PutResults(Sequence[PutResult]):
    """What came of a batch put, in the order of its keys.

    `statuses` uint8[n] of `PutStatus`, `sameness` uint8[n] of `Sameness`, `error_codes` uint16[n].
    `results[i]` is a `PutResult`.
    """

    __slots__ = ("_errors", "error_codes", "sameness", "statuses")

    def __init__(self, keys: Sequence[bytes], outcome: PutOutcome) -> None:
        self.statuses = outcome.statuses
        self.sameness = outcome.sameness
        self.error_codes = outcome.codes
        failed = np.asarray(outcome.statuses == PutStatus.FAILED)
        self._errors = _Errors(keys, outcome.codes, outcome.errors, failed)

    @property
    def ok(self) -> bool:
        """No key failed: each is stored now, or was there already."""
        return not (self.statuses == PutStatus.FAILED).any()

    @property
    def stored_count(self) -> int:
        return int(np.count_nonzero(self.statuses == PutStatus.STORED))

    @property
    def existed_count(self) -> int:
        return int(np.count_nonzero(self.statuses == PutStatus.EXISTED))

    @property
    def failed_count(self) -> int:
        return int(np.count_nonzero(self.statuses == PutStatus.FAILED))

    def raise_for_errors(self) -> None:
        """Raise the first failed key's typed error, naming the key and how many failed."""
        self._errors.raise_for_errors()

    def __len__(self) -> int:
        return len(self.statuses)

    @overload
    def __getitem__(self, index: int) -> PutResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[PutResult]: ...
    def __getitem__(self, index: int | slice) -> PutResult | list[PutResult]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        status = PutStatus(int(self.statuses[index]))
        same = _SAME_BYTES[Sameness(int(self.sameness[index]))]
        return PutResult(status, same, self._errors.error(index))

    def __iter__(self) -> Iterator[PutResult]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"<PutResults of {len(self)} keys: {self.stored_count} stored,"
            f" {self.existed_count} existed, {self.failed_count} failed>"
        )


class GetResults(Sequence[int | None]):
    """What came of a batch read into buffers, in the order of its keys.

    `results[i]` is the object's size in bytes or None for a miss, and raises the key's typed error
    if it failed. `statuses` uint8[n] of `GetStatus`, `sizes` uint64[n] (0 unless a hit).
    """

    __slots__ = ("_errors", "error_codes", "sizes", "statuses")

    def __init__(self, keys: Sequence[bytes], outcome: ReadOutcome) -> None:
        self.statuses = outcome.statuses
        self.sizes = outcome.sizes
        self.error_codes = outcome.codes
        failed = np.asarray(outcome.statuses == GetStatus.FAILED)
        self._errors = _Errors(keys, outcome.codes, outcome.errors, failed)

    @property
    def hits(self) -> NDArray[np.bool_]:
        """bool[n]: which keys' bytes are in their buffers."""
        return np.asarray(self.statuses == GetStatus.HIT)

    @property
    def hit_count(self) -> int:
        return int(np.count_nonzero(self.statuses == GetStatus.HIT))

    @property
    def failed_count(self) -> int:
        return int(np.count_nonzero(self.statuses == GetStatus.FAILED))

    @property
    def ok(self) -> bool:
        """No key failed: each is a hit or a miss."""
        return not (self.statuses == GetStatus.FAILED).any()

    def error(self, position: int) -> CenoteError | None:
        """The typed error of one key, None where it did not fail."""
        return self._errors.error(position)

    def raise_for_errors(self) -> None:
        """Raise the first failed key's typed error, naming the key and how many failed."""
        self._errors.raise_for_errors()

    def __len__(self) -> int:
        return len(self.statuses)

    @overload
    def __getitem__(self, index: int) -> int | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[int | None]: ...
    def __getitem__(self, index: int | slice) -> int | list[int | None] | None:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        status = self.statuses[index]
        if status == GetStatus.HIT:
            return int(self.sizes[index])
        if status == GetStatus.FAILED:
            error = self._errors.error(index)
            assert error is not None
            raise error
        return None

    def __iter__(self) -> Iterator[int | None]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        misses = len(self) - self.hit_count - self.failed_count
        return (
            f"<GetResults of {len(self)} keys: {self.hit_count} hits, {misses} misses,"
            f" {self.failed_count} failed>"
        )
