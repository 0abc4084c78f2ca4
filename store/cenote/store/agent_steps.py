"""What a store daemon's agent does (actions), and what may come of it (events)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from cenote.api.errors import CenoteError

__all__ = [
    "Action",
    "Attached",
    "Beat",
    "Beaten",
    "CutOlder",
    "Detach",
    "Detached",
    "End",
    "Event",
    "Execute",
    "Executed",
    "Failed",
    "Found",
    "Greeted",
    "LookUp",
    "OlderCut",
    "Pause",
    "Paused",
    "SayHello",
    "SendAttach",
]

# ---- actions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookUp:
    """Find out which masters there are. -> Found | Failed"""


@dataclass(frozen=True, slots=True)
class SayHello:
    """Connect to this master, closing an earlier connection. -> Greeted | Failed"""

    address: str


@dataclass(frozen=True, slots=True)
class CutOlder:
    """Refuse changes of epochs below this one, and cut off their writers. -> OlderCut"""

    epoch: int


@dataclass(frozen=True, slots=True)
class SendAttach:
    """Send what this daemon has, inventory included. -> Attached | Failed"""


@dataclass(frozen=True, slots=True)
class Beat:
    """Send a heartbeat that the master may hold for `wait_s`. -> Beaten | Failed"""

    wait_s: float
    done_instruction: int


@dataclass(frozen=True, slots=True)
class Execute:
    """Carry out the instructions that the last heartbeat brought. -> Executed"""

    done_instruction: int
    """Numbers up to this one were carried out before."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Let so much time pass. -> Paused"""

    seconds: float
    why: str
    """For people; empty where it is nothing to speak of."""


@dataclass(frozen=True, slots=True)
class Detach:
    """Tell the master that the daemon stops. -> Detached | Failed"""


@dataclass(frozen=True, slots=True)
class End:
    """Nothing is left to do: `error` is why, None where it was told to stop."""

    error: CenoteError | None


Action: TypeAlias = (
    LookUp | SayHello | CutOlder | SendAttach | Beat | Execute | Pause | Detach | End
)


# ---- events ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """Addresses of masters, whom to ask first in front; at least one."""

    masters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Greeted:
    """The master answered the hello."""

    epoch: int
    is_leader: bool
    leaders: tuple[str, ...] = ()
    """Where the leader is, if this is a standby and knows."""
    past_tenure: bool = False
    """It was the leader, and can't prove any more that it still is."""
    is_other_pool: bool = False
    """Its metadata are not those of the master that this daemon attached to last."""


@dataclass(frozen=True, slots=True)
class OlderCut:
    """Writers of older epochs were cut off, but for some that may still write."""

    left: int


@dataclass(frozen=True, slots=True)
class Attached:
    epoch: int
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class Beaten:
    """The master answered a heartbeat."""

    epoch: int
    instructions: int
    restless: bool
    """There will soon be something new to tell: memory is being set up, a session quarantined."""


@dataclass(frozen=True, slots=True)
class Executed:
    """Instructions were carried out, without a gap up to number `done_instruction`."""

    done_instruction: int
    restless: bool


@dataclass(frozen=True, slots=True)
class Paused:
    pass


@dataclass(frozen=True, slots=True)
class Detached:
    pass


@dataclass(frozen=True, slots=True)
class Failed:
    """A request to the master failed."""

    error: CenoteError


Event: TypeAlias = (
    Found | Greeted | OlderCut | Attached | Beaten | Executed | Paused | Detached | Failed
)
