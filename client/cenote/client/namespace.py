"""Keys and bytes: the calls that a user of the pool makes, in one namespace.

Every call takes `deadline_s=` (seconds from now, default the client's) and has returned or raised
by then. Keys are str (UTF-8) or bytes of 1-512 bytes. A miss is None, an error is an exception.
"""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from cenote.api.keys import Key, KeySequence, digest_key, encode_key, encode_keys
from cenote.api.types import AcquiredLease, MatchResult, PutResult

from .buffers import AnyBuffer, Buffers, new_bytes, writable_memory
from .calls import Calls, PutKeywords
from .device_buffers import DeviceMemory
from .driver import blocking_driver
from .locations import LOCATION_STRUCT
from .plan.space import Space
from .results import GetResults, PutResults
from .session import Session
from .views import View

__all__ = ["Namespace", "PutKeywords"]


class Namespace:
    """One key space. Made by `Client.namespace`; safe to use from several threads."""

    def __init__(self, session: Session, space: Space) -> None:
        self._session = session
        self._space = space
        self._driver = blocking_driver(session)
        self._calls = Calls(session, space)

    @property
    def name(self) -> str:
        return self._space.name

    @property
    def calls(self) -> Calls:
        """The plans behind these calls, for another driver."""
        return self._calls

    @property
    def fingerprint(self) -> bytes:
        return self._space.fingerprint

    # ---- puts --------------------------------------------------------------------------------

    def put(self, key: Key, data: AnyBuffer, **options: Unpack[PutKeywords]) -> PutResult:
        """Store `data` (any buffer, or a list of buffers one after the other) under `key`.

        Returns whether it was stored now or existed; the objects of a key never change, so the
        first put wins. Raises the key's error: NoSpace, ReplicasUnavailable, ObjectTooLarge,
        QuotaExceeded, DeadlineExceeded, Unavailable; InvalidKey, InvalidBuffer before it is sent.
        """
        return self._driver.run(*self._calls.put(key, data, options))

    put_from = put
    """The same by another name, beside `get_into`."""

    def put_batch(
        self, keys: KeySequence, values: Buffers, **options: Unpack[PutKeywords]
    ) -> PutResults:
        """Store each value under its key. Results per key: see `PutResults.raise_for_errors`.

        Raises InvalidKey and InvalidBuffer (naming the position) before anything is sent, and what
        ends the whole call before any key was stored.
        """
        return self._driver.run(*self._calls.put_batch(keys, values, options))

    def put_from_batch(
        self,
        keys: KeySequence,
        buffers: Buffers | None = None,
        *,
        addresses: Any = None,
        lengths: Any = None,
        **options: Unpack[PutKeywords],
    ) -> PutResults:
        """`put_batch` from buffers (a list of buffers is one scattered object) or by address.

        `addresses`: uint64[n] or uint64[n, pieces]; `lengths`: bytes, broadcast to that shape.
        """
        return self._driver.run(
            *self._calls.put_from_batch(keys, buffers, addresses, lengths, options)
        )

    # ---- gets --------------------------------------------------------------------------------

    def get(self, key: Key, *, deadline_s: float | None = None) -> bytes | None:
        """The bytes under `key`, None where there are none."""
        one = encode_key(key)
        call = self._calls.begin(deadline_s)
        space, driver = self._space, self._driver
        digest = digest_key(one, space.seed)
        row = space.locations.get(digest)
        if row is not None:
            size = LOCATION_STRUCT.unpack(row)[2]
            value, address = new_bytes(size)
            if driver.read_cached(call, digest, row, address, size):
                return value
        return driver.run(call, self._calls.read_one(call, one, 0, 0, None))[1]

    def get_batch(
        self, keys: KeySequence, *, chain: bool = False, deadline_s: float | None = None
    ) -> list[bytes | None]:
        """The bytes under each key, None for misses. Raises the first error of any key.

        `chain`: the keys are consecutive blocks of one prefix; all from the first miss on are
        misses.
        """
        return self._driver.run(*self._calls.get_batch(keys, chain, deadline_s))

    def get_into(
        self,
        key: Key,
        buffer: AnyBuffer,
        *,
        lease: AcquiredLease | None = None,
        deadline_s: float | None = None,
    ) -> int | None:
        """Read the object into `buffer` (writable, large enough; or a list of buffers).

        Returns its size in bytes, None for a miss (the buffer's contents are undefined then).
        `lease`: see `get_into_batch`. Raises InvalidBuffer where it is too small, and what ended
        the call.
        """
        if lease is not None:
            return self.get_into_batch([key], [buffer], lease=lease, deadline_s=deadline_s)[0]
        if type(buffer) is list or type(buffer) is tuple:
            return self._driver.run(*self._calls.get_scattered(key, buffer, deadline_s))
        one = encode_key(key)
        address, length, keeper = writable_memory(buffer)
        if type(keeper) is DeviceMemory:
            return self._driver.run(*self._calls.get_scattered(key, buffer, deadline_s))
        if self._session.cache is not None:
            self._session.cache.note(buffer)
        call = self._calls.begin(deadline_s)
        space, driver = self._space, self._driver
        digest = digest_key(one, space.seed)
        row = space.locations.get(digest)
        if row is not None:
            size = driver.read_cached(call, digest, row, address, length)
            if size:
                return size
        size, _ = driver.run(call, self._calls.read_one(call, one, address, length, keeper))
        return None if size < 0 else size

    def get_into_batch(
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
        """Read each object into its buffer, or into memory by address.

        `addresses`: uint64[n], or uint64[n, pieces] for objects that are scattered; `lengths`: in
        bytes, one or an array that broadcasts to that shape. The caller answers for such memory.
        `lease`: read under it without asking the master (it must name all the keys). A buffer that
        is too small fails its key only. Contents of buffers of misses are undefined.
        """
        return self._driver.run(
            *self._calls.get_into_batch(keys, buffers, addresses, lengths, lease, chain, deadline_s)
        )

    def view(
        self, keys: KeySequence, *, copy: bool = True, deadline_s: float | None = None
    ) -> View:
        """Read-only memoryviews of the objects, for the time of a `with` block; None for misses.

            with namespace.view(keys) as views: ...

        Over shared memory they are the pool's own memory: nothing is copied, and the pool keeps the
        objects until the block ends, however long that takes. Objects that can't be seen from here
        (another host, several extents) are copied, or with `copy=False` refused with
        InvalidArgument. Raises BufferInUse at the end of the block where something still exports
        the memory (a NumPy array made from a view): the objects are kept until it is gone.
        """
        return View(self._calls, self._driver, encode_keys(keys), copy, deadline_s)

    # ---- looking -----------------------------------------------------------------------------

    def exists(self, key: Key, *, deadline_s: float | None = None) -> bool:
        """Whether the key is present. Takes no lease and does not count as a use."""
        return self._driver.run(*self._calls.exists(key, deadline_s))

    def exists_batch(
        self, keys: KeySequence, *, deadline_s: float | None = None
    ) -> NDArray[np.bool_]:
        """bool[n]: which keys are present."""
        return self._driver.run(*self._calls.exists_batch(keys, deadline_s))

    def match(
        self, keys: KeySequence, *, will_read: bool = False, deadline_s: float | None = None
    ) -> MatchResult:
        """How much of the prefix chain `keys` is present. `will_read`: it will be read soon."""
        return self._driver.run(*self._calls.match(keys, will_read, deadline_s))

    def prefetch(self, keys: KeySequence, *, deadline_s: float | None = None) -> MatchResult:
        """A hint that these keys (one chain) will be read soon; what is there already."""
        return self.match(keys, will_read=True, deadline_s=deadline_s)

    # ---- leases and pins ---------------------------------------------------------------------

    def acquire(
        self,
        keys: KeySequence,
        ttl_s: float,
        *,
        chain: bool = False,
        deadline_s: float | None = None,
    ) -> AcquiredLease:
        """Look the keys up and keep the hits from eviction for `ttl_s` seconds.

        The lease is a value: `get_into_batch(keys, ..., lease=lease)` reads under it, also in
        another process (it pickles) that has opened the same namespace. `chain`: stop at the first
        miss. The master may give less time than asked for; `lease.ttl_s` says how much.
        """
        return self._driver.run(*self._calls.acquire(keys, ttl_s, chain, deadline_s))

    def forget_locations(self) -> None:
        """Drop what is remembered of where objects are: the next reads ask the master."""
        self._space.locations.clear()

    def release(self, lease: AcquiredLease) -> None:
        """The lease isn't needed any more; the master learns of it within 0.1 s."""
        self._calls.release(lease)

    def pin(
        self, keys: KeySequence, *, ttl_s: float | None = None, deadline_s: float | None = None
    ) -> NDArray[np.bool_]:
        """Keep the keys from eviction until `unpin` (or for `ttl_s`). bool[n]: which are there."""
        return self._driver.run(*self._calls.pin(keys, ttl_s, deadline_s))

    def unpin(self, keys: KeySequence, *, deadline_s: float | None = None) -> NDArray[np.bool_]:
        """End pins. bool[n]: which keys were pinned."""
        return self._driver.run(*self._calls.unpin(keys, deadline_s))

    # ---- removal -----------------------------------------------------------------------------

    def remove(self, key: Key, *, deadline_s: float | None = None) -> bool:
        """Remove the key for good; whether it was there. Other clients that cached its location may
        read the old bytes for `location_ttl_s` more."""
        return bool(self._driver.run(*self._calls.remove([encode_key(key)], deadline_s))[0])

    def remove_batch(
        self, keys: KeySequence, *, deadline_s: float | None = None
    ) -> NDArray[np.bool_]:
        """Remove the keys for good. bool[n]: which keys were there."""
        return self._driver.run(*self._calls.remove(encode_keys(keys), deadline_s))

    def __repr__(self) -> str:
        return f"<cenote {type(self).__name__} {self._space.name!r}>"
