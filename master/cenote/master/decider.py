"""The state with its journal: commands in, replies out, nothing decided that isn't taken down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    CenoteError,
    InternalError,
    NotLeader,
    ResourceUnavailable,
    StaleEpoch,
    TenureEnded,
    Unavailable,
)
from cenote.runtime.clock import Clock

from .commands import Command, Digests, Exists, ExtendTenure, Tick
from .effects import (
    Digested,
    Effect,
    Expires,
    Gone,
    InstructionsWaiting,
    NamespaceOpened,
    Notice,
    Pinned,
    ProbeNode,
    ReplicasChanged,
    Stored,
    ViewChanged,
)
from .journal import SnapshotEnd, read_entries
from .log_writer import LogWriter
from .metadata import MetadataBackend, Opened, begin
from .state import MasterState
from .state_config import StateConfig
from .unsettled import Unsettled

__all__ = ["Decider"]

RETRY_INTERVAL_S: Final = 1.0
AHEAD_INTERVAL_S: Final = 0.002
AHEAD_FACTOR_MAX: Final = 4.0
"""Of the reserve that is kept free, where grants had to wait for the journal: what is evicted in
the time that it takes must have room beside what is granted in that time."""
AHEAD_GROWTH: Final = 1.1
AHEAD_DECAY_PER_S: Final = 0.1
_TICK: Final = Tick()
_OF_OBJECTS: Final = (Gone, ReplicasChanged, Pinned, Expires)


def _ignore(_node_id: int) -> None:
    pass


def _unheard(_text: str) -> None:
    pass


@final
class Decider:
    """`load` must be run to its end before anything else. One thread.

    `on_instructions(node_id)`: a node's long poll has an answer. `on_probe(node_id)`: see whether
    it is alive. `on_notice(text)`: people should know this. All are called between decisions, never
    in the middle of one.
    """

    def __init__(self, backend: MetadataBackend, config: StateConfig, clock: Clock) -> None:
        self.backend = backend
        self.clock = clock
        self.config = config
        self.on_instructions: Callable[[int], None] = _ignore
        self.on_probe: Callable[[int], None] = _ignore
        self.on_notice: Callable[[str], None] = _unheard
        self.epoch = 0
        self._led_since_s = 0.0
        self.replayed_entries = 0
        self._state: MasterState | None = None
        self._log: LogWriter | None = None
        self._shared = backend.shared
        self._retry_at_s = 0.0
        self._unsettled = Unsettled()
        self._granted = False
        """Since `evict_ahead` looked."""
        self._ahead_at_s = 0.0
        self._waited = False
        """A grant has had to wait since then."""
        self._ahead_factor = 1.0

    # ---- start ------------------------------------------------------------------------------

    def load(
        self, opened: Opened | None = None, followed: MasterState | None = None
    ) -> Iterator[None]:
        """Open the backend and replay it, yielding after each batch of effects.

        `opened`: the epoch of a backend that was campaigned for and opened, with `followed`, what
        was replayed before that. Raises ResourceUnavailable, JournalCorrupt, NotLeader, and where
        metadata are not shared StaleEpoch.
        """
        if opened is None:
            opened = begin(self.backend)
        self.epoch = opened.epoch
        if followed is None or opened.anew:
            state = MasterState(self.config, opened.epoch)
        else:
            state = followed
            state.take_up(self.config, opened.epoch)
        for entry in read_entries(opened.records, verified=True):
            if not isinstance(entry, SnapshotEnd):
                state.replay(entry)
            yield
        self.replayed_entries = self.backend.last_entry
        self._log = LogWriter(self.backend, opened.epoch)
        self._state = state
        self._led_since_s = self.clock.monotonic_s()
        self._take(self._start(state))
        self._extend_tenure()
        self.flush()
        if self._shared:
            state.take_freed()  # from now on

    def _start(self, state: MasterState) -> list[Effect]:
        try:
            return state.start(self.clock.monotonic_s(), self.clock.unix_s())
        except StaleEpoch as error:
            if not self._shared:
                raise
            # A successor was elected, and its entries were read before word of the election came.
            raise self.lost or NotLeader(
                f"epoch {self.epoch} was over before it began: {error.message}",
                remedy="ask the leader",
            ) from error

    def begin_above(self, epoch: int) -> None:
        """Go on in a later epoch than this one: a daemon comes that has followed it, under metadata
        that are lost. Sessions end. Raises ResourceUnavailable."""
        self.flush()
        past = list(self.state.snapshot())
        self.epoch = self.backend.raise_epoch(epoch)
        state = MasterState(self.config, self.epoch)
        for effect in past:
            state.replay(effect)
        self._log = LogWriter(self.backend, self.epoch)
        self._state = state
        self._take(state.start(self.clock.monotonic_s(), self.clock.unix_s()))
        self.flush()

    @property
    def state(self) -> MasterState:
        """For reading only."""
        if self._state is None:
            raise InternalError("the master's state is not loaded")
        return self._state

    # ---- decisions --------------------------------------------------------------------------

    def apply(self, command: Command) -> Any:
        """Decide, and take the decision down; `flush` before anybody hears of it."""
        state = self._state
        assert state is not None
        try:
            reply, effects = state.apply(command, self.clock.monotonic_s())
        except TenureEnded:
            if not self._extend_tenure():  # it may have grown since the last tick
                raise
            reply, effects = state.apply(command, self.clock.monotonic_s())
        if effects:
            self._take(effects)
        return reply

    def _extend_tenure(self) -> bool:
        """Have the state know how long this master may decide; whether that is longer than now."""
        end_s = self.backend.tenure_end_s
        now_s = self.clock.monotonic_s()
        self.state.apply(ExtendTenure(end_s), now_s)
        return now_s < end_s

    @property
    def led_s(self) -> float:
        """How long this master has led."""
        return self.clock.monotonic_s() - self._led_since_s

    @property
    def is_past_tenure(self) -> bool:
        """Whether another master may lead by now."""
        return self._shared and self.clock.monotonic_s() >= self.backend.tenure_end_s

    @property
    def lost(self) -> NotLeader | None:
        """That this master leads no more: nothing of what it holds counts."""
        return self.backend.lost

    def exists(self, command: Exists) -> NDArray[np.uint8]:
        """`apply` for the one command that changes nothing."""
        state = self._state
        assert state is not None
        return state.exists(command, self.clock.monotonic_s())

    def prefetch(self, command: Exists) -> None:
        """Past the tenure nothing: there may be another leader by now."""
        state = self._state
        assert state is not None
        if not self.is_past_tenure:
            state.prefetch(command)

    def _take(self, effects: list[Effect]) -> None:
        log = self._log
        assert log is not None
        for effect in effects:
            kind = type(effect)
            if kind is InstructionsWaiting:
                self.on_instructions(effect.node_id)  # type: ignore[union-attr]
            elif kind is ProbeNode:
                self.on_probe(effect.node_id)  # type: ignore[union-attr]
            elif kind is Notice:
                self.on_notice(effect.text)  # type: ignore[union-attr]
            elif kind is not ViewChanged:
                log.add(effect)  # type: ignore[arg-type]
                if kind is not Stored and kind is not Digested:
                    log.urgent = True
                    log.naming |= kind is NamespaceOpened
                    log.basic |= kind not in _OF_OBJECTS
                    if self._shared:
                        self._unsettled.note(effect)

    def refuse_unless_writable(self) -> None:
        """Raises where a new decision could not be journaled: ResourceUnavailable; where it is a
        service that does not answer, Unavailable, since it may in a moment, and TenureEnded once it
        has not for too long; NotLeader."""
        assert self._log is not None
        refusal = self._log.refusal
        if refusal is None:
            return
        if self._shared and isinstance(refusal, ResourceUnavailable):
            if self.is_past_tenure:
                raise TenureEnded(refusal.message, remedy=refusal.remedy)
            raise Unavailable(refusal.message, remedy=refusal.remedy)
        raise refusal

    def tick(self) -> None:
        """Housekeeping; what it decided is journaled as far as the journal takes it.

        A journal that takes no writes shows in `refusal`, and is tried again every second.
        """
        log = self._log
        assert log is not None
        now_s = self.clock.monotonic_s()
        if self._shared:
            self._extend_tenure()
        with contextlib.suppress(ResourceUnavailable, NotLeader):
            if log.refusal is not None and now_s >= self._retry_at_s:
                self._retry_at_s = now_s + RETRY_INTERVAL_S
                log.retry()
            if not log.is_full:
                self.apply(_TICK)
                log.flush()
            if self._shared and not log.urgent:
                self._settle_soon(log)

    # ---- journal ----------------------------------------------------------------------------

    @property
    def refusal(self) -> CenoteError | None:
        """Why writes are refused now, or None."""
        return self._log.refusal if self._log is not None else None

    def flush(self) -> None:
        """Append what was decided. Raises ResourceUnavailable; then replies must not leave."""
        log = self._log
        if log is not None and log.dirty:
            log.flush()

    def flush_soon(self) -> None:
        """`flush`, once the disk is not at work: with the next reply or tick. For what nobody was
        told to be there: commits, whose slots tell of them, too."""
        if not self.backend.is_syncing:
            self.flush()

    def evict_ahead(self) -> None:
        """Make up for the space that was granted, where metadata are shared: what is evicted only
        when it is needed keeps its writer waiting for the journal."""
        log, now_s = self._log, self.clock.monotonic_s()
        if not self._granted or log is None or now_s < self._ahead_at_s:
            return
        passed_s = now_s - self._ahead_at_s + AHEAD_INTERVAL_S
        self._granted, self._ahead_at_s = False, now_s + AHEAD_INTERVAL_S
        if log.refusal is not None:
            return
        factor = self._ahead_factor
        factor = factor * AHEAD_GROWTH if self._waited else factor - passed_s * AHEAD_DECAY_PER_S
        self._ahead_factor, self._waited = min(max(1.0, factor), AHEAD_FACTOR_MAX), False
        effects = self.state.evict_ahead(now_s, self._ahead_factor)
        if effects:
            with contextlib.suppress(ResourceUnavailable, NotLeader):
                self._take(effects)
                log.flush()
                self._settle_soon(log)

    def flush_urgent(self) -> None:
        """`flush`, unless all there is are commits: of these the daemons' slots tell as well, so
        that a master which is killed in this very moment learns of them again."""
        log = self._log
        if log is not None and log.urgent:
            log.flush()

    @property
    def unsettled_entry(self) -> int:
        """An entry that must be durable before space is given away: what freed some of it is not
        known to outlive this process. 0 where there is none, and always with `file:`, for which
        it is enough that it was appended.

        A successor that has not heard of an eviction takes the object for present, while somebody
        writes over it.
        """
        log = self._log
        if not self._shared or log is None:
            return 0
        if log.urgent:
            log.flush()
        return log.urgent_entry if log.urgent_entry > self.backend.durable_entry else 0

    @property
    def unsettled_naming(self) -> int:
        """An entry that must be durable before anybody learns what namespaces there are; 0 where
        there is none.

        A seed that is lost with this master makes keys of who has heard it by then other ones: a
        later namespace of that name has the same number and generation, and another seed.
        """
        log = self._log
        if log is None:
            return 0
        if log.naming:
            log.flush()
        return log.naming_entry if log.naming_entry > self.backend.durable_entry else 0

    def unsettled_under(self, digests: Digests, *grants: bytes) -> int:
        """As `unsettled_entry`, for grants (packed EXTENT rows) for these keys: of what frees space
        and removes objects only that counts which freed just this, or one of these. What says
        which nodes, segments and namespaces there are always does."""
        log = self._log
        if not self._shared or log is None:
            return 0
        if log.urgent:
            log.flush()
        self._granted = True
        durable = self._note_freed(log)
        basic = log.basic_entry if log.basic_entry > durable else 0
        entry = self._unsettled.entry_under(digests, *grants)
        self._waited |= entry > 0
        return max(basic, entry)

    def _settle_soon(self, log: LogWriter) -> None:
        """What was evicted ahead of need is to be ready by then: it does not wait for company."""
        self._note_freed(log)
        if len(self._unsettled):
            self.backend.sync(log.urgent_entry)  # nobody waits for it

    def _note_freed(self, log: LogWriter) -> int:
        """Take down what was freed by decisions that are not durable; the newest entry that is.

        All that was decided must have been appended.
        """
        durable = self.backend.durable_entry
        self._unsettled.note_freed(*self.state.take_freed())
        self._unsettled.decided(log.urgent_entry)
        number = self._unsettled.settled(durable)
        if number:
            self.state.release_freed(number)
        return durable

    def sync_to(self, entry: int) -> Future[None]:
        """Done when everything up to `entry` is durable; 0: everything decided so far."""
        return self.backend.sync(entry) if entry else self.sync()

    def sync(self) -> Future[None]:
        """Flush; done when everything decided so far survives a power failure."""
        assert self._log is not None
        return self._log.sync()

    def close(self) -> None:
        """Append, sync and let go. Raises ResourceUnavailable where that can't be done.

        No lease may be given after this.
        """
        try:
            if self._log is not None:
                self._log.retry()
        finally:
            self.backend.close()
