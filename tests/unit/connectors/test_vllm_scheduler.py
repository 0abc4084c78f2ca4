"""The scheduler's half over a fake pool: requests that come, wait, load, are aborted, preempted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from cenote.api.errors import FingerprintMismatch, Unavailable
from cenote.connectors.vllm.counters import Counters
from cenote.connectors.vllm.groups import Group, Grouping
from cenote.connectors.vllm.keys import object_keys
from cenote.connectors.vllm.options import make_options
from cenote.connectors.vllm.orders import Orders, Reports, SpaceName
from cenote.connectors.vllm.scheduler import StoreScheduler
from unit.connectors.scheduler_testing import (
    GROUPING,
    HASHES,
    Half,
    Request,
    Space,
    store,
)
from waiting import wait_until


@pytest.fixture
def pool() -> Space:
    return Space()


@pytest.fixture
def made(pool: Space) -> Iterator[Half]:
    half = Half(pool, GROUPING, 1)
    yield half
    pool.gate.set()
    half.half.close()
    assert pool.leases == 0, "all leases were given back"


def test_a_load_gets_a_share_of_what_the_engine_took_to_compute(made: Half, pool: Space) -> None:
    store(pool, 6)
    orders = made.half.take_orders(tokens=1)
    assert not orders.step, "a step of few tokens says nothing"
    number = made.half.take_orders(tokens=1 << 30).step
    made.half.reported(Reports(step=number))
    request = Request()
    made.half.new_request(request)

    def staged() -> Orders | None:
        made.half.matched_tokens(request, 0)
        orders = made.half.take_orders()
        return orders if orders.stages else None

    ordered = wait_until(staged, what="the order to fetch it")
    assert ordered is not None
    assert ordered.stages[0].deadline_s == 0.05, "the least, so fast was the step"
    made.half.finished(request.request_id)


def test_a_prefix_is_found_staged_and_loaded(made: Half, pool: Space) -> None:
    store(pool, 4)
    request = Request()
    made.half.new_request(request)
    assert made.ask(request, have_tokens=16) == 48
    made.half.allocated(request, [[10, 11, 12, 13, 14]], 48)
    (load,) = made.half.take_orders().loads
    assert load.blocks == ((0, 1), (0, 2), (0, 3))
    assert load.block_ids == (11, 12, 13)
    made.half.loaded(["r"])
    assert made.half.matched_tokens(request, 0) == 0
    made.half.finished("r")
    assert made.counters.take()["fetches_loaded"] == 1
    assert pool.asked == 1


def test_tokens_are_counted_by_where_their_blocks_were(made: Half, pool: Space) -> None:
    store(pool, 6)
    pool.segments = [1, 3, 3, 2, 4, 99]
    request = Request()
    made.half.new_request(request)
    assert made.ask(request, have_tokens=16) == 80
    made.half.allocated(request, [[10, 11, 12, 13, 14, 15]], 80)
    assert made.half.sources(request) == {"memory": 0, "peer": 48, "disk": 32}
    made.half.loaded(["r"])
    counted = made.counters.take()
    assert counted["loaded_from_peer"] == 48
    assert "loaded_from_memory" not in counted
    assert made.half.sources(Request("another")) == {}


def test_it_answers_at_once_while_the_pool_does_not(made: Half, pool: Space) -> None:
    request = Request()
    made.half.new_request(request)
    for _ in range(3):
        assert made.half.matched_tokens(request, 0) is None
    made.half.finished("r")
    store(pool, 4)
    wait_until(lambda: pool.asked, what="the answer")
    wait_until(lambda: made.half.take_orders() and not pool.leases, what="its lease's release")


def test_a_block_that_did_not_arrive_ends_the_prefix(made: Half, pool: Space) -> None:
    store(pool, 4)
    request = Request()
    made.half.new_request(request)
    wait_until(lambda: made.half.matched_tokens(request, 0) is None and pool.asked, what="an ask")

    def staged() -> bool:
        made.half.matched_tokens(request, 0)
        return bool(made.half._orders.stages)

    wait_until(staged, what="an order")
    made.work(missing=frozenset({(0, 2)}))
    assert made.half.matched_tokens(request, 0) == 32
    made.half.finished("r")
    assert made.half.take_orders().drops == [1]


def test_an_error_is_a_miss_and_several_open_the_breaker(made: Half, pool: Space) -> None:
    pool.error = Unavailable("gone")
    pool.gate.set()
    for number in range(3):
        request = Request(f"r{number}")
        made.half.new_request(request)
        assert made.ask(request) == 0
    pool.error = None
    store(pool, 4)
    request = Request("after")
    made.half.new_request(request)
    assert made.half.matched_tokens(request, 0) == 0, "the pool is left alone for a while"
    made.half.save("after", 100, lambda: [[1, 2, 3, 4, 5, 6]], ())
    assert not made.half.take_orders().saves


def test_a_refused_model_asks_no_more(made: Half, pool: Space) -> None:
    pool.error = FingerprintMismatch("another model's")
    pool.gate.set()
    request = Request()
    made.half.new_request(request)
    assert made.ask(request) == 0
    pool.error = None
    store(pool, 4)
    made.half.new_request(Request("next"))
    assert made.half.matched_tokens(Request("next"), 0) == 0
    assert pool.asked == 0


def test_a_preempted_request_is_looked_up_anew(made: Half, pool: Space) -> None:
    store(pool, 4)
    request = Request()
    made.half.new_request(request)
    assert made.ask(request) == 64
    made.half.allocated(request, [[10, 11, 12, 13]], 64)
    made.half.loaded(["r"])
    assert made.ask(request) == 0
    request.num_preemptions = 1
    assert made.ask(request) == 64
    made.half.finished("r")


def test_what_the_pool_has_is_not_saved_again(made: Half, pool: Space) -> None:
    store(pool, 2)
    request = Request()
    made.half.new_request(request)
    assert made.ask(request) == 32
    made.half.save("r", 100, lambda: [[1, 2, 3, 4, 5, 6, 7]], ())
    (order,) = made.half.take_orders().saves
    assert order.blocks == ((0, 2), (0, 3), (0, 4), (0, 5))
    made.half.finished("r")


def test_requests_that_share_nothing_are_left_alone(made: Half, pool: Space) -> None:
    store(pool, 4)
    request = Request()
    made.half.new_request(request, "/nowhere/adapter")
    wait_until(lambda: made.half.matched_tokens(request, 0) is not None, what="its adapter's fate")
    assert made.half.matched_tokens(request, 0) == 0
    made.half.save("r", 100, lambda: [[1, 2, 3, 4, 5, 6]], ())
    assert not made.half.take_orders().saves
    assert made.half.matched_tokens(Request("never announced"), 0) == 0


def adapter(directory: Path, weights: bytes, alpha: int = 8) -> str:
    directory.mkdir(parents=True)
    config = {"r": 8, "lora_alpha": alpha, "base_model_name_or_path": str(directory)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return str(directory)


def saved_keys(made: Half, request: Request) -> set[bytes]:
    """What the step saves that completes the request's prompt."""
    made.half.save(request.request_id, 100, lambda: [[1, 2, 3, 4, 5, 6, 7]], ())
    return {block_hash for order in made.half.take_orders().saves for block_hash in order.hashes}


def test_adapters_share_with_equal_ones_alone(made: Half, pool: Space, tmp_path: Path) -> None:
    store(pool, 0)
    paths = {
        "one": adapter(tmp_path / "1", b"w" * 100),
        "equal": adapter(tmp_path / "2", b"w" * 100),
        "other": adapter(tmp_path / "3", b"v" * 100),
        "otherwise": adapter(tmp_path / "4", b"w" * 100, alpha=16),
        "none": None,
    }
    keys = {}
    for name, path in paths.items():
        request = Request(name)
        made.half.new_request(request, path)
        assert made.ask(request) == 0
        keys[name] = saved_keys(made, request)
        assert len(keys[name]) == 6
    assert keys["one"] == keys["equal"]
    assert keys["none"] == set(HASHES)
    for name in ("other", "otherwise", "none"):
        assert not keys["one"] & keys[name]
    pool.keys |= set(object_keys(sorted(keys["one"]), [0] * 6, [0]))
    request = Request("again")
    made.half.new_request(request, paths["one"])
    assert made.ask(request) == 96
    made.half.finished("again")


def test_an_adapter_that_changed_under_the_engine_is_not_shared_any_more(
    made: Half, pool: Space, tmp_path: Path
) -> None:
    store(pool, 0)
    path = adapter(tmp_path / "a", b"w" * 100)
    request = Request()
    made.half.new_request(request, path)
    assert made.ask(request) == 0
    assert saved_keys(made, request)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"v" * 101)
    request = Request("after")
    made.half.new_request(request, path)
    assert made.ask(request) == 0
    assert not saved_keys(made, request)
    made.half.reset()  # the engine has read it anew
    request = Request("then")
    made.half.new_request(request, path)
    assert made.ask(request) == 0
    assert saved_keys(made, request)


def test_after_a_reset_nothing_of_before_is_found_and_what_is_under_way_stays_there(
    made: Half, pool: Space
) -> None:
    store(pool, 4)
    ready, computed, waiting = Request("ready"), Request("computed"), Request("waiting")
    for request in (ready, computed, waiting):
        made.half.new_request(request)
    assert made.ask(ready) == 64
    computed.num_computed_tokens = 32
    made.half.reset()
    assert made.half.matched_tokens(ready, 0) == 0, "what was staged for it is of old weights"
    assert made.half.take_orders().drops == [1]
    wait_until(lambda: made.half.take_orders() and not pool.leases, what="the leases' release")
    assert not saved_keys(made, computed), "a part of it was computed with old weights"
    new = saved_keys(made, waiting)
    assert len(new) == 6
    assert not new & set(HASHES)
    computed.num_preemptions, computed.num_computed_tokens = 1, 0
    assert made.ask(computed) == 0
    assert saved_keys(made, computed) == new, "it was computed anew"
    pool.keys |= set(object_keys(sorted(new), [0] * 6, [0]))
    request = Request("next")
    made.half.new_request(request)
    assert made.ask(request) == 96
    made.half.finished("next")
    made.half.reset()
    request = Request("last")
    made.half.new_request(request)
    assert made.ask(request) == 0


def test_what_is_being_loaded_at_a_reset_is_not_saved(made: Half, pool: Space) -> None:
    store(pool, 4)
    request = Request()
    made.half.new_request(request)
    assert made.ask(request) == 64
    made.half.allocated(request, [[10, 11, 12, 13]], 64)
    made.half.reset()
    made.half.loaded(["r"])
    assert not saved_keys(made, request)
    made.half.finished("r")
    assert made.counters.take()["fetches_loaded"] == 1


def test_what_is_saved_or_found_is_watched(made: Half, pool: Space) -> None:
    assert made.half.watch_residency() == 0
    watch = made.half._watch
    assert watch is not None
    seen: list[tuple[bytes, bytes]] = []
    watch.note = seen.extend  # type: ignore[assignment,method-assign]
    store(pool, 2)
    request = Request()
    made.half.new_request(request)
    assert made.ask(request) == 32
    assert seen == [(each, each) for each in HASHES[:2]]
    saved_keys(made, request)
    assert seen == [(each, each) for each in HASHES]
    made.half.reset()
    request = Request("after")
    made.half.new_request(request)
    assert made.ask(request) == 0
    seen.clear()
    keys = saved_keys(made, request)
    assert [own for _, own in seen] == HASHES, "routers know vLLM's hashes"
    assert {key for key, _ in seen} == keys


def test_an_order_that_was_not_sent_is_taken_back(made: Half, pool: Space) -> None:
    store(pool, 4)
    request = Request()
    made.half.new_request(request)

    def staged() -> bool:
        made.half.matched_tokens(request, 0)
        return bool(made.half._orders.stages)

    wait_until(staged, what="an order")
    made.half.finished("r")
    orders = made.half.take_orders()
    assert not orders.stages
    assert not orders.drops


def test_several_ranks_have_it_when_all_of_them_do(pool: Space) -> None:
    store(pool, 4, ranks=2)
    pool.keys.discard(object_keys([HASHES[3]], [0], [1])[0])
    made = Half(pool, GROUPING, 2)
    request = Request()
    made.half.new_request(request)
    assert made.ask(request) == 48
    made.half.finished("r")
    made.half.close()


def test_a_hybrid_leases_only_what_it_loads(pool: Space) -> None:
    grouping = Grouping((Group(0, "full", 16), Group(1, "state", 32)), 32, 16)
    store(pool, 6)
    pool.keys |= set(object_keys([HASHES[3]], [1], [0]))
    made = Half(pool, grouping, 1)
    request = Request()
    made.half.new_request(request)
    assert made.ask(request) == 64
    made.half.allocated(request, [[1, 2, 3, 4], [0, 9]], 64)
    (load,) = made.half.take_orders().loads
    assert dict(zip(load.blocks, load.block_ids, strict=True))[1, 1] == 9
    made.half.finished("r")
    made.half.close()


def test_a_model_that_can_not_be_named_shares_nothing(pool: Space) -> None:
    def fail() -> SpaceName:
        raise OSError("the weights can't be read")

    store(pool, 4)
    half = StoreScheduler(
        make_options({}), GROUPING, [0], 1, {0: 1000}, fail, cast(Any, pool), Counters()
    )
    half.start()
    done = threading.Event()
    half._lookups.submit(done.set)
    assert done.wait(30.0), "its thread goes on"
    half.new_request(Request())
    assert half.matched_tokens(Request(), 0) == 0
    half.save("r", 100, lambda: [[1, 2, 3, 4, 5, 6]], ())
    assert not half.take_orders().saves
    half.close()
