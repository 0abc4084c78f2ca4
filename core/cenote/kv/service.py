"""What the shared journal needs of a replicated key-value service: the seam beneath it.

`etcd.py` is the adapter to etcd; tests/kv_model.py is a model of it, and tests/contract/
test_kv_contract.py holds both to this page. Keys are ordered; each change has a revision, one
number for the whole service that only grows. All reads are linearizable: they see every change that
was answered before they were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from cenote.api.errors import ResourceUnavailable

__all__ = [
    "Condition",
    "Created",
    "Delete",
    "Get",
    "Kv",
    "KvCompacted",
    "KvEvent",
    "KvRefused",
    "KvRow",
    "KvUnavailable",
    "Modified",
    "Operation",
    "Put",
    "RangeReply",
    "TxnReply",
    "Watch",
    "after",
    "prefix_end",
]


class KvUnavailable(ResourceUnavailable):
    """No answer in time, or no quorum: what was asked for may have happened or may yet happen."""

    default_remedy = "check that etcd runs and can be reached: `etcdctl endpoint health`"


class KvRefused(ResourceUnavailable):
    """The service understood and won't: wrong password, no permission, no room, a lease that is
    over. Nothing has happened."""

    default_remedy = "see etcd's log; `etcdctl alarm list` shows whether its database is full"


class KvCompacted(ResourceUnavailable):
    """The revision that was asked for is not kept any more."""


class KvRow(NamedTuple):
    """A key with its value, or what is known of it where only keys were asked for."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int


class KvEvent(NamedTuple):
    """A change that a watch saw."""

    key: bytes
    value: bytes | None
    """None: deleted."""
    revision: int


class Created(NamedTuple):
    """Condition: `key` was created by `revision`; 0: it is not there."""

    key: bytes
    revision: int


class Modified(NamedTuple):
    """Condition: `key` was changed last by `revision`; 0: it is not there."""

    key: bytes
    revision: int


class Put(NamedTuple):
    """`lease`: the key goes when it ends; 0: with none."""

    key: bytes
    value: bytes
    lease: int = 0


class Delete(NamedTuple):
    """`key`, or all from `key` up to and without `end`."""

    key: bytes
    end: bytes = b""


class Get(NamedTuple):
    """Read `key`."""

    key: bytes


Condition: TypeAlias = Created | Modified
Operation: TypeAlias = Put | Delete | Get


class RangeReply(NamedTuple):
    """In the order of keys. `more`: the limit cut it short."""

    rows: list[KvRow]
    revision: int
    more: bool


class TxnReply(NamedTuple):
    """`rows`: for each Get of the branch that was taken, its row or None."""

    succeeded: bool
    revision: int
    rows: list[KvRow | None]


class Watch(Protocol):
    """Changes of a range of keys, in order and without a gap until an error ends it."""

    def poll(self, timeout_s: float) -> list[KvEvent]:
        """What came since; waits for something up to `timeout_s`, or until `wake`.

        Raises KvCompacted and KvUnavailable; the watch is over then.
        """
        ...

    def wake(self) -> None:
        """End a `poll` that waits, or the next one. From any thread."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Kv(Protocol):
    """A connection, used by several threads. Calls raise KvUnavailable and KvRefused, and end
    within `timeout_s` and 0.1 s.

    A call may be carried out twice: asked again elsewhere after the first answer was lost. One that
    raised KvUnavailable may even be carried out later. Conditions are there to make that harmless.
    """

    def range(
        self,
        key: bytes,
        end: bytes = b"",
        *,
        limit: int = 0,
        keys_only: bool = False,
        timeout_s: float,
    ) -> RangeReply:
        """`key`, or all from `key` up to and without `end`; 0: no limit."""
        ...

    def txn(
        self,
        conditions: Sequence[Condition],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float,
    ) -> TxnReply:
        """All of `then` if all conditions hold, else all of `otherwise`, as one change.

        At most 128 operations, of 1 MiB together.
        """
        ...

    def grant(self, ttl_s: int, *, timeout_s: float) -> int:
        """A new lease; returns its id."""
        ...

    def keep_alive(self, lease: int, *, timeout_s: float) -> bool:
        """Extend a lease; False where there is none any more."""
        ...

    def revoke(self, lease: int, *, timeout_s: float) -> None:
        """End a lease, and delete its keys. One that is over already is no error."""
        ...

    def watch(self, key: bytes, end: bytes, *, revision: int) -> Watch:
        """Changes from `revision` on. Does not wait: what is wrong shows in `poll`."""
        ...

    def compact(self, revision: int, *, timeout_s: float) -> None:
        """Forget what keys were before `revision`. Done already is no error."""
        ...

    def size_bytes(self, *, timeout_s: float) -> int:
        """Of the service's database."""
        ...

    def distrust(self) -> None:
        """What is answered seems to be less than there is: ask elsewhere, where there is one."""
        ...

    def close(self) -> None:
        """Idempotent; calls under way raise KvUnavailable."""
        ...


def after(key: bytes) -> bytes:
    """The smallest key above `key`."""
    return key + b"\0"


def prefix_end(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin with `prefix`; its last byte must not be 255."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))
