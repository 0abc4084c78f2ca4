"""The half that lives in each of vLLM's workers: moves bytes between the pool and the KV cache.

Bytes rest in staging memory on their way: a process of its own moves them between it and the pool
(`mover.py`), this one between it and the KV cache. Reads from the pool end there, so that a
transfer that is given up, or late, never touches a block of the engine; writes to the pool begin
there, so that the engine has its blocks back as soon as they are copied.

A transfer is begun in one of the engine's steps, and its end is seen in a later one: no thread is
woken for it. Threads are for what waits: on GPUs, until bytes are copied.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from cenote.api.errors import CenoteError
from cenote.runtime.log import get_logger
from cenote.runtime.memory import populate

from .blocks import BlockMemory
from .breaker import CircuitBreaker
from .counters import Counters
from .groups import Block
from .keys import RankShard, object_keys
from .link import remaining_s
from .mover import Mover
from .moves import Answer, Batch
from .options import ConnectorOptions
from .orders import LoadOrder, Orders, Reports, SaveOrder, SpaceName, StageOrder, StageReport
from .slots import Slots, is_run

__all__ = ["StoreWorker"]

_log: Final = get_logger("cenote.vllm")
_ORDERS_MAX: Final = 4096
_CLOSE_S: Final = 3.0
_NONE: Final[frozenset[Block]] = frozenset()
Job = Callable[[], None]


class _JobThread:
    """Does jobs one after the other; what they raise is logged, for nobody waits for them."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # in C: no locks in Python
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """False where too much is waiting."""
        if self._jobs.qsize() >= _ORDERS_MAX:
            return False
        self._jobs.put(job)
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # a bug of ours must not end all later transfers
                _log.exception("a transfer failed")

    def close(self, timeout_s: float) -> None:
        """End it after the jobs that wait, or at `timeout_s`."""
        self._jobs.put(None)
        self._thread.join(timeout_s)


@final
class StoreWorker:
    """See the module's docstring. Public calls are of the worker's thread."""

    def __init__(
        self, options: ConnectorOptions, rank: RankShard, name: str, counters: Counters
    ) -> None:
        self._options = options
        self._rank = rank
        self._name = name
        self._mover: Mover | None = None
        self._counters = counters
        self._memory: BlockMemory | None = None
        self._rows: torch.Tensor | None = None
        self._slot_bytes = 0
        self._offsets = np.zeros(0, np.uint64)
        """Of each slot in staging memory."""
        self._copies_here = False
        self._suspended = False
        self._slots = Slots(0)
        self._lock = threading.Lock()
        """Of slots, what is staged, and what is to be reported."""
        self._staged: dict[int, dict[Block, int]] = {}
        """Slots by ticket."""
        self._dropped: set[int] = set()
        """Tickets given up while they are being staged."""
        self._under_way: set[int] = set()
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._reports = Reports()
        self._step = 0
        """Of the step under way, the number that is to be reported."""
        self._breaker = CircuitBreaker()
        self._loader: _JobThread | None = None
        self._saver: _JobThread | None = None

    # ---- life --------------------------------------------------------------------------------

    def start(self, memory: BlockMemory) -> None:
        """`memory`: the KV cache."""
        self._memory = memory
        self._copies_here = memory.device.is_host
        self._slot_bytes = -(-max(memory.block_bytes.values()) // 4096) * 4096
        self._start_mover()
        if not self._copies_here:
            self._loader = _JobThread("cenote-load")
            self._saver = _JobThread("cenote-save")

    def close(self) -> None:
        """Save what waits to be saved, for some seconds; then end."""
        until_s = time.monotonic() + _CLOSE_S
        for thread in (self._saver, self._loader):
            if thread is not None:
                thread.close(remaining_s(until_s))
        if self._mover is not None:
            self._mover.drain(remaining_s(until_s))
            self._mover.close()

    def suspend(self) -> None:
        """The KV cache's memory is about to go: nothing touches it from when this returns until
        `resume`. Blocks that wait to be saved are in staging memory, and go on."""
        self._suspended = True
        if self._loader is None:
            return
        idle = threading.Event()
        if not self._loader.submit(idle.set) or not idle.wait(_CLOSE_S):
            _log.error("a load did not end before the engine went to sleep")

    def resume(self) -> None:
        """The memory is there again, in the same place; what was in it, the engine knows."""
        self._suspended = False

    def _start_mover(self) -> None:
        count = self._options.staging_bytes // self._slot_bytes
        if count < 2:
            _log.error(
                "nothing is loaded or saved: staging_bytes is less than two blocks",
                block_bytes=self._slot_bytes,
            )
            return
        size_bytes = count * self._slot_bytes
        try:
            self._mover = Mover(
                self._options,
                self._name,
                size_bytes,
                self._use_staging,
                gives_way=self._copies_here,
            )
        except OSError as error:
            _log.error("nothing is loaded or saved: no memory to stage blocks in", why=error)
            return
        self._use_slots(self._mover)
        self._mover.start()

    def _use_slots(self, mover: Mover) -> None:
        """From now on there is staging memory; it has no pages but those that are used."""
        count = len(mover.array) // self._slot_bytes
        self._offsets = np.arange(count, dtype=np.uint64) * np.uint64(self._slot_bytes)
        self._rows = torch.from_numpy(mover.array).view(count, self._slot_bytes)
        self._slots = Slots(count)

    def _use_staging(self) -> None:
        """There is a pool, and staging memory has all its pages."""
        mover, memory = self._mover, self._memory
        assert mover is not None
        assert memory is not None
        populate(mover.address, len(mover.array), write=True)  # else a step would pay for it
        if not memory.pin(mover.address, len(mover.array)):
            _log.warning("staging memory can't be pinned: copies to and from the GPU take longer")

    def _offsets_of(self, slots: list[int]) -> NDArray[np.uint64]:
        if is_run(slots):
            return self._offsets[slots[0] : slots[0] + len(slots)]
        return self._offsets[slots]

    def _sizes_of(self, groups: list[int]) -> NDArray[np.uint64]:
        assert self._memory is not None
        of = self._memory.block_bytes
        if len(of) == 1:
            return np.full(len(groups), of[groups[0]], np.uint64)
        return np.array([of[group] for group in groups], np.uint64)

    # ---- a step ------------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        """Begin what the step orders, but for saves."""
        self._step = orders.step
        for ticket in orders.drops:
            self._drop(ticket)
        for stage in orders.stages:
            self._stage(stage, orders.space)
        if orders.loads and self._memory is not None:
            self._memory.order_loads()
        for load in orders.loads:
            # On CPUs in this thread: a thread of ours that called torch would have a team of OpenMP
            # threads of its own, and with more threads than cores nobody's team spins any more,
            # which made the engine's steps four times as long.
            if self._loader is None or not self._loader.submit(partial(self._load, load)):
                self._load(load)

    def save(self, orders: Orders) -> None:
        """Copy the blocks that the step completed; they go to the pool afterwards."""
        space = orders.space
        for order in orders.saves:
            if space is not None and not self._suspended:
                self._save(order, space)

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those of them that were not loaded. Transfers that
        have ended since the last time are seen to."""
        if self._mover is not None:
            self._mover.poll()
        with self._lock:
            loaded, self._loaded = self._loaded, set()
            failed, self._failed = self._failed, set()
        return loaded, failed

    def take_reports(self) -> Reports | None:
        with self._lock:
            reports, self._reports = self._reports, Reports()
        reports.step, self._step = self._step, 0
        return reports if reports.staged or reports.step else None

    # ---- from the pool -----------------------------------------------------------------------

    def _stage(self, order: StageOrder, space: SpaceName | None) -> None:
        """Have the blocks fetched; `_fetched` reports."""
        until_s = time.monotonic() + order.deadline_s
        with self._lock:
            slots = self._slots.take(len(order.blocks))
        if len(slots) < len(order.blocks) and self._rows is not None:
            self._counters.add("unstaged_blocks", len(order.blocks) - len(slots))
        if space is None or not slots:
            self._drop_slots(slots)
            self._report(order, {}, 0)
            return
        assert self._mover is not None, "there are no slots without it"
        blocks = order.blocks[: len(slots)]
        groups = [block[0] for block in blocks]
        sizes = self._sizes_of(groups)
        keys = object_keys(order.hashes[: len(blocks)], groups, [self._rank.shard])
        offsets = self._offsets_of(slots)
        batch = Batch("get", space, keys, offsets, sizes, until_s, lease=order.lease)
        self._under_way.add(order.ticket)
        done = partial(self._fetched, order, slots, sizes)
        try:
            self._mover.begin(batch, done)
        except CenoteError as error:
            done(error)

    def _fetched(
        self,
        order: StageOrder,
        slots: list[int],
        sizes: NDArray[np.uint64],
        answer: Answer | CenoteError,
    ) -> None:
        blocks = order.blocks[: len(slots)]
        if isinstance(answer, CenoteError):
            _log.warning("a prefix was not fetched", why=answer)
            self._drop_slots(slots)
            self._report(order, {}, 0)
            return
        self._counters.observe("stage", answer.took_s)
        hits = answer.done
        if hits.all():
            self._report(order, dict(zip(blocks, slots, strict=True)), int(sizes.sum()))
            return
        rows = list(zip(blocks, slots, hits.tolist(), strict=True))
        self._drop_slots([slot for _, slot, hit in rows if not hit])
        there = {block: slot for block, slot, hit in rows if hit}
        self._report(order, there, int(sizes[hits].sum()))

    def _drop_slots(self, slots: list[int]) -> None:
        with self._lock:
            self._slots.give(slots)

    def _report(self, order: StageOrder, there: dict[Block, int], size_bytes: int) -> None:
        missing = (
            frozenset(order.blocks) - there.keys() if len(there) < len(order.blocks) else _NONE
        )
        with self._lock:
            self._under_way.discard(order.ticket)
            if order.ticket in self._dropped:
                self._dropped.discard(order.ticket)
                self._slots.give(list(there.values()))
                return
            self._staged[order.ticket] = there
            self._reports.staged[order.ticket] = StageReport(1, missing, size_bytes)

    def _drop(self, ticket: int) -> None:
        with self._lock:
            if ticket in self._under_way:
                self._dropped.add(ticket)
            else:
                self._slots.give(list(self._staged.pop(ticket, {}).values()))

    def _load(self, order: LoadOrder) -> None:
        """Staged blocks to the engine's: a copy in this host's memory. It ends in any case."""
        began_s = time.monotonic()
        with self._lock:
            there = self._staged.pop(order.ticket, {})
        failed = True
        try:
            if not self._suspended:
                self._copy_in(order, there)
                failed = False
        except Exception:  # the engine must hear of it, or the request would wait for ever
            _log.exception("a prefix was not loaded")
        with self._lock:
            self._slots.give(list(there.values()))
            self._loaded.add(order.request_id)
            if failed:
                self._failed.add(order.request_id)
        self._counters.observe("load", time.monotonic() - began_s)

    def _copy_in(self, order: LoadOrder, there: dict[Block, int]) -> None:
        memory, rows = self._memory, self._rows
        assert memory is not None
        assert rows is not None
        by_group: dict[int, tuple[list[int], list[int]]] = {}
        for block, block_id in zip(order.blocks, order.block_ids, strict=True):
            ids, slots = by_group.setdefault(block[0], ([], []))
            ids.append(block_id)
            slots.append(there[block])
        for group, (ids, slots) in by_group.items():
            if is_run(slots):
                memory.scatter(group, ids, rows[slots[0] : slots[0] + len(slots)])
                continue
            for block_id, slot in zip(ids, slots, strict=True):
                memory.scatter(group, [block_id], rows[slot : slot + 1])
        memory.finish_loads()

    # ---- to the pool -------------------------------------------------------------------------

    def _save(self, order: SaveOrder, space: SpaceName) -> None:
        assert self._memory is not None
        mine = [i for i, block in enumerate(order.blocks) if self._rank.saves(block[1])]
        if not mine or self._breaker.is_open(time.monotonic()):
            self._counters.add("unsaved_blocks", len(mine))
            return
        with self._lock:
            rows = self._rows
            slots = self._slots.take_for_save(len(mine))
        self._counters.add("unsaved_blocks", len(mine) - len(slots))
        mine = mine[: len(slots)]
        if rows is None or not mine:
            return
        began_s = time.monotonic()
        copied = self._copy_out(order, mine, slots, rows)
        self._counters.observe("copy", time.monotonic() - began_s)
        put = partial(self._put, order, mine, slots, space)
        if self._saver is None:
            put()
        elif not self._saver.submit(lambda: put(copied)):
            self._unsaved(slots)

    def _copy_out(
        self, order: SaveOrder, mine: list[int], slots: list[int], rows: torch.Tensor
    ) -> Job:
        """The engine may go on as soon as this returns. Returns what waits until it is copied."""
        memory = self._memory
        assert memory is not None
        by_group: dict[int, tuple[list[int], list[int]]] = {}
        for i, slot in zip(mine, slots, strict=True):
            ids, places = by_group.setdefault(order.blocks[i][0], ([], []))
            ids.append(order.block_ids[i])
            places.append(slot)
        for group, (ids, places) in by_group.items():
            if is_run(places):
                memory.gather(group, ids, rows[places[0] : places[0] + len(places)])
                continue
            for block_id, place in zip(ids, places, strict=True):
                memory.gather(group, [block_id], rows[place : place + 1])
        return memory.copied()

    def _put(
        self,
        order: SaveOrder,
        mine: list[int],
        slots: list[int],
        space: SpaceName,
        copied: Job | None = None,
    ) -> None:
        """Have the blocks saved, once they are `copied`, which is waited for; `_saved` sees to what
        came of it."""
        assert self._mover is not None, "there are no slots without it"
        until_s = time.monotonic() + self._options.save_deadline_s
        groups = [order.blocks[i][0] for i in mine]
        sizes = self._sizes_of(groups)
        keys = object_keys([order.hashes[i] for i in mine], groups, [self._rank.shard])
        offsets = self._offsets_of(slots)
        chain = len(set(groups)) == 1
        batch = Batch("put", space, keys, offsets, sizes, until_s, chain=chain)
        done = partial(self._saved, slots, sizes)
        try:
            if copied is not None:
                copied()
            self._mover.begin(batch, done)
        except CenoteError as error:
            done(error)

    def _saved(
        self, slots: list[int], sizes: NDArray[np.uint64], answer: Answer | CenoteError
    ) -> None:
        if isinstance(answer, CenoteError):
            self._breaker.failed(time.monotonic())
            self._unsaved(slots)
            _log.warning("blocks were not saved", blocks=len(slots), why=answer)
            return
        self._breaker.succeeded()
        with self._lock:
            self._slots.give_from_save(slots)
        self._counters.observe("save", answer.took_s)
        self._counters.add("saved_blocks", int(answer.stored.sum()))
        self._counters.add("saved_bytes", int(sizes[answer.stored].sum()))
        self._counters.add("existing_blocks", answer.existed_count)
        self._counters.add("unsaved_blocks", answer.failed_count)

    def _unsaved(self, slots: list[int]) -> None:
        self._counters.add("unsaved_blocks", len(slots))
        with self._lock:
            self._slots.give_from_save(slots)
