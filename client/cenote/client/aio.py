"""The same calls as coroutines.

Metadata goes over a lane of its own, on the event loop; bytes are moved by a bounded pool of
threads (short copies over shared memory at once: handing them to a thread takes ten times as long).
Plans, rules and results are those of the blocking client.

A cancelled call has ended when it raises: nothing touches its buffers any more, and space that it
was granted is given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from cenote.api.errors import CenoteError
from cenote.api.keys import Key, KeySequence, digest_key, encode_key, encode_keys
from cenote.api.master import MasterApi
from cenote.api.types import AcquiredLease, ClientStats, MatchResult, PutResult
from cenote.transport.base import Transport

from .aio_leader import AsyncLeader
from .buffers import AnyBuffer, Buffer, Buffers, new_bytes, writable_memory
from .calls import Calls, PutKeywords
from .client import Client, ClientKeywords, Registration
from .config import ClientConfig
from .device_buffers import DeviceMemory
from .driver import BlockingDriver
from .locations import LOCATION_STRUCT
from .master_stub import METHODS, LaneMaster, decoded
from .plan.state import Call
from .plan.steps import (
    Ask,
    AskMany,
    AskRaw,
    CopyBegin,
    CopyWait,
    Hash,
    HashWide,
    Move,
    MoveOne,
    Pause,
    Plan,
    Proofs,
    RefreshView,
    Reopen,
    Seals,
    Settle,
    TakeAreas,
)
from .results import GetResults, PutResults
from .session import Session

__all__ = ["AsyncClient", "AsyncNamespace"]

T = TypeVar("T")

_INLINE_BYTES_MAX: Final = 256 << 10
_CANCEL_PATIENCE_S: Final = 0.2
_LONG_STEPS: Final = (
    Seals
    | Proofs
    | Hash
    | HashWide
    | RefreshView
    | Reopen
    | TakeAreas
    | CopyBegin
    | CopyWait
    | Settle
)


class AsyncDriver:
    """Does what plans ask for without blocking the event loop."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._blocking = BlockingDriver(session)
        self._leader: AsyncLeader | None = None

    async def run(self, call: Call, plan: Plan[T]) -> T:
        """Drive the plan to its end; grants that it leaves open are given back in any case."""
        running = self._session.running
        running.add(call)
        try:
            step = next(plan)
            while True:
                try:
                    result = await self._do(call, step)
                except CenoteError as error:
                    step = plan.throw(error)
                else:
                    step = plan.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            plan.close()
            for grant in call.grants.values():
                self._session.abort_later(grant)
            if call.unanswered:
                self._session.state.cancel(call.unanswered)
            if call.committing:
                call.lose_commit()
            running.discard(call)
            self._session.state.note_call(call)

    async def _do(self, call: Call, step: Any) -> Any:
        kind = type(step)
        if kind is Ask:
            return await self._ask(step.method, step.request.SerializeToString(), step.deadline_s)
        if kind is AskRaw:
            return await self._ask(step.method, step.body, step.deadline_s)
        if kind is AskMany:
            return await self._ask_many(step)
        if kind is Pause:
            return await asyncio.sleep(step.duration_s)
        do = self._blocking.do[kind]
        if self._is_short(step):
            return do(call, step)
        return await self._in_pool(_nodes_of(step), do, call, step)

    def _is_short(self, step: Any) -> bool:
        """Whether it takes no longer than handing it to a thread would."""
        session = self._session
        if type(step) is MoveOne:
            size_bytes, nodes = step.length, [step.node_id]
        elif type(step) is Move:
            size_bytes = sum(part.size_bytes for part in step.parts)
            nodes = [part.node_id for part in step.parts]
        else:
            return not isinstance(step, _LONG_STEPS)
        return size_bytes <= _INLINE_BYTES_MAX and all(
            node in session.channels and node in session.state.lease_proven for node in nodes
        )

    # ---- the master --------------------------------------------------------------------------

    async def _ask(self, method: str, body: bytes, deadline_s: float) -> Message:
        number, request_type, reply_type = METHODS[method]
        master = self._session.master
        if not isinstance(master, LaneMaster):  # one in this process: nothing to wait for
            request = request_type.FromString(body)
            reply: Message = getattr(master, method)(request, deadline_s)
            return reply
        leader = self._leader
        if leader is None:
            leader = self._leader = AsyncLeader(self._session, master)
        return decoded(reply_type, await leader.call(number, body, deadline_s))

    async def _ask_many(self, step: AskMany) -> list[Message | CenoteError]:
        async def one(make: Callable[[], Message]) -> Message | CenoteError:
            try:
                return await self._ask(step.method, make().SerializeToString(), step.deadline_s)
            except CenoteError as error:
                return error

        return list(await asyncio.gather(*[one(make) for make in step.make]))

    async def close(self) -> None:
        """Close the lane; its calls end with ClientClosed."""
        if self._leader is not None:
            await self._leader.close()

    async def read_cached(
        self, call: Call, digest: bytes, row: bytes, address: int, length: int
    ) -> int:
        """See `BlockingDriver.read_cached`."""
        _, _, size, _, _, node = LOCATION_STRUCT.unpack(row)
        arguments = (call, digest, row, address, length)
        if size <= _INLINE_BYTES_MAX and node in self._session.state.lease_proven:
            return self._blocking.read_cached(*arguments)
        return await self._in_pool([node], self._blocking.read_cached, *arguments)

    # ---- threads -----------------------------------------------------------------------------

    async def _in_pool(self, nodes: Sequence[int], do: Callable[..., T], *arguments: Any) -> T:
        """`do` in a thread. When cancelled, raises only after it ended: until then it may touch
        the caller's buffers."""
        future: Future[T] = self._session.pool().submit(do, *arguments)
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not future.cancel():
                await self._see_it_end(future, nodes)
            raise

    async def _see_it_end(self, future: Future[Any], nodes: Sequence[int]) -> None:
        """Wait for a thread whose caller gave up; what takes long is cut off."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
        patience_s: float | None = _CANCEL_PATIENCE_S
        while not future.done():
            try:
                async with asyncio.timeout(patience_s):
                    await ended.wait()
            except TimeoutError:
                for node in nodes:
                    channel = self._session.channels.get(node)
                    if channel is not None:
                        self._session.drop_channel(node, channel)
                patience_s = None
            except asyncio.CancelledError:
                continue  # once more: it still may not return


def _nodes_of(step: Any) -> list[int]:
    if type(step) is MoveOne:
        return [step.node_id]
    if type(step) is Move or type(step) is Seals or type(step) is Proofs:
        return [part.node_id for part in step.parts]
    return []


class AsyncNamespace:
    """One key space; see `cenote.client.Namespace`, whose calls these are."""

    def __init__(self, calls: Calls, driver: AsyncDriver) -> None:
        self._calls = calls
        self._driver = driver

    @property
    def name(self) -> str:
        return self._calls.space.name

    @property
    def fingerprint(self) -> bytes:
        return self._calls.space.fingerprint

    def _run(self, planned: tuple[Call, Plan[T]]) -> Coroutine[Any, Any, T]:
        return self._driver.run(*planned)

    async def put(self, key: Key, data: AnyBuffer, **options: Unpack[PutKeywords]) -> PutResult:
        return await self._run(self._calls.put(key, data, options))

    put_from = put

    async def put_batch(
        self, keys: KeySequence, values: Buffers, **options: Unpack[PutKeywords]
    ) -> PutResults:
        return await self._run(self._calls.put_batch(keys, values, options))

    async def put_from_batch(
        self,
        keys: KeySequence,
        buffers: Buffers | None = None,
        *,
        addresses: Any = None,
        lengths: Any = None,
        **options: Unpack[PutKeywords],
    ) -> PutResults:
        return await self._run(
            self._calls.put_from_batch(keys, buffers, addresses, lengths, options)
        )

    async def get(self, key: Key, *, deadline_s: float | None = None) -> bytes | None:
        one = encode_key(key)
        call = self._calls.begin(deadline_s)
        digest = digest_key(one, self._calls.space.seed)
        row = self._calls.space.locations.get(digest)
        if row is not None:
            size = LOCATION_STRUCT.unpack(row)[2]
            value, address = new_bytes(size)
            if await self._driver.read_cached(call, digest, row, address, size):
                return value
        return (await self._run((call, self._calls.read_one(call, one, 0, 0, None))))[1]

    async def get_batch(
        self, keys: KeySequence, *, chain: bool = False, deadline_s: float | None = None
    ) -> list[bytes | None]:
        return await self._run(self._calls.get_batch(keys, chain, deadline_s))

    async def get_into(
        self,
        key: Key,
        buffer: AnyBuffer,
        *,
        lease: AcquiredLease | None = None,
        deadline_s: float | None = None,
    ) -> int | None:
        if lease is not None:
            return (await self.get_into_batch([key], [buffer], lease=lease, deadline_s=deadline_s))[
                0
            ]
        if type(buffer) is list or type(buffer) is tuple:
            return await self._run(self._calls.get_scattered(key, buffer, deadline_s))
        one = encode_key(key)
        address, length, keeper = writable_memory(buffer)
        if type(keeper) is DeviceMemory:
            return await self._run(self._calls.get_scattered(key, buffer, deadline_s))
        if self._calls.session.cache is not None:
            self._calls.session.cache.note(buffer)
        call = self._calls.begin(deadline_s)
        digest = digest_key(one, self._calls.space.seed)
        row = self._calls.space.locations.get(digest)
        if row is not None:
            size = await self._driver.read_cached(call, digest, row, address, length)
            if size:
                return size
        size, _ = await self._run((call, self._calls.read_one(call, one, address, length, keeper)))
        return None if size < 0 else size

    async def get_into_batch(
        self,
        keys: KeySequence,
        buffers: Buffers | None = None,
        *,
        addresses: Any = None,
        lengths: Any = None,
        lease: AcquiredLease | None = None,
        chain: bool = False,
        deadline_s: float | None = None,
    ) -> GetResults:
        return await self._run(
            self._calls.get_into_batch(keys, buffers, addresses, lengths, lease, chain, deadline_s)
        )

    async def exists(self, key: Key, *, deadline_s: float | None = None) -> bool:
        return await self._run(self._calls.exists(key, deadline_s))

    async def exists_batch(
        self, keys: KeySequence, *, deadline_s: float | None = None
    ) -> NDArray[np.bool_]:
        return await self._run(self._calls.exists_batch(keys, deadline_s))

    async def match(
        self, keys: KeySequence, *, will_read: bool = False, deadline_s: float | None = None
    ) -> MatchResult:
        return await self._run(self._calls.match(keys, will_read, deadline_s))

    async def prefetch(self, keys: KeySequence, *, deadline_s: float | None = None) -> MatchResult:
        return await self.match(keys, will_read=True, deadline_s=deadline_s)

    async def acquire(
        self,
        keys: KeySequence,
        ttl_s: float,
        *,
        chain: bool = False,
        deadline_s: float | None = None,
    ) -> AcquiredLease:
        return await self._run(self._calls.acquire(keys, ttl_s, chain, deadline_s))

    def forget_locations(self) -> None:
        """Drop what is remembered of where objects are: the next reads ask the master."""
        self._calls.space.locations.clear()

    def release(self, lease: AcquiredLease) -> None:
        """Not a coroutine: it only notes that the master is to be told."""
        self._calls.release(lease)

    async def pin(
        self, keys: KeySequence, *, ttl_s: float | None = None, deadline_s: float | None = None
    ) -> NDArray[np.bool_]:
        return await self._run(self._calls.pin(keys, ttl_s, deadline_s))

    async def unpin(
        self, keys: KeySequence, *, deadline_s: float | None = None
    ) -> NDArray[np.bool_]:
        return await self._run(self._calls.unpin(keys, deadline_s))

    async def remove(self, key: Key, *, deadline_s: float | None = None) -> bool:
        return bool((await self._run(self._calls.remove([encode_key(key)], deadline_s)))[0])

    async def remove_batch(
        self, keys: KeySequence, *, deadline_s: float | None = None
    ) -> NDArray[np.bool_]:
        return await self._run(self._calls.remove(encode_keys(keys), deadline_s))

    def __repr__(self) -> str:
        return f"<cenote {type(self).__name__} {self.name!r}>"


class AsyncClient(AsyncNamespace):
    """`cenote.client.Client` for coroutines of one event loop.

        async with await AsyncClient.connect("127.0.0.1:5110") as client:
            await client.put("key", b"bytes")

    Views are blocking only: use `client.blocking.view(...)`.
    """

    def __init__(self, blocking: Client) -> None:
        """Takes `blocking` over: it is closed with this client."""
        driver = _driver_of(blocking.session)
        super().__init__(blocking.calls, driver)
        self.blocking = blocking
        """The blocking face of the same client, for threads."""

    @classmethod
    async def connect(
        cls, addresses: str | Sequence[str] | None = None, **options: Unpack[ClientKeywords]
    ) -> Self:
        """Connect; arguments and errors are those of `Client`."""
        return await cls._made(lambda: Client(addresses, **options))

    @classmethod
    async def embedded(
        cls, master: MasterApi, over: Sequence[Transport], **options: Unpack[ClientKeywords]
    ) -> Self:
        """See `Client.embedded`."""
        return cls(Client.embedded(master, over, **options))

    @classmethod
    async def _made(cls, make: Callable[[], Client]) -> Self:
        task = asyncio.ensure_future(asyncio.to_thread(make))
        try:
            return cls(await asyncio.shield(task))
        except asyncio.CancelledError:
            task.add_done_callback(_close_unwanted)
            raise

    async def namespace(
        self, name: str, *, fingerprint: bytes | str = b"", deadline_s: float | None = None
    ) -> AsyncNamespace:
        """Another namespace; see `Client.namespace`."""
        opened = await asyncio.to_thread(
            self.blocking.namespace, name, fingerprint=fingerprint, deadline_s=deadline_s
        )
        return AsyncNamespace(opened.calls, self._driver)

    def alloc(self, size_bytes: int) -> Buffer:
        """See `Client.alloc`."""
        return self.blocking.alloc(size_bytes)

    def register(self, buffer: AnyBuffer) -> Registration:
        """See `Client.register`."""
        return self.blocking.register(buffer)

    def stats(self) -> ClientStats:
        """See `Client.stats`."""
        return self.blocking.stats()

    @property
    def config(self) -> ClientConfig:
        return self.blocking.config

    @property
    def closed(self) -> bool:
        return self.blocking.closed

    async def close(self) -> None:
        """See `Client.close`."""
        try:
            await self._driver.close()
        finally:
            await asyncio.shield(asyncio.to_thread(self.blocking.close))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _close_unwanted(task: asyncio.Future[Client]) -> None:
    """A client whose `connect` was cancelled meanwhile."""
    if not task.cancelled() and task.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, task.result().close)


def _driver_of(session: Session) -> AsyncDriver:
    if not session.config.tracing:
        return AsyncDriver(session)
    from .tracing import CallTracer, TracedAsyncDriver  # what only those load who want it

    return TracedAsyncDriver(session, CallTracer(session))
