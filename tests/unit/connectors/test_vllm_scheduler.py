"""The scheduler's half over a fake pool: requests that come, wait, load, are aborted, preempted."""

from __future__ import annotations

import threading
from typing import Any, cast

from cenote.api.errors import FingerprintMismatch, Unavailable
from cenote.connectors.vllm.counters import Counters
from cenote.connectors.vllm.groups import Group, Grouping
from cenote.connectors.vllm.keys import object_keys
from cenote.connectors.vllm.options import make_options
from cenote.connectors.vllm.orders import Orders, Reports, SpaceName
from cenote.connectors.vllm.scheduler import StoreScheduler
from unit.connectors.scheduler_testing import GROUPING, HASHES, Half, Request, Space, store
from waiting import wait_until


def test_a_prefix_is_found_staged_and_loaded(made: Half, pool: Space) -> None:
    store(pool, 4)
    request = Request()
    made.half.new_request(request)
    assert made.ask(request, have_tokens=16) == 48
    made.half.allocated(request, lambda: [[10, 11, 12, 13, 14]], 48)
    (load,) = made.half.take_orders().loads
    assert load.blocks == ((0, 1), (0, 2), (0, 3))
    assert load.block_ids == (11, 12, 13)
    made.half.loaded(["r"])
    assert made.half.matched_tokens(request, 0) == 0
    made.half.finished("r")
    assert made.counters.take()["fetches_loaded"] == 1
    assert pool.asked == 1


def test_it_answers_at_once_while_the_pool_does_not(made: Half, pool: Space) -> None:
    request = Request()
    made.half.new_request(request)
    for _ in range(3):
        assert made.half.matched_tokens(request, 0) is None
    made.half.finished("r")
    store(pool, 4)
    wait_until(lambda: pool.asked, what="the answer")
    wait_until(lambda: made.half.take_orders() and not pool.leases, what="its lease's release")


def test_no_request_overtakes_one_before_it_by_when_its_answer_comes(
    made: Half, pool: Space
) -> None:
    """The answers come while the engine plans a step, after the first request was asked about."""
    first, second = Request("first"), Request("second")
    for request in (first, second):
        made.half.new_request(request)
    assert made.half.matched_tokens(first, 0) is None
    pool.gate.set()
    wait_until(lambda: len(made.half._lookups.answers) == 2, what="both answers")
    assert made.half.matched_tokens(second, 0) is None
    made.half.take_orders()
    assert made.half.matched_tokens(first, 0) == 0
    assert made.half.matched_tokens(second, 0) == 0


def test_a_block_that_did_not_arrive_ends_the_prefix(made: Half, pool: Space) -> None:
    store(pool, 4)
    request = Request()
    made.half.new_request(request)
    wait_until(lambda: made.half.matched_tokens(request, 0) is None and pool.asked, what="an ask")

    def staged() -> bool:
        made.half.take_orders()
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
    made.half.save("after", 100, lambda _: [[1, 2, 3, 4, 5, 6]], ())
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
    made.half.allocated(request, lambda: [[10, 11, 12, 13]], 64)
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
    made.half.save("r", 100, lambda _: [[1, 2, 3, 4, 5, 6, 7]], ())
    (order,) = made.half.take_orders().saves
    assert order.blocks == ((0, 2), (0, 3), (0, 4), (0, 5))
    made.half.finished("r")


def test_requests_that_share_nothing_are_left_alone(made: Half, pool: Space) -> None:
    store(pool, 4)
    request = Request()
    made.half.new_request(request, "/nowhere/adapter")
    wait_until(lambda: made.half.matched_tokens(request, 0) is not None, what="its adapter's fate")
    assert made.half.matched_tokens(request, 0) == 0
    made.half.save("r", 100, lambda _: [[1, 2, 3, 4, 5, 6]], ())
    assert not made.half.take_orders().saves
    assert made.half.matched_tokens(Request("never announced"), 0) == 0


def test_an_order_that_was_not_sent_is_taken_back(made: Half, pool: Space) -> None:
    store(pool, 4)
    request = Request()
    made.half.new_request(request)

    def staged() -> bool:
        made.half.take_orders()
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
    made.half.allocated(request, lambda: [[1, 2, 3, 4], [0, 9]], 64)
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
    half.save("r", 100, lambda _: [[1, 2, 3, 4, 5, 6]], ())
    assert not half.take_orders().saves
    half.close()


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
