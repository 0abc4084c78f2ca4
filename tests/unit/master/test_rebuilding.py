"""A pool whose master lost its metadata is rebuilt from what its daemons keep."""

from __future__ import annotations

from typing import Any

import pytest

from cenote.api.errors import (
    FingerprintMismatch,
    NamespaceReset,
    PoolMismatch,
    SessionUnknown,
    Unavailable,
)
from cenote.api.rows import PutStatus
from cenote.master import commands as c
from cenote.master.effects import DURABLE, NamespaceOpened, Notice, PoolKnown
from cenote.master.instructions import Instruction
from cenote.master.state import MasterState
from cenote.master.state_config import StateConfig
from unit.master.state_checks import check
from unit.master.state_kit import KIB, FakeNode, Kit, new_node, restarted, session_id


class PoolKit(Kit):
    """Daemons that keep what they are told of their pool."""

    def __init__(self, pool_id: bytes, epoch: int = 1, **changes: Any) -> None:
        super().__init__(StateConfig(pool_id=pool_id, **changes), epoch)
        self.copies: dict[int, c.PoolCopy] = {}
        self.effects += self.state.start(self.now_s)

    def attach_command(self, node: FakeNode) -> c.Attach:
        command = super().attach_command(node)
        copy = self.copies.get(node.number)
        if copy is not None and copy.pool_id == self.state.pool_id:
            copy = c.PoolCopy(copy.pool_id, copy.ancestors, [])
        command.pool = copy
        return command

    def _obey(self, node: FakeNode, instruction: Instruction) -> None:
        super()._obey(node, instruction)
        told = instruction.keep_pool
        if told is None:
            return
        known = self.copies.get(node.number)
        kept = {}
        if known is not None and known.pool_id == told.pool_id:
            kept = {opened.namespace_id: opened for opened in known.namespaces}
        kept |= {opened.namespace_id: opened for opened in told.namespaces}
        self.copies[node.number] = c.PoolCopy(told.pool_id, told.ancestors, list(kept.values()))

    def open(self, name: str, fingerprint: bytes = b"f", seed: int = 7) -> c.NamespaceReply:
        reply: c.NamespaceReply = self.apply(c.OpenNamespace(name, fingerprint, True, 1, seed))
        return reply

    def reopened(self) -> PoolKit:
        """As a client does, which has lost its session and namespace."""
        self.namespace = None
        self.with_session()
        return self

    def notices(self) -> list[str]:
        return [effect.text for effect in self.new(Notice)]


OLD, NEW, NEWER = b"o" * 16, b"n" * 16, b"r" * 16


@pytest.fixture
def kit() -> PoolKit:
    made = PoolKit(OLD)
    made.with_nodes(new_node(1), new_node(2)).with_session()
    made.heartbeats()
    made.put(list(range(8)), KIB)
    made.open("other", b"g", seed=99)
    made.heartbeats()
    return made


def lost(kit: PoolKit, pool_id: bytes = NEW) -> PoolKit:
    """Another master with an empty directory, in an epoch above; no daemon has come yet."""
    fresh = PoolKit(pool_id, kit.state.epoch + 1)
    fresh.copies = dict(kit.copies)
    fresh.now_s = kit.now_s
    fresh.requests = kit.requests
    fresh.namespace = kit.namespace
    for node in kit.nodes.values():
        node.process_id += 1
        node.start_number += 1
        node.done_instruction = 0
    return fresh


def all_attached(kit: PoolKit, old: PoolKit) -> PoolKit:
    for node in old.nodes.values():
        kit.attach(node)
    kit.heartbeats()
    return kit


def test_everything_is_there_again(kit: PoolKit) -> None:
    fresh = lost(kit)
    with pytest.raises(NamespaceReset):  # of a client that has not noticed: its id is nobody's
        fresh.exists(1)
    all_attached(fresh, kit).reopened()
    assert fresh.namespace is not None
    assert kit.namespace is not None
    assert fresh.namespace.namespace_id == kit.namespace.namespace_id
    assert fresh.namespace.digest_seed == kit.namespace.digest_seed
    assert fresh.exists(*range(9)) == [1] * 8 + [0]
    with pytest.raises(FingerprintMismatch):
        fresh.open("other", b"not g")
    assert "removed" in fresh.notices()[0]
    assert fresh.state.status(fresh.now_s).notice == fresh.notices()[0]
    assert fresh.put([50]) == [PutStatus.GRANTED]
    check(fresh.state)
    assert {copy.pool_id for copy in fresh.copies.values()} == {NEW}
    assert all(copy.ancestors == [OLD] for copy in fresh.copies.values())


def test_a_rebuilt_pool_is_replayed_and_goes_on_rebuilding(kit: PoolKit) -> None:
    fresh = lost(kit)
    first, second = kit.nodes.values()
    assert len(first.inventory())
    assert len(second.inventory())
    fresh.attach(first)
    fresh.reopened()
    assert 0 in fresh.remove(*range(4))  # the other daemon has some of them
    again = MasterState(StateConfig(pool_id=NEWER), fresh.state.epoch + 1)
    for effect in fresh.effects:
        if isinstance(effect, DURABLE):
            again.replay(effect)
    fresh.state = again
    fresh.effects += again.start(fresh.now_s)
    assert again.pool_id == NEW
    all_attached(fresh, kit).reopened()
    # What was removed meanwhile stays removed, whoever brings it.
    assert fresh.exists(*range(4)) == [0] * 4
    assert fresh.exists(*range(4, 8)) == [1] * 4
    check(again)


def test_adopting_ends_with_its_window(kit: PoolKit) -> None:
    fresh = lost(kit)
    first, second = kit.nodes.values()
    fresh.attach(first)
    for _ in range(70):
        fresh.heartbeat(first)
        fresh.tick(10.0)
    assert fresh.new(PoolKnown)[-1].adopt_below == 0
    before = len(second.inventory())
    reply = fresh.attach(second)
    assert before
    assert reply.adopted == 0


def test_a_namespace_that_was_opened_too_early_gives_way(kit: PoolKit) -> None:
    fresh = lost(kit)
    early = fresh.reopened().namespace
    assert early is not None
    assert kit.namespace is not None
    assert early.namespace_id != kit.namespace.namespace_id
    assert fresh.open("only here").namespace_id not in (0, early.namespace_id)
    all_attached(fresh, kit)
    with pytest.raises(NamespaceReset):
        fresh.exists(1)
    fresh.reopened()
    assert fresh.exists(*range(8)) == [1] * 8
    assert {n.name for n in fresh.state.namespaces()} == {"a", "other", "only here"}
    # The same comes of its journal.
    replayed = restarted(fresh)
    names = {(n.name, n.namespace_id) for n in fresh.state.namespaces()}
    assert {(n.name, n.namespace_id) for n in replayed.state.namespaces()} == names


def test_a_namespace_in_which_keys_were_removed_gives_way_to_none(kit: PoolKit) -> None:
    """The daemon that comes first knows of no namespace: what is removed until the others come must
    not return with them."""
    fresh = lost(kit)
    first, second = kit.nodes.values()
    fresh.copies[first.number] = c.PoolCopy(OLD, [], [])
    fresh.attach(first)
    fresh.reopened()
    assert fresh.remove(1) == [0]
    fresh.attach(second)
    assert any("opened anew" in text for text in fresh.notices())
    assert fresh.exists(*range(8)) == [0] * 8
    check(fresh.state)


def test_of_two_copies_the_newer_generation_counts(kit: PoolKit) -> None:
    first, second = kit.nodes.values()
    reply = kit.apply(c.ResetNamespace("a", 1234))
    kit.heartbeat(second)  # the first one has not heard of it
    fresh = lost(kit)
    all_attached(fresh, kit).reopened()
    assert fresh.namespace is not None
    assert (fresh.namespace.generation, fresh.namespace.digest_seed) == (2, 1234)
    assert reply.generation == 2
    assert fresh.exists(*range(8)) == [0] * 8
    assert first.number != second.number


def test_a_generation_that_is_learned_of_after_keys_were_removed_brings_none_back(
    kit: PoolKit,
) -> None:
    """Keys have other digests in it: what was removed can't be told from what was not."""
    first, second = kit.nodes.values()
    kit.apply(c.ResetNamespace("a", 1234))
    kit.heartbeat(second)
    kit.namespace = None
    kit.with_session()
    kit.put(list(range(4)), KIB)
    fresh = lost(kit)
    fresh.attach(first)
    fresh.reopened()
    fresh.remove(1)
    fresh.attach(second)
    assert any("reset before" in text for text in fresh.notices())
    fresh.reopened()
    assert fresh.namespace is not None
    assert fresh.namespace.generation == 3
    assert fresh.namespace.digest_seed != 1234
    assert fresh.exists(*range(8)) == [0] * 8
    assert fresh.put([1]) == [PutStatus.GRANTED]
    check(fresh.state)


def test_copies_that_contradict_each_other_are_refused(kit: PoolKit) -> None:
    fresh = lost(kit)
    first, second = kit.nodes.values()
    fresh.attach(first)
    opened = kit.copies[second.number].namespaces[0]
    fresh.copies[second.number].namespaces[0] = NamespaceOpened(
        opened.name, opened.namespace_id, opened.generation, b"another", 5, 1
    )
    before = len(fresh.state.nodes(fresh.now_s))
    with pytest.raises(PoolMismatch, match="another seed or fingerprint"):
        fresh.attach(second)
    assert len(fresh.state.nodes(fresh.now_s)) == before
    check(fresh.state)


def test_a_daemon_of_another_pool_is_refused(kit: PoolKit) -> None:
    other = PoolKit(NEW, epoch=9)
    other.with_nodes(new_node(7)).with_session()
    other.put([1])
    (first, _) = kit.nodes.values()
    other.copies = dict(kit.copies)
    with pytest.raises(PoolMismatch, match="in use"):
        other.attach(first)
    kept_nowhere = Kit(epoch=9)
    command = kit.attach_command(first)
    with pytest.raises(PoolMismatch, match="metadata have no id"):
        kept_nowhere.apply(command)


def test_a_pool_is_rebuilt_time_and_again_from_copies_of_any_age(kit: PoolKit) -> None:
    """One daemon was away while the other one followed a rebuilt master: they are kin."""
    first, second = kit.nodes.values()
    middle = lost(kit)
    middle.attach(first)
    middle.heartbeat(first)
    assert middle.copies[first.number].pool_id == NEW
    assert middle.copies[second.number].pool_id == OLD
    for order in ((first, second), (second, first)):
        fresh = lost(middle, NEWER)
        fresh.nodes = {}
        for node in order:
            node.start_number += 1
            node.process_id += 1
            fresh.attach(node)
        fresh.heartbeats()
        fresh.reopened()
        assert fresh.exists(*range(8)) == [1] * 8
        assert set(fresh.copies[2].ancestors) == {OLD, NEW}
        # as it was before, for the other order
        fresh.copies.clear()


def test_sessions_and_ids_of_before_mean_nothing(kit: PoolKit) -> None:
    """What a running client sends before it has heard of the new master is refused."""
    fresh = all_attached(lost(kit), kit)
    with pytest.raises(SessionUnknown):
        fresh.start([60])
    with pytest.raises(SessionUnknown):
        fresh.acquire(1)
    assert session_id(1) not in fresh.state._pool.sessions.by_id


def test_what_was_written_over_is_not_adopted(kit: PoolKit) -> None:
    """Also where what was written there can't be adopted itself: half of it is missing."""
    node = kit.nodes[1]
    table = node.segments[0].table
    old, newer = sorted(table.values(), key=lambda row: int(row["seq"]))[:2]
    newer["offset"], newer["length"] = old["offset"], old["length"]
    newer["extent_count"] = 2
    fresh = lost(kit)
    fresh.attach(node)
    keys = {int(row["seq"]) for row in table.values()}
    assert not keys & {int(old["seq"]), int(newer["seq"])}
    check(fresh.state)


def test_nothing_is_taken_away_before_it_is_known_what_is_there(kit: PoolKit) -> None:
    fresh = lost(kit).reopened()
    with pytest.raises(Unavailable, match="no store daemon has ever attached"):
        fresh.remove(1)
    with pytest.raises(Unavailable, match="no store daemon has ever attached"):
        fresh.apply(c.ResetNamespace("a", 77))
    all_attached(fresh, kit).reopened()
    assert fresh.remove(1) == [1]
    assert fresh.apply(c.ResetNamespace("a", 77)).generation == 2
