"""The agent against a master that does as it is told: attach, heartbeats, instructions, the end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cenote.api.errors import (
    CenoteError,
    InvalidArgument,
    NotLeader,
    ResourceUnavailable,
    StaleEpoch,
    Unavailable,
)
from cenote.api.rows import BLOCK, CLAIM, SLOT, SLOT_SUM
from cenote.store.agent import AgentIdentity, StoreAgent
from cenote.store.agent_core import Stage
from cenote.store.dram import DramSegment
from cenote.store.node_files import NodeFiles
from cenote.store.segments import LocalSegments, open_segments
from cenote.transport.claims import CLAIM_PAGE_BYTES, ClaimPage
from cenote.transport.mapping import Mapping
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb
from fake_master import FakeLink, FakeMaster, FakeSessions
from promptness import ends_within
from slot_rows import Sealed, refs, seal_arguments
from waiting import wait_until

BOOT = b"1" * 16
MIB = 1 << 20


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[LocalSegments]:
    files = NodeFiles(tmp_path, "n1")
    opened = open_segments(files, 4 * MIB, BOOT)
    for segment in opened.dram():
        while segment.allocate_next(MIB):
            pass
        segment.table.admit(0, 0)  # so that tests can seal what an earlier process did
    yield opened
    opened.close()
    files.close()


@pytest.fixture
def master() -> FakeMaster:
    return FakeMaster()


class Fixture:
    def __init__(self, segments: LocalSegments, master: FakeMaster) -> None:
        self.segments, self.master = segments, master
        self.sessions = FakeSessions()
        self.preparing = False
        self.endpoints: list[common_pb2.Endpoint] = []
        self.ended: list[CenoteError] = []
        self.connect: Callable[[str], FakeLink] = master.link
        self.agent = self.make()

    def make(self, *masters: str, slots_per_block: int = 256) -> StoreAgent:
        identity = AgentIdentity(
            "n1", b"u" * 16, "boot", "rack-1", 123, "0.1", endpoints=self.endpoints
        )
        return StoreAgent(
            identity,
            self.segments,
            self.sessions,
            masters or ("here",),
            connect=lambda address: self.connect(address),
            stats=lambda: pb.NodeStats(read_bytes=11, sessions=2),
            is_preparing=lambda: self.preparing,
            on_end=self.ended.append,
            jitter=lambda: 0.0,
            slots_per_block=slots_per_block,
        )

    def attach(self) -> None:
        self.agent.start()
        wait_until(lambda: self.master.beats, what="the first heartbeat")

    @property
    def segment(self) -> DramSegment:
        (segment,) = self.segments.dram()
        return segment

    def seal(self, *rows: Sealed, epoch: int = 3) -> None:
        assert not self.segment.seal(epoch, 1, 1, *seal_arguments(rows)).any()


@pytest.fixture
def fixture(segments: LocalSegments, master: FakeMaster) -> Iterator[Fixture]:
    made = Fixture(segments, master)
    yield made
    made.agent.stop(contents_survive=True, timeout_s=2.0)
    assert not made.agent._thread.is_alive()


def test_it_attaches_with_what_it_has(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cenote.store.slots._SCAN_SLOTS", 4)
    monkeypatch.setattr("cenote.store.slots.INVENTORY_ROWS_MAX", 4)
    fixture.agent = fixture.make(slots_per_block=8)
    fixture.seal(*(Sealed(i, seq=i + 1) for i in range(10)))
    fixture.segment.retire(2 * MIB, 4096, fixture.segment.table.slots + 21)
    fixture.attach()
    ((asked,),) = fixture.master.asked
    assert (asked.attempt, asked.slots_per_block, asked.inventory, asked.told_blocks) == (
        1,
        8,
        b"",
        b"",
    )
    sums = np.frombuffer(asked.segments[0].slot_sums, SLOT_SUM)
    assert sums["count"].tolist() == [8, 2]
    (slices,) = fixture.master.attaches
    assert {s.attempt for s in slices} == {2}
    assert np.frombuffer(slices[0].told_blocks, BLOCK).tolist() == [(0, 0), (0, 1)]
    assert [s.more for s in slices] == [True, True, False]
    assert {(s.node_name, s.node_uuid, s.process_id) for s in slices} == {("n1", b"u" * 16, 123)}
    assert (slices[0].boot_id, slices[0].failure_domain) == ("boot", "rack-1")
    (info,) = slices[0].segments
    assert (info.ready_bytes, info.slots) == (info.size_bytes, fixture.segment.table.slots)
    assert len(info.retired_extents) == 24
    rows = np.frombuffer(b"".join(s.inventory for s in slices), SLOT)
    assert rows["seq"].tolist() == list(range(1, 11))
    assert fixture.sessions.ended_older == [3]
    assert (fixture.segments.epoch, fixture.segments.node_id) == (3, 7)
    assert fixture.segments.by_id(40) is fixture.segment
    beat = fixture.master.beats[0]
    assert (beat.node_id, beat.epoch, beat.stats.read_bytes) == (7, 3, 11)
    assert beat.segments[0].ready_bytes == info.size_bytes
    wait_until(lambda: len(fixture.master.beats) == 2, what="the second heartbeat")
    assert [b.wait_ms for b in fixture.master.beats] == [0, 10_000]


def test_endpoints_that_change_are_told_once(fixture: Fixture) -> None:
    before = common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_TCP, address="here:1")
    fixture.endpoints.append(before)
    fixture.preparing = True  # heartbeats are short then
    fixture.agent = fixture.make()
    fixture.attach()
    assert list(fixture.master.attaches[0][0].endpoints) == [before]
    assert not fixture.master.beats[0].endpoints
    new = common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_RDMA, address="here:1")
    fixture.endpoints.append(new)
    wait_until(
        lambda: any(beat.endpoints for beat in fixture.master.beats), what="the news to be told"
    )
    count = len(fixture.master.beats)
    [told] = [beat for beat in fixture.master.beats if beat.endpoints]
    assert list(told.endpoints) == [before, new]
    wait_until(lambda: len(fixture.master.beats) > count + 1, what="more heartbeats")
    assert sum(bool(beat.endpoints) for beat in fixture.master.beats) == 1


def test_where_the_sums_agree_no_inventory_is_sent(fixture: Fixture) -> None:
    fixture.seal(*(Sealed(i, seq=i + 1) for i in range(10)))
    fixture.master.agrees = True
    fixture.attach()
    ((attach,),) = fixture.master.attaches
    assert not fixture.master.asked
    assert (attach.slots_per_block, attach.inventory) == (256, b"")


def test_where_the_sums_never_agree_all_of_the_inventory_is_sent(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master whose table changes all the time."""
    fixture.seal(*(Sealed(i, seq=i + 1) for i in range(10)))
    tries = [0]

    def wanted(first: pb.AttachRequest) -> bytes:
        tries[0] += 1
        return np.array([(0, tries[0])], BLOCK).tobytes() if first.slots_per_block else b""

    monkeypatch.setattr(fixture.master, "wanted", wanted)
    fixture.attach()
    ((attach,),) = fixture.master.attaches
    told = [np.frombuffer(s[0].told_blocks, BLOCK)["block"].tolist() for s in fixture.master.asked]
    assert told == [[], [1], [1, 2]]
    assert attach.attempt == 4
    assert (attach.slots_per_block, len(attach.inventory) // SLOT.itemsize) == (0, 10)


def test_what_stopped_writers_claim_is_told_and_then_that_it_is_over(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cenote.store.agent.CLAIMS_S", 0.05)
    fixture.master.epoch = 3
    fixture.attach()
    file = fixture.segments.claim_file
    assert file is not None
    fd, offset = file.open_page(b"w" * 16)
    page = ClaimPage(
        Mapping(fd, CLAIM_PAGE_BYTES, CLAIM_PAGE_BYTES, b"", writable=True, offset=offset).memory
    )
    pen = page.claim_one(3 << 40 | 9, 0, 640, 100, 1.0)
    fixture.master.change(epoch=4, known=False)
    wait_until(lambda: len(fixture.master.attaches) == 2, what="the attach to the next epoch")
    (claim,) = np.frombuffer(fixture.master.attaches[1][0].claims, CLAIM)
    assert claim.tolist()[1:] == (0, 0, 640, 100)
    assert fixture.segments.first_grant_id == 4 << 40 | 1
    wait_until(
        lambda: fixture.master.beats[-1].quarantined_session_ids == b"w" * 16,
        what="the session to be in quarantine",
    )
    assert page.claim_one(3 << 40 | 9, 0, 640, 100, 1.0) == -1
    page.withdraw(pen)
    wait_until(
        lambda: any(b.withdrawn_session_ids == b"w" * 16 for b in fixture.master.beats),
        what="the claim to be over",
    )
    wait_until(lambda: not fixture.master.beats[-1].quarantined_session_ids, what="the end of it")
    os.close(fd)


def test_slots_that_the_master_does_not_know_are_cleared(fixture: Fixture) -> None:
    fixture.seal(Sealed(1, seq=1), Sealed(2, seq=2))
    fixture.master.clear_slots = refs((1, 3, 1), (2, 3, 1)).tobytes()
    fixture.attach()
    assert fixture.segment.table.sealed == 1


def test_instructions_are_carried_out_in_order(fixture: Fixture) -> None:
    fixture.seal(Sealed(1, seq=1), Sealed(2, seq=2))
    fixture.attach()
    slots = fixture.segment.table.slots
    grow = pb.GrowSlots(segment_id=40, offset=MIB, length=4096, slots=slots + 21)
    fixture.master.instruct(pb.Instruction(grow_slots=grow))
    clear = pb.ClearSlots(slots=refs((2, 3, 2)).tobytes())
    fixture.master.instruct(pb.Instruction(clear_slots=clear))
    last = fixture.master.instruct(
        pb.Instruction(cut_sessions=pb.CutSessions(session_ids=b"a" * 16 + b"b" * 16))
    )
    wait_until(lambda: fixture.master.done() == last, what="the instructions to be done")
    assert fixture.segment.table.slots == slots + 21
    assert fixture.segment.table.sealed == 1
    assert fixture.sessions.cut_calls == [[b"a" * 16, b"b" * 16]]
    told = b"".join(beat.cut_session_ids for beat in fixture.master.beats)
    assert told == b"a" * 16 + b"b" * 16


def test_what_can_never_be_done_does_not_hold_up_the_rest(
    fixture: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    fixture.attach()
    fixture.master.instruct(pb.Instruction(grow_slots=pb.GrowSlots(segment_id=999)))
    fixture.master.instruct(pb.Instruction(copy_extents=pb.CopyExtents()))
    fixture.master.instruct(pb.Instruction())
    fixture.master.instruct(pb.Instruction(clear_slots=pb.ClearSlots(slots=b"odd")))
    last = fixture.master.instruct(pb.Instruction(cut_sessions=pb.CutSessions()))
    wait_until(lambda: fixture.master.done() == last, what="the instructions to be done")
    assert caplog.text.count("an instruction was refused") == 4


def logged(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("an instruction has to wait")


def test_what_cannot_be_done_yet_is_tried_again_while_the_rest_goes_on(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, scarce = DramSegment.retire, threading.Event()
    scarce.set()

    def retire(self: DramSegment, offset: int, length: int, slots: int) -> bool:
        if scarce.is_set():
            raise ResourceUnavailable("no memory")
        return real(self, offset, length, slots)

    monkeypatch.setattr(DramSegment, "retire", retire)
    fixture.attach()
    slots = fixture.segment.table.slots + 21
    grow = pb.GrowSlots(segment_id=40, offset=0, length=4096, slots=slots)
    fixture.master.instruct(pb.Instruction(grow_slots=grow))
    last = fixture.master.instruct(
        pb.Instruction(cut_sessions=pb.CutSessions(session_ids=b"a" * 16))
    )
    wait_until(lambda: len(fixture.sessions.cut_calls) >= 2, what="a second try")
    assert fixture.master.done() == 0
    monkeypatch.setattr("cenote.store.agent._LOG_INTERVAL_S", 3600.0)
    so_far, tries = logged(caplog), len(fixture.sessions.cut_calls)
    wait_until(lambda: len(fixture.sessions.cut_calls) >= tries + 2, what="more tries")
    assert logged(caplog) == so_far >= 1  # not five times a second
    assert "not in touch with a master" not in caplog.text  # it is
    scarce.clear()
    wait_until(lambda: fixture.master.done() == last, what="the growth")
    assert fixture.segment.table.slots == slots


def test_a_session_that_could_not_be_cut_is_told_when_it_is(fixture: Fixture) -> None:
    stopped = b"s" * 16
    fixture.sessions.stopped.add(stopped)
    fixture.attach()
    cut = pb.CutSessions(session_ids=stopped + b"a" * 16)
    fixture.master.instruct(pb.Instruction(cut_sessions=cut))

    def quarantine_told() -> bool:
        return any(stopped == beat.quarantined_session_ids for beat in fixture.master.beats)

    wait_until(quarantine_told, what="the quarantine to be reported")
    assert not any(stopped in beat.cut_session_ids for beat in fixture.master.beats)
    fixture.sessions.stopped.clear()
    wait_until(
        lambda: any(stopped in beat.cut_session_ids for beat in fixture.master.beats),
        what="the cut to be reported",
    )
    wait_until(
        lambda: fixture.master.beats[-1].wait_ms == 10_000,
        what="heartbeats to be held for long again",
    )
    assert fixture.master.beats[-1].quarantined_session_ids == b""


def test_cut_sessions_are_reported_until_the_master_heard_it(fixture: Fixture) -> None:
    fixture.attach()
    fixture.master.instruct(pb.Instruction(cut_sessions=pb.CutSessions(session_ids=b"a" * 16)))
    fixture.master.change(beat_error=Unavailable("reply lost"))
    count = len(fixture.master.beats)
    wait_until(lambda: len(fixture.master.beats) > count + 1, what="lost heartbeats")
    fixture.master.change(beat_error=None)
    wait_until(
        lambda: any(b.cut_session_ids == b"a" * 16 for b in fixture.master.beats[count:]),
        what="the cut to be reported again",
    )


def test_memory_being_set_up_is_reported_soon(fixture: Fixture) -> None:
    fixture.preparing = True
    fixture.attach()
    wait_until(lambda: len(fixture.master.beats) >= 3, what="heartbeats")
    assert [b.wait_ms for b in fixture.master.beats[:3]] == [0, 200, 200]


def test_a_master_that_went_away_is_sought_and_found_without_a_new_attach(
    fixture: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    fixture.attach()
    fixture.master.change(down=Unavailable("nobody there"))
    wait_until(lambda: fixture.agent.stage is Stage.SEEKING, what="the loss to be noticed")
    assert fixture.segments.by_id(40) is not None, "it serves on"
    hellos, beats = fixture.master.hellos, len(fixture.master.beats)
    fixture.master.change(down=None)
    wait_until(lambda: len(fixture.master.beats) > beats, what="a heartbeat")
    assert fixture.master.hellos > hellos
    assert len(fixture.master.attaches) == 1
    (record,) = (r for r in caplog.records if r.getMessage() == "not in touch with a master")
    assert str(record.__dict__["cenote_fields"]["why"]).startswith("nobody there")


def test_a_restarted_master_gets_a_new_attach_after_older_writers_were_cut(
    fixture: Fixture,
) -> None:
    fixture.attach()
    fixture.sessions.older_left = True
    fixture.master.change(epoch=4, known=False)
    wait_until(lambda: fixture.sessions.ended_older.count(4) >= 2, what="older writers to be cut")
    assert fixture.segments.epoch == 4
    with pytest.raises(StaleEpoch):
        fixture.seal(Sealed(1), epoch=3)
    assert len(fixture.master.attaches) == 1
    fixture.sessions.older_left = False
    wait_until(lambda: len(fixture.master.attaches) == 2, what="the attach")
    wait_until(lambda: fixture.master.beats[-1].epoch == 4, what="a heartbeat")


def test_a_standby_sends_it_to_the_leader(fixture: Fixture) -> None:
    standby = FakeMaster()
    standby.leader = "there"
    asked: list[str] = []

    def connect(address: str) -> FakeLink:
        asked.append(address)
        return (fixture.master if address == "there" else standby).link(address)

    fixture.connect = connect
    fixture.agent = fixture.make("first", "second")
    fixture.attach()
    assert asked == ["first", "there"]
    fixture.master.change(beat_error=NotLeader(addresses=["elsewhere"]))
    wait_until(lambda: "elsewhere" in asked, what="the new leader to be asked")


def test_several_masters_are_asked_in_turn(fixture: Fixture) -> None:
    asked: list[str] = []
    dead = FakeMaster()
    dead.down = Unavailable("dead")

    def connect(address: str) -> FakeLink:
        asked.append(address)
        return (fixture.master if address == "c" else dead).link(address)

    fixture.connect = connect
    fixture.agent = fixture.make("a", "b", "c")
    fixture.attach()
    assert asked == ["a", "b", "c"]


def test_a_daemon_that_is_refused_at_first_ends(fixture: Fixture) -> None:
    refusal = InvalidArgument("the name is taken")
    fixture.master.attach_error = refusal
    fixture.agent.start()
    wait_until(lambda: fixture.ended, what="the end")
    assert fixture.ended == [refusal]


def test_a_bug_does_not_end_the_agent(
    fixture: Fixture, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def broken(epoch: int, timeout_s: float = 1.0) -> bool:
        calls.append(epoch)
        if len(calls) == 1:
            raise KeyError("oops")
        return True

    monkeypatch.setattr(fixture.sessions, "end_older_writes", broken)
    fixture.attach()
    assert "the agent failed" in caplog.text
    assert len(fixture.master.attaches) == 1


@pytest.mark.parametrize("survive", [True, False])
def test_stopping_detaches(fixture: Fixture, survive: bool) -> None:
    fixture.attach()
    with ends_within(1.0):
        assert fixture.agent.stop(contents_survive=survive)
    (detach,) = fixture.master.detaches
    assert (detach.node_id, detach.epoch, detach.contents_survive) == (7, 3, survive)
    assert not fixture.agent.stop(contents_survive=survive)


@pytest.mark.parametrize("how", ["never started", "no master", "master gone", "older left"])
def test_stopping_takes_no_time_in_any_state(fixture: Fixture, how: str) -> None:
    if how == "no master":
        fixture.master.down = Unavailable()
        fixture.agent.start()
    elif how == "master gone":
        fixture.attach()
        fixture.master.change(down=Unavailable())
    elif how == "older left":
        fixture.sessions.older_left = True
        fixture.agent.start()
        wait_until(lambda: fixture.sessions.ended_older, what="the cut")
    with ends_within(1.0):
        assert not fixture.agent.stop(contents_survive=True)
