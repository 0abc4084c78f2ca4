"""Programs that tests run in processes of their own, as users would: each is a function here.

`remote.Remote` starts one (by way of `cluster.start_program`) and talks to it over unbuffered
standard input and output: pickled values, each with its length in front.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import random
import select
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, BinaryIO, Literal

import numpy as np

from cenote.api.errors import AlreadyExists, CenoteError, InternalError, InvalidArgument
from cenote.client import AcquiredLease, Client
from halting_writer import halting_writers
from loads import steady
from payloads import payload_of

__all__ = ["PROGRAMS", "read_message", "write_message"]

_LENGTH = struct.Struct("<I")


def write_message(stream: BinaryIO, value: object) -> None:
    """Send one value."""
    data = pickle.dumps(value)
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[stream.write(rest) :]


def read_message(stream: BinaryIO) -> Any:
    """Receive one value. Raises EOFError where the other side is gone."""
    (length,) = _LENGTH.unpack(_read_exactly(stream, _LENGTH.size))
    return pickle.loads(_read_exactly(stream, length))


def _read_exactly(stream: BinaryIO, length: int) -> bytes:
    parts = []
    while length:
        part = stream.read(length)
        if not part:
            raise EOFError("the other process is gone")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


class Control:
    """A program's side of the conversation."""

    def __init__(self) -> None:
        # Whatever prints is not to get in between.
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._in = os.fdopen(0, "rb", buffering=0)

    def say(self, value: object) -> None:
        write_message(self._out, value)

    def hear(self) -> Any:
        """The next value that the test sends; waits for it."""
        return read_message(self._in)

    @property
    def told(self) -> bool:
        """Whether the test said something (or is gone) that was not heard yet."""
        return bool(select.select([self._in], [], [], 0)[0])


# ---- programs ---------------------------------------------------------------------------------


def peer(control: Control, lane: str, options: dict[str, Any]) -> None:
    """Another client: makes the calls that it is told, until it is told None."""
    with Client(lane, **options) as client:
        control.say("ready")
        while (message := control.hear()) is not None:
            method, arguments, keywords = message
            try:
                control.say((True, getattr(client, method)(*arguments, **keywords)))
            except CenoteError as error:
                control.say((False, error))


def look(control: Control, lane: str, keys: list[str], options: dict[str, Any]) -> None:
    """exists and match of all keys, over and over, until told; says what came of it."""
    rounds = errors = hits = most = 0
    first_error = ""
    with Client(lane, **options) as client:
        control.say("ready")
        while not control.told:
            try:
                present = client.exists_batch(keys)
                matched = client.match(keys)
                hits += int(present.sum())
                most = max(most, int(matched.present.sum()))
            except CenoteError as error:
                errors += 1
                first_error = first_error or repr(error)
            rounds += 1
    control.say({"rounds": rounds, "errors": errors, "hits": hits, "most": most, "e": first_error})


def overwrite(control: Control, lane: str, prefix: str, count: int, size: int, batch: int) -> None:
    """`count` puts of new keys at full speed; says how many failed and why."""
    failures: list[str] = []
    data = np.frombuffer(os.urandom(size * batch), np.uint8).reshape(batch, size)
    with Client(lane, deadline_s=20.0) as client:
        control.say("ready")
        control.hear()
        for first in range(0, count, batch):
            keys = [f"{prefix}{i}" for i in range(first, min(count, first + batch))]
            results = client.put_from_batch(keys, list(data[: len(keys)]))
            failures += [repr(r.error) for r in results if not r.stored]
    control.say(failures)


def put_small(
    control: Control, lane: str, prefix: str, count: int, size: int, options: dict[str, Any]
) -> None:
    """`count` puts of new keys, one after the other, when told; says which were not stored, and
    then does nothing until it is told so, or killed."""
    with Client(lane, **options) as client:
        control.say("ready")
        control.hear()
        keys = [f"{prefix}{i}" for i in range(count)]
        failed = [key for key in keys if not client.put(key, payload_of(key, size)).stored]
        control.say(failed)
        control.hear()


def write_and_remember(
    control: Control,
    lane: str,
    seed: int,
    size: int,
    batch: int,
    durability: Literal["relaxed", "journaled"],
) -> None:
    """Put, and remove some of it, until told, whatever happens to the pool meanwhile.

    Says which keys were acknowledged as stored, which as removed, and of which nobody knows.
    """
    rng = np.random.default_rng(seed)
    stored: set[str] = set()
    removed: set[str] = set()
    unknown: set[str] = set()
    errors = number = 0
    with Client(lane, deadline_s=2.0) as client:
        control.say("ready")
        while not control.told:
            keys = [f"w{seed}-{number + i}" for i in range(batch)]
            number += batch
            try:
                values = [payload_of(key, size) for key in keys]
                results = client.put_batch(keys, values, durability=durability)
            except CenoteError:
                unknown.update(keys)
                errors += 1
                continue
            for key, result in zip(keys, results, strict=True):
                (stored if result.stored else unknown).add(key)
            if rng.random() < 0.25 and stored:
                victim = sorted(stored)[int(rng.integers(len(stored)))]
                stored.discard(victim)
                try:
                    client.remove(victim)
                    removed.add(victim)
                except CenoteError:
                    unknown.add(victim)
                    errors += 1
    control.say({"stored": stored, "removed": removed, "unknown": unknown, "errors": errors})


def busy_reader(
    control: Control,
    lane: str,
    keys: list[str],
    size: int,
    kind: str,
    options: dict[str, Any] | None = None,
) -> None:
    """Batch reads or writes of much memory, one after the other, for ever: to be interrupted."""
    with Client(lane, **(options or {})) as client:
        buffers = [client.alloc(size) for _ in keys]
        control.say("ready")
        number = 0
        while True:
            number += 1
            if kind == "get":
                client.get_into_batch(keys, buffers)
            else:
                client.put_from_batch([f"{key}/{os.getpid()}/{number}" for key in keys], buffers)


def open_and_close(control: Control, lane: str, options: dict[str, Any]) -> None:
    """What a client leaves behind in its process: threads and sockets before, while, and after."""

    def seen() -> tuple[int, int]:
        sockets = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                sockets += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
            except FileNotFoundError:  # the listing's own descriptor
                continue
        return threading.active_count(), sockets

    before = seen()
    client = Client(lane, **options)
    client.put("mine", b"x" * 100_000)
    assert client.get("mine") == b"x" * 100_000
    client.put_batch([f"m{i}" for i in range(64)], [b"y" * 70_000] * 64)
    with client.view(["mine"]) as views:
        assert views[0] is not None
    while_open = seen()
    client.close()
    control.say((before, while_open, seen()))


def forked(control: Control, lane: str, options: dict[str, Any]) -> None:
    """What a forked child gets from its parent's client, and whether the parent's goes on."""
    with Client(lane, **options) as client:
        client.put("before", b"fork")
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            said = []
            for call in (
                lambda: client.get("before"),
                lambda: client.put("child", b"x"),
                lambda: client.exists("before"),
                client.close,
            ):
                try:
                    said.append(repr(call()))
                except CenoteError as error:
                    said.append(type(error).__name__)
            os.write(writable, pickle.dumps(said))
            os._exit(0)
        os.close(writable)
        with os.fdopen(readable, "rb") as stream:
            said = pickle.loads(stream.read())
        _, status = os.waitpid(child, 0)
        control.say((said, os.waitstatus_to_exitcode(status), client.get("before")))


def slow_put(control: Control, lane: str, key: str, size: int, options: dict[str, Any]) -> None:
    """One put, started when told; says what came of it."""
    with Client(lane, **options) as client:
        data = payload_of(key, size)
        control.say("ready")
        control.hear()
        began_s = time.monotonic()
        try:
            result = client.put(key, data)
            control.say(("stored" if result.stored else "existed", time.monotonic() - began_s))
        except AlreadyExists:
            control.say(("existed", time.monotonic() - began_s))


class Chaos:
    """One client's random calls, whatever happens to the pool; every byte it gets is checked."""

    def __init__(self, client: Client, seed: int) -> None:
        self._client = client
        self._rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def step(self) -> None:
        """One call; errors are counted by their class, and any that is not typed ends it all."""
        name = self._rng.choice(("put", "put", "get", "get", "into", "view", "lease", "remove"))
        try:
            getattr(self, f"_{name}")()
            self.counts[name] += 1
        except CenoteError as error:
            self._note(error)

    def _note(self, error: CenoteError | None) -> None:
        if error is not None:
            self.counts[type(error).__name__] += 1
            if isinstance(
                error, InternalError | InvalidArgument
            ):  # nobody asked for anything wrong
                self.wrong.append(repr(error))

    def _keys(self, count_max: int) -> list[str]:
        return [
            f"c{self._rng.randrange(CHAOS_KEYS)}" for _ in range(self._rng.randint(1, count_max))
        ]

    def _check(self, key: str, value: Any) -> None:
        if value is not None:
            self.counts["hits"] += 1
            if value != chaos_payload(key):
                self.wrong.append(f"{key} has wrong bytes")

    def _put(self) -> None:
        keys = self._keys(12)
        results = self._client.put_batch(
            keys, [chaos_payload(k) for k in keys], replicas=self._rng.randint(1, 2)
        )
        for result in results:
            self._note(result.error)

    def _get(self) -> None:
        keys = self._keys(12)
        values = [self._client.get(keys[0])] if len(keys) == 1 else self._client.get_batch(keys)
        for key, value in zip(keys, values, strict=True):
            self._check(key, value)

    def _into(self, lease: AcquiredLease | None = None, keys: list[str] | None = None) -> None:
        keys = keys or self._keys(6)
        buffers = [bytearray(len(chaos_payload(key))) for key in keys]
        results = self._client.get_into_batch(keys, buffers, lease=lease)
        for position, key in enumerate(keys):
            error = results.error(position)
            self._note(error)
            if error is None and results[position] is not None:
                self._check(key, bytes(buffers[position]))

    def _view(self) -> None:
        keys = self._keys(4)
        with self._client.view(keys) as views:
            for key, seen in zip(keys, views, strict=True):
                self._check(key, None if seen is None else bytes(seen))

    def _lease(self) -> None:
        keys = self._keys(6)
        lease = self._client.acquire(keys, self._rng.uniform(0.01, 2.0))
        self._into(lease, keys)
        if self._rng.random() < 0.7:
            self._client.release(lease)

    def _remove(self) -> None:
        self._client.remove_batch(self._keys(3))


CHAOS_KEYS = 300


@functools.cache
def chaos_payload(key: str) -> bytes:
    size = 1 + int.from_bytes(key.encode(), "little") * 2_654_435_761 % 400_000
    return payload_of(key, size)


def chaos(control: Control, lane: str, seed: int, options: dict[str, Any]) -> None:
    """Random calls until told; says what they came to."""
    with Client(lane, **options) as client:
        run = Chaos(client, seed)
        control.say("ready")
        while not control.told:
            run.step()
    control.say((run.counts, run.wrong))


def partition(control: Control, program: str, *arguments: Any) -> None:
    """See `partitions.py`, which starts programs itself: it can't be imported above."""
    import partitions

    getattr(partitions, program)(control, *arguments)


PROGRAMS: dict[str, Callable[..., None]] = {
    "peer": peer,
    "look": look,
    "overwrite": overwrite,
    "put_small": put_small,
    "write_and_remember": write_and_remember,
    "busy_reader": busy_reader,
    "open_and_close": open_and_close,
    "forked": forked,
    "slow_put": slow_put,
    "chaos": chaos,
    "steady": steady,
    "halting_writers": halting_writers,
    "partition": partition,
}


def main() -> None:
    """`programs NAME`: its arguments come as the first message."""
    control = Control()
    with contextlib.suppress(EOFError):  # the test is over
        PROGRAMS[sys.argv[1]](control, *control.hear())


if __name__ == "__main__":
    main()
