"""`cenote bench`: how fast this pool is from here, in some seconds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .exits import EXIT_OK
from .options import MASTER_DEFAULT, AsJson, DeadlineS, GrpcAddress, MasterAddress

if TYPE_CHECKING:
    from cenote.client import Client

__all__ = ["bench"]

_NAMESPACE: Final = "cenote-bench"
_SMALL_BYTES: Final = 4096
_SMALL_BATCH: Final = 256
_LOOKUP_BATCH: Final = 512
_LARGE_BATCH: Final = 16
_WRITTEN_SHARE_MAX: Final = 8  # of the pool's capacity: 1/8 at most is taken
_WRITTEN_BYTES_MAX: Final = 1 << 30
_CALLS_MAX: Final = 100_000


def bench(
    seconds: Annotated[float, typer.Option(min=0.05, max=60, help="For each case, at most.")] = 1.0,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Of the large objects.")] = "1MiB",
    transport: Annotated[
        str, typer.Option(metavar="LIST", help="In order of preference: shm,rdma,tcp.")
    ] = "shm,rdma,tcp",
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 30.0,
) -> int:
    """Measure latency and throughput of this pool from here, with one client.

    Takes at most an eighth of the pool's capacity, and gives it back.
    """
    from cenote.runtime.units import format_size, parse_positive_size_bytes

    from .connect import open_admin, open_client
    from .output import print_json, print_table

    large_bytes = parse_positive_size_bytes(size, "--size")
    with open_admin(master, grpc, deadline) as admin:
        capacity_bytes = admin.status().capacity_bytes
        with open_client(
            master,
            admin,
            _NAMESPACE,
            deadline_s=deadline,
            create=True,
            transports=tuple(part.strip() for part in transport.split(",") if part.strip()),
        ) as client:
            found = _Bench(client, seconds, large_bytes, capacity_bytes).run()
    if json:
        print_json(found)
        return EXIT_OK
    print_table(
        ["case", "calls", "p50", "p99", "keys/s", "GB/s"],
        (
            (
                f"{case['operation']} {case['keys']} x {format_size(case['size_bytes'])}"
                if case["size_bytes"]
                else f"{case['operation']} {case['keys']}",
                case["calls"],
                _microseconds(case["p50_us"]),
                _microseconds(case["p99_us"]),
                f"{case['keys_per_s']:,.0f}",
                f"{case['gb_per_s']:.2f}" if case["size_bytes"] else None,
            )
            for case in found
        ),
    )
    return EXIT_OK


def _microseconds(value_us: float) -> str:
    from cenote.runtime.units import format_duration

    return format_duration(value_us / 1e6)


class _Bench:
    """One run. Its keys begin with a random word, so that runs beside each other don't meet."""

    def __init__(
        self, client: Client, seconds: float, large_bytes: int, capacity_bytes: int
    ) -> None:
        import secrets

        from cenote.api.errors import ResourceUnavailable
        from cenote.runtime.units import format_size

        self._client = client
        self._seconds = seconds
        self._large_bytes = large_bytes
        self._word = secrets.token_bytes(8)
        self._live: list[bytes] = []
        self._named = 0
        self._budget_bytes = min(capacity_bytes // _WRITTEN_SHARE_MAX, _WRITTEN_BYTES_MAX)
        self._large_count = min(_LARGE_BATCH, self._budget_bytes // large_bytes)
        if not self._large_count or self._budget_bytes < _SMALL_BATCH * _SMALL_BYTES:
            raise ResourceUnavailable(
                f"the pool holds {format_size(capacity_bytes)}: too little to measure with objects"
                f" of {format_size(large_bytes)}",
                remedy="add store daemons, or choose a smaller --size",
            )

    def run(self) -> list[dict[str, Any]]:
        """All cases, one after the other; nothing stays in the pool."""
        from .output import Bar

        cases: tuple[Callable[[], dict[str, Any]], ...] = (
            self._exists,
            self._exists_batch,
            self._put_one,
            self._get_one,
            lambda: self._put_batch(_SMALL_BATCH, _SMALL_BYTES),
            lambda: self._get_batch(_SMALL_BATCH, _SMALL_BYTES),
            lambda: self._put_batch(self._large_count, self._large_bytes),
            lambda: self._get_batch(self._large_count, self._large_bytes),
        )
        found = []
        try:
            with Bar("Measuring", total=len(cases), unit="cases") as bar:
                for number, case in enumerate(cases):
                    found.append(case())
                    bar.update(number + 1)
        finally:
            self._clean_up()
        return found

    def _clean_up(self) -> None:
        self._remove(self._live)
        self._live = []

    def _remove(self, keys: list[bytes]) -> None:
        for first in range(0, len(keys), _LOOKUP_BATCH):
            self._client.remove_batch(keys[first : first + _LOOKUP_BATCH])

    def _new_keys(self, count: int, size_bytes: int) -> list[bytes]:
        """Keys to put next. What was put before goes where it would be more than the budget."""
        if (len(self._live) + count) * size_bytes > self._budget_bytes:
            self._clean_up()
        keys = [self._key(self._named + i) for i in range(count)]
        self._named += count
        self._live += keys
        return keys

    def _key(self, number: int) -> bytes:
        return self._word + number.to_bytes(8, "little")

    def _measure(
        self,
        operation: str,
        keys: int,
        size_bytes: int,
        call: Callable[[Any], object],
        prepare: Callable[[], object] = lambda: None,
    ) -> dict[str, Any]:
        """Call with what `prepare` gives until the time is over; only the calls are timed.

        The first one, which may have to connect, does not count.
        """
        from time import perf_counter

        import numpy as np

        call(prepare())
        times_s: list[float] = []
        end_s = perf_counter() + self._seconds
        while not times_s or (perf_counter() < end_s and len(times_s) < _CALLS_MAX):
            given = prepare()
            began_s = perf_counter()
            call(given)
            times_s.append(perf_counter() - began_s)
        total_s = sum(times_s)
        p50, p99 = np.percentile(np.array(times_s), (50, 99)) * 1e6
        return {
            "operation": operation,
            "keys": keys,
            "size_bytes": size_bytes,
            "calls": len(times_s),
            "p50_us": float(p50),
            "p99_us": float(p99),
            "keys_per_s": len(times_s) * keys / total_s,
            "gb_per_s": len(times_s) * keys * size_bytes / total_s / 1e9,
        }

    # ---- cases -------------------------------------------------------------------------------

    def _exists(self) -> dict[str, Any]:
        key = self._key(0)
        return self._measure("exists", 1, 0, lambda _: self._client.exists(key))

    def _exists_batch(self) -> dict[str, Any]:
        keys = [self._key(i) for i in range(_LOOKUP_BATCH)]
        return self._measure("exists", len(keys), 0, lambda _: self._client.exists_batch(keys))

    def _put_one(self) -> dict[str, Any]:
        data = bytes(range(256)) * (_SMALL_BYTES // 256)
        return self._measure(
            "put",
            1,
            _SMALL_BYTES,
            lambda keys: self._client.put(keys[0], data),
            lambda: self._new_keys(1, _SMALL_BYTES),
        )

    def _get_one(self) -> dict[str, Any]:
        keys, buffer = itertools.cycle(self._live), bytearray(_SMALL_BYTES)
        found = self._measure(
            "get", 1, _SMALL_BYTES, lambda _: self._client.get_into(next(keys), buffer)
        )
        self._clean_up()
        return found

    def _put_batch(self, count: int, size_bytes: int) -> dict[str, Any]:
        with self._client.alloc(count * size_bytes) as memory:
            memory.array[:] = 0x5A
            buffers = [memory[i * size_bytes : (i + 1) * size_bytes] for i in range(count)]
            return self._measure(
                "put",
                count,
                size_bytes,
                lambda keys: self._client.put_from_batch(keys, buffers).raise_for_errors(),
                lambda: self._new_keys(count, size_bytes),
            )

    def _get_batch(self, count: int, size_bytes: int) -> dict[str, Any]:
        """Reads what the put case before it wrote last, then removes all of it."""
        keys = self._live[-count:]
        with self._client.alloc(count * size_bytes) as memory:
            buffers = [memory[i * size_bytes : (i + 1) * size_bytes] for i in range(count)]
            found = self._measure(
                "get",
                count,
                size_bytes,
                lambda _: self._client.get_into_batch(keys, buffers).raise_for_errors(),
            )
        self._clean_up()
        return found
