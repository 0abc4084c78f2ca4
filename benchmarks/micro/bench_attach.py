"""A daemon's attach after a change of leader, in process: sums on either side, and what follows.

.venv/bin/python benchmarks/micro/bench_attach.py [--objects 1000000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cenote.api.rows import BLOCK, SEAL, SLOT, SLOT_SUM
from cenote.master.commands import Attach, SegmentReport
from cenote.master.effects import PLACED, NamespaceOpened, NodeKnown, SegmentKnown, Stored
from cenote.master.state import MasterState
from cenote.master.state_config import StateConfig
from cenote.store.slots import SlotTable

SLOTS_PER_BLOCK = 256
BATCH = 4096
UNIT = 64


def timed(what: str, run: Callable[[], Any]) -> Any:
    began_s = time.perf_counter()
    result = run()
    print(f"{what}: {(time.perf_counter() - began_s) * 1e3:.0f} ms")
    return result


def full_table(objects: int) -> SlotTable:
    """A slot table in which every slot is sealed."""
    memory = memoryview(bytearray(objects * 192))
    table = SlotTable(memory, memory, unit_bytes=UNIT, limit_bytes=objects * UNIT * 3)
    for first in range(0, objects, BATCH):
        numbers = np.arange(first, min(first + BATCH, objects))
        rows = np.zeros(len(numbers), SEAL)
        rows["slot"], rows["offset"] = numbers, numbers * UNIT * 3
        rows["length"], rows["object_size"], rows["extent_count"] = UNIT * 3, UNIT, 1
        rows["seq"], rows["key_length"] = numbers + 1, 1
        table.seal(1, 1, 1, rows, memoryview(b"k"), np.zeros(len(numbers), np.int64))
    return table


def followed_state(objects: int) -> MasterState:
    """What a new leader has when it begins."""
    state = MasterState(StateConfig(), epoch=0)
    state.replay(NamespaceOpened("n", 1, 1, b"f", 1, 1))
    state.replay(NodeKnown(1, b"u" * 16, "n1", "boot", "domain"))
    state.replay(SegmentKnown(1, 1, 0, 1, b"i" * 16, objects * UNIT * 3, UNIT, objects))
    dice = np.random.default_rng(1)
    for first in range(0, objects, BATCH):
        numbers = np.arange(first, min(first + BATCH, objects))
        placed = np.zeros(len(numbers), PLACED)
        placed["segment"], placed["slot"] = 1, numbers
        placed["offset_units"], placed["length_units"] = numbers * 3, 3
        ones = np.ones(len(numbers), np.uint64)
        state.replay(
            Stored(
                1,
                1,
                1,
                dice.integers(0, 2**63, (len(numbers), 2), dtype=np.uint64),
                ones * np.uint64(UNIT),
                ones,
                (numbers + 1).astype(np.uint64),
                np.zeros(len(numbers), np.uint16),
                np.ones(len(numbers), np.uint16),
                np.ones(len(numbers), np.uint8),
                placed,
            )
        )
    state.take_up(StateConfig(), 2)
    state.start(0.0)
    return state


def attach_of(objects: int, sums: Any, inventory: Any) -> Attach:
    report = SegmentReport(
        0, 1, b"i" * 16, objects * UNIT * 3, objects * UNIT * 3, UNIT, objects, np.zeros(0, SLOT)
    )
    report.retired = np.zeros(0, [("offset", "<u8"), ("length", "<u8")])
    command = Attach(b"u" * 16, "n1", "boot", "domain", [], [report], inventory, 1)
    if sums is not None:
        report.slot_sums = np.frombuffer(sums.tobytes(), SLOT_SUM)
        command.slots_per_block, command.told_blocks = SLOTS_PER_BLOCK, np.zeros(0, BLOCK)
    return command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--objects", type=int, default=1_000_000)
    objects = parser.parse_args().objects
    table = full_table(objects)
    sums = timed("daemon: sums", lambda: table.sums(SLOTS_PER_BLOCK))
    command = attach_of(objects, sums, np.zeros(0, SLOT))
    state = followed_state(objects)
    reply, _ = timed("master: attach by sums", lambda: state.apply(command, 1.0))
    assert not reply.wanted_blocks
    assert (reply.adopted, reply.dropped) == (0, 0)
    parts = timed("daemon: inventory", lambda: list(table.inventory(0)))
    state = followed_state(objects)
    command = attach_of(objects, None, np.concatenate(parts))
    reply, _ = timed("master: attach by inventory", lambda: state.apply(command, 1.0))
    assert (reply.adopted, reply.dropped) == (0, 0)


if __name__ == "__main__":
    main()
