"""The scheduler's half over a fake pool: adapters, new weights, and where blocks lie."""

from __future__ import annotations

import json
from pathlib import Path

from cenote.connectors.vllm.keys import object_keys
from unit.connectors.scheduler_testing import HASHES, Half, Request, Space, store
from waiting import wait_until


def test_tokens_are_counted_by_where_their_blocks_were(made: Half, pool: Space) -> None:
    store(pool, 6)
    pool.segments = [1, 3, 3, 2, 4, 99]
    request = Request()
    made.half.new_request(request)
    assert made.ask(request, have_tokens=16) == 80
    made.half.allocated(request, lambda: [[10, 11, 12, 13, 14, 15]], 80)
    assert made.half.sources(request) == {"memory": 0, "peer": 48, "disk": 32}
    made.half.loaded(["r"])
    counted = made.counters.take()
    assert counted["loaded_from_peer"] == 48
    assert "loaded_from_memory" not in counted
    assert made.half.sources(Request("another")) == {}


def adapter(directory: Path, weights: bytes, alpha: int = 8) -> str:
    directory.mkdir(parents=True)
    config = {"r": 8, "lora_alpha": alpha, "base_model_name_or_path": str(directory)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return str(directory)


def saved_keys(made: Half, request: Request) -> set[bytes]:
    """What the step saves that completes the request's prompt."""
    made.half.save(request.request_id, 100, lambda _: [[1, 2, 3, 4, 5, 6, 7]], ())
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
    made.half.allocated(request, lambda: [[10, 11, 12, 13]], 64)
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
