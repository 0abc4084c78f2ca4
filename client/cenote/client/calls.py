"""The calls of a namespace as plans: what the blocking and the asyncio face have in common.

Each method checks its arguments (nothing was sent if it raises) and returns the call and the plan
whose result is what the user gets.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError, DeadlineExceeded, InvalidArgument, InvalidBuffer
from cenote.api.keys import Key, KeySequence, digest_key, digest_keys, encode_key, encode_keys
from cenote.api.types import AcquiredLease, MatchResult, PutResult, PutStatus, Sameness
from cenote.runtime.gpu_copies import NO_STREAM

from .buffers import (
    AnyBuffer,
    Buffers,
    bytes_pieces,
    column_pieces,
    pieces_of,
    readable_memory,
)
from .config import ClientConfig
from .device_buffers import DeviceMemory
from .plan import lookups
from .plan.asking import reopening
from .plan.counters import CALL_KINDS, PUT, STORE
from .plan.device_rows import ON_HOST, Devices
from .plan.device_turns import get_to_devices, put_from_devices
from .plan.options import PutOptions
from .plan.outcomes import PutOutcome
from .plan.pieces import Pieces
from .plan.reads import ReadOptions, ReadOutcome, acquire, read_objects
from .plan.single_puts import put_single
from .plan.singles import exists_single, read_single
from .plan.space import Space
from .plan.state import Call
from .plan.steps import Plan
from .plan.writes import put_objects
from .results import GetResults, PutResults
from .session import DURABILITIES, Session

__all__ = ["VIEW", "Calls", "Planned", "PutKeywords", "put_options_of"]

T = TypeVar("T")
Planned = tuple[Call, Plan[T]]

_SAME_BYTES: Final = {Sameness.UNKNOWN: None, Sameness.SAME: True, Sameness.DIFFERENT: False}
_PUT_RESULTS: Final[dict[tuple[int, int], PutResult]] = {
    (status, sameness): PutResult(status, same)
    for status in (PutStatus.STORED, PutStatus.EXISTED)
    for sameness, same in _SAME_BYTES.items()
}
(
    _,
    _GET_BATCH,
    _PUT,
    _PUT_BATCH,
    _EXISTS,
    _EXISTS_BATCH,
    _MATCH,
    _ACQUIRE,
    _PIN,
    _UNPIN,
    _REMOVE,
    VIEW,
) = range(len(CALL_KINDS))
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
    dedup: bool
    """Where the namespace holds the same bytes already, refer to them: nothing is moved, and they
    take no space again. Costs each put a digest of its bytes."""
    local_first: bool
    """Prefer this host."""
    ttl_s: float
    """Gone after so long; who read it before may still read it for the masters' `location_ttl_s`
    (10 s) more."""
    deadline_s: float | None


_PUT_KEYWORDS: Final = PutKeywords.__optional_keys__


class Calls:
    """Plans of one namespace."""

    __slots__ = ("_put_options", "config", "session", "space")

    def __init__(self, session: Session, space: Space) -> None:
        self.session = session
        self.space = space
        self.config = session.config
        self._put_options = put_options_of(session.config, {})

    def begin(self, deadline_s: float | None, kind: int = 0) -> Call:
        """A call that ends `deadline_s` from now; `kind`: of `CALL_KINDS`. Raises ClientClosed and
        ForkedClient."""
        session = self.session
        session.check()
        deadline_s = self.config.deadline_s if deadline_s is None else _deadline_s(deadline_s)
        return Call(session.state, self.space, deadline_s, kind)

    # ---- puts --------------------------------------------------------------------------------

    def put(self, key: Key, data: AnyBuffer, options: PutKeywords) -> Planned[PutResult]:
        if self.session.cache is not None:
            self.session.cache.note(data)
        if type(data) is list or type(data) is tuple or "prefix" in options:
            return self._put_first([encode_key(key)], pieces_of([data], 1, writable=False), options)
        made = put_options_of(self.config, options) if options else self._put_options
        if made.dedup:
            return self._put_first([encode_key(key)], pieces_of([data], 1, writable=False), options)
        one = encode_key(key)
        address, size, keeper = readable_memory(data)
        if type(keeper) is DeviceMemory:
            return self._put_first([one], pieces_of([data], 1, writable=False), options)
        call = self.begin(options.get("deadline_s"), _PUT)
        space = self.space

        def start() -> Plan[PutResult]:
            digest = digest_key(one, space.seed)
            try:
                result = yield from put_single(call, one, digest, address, size, keeper, made)
            except CenoteError as error:
                space.counters.fail(PUT, STORE, error)
                raise
            return _PUT_RESULTS[result]

        return call, reopening(call, start)

    def _put_first(
        self, encoded: list[bytes], pieces: Pieces, options: PutKeywords
    ) -> Planned[PutResult]:
        call, many = self._put(encoded, pieces, options)
        return call, _only(many)

    def put_batch(
        self, keys: KeySequence, values: Buffers, options: PutKeywords
    ) -> Planned[PutResults]:
        encoded = encode_keys(keys)
        return self._put(encoded, bytes_pieces(values, len(encoded)), options)

    def put_from_batch(
        self,
        keys: KeySequence,
        buffers: Buffers | None,
        addresses: Any,
        lengths: Any,
        options: PutKeywords,
    ) -> Planned[PutResults]:
        encoded = encode_keys(keys)
        if self.session.cache is not None and buffers is not None:
            self.session.cache.note(buffers)
        pieces = self._pieces(buffers, addresses, lengths, len(encoded), writable=False)
        return self._put(encoded, pieces, options)

    def _put(
        self, encoded: list[bytes], pieces: Pieces, options: PutKeywords
    ) -> Planned[PutResults]:
        made = put_options_of(self.config, options) if options else self._put_options
        before = encode_keys(options.get("prefix", []))
        call = self.begin(options.get("deadline_s"), _PUT_BATCH)
        space = self.space

        def start() -> Plan[PutResults]:
            if not encoded:
                return PutResults(encoded, PutOutcome.blank(0))
            digests = digest_keys(encoded, space.seed)
            prefix = digest_keys(before, space.seed)
            counters = space.counters
            try:
                if pieces.devices is None:
                    outcome = yield from put_objects(
                        call, encoded, digests, pieces, made, prefix=prefix
                    )
                else:
                    area_bytes = self.session.staging.area_bytes
                    outcome = yield from put_from_devices(
                        call, encoded, digests, pieces, made, area_bytes, prefix=prefix
                    )
            except CenoteError as error:
                counters.fail(PUT, STORE, error, len(encoded))
                raise
            for code, failure in outcome.errors.items():
                counters.fail(PUT, STORE, failure, int(np.count_nonzero(outcome.codes == code)))
            return PutResults(encoded, outcome)

        return call, reopening(call, start)

    # ---- gets --------------------------------------------------------------------------------

    def read_one(
        self, call: Call, key: bytes, address: int, length: int, keeper: object
    ) -> Plan[tuple[int, bytes | None]]:
        """(size or -1, value): one object to `address`, or to new `bytes` where that is 0."""

        def start() -> Plan[tuple[int, bytes | None]]:
            digest = digest_key(key, self.space.seed)
            return read_single(call, digest, address, length, keeper, self.config.verify)

        return reopening(call, start)

    def get_scattered(
        self, key: Key, buffers: AnyBuffer, deadline_s: float | None
    ) -> Planned[int | None]:
        encoded = [encode_key(key)]
        pieces = self._pieces([buffers], None, None, 1, writable=True)
        call, plan = self._read(encoded, pieces, ReadOptions(), deadline_s)

        def sizes() -> Plan[int | None]:
            outcome = yield from plan
            return GetResults(encoded, outcome)[0]

        return call, sizes()

    def get_batch(
        self, keys: KeySequence, chain: bool, deadline_s: float | None
    ) -> Planned[list[bytes | None]]:
        encoded = encode_keys(keys)
        call, plan = self._read(encoded, None, ReadOptions(chain=chain), deadline_s)

        def values() -> Plan[list[bytes | None]]:
            outcome = yield from plan
            GetResults(encoded, outcome).raise_for_errors()
            assert outcome.values is not None
            return outcome.values

        return call, values()

    def get_into_batch(
        self,
        keys: KeySequence,
        buffers: Buffers | None,
        addresses: Any,
        lengths: Any,
        lease: AcquiredLease | None,
        chain: bool,
        deadline_s: float | None,
    ) -> Planned[GetResults]:
        encoded = encode_keys(keys)
        if self.session.cache is not None and buffers is not None:
            self.session.cache.note(buffers)
        pieces = self._pieces(buffers, addresses, lengths, len(encoded), writable=True)
        options = ReadOptions(chain=chain)
        if lease is not None:
            options.lease = self._usable(lease)
            options.lease_proves = lease.clock_id == self.session.clock_id
        call, plan = self._read(encoded, pieces, options, deadline_s)

        def results() -> Plan[GetResults]:
            outcome = yield from plan
            return GetResults(encoded, outcome)

        return call, results()

    def _read(
        self,
        encoded: list[bytes],
        pieces: Pieces | None,
        options: ReadOptions,
        deadline_s: float | None,
    ) -> Planned[ReadOutcome]:
        call = self.begin(deadline_s, _GET_BATCH)
        options.verify = self.config.verify

        def start() -> Plan[ReadOutcome]:
            if not encoded:
                return ReadOutcome.blank(0, values=pieces is None)
            digests = digest_keys(encoded, self.space.seed)
            if pieces is None or pieces.devices is None:
                return (yield from read_objects(call, digests, pieces, options))
            area_bytes = self.session.staging.area_bytes
            return (yield from get_to_devices(call, digests, pieces, options, area_bytes))

        return call, reopening(call, start)

    def _pieces(
        self, buffers: Buffers | None, addresses: Any, lengths: Any, count: int, *, writable: bool
    ) -> Pieces:
        """The memory of a batch, and what of it is on GPUs. Raises InvalidBuffer."""
        if (buffers is None) == (addresses is None):
            raise InvalidBuffer(
                "give either buffers or addresses",
                remedy="pass buffers=, or addresses= and lengths=",
            )
        staging = self.session.staging
        if buffers is not None:
            pieces = pieces_of(buffers, count, writable=writable)
            if pieces.devices is not None and staging.knows_memory:
                _, pieces.devices.direct = staging.find(pieces.addresses, pieces.lengths)
            return pieces
        pieces = column_pieces(addresses, lengths, count)
        if staging.knows_memory:
            numbers, direct = staging.find(pieces.addresses, pieces.lengths)
            if (numbers != ON_HOST).any():
                pieces.devices = Devices(numbers, np.full(len(numbers), NO_STREAM), direct)
        return pieces

    # ---- looking -----------------------------------------------------------------------------

    def exists(self, key: Key, deadline_s: float | None) -> Planned[bool]:
        one = encode_key(key)
        call = self.begin(deadline_s, _EXISTS)

        def start() -> Plan[bool]:
            return exists_single(call, digest_key(one, self.space.seed))

        return call, reopening(call, start)

    def exists_batch(
        self, keys: KeySequence, deadline_s: float | None
    ) -> Planned[NDArray[np.bool_]]:
        encoded = encode_keys(keys)
        call = self.begin(deadline_s, _EXISTS_BATCH)
        return call, reopening(call, lambda: lookups.exists(call, encoded))

    def match(
        self, keys: KeySequence, will_read: bool, deadline_s: float | None
    ) -> Planned[MatchResult]:
        encoded = encode_keys(keys)
        call = self.begin(deadline_s, _MATCH)
        return call, reopening(call, lambda: lookups.match(call, encoded, will_read=will_read))

    # ---- leases, pins, removal ---------------------------------------------------------------

    def acquire(
        self, keys: KeySequence, ttl_s: float, chain: bool, deadline_s: float | None
    ) -> Planned[AcquiredLease]:
        encoded = encode_keys(keys)
        if not 0 < duration_s(ttl_s, "ttl_s") <= _LEASE_TTL_MAX_S:
            raise InvalidArgument(f"ttl_s is between 0 and {_LEASE_TTL_MAX_S:g}, not {ttl_s!r}")
        call = self.begin(deadline_s, _ACQUIRE)

        def start() -> Plan[AcquiredLease]:
            digests = digest_keys(encoded, self.space.seed)
            reply, hold = yield from acquire(call, digests, int(ttl_s * 1000) or 1, chain=chain)
            return AcquiredLease(
                namespace=self.space.name,
                namespace_id=self.space.namespace_id,
                generation=self.space.generation,
                digest_seed=self.space.seed,
                lease_id=hold.lease_id if hold else 0,
                ttl_s=hold.ttl_ms / 1000 if hold else 0.0,
                end_s=hold.end_s if hold else 0.0,
                clock_id=self.session.clock_id,
                digests=digests,
                objects=reply.objects,
                extents=reply.extents,
            )

        return call, reopening(call, start)

    def release(self, lease: AcquiredLease) -> None:
        self.session.check()
        if not isinstance(lease, AcquiredLease):
            raise InvalidArgument(f"lease is an AcquiredLease, not {type(lease).__name__}")
        self.session.state.release(lease.lease_id)

    def _usable(self, lease: AcquiredLease) -> AcquiredLease:
        space = self.space
        if not isinstance(lease, AcquiredLease):
            raise InvalidArgument(f"lease is an AcquiredLease, not {type(lease).__name__}")
        if (lease.namespace_id, lease.generation) != (space.namespace_id, space.generation):
            raise InvalidArgument(
                f"the lease is of namespace {lease.namespace!r}, this is {space.name!r}",
                remedy="read it through the namespace that it was acquired in",
            )
        return lease

    def pin(
        self, keys: KeySequence, ttl_s: float | None, deadline_s: float | None
    ) -> Planned[NDArray[np.bool_]]:
        encoded = encode_keys(keys)
        ttl_ms = 0 if ttl_s is None else max(1, int(duration_s(ttl_s, "ttl_s") * 1000))
        call = self.begin(deadline_s, _PIN)
        return call, reopening(call, lambda: lookups.pin(call, encoded, ttl_ms))

    def unpin(self, keys: KeySequence, deadline_s: float | None) -> Planned[NDArray[np.bool_]]:
        encoded = encode_keys(keys)
        call = self.begin(deadline_s, _UNPIN)
        return call, reopening(call, lambda: lookups.unpin(call, encoded))

    def remove(self, encoded: list[bytes], deadline_s: float | None) -> Planned[NDArray[np.bool_]]:
        call = self.begin(deadline_s, _REMOVE)
        return call, reopening(call, lambda: lookups.remove(call, encoded))


def _only(plan: Plan[PutResults]) -> Plan[PutResult]:
    """The result of a batch of one. Raises its error."""
    results = yield from plan
    result = results[0]
    result.raise_for_error()
    return result


def duration_s(value: float, name: str) -> float:
    """`value` as seconds, more than 0. Raises InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidArgument(f"{name} is a number of seconds, not {value!r}")
    if value <= 0:
        raise InvalidArgument(f"{name} is more than 0 seconds, not {value!r}")
    return float(value)


def _deadline_s(value: float) -> float:
    """A call's time. Raises InvalidArgument, and DeadlineExceeded where none is left of it: callers
    hand on what remains of a deadline of their own."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
        raise DeadlineExceeded(f"deadline_s is {value!r}: there is no time for the call")
    return duration_s(value, "deadline_s")


def _check_copies(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 8:
        raise InvalidArgument(f"{name} is an int of 1 to 8, not {value!r}")


def put_options_of(config: ClientConfig, options: PutKeywords) -> PutOptions:
    """The options of one put. Raises InvalidArgument."""
    if not options.keys() <= _PUT_KEYWORDS:
        unknown = min(options.keys() - _PUT_KEYWORDS)
        raise InvalidArgument(
            f"a put has no option {unknown!r}", remedy="one of: " + ", ".join(sorted(_PUT_KEYWORDS))
        )
    replicas = options.get("replicas", config.replicas)
    _check_copies("replicas", replicas)
    # The client's default must not turn an explicit replicas=1 into an error.
    min_replicas = options.get("min_replicas", min(config.min_replicas, replicas))
    _check_copies("min_replicas", min_replicas)
    if min_replicas > replicas:
        raise InvalidArgument(f"min_replicas={min_replicas} is more than replicas={replicas}")
    durability = options.get("durability", config.durability)
    if durability not in DURABILITIES:
        raise InvalidArgument(
            f"{durability!r} is no durability", remedy="one of: " + ", ".join(DURABILITIES)
        )
    ttl_s = options.get("ttl_s")
    return PutOptions(
        replicas=replicas,
        min_replicas=min_replicas,
        durability=DURABILITIES[durability],
        dedup=options.get("dedup", config.dedup),
        local_first=options.get("local_first", config.local_first),
        chain=options.get("chain", "prefix" in options),
        ttl_ms=0 if ttl_s is None else max(1, int(duration_s(ttl_s, "ttl_s") * 1000)),
    )
