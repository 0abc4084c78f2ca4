"""Shares of new bytes at full speed: eviction ahead of need comes far too seldom to keep up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from cenote.api.rows import PutStatus
from cenote.master import commands as c
from unit.master.state_kit import KIB, MIB, Kit, new_node

SIZE = 256 * KIB
OLD_BYTES = 192 * MIB


def used_bytes(kit: Kit) -> dict[str, int]:
    return {node.name: node.used_bytes for node in kit.state.nodes(kit.now_s)}


def ratios(kit: Kit) -> dict[str, float]:
    return {n.name: n.used_bytes / n.capacity_bytes for n in kit.state.nodes(kit.now_s)}


def put_many(kit: Kit, numbers: Iterator[int], size_bytes: int, batch: int) -> int:
    """New objects of SIZE without a tick in between; how many bytes."""
    count = size_bytes // SIZE // batch
    for _ in range(count):
        keys = list(itertools.islice(numbers, batch))
        assert kit.put(keys, SIZE) == [PutStatus.GRANTED] * batch
    return count * batch * SIZE


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("bytes_per_tick", [0, 64 * MIB])
@pytest.mark.parametrize("fresh_bytes", [64 * MIB, 128 * MIB, 768 * MIB])
def test_a_fresh_node_gets_at_most_twice_its_share(
    batch: int, bytes_per_tick: int, fresh_bytes: int
) -> None:
    nodes = [new_node(number, OLD_BYTES, slots=8192) for number in (1, 2)]
    kit = Kit().with_nodes(*nodes).with_session()
    numbers = itertools.count()
    put_many(kit, numbers, OLD_BYTES * 5 // 2, 16)
    kit.attach(new_node(3, fresh_bytes, slots=8192))
    fair = fresh_bytes / (2 * OLD_BYTES + fresh_bytes)
    put_bytes = since_tick = 0
    while ratios(kit)["node-3"] < 0.9:
        done = put_many(kit, numbers, max(4 * MIB, batch * SIZE), batch)
        put_bytes += done
        since_tick += done
        if bytes_per_tick and since_tick >= bytes_per_tick:
            since_tick = 0
            kit.tick(0.02)
        fresh = used_bytes(kit)["node-3"]
        assert fresh <= 2 * fair * put_bytes + 2 * MIB, (fresh / put_bytes, fair)
        assert put_bytes < 4 * fresh_bytes, "the fresh node does not catch up"
    assert min(ratios(kit).values()) > 0.85


@pytest.mark.parametrize("batch", [1, 16])
def test_nodes_of_different_size_fill_evenly(batch: int) -> None:
    sizes = {1: 64 * MIB, 2: 256 * MIB, 3: 128 * MIB}
    nodes = [new_node(number, size, slots=8192) for number, size in sizes.items()]
    kit = Kit().with_nodes(*nodes).with_session()
    numbers = itertools.count()
    for _ in range(80):
        put_many(kit, numbers, 16 * MIB, batch)
        found = ratios(kit).values()
        assert max(found) - min(found) <= 0.10, ratios(kit)
    assert min(ratios(kit).values()) > 0.9


@pytest.mark.parametrize("batch", [1, 16])
def test_replicas_on_a_fresh_node_do_not_empty_the_others(batch: int) -> None:
    """Each key needs two of three domains, so the fresh one gets up to half of all copies."""
    nodes = [new_node(number, OLD_BYTES, slots=8192) for number in (1, 2)]
    kit = Kit().with_nodes(*nodes).with_session()
    numbers = itertools.count()
    for _ in range(OLD_BYTES * 5 // 4 // SIZE // 16):
        kit.put(list(itertools.islice(numbers, 16)), SIZE, replicas=2, min_replicas=2)
    kit.attach(new_node(3, 64 * MIB, slots=8192))
    for _ in range(OLD_BYTES // SIZE // batch):
        keys = list(itertools.islice(numbers, batch))
        statuses = kit.put(keys, SIZE, replicas=2, min_replicas=2)
        assert statuses == [PutStatus.GRANTED] * batch
    assert min(ratios(kit).values()) > 0.8


def test_a_node_whose_memory_is_not_there_yet_is_full_and_not_too_small() -> None:
    node = new_node(1, 8 * MIB, slots=512)
    node.segments[0].ready_bytes = 0
    kit = Kit().with_nodes(node).with_session()
    assert kit.put([1], SIZE) == [PutStatus.NO_SPACE]
    assert kit.put([2], 9 * MIB) == [PutStatus.TOO_LARGE]
    node.segments[0].ready_bytes = 8 * MIB
    kit.heartbeat(node)
    assert kit.put([1], SIZE) == [PutStatus.GRANTED]


def test_a_node_that_is_back_starts_with_little() -> None:
    """And has its share again ten seconds later."""
    kit = Kit().with_nodes(*(new_node(i, OLD_BYTES, slots=8192) for i in (1, 2, 3))).with_session()
    numbers = itertools.count()
    put_many(kit, numbers, 48 * MIB, 1)
    kit.apply(c.NodeProbed(3, False))
    put_many(kit, numbers, 4 * MIB, 1)
    kit.apply(c.NodeProbed(3, True))

    def next_share() -> float:
        before = used_bytes(kit)["node-3"]
        done = put_many(kit, numbers, 24 * MIB, 1)
        return (used_bytes(kit)["node-3"] - before) / done

    assert 0 < next_share() < 0.15
    for _ in range(25):
        kit.tick(0.2)
        kit.heartbeats()
    assert 0.1 < next_share() < 0.3
    for _ in range(30):
        kit.tick(0.2)
        kit.heartbeats()
    assert next_share() > 0.3
