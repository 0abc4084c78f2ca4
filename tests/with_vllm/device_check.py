"""The way of a GPU, with a stand-in for CUDA's calls over host memory: what is done in which order,
by which thread, and that the bytes are right. Runs in vLLM's environment: it needs torch. Ends with
an AssertionError where something is not as it should be."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from cenote.api.errors import CenoteError
from cenote.connectors.vllm.blocks import BlockMemory
from cenote.connectors.vllm.counters import Counters
from cenote.connectors.vllm.device import StreamDevice
from cenote.connectors.vllm.keys import RankShard
from cenote.connectors.vllm.moves import Answer, Batch
from cenote.connectors.vllm.options import make_options
from cenote.connectors.vllm.orders import LoadOrder, Orders, SaveOrder, SpaceName, StageOrder
from cenote.connectors.vllm.worker import StoreWorker

LAYERS, BLOCKS, BLOCK_BYTES = 2, 8, 64
HASHES = tuple(bytes([i]) * 32 for i in range(3))
WANTED = ((0, 0), (0, 1), (0, 2))
TIMEOUT_S = 30.0


class Cuda:
    """Of `torch.cuda`, what is used; it writes down who called what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.register_code = 0
        self.pinned: list[int] = []
        self.registered_on: list[int] = []
        self._device = 0
        self.streams_on: list[int] = []

    def note(self, what: str) -> None:
        self.calls.append((what, threading.current_thread().name))

    def current_device(self) -> int:
        return 3

    def Stream(self, device: int) -> Any:
        self.streams_on.append(device)
        return SimpleNamespace(
            wait_stream=lambda other: self.note(f"beside waits for {other}"),
            synchronize=lambda: self.note("wait for beside"),
        )

    def current_stream(self, device: int) -> str:
        return f"the engine's on {device}"

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.note("beside")
        yield
        self.note("not beside")

    def Event(self) -> Any:
        return SimpleNamespace(
            record=lambda stream: self.note(f"mark {stream}"),
            synchronize=lambda: self.note("wait for mark"),
        )

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self._device = self._device, index
        yield
        self._device = before

    def cudart(self) -> Any:
        def register(address: int, size_bytes: int, flags: int) -> int:
            assert flags == 1, "for all devices of the process"
            self.pinned.append(size_bytes)
            self.registered_on.append(self._device)
            return self.register_code

        return SimpleNamespace(cudaHostRegister=register)


class Mover:
    """A pool in this process: it has what was put, at once."""

    def __init__(self, cuda: Cuda, size_bytes: int) -> None:
        self.array = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
        self.address = self.array.ctypes.data
        self._cuda = cuda
        self.objects: dict[bytes, bytes] = {}
        self.saved = threading.Event()
        self._ended: deque[Callable[[], None]] = deque()

    def begin(self, batch: Batch, done: Callable[[Answer | CenoteError], None]) -> None:
        answer = self.get(batch) if batch.what == "get" else self.put(batch)
        self._ended.append(lambda: done(answer))

    def poll(self) -> None:
        while self._ended:
            self._ended.popleft()()

    def drain(self, timeout_s: float) -> None:
        self.poll()

    def get(self, batch: Batch) -> Answer:
        rows = zip(batch.keys, batch.offsets.tolist(), batch.lengths.tolist(), strict=True)
        done = np.zeros(len(batch.keys), np.bool_)
        for i, (key, offset, length) in enumerate(rows):
            if key in self.objects:
                self.array[offset : offset + length] = np.frombuffer(self.objects[key], np.uint8)
                done[i] = True
        return Answer(done, done)

    def put(self, batch: Batch) -> Answer:
        self._cuda.note("put")
        for key, offset, length in zip(
            batch.keys, batch.offsets.tolist(), batch.lengths.tolist(), strict=True
        ):
            self.objects[key] = self.array[offset : offset + length].tobytes()
        self.saved.set()
        done = np.ones(len(batch.keys), np.bool_)
        return Answer(done, done)

    def close(self) -> None:
        self.saved.set()


def until(condition: Callable[[], Any], what: str) -> Any:
    tick = threading.Event()
    for _ in range(int(TIMEOUT_S / 0.01)):
        found = condition()
        if found:
            return found
        tick.wait(0.01)
    raise AssertionError(f"no {what} within {TIMEOUT_S:.0f} s")


def check_a_block_goes_out_and_comes_back() -> None:
    cuda = Cuda()
    caches = {
        f"layer{i}": torch.randint(0, 255, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
        for i in range(LAYERS)
    }
    memory = BlockMemory(caches, {0: list(caches)}, BLOCKS, StreamDevice(None, cuda))
    assert cuda.streams_on == [3], "the engine's GPU, not a thread's first one"
    options = make_options({"master": "127.0.0.1:1", "staging_bytes": 1 << 20})
    worker = StoreWorker(options, RankShard(0, 0, 1), "check", Counters())
    mover = Mover(cuda, 64 * 4096)
    worker._start_mover = lambda: None  # type: ignore[method-assign]
    worker.start(memory)
    worker._mover = cast(Any, mover)
    worker._use_slots(worker._mover)
    worker._use_staging()
    assert cuda.pinned == [64 * 4096]
    assert cuda.registered_on == [3], "no context is made on another GPU"
    space = SpaceName("n", b"f")
    engine = threading.current_thread().name

    cuda.calls.clear()
    worker.save(Orders(space, saves=[SaveOrder(WANTED, HASHES, (5, 1, 6))]))
    assert mover.saved.wait(TIMEOUT_S)
    calls = [what for what, _ in cuda.calls]
    assert calls == ["mark the engine's on 3", "wait for mark", "put"], cuda.calls
    assert cuda.calls[0][1] == engine
    assert {name for _, name in cuda.calls[1:]} == {"cenote-save"}, "the engine waits for nothing"

    load(worker, space, cuda, "r", (0, 2, 4))
    for _, cache in caches.items():
        for there, here in ((5, 0), (1, 2), (6, 4)):
            assert torch.equal(cache[there], cache[here])
    calls = [what for what, _ in cuda.calls]
    assert calls == [
        "beside waits for the engine's on 3", "beside", "not beside", "wait for beside",
    ], cuda.calls  # fmt: skip
    assert cuda.calls[0][1] == engine, "by then all is begun that may still use the blocks"
    assert {name for _, name in cuda.calls[1:]} == {"cenote-load"}, "the engine waits for nothing"

    before = {name: cache.clone() for name, cache in caches.items()}
    worker.suspend()  # the memory goes: a load that comes nevertheless fails, and is said to
    assert load(worker, space, cuda, "asleep", (3, 3, 3)) == {"asleep"}
    worker.save(Orders(space, saves=[SaveOrder(WANTED, HASHES, (5, 1, 6))]))
    for name, cache in caches.items():
        assert torch.equal(cache, before[name])
    worker.resume()
    assert not load(worker, space, cuda, "awake", (7, 7, 7))
    for cache in caches.values():
        assert torch.equal(cache[7], cache[4])
    worker.close()


def load(
    worker: StoreWorker, space: SpaceName, cuda: Cuda, name: str, block_ids: tuple[int, ...]
) -> set[str]:
    """Stage and load the blocks for a request of that name; the requests that failed."""
    ticket = len(name)
    worker.begin(Orders(space, stages=[StageOrder(ticket, WANTED, HASHES, None, TIMEOUT_S)]))
    worker.take_loaded()
    report = until(worker.take_reports, "report").staged[ticket]
    assert not report.missing
    cuda.calls.clear()
    worker.begin(Orders(space, loads=[LoadOrder(ticket, name, WANTED, block_ids)]))
    loaded, failed = until(lambda: any(r := worker.take_loaded()) and r, "load")
    assert loaded == {name}
    return set(failed)


def check_memory_that_can_not_be_pinned() -> None:
    cuda = Cuda()
    cuda.register_code = 2
    caches = {"layer": torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8)}
    memory = BlockMemory(caches, {0: ["layer"]}, BLOCKS, StreamDevice(1, cuda))
    assert not memory.pin(4096, 4096)
    assert cuda.registered_on == [1]


def main() -> None:
    check_a_block_goes_out_and_comes_back()
    check_memory_that_can_not_be_pinned()
    print("checked")


if __name__ == "__main__":
    main()
