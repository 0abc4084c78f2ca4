"""The end of a soak: a table, and which rules held."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from board import Board
from faults import Chaos
from processes import Pool
from watch import FIELDS, Sample, Watch, level

__all__ = ["Outcome", "print_report"]

EXPECTED = {
    "Unavailable": "the master, or every node with a replica, was away for the whole call",
    "DeadlineExceeded": "the same, or the client itself was stopped",
    "ReplicasUnavailable": "two of three nodes were away, and two replicas were demanded",
    "NoSpace": "after a crash of the master no space is reused while old leases may run",
    "QuotaExceeded": "with nodes away, less may be pinned",
    "StaleLocation": "the bytes moved on more often than a call asks",
    "LeaseExpired": "the client was stopped for longer than its lease",
    "SessionUnknown": "the client was stopped for longer than its session",
    "GrantRevoked": "the client was cut off while it was stopped",
    "BufferInUse": "a stopped process might have touched the buffer still",
}
"""Errors that a fault may cause, and why. All others are bugs."""
FLAT = {"private_mib": (1.15, 8.0), "fds": (1.0, 6.0), "threads": (1.0, 4.0)}
"""Of the level after a tenth of the run: times this, plus that, is still flat."""
FLAT_OF = {"etcd": {"private_mib": (1.5, 16.0)}}
"""Other limits for a role. etcd keeps what came since the snapshot before its last one, of which it
makes one each 5,000 changes, so that its memory is filled after some 20 minutes of a soak."""
FLAT_FROM_S = 150.0
MINUTES_FOR_ALL = 10
ROLES = ("master", "store", "client", "etcd")


@dataclass
class Outcome:
    """All that was seen."""

    seed: int
    ran_s: float
    cpu_share: float
    totals: dict[str, int]
    late_ms_max: int
    chaos: Chaos
    watch: Watch
    pool: Pool
    held: dict[str, int]
    lost_objects: int
    damaged_replicas: int
    exit_codes: dict[str, int | None]
    directory: Path

    def errors(self, prefix: str = "error ") -> dict[str, int]:
        return {
            name.removeprefix(prefix): count
            for name, count in self.totals.items()
            if name.startswith(prefix) and count
        }

    def tracebacks(self) -> list[str]:
        """Logs with one in it."""
        return [
            path.name
            for path in sorted(self.directory.glob("*.log"))
            if "Traceback (most recent call last)" in path.read_text(errors="replace")
        ]

    def levels(self) -> Iterator[dict[str, Any]]:
        """Rows of memory, descriptors, threads: by role, and of who lived longest."""
        for role in ROLES:
            lives = self.watch.of(role)
            if not lives:
                continue
            every = [sample for life in lives.values() for sample in life]
            flat = FLAT | FLAT_OF.get(role, {})
            yield self._row(f"{role}, median of all", every, 0.0, self.ran_s, flat)
            (name, life), longest = max(lives.items(), key=lambda item: _length(item[1]))
            what = f"{name}, life {life} of {max(n for who, n in lives if who == name)}"
            text = f"{role}, longest life ({what}: {_length(longest) / 60:.1f} min)"
            yield self._row(text, longest, longest[0].at_s, longest[-1].at_s, flat)

    def _row(
        self,
        who: str,
        samples: list[Sample],
        from_s: float,
        to_s: float,
        flat: dict[str, tuple[float, float]],
    ) -> dict[str, Any]:
        row: dict[str, Any] = {"who": who}
        for field in FIELDS:
            row[field] = [
                level(samples, field, *_around(share, from_s, to_s)) for share in (0.05, 0.5, 1.0)
            ]
        row["flat"] = {
            field: _flat(samples, field, from_s, to_s, *allowed) for field, allowed in flat.items()
        }
        return row

    def sizes(self) -> dict[str, list[float]]:
        """MiB of object memory and of metadata with logs at 5, 50 and 100 % of the run."""
        rows = self.watch.sizes
        at = [min(len(rows) - 1, int(len(rows) * share)) for share in (0.05, 0.5, 1.0)]
        return {
            "object memory, MiB": [rows[i][1] for i in at],
            "metadata and logs, MiB": [rows[i][2] for i in at],
            "etcd's largest database with its snapshots, MiB": [rows[i][3] for i in at],
        }

    def rules(self) -> list[tuple[str, bool, str]]:
        """(rule, whether it held, what was seen)."""
        t, chaos = self.totals, self.chaos
        unexpected = {k: n for k, n in self.errors().items() if k not in EXPECTED}
        well = self.errors("well ")
        rows = list(self.levels())
        not_flat = [f"{r['who']}: {f}" for r in rows for f, ok in r["flat"].items() if not ok]
        quiets = [q for q in chaos.quiets if not (q.recovered and q.checked)]
        bad_ends = {n: c for n, c in self.exit_codes.items() if c not in (0, -15)}
        found = [(f"no {name}", not t[name], f"{t[name]}") for name in Board.BAD]
        found += [
            ("errors are typed, of a kind that a fault explains", not unexpected, f"{unexpected}"),
            ("no error while all was well", not well, f"{well}"),
            ("all was well in each quiet time", not quiets, f"{len(chaos.quiets)} of them"),
            ("no process ended by itself", not chaos.problems, "; ".join(chaos.problems[:3])),
            ("all ended in order", not bad_ends, f"{bad_ends}"),
            ("no traceback in a log", not self.tracebacks(), ", ".join(self.tracebacks())),
            ("memory, descriptors, threads are flat", not not_flat, "; ".join(not_flat)),
            ("all space came back", not any(self.held.values()), f"{self.held}"),
            ("no replica was damaged", self.damaged_replicas == 0, f"{self.damaged_replicas}"),
        ]
        if self.ran_s > MINUTES_FOR_ALL * 60:
            roles = [role for role in ROLES if self.pool.of(role)]
            missing = [f"{r} {k}" for r in roles for k in ("SIGKILL", "SIGSTOP")]
            missing = [name for name in missing if not chaos.counts[name]]
            found.append(("every fault happened", not missing, f"{missing}"))
        return found

    def as_dict(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "seed": self.seed,
            "ran_s": self.ran_s,
            "cpu_share": self.cpu_share,
            "totals": dict(self.totals),
            "late_ms_max": self.late_ms_max,
            "faults": dict(self.chaos.counts),
            "faults_in_call": dict(self.chaos.in_call),
            "problems": self.chaos.problems,
            "lives": {party.name: party.lives for party in self.pool.parties},
            "levels": list(self.levels()),
            "sizes": self.sizes(),
            "held": self.held,
            "lost_objects": self.lost_objects,
            "rules": [list(rule) for rule in self.rules()],
            "samples": [list(sample) for sample in self.watch.samples],
        }


def _length(life: list[Sample]) -> float:
    return life[-1].at_s - life[0].at_s


def _around(share: float, from_s: float, to_s: float) -> tuple[float, float]:
    """A time of a tenth of the whole about this share of it."""
    length = to_s - from_s
    middle = from_s + length * min(max(share, 0.05), 0.95)
    return middle - 0.05 * length, middle + 0.05 * length


def _flat(
    samples: list[Sample], field: str, from_s: float, to_s: float, factor: float, plus: float
) -> bool:
    """Whether the last tenth is not above the second one; True of what did not live for long."""
    if to_s - from_s < FLAT_FROM_S:
        return True
    early = level(samples, field, *_around(0.15, from_s, to_s))
    late = level(samples, field, *_around(1.0, from_s, to_s))
    return math.isnan(early) or math.isnan(late) or late <= early * factor + plus


def print_report(outcome: Outcome) -> bool:
    """The table; whether every rule held."""
    t, chaos = outcome.totals, outcome.chaos
    calls = {n.removeprefix("call "): c for n, c in t.items() if n.startswith("call ") and c}
    print(
        f"\n{outcome.ran_s / 60:.1f} minutes, seed {outcome.seed}, "
        f"{outcome.cpu_share:.2f} cores, {sum(calls.values())} calls: {calls}"
    )
    print(
        f"stored {t['stored']} objects ({t['stored_bytes'] / 1e9:.2f} GB), removed {t['removed']}, "
        f"read {t['hit_bytes'] / 1e9:.2f} GB; in doubt after an error: {t['in doubt']}"
    )
    print(
        f"keys read: {t['hit']} hits, {t['old']} of a cached location after a removal (allowed), "
        f"{t['miss']} misses, {t['missed']} evicted or on nodes that were away, "
        f"{t['missed pinned']} pinned and on nodes that were away"
    )
    print(
        f"faults: {sum(chaos.counts.values())}: {dict(sorted(chaos.counts.items()))}; "
        f"clients in the middle of a call: {dict(chaos.in_call)}"
    )
    print(
        f"latest end of a call: {outcome.late_ms_max} ms after its deadline; objects that "
        f"daemons did not bring back since the master's last start: {outcome.lost_objects}"
    )
    print("\n| error | times | why |\n|---|---|---|")
    for name, count in sorted(outcome.errors().items()):
        print(f"| {name} | {count} | {EXPECTED.get(name, '**not expected**')} |")
    head = " | ".join(f"{field} at 5 / 50 / 100 %" for field in FIELDS)
    print(f"\n| who | {head} |\n|---{'|---' * len(FIELDS)}|")
    for row in outcome.levels():
        cells = [" / ".join(f"{v:.0f}" for v in row[field]) for field in FIELDS]
        print(f"| {row['who']} | {' | '.join(cells)} |")
    for name, values in outcome.sizes().items():
        print(f"{name}: {' / '.join(f'{v:.1f}' for v in values)}")
    print("\n| rule | held | seen |\n|---|---|---|")
    for rule, held, seen in outcome.rules():
        print(f"| {rule} | {'yes' if held else '**NO**'} | {seen} |")
    passed = all(held for _, held, _ in outcome.rules())
    print(f"\n{'PASS' if passed else 'FAIL'}", flush=True)
    return passed
