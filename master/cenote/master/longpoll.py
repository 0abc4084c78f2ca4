"""Heartbeats that are held open until there is something to do: one for each node."""

from __future__ import annotations

import asyncio
from typing import final

__all__ = ["LongPolls"]


@final
class LongPolls:
    """A node has one heartbeat open at most: a later one answers the earlier."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, node_id: int, timeout_s: float) -> bool:
        """Until `wake(node_id)`, a later heartbeat of this node, the end, or `timeout_s`.

        True unless it is the time that ended it.
        """
        self.wake(node_id)
        if self._closed:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[node_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                await future
            return True
        except TimeoutError:
            return False
        finally:
            if self._waiting.get(node_id) is future:
                del self._waiting[node_id]

    def wake(self, node_id: int) -> None:
        """Answer this node's heartbeat now, if it has one open."""
        future = self._waiting.pop(node_id, None)
        if future is not None and not future.done():
            future.set_result(None)

    def close(self) -> None:
        """Answer all, and hold none any more."""
        self._closed = True
        for node_id in list(self._waiting):
            self.wake(node_id)
