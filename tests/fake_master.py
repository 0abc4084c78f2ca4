"""A master and sessions that do as they are told, for tests of a store daemon's agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from cenote.api.errors import CenoteError, ClientClosed, SessionUnknown, StaleEpoch
from cenote.api.rows import BLOCK, SLOT_SUM
from cenote.v1 import master_pb2 as pb

__all__ = ["FakeLink", "FakeMaster", "FakeSessions"]


class FakeMaster:
    """One master and its links: answers as `MasterApi` does, notes what it was asked."""

    def __init__(self, epoch: int = 3) -> None:
        self.lock = threading.Condition()
        self.epoch = epoch
        self.leader: str | None = None  # None: this one
        self.down: CenoteError | None = None
        self.attach_error: CenoteError | None = None
        self.beat_error: CenoteError | None = None
        self.known = False
        self.attaches: list[list[pb.AttachRequest]] = []
        self.asked: list[list[pb.AttachRequest]] = []
        """Attaches by sums that were answered with what is wanted."""
        self.agrees = False
        """Whether sums are taken for right; else all that is sealed is wanted."""
        self.beats: list[pb.HeartbeatRequest] = []
        self.detaches: list[pb.DetachRequest] = []
        self.instructions: list[pb.Instruction] = []
        self.clear_slots = b""
        self.hellos = 0
        self._slices: list[pb.AttachRequest] = []

    def link(self, _address: str) -> FakeLink:
        return FakeLink(self)

    def wanted(self, first: pb.AttachRequest) -> bytes:
        """BLOCK rows that an attach by sums should tell of."""
        if not first.slots_per_block or first.told_blocks or self.agrees:
            return b""
        rows = [
            (segment.node_segment_index, block)
            for segment in first.segments
            for block in np.flatnonzero(np.frombuffer(segment.slot_sums, SLOT_SUM)["count"])
        ]
        return np.array(rows, BLOCK).tobytes() if rows else b""

    def instruct(self, instruction: pb.Instruction) -> int:
        with self.lock:
            instruction.number = len(self.instructions) + 1
            self.instructions.append(instruction)
            self.lock.notify_all()
            return instruction.number

    def done(self) -> int:
        with self.lock:
            return max((beat.done_instruction for beat in self.beats[-1:]), default=0)

    def change(self, **changes: object) -> None:
        with self.lock:
            for name, value in changes.items():
                setattr(self, name, value)
            self.lock.notify_all()


class FakeLink:
    """Implements `MasterLink`."""

    def __init__(self, master: FakeMaster) -> None:
        self.master = master
        self.closed = False

    def _check(self) -> None:
        if self.closed:
            raise ClientClosed()
        if self.master.down is not None:
            raise self.master.down

    def hello(self, deadline_s: float) -> pb.HelloResponse:
        master = self.master
        with master.lock:
            self._check()
            master.hellos += 1
            leads = master.leader is None
            return pb.HelloResponse(
                epoch=master.epoch, is_leader=leads, leader_addresses=[master.leader or "here"]
            )

    def attach(self, request: pb.AttachRequest, deadline_s: float) -> pb.AttachResponse:
        master = self.master
        with master.lock:
            self._check()
            if master.attach_error is not None:
                raise master.attach_error
            master._slices.append(pb.AttachRequest.FromString(request.SerializeToString()))
            if request.more:
                return pb.AttachResponse(epoch=master.epoch)
            wanted = master.wanted(master._slices[0])
            if wanted:
                master.asked.append(master._slices)
                master._slices = []
                return pb.AttachResponse(epoch=master.epoch, wanted_blocks=wanted)
            master.attaches.append(master._slices)
            master._slices = []
            master.known = True
            ids = [40 + i for i in range(len(master.attaches[-1][0].segments))]
            return pb.AttachResponse(
                node_id=7,
                epoch=master.epoch,
                segment_ids=ids,
                heartbeat_interval_ms=10_000,
                first_grant_id=master.epoch << 40 | 1,
                clear_slots=master.clear_slots,
            )

    def heartbeat(self, request: pb.HeartbeatRequest, deadline_s: float) -> pb.HeartbeatResponse:
        master = self.master
        until_s = time.monotonic() + request.wait_ms / 1000
        with master.lock:
            master.beats.append(pb.HeartbeatRequest.FromString(request.SerializeToString()))
            master.lock.notify_all()
            while True:
                self._check()
                if master.beat_error is not None:
                    raise master.beat_error
                if request.epoch != master.epoch:
                    raise StaleEpoch()
                if not master.known:
                    raise SessionUnknown()
                left = [i for i in master.instructions if i.number > request.done_instruction]
                wait_s = until_s - time.monotonic()
                if left or wait_s <= 0:
                    return pb.HeartbeatResponse(epoch=master.epoch, instructions=left)
                master.lock.wait(wait_s)

    def detach(self, request: pb.DetachRequest, deadline_s: float) -> pb.DetachResponse:
        with self.master.lock:
            self._check()
            self.master.detaches.append(request)
        return pb.DetachResponse()

    def close(self) -> None:
        with self.master.lock:
            self.closed = True
            self.master.lock.notify_all()


class FakeSessions:
    """Implements `WriterSessions`: what is in `stopped` can't be cut."""

    def __init__(self) -> None:
        self.stopped: set[bytes] = set()
        self.held: list[bytes] = []
        self.cut_calls: list[list[bytes]] = []
        self.ended_older: list[int] = []
        self.older_left = False

    def cut(
        self, session_ids: Sequence[bytes], timeout_s: float = 1.0
    ) -> tuple[list[bytes], list[bytes]]:
        self.cut_calls.append(list(session_ids))
        self.held += [s for s in session_ids if s in self.stopped]
        return [s for s in session_ids if s not in self.stopped], list(self.held)

    def poll(self) -> list[bytes]:
        out = [s for s in self.held if s not in self.stopped]
        self.held = [s for s in self.held if s in self.stopped]
        return out

    def quarantined(self) -> list[bytes]:
        return list(self.held)

    def end_older_writes(self, epoch: int, timeout_s: float = 1.0) -> bool:
        self.ended_older.append(epoch)
        return not self.older_left
