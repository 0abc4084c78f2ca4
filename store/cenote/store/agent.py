"""The daemon's side of its master: carries out what `agent_core` decides, in a thread of its own.

While no master can be reached the daemon serves on; attaching and heartbeats are tried again for as
long as it lives. `stop` ends the thread wherever it is and takes leave of the master.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, final

from cenote.api.codec import pack_ids, unpack_ids, unpack_rows
from cenote.api.errors import (
    CenoteError,
    InternalError,
    InvalidArgument,
    ResourceUnavailable,
    SessionUnknown,
)
from cenote.api.rows import COPY, PULL, SLOT_REF
from cenote.kv.directory import EtcdDirectory
from cenote.runtime.log import get_logger
from cenote.v1 import master_pb2 as pb

from .agent_core import AgentCore, Stage
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
from .attaching import SLOTS_PER_BLOCK, AgentIdentity, Attacher
from .copier import Copier
from .master_link import MasterLink
from .puller import Puller
from .segments import LocalSegments
from .writer_sessions import WriterSessions

__all__ = ["AgentIdentity", "StoreAgent", "WriterSessions"]

HELLO_S: Final = 2.0
SEEK_HELLO_S: Final = 0.4
"""To one of several masters: a stopped one takes the connection all the same, and says nothing."""
BEAT_MARGIN_S: Final = 3.0
COPYING_BEAT_S: Final = 0.005
"""How long a heartbeat may be held while copies are under way."""
SEEK_BEAT_MARGIN_S: Final = 1.0
"""Where there are several masters: it is soon made sure whether this one still leads."""
CUT_S: Final = 1.0
CLAIMS_S: Final = 1.0
"""How long a daemon waits for writers over shared memory to end what they have begun. What is left
then is told to the master, which withholds it."""
_CLAIMS_LOOK_S: Final = 0.005
_JOIN_S: Final = 0.4
_LOG_INTERVAL_S: Final = 5.0
_CUT_IDS_PER_BEAT: Final = 4096
_QUARANTINED_IDS_MAX: Final = 65_536

_log = get_logger(__name__)


@final
class StoreAgent:
    """Keeps `segments` attached to the leader among `masters`, from `start` to `stop`.

    `masters` is empty where they are looked up in `directory`. `connect` makes a link to an
    address. `stats` and `is_preparing` tell what heartbeats report and whether there is soon more
    of it. `on_keys` gets what the master says that tickets are signed with. `on_end` is called, in
    the agent's thread, with the error that ends it by itself: a master that refuses this daemon
    before it was ever attached.
    """

    def __init__(
        self,
        identity: AgentIdentity,
        segments: LocalSegments,
        sessions: WriterSessions,
        masters: Sequence[str],
        *,
        connect: Callable[[str], MasterLink],
        stats: Callable[[], pb.NodeStats],
        is_preparing: Callable[[], bool],
        on_end: Callable[[CenoteError], None],
        copier: Copier | None = None,
        puller: Puller | None = None,
        directory: EtcdDirectory | None = None,
        jitter: Callable[[], float] = random.random,
        slots_per_block: int = SLOTS_PER_BLOCK,
        on_keys: Callable[[bytes], None] | None = None,
    ) -> None:
        self._on_keys = on_keys
        self._identity = identity
        self._segments = segments
        self._sessions = sessions
        self._pool = segments.pool
        self._master_pool_id = b""
        """As its hello says."""
        self._connect = connect
        self._stats = stats
        self._is_preparing = is_preparing
        self._on_end = on_end
        self._copier = copier
        self._puller = puller
        self._copying = [one for one in (copier, puller) if one is not None]
        self._core = AgentCore(
            masters, last_epoch=segments.epoch, jitter=jitter, look_up=directory is not None
        )
        self._directory = directory
        self._link: MasterLink | None = None
        self._link_lock = threading.Lock()
        several = directory is not None or len(masters) > 1
        self._address = masters[0] if masters else ""
        self._hello_s = SEEK_HELLO_S if several else HELLO_S
        self._beat_margin_s = SEEK_BEAT_MARGIN_S if several else BEAT_MARGIN_S
        self._claiming: set[bytes] = set()
        """Sessions with claims that the master was told of."""
        self._instructions: list[pb.Instruction] = []
        self._waiting_logged_s: dict[int, float] = {}
        """When it was logged last that an instruction has to wait, by its number."""
        self._cut_to_report: deque[bytes] = deque()
        self._stopping = threading.Event()
        self._attacher = Attacher(identity, segments, self._stopping, slots_per_block)
        self._settled = threading.Event()
        self._logged_s = -_LOG_INTERVAL_S
        self.beaten_s = math.nan
        """When a heartbeat was answered last, on the monotonic clock."""
        self._thread = threading.Thread(target=self._run, name="cenote-agent", daemon=True)

    @property
    def stage(self) -> Stage:
        """Where the daemon stands with its master."""
        return self._core.stage

    def start(self) -> None:
        """Begin to look for the leader."""
        self._thread.start()

    def wait_settled(self, timeout_s: float) -> bool:
        """Wait, at most so long, until it attached or met with trouble; whether it is attached."""
        self._settled.wait(timeout_s)
        return self.stage is Stage.ATTACHED

    def stop(self, *, contents_survive: bool, timeout_s: float = 1.0) -> bool:
        """End the thread and detach where attached; whether the master knows of it.

        Takes `timeout_s` at most. `contents_survive` tells the master that a restart will bring the
        objects back.
        """
        until_s = time.monotonic() + timeout_s
        self._stopping.set()
        self._settled.set()
        self._close_link()
        if self._thread.ident is not None:
            self._thread.join(min(_JOIN_S, timeout_s / 2))
        if not isinstance(self._core.stop(), Detach):
            return False
        request = pb.DetachRequest(
            node_id=self._segments.node_id,
            epoch=self._segments.epoch,
            contents_survive=contents_survive,
            start_number=self._identity.start_number,
        )
        try:
            link = self._connect(self._address)
            try:
                link.detach(request, max(0.01, until_s - time.monotonic()))
            finally:
                link.close()
        except CenoteError as error:
            _log.warning("the master could not be told that this daemon stops", why=error)
            return False
        _log.info("detached", node=self._segments.node_id, contents_survive=contents_survive)
        return True

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        action = self._core.start()
        while not self._stopping.is_set():
            if isinstance(action, End):
                if action.error is not None:
                    self._on_end(action.error)
                break
            action = self._core.handle(self._carry_out(action))
            if isinstance(action, Pause | End) or self._core.stage is Stage.ATTACHED:
                self._settled.set()
        self._close_link()

    def _carry_out(self, action: Action) -> Event:
        try:
            match action:
                case LookUp():
                    return self._look_up()
                case SayHello(address):
                    return self._say_hello(address)
                case CutOlder(epoch):
                    return self._cut_older(epoch)
                case SendAttach():
                    return self._send_attach()
                case Beat():
                    return self._beat(action)
                case Execute(done):
                    return self._execute(done)
                case Pause(seconds, why):
                    self._note_trouble(why)
                    self._stopping.wait(seconds)
                    return Paused()
                case Detach() | End():  # carried out by `stop` and `_run`
                    return Detached()
        except CenoteError as error:
            return Failed(error)
        except Exception as error:  # a bug here must not leave the daemon without a master
            _log.exception("the agent failed", doing=type(action).__name__)
            return Failed(InternalError(f"{type(action).__name__} failed: {error!r}"))

    def _note_trouble(self, why: str) -> None:
        now_s = time.monotonic()
        if why and now_s - self._logged_s >= _LOG_INTERVAL_S and not self._stopping.is_set():
            self._logged_s = now_s
            _log.warning("not in touch with a master", master=self._address or "none yet", why=why)

    @property
    def _other_pool(self) -> bool:
        """The master's metadata are not those of the pool that this daemon belongs to."""
        return self._master_pool_id != self._pool.pool_id

    # ---- actions ------------------------------------------------------------------------------

    def _look_up(self) -> Event:
        assert self._directory is not None
        places = self._directory.look_up()
        return Found(tuple(address for place in places for address in place.addresses))

    def _say_hello(self, address: str) -> Event:
        self._close_link()
        self._address = address
        link = self._connect(address)
        with self._link_lock:
            self._link = link
        if self._stopping.is_set():  # `stop` may have looked for the link just before
            link.close()
        greeting = link.hello(self._hello_s)
        self._master_pool_id = greeting.pool_id
        return Greeted(
            greeting.epoch,
            greeting.is_leader,
            tuple(greeting.leader_addresses),
            greeting.past_tenure,
            self._other_pool,
        )

    def _cut_older(self, epoch: int) -> Event:
        self._segments.fence(epoch)
        for one in self._copying:
            one.fence(epoch)
        quiet = self._sessions.end_older_writes(epoch, CUT_S)
        if quiet:
            until_s = time.monotonic() + CLAIMS_S
            while self._is_written() and time.monotonic() < until_s:
                if self._stopping.wait(_CLAIMS_LOOK_S):
                    break
        return OlderCut(0 if quiet else 1)

    def _is_written(self) -> bool:
        """Whether writes of before are still under way. (Views may last.)"""
        return any(not claim.is_view for claim in self._segments.claims.older())

    def _send_attach(self) -> Event:
        began_s = time.monotonic()
        response = self._attacher.attach(
            self._current_link(), self._master_pool_id, other_pool=self._other_pool
        )
        self._claiming = set(self._attacher.claiming)
        if response.epoch == self._core.epoch:
            self._take_up(response, began_s)
        return Attached(response.epoch, response.heartbeat_interval_ms / 1000)

    def _take_up(self, response: pb.AttachResponse, began_s: float) -> None:
        if len(response.segment_ids) != len(self._segments.all()):
            raise InternalError(f"{len(response.segment_ids)} segment ids came from the master")
        if response.HasField("pool"):
            # First: who followed that epoch must know of which pool it is, whatever happens next.
            self._pool.keep(response.pool)
        cleared = self._clear(response.clear_slots)
        if self._on_keys is not None:
            self._on_keys(response.access_keys)
        self._segments.attached(
            response.node_id, response.segment_ids, response.last_seq, response.first_grant_id
        )
        _log.info(
            "attached",
            master=self._address,
            node=response.node_id,
            epoch=response.epoch,
            segments=list(response.segment_ids),
            slots=sum(segment.table.sealed for segment in self._segments.all()),
            told=self._attacher.told_slots,
            cleared=cleared,
            seconds=round(time.monotonic() - began_s, 3),
        )

    def _beat(self, beat: Beat) -> Event:
        self._cut_to_report.extend(self._sessions.poll())
        if self._segments.give_up_failed():
            raise SessionUnknown("an SSD segment failed: this daemon attaches without it")
        claiming = {claim.session_id for claim in self._segments.claims.older()}
        withdrawn = sorted(self._claiming - claiming)
        quarantined = [*self._sessions.quarantined(), *sorted(self._claiming & claiming)]
        cut = list(itertools.islice(self._cut_to_report, _CUT_IDS_PER_BEAT))
        # What comes of copies is wanted soon: their space, and the next ones, wait for it.
        busy = any(one.is_busy for one in self._copying)
        wait_s = min(beat.wait_s, COPYING_BEAT_S) if busy else beat.wait_s
        endpoints = tuple(self._identity.endpoints)
        copied = [one.tell() for one in self._copying]
        request = pb.HeartbeatRequest(
            node_id=self._segments.node_id,
            epoch=self._segments.epoch,
            segments=[segment.info(retired=False) for segment in self._segments.all()],
            wait_ms=round(wait_s * 1000),
            done_instruction=beat.done_instruction,
            cut_session_ids=pack_ids(cut),
            quarantined_session_ids=pack_ids(quarantined[:_QUARANTINED_IDS_MAX]),
            withdrawn_session_ids=pack_ids(withdrawn),
            stats=self._stats(),
            start_number=self._identity.start_number,
            copied=b"".join(copied),
            endpoints=() if endpoints == self._attacher.told_endpoints else endpoints,
        )
        response = self._current_link().heartbeat(request, beat.wait_s + self._beat_margin_s)
        if self._on_keys is not None:
            self._on_keys(response.access_keys)
        self.beaten_s = time.monotonic()
        self._attacher.told_endpoints = endpoints
        for one, told in zip(self._copying, copied, strict=True):
            one.told(told)
        self._claiming.difference_update(withdrawn)
        for _ in cut:  # told; others may have come behind them meanwhile
            self._cut_to_report.popleft()
        self._instructions = list(response.instructions)
        return Beaten(response.epoch, len(self._instructions), self._is_restless())

    def _is_restless(self) -> bool:
        return bool(
            self._cut_to_report
            or self._claiming
            or any(one.is_busy for one in self._copying)
            or self._is_preparing()
            or self._sessions.quarantined()
        )

    # ---- instructions -------------------------------------------------------------------------

    def _execute(self, done: int) -> Event:
        """Carry out all that can be; the number counts as far as nothing before it is left."""
        unbroken = True
        for instruction in sorted(self._instructions, key=lambda i: i.number):
            if instruction.number <= done:
                continue
            unbroken = self._execute_one(instruction) and unbroken
            if unbroken:
                done = instruction.number
        numbers = {instruction.number for instruction in self._instructions}
        for number in self._waiting_logged_s.keys() - numbers:
            del self._waiting_logged_s[number]
        self._instructions = []
        return Executed(done, self._is_restless())

    def _execute_one(self, instruction: pb.Instruction) -> bool:
        """False where it must be tried again later."""
        what = instruction.WhichOneof("what")
        try:
            match what:
                case "grow_slots":
                    self._grow_slots(instruction.grow_slots)
                case "cut_sessions":
                    self._cut_sessions(instruction.cut_sessions.session_ids)
                case "clear_slots":
                    self._clear(instruction.clear_slots.slots)
                case "copy_extents":
                    self._copy(instruction.copy_extents.copies)
                case "pull_replicas":
                    self._pull(instruction.pull_replicas)
                case "keep_pool":
                    self._pool.keep(instruction.keep_pool)
                case _:
                    raise InvalidArgument(
                        f"this daemon can't carry out {what or 'an unknown instruction'}",
                        remedy="install the same cenote release everywhere",
                    )
        except InvalidArgument as error:
            # It will never be possible, and others wait behind it.
            _log.error(
                "an instruction was refused", number=instruction.number, what=what, why=error
            )
        except ResourceUnavailable as error:
            # The master sends it again five times a second for as long as it can't be done.
            now_s, number = time.monotonic(), instruction.number
            if now_s - self._waiting_logged_s.get(number, -math.inf) >= _LOG_INTERVAL_S:
                self._waiting_logged_s[number] = now_s
                _log.warning("an instruction has to wait", number=number, what=what, why=error)
            return False
        return True

    def _grow_slots(self, grow: pb.GrowSlots) -> None:
        segment = self._segments.by_id(grow.segment_id)
        if segment is None:
            raise InvalidArgument(f"this daemon has no segment {grow.segment_id}")
        if segment.retire(grow.offset, grow.length, grow.slots):
            _log.info("slot table grown", segment=grow.segment_id, slots=segment.table.slots)

    def _cut_sessions(self, session_ids: bytes) -> None:
        wanted = unpack_ids(session_ids, "session_ids")
        cut, quarantined = self._sessions.cut(wanted, CUT_S)
        self._cut_to_report.extend(cut)
        for session_id in quarantined:
            _log.warning(
                "a session could not be cut off yet: a stopped process has memory mapped",
                session=session_id,
            )

    def _copy(self, packed: bytes) -> None:
        if self._copier is None:
            raise InvalidArgument("this daemon has no SSD")
        self._copier.enqueue(unpack_rows(packed, COPY, "copies"), self._core.epoch)

    def _pull(self, message: pb.PullReplicas) -> None:
        if self._puller is None:
            raise InvalidArgument("this daemon copies nothing from others")
        self._puller.enqueue(message, unpack_rows(message.pulls, PULL, "pulls"), self._core.epoch)

    def _clear(self, packed: bytes) -> int:
        refs = unpack_rows(packed, SLOT_REF, "slots")
        return sum(
            segment.clear(refs[refs["segment_index"] == segment.index])
            for segment in (self._segments.all() if len(refs) else ())
        )

    # ---- the link -----------------------------------------------------------------------------

    def _current_link(self) -> MasterLink:
        if self._link is None:
            raise InternalError("there is no link to a master")
        return self._link

    def _close_link(self) -> None:
        with self._link_lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()
