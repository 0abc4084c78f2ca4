"""From decided effects to appended records: what stands between the state and the backend."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Final, final

from cenote.api.errors import CenoteError, InternalError, NotLeader, ResourceUnavailable

from .effects import DurableEffect
from .journal import RecordWriter
from .metadata import MetadataBackend

__all__ = ["LogWriter"]

PENDING_BYTES_MAX: Final = 64 << 20


@final
class LogWriter:
    """Collects effects; `flush` appends them (before anybody hears of them, where it is `urgent`).

    Where an append fails, the batch of replies that it was for must not leave. The records are
    kept until `retry` gets them appended, and `refusal` says that nothing new must be decided
    meanwhile. What time brings (evictions) still is, as far as `PENDING_BYTES_MAX`.
    """

    def __init__(self, backend: MetadataBackend, epoch: int) -> None:
        self._backend = backend
        self._writer = RecordWriter(epoch, backend.last_entry + 1)
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._failure: CenoteError | None = None
        self._broken: CenoteError | None = None
        self.dirty = False
        """Whether `flush` has anything to do."""
        self.urgent = False
        """Whether replies must wait for it: set by whoever adds."""
        self.urgent_entry = 0
        """The newest entry, at the least, that was urgent when it was appended."""
        self.naming = False
        """Whether a namespace was opened, or reset: set by whoever adds."""
        self.naming_entry = 0
        """The newest entry, at the least, that was `naming` when it was appended."""
        self.basic = False
        """Whether what others rest on was added: set by whoever adds."""
        self.basic_entry = 0
        """The newest entry, at the least, of that kind."""

    @property
    def refusal(self) -> CenoteError | None:
        """Why nothing new should be decided now, or None."""
        return self._broken or self._failure or self._backend.refusal

    @property
    def pending_bytes(self) -> int:
        """Decided and not appended yet."""
        return self._kept_bytes + self._writer.pending_bytes

    @property
    def is_full(self) -> bool:
        """Whether even what time brings can't be kept any more."""
        return self._broken is not None or self.pending_bytes > PENDING_BYTES_MAX

    def add(self, effect: DurableEffect) -> None:
        """Take a decision down.

        Raises InternalError where that can't be done: then the journal ends with the decision
        before, since one with a gap could bring back what was removed.
        """
        if self._broken is not None:
            return
        try:
            self._writer.add(effect)
        except Exception as error:  # whatever the bug is: the decision has been made
            self._broken = InternalError(
                f"a decision could not be journaled: {error}",
                remedy="restart the master, which goes back to the decision before; please report",
            )
            raise self._broken from error
        self.dirty = True

    def flush(self) -> None:
        """Append all that was added.

        Raises ResourceUnavailable where that fails. Until `retry` succeeds it then does nothing:
        what is decided meanwhile is nothing that anybody is told.
        """
        if self.dirty and self._failure is None:
            self._append()

    def retry(self) -> None:
        """Append what could not be appended before. Raises ResourceUnavailable."""
        if self.dirty:
            self._append()

    def _append(self) -> None:
        records = self._writer.take(self._backend.durable_entry)
        if self._kept:
            records = [*self._kept, *records]
        try:
            self._backend.append(records)
        except NotLeader as error:  # for good: another master decides now
            self._broken = error
            raise
        except CenoteError as error:
            self._kept = records
            self._kept_bytes = sum(map(len, records))
            self._failure = ResourceUnavailable(
                f"the master's journal takes no writes: {error.message}", remedy=error.remedy
            )
            raise self._failure from error
        self._kept = []
        self._kept_bytes = 0
        self._failure = None
        if self.urgent:
            self.urgent_entry = self._backend.last_entry
        if self.naming:
            self.naming_entry = self._backend.last_entry
        if self.basic:
            self.basic_entry = self._backend.last_entry
        self.dirty = self.urgent = self.naming = self.basic = False

    def sync(self) -> Future[None]:
        """Flush; done when all of it survives a power failure. Raises ResourceUnavailable."""
        self.flush()
        if self._failure is not None:
            raise self._failure
        return self._backend.sync(self._backend.last_entry)
