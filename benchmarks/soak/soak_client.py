"""One client of a soak: paced random calls, every byte and every answer judged.

    soak_client DIR NUMBER LANE SEED OPTIONS

It goes on from what its ledger says that the process before it was sure of. Whatever is wrong is
written to DIR/violations at once.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import payload
from board import Board, write_line
from held_view import HeldView
from lateness import LATE_MAX_S, LATE_S, ready_and_waiting_s
from ledger import Ledger, Row, State, judge_exists, judge_read

from cenote.api.errors import BufferInUse, CenoteError
from cenote.client import Client

T = TypeVar("T")

BATCH_MAX = 8
BATCH_BYTES_MAX = 8 << 20
PINNED_SIZE_MAX = 512 << 10
IN_USE_MAX = 4
RECENT_MAX = 40
MIX = {
    "put": 14,
    "put_batch": 7,
    "get": 14,
    "get_into": 12,
    "get_batch": 8,
    "get_into_batch": 10,
    "view": 12,
    "hold": 3,
    "lease": 6,
    "exists": 8,
    "remove": 5,
    "replace": 7,
    "pinned": 6,
}
READS = {
    "get": 1,
    "get_into": 1,
    "get_batch": BATCH_MAX,
    "get_into_batch": BATCH_MAX,
    "view": 4,
    "lease": 4,
}
"""Kinds of reads, and of how many keys."""


def new_buffers() -> list[np.ndarray]:
    """Room for a batch of the largest objects, used again and again: what is measured is the
    memory of the client library."""
    return list(np.full((BATCH_MAX, payload.SIZE_MAX), 1, np.uint8))


class SoakClient:
    """Keys 0 to `pinned_keys` are pinned once they are stored, the others may be evicted."""

    def __init__(
        self, directory: Path, number: int, lane: str, seed: int, options: dict[str, Any]
    ) -> None:
        self.directory = directory
        self.number = number
        self.lane = lane
        self.rng = random.Random(seed)
        self.pinned_keys: int = options["pinned_keys"]
        self.keys: int = options["keys"]
        self.calls_per_s: float = options["calls_per_s"]
        self.location_ttl_s: float = options["location_ttl_s"]
        self.client_options: dict[str, Any] = options["client"]
        self.deadline_s: float = self.client_options["deadline_s"]
        self.board = Board(directory / "board", options["clients"])
        self.ledgers = [
            Ledger(directory / f"ledger{i}", self.keys, owner=i == number)
            for i in range(options["clients"])
        ]
        self.own = self.ledgers[number]
        self.client: Any = None
        self.buffers = new_buffers()
        self.buffers_in_use: list[list[np.ndarray]] = []
        self.held: HeldView | None = None
        self.recent: deque[tuple[int, int]] = deque(maxlen=RECENT_MAX)

    # ---- counting --------------------------------------------------------------------------------

    def count(self, name: str, by: int = 1) -> None:
        self.board.add(self.number, name, by)

    def wrong(self, name: str, text: str) -> None:
        self.count(name)
        where = self.directory / "violations"
        write_line(where, f"{time.monotonic():.3f} client {self.number}: {name}: {text}")

    def call(self, kind: str, make: Callable[[], T]) -> T | None:
        """One call of the SDK; None where it raised, which is counted."""
        board, number = self.board, self.number
        self.count(f"call {kind}")
        well = board.order("healthy")
        stops = board.get(number, "stops")
        board.set(number, "in_call", 1)
        waited_s = ready_and_waiting_s()
        began_s = time.monotonic()
        try:
            return make()
        except CenoteError as error:
            self.failed(kind, error, well)
            return None
        finally:
            took_s = time.monotonic() - began_s
            board.set(number, "in_call", 0)
            late_s = took_s - self.deadline_s
            if late_s > 0 and stops == board.get(number, "stops"):  # not stopped itself meanwhile
                self.judge_time(kind, late_s - (ready_and_waiting_s() - waited_s))

    def judge_time(self, kind: str, late_s: float) -> None:
        if late_s <= LATE_S:
            return
        late_ms = int(late_s * 1000)
        if late_ms > self.board.get(self.number, "late_ms_max"):
            self.board.set(self.number, "late_ms_max", late_ms)
        if late_s > LATE_MAX_S:
            self.wrong("late", f"{kind} ended {late_s:.3f} s after its deadline")

    def failed(self, kind: str, error: CenoteError, well: int) -> None:
        if isinstance(error, BufferInUse):  # these must be left alone for now
            self.buffers_in_use = [*self.buffers_in_use[1 - IN_USE_MAX :], self.buffers]
            self.buffers = new_buffers()
        self.count(f"error {error.reason}")
        text = f"{time.monotonic():.3f} client {self.number}: {kind}: {error!r}"
        if well and well == self.board.order("healthy"):
            self.count(f"well {error.reason}")
            text += " WHILE ALL WAS WELL"
        write_line(self.directory / "errors", text)

    # ---- choosing --------------------------------------------------------------------------------

    @staticmethod
    def name(client: int, key: int) -> str:
        return f"client{client}/key{key:05}"

    def size_of_new(self, key: int) -> int:
        """As many of each order of magnitude."""
        top = PINNED_SIZE_MAX if key < self.pinned_keys else payload.SIZE_MAX
        return int(payload.SIZE_MIN * (top / payload.SIZE_MIN) ** self.rng.random())

    def data(self, key: int, version: int) -> np.ndarray:
        return payload.make(self.number, key, version, self.own.size(key))

    def some(self, count: int) -> list[tuple[int, int]]:
        """(client, key) to read: mostly what is there, of this client and of the others; often what
        was read a moment ago, whose locations are remembered, though it may be gone by now."""
        if len(self.recent) >= count and self.rng.random() < 0.3:
            return self.fitting(self.rng.sample(sorted(self.recent), count))
        owner = self.number if self.rng.random() < 0.6 else self.rng.randrange(len(self.ledgers))
        ledger = self.ledgers[owner]
        states = (State.PRESENT,) if self.rng.random() < 0.8 else tuple(State)
        found = ledger.where(*states)
        keys = self.rng.sample(found, min(count, len(found)))
        chosen = self.fitting([(owner, key) for key in keys])
        self.recent.extend(one for one in chosen if one not in self.recent)
        return chosen

    def fitting(self, some: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """As many of them as one call is to move."""
        chosen: list[tuple[int, int]] = []
        room = BATCH_BYTES_MAX
        for client, key in some:
            room -= self.ledgers[client].size(key)
            if room >= 0 or not chosen:
                chosen.append((client, key))
        return chosen

    def pick(self, *states: State, pinned_part: bool = False) -> int | None:
        """A key of one's own."""
        keys = [k for k in self.own.where(*states) if (k < self.pinned_keys) == pinned_part]
        return self.rng.choice(keys) if keys else None

    # ---- steps -----------------------------------------------------------------------------------

    def step(self) -> None:
        now_s = time.monotonic()
        if self.held is not None and self.rng.random() < 0.3:
            self.look_at_held(self.held, now_s)
        due = self.own.due(now_s)
        if due and self.rng.random() < 0.5:
            self.remove(due[0])
            return
        (kind,) = self.rng.choices(list(MIX), list(MIX.values()))
        if kind in READS:
            self.read(kind, self.some(READS[kind]))
        else:
            getattr(self, f"_{kind}")()

    def _put(self) -> None:
        key = self.pick(State.ABSENT)
        if key is not None:
            self.put([key])

    def _put_batch(self) -> None:
        keys = [k for k in self.own.where(State.ABSENT) if k >= self.pinned_keys]
        if keys:
            self.put(self.rng.sample(keys, min(len(keys), self.rng.randint(2, BATCH_MAX))))

    def put(self, keys: list[int]) -> None:
        """Absent keys anew, or what was evicted once more."""
        own = self.own
        again = own.row(keys[0]).state == State.PRESENT
        values, room = [], BATCH_BYTES_MAX
        for key in keys:
            size = own.size(key) if again else self.size_of_new(key)
            if values and size > room:
                break
            room -= size
            values.append(self.data(key, own.will_put(key, size)))
        keys = keys[: len(values)]
        names = [self.name(self.number, key) for key in keys]
        replicas = 2 if keys[0] < self.pinned_keys or self.rng.random() < 0.75 else 1
        more: dict[str, Any] = {"replicas": replicas}
        more["min_replicas"] = min(replicas, self.client_options["min_replicas"])
        if len(keys) == 1:
            kind = "put_again" if again else "put"
            one = self.call(kind, lambda: self.client.put(names[0], values[0], **more))
            results: Sequence[Any] | None = None if one is None else [one]
        else:
            results = self.call("put_batch", lambda: self.client.put_batch(names, values, **more))
        now_s = time.monotonic()
        for position, key in enumerate(keys):
            self.put_ended(key, None if results is None else results[position], again, now_s)
        if results is not None and self.rng.random() < 0.2:
            self.read_back(keys[0])

    def put_ended(self, key: int, result: Any, again: bool, now_s: float) -> None:
        if result is None or result.error is not None:
            if result is not None:
                self.failed("put_batch", result.error, self.board.order("healthy"))
            self.count("in doubt")
            self.own.doubt(key, now_s)
            return
        if result.stored:
            self.count("stored")
            self.count("stored_bytes", self.own.size(key))
        else:
            self.count("existed")
            if not again:
                self.wrong("existed though removed", f"key {key} {self.own.row(key)}: {result}")
        self.own.was_put(key)

    def read_back(self, key: int) -> None:
        """What was acknowledged just now is there."""
        if self.own.row(key).state != State.PRESENT:
            return
        well = self.board.order("healthy")
        (verdict,) = self.read("get", [(self.number, key)])
        if verdict.startswith("missed"):
            self.count("missed after put")
            if well and well == self.board.order("healthy"):
                self.wrong("missed after put when well", f"key {key}: {self.own.row(key)}")

    def _pinned(self) -> None:
        """Put one of the keys that stay, and pin it; or give one up."""
        key = self.pick(State.ABSENT, pinned_part=True)
        if key is not None:
            self.put([key])
        elif self.rng.random() < 0.2:
            old = self.pick(State.PRESENT, pinned_part=True)
            if old is not None:
                self.remove(old)
        waiting = [k for k in self.own.where(State.PRESENT, pinned=False) if k < self.pinned_keys]
        if waiting:
            names = [self.name(self.number, key) for key in waiting]
            found = self.call("pin", lambda: self.client.pin(names))
            for key, there in zip(waiting, found if found is not None else (), strict=False):
                if there:
                    self.own.was_pinned(key)
                else:
                    self.put_again(key)

    def put_again(self, key: int) -> None:
        if self.own.row(key).state == State.PRESENT:
            self.put([key])

    def remove(self, key: int) -> None:
        self.own.will_remove(key)
        name = self.name(self.number, key)
        done = self.call("remove", lambda: (self.client.remove(name),))
        now_s = time.monotonic()
        if done is None:
            self.count("in doubt")
            self.own.doubt(key, now_s)
        else:
            self.count("removed")
            self.own.was_removed(key, now_s)

    def _remove(self) -> None:
        key = self.pick(State.PRESENT)
        if key is not None:
            if self.rng.random() < 0.5:  # so that its location is remembered
                self.read("get_into_batch", [(self.number, key), *self.some(1)])
            self.remove(key)
            self.read("get", [(self.number, key)])

    def _replace(self) -> None:
        """Other bytes under the same key."""
        key = self.pick(State.PRESENT)
        if key is not None:
            self.remove(key)
            if self.own.row(key).state == State.ABSENT:
                self.put([key])
                self.read("get", [(self.number, key)])

    def _hold(self) -> None:
        if self.held is None:
            self.read("hold", self.some(4))

    def _exists(self) -> None:
        self.exists(self.some(BATCH_MAX))

    # ---- reading ---------------------------------------------------------------------------------

    def rows(self, some: list[tuple[int, int]]) -> list[Row]:
        return [self.ledgers[client].row(key) for client, key in some]

    def read(self, kind: str, some: list[tuple[int, int]]) -> list[str]:
        """Read these; a verdict for each."""
        if not some:
            return []
        before, began_s = self.rows(some), time.monotonic()
        names = [self.name(client, key) for client, key in some]
        seen = self.call(kind, lambda: getattr(self, f"_read_{kind}")(names, some))
        after = self.rows(some)
        verdicts = []
        for position, (client, key) in enumerate(some):
            got = None if seen is None else seen[position]
            if got is None:  # the call, or this key, failed
                verdicts.append("failed")
                continue
            own = client == self.number
            verdict = judge_read(
                before[position], after[position], got, began_s, self.location_ttl_s, own=own
            )
            verdicts.append(verdict)
            if verdict in Board.BAD:
                text = f"{kind} of client {client} key {key} gave version {got}"
                self.wrong(verdict, f"{text}; {before[position]} {after[position]} at {began_s}")
            else:
                self.count(verdict)
            if verdict == "missed" and own and self.rng.random() < 0.5:
                self.put_again(key)
        return verdicts

    def bytes_seen(self, data: Any, client: int, key: int, how: str) -> int:
        """The version, 0 for a miss."""
        if data is None:
            return 0
        self.count("hit_bytes", len(data))
        verdict = payload.check(data, client, key)
        if verdict.wrong:
            row = self.ledgers[client].row(key)
            self.wrong(
                "wrong bytes", f"{how} of client {client} key {key} ({row}): {verdict.wrong}"
            )
        return verdict.version

    def _read_get(self, names: list[str], some: list[tuple[int, int]]) -> list[int]:
        return [self.bytes_seen(self.client.get(names[0]), *some[0], "get")]

    def _read_get_batch(self, names: list[str], some: list[tuple[int, int]]) -> list[int]:
        values = self.client.get_batch(names)
        return [self.bytes_seen(v, *s, "get_batch") for v, s in zip(values, some, strict=True)]

    def _read_get_into(self, names: list[str], some: list[tuple[int, int]]) -> list[int]:
        buffer = self.buffers[0]
        size = self.client.get_into(names[0], buffer)
        return [self.bytes_seen(None if size is None else buffer[:size], *some[0], "get_into")]

    def _read_get_into_batch(
        self, names: list[str], some: list[tuple[int, int]], lease: Any = None
    ) -> list[int | None]:
        buffers = self.buffers[: len(some)]
        results = self.client.get_into_batch(names, buffers, lease=lease)
        seen: list[int | None] = []
        for position, one in enumerate(some):
            error = results.error(position)
            if error is not None:
                self.failed("get_into_batch", error, self.board.order("healthy"))
                seen.append(None)
                continue
            size = results[position]
            data = None if size is None else buffers[position][:size]
            how = "get_into_batch" if lease is None else "get_into_batch under a lease"
            seen.append(self.bytes_seen(data, *one, how))
        return seen

    def _read_lease(self, names: list[str], some: list[tuple[int, int]]) -> list[int | None]:
        lease = self.client.acquire(names, self.rng.uniform(0.05, 3.0))
        seen = self._read_get_into_batch(names, some, lease)
        if self.rng.random() < 0.7:
            self.client.release(lease)
        return seen

    def _read_view(self, names: list[str], some: list[tuple[int, int]]) -> list[int]:
        """Looked at twice: they stay what they are for as long as they are open."""
        with self.client.view(names) as views:
            seen = [self.bytes_seen(v, *s, "view") for v, s in zip(views, some, strict=True)]
            time.sleep(self.rng.choice((0.0, 0.05, 0.3)))
            for view, one, version in zip(views, some, seen, strict=True):
                again = self.bytes_seen(view, *one, "view, again")
                if again != version:
                    self.wrong("wrong bytes", f"a view of {one} changed: {version}, then {again}")
        return seen

    def _read_hold(self, names: list[str], some: list[tuple[int, int]]) -> list[int]:
        self.held = HeldView(self.client.view(names), some, self.rng, self.bytes_seen)
        return self.held.seen

    def look_at_held(self, held: HeldView, now_s: float) -> None:
        """It stays what it is, over restarts, removals and evictions, for as long as it is open."""
        for change in held.changes():
            self.wrong("wrong bytes", change)
        if now_s >= held.until_s:
            self.held = None
            self.call("view", held.close)

    def exists(self, some: list[tuple[int, int]]) -> None:
        if not some:
            return
        before = self.rows(some)
        names = [self.name(client, key) for client, key in some]
        found = self.call("exists", lambda: self.client.exists_batch(names))
        after = self.rows(some)
        for position, one in enumerate(some if found is not None else ()):
            verdict = judge_exists(before[position], after[position], bool(found[position]))
            if verdict in Board.BAD:
                self.wrong(verdict, f"exists of {one}: {before[position]} {after[position]}")
            else:
                self.count(verdict)

    # ---- when all is well ------------------------------------------------------------------------

    def check_all(self, round_number: int) -> None:
        """Everything pinned is there, with its bytes, and nothing that was removed."""
        own = self.own
        kept = own.where(State.PRESENT, pinned=True)
        gone = own.where(State.ABSENT)
        self.exists([(self.number, key) for key in gone])
        for first in range(0, len(kept), BATCH_MAX):
            some = [(self.number, key) for key in kept[first : first + BATCH_MAX]]
            verdicts = self.read("get_batch", some)
            if "failed" in verdicts or round_number != self.board.order("healthy"):
                return  # it is over, or counted as an error while all was well
            for one, verdict in zip(some, verdicts, strict=True):
                if verdict == "missed pinned":
                    self.wrong("pinned lost", f"key {one[1]}: {own.row(one[1])}")
                    own.doubt(one[1], time.monotonic())
        self.count("checks")
        self.board.set(self.number, "checked", round_number)

    # ---- life ------------------------------------------------------------------------------------

    def run(self) -> None:
        self.own.after_a_crash(time.monotonic())
        while not self.board.order("stop"):
            self.client = self.call("connect", lambda: Client(self.lane, **self.client_options))
            if self.client is not None:
                break
            time.sleep(0.2)
        if self.client is None:
            return
        with self.client:
            while not self.board.order("stop"):
                round_number = self.board.order("healthy")
                if round_number and self.board.get(self.number, "checked") < round_number:
                    self.check_all(round_number)
                else:
                    self.step()
                time.sleep(min(1.0, self.rng.expovariate(self.calls_per_s)))
            if self.held is not None:
                self.call("view", self.held.close)


def main() -> None:
    directory, number, lane, seed, options = sys.argv[1:]
    SoakClient(Path(directory), int(number), lane, int(seed), json.loads(options)).run()


if __name__ == "__main__":
    main()
