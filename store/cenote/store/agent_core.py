"""What a store daemon does next about its master: a machine of events in, actions out. No I/O.

The shell (`agent.py`, or the simulator) carries one action out at a time and hands back what came
of it:

    action = core.start()
    while not isinstance(action, End):
        action = core.handle(carry_out(action))

    SayHello -> Greeted --(a leader, not of an older epoch)--> CutOlder -> OlderCut -> SendAttach
      ^  ^        |                                                                      |
      |  +- Pause-+ (standby, or older)                                               Attached
      |                                                                                  v
      +------------- Pause <- Failed <------------------- Beat <-> Beaten, Execute <-> Executed

    stop() -> Detach -> Detached | Failed -> End

Rules that matter:
- Writers of older epochs are cut off before the inventory for a newer one is taken.
- A connection that broke means a new hello, not a new attach: only a newer epoch, or a master that
  does not know the daemon, means that.
- Of several masters each is asked in turn, without a pause before all of them were.
- Where masters are looked up somewhere (`look_up`), that is done first, and again after some rounds
  in which none of those known led; those known are asked on where it fails.
- A leader past its tenure is not followed, and not left either: should it prove to lead still, all
  goes on as before.
- A master is followed only upwards: one with an older epoch than was followed before is asked again
  later, however often that is.
- Nothing is given up for ever but what can't be right, and that only before the first attach; and
  everything once a later process of this node has attached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, final

from cenote.api.errors import (
    CenoteError,
    DeadlineExceeded,
    InvalidArgument,
    NodeNameTaken,
    NodeSuperseded,
    NotLeader,
    PermissionDenied,
    PoolMismatch,
    ProtocolVersionMismatch,
    SessionUnknown,
    StaleEpoch,
    Unauthenticated,
    Unavailable,
)

from .agent_steps import (
    Action,
    Attached,
    Beat,
    Beaten,
    CutOlder,
    Detach,
    Detached,
    End,
    Event,
    Execute,
    Executed,
    Failed,
    Found,
    Greeted,
    LookUp,
    OlderCut,
    Pause,
    Paused,
    SayHello,
    SendAttach,
)

__all__ = ["AgentCore", "Stage"]

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
SEEK_BACKOFF_MAX_S: Final = 0.15
SEEKS_QUICK_MAX: Final = 100
"""So many rounds over several masters are made in short order: another one takes over within some
seconds, and writes wait for its daemons."""
REFUSED_PAUSE_S: Final = 5.0
"""After an answer that will most likely be the same again."""
NAME_TAKEN_PAUSE_S: Final = 1.0
NAME_TAKEN_TRIES_MAX: Final = 15
"""A daemon whose node lost its memory comes back as another one, while its master may take the one
before for alive for some seconds."""
CUT_PAUSE_S: Final = 0.1
RESTLESS_BEAT_S: Final = 0.2
"""How long a heartbeat may be held while there is soon something new to tell."""
BEAT_S_MIN: Final = 0.05
BEAT_S_MAX: Final = 30.0
REDIRECTS_MAX: Final = 3
ROUNDS_PER_LOOK_UP: Final = 3
"""Over all known masters; with their pauses that is about half a second, later 3."""


class Stage(Enum):
    """Where the daemon stands with its master."""

    SEEKING = "seeking"
    """No master was found yet, or the last one is out of reach."""
    CUTTING = "cutting"
    """Writers of an older epoch are being cut off."""
    ATTACHING = "attaching"
    ATTACHED = "attached"
    ENDED = "ended"


_HOPELESS: Final = (
    InvalidArgument,
    PermissionDenied,
    PoolMismatch,
    ProtocolVersionMismatch,
    Unauthenticated,
)
_UNKNOWN_HERE: Final = (SessionUnknown, StaleEpoch)


@final
class AgentCore:
    """See the module's docstring. `jitter` gives numbers in [0, 1); `masters` is empty where they
    are looked up only."""

    def __init__(
        self,
        masters: Sequence[str],
        *,
        last_epoch: int,
        jitter: Callable[[], float],
        look_up: bool = False,
    ) -> None:
        if not masters and not look_up:
            raise InvalidArgument("a store daemon needs the address of a master (--master)")
        self._masters = tuple(masters)
        self._look_up = look_up
        self._rounds = 0
        """Since the masters were looked up."""
        self._jitter = jitter
        self._address = self._masters[0] if masters else ""
        self._failures = 0
        self._redirects = 0
        self._asked = 0
        """Masters in vain since the last pause."""
        self._name_taken = 0
        self._heartbeat_s = 1.0
        self._after_pause: Action = SayHello(self._address)
        self._doing: Action = self._after_pause
        """The last action that was handed out."""
        self._attached = False
        self._ever_attached = False
        self.stage = Stage.SEEKING
        self.epoch = last_epoch
        """Of the master that is followed, or was last."""
        self.done_instruction = 0

    @property
    def is_attached(self) -> bool:
        """To the present epoch, also while the master is out of reach."""
        return self._attached

    def start(self) -> Action:
        """The first action."""
        self._doing = self._seek()
        return self._doing

    def stop(self) -> Action:
        """What to do last, instead of whatever was to be done."""
        attached, self._attached = self._attached, False
        self.stage = Stage.ENDED
        return Detach() if attached else End(None)

    def handle(self, event: Event) -> Action:
        """What to do next, now that `event` came of the last action."""
        if self.stage is Stage.ENDED:
            return End(None)
        self._doing = self._next(event)
        return self._doing

    def _next(self, event: Event) -> Action:
        match event:
            case Found():
                return self._on_found(event)
            case Failed() if isinstance(self._doing, LookUp):
                return self._on_not_found(event.error)
            case Greeted():
                return self._on_greeted(event)
            case OlderCut():
                return self._on_older_cut(event)
            case Attached():
                return self._on_attached(event)
            case Beaten():
                return self._on_beaten(event)
            case Executed():
                return self._on_executed(event)
            case Failed():
                return self._on_failed(event.error)
            case Paused():
                return self._after_pause
            case Detached():
                return End(None)

    # ---- finding the leader -------------------------------------------------------------------

    def _seek(self) -> Action:
        """Ask the next master, or find out first which there are."""
        due = self._rounds >= ROUNDS_PER_LOOK_UP or not self._masters
        return LookUp() if self._look_up and due else SayHello(self._address)

    def _on_found(self, event: Found) -> Action:
        self._rounds = self._asked = 0
        self._masters = event.masters
        self._address = event.masters[0]
        return SayHello(self._address)

    def _on_not_found(self, error: CenoteError) -> Action:
        if isinstance(error, _HOPELESS) and not self._ever_attached:
            self.stage = Stage.ENDED
            return End(error)
        self._rounds = 0
        return self._hello_after(self._backoff_s(), str(error))

    def _on_greeted(self, event: Greeted) -> Action:
        if not event.is_leader:
            return self._redirect(event.leaders)
        if event.past_tenure:
            return self._try_next("this master can't prove any more that it leads")
        if event.epoch < self.epoch:
            if event.is_other_pool and event.epoch:
                return self._try_next(
                    "this master has another pool than the one whose contents are here; name the"
                    " right one (--master), or remove this node's files and start it again"
                )
            return self._try_next(
                f"this master is at epoch {event.epoch}, but this daemon followed {self.epoch}:"
                " it is an old leader, or its metadata is an old copy"
            )
        self._redirects = self._asked = 0
        if event.epoch == self.epoch and self._attached and not event.is_other_pool:
            self.stage = Stage.ATTACHED
            return Beat(0.0, self.done_instruction)
        self._attached = False
        self.epoch = event.epoch
        self.stage = Stage.CUTTING
        return CutOlder(event.epoch)

    def _on_older_cut(self, event: OlderCut) -> Action:
        if event.left:
            why = f"{event.left} writers of an older epoch may still write (stopped processes?)"
            return self._pause(CUT_PAUSE_S, why, CutOlder(self.epoch))
        self.stage = Stage.ATTACHING
        return SendAttach()

    def _redirect(self, leaders: tuple[str, ...]) -> Action:
        self._redirects += 1
        if not leaders or self._redirects > REDIRECTS_MAX:
            self._redirects = 0
            return self._try_next("no leader was found")
        self._address = leaders[0]
        self.stage = Stage.SEEKING
        return SayHello(self._address)

    def _try_next(self, why: str) -> Action:
        """Ask the next master; after a round over all of them with a pause."""
        masters = self._masters
        at = masters.index(self._address) if self._address in masters else -1
        self._address = masters[(at + 1) % len(masters)]
        self._asked += 1
        if self._asked % len(masters):
            return self._hello_after(0.0, "")
        self._rounds += 1
        return self._hello_after(self._backoff_s(), why)

    # ---- following it -------------------------------------------------------------------------

    def _on_attached(self, event: Attached) -> Action:
        if event.epoch != self.epoch:
            # The leader changed in between: what was sent was fenced for another epoch.
            return self._hello_after(self._backoff_s(), "the leader changed while attaching")
        self._failures = self._rounds = 0
        self._attached = self._ever_attached = True
        self.done_instruction = 0
        self._heartbeat_s = min(max(event.heartbeat_s, BEAT_S_MIN), BEAT_S_MAX)
        self.stage = Stage.ATTACHED
        return Beat(0.0, 0)

    def _on_beaten(self, event: Beaten) -> Action:
        if event.epoch != self.epoch:
            return self._hello_after(0.0 if event.epoch > self.epoch else self._backoff_s(), "")
        self._failures = 0
        if event.instructions:
            return Execute(self.done_instruction)
        return self._beat(event.restless)

    def _on_executed(self, event: Executed) -> Action:
        if event.done_instruction > self.done_instruction:
            self.done_instruction = event.done_instruction
            return self._beat(event.restless)
        # The master would send the same again at once. It is in touch: that something has to wait,
        # and why, was logged as it was tried.
        return self._pause(RESTLESS_BEAT_S, "", self._beat(True))

    def _beat(self, restless: bool) -> Beat:
        wait_s = min(RESTLESS_BEAT_S, self._heartbeat_s) if restless else self._heartbeat_s
        return Beat(wait_s, self.done_instruction)

    # ---- failures -----------------------------------------------------------------------------

    def _on_failed(self, error: CenoteError) -> Action:
        if isinstance(error, NotLeader):
            return self._redirect(error.addresses)
        if isinstance(error, _UNKNOWN_HERE):
            # It answers, but wants an attach: at once the first time.
            self._attached = False
            pause_s = self._backoff_s() if self._failures else 0.0
            self._failures += 1
            return self._hello_after(pause_s, str(error))
        if isinstance(error, NodeSuperseded):
            self._attached = False
            self.stage = Stage.ENDED
            return End(error)
        if isinstance(error, NodeNameTaken):
            self._name_taken += 1
            if self._name_taken < NAME_TAKEN_TRIES_MAX or self._ever_attached:
                return self._hello_after(NAME_TAKEN_PAUSE_S, str(error))
            self.stage = Stage.ENDED
            return End(error)
        if isinstance(error, _HOPELESS):
            if not self._ever_attached:
                self.stage = Stage.ENDED
                return End(error)
            return self._hello_after(REFUSED_PAUSE_S, str(error))
        if isinstance(error, Unavailable | DeadlineExceeded):
            return self._try_next(str(error))
        return self._hello_after(self._backoff_s(), str(error))

    def _hello_after(self, seconds: float, why: str) -> Action:
        self.stage = Stage.SEEKING
        seek = self._seek()
        return self._pause(seconds, why, seek) if seconds else seek

    def _pause(self, seconds: float, why: str, then: Action) -> Action:
        self._after_pause = then
        return Pause(seconds, why)

    def _backoff_s(self) -> float:
        self._failures += 1
        several = self._look_up or len(self._masters) > 1
        seeks = several and self._failures <= SEEKS_QUICK_MAX
        most_s = SEEK_BACKOFF_MAX_S if seeks else BACKOFF_MAX_S
        longest_s = min(most_s, BACKOFF_FIRST_S * (1 << min(self._failures - 1, 10)))
        return longest_s * (0.5 + 0.5 * self._jitter())
