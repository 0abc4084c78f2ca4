"""Side-by-side benchmark of KV-cache stores: peers interleaved case by case, ratios of one run.

python harness.py --peers mooncake,mooncake-daemon,LABEL=FILE.py:ADAPTER,...
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import physical
import ssd_section
import worker
import yardsticks
from peers import GIB, HERE, KIB, MIB, load_adapter

SIZES = [
    (4 * KIB, 800),
    (64 * KIB, 600),
    (256 * KIB, 300),
    (MIB, 150),
    (2560 * KIB, 80),
    (16 * MIB, 16),
]
# What the yardsticks need; the rest of the cases is for the curious.
YARDSTICK_SIZES = (4 * KIB, 2560 * KIB)
YARDSTICK_BATCHES = ((4 * KIB, 256), (2560 * KIB, 64))
AVERAGED = {
    "cpu_us_per_call": min,
    "p50_us": min,
    "p99_us": min,
    "mean_us": min,
    "GBps": max,
    "p50_GBps": max,
    "items_per_s": max,
    "per_s": max,
    "keys_per_s": max,
    "bytes_per_key": min,
    "left_all_pct": min,
    "left_oldest_pct": min,
}


def label(size: int) -> str:
    if size % MIB == 0:
        return f"{size // MIB}MiB"
    return "2.5MiB" if size == 2560 * KIB else f"{size // KIB}KiB"


def rss_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def cpu_ns(pids) -> int:
    """CPU time of all live threads of these processes, by the scheduler's own counter."""
    total = 0
    for pid in pids:
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                    total += int(file.read().split()[0])
            except OSError:
                continue
    return total


class WorkerProcess:
    """A worker driven by JSON lines over pipes."""

    def __init__(self, adapter, spec, role, segment_bytes, buffer_bytes, workdir):
        with open(os.path.join(workdir, f"{role}-{time.time_ns()}.err"), "wb") as log:
            self.process = subprocess.Popen(
                [
                    adapter.python,
                    str(HERE / "harness.py"),
                    "--worker",
                    *("--spec", spec, "--cfg", json.dumps(adapter.cfg()), "--role", role),
                    *("--segment", str(segment_bytes), "--buffer", str(buffer_bytes)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **adapter.env()},
                text=True,
                bufsize=1,
            )
        hello = self.read(60)
        if "error" in hello:
            raise RuntimeError(f"{adapter.name} worker {role}: {hello['error']}")

    def read(self, timeout_s):
        lines = []
        reader = threading.Thread(
            target=lambda: lines.append(self.process.stdout.readline()), daemon=True
        )
        reader.start()
        reader.join(timeout_s)
        if not lines or not lines[0]:
            return {"error": f"no answer (timeout or crash, rc={self.process.poll()})"}
        return json.loads(lines[0])

    def send(self, **case):
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()

    def call(self, timeout_s=120, **case):
        try:
            self.send(**case)
        except OSError as error:
            return {"error": f"worker gone: {error}"}
        return self.read(timeout_s)

    def close(self):
        self.call(15, op="quit")
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)


class Peer:
    def __init__(self, spec, workdir, segment_bytes):
        self.spec, self.segment_bytes = spec, segment_bytes
        self.label, adapter = load_adapter(spec)
        self.adapter = adapter()
        self.dir = os.path.join(workdir, self.label)
        os.makedirs(self.dir, exist_ok=True)
        self.workers = []
        self.adapter.start(self.dir, segment_bytes)
        if self.adapter.node_as_worker:
            self.worker("node", segment_bytes, 16 * MIB)
        self.client = self.worker("client", 0, 256 * MIB)

    def worker(self, role, segment_bytes, buffer_bytes):
        process = WorkerProcess(
            self.adapter, self.spec, role, segment_bytes, buffer_bytes, self.dir
        )
        self.workers.append(process)
        return process

    @property
    def master_pid(self):
        return self.adapter.pids["master"]

    def pids(self):
        return [*self.adapter.pids.values(), *(w.process.pid for w in self.workers)]

    def stop(self):
        for process in reversed(self.workers):
            process.close()
        self.adapter.stop()


class Bench:
    def __init__(self, args):
        self.args = args
        self.raw, self.errors, self.skipped, self.physical = [], [], [], []
        self.peers: list[Peer] = []
        self.tmp = tempfile.mkdtemp(prefix="cenote-bench.")
        self.started = time.monotonic()

    def record(self, peer, section, case, result):
        if "error" in result:
            self.errors.append([peer, section, case, result["error"]])
        self.raw.append({"peer": peer, "section": section, "case": case, **result})
        if self.args.verbose:
            shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
            print(peer, section, case, shown, file=sys.stderr, flush=True)

    def late(self, what) -> bool:
        if time.monotonic() - self.started < self.args.budget:
            return False
        self.skipped.append(what)
        return True

    def each(self, section, case, follow=None, **c):
        """One case on every peer in turn; `follow`: the results of the put that it reads back."""
        results = {}
        c.setdefault("tmax", self.args.tmax)
        for peer in self.peers:
            if follow is not None:
                n = follow.get(peer.label, {}).get("n", 0)
                if not n:
                    continue
                c["rounds" if "batch" in c else "n"] = n
            before = cpu_ns(peer.pids())
            result = peer.client.call(**c)
            if result.get("n"):
                result["cpu_us_per_call"] = (cpu_ns(peer.pids()) - before) / 1e3 / result["n"]
            self.record(peer.label, section, case, result)
            results[peer.label] = result
        return results

    def measure_limits(self, size):
        """What the machine can do, beside the cases that are held against it: it changes by a third
        within minutes on a shared one."""
        if size == physical.BLOCK and "phys" in self.args.sections.split(","):
            self.physical.append(physical.measure(0.4))

    def remove_all(self):
        for peer in self.peers:
            peer.client.call(60, op="rm")

    # ---- sections

    def single(self):
        for size, count in SIZES:
            if self.args.yardsticks and size not in YARDSTICK_SIZES:
                continue
            n, name = max(8, int(count * self.args.scale)), label(size)
            for peer in self.peers:
                peer.client.call(op="put_from", base="w", size=size, n=3, tmax=1)
                peer.client.call(op="get_into", base="w", size=size, n=3, tmax=1)
            for _ in range(self.args.rounds):
                if self.late(f"single {name}"):
                    break
                self.measure_limits(size)
                done = self.each("single", f"put {name}", op="put", base="p", size=size, n=n)
                self.each("single", f"get {name}", done, op="get", base="p", size=size)
                self.remove_all()
                done = self.each(
                    "single", f"put_from {name}", op="put_from", base="z", size=size, n=n
                )
                get = {"op": "get_into", "base": "z", "size": size}
                self.each("single", f"get_into {name}", done, **get)
                self.each("single", f"get_into {name} cached", done, cached=True, **get)
                self.remove_all()

    def batch(self):
        for size, _ in SIZES:
            for batch in (16, 64, 256):
                if size * batch > worker.Worker.REGION_BYTES:
                    continue
                if self.args.yardsticks and (size, batch) not in YARDSTICK_BATCHES:
                    continue
                # Fewer calls than these measured how long it takes to wake a process up.
                rounds = int(512 * MIB * self.args.scale) // (size * batch)
                rounds = max(3, min(int(100 * self.args.scale), rounds))
                case = f"{label(size)} x{batch}"
                for _ in range(self.args.rounds):
                    if self.late("batch " + case):
                        break
                    self.measure_limits(size)
                    shape = {"base": "b", "size": size, "batch": batch}
                    done = self.each(
                        "batch", "put " + case, op="batch_put_from", rounds=rounds, **shape
                    )
                    self.each("batch", "get " + case, done, op="batch_get_into", **shape)
                    self.remove_all()

    def exist(self):
        keys = 8192
        for peer in self.peers:
            filled = peer.client.call(op="fill", base="e", size=64, batch=512, n=keys)
            if "error" in filled:
                self.record(peer.label, "exist", "fill", filled)
        for _ in range(self.args.rounds):
            self.each(
                "exist", "is_exist", op="exist", base="e", n=int(1500 * self.args.scale) or 100
            )
            for batch, rounds in ((1, 1500), (64, 200), (512, 60), (4096, 15)):
                if self.args.yardsticks and batch != 512:
                    continue
                self.each(
                    "exist",
                    f"batch_is_exist {batch}",
                    op="batch_exist",
                    base="e",
                    nkeys=keys,
                    batch=batch,
                    rounds=max(5, int(rounds * self.args.scale)),
                )
        self.remove_all()

    def scale(self):
        """Operations per second with 1, 2 and 4 client processes."""
        kinds = (
            ("exist", 1, 0),
            ("batch_exist", 512, 0),
            ("put_small", 128, 64),
            ("get_into", 128, 64),
        )
        extra = {}
        for peer in self.peers:
            extra[peer.label] = [peer.worker("client", 0, 64 * MIB) for _ in range(3)]
            peer.client.call(op="fill", base="s", size=64, batch=512, n=4096)
        for kind, batch, size in kinds:
            for clients in (1, 2, 4):
                if self.args.yardsticks and (kind, clients) != ("put_small", 1):
                    continue
                for turn in range(self.args.rounds):
                    if self.late(f"scale {kind} {clients}"):
                        break
                    for peer in self.peers:
                        workers = [peer.client, *extra[peer.label]][:clients]
                        self._loop(peer, workers, kind, batch, size, turn)
        for peer in self.peers:
            for process in extra[peer.label]:
                peer.workers.remove(process)
                process.close()
            peer.client.call(60, op="rm")

    def _loop(self, peer, workers, kind, batch, size, turn):
        for j, process in enumerate(workers):
            process.send(
                op="loop",
                kind=kind,
                batch=batch if batch > 1 else 64,
                nkeys=4096,
                base="s",
                size=size,
                secs=self.args.loop_secs,
                tag=f"t{len(workers)}{j}{kind[0]}{turn}",
            )
        results = [process.read(60) for process in workers]
        bad = [r for r in results if "error" in r]
        result = bad[0] if bad else {"per_s": sum(r["per_s"] for r in results)}
        case = f"{kind} b={batch} clients={len(workers)}"
        self.record(peer.label, "scale", case, result)
        if kind == "put_small":
            peer.client.call(60, op="rm")
            peer.client.call(op="fill", base="s", size=64, batch=512, n=4096)

    def million(self):
        """Master memory for many small keys, and what of it is left after removing them."""
        n = self.args.keys
        for peer in self.peers:
            if self.late("million"):
                break
            peer.client.call(60, op="rm")
            before = rss_bytes(peer.master_pid)
            result = peer.client.call(200, op="fill", base="m", size=64, batch=512, n=n)
            full = rss_bytes(peer.master_pid) - before
            result["bytes_per_key"] = full / n
            peer.client.call(200, op="rm_first", base="m", n=int(n * 0.9))
            result["left_oldest_pct"] = self._settled(peer, before, full)
            peer.client.call(60, op="rm")
            result["left_all_pct"] = self._settled(peer, before, full)
            self.record(peer.label, "million", f"{n} keys of 64 B", result)

    def _settled(self, peer, before, full) -> float:
        """Per cent of the growth that is left, once it stopped shrinking."""
        last = rss_bytes(peer.master_pid)
        for _ in range(20):
            time.sleep(0.5)  # memory is given back by a background step of unknown length
            now = rss_bytes(peer.master_pid)
            if now >= last:
                break
            last = now
        return 100 * (last - before) / max(1, full)

    def ssd(self):
        ssd_section.run(self, Peer)

    # ---- the whole

    def start_peer(self, spec):
        peer = Peer(spec, self.tmp, self.args.segment)
        self.peers.append(peer)
        # Touch the segment once, so that first page faults spoil nothing that follows.
        rounds = max(1, int(self.args.segment * 0.85) // (256 * MIB))
        result = peer.client.call(
            op="batch_put_from", base="touch", size=16 * MIB, batch=16, rounds=rounds, tmax=60
        )
        self.record(peer.label, "cold", f"first fill, 16MiB x16, {rounds * 256} MiB", result)
        peer.client.call(60, op="rm")

    def run(self):
        try:
            only_ssd = self.args.sections == "ssd"  # which has pools of its own
            for spec in [] if only_ssd else self.args.peers.split(","):
                try:
                    self.start_peer(spec)
                except (RuntimeError, OSError) as error:
                    self.errors.append([spec, "start", "", str(error)])
            for name in self.args.sections.split(","):
                if name == "phys":
                    self.physical.append(physical.measure())
                elif not self.late(name):
                    getattr(self, name)()
        finally:
            for peer in self.peers:
                peer.stop()
            if not self.args.keep:
                shutil.rmtree(self.tmp, ignore_errors=True)
        return self.report()

    def report(self):
        rows, limits = aggregate(self.raw), {}
        for name in self.physical[0] if self.physical else ():
            limits[name] = statistics.median(sample[name] for sample in self.physical)
        result = {
            "time": time.strftime("%F %T"),
            "machine": f"{os.cpu_count()} cores, Linux {platform.release()}, Python "
            f"{platform.python_version()}",
            "seconds": round(time.monotonic() - self.started, 1),
            "load": os.getloadavg(),
            "physical": limits,
            "rows": rows,
            "errors": self.errors,
            "skipped": self.skipped,
        }
        result["yardsticks"] = yardsticks.compute(rows, limits)
        if self.args.json:
            with open(self.args.json, "w") as file:
                json.dump({**result, "raw": self.raw}, file, indent=1)
        labels = [spec.partition("=")[0] for spec in self.args.peers.split(",")]
        yardsticks.print_report(result, labels)
        return 1 if self.errors else 0


def aggregate(raw) -> list[dict]:
    """Median and best over the rounds of every (peer, section, case)."""
    groups: dict[tuple, list[dict]] = {}
    for row in raw:
        groups.setdefault((row["peer"], row["section"], row["case"]), []).append(row)
    rows = []
    for group in groups.values():
        good = [r for r in group if "error" not in r]
        if not good:
            rows.append(group[0])
            continue
        merged = dict(good[-1], rounds=len(good), failed_rounds=len(group) - len(good))
        for name, best in AVERAGED.items():
            values = [r[name] for r in good if name in r]
            if values:
                merged[name], merged["best_" + name] = statistics.median(values), best(values)
        rows.append(merged)
    return rows


def parse_args():
    ours = f"cenote={HERE}/adapter.py:CenoteTcp,cenote-shm={HERE}/adapter.py:CenoteShm"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for hidden in ("--spec", "--cfg", "--role"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--buffer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write everything there")
    parser.add_argument("--peers", default=f"mooncake,mooncake-daemon,{ours}")
    parser.add_argument("--sections", default="phys,single,batch,exist,scale,million")
    parser.add_argument("--scale", type=float, default=0.3, help="multiplies iteration counts")
    parser.add_argument("--tmax", type=float, default=0.4, help="seconds one timed case may take")
    parser.add_argument(
        "--budget", type=float, default=600, help="seconds; later cases are skipped"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of every case, interleaved")
    parser.add_argument("--segment", type=int, default=3 * GIB // 2, help="bytes of each pool")
    parser.add_argument("--keys", type=int, default=100_000, help="of the million section")
    parser.add_argument("--loop-secs", type=float, default=1.0)
    parser.add_argument("--ssd-directory", default="/var/tmp", help="on the disk to measure")
    parser.add_argument("--yardsticks", action="store_true", help="only what they need")
    parser.add_argument("--verbose", "-v", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if args.worker:
        worker.main(args)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return Bench(args).run()


if __name__ == "__main__":
    sys.exit(main())
