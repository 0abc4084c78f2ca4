"""The lane of coroutines to whoever leads. The blocking stub knows how to look for the leader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from typing import Any, Final, TypeVar, final

from cenote.api.errors import CenoteError, ClientClosed, DeadlineExceeded, Unavailable
from cenote.rpc.lane_aio import AsyncLaneClient

from .master_stub import LaneMaster
from .session import Session

__all__ = ["AsyncLeader"]

T = TypeVar("T")

_SEEK_S: Final = 1.0
"""How long one search for the leader lasts before calls look at their deadlines."""


@final
class AsyncLeader:
    """Of one event loop."""

    def __init__(self, session: Session, master: LaneMaster) -> None:
        self._session = session
        self._master = master
        self._lane: AsyncLaneClient | None = None
        self._lane_target = ("", b"")
        self._seeking: asyncio.Future[None] | None = None

    async def call(self, number: int, body: bytes, deadline_s: float) -> bytes:
        """One request to whoever leads; see `LaneMaster.call`."""
        master = self._master
        until_s = time.monotonic() + deadline_s
        for attempt in count():
            lane = self._lane_now()
            address = self._lane_target[0]
            left_s = until_s - time.monotonic()
            limit_s = master.attempt_s(attempt, left_s)
            try:
                return await lane.call(number, body, limit_s)
            except ClientClosed:
                if self._session.refusal is not None:
                    raise
                if lane is self._lane:
                    raise Unavailable("the lane was closed meanwhile") from None
                continue
            except DeadlineExceeded as error:
                if limit_s >= left_s:
                    raise
                failure: CenoteError = error
            except Unavailable as error:
                failure = error
                if master.is_lone:
                    if error.maybe_executed:
                        raise
                    left_s = max(until_s - time.monotonic(), 0.001)
                    return await self._in_thread(master.call, number, body, left_s)
            await self._find_leader(address, failure, until_s)
        raise AssertionError("count() has no end")

    async def _find_leader(self, address: str, failure: CenoteError, until_s: float) -> None:
        """One thread looks for the leader, however many calls wait for it."""
        task = self._seeking
        if task is None:
            seek_until_s = time.monotonic() + _SEEK_S
            seek = self._in_thread(self._master.find_leader, address, failure, seek_until_s)
            task = self._seeking = asyncio.ensure_future(seek)
            task.add_done_callback(self._sought)
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise failure
        try:
            async with asyncio.timeout(left_s):
                await asyncio.shield(task)
        except TimeoutError:
            raise failure from None
        except ClientClosed:
            raise
        except CenoteError:
            if until_s <= time.monotonic():
                raise failure from None

    def _sought(self, task: asyncio.Future[None]) -> None:
        self._seeking = None
        if not task.cancelled():
            task.exception()  # who waits for it knows; perhaps nobody does any more

    def _lane_now(self) -> AsyncLaneClient:
        """The lane to the master that the blocking stub uses now."""
        master = self._master
        target = (master.addresses[0], master.hello_bytes)
        lane = self._lane
        if lane is None or target != self._lane_target:
            if lane is not None:
                asyncio.get_running_loop().create_task(lane.close())
            lane = self._lane = AsyncLaneClient(
                target[0],
                target[1],
                on_hello=master.greeted,
                connect_timeout_s=master.connect_timeout_s,
                tls=master.tls,
            )
            self._lane_target = target
        return lane

    async def _in_thread(self, do: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(self._session.pool().submit(do, *arguments))

    async def close(self) -> None:
        """Close the lane; its calls end with ClientClosed."""
        lane, self._lane = self._lane, None
        if lane is not None:
            await lane.close()
