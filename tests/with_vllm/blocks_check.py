"""Copies between KV caches and rows, in every layout that vLLM has. Runs in vLLM's environment: it
needs torch. Ends with an AssertionError where a byte is not where it belongs."""

from __future__ import annotations

import itertools
import math
import threading

import torch

from cenote.connectors.vllm.blocks import BlockMemory, stack_pieces
from cenote.connectors.vllm.counters import Counters
from cenote.connectors.vllm.keys import RankShard
from cenote.connectors.vllm.options import make_options
from cenote.connectors.vllm.orders import LoadOrder, Orders
from cenote.connectors.vllm.worker import StoreWorker

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 10, 2, 4, 6
AXES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC"]
BLOCK_BYTES = LAYERS * HEADS * TOKENS * CONTENT * 2


def caches_in(layout: str) -> dict[str, torch.Tensor]:
    """Views [blocks, heads, tokens, content] of one memory, as vLLM makes them."""
    raw = torch.randint(-1000, 1000, (math.prod(AXES.values()) + 7,), dtype=torch.int16)[7:]
    physical = raw.view([AXES[axis] for axis in layout])
    logical = physical.permute([layout.index(axis) for axis in "LBHNC"])
    return {f"layer{i}": logical[i] for i in range(LAYERS)}


def check_layout(layout: str) -> int:
    source, target = caches_in(layout), caches_in(layout)
    before = {name: cache.clone() for name, cache in target.items()}
    names = {0: list(source)}
    one, other = BlockMemory(source, names, BLOCKS), BlockMemory(target, names, BLOCKS)
    assert one.block_bytes == {0: BLOCK_BYTES}, (layout, one.block_bytes)
    rows = torch.zeros(4, BLOCK_BYTES + 9, dtype=torch.uint8)
    one.gather(0, [7, 2, 9], rows[:3])
    other.scatter(0, [1, 4, 0], rows[:3])
    for name, cache in target.items():
        expected = before[name]
        for there, here in ((7, 1), (2, 4), (9, 0)):
            expected[here] = source[name][there]
        assert torch.equal(cache, expected), (layout, name)
    if layout != "BHLNC":
        assert len(stack_pieces(one.pieces[0])) == 1, (layout, "takes more than one call")
    return len(one.pieces[0])


def check_small_kernel_blocks() -> None:
    """Kernels may divide a block: then there are more rows than blocks."""
    cache = torch.arange(BLOCKS * 2 * HEADS * TOKENS * CONTENT, dtype=torch.int32)
    cache = cache.view(BLOCKS * 2, HEADS, TOKENS, CONTENT)
    memory = BlockMemory({"a": cache}, {0: ["a"]}, BLOCKS)
    rows = torch.zeros(1, memory.block_bytes[0], dtype=torch.uint8)
    memory.gather(0, [3], rows)
    assert torch.equal(rows.view(torch.int32).flatten(), cache[6:8].flatten())


def check_states() -> None:
    """Several tensors for a layer, with room between them, beside a group of attention."""
    raw = torch.randint(0, 255, (BLOCKS, 100), dtype=torch.uint8)
    states = [raw[:, :30].unflatten(1, (5, 6)), raw[:, 32:72]]
    attention = caches_in("LBHNC")
    memory = BlockMemory({"s": states, **attention}, {0: list(attention), 2: ["s"]}, BLOCKS)
    assert memory.block_bytes == {0: BLOCK_BYTES, 2: 70}
    rows = torch.zeros(2, 200, dtype=torch.uint8)
    memory.gather(2, [4, 5], rows)
    for row, block in ((0, 4), (1, 5)):
        assert torch.equal(rows[row, :30], raw[block, :30])
        assert torch.equal(rows[row, 30:70], raw[block, 32:72])


def check_loads_are_of_the_engines_thread() -> None:
    """A thread of ours that called torch would make every step of the engine slower (OpenMP)."""
    caches = caches_in("LBHNC")
    options = make_options({"master": "127.0.0.1:1", "staging_bytes": 1 << 20})
    worker = StoreWorker(options, RankShard(0, 0, 1), "check", Counters())
    worker.start(BlockMemory(caches, {0: list(caches)}, BLOCKS))
    seen: list[str] = []
    worker._load = lambda order: seen.append(threading.current_thread().name)  # type: ignore[method-assign]
    worker.begin(Orders(loads=[LoadOrder(1, "request", (), ())]))
    worker.close()
    assert seen == [threading.current_thread().name], seen


def check_copies_are_of_one_thread() -> None:
    """A team of threads waits for the last of them, which may have no core for itself."""
    layers = {f"layer{i}": torch.zeros(64, 1 << 16, dtype=torch.uint8) for i in range(4)}
    memory = BlockMemory(layers, {0: list(layers)}, 64)
    rows = torch.zeros(32, 4 << 16, dtype=torch.uint8)
    ids = list(range(32))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        memory.gather(0, ids, rows)
        memory.scatter(0, ids, rows)
    called = {event.key for event in seen.key_averages()}
    assert not called & {"aten::index_select", "aten::index_copy_", "aten::copy_"}, called


def main() -> None:
    pieces = {layout: check_layout(layout) for layout in LAYOUTS}
    assert pieces["BLHNC"] == 1, pieces
    assert pieces["LBHNC"] == LAYERS, pieces
    check_small_kernel_blocks()
    check_states()
    check_loads_are_of_the_engines_thread()
    check_copies_are_of_one_thread()
    print("checked", *itertools.chain(pieces.items()))


if __name__ == "__main__":
    main()
