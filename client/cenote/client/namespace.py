"""Keys and bytes: the calls that a user of the pool makes, in one namespace.

Every call takes `deadline_s=` (seconds from now, default the client's) and has returned or raised
by then. Keys are str (UTF-8) or bytes of 1-512 bytes. A miss is None, an error is an exception.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import DeadlineExceeded, InvalidArgument, InvalidBuffer
from cenote.api.keys import Key, KeySequence, digest_key, digest_keys, encode_key, encode_keys
from cenote.api.types import AcquiredLease, MatchResult, PutResult, PutStatus, Sameness
from cenote.v1 import common_pb2

from .buffers import (
    AnyBuffer,
    Buffers,
    bytes_pieces,
    column_pieces,
    new_bytes,
    pieces_of,
    readable_memory,
    writable_memory,
)
from .config import ClientConfig
from .driver import BlockingDriver
from .locations import LOCATION_STRUCT
from .plan import lookups
from .plan.asking import reopening
from .plan.pieces import Pieces
from .plan.reads import ReadOptions, ReadOutcome, acquire, read_objects
from .plan.singles import exists_single, put_single, read_single
from .plan.state import Call, PutOptions, Space
from .plan.steps import Plan
from .plan.writes import PutOutcome, put_objects
from .results import GetResults, PutResults
from .session import Session
from .views import View

__all__ = ["Namespace", "PutKeywords"]

T = TypeVar("T")

_DURABILITIES: Final = {
    "default": common_pb2.DURABILITY_UNSPECIFIED,
    "relaxed": common_pb2.DURABILITY_RELAXED,
    "journaled": common_pb2.DURABILITY_JOURNALED,
}
_SAME_BYTES: Final = {Sameness.UNKNOWN: None, Sameness.SAME: True, Sameness.DIFFERENT: False}
_PUT_RESULTS: Final[dict[tuple[int, int], PutResult]] = {
    (status, sameness): PutResult(status, same)
    for status in (PutStatus.STORED, PutStatus.EXISTED)
    for sameness, same in _SAME_BYTES.items()
}
_LEASE_TTL_MAX_S: Final = 86_400.0


class PutKeywords(TypedDict, total=False):
    """Options of every put; what isn't given is the client's."""

    replicas: int
    """Copies to place, in distinct failure domains."""
    min_replicas: int
    """Fewer than these can't be placed or written: the key fails with ReplicasUnavailable."""
    durability: Literal["default", "relaxed", "journaled"]
    """relaxed: acknowledged when sealed; journaled: when the metadata backend has it, too."""
    chain: bool
    """The keys are consecutive blocks of one prefix: of two, the later is evicted first."""
    prefix: KeySequence
    """The keys before these in their chain: touched, so that they are evicted after these."""
    local_first: bool
    """Prefer this host."""
    ttl_s: float
    """Gone after so long."""
    deadline_s: float | None


class Namespace:
    """One key space. Made by `Client.namespace`; safe to use from several threads."""

    def __init__(self, session: Session, space: Space) -> None:
        self._session = session
        self._space = space
        self._driver = BlockingDriver(session)
        self._config = session.config
        self._put_options = put_options_of(session.config, {})

    @property
    def name(self) -> str:
        return self._space.name

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
        if type(data) is list or type(data) is tuple or "prefix" in options:
            encoded = [encode_key(key)]
            pieces = pieces_of([data], 1, writable=False)
            result = PutResults(encoded, self._put(encoded, pieces, options))[0]
            result.raise_for_error()
            return result
        one = encode_key(key)
        address, size, keeper = readable_memory(data)
        made = put_options_of(self._config, options) if options else self._put_options
        call = self._call(options.get("deadline_s"))
        space, seed = self._space, digest_key

        def start() -> Plan[tuple[int, int]]:
            return put_single(call, one, seed(one, space.seed), address, size, keeper, made)

        status, sameness = self._driver.run(call, reopening(call, start))
        return _PUT_RESULTS[status, sameness]

    put_from = put
    """The same by another name, beside `get_into`."""

    def put_batch(
        self, keys: KeySequence, values: Buffers, **options: Unpack[PutKeywords]
    ) -> PutResults:
        """Store each value under its key. Results per key: see `PutResults.raise_for_errors`.

        Raises InvalidKey and InvalidBuffer (naming the position) before anything is sent, and what
        ends the whole call before any key was stored.
        """
        encoded = encode_keys(keys)
        return self._put_many(encoded, bytes_pieces(values, len(encoded)), options)

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
        encoded = encode_keys(keys)
        pieces = _pieces(buffers, addresses, lengths, len(encoded), writable=False)
        return self._put_many(encoded, pieces, options)

    def _put_many(self, encoded: list[bytes], pieces: Pieces, options: PutKeywords) -> PutResults:
        return PutResults(encoded, self._put(encoded, pieces, options))

    def _put(self, encoded: list[bytes], pieces: Pieces, options: PutKeywords) -> PutOutcome:
        call = self._call(options.get("deadline_s"))
        space = self._space
        put_options = put_options_of(self._config, options)
        before = encode_keys(options.get("prefix", []))

        def start() -> Plan[PutOutcome]:
            digests = digest_keys(encoded, space.seed)
            prefix = digest_keys(before, space.seed)
            return put_objects(call, encoded, digests, pieces, put_options, prefix=prefix)

        if not encoded:
            return PutOutcome.blank(0)
        return self._driver.run(call, reopening(call, start))

    # ---- gets --------------------------------------------------------------------------------

    def get(self, key: Key, *, deadline_s: float | None = None) -> bytes | None:
        """The bytes under `key`, None where there are none."""
        one = encode_key(key)
        call = self._call(deadline_s)
        space, driver = self._space, self._driver
        digest = digest_key(one, space.seed)
        row = space.locations.get(digest)
        if row is not None:
            size = LOCATION_STRUCT.unpack(row)[2]
            value, address = new_bytes(size)
            if driver.read_cached(space, digest, row, address, size, call.deadline_s):
                return value
        return driver.run(call, reopening(call, lambda: self._read_one(call, one, 0, 0, None)))[1]

    def get_batch(
        self, keys: KeySequence, *, chain: bool = False, deadline_s: float | None = None
    ) -> list[bytes | None]:
        """The bytes under each key, None for misses. Raises the first error of any key.

        `chain`: the keys are consecutive blocks of one prefix; all from the first miss on are
        misses.
        """
        encoded = encode_keys(keys)
        outcome = self._read(encoded, None, ReadOptions(chain=chain), deadline_s)
        GetResults(encoded, outcome).raise_for_errors()
        assert outcome.values is not None
        return outcome.values

    def get_into(
        self, key: Key, buffer: AnyBuffer, *, deadline_s: float | None = None
    ) -> int | None:
        """Read the object into `buffer` (writable, large enough; or a list of buffers).

        Returns its size in bytes, None for a miss (the buffer's contents are undefined then).
        Raises InvalidBuffer where it is too small, and what ended the call.
        """
        if type(buffer) is list or type(buffer) is tuple:
            encoded = [encode_key(key)]
            pieces = pieces_of([buffer], 1, writable=True)
            return GetResults(encoded, self._read(encoded, pieces, ReadOptions(), deadline_s))[0]
        one = encode_key(key)
        address, length, keeper = writable_memory(buffer)
        call = self._call(deadline_s)
        space, driver = self._space, self._driver
        digest = digest_key(one, space.seed)
        row = space.locations.get(digest)
        if row is not None:
            size = driver.read_cached(space, digest, row, address, length, call.deadline_s)
            if size:
                return size
        size, _ = driver.run(
            call, reopening(call, lambda: self._read_one(call, one, address, length, keeper))
        )
        return None if size < 0 else size

    def _read_one(
        self, call: Call, key: bytes, address: int, length: int, keeper: object
    ) -> Plan[tuple[int, bytes | None]]:
        digest = digest_key(key, self._space.seed)
        return read_single(call, digest, address, length, keeper, self._config.verify)

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
        encoded = encode_keys(keys)
        pieces = _pieces(buffers, addresses, lengths, len(encoded), writable=True)
        options = ReadOptions(chain=chain)
        if lease is not None:
            options.lease = self._usable(lease)
            options.lease_proves = lease.clock_id == self._session.clock_id
        return GetResults(encoded, self._read(encoded, pieces, options, deadline_s))

    def _read(
        self,
        encoded: list[bytes],
        pieces: Pieces | None,
        options: ReadOptions,
        deadline_s: float | None,
    ) -> ReadOutcome:
        call = self._call(deadline_s)
        options.verify = self._config.verify

        def start() -> Plan[ReadOutcome]:
            return read_objects(call, digest_keys(encoded, self._space.seed), pieces, options)

        if not encoded:
            return ReadOutcome.blank(0, values=pieces is None)
        return self._driver.run(call, reopening(call, start))

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
        return View(self, encode_keys(keys), copy=copy, deadline_s=deadline_s)

    # ---- looking -----------------------------------------------------------------------------

    def exists(self, key: Key, *, deadline_s: float | None = None) -> bool:
        """Whether the key is present. Takes no lease and does not count as a use."""
        one = encode_key(key)
        call = self._call(deadline_s)

        def start() -> Plan[bool]:
            return exists_single(call, digest_key(one, self._space.seed))

        return self._driver.run(call, reopening(call, start))

    def exists_batch(
        self, keys: KeySequence, *, deadline_s: float | None = None
    ) -> NDArray[np.uint8]:
        """uint8[n]: 1 where the key is present."""
        return self._exists(encode_keys(keys), deadline_s)

    def _exists(self, encoded: list[bytes], deadline_s: float | None) -> NDArray[np.uint8]:
        call = self._call(deadline_s)
        return self._driver.run(call, reopening(call, lambda: lookups.exists(call, encoded)))

    def match(
        self, keys: KeySequence, *, will_read: bool = False, deadline_s: float | None = None
    ) -> MatchResult:
        """How much of the prefix chain `keys` is present. `will_read`: it will be read soon."""
        encoded = encode_keys(keys)
        call = self._call(deadline_s)
        return self._driver.run(
            call, reopening(call, lambda: lookups.match(call, encoded, will_read=will_read))
        )

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
        encoded = encode_keys(keys)
        if not 0 < ttl_s <= _LEASE_TTL_MAX_S:
            raise InvalidArgument(f"ttl_s is between 0 and {_LEASE_TTL_MAX_S:g}, not {ttl_s!r}")
        call = self._call(deadline_s)

        def start() -> Plan[AcquiredLease]:
            digests = digest_keys(encoded, self._space.seed)
            reply, hold = yield from acquire(call, digests, int(ttl_s * 1000) or 1, chain=chain)
            return AcquiredLease(
                namespace=self._space.name,
                namespace_id=self._space.namespace_id,
                generation=self._space.generation,
                digest_seed=self._space.seed,
                lease_id=hold.lease_id if hold else 0,
                ttl_s=hold.ttl_ms / 1000 if hold else 0.0,
                end_s=hold.end_s if hold else 0.0,
                clock_id=self._session.clock_id,
                digests=digests,
                objects=reply.objects,
                extents=reply.extents,
            )

        return self._driver.run(call, reopening(call, start))

    def release(self, lease: AcquiredLease) -> None:
        """The lease isn't needed any more; the master learns of it within 0.1 s."""
        self._session.check()
        self._session.state.release(lease.lease_id)

    def _usable(self, lease: AcquiredLease) -> AcquiredLease:
        space = self._space
        if not isinstance(lease, AcquiredLease):
            raise InvalidArgument(f"lease is an AcquiredLease, not {type(lease).__name__}")
        if (lease.namespace_id, lease.generation) != (space.namespace_id, space.generation):
            raise InvalidArgument(
                f"the lease is of namespace {lease.namespace!r}, this is {space.name!r}",
                remedy="read it through the namespace that it was acquired in",
            )
        return lease

    def pin(
        self, keys: KeySequence, *, ttl_s: float | None = None, deadline_s: float | None = None
    ) -> NDArray[np.uint8]:
        """Keep the keys from eviction until `unpin` (or for `ttl_s`). uint8[n]: 1 where present."""
        encoded = encode_keys(keys)
        ttl_ms = 0 if ttl_s is None else max(1, int(_duration(ttl_s, "ttl_s") * 1000))
        call = self._call(deadline_s)
        return self._driver.run(call, reopening(call, lambda: lookups.pin(call, encoded, ttl_ms)))

    def unpin(self, keys: KeySequence, *, deadline_s: float | None = None) -> NDArray[np.uint8]:
        """End pins. uint8[n]: 1 where the key was pinned."""
        encoded = encode_keys(keys)
        call = self._call(deadline_s)
        return self._driver.run(call, reopening(call, lambda: lookups.unpin(call, encoded)))

    # ---- removal -----------------------------------------------------------------------------

    def remove(self, key: Key, *, deadline_s: float | None = None) -> bool:
        """Remove the key for good; whether it was there. Other clients that cached its location may
        read the old bytes for `location_ttl_s` more."""
        return bool(self._remove([encode_key(key)], deadline_s)[0])

    def remove_batch(
        self, keys: KeySequence, *, deadline_s: float | None = None
    ) -> NDArray[np.uint8]:
        """Remove the keys for good. uint8[n]: 1 where the key was there."""
        return self._remove(encode_keys(keys), deadline_s)

    def _remove(self, encoded: list[bytes], deadline_s: float | None) -> NDArray[np.uint8]:
        call = self._call(deadline_s)
        return self._driver.run(call, reopening(call, lambda: lookups.remove(call, encoded)))

    # ---- helpers -----------------------------------------------------------------------------

    def _call(self, deadline_s: float | None) -> Call:
        session = self._session
        session.check()
        if deadline_s is None:
            deadline_s = self._config.deadline_s
        else:
            deadline_s = _duration(deadline_s, "deadline_s")
        return Call(session.state, self._space, deadline_s)

    def __repr__(self) -> str:
        return f"<cenote {type(self).__name__} {self._space.name!r}>"


def _duration(value: float, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidArgument(f"{name} is a number of seconds, not {value!r}")
    if value <= 0:
        raise DeadlineExceeded(f"{name} is {value!r}: there is no time for the call")
    return float(value)


def _pieces(
    buffers: Buffers | None,
    addresses: Any,
    lengths: Any,
    count: int,
    *,
    writable: bool,
) -> Pieces:
    if (buffers is None) == (addresses is None):
        raise InvalidBuffer(
            "give either buffers or addresses", remedy="pass buffers=, or addresses= and lengths="
        )
    if buffers is not None:
        return pieces_of(buffers, count, writable=writable)
    return column_pieces(addresses, lengths, count)


def put_options_of(config: ClientConfig, options: PutKeywords) -> PutOptions:
    """The options of one put. Raises InvalidArgument."""
    replicas = options.get("replicas", config.replicas)
    given_min = options.get("min_replicas")
    # The client's default must not turn an explicit replicas=1 into an error.
    min_replicas = min(config.min_replicas, replicas) if given_min is None else given_min
    for name, value in (("replicas", replicas), ("min_replicas", min_replicas)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 8:
            raise InvalidArgument(f"{name} is an int of 1 to 8, not {value!r}")
    if min_replicas > replicas:
        raise InvalidArgument(f"min_replicas={min_replicas} is more than replicas={replicas}")
    durability = options.get("durability", config.durability)
    if durability not in _DURABILITIES:
        raise InvalidArgument(
            f"{durability!r} is no durability", remedy="one of: " + ", ".join(_DURABILITIES)
        )
    ttl_s = options.get("ttl_s")
    return PutOptions(
        replicas=replicas,
        min_replicas=min_replicas,
        durability=_DURABILITIES[durability],
        local_first=options.get("local_first", config.local_first),
        chain=options.get("chain", "prefix" in options),
        ttl_ms=0 if ttl_s is None else max(1, int(_duration(ttl_s, "ttl_s") * 1000)),
    )
