"""Copies that are planned as a batch, beside the same ones planned one by one: the same objects get
one, and what is counted of them afterwards is the same."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cenote.master import demotion, ssd_room
from cenote.master.node_counters import NodeCounters
from cenote.master.state import StateConfig
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import KIB, FakeSegment
from unit.master.test_quotas import Tenants
from unit.master.tiers_kit import copy_all, ssd_node

NAMES = ("ann", "bob", "cid")
MEMORY_BYTES = 512 * KIB
BLOCK = 4 * KIB

Step: TypeAlias = tuple[str, int, int]
"""Whose turn, how many blocks are put, and how many of its earlier ones are read."""


@dataclass(frozen=True)
class Plan:
    ssd_blocks: int
    disks: int
    """That these lie on."""
    quotas: tuple[tuple[int, int, int], ...]
    """Of each name: blocks on the SSD, objects, priority."""
    budget_blocks: int
    allowance_blocks: int
    sizes: tuple[int, ...]
    steps: tuple[Step, ...]


quotas = st.tuples(
    st.sampled_from([0, 0, 8, 20, 40, 64, 100, 160]),
    st.sampled_from([0, 0, 0, 30, 80]),
    st.sampled_from([1, 2, 2, 3]),
)
steps = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(6, 60), st.integers(0, 6)),
    min_size=10,
    max_size=20,
)


def plans(
    ssd_blocks: st.SearchStrategy[int],
    budget_blocks: st.SearchStrategy[int],
    sizes: st.SearchStrategy[tuple[int, ...]],
) -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        ssd_blocks,
        st.sampled_from([1, 1, 2]),
        st.tuples(quotas, quotas, quotas),
        budget_blocks,
        st.integers(0, 60),
        sizes,
        steps.map(tuple),
    )


@dataclass
class Seen:
    """After one step."""

    ordered: set[int]
    """Versions that copies were ordered of."""
    allowances: dict[int, int]
    under_way: dict[int, int]
    on_ssd: list[int]
    """Units by namespace."""
    there: set[int]


def seen(kit: Tenants, ordered: set[int]) -> Seen:
    pool = pool_of(kit.state)
    live = np.flatnonzero(pool.objects.state & 1)
    return Seen(
        ordered,
        dict(pool.tiers.allowances),
        dict(pool.copies.ssd_units_by_owner),
        pool.namespaces.ssd_units.tolist(),
        set(pool.seqs_of(live).tolist()),
    )


def tell(kit: Tenants, plan: Plan) -> None:
    if plan.budget_blocks:
        kit.nodes[1].counters = NodeCounters(
            ssd_write_budget_bytes=plan.budget_blocks * 2 * BLOCK,
            ssd_write_allowance_bytes=plan.allowance_blocks * 2 * BLOCK,
        )
        kit.heartbeat(kit.nodes[1])


def play(plan: Plan, one_by_one: range) -> tuple[list[Seen], int]:
    """What was seen after each step, two for each, and how many batches there were; in those steps
    copies are planned one by one."""
    config: dict[str, Any] = {"session_granted_share_max": 1.0, "reserve_share": 0.0}
    size = plan.ssd_blocks // plan.disks * BLOCK
    node = ssd_node(1, MEMORY_BYTES, size, ssd_slots=max(512, plan.ssd_blocks))
    if plan.disks > 1:
        node.segments.append(FakeSegment(b"inc-1-more", size, size, BLOCK, slots=512, tier=2))
    kit = Tenants(*NAMES, config=StateConfig(**config), node=node)
    for name, (blocks, objects, priority) in zip(NAMES, plan.quotas, strict=True):
        kit.quota(name, ssd_bytes=blocks * BLOCK, objects=objects, priority=priority)
    found: list[Seen] = []
    batches, for_real = 0, demotion._Turn.order_plain

    def order_plain(turn: demotion._Turn, rows: Any) -> Any:
        nonlocal batches
        chosen = rows[:0] if len(found) in one_by_one else for_real(turn, rows)
        batches += len(chosen) > 0
        return chosen

    with ExitStack() as stack:
        stack.enter_context(patch.object(demotion, "ODD_COPIES_AT_ONCE", 1 << 20))
        stack.enter_context(patch.object(demotion._Turn, "order_plain", order_plain))
        for module in (demotion, ssd_room):  # of a small device a batch may have more
            stack.enter_context(patch.object(module, "RUN_SHARE_MAX", 2))
        next_key = 0
        for name, count, reads in plan.steps:
            tell(kit, plan)
            with kit.within(name):
                keys = list(range(next_key, next_key + count))
                sizes = [plan.sizes[key % len(plan.sizes)] for key in keys]
                if keys:
                    kit.put(keys, sizes)
                if reads:
                    kit.get(*range(max(0, next_key - 3 * reads), next_key + count, 3))
                next_key += count
            kit.tick(0.1)
            kit.heartbeat(node)
            ordered = {int(rows[0]["source_seq"]) for rows in node.copies}
            found.append(seen(kit, ordered))
            copy_all(kit, node)
            kit.heartbeat(node)
            kit.heartbeat(node)
            ordered = {int(rows[0]["source_seq"]) for rows in node.copies}
            found.append(seen(kit, ordered))
            copy_all(kit, node)
            kit.heartbeat(node)
    check(kit.state)
    return found, batches


def check_alike(plan: Plan) -> None:
    steps = range(2 * len(plan.steps))
    batched, batches = play(plan, range(0))
    single, none = play(plan, steps)
    assert not none
    for number in steps:
        assert batched[number] == single[number], number
    assert batches or not any(one.ordered for one in single)


EXAMPLES = settings().max_examples // 3
"""Each is two pools over some twenty steps."""
ONE_SIZE = st.just((BLOCK,))
ANY_SIZES = st.sampled_from([(BLOCK,), (KIB,), (300, BLOCK, 9 * KIB), (KIB, 16 * KIB)])


@settings(max_examples=EXAMPLES)
@given(plans(st.just(4096), st.just(0), ANY_SIZES))
def test_with_quotas_where_there_is_room(plan: Plan) -> None:
    check_alike(plan)


@settings(max_examples=EXAMPLES)
@given(plans(st.just(4096), st.sampled_from([40, 200, 480]), ANY_SIZES))
def test_with_a_budget_of_writes(plan: Plan) -> None:
    check_alike(plan)


# Its examples are not made smaller: they aren't small.
@settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(plans(st.sampled_from([160, 240, 400]), st.sampled_from([0, 0, 480]), ONE_SIZE))
def test_with_quotas_on_a_full_device(plan: Plan) -> None:
    """From one state on, since who goes for a copy depends on who went for those before. Of a batch
    those of one namespace ask together: as much goes as one by one, but where what nobody keeps is
    just coming to its end, not of the same one."""
    last = 2 * len(plan.steps) - 2
    batched, _ = play(plan, range(0))
    single, _ = play(plan, range(last, last + 1))
    assert batched[:last] == single[:last]
    one, other = batched[last], single[last]
    assert one.ordered == other.ordered
    assert (one.allowances, one.under_way) == (other.allowances, other.under_way)
    if plan.disks == 1:  # of several, a run goes to one of them
        assert sum(one.on_ssd) == sum(other.on_ssd)
        assert len(one.there) == len(other.there)


def test_batches_are_what_they_are_compared_with() -> None:
    """On a full device, of tenants that all have a quota and want more."""
    quota, steps = (16, 0, 2), tuple((name, 24, 0) for name in 4 * NAMES)
    plan = Plan(48, 1, (quota, quota, quota), 0, 0, (BLOCK,), steps)
    found, batches = play(plan, range(0))
    ordered = sum(len(one.ordered) for one in found)
    assert ordered > 200
    assert batches < ordered / 4
    assert sum(found[-1].on_ssd) * 64 >= 40 * BLOCK
