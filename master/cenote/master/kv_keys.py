"""Where things lie in the key-value service, and the rows that people may read. No I/O.

    <prefix>/epoch                          the newest epoch, as text; its revision is the fence
    <prefix>/leader                         who leads, as JSON
    <prefix>/tenure                         the leader's heartbeat, as JSON
    <prefix>/masters/<name>                 each master that runs, as JSON, with a lease of etcd's
    <prefix>/journal/<first entry>          records back to back, 64 KiB at most
    <prefix>/snapshot                       which snapshot is the newest, as JSON
    <prefix>/snapshots/<last entry>-<id>/<n>  its records, back to back, 64 KiB at most
    <prefix>/pool/<path>                    rows for people: config, nodes/..., segments/..., ...

Numbers of entries have 20 digits, n has 8.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, final

from cenote.kv.directory import leader_key, masters_key
from cenote.kv.service import prefix_end

from .journal import JournalCorrupt
from .metadata import Leader, MasterRow

__all__ = [
    "Keys",
    "LeaderRow",
    "SnapshotRow",
    "TenureRow",
    "epoch_text",
    "master_bytes",
    "parse_epoch",
    "parse_master",
]

_EPOCH_MAX: Final = 2**32 - 1


@final
class Keys:
    """The keys beneath a prefix."""

    def __init__(self, prefix: str) -> None:
        base = prefix.encode().rstrip(b"/") + b"/"
        self.epoch = base + b"epoch"
        self.leader = leader_key(prefix)
        self.tenure = base + b"tenure"
        self.snapshot = base + b"snapshot"
        self._masters = masters_key(prefix)
        self._journal = base + b"journal/"
        self._snapshots = base + b"snapshots/"
        self._pool = base + b"pool/"

    def master(self, name: str) -> bytes:
        return self._masters + name.encode()

    @property
    def masters(self) -> tuple[bytes, bytes]:
        """As a range, like all pairs here."""
        return self._masters, prefix_end(self._masters)

    def journal(self, first_entry: int) -> bytes:
        return self._journal + b"%020d" % first_entry

    def journal_from(self, entry: int) -> tuple[bytes, bytes]:
        return self.journal(entry), prefix_end(self._journal)

    def journal_before(self, entry: int) -> tuple[bytes, bytes]:
        """Those whose first entry is below `entry`."""
        return self._journal, self.journal(entry)

    @property
    def watched(self) -> tuple[bytes, bytes]:
        """The journal and the leader, which lie side by side."""
        return self._journal, self.leader + b"\0"

    def first_entry(self, key: bytes) -> int | None:
        """Of a key of the journal; None for other keys."""
        if not key.startswith(self._journal):
            return None
        digits = key[len(self._journal) :]
        if len(digits) != 20 or not digits.isdigit():
            raise JournalCorrupt(
                f"{key!r} in etcd is no key of a journal", remedy="delete it with etcdctl"
            )
        return int(digits)

    def chunk(self, covers: int, nonce: str, number: int) -> bytes:
        return self._snapshots + b"%020d-%s/%08d" % (covers, nonce.encode(), number)

    def chunks(self, row: SnapshotRow, first: int, count: int) -> tuple[bytes, bytes]:
        return (
            self.chunk(row.covers, row.nonce, first),
            self.chunk(row.covers, row.nonce, first + count),
        )

    def snapshots_below(self, covers: int) -> tuple[bytes, bytes]:
        """All of snapshots that cover less."""
        return self._snapshots, self._snapshots + b"%020d" % covers

    def row(self, path: str) -> bytes:
        """Of a row for people."""
        return self._pool + path.encode()

    @property
    def rows(self) -> tuple[bytes, bytes]:
        """All of them."""
        return self._pool, prefix_end(self._pool)


# ---- rows -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaderRow:
    """`nonce` tells the candidate whose answer was lost that it was elected."""

    epoch: int
    nonce: str
    master: MasterRow

    def to_bytes(self) -> bytes:
        return _json({"epoch": self.epoch, **_master_fields(self.master), "nonce": self.nonce})

    @staticmethod
    def parse(data: bytes) -> LeaderRow:
        fields = _parsed(data, "leader")
        return LeaderRow(
            int(fields.get("epoch", 0)), str(fields.get("nonce", "")), _to_master(fields)
        )

    @property
    def leader(self) -> Leader:
        return Leader(self.epoch, self.master)


@dataclass(frozen=True, slots=True)
class TenureRow:
    """Written again and again: nobody else may lead before it stood still for `tenure_ms`."""

    epoch: int
    tenure_ms: int
    entry: int
    """The newest entry that is durable."""

    def to_bytes(self) -> bytes:
        return _json({"epoch": self.epoch, "tenure_ms": self.tenure_ms, "entry": self.entry})

    @staticmethod
    def parse(data: bytes) -> TenureRow:
        fields = _parsed(data, "tenure")
        try:
            return TenureRow(
                int(fields["epoch"]), int(fields["tenure_ms"]), int(fields.get("entry", 0))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _no_row("tenure", data) from error


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """Which snapshot is in force."""

    covers: int
    resume: int
    """First entry of the key of the journal in which reading goes on: covers + 1, or before where
    that lies within a key."""
    chunks: int
    size_bytes: int
    nonce: str

    def to_bytes(self) -> bytes:
        return _json(
            {
                "covers": self.covers,
                "resume": self.resume,
                "chunks": self.chunks,
                "bytes": self.size_bytes,
                "id": self.nonce,
            }
        )

    @staticmethod
    def parse(data: bytes) -> SnapshotRow:
        fields = _parsed(data, "snapshot")
        try:
            return SnapshotRow(
                int(fields["covers"]),
                int(fields["resume"]),
                int(fields["chunks"]),
                int(fields["bytes"]),
                str(fields["id"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _no_row("snapshot", data) from error


def epoch_text(epoch: int) -> bytes:
    """As the row `epoch` has it."""
    return b"%d" % epoch


def parse_epoch(data: bytes) -> int:
    """Raises JournalCorrupt."""
    text = data.strip()
    if not text.isdigit() or not 0 <= int(text) < _EPOCH_MAX:
        raise JournalCorrupt(
            f"the row epoch in etcd holds {data[:40]!r}",
            remedy="put a number there that is larger than any epoch in the masters' logs",
        )
    return int(text)


def master_bytes(row: MasterRow, role: str, entry: int) -> bytes:
    """A row of `masters/`."""
    return _json({**_master_fields(row), "role": role, "entry": entry})


def parse_master(data: bytes) -> MasterRow:
    """Raises JournalCorrupt."""
    return _to_master(_parsed(data, "masters"))


def _master_fields(row: MasterRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "addresses": list(row.addresses),
        "grpc": row.grpc,
        **row.details,
    }


def _to_master(fields: dict[str, Any]) -> MasterRow:
    addresses = fields.get("addresses", [])
    details = {
        name: value
        for name, value in fields.items()
        if name not in ("name", "addresses", "grpc", "epoch", "nonce")
        and isinstance(value, str | int)
    }
    return MasterRow(
        str(fields.get("name", "")),
        tuple(map(str, addresses)) if isinstance(addresses, list) else (),
        str(fields.get("grpc", "")),
        details,
    )


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def _parsed(data: bytes, what: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise _no_row(what, data) from error
    if not isinstance(fields, dict):
        raise _no_row(what, data)
    return fields


def _no_row(what: str, data: bytes) -> JournalCorrupt:
    return JournalCorrupt(
        f"the row {what} in etcd holds {data[:60]!r}", remedy="delete it with etcdctl"
    )
