"""What users see when something dies: cenote beside its peer, the same fault and load, in one run.

    MOONCAKE_VENV=... python failures.py [--rounds 3] [--faults node-killed,...] [--json out.json]

Each fault on each pool in turn: 300 objects of 256 KiB on three nodes, one process that reads them
(50 a second) and one that puts new ones (10 a second), over TCP. A read counts as failed if it did
not give the bytes that were put, for whatever reason. Everything has a time limit; a call that does
not end within it is reported as hung.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from failure_ha import HA_POOLS, MASTERS
from failure_pools import POOLS as LONE_POOLS
from peers import KIB, MIB, MOONCAKE_VENV

POOLS = LONE_POOLS | HA_POOLS
KEYS = 300
SIZE = 256 * KIB
NODES = 3
NODE_BYTES = 256 * MIB
BEFORE_S = 3.0
AWAY_S = 1.0
STOPPED_S = 15.0
CALL_LIMIT_S = 60.0
BIG = 96 * MIB
BEGIN_LIMIT_S = 2.0
TAKE_OVER_LIMIT_S = 60.0
SPACE_LIMIT_S = 45.0
MID_PUT_TRIES = 8


class Load:
    """One reader, one writer, for `secs`."""

    def __init__(self, pool, secs):
        self.reader, self.writer = pool.client("reader"), pool.client("writer")
        filled = self.writer.call(120, op="fill", base="k", n=KEYS, size=SIZE)
        if filled.get("missing") != 0:
            raise RuntimeError(f"{pool.label}: could not fill the pool: {filled}")
        self.secs = secs

    def start(self) -> None:
        shape = {"size": SIZE, "secs": self.secs}
        self.reader.tell(op="read", base="k", n=KEYS, rate=50, **shape)
        self.writer.tell(op="write", tag="w", rate=10, **shape)
        time.sleep(BEFORE_S)

    def end(self, fault_s) -> dict:
        """What was seen from the fault on."""
        limit_s = self.secs - BEFORE_S + CALL_LIMIT_S
        found = {}
        for name, client in (("reads", self.reader), ("puts", self.writer)):
            answer = client.answer(limit_s)
            found |= _seen(name, client.samples, fault_s)
            if "error" in answer:
                found[f"{name}: hung"] = answer["error"]
            limit_s = CALL_LIMIT_S
        return found


def _seen(name, samples, fault_s) -> dict:
    """Of the calls that ended after the fault; None: there was none of that kind."""
    after = [s for s in samples if s[0] >= fault_s]
    bad = [s for s in after if not s[1]]
    good = [s for s in after if s[1] and s[0] - s[2] >= fault_s]
    return {
        f"{name}: failed": len(bad),
        f"{name}: of": len(after),
        f"{name}: last failed after, s": max((s[0] - fault_s for s in bad), default=None),
        f"{name}: first good one after, s": min((s[0] - fault_s for s in good), default=None),
        f"{name}: slowest, s": max((s[2] for s in after), default=None),
        f"{name}: wrong bytes": sum(s[3] == "wrong bytes" for s in after),
        f"{name}: why": sorted({s[3] for s in bad})[:3],
    }


def _check(client) -> dict:
    """Keys that can be read now, asked by a client that knows nothing yet."""
    return client.call(120, op="check", base="k", n=KEYS, size=SIZE)


# ---- the faults ----------------------------------------------------------------------------------


def node_killed(pool) -> dict:
    load = Load(pool, 25)
    load.start()
    fault_s = time.monotonic()
    pool.nodes[1].kill()
    return load.end(fault_s)


def node_stopped(pool) -> dict:
    load = Load(pool, 30)
    load.start()
    fault_s = time.monotonic()
    pool.nodes[1].send(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    pool.nodes[1].send(signal.SIGCONT)
    return load.end(fault_s)


def master_killed(pool) -> dict:
    load = Load(pool, 35)
    time.sleep(8)  # so that a peer that takes snapshots has one with all the keys
    load.start()
    fault_s = time.monotonic()
    pool.master.kill()
    time.sleep(AWAY_S)
    pool.restart_master()
    found = load.end(fault_s)
    answer = _check(pool.client("checker"))
    return found | _lost(answer)


def leader_killed(pool) -> dict:
    """The leading one of two masters; nobody starts it again."""
    load = Load(pool, 35)
    load.start()
    pool.leader()[1].kill()
    fault_s = time.monotonic()  # it is dead: what succeeds from now on does so without it
    found = load.end(fault_s)
    answer = _check(pool.client("checker"))
    return found | _lost(answer)


def _lost(answer) -> dict:
    if "error" in answer:
        return {"keys: check": answer["error"]}
    return {
        "keys: lost": KEYS - answer["right"],
        "keys: of": KEYS,
        "keys: wrong bytes": answer["wrong"],
    }


def daemon_restarted(pool) -> dict:
    """In order (SIGTERM), as for an upgrade; one replica."""
    load = Load(pool, 25)
    load.start()
    fault_s = time.monotonic()
    pool.nodes[1].kill(signal.SIGTERM)
    pool.restart_node(1)
    found = load.end(fault_s)
    checker = pool.client("checker")
    answer = _check(checker)
    whole = answer.get("right") == KEYS
    last_s = found["reads: last failed after, s"] or 0.0
    found["keys: all readable after, s"] = last_s if whole else "never"
    return found | _lost(answer)


def writer_dies(pool) -> dict:
    """In the middle of a put of 96 MiB; then another client puts the same key."""
    other = pool.client("other")
    other.call(60, op="fill", base="k", n=20, size=SIZE)
    before = pool.held_bytes()
    for attempt in range(MID_PUT_TRIES):
        key = f"big{attempt}"
        writer = pool.client(f"victim{attempt}")
        writer.call(60, op="put_one", key=f"warm{attempt}", size=SIZE)  # connections are there
        writer.answer(60)
        other.call(60, op="remove_one", key=f"warm{attempt}", secs=30)
        other.call(60, op="prepare", key=key, size=BIG)
        writer.tell(op="put_one", key=key, size=BIG)
        writer.answer(60)  # it begins
        end = time.monotonic() + BEGIN_LIMIT_S
        while pool.held_bytes() - before < BIG / 2 and time.monotonic() < end:
            pass  # until it has been given its space
        writer.kill()
        fault_s = time.monotonic()
        if "error" in writer.answer(10):  # it ended before its put did
            break
        other.call(60, op="remove_one", key=key, secs=30)
    else:
        return {"put: in the middle": "not caught"}
    taken = other.call(
        TAKE_OVER_LIMIT_S + CALL_LIMIT_S, op="take_over", key=key, size=BIG, secs=TAKE_OVER_LIMIT_S
    )
    found = {"put: tries to catch it": attempt + 1}
    if "error" in taken:
        return found | {"key: hung": taken["error"]}
    for name, label in (
        ("stored_s", "put: said to be stored after, s"),
        ("right_s", "key: readable after, s"),
    ):
        value = taken[name]
        found[label] = value - fault_s if value else f"not within {TAKE_OVER_LIMIT_S:.0f} s"
    found["put: said stored, and was not readable"] = taken["said_stored"]
    found["put: why"] = [taken["what"]] if taken["what"] else []
    removed = other.call(60, op="remove_one", key=key, secs=45)
    if not removed.get("removed"):
        found["error"] = f"the key could not be removed: {removed}"
    end = time.monotonic() + SPACE_LIMIT_S
    while (lost := pool.held_bytes() - before) > MIB and time.monotonic() < end:
        time.sleep(0.1)
    found["space: lost at the end, MiB"] = max(0.0, lost) / MIB
    found["space: back after, s"] = (
        time.monotonic() - fault_s if lost <= MIB else f"not within {SPACE_LIMIT_S:.0f} s"
    )
    return found


FAULTS = {
    "node-killed": (node_killed, 2),
    "node-stopped": (node_stopped, 2),
    "writer-dies": (writer_dies, 1),
    "master-killed": (master_killed, 2),
    "leader-killed": (leader_killed, 2),
    "daemon-restarted": (daemon_restarted, 1),
}
"""What is done, and the replicas that are asked for."""
TITLES = {
    "node-killed": "a node killed, 2 replicas",
    "node-stopped": f"a node stopped for {STOPPED_S:.0f} s, 2 replicas",
    "writer-dies": f"a writer killed in a put of {BIG // MIB} MiB",
    "master-killed": f"the master killed, back after {AWAY_S:.0f} s",
    "leader-killed": f"the leading of {MASTERS} masters killed",
    "daemon-restarted": "a node restarted in order (SIGTERM), 1 replica",
}
_CALLS = [
    f"{kind}: {what}"
    for kind in ("reads", "puts")
    for what in ("failed", "last failed after, s", "slowest, s")
]
ROWS = {
    "node-killed": _CALLS,
    "node-stopped": _CALLS,
    "writer-dies": [
        "put: said to be stored after, s",
        "put: said stored, and was not readable",
        "key: readable after, s",
        "space: back after, s",
        "space: lost at the end, MiB",
    ],
    "master-killed": [
        *_CALLS,
        "reads: first good one after, s",
        "puts: first good one after, s",
        "keys: lost",
    ],
    "leader-killed": [
        *_CALLS,
        "reads: first good one after, s",
        "puts: first good one after, s",
        "keys: lost",
    ],
    "daemon-restarted": [*_CALLS, "keys: lost", "keys: all readable after, s"],
}


# ---- the run -------------------------------------------------------------------------------------


def one(fault, pool_name, work) -> dict:
    run, replicas = FAULTS[fault]
    directory = tempfile.mkdtemp(prefix=f"{fault}-", dir=work)
    began = time.monotonic()
    pool = None
    try:
        pool = POOLS[pool_name](directory, nodes=NODES, node_bytes=NODE_BYTES, replicas=replicas)
        found = run(pool)
    except (RuntimeError, OSError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    finally:
        if pool is not None:
            pool.stop()
    found["took_s"] = time.monotonic() - began
    print(fault, pool_name, {k: _short(v) for k, v in found.items()}, file=sys.stderr, flush=True)
    return found


def _short(value):
    return round(value, 2) if isinstance(value, float) else value


def _cell(values) -> str:
    """All rounds of one figure: the median, and the range where they differ."""
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    texts = [v for v in known if isinstance(v, str)]
    if texts:
        rest = [f"{v:.1f}" for v in known if not isinstance(v, str)]
        return "; ".join(dict.fromkeys(texts)) + (f" (else {', '.join(rest)})" if rest else "")
    form = "{:.0f}" if all(isinstance(v, int) for v in known) else "{:.2f}"
    low, middle, high = (form.format(f(known)) for f in (min, statistics.median, max))
    return middle if low == high else f"{middle} ({low} to {high})"


def _rows(fault, results, pools) -> Iterator[tuple[str, list[str]]]:
    """(what, a cell for each pool) of one fault; errors and calls that hung have rows of their
    own."""
    runs_of = {pool: results.get(pool, []) for pool in pools}
    found = {name for runs in runs_of.values() for run in runs for name in run}
    odd = sorted(n for n in found if n == "error" or n.endswith((": hung", ": check", "middle")))
    for name in [*ROWS[fault], *odd]:
        cells = []
        for runs in runs_of.values():
            cell = _cell([run.get(name) for run in runs])
            of = [run.get(name.split(":")[0] + ": of") for run in runs]
            if name.endswith((": failed", ": lost")) and cell != "-":
                cell += f" of {_cell(of)}"
            cells.append(cell)
        yield name, cells
    wrong = [
        [v for r in runs for k, v in r.items() if k.endswith("wrong bytes")]
        for runs in runs_of.values()
    ]
    yield "wrong bytes", [str(sum(values)) if values else "-" for values in wrong]


def table(results, pools) -> str:
    pools = [pool for pool in pools if any(pool in by_pool for by_pool in results.values())]
    titles = [POOLS[pool].label for pool in pools]
    lines = [f"| fault | what is seen | {' | '.join(titles)} |", "|---|---|" + "---|" * len(pools)]
    for fault, by_pool in results.items():
        title = TITLES[fault]
        for name, cells in _rows(fault, by_pool, pools):
            lines.append(f"| {title} | {name} | {' | '.join(cells)} |")
            title = ""
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--failures", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--pools", default=",".join(POOLS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--keep", action="store_true", help="logs")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # so that what was started is ended, too
        signal.signal(number, lambda *_: sys.exit(1))
    pools = args.pools.split(",")
    if not (MOONCAKE_VENV / "bin" / "python").exists():
        pools = [name for name in pools if POOLS[name].peer == "cenote"]
    work = tempfile.mkdtemp(prefix="cn-fail-")
    results: dict[str, dict[str, list]] = {}
    for _ in range(args.rounds):
        for fault in args.faults.split(","):
            for pool in pools:
                if pool == "mooncake-snapshots" and fault != "master-killed":
                    continue  # it changes nothing else
                if (pool in HA_POOLS) != (fault == "leader-killed"):
                    continue
                runs = results.setdefault(fault, {}).setdefault(pool, [])
                runs.append(one(fault, pool, work))
    print(f"{platform.platform()}, {os.cpu_count()} cores; rounds: {args.rounds}\n")
    print(table(results, pools))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))
    if args.keep:
        print(f"\nlogs: {work}")
    else:
        shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
