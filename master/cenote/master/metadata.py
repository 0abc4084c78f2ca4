"""What keeps the journal: the border between the master and its metadata backends.

A backend knows records (`journal.py`), not what they say. Its life, and that of a master:

    join        known to the other masters, as a standby
    follow ...  the newest snapshot, then the journal as it grows, while another master leads
    campaign    to be the leader, where there is none; an epoch has begun
    open        what is left of the journal, after which nobody but this master appends to it
    append ...  until `lost` says that another master may lead, or until the end
    close

It is lived once: a master that lost the lead closes its backend, and begins with a new one and an
empty state, since it may have decided what never reached the journal.

Backends: `memory:` (nothing outlives the process) and `file:DIR` (one master, no other service),
whose lead is never lost, and where a master that finds them in use is refused instead of standing
by; `etcd://…` (several masters).
tests/contract/test_metadata_contract.py holds them to this page.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from cenote.api.errors import CenoteError, ConfigError, NotLeader, ResourceUnavailable

from .journal import Record

__all__ = [
    "ALONE",
    "Backlog",
    "Followed",
    "Leader",
    "MasterRow",
    "MetadataBackend",
    "MetadataOptions",
    "Opened",
    "begin",
    "first_epoch",
    "open_backend",
]


_EPOCHS_FROM_S: Final = 1_767_225_600
_EPOCH_S: Final = 60


def first_epoch(now_s: float) -> int:
    """With which epoch a directory, or a prefix in etcd, begins: minutes since 2026.

    Above those of one that was lost before: where a daemon's memory is lost, too, nobody is left
    who could say how far the epochs were, and a grant from then must not be valid now. 24 bits,
    which ids of grants have for their epoch, last until 2057.
    """
    return max(1, int(now_s - _EPOCHS_FROM_S) // _EPOCH_S)


@dataclass(frozen=True, slots=True)
class MasterRow:
    """A master, as the others and `cenote status` know it."""

    name: str
    """Of its own among the masters of a pool, such as `host:5110`."""
    addresses: tuple[str, ...] = ()
    """host:port of its lane, as clients and daemons are told."""
    grpc: str = ""
    """host:port of its gRPC server."""
    details: Mapping[str, str | int] = field(default_factory=dict)
    """Whatever else people should see: version, pid, how far it has followed."""
    seen_s: float = field(default=math.inf, compare=False)
    """When its last sign of life was seen, on the monotonic clock of who has this row; infinite for
    a master that needs none, such as the one that has it."""

    def silent_s(self, now_s: float) -> float:
        """How long it has been silent."""
        return max(0.0, now_s - self.seen_s)


ALONE: Final = MasterRow("alone")
"""A master that nobody needs to know."""


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads, as far as this backend has heard; it may be over by now."""

    epoch: int
    row: MasterRow


@dataclass(frozen=True, slots=True)
class Followed:
    """What `follow` found."""

    records: Sequence[Record] = ()
    """Verified, and next in order; a few MiB at most."""
    anew: bool = False
    """Begin with an empty state before these: they are the first of a snapshot, or of a journal.
    So it is in the first answer, and where the journal was truncated beyond what was given."""
    caught_up: bool = False
    """Whether that is all there was when the call began."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An epoch that has begun."""

    epoch: int
    """Larger than every earlier one, and durable before anybody learns it."""
    records: Iterator[Record]
    """Verified records, next after what `follow` gave, to the end of the journal. To be read to the
    end before the first `append`. Raises JournalCorrupt where promised ones are missing, and
    ResourceUnavailable or NotLeader where they can't be had any more."""
    anew: bool = True
    """As in `Followed`: begin with an empty state before `records`."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Appended and not durable yet."""

    entries: int = 0
    size_bytes: int = 0
    """0 for `file:`, whose page cache does not tell."""
    age_s: float = 0.0
    """Of the oldest of them, at most."""


class MetadataBackend(Protocol):
    """Keeper of the journal.

    Calls come from one thread at a time, but for `install_snapshot`. Properties are cheap, never
    wait, and can be read in any thread. `sync`'s futures end in any.
    """

    @property
    def name(self) -> str:
        """As in the configuration, such as `file:/var/lib/cenote`; without secrets."""
        ...

    # ---- standing by ------------------------------------------------------------------------

    def join(self, row: MasterRow) -> None:
        """Become known as a standby; called again (also by a leader) to change the row.

        First of all calls, but for those who only `follow` and install snapshots. Does not wait: a
        service that can't be reached shows in `refusal`. Raises ConfigError.
        """
        ...

    @property
    def shared(self) -> bool:
        """Whether several masters can stand by. Where not, there is nothing to follow: `follow`
        says caught up and empty, `campaign` raises where another master is at work."""
        ...

    @property
    def leader(self) -> Leader | None:
        """Who leads, this master included; None where nobody does or it is not known yet."""
        ...

    @property
    def masters(self) -> Sequence[MasterRow]:
        """All that are known, the leader included; at most a few seconds old."""
        ...

    def follow(self, timeout_s: float) -> Followed:
        """What comes next of snapshot and journal.

        Waits up to `timeout_s` where there is nothing new, but ends at once where the place of the
        leader is `vacant`. Where the service can't be reached the answer is empty and not caught
        up, `refusal` says why, and it may take 2 s longer. Raises JournalCorrupt.
        """
        ...

    @property
    def vacant(self) -> bool:
        """Whether `campaign` may succeed: nobody leads, as far as this backend has heard."""
        ...

    def campaign(self, timeout_s: float) -> bool:
        """Become the leader if nobody is; whether it has. To be called without `follow` at work,
        and best after it said caught up: from now on the pool waits for this master.

        True: the tenure has begun, is extended by a thread of the backend's, and `open` is next.
        False: another master leads, or the service has not answered within `timeout_s` (then this
        master lets go of what it may have won unknowingly). Raises ResourceUnavailable where the
        backend isn't `shared` and in use, or out of reach of this process; JournalCorrupt.
        """
        ...

    @property
    def tenure_end_s(self) -> float:
        """Until when, on this process's monotonic clock, nobody else can be the leader.

        Counted from before the request was sent that extended it, less a margin for clocks of
        different pace. It grows while the service answers. Past it a master decides nothing, and no
        lease, grant or session of clients may end later, unless it was renewed. `inf` where only
        this process can lead; `-inf` before `campaign` and after `lost`.
        """
        ...

    @property
    def lost(self) -> NotLeader | None:
        """That this master was the leader and isn't any more, for good. It does not follow from
        the end of the tenure: the service may answer again before it elects somebody else."""
        ...

    # ---- leading ----------------------------------------------------------------------------

    def open(self) -> Opened:
        """The epoch that `campaign` began, and what is left to read.

        Raises InternalError without one, NotLeader, ResourceUnavailable and JournalCorrupt.
        """
        ...

    def raise_epoch(self, above: int) -> int:
        """Begin another epoch, larger than `above` and durable when this returns; it is the result.

        Only for one that has decided nothing of weight. Raises ResourceUnavailable.
        """
        ...

    @property
    def last_entry(self) -> int:
        """Number of the newest entry, appended, read or followed; 0 where there is none."""
        ...

    def append(self, records: Sequence[bytes]) -> int:
        """Add records, all or none, numbered from `last_entry` + 1; returns their last entry.

        When it returns, `file:` has handed them to the operating system: they survive the process,
        not yet a power failure. A shared backend has queued them. It does not wait for a disk or a
        network. Raises ResourceUnavailable where they can't be taken; the same records may be
        appended later. Raises NotLeader once `lost`.
        """
        ...

    @property
    def durable_entry(self) -> int:
        """The newest entry that is known to survive a power failure, or this process where the
        backend is shared."""
        ...

    @property
    def is_syncing(self) -> bool:
        """Whether `append` may have to wait for the disk just now; what can wait for some
        milliseconds is better appended then."""
        ...

    @property
    def backlog(self) -> Backlog:
        """What lies between `durable_entry` and `last_entry`."""
        ...

    def sync(self, entry: int) -> Future[None]:
        """Done when everything up to `entry` is durable; several share one wait.

        The future fails with ResourceUnavailable where that can't be had (a shared backend: within
        some seconds; then it may be durable nevertheless), and with NotLeader.
        """
        ...

    @property
    def refusal(self) -> CenoteError | None:
        """Why nothing new should be decided now (full disk, a backlog that is full, a service that
        doesn't answer, `lost`), or None.

        Some room is kept for what must be written nevertheless.
        """
        ...

    def publish(self, rows: Mapping[str, str | None]) -> None:
        """Rows for people, by their path, such as `nodes/3`; None deletes one. Does not wait, and
        nothing depends on them: written in the background where the backend has a place for them,
        the latest of a path at last. Those of an epoch replace all of earlier ones."""
        ...

    def install_snapshot(self, records: Iterable[bytes], covers: int) -> None:
        """Replace the journal up to and including entry `covers` by a snapshot. Blocks: not for
        the master's loop. `covers` is the end of a record. Raises ResourceUnavailable.

        A shared backend takes it from any process, whoever leads.
        """
        ...

    def request_snapshot(self) -> int:
        """Have one made soon, in the background, of all that was appended so far.

        Returns the entry that it will cover; see `snapshot_entry`. Raises InvalidArgument where
        nothing is kept, ResourceUnavailable.
        """
        ...

    @property
    def snapshot_entry(self) -> int:
        """What the newest snapshot covers, as far as is known here; 0 where there is none."""
        ...

    @property
    def bytes_used(self) -> int:
        """Of journal and snapshot together. A shared backend: of the service's whole database, as
        it was some seconds ago."""
        ...

    def close(self) -> None:
        """Sync, resign, then let go. Idempotent. What was appended is then durable, or it raises
        ResourceUnavailable or NotLeader, having let go. Ends within two seconds.
        """
        ...


def begin(backend: MetadataBackend, row: MasterRow = ALONE, *, timeout_s: float = 10.0) -> Opened:
    """Lead without having stood by: for tools and tests, and for backends of one master.

    Raises what `campaign` and `open` do, and ResourceUnavailable where another master leads.
    """
    backend.join(row)
    if not backend.campaign(timeout_s):
        leader = backend.leader
        by = f"in use by the master {leader.row.name}" if leader else "out of reach"
        raise ResourceUnavailable(
            f"the metadata in {backend.name} are {by}",
            remedy="stop that master, or give this one metadata of its own",
        )
    return backend.open()


@dataclass(frozen=True, slots=True)
class MetadataOptions:
    """What a backend may need besides its URL."""

    tenure_s: float = 1.5
    """Of a shared one: how long a leader acts after its last proof, and others wait for it."""
    etcd_ca: str = ""
    etcd_cert: str = ""
    etcd_key: str = ""
    etcd_user: str = ""
    etcd_password: str = field(default="", repr=False)


def open_backend(url: str, options: MetadataOptions = MetadataOptions()) -> MetadataBackend:
    """The backend that `url` names: `memory:`, `file:DIR` or `etcd://host:2379,host:2379/prefix`.

    Raises ConfigError.
    """
    from .file_backend import FileBackend
    from .memory_backend import MemoryBackend

    if url == "memory:":
        return MemoryBackend(epoch_before=int(time.time()))
    scheme, _, rest = url.partition(":")
    if scheme == "etcd":
        return _open_etcd(url, options)
    if scheme == "file" and rest:
        path = rest.removeprefix("//")
        if path and "\0" not in path:
            if Path(path).expanduser().is_file():
                raise ConfigError(f"what {url!r} names is a file", remedy="name a directory")
            return FileBackend(Path(path).expanduser(), first_epoch=first_epoch(time.time()))
    raise ConfigError(
        f"{url!r} names no metadata backend",
        remedy="write memory:, file:DIR or etcd://host:2379,host:2379",
    )


def _open_etcd(url: str, options: MetadataOptions) -> MetadataBackend:
    from cenote.kv.etcd import EtcdKv  # a library that only those load who use it
    from cenote.kv.etcd_options import parse_etcd_url

    from .kv_backend import KvBackend
    from .kv_compaction import CompactorCommand

    etcd = parse_etcd_url(
        url,
        ca=options.etcd_ca,
        cert=options.etcd_cert,
        key=options.etcd_key,
        user=options.etcd_user,
        password=options.etcd_password,
    )
    return KvBackend(
        EtcdKv(etcd),
        name=etcd.url,
        prefix=etcd.prefix,
        tenure_s=options.tenure_s,
        first_epoch=first_epoch(time.time()),
        compactor=CompactorCommand(etcd.url, json.dumps(dataclasses.asdict(options))),
    )
