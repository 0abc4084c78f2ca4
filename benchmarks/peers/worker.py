"""A client process of one peer: reads cases as JSON lines, runs them, answers with figures.

Standard library only. The timed region of every case is the store's own call and nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time

from peers import MIB, load_adapter, make_key

CLOCK = time.perf_counter_ns


def percentile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def summarize(times_ns, bytes_each, items_each=1):
    total_s = sum(times_ns) / 1e9
    median_ns = percentile(times_ns, 0.5)
    return {
        "n": len(times_ns),
        "p50_us": median_ns / 1e3,
        "p50_GBps": bytes_each / median_ns if median_ns else 0,
        "p99_us": percentile(times_ns, 0.99) / 1e3,
        "mean_us": statistics.fmean(times_ns) / 1e3,
        "GBps": bytes_each * len(times_ns) / total_s / 1e9 if total_s else 0,
        "items_per_s": items_each * len(times_ns) / total_s if total_s else 0,
    }


class Budget:
    """Ends a case after `tmax` seconds, but not before `least` samples."""

    def __init__(self, tmax, least):
        self.end, self.least = CLOCK() + int(tmax * 1e9), least

    def over(self, times):
        return len(times) >= self.least and CLOCK() > self.end


class Worker:
    REGION_BYTES = 256 * MIB

    def __init__(self, spec, cfg, role, segment_bytes, buffer_bytes):
        _, adapter = load_adapter(spec)
        self.store = adapter.open_store(cfg, role, segment_bytes, buffer_bytes)
        if role == "node":
            return
        self.src = self.store.alloc(self.REGION_BYTES)
        self.dst = self.store.alloc(self.REGION_BYTES)
        pattern = os.urandom(MIB)
        for i in range(0, self.REGION_BYTES, MIB):
            ctypes.memmove(self.src + i, pattern, MIB)
            ctypes.memmove(self.src + i, i.to_bytes(8, "little"), 8)
        ctypes.memset(self.dst, 0, self.REGION_BYTES)

    def check(self, a, b, nbytes, what):
        if ctypes.string_at(a, nbytes) != ctypes.string_at(b, nbytes):
            raise RuntimeError("DATA MISMATCH " + what)

    # ---- one call at a time

    def put(self, c):
        size, times, budget = c["size"], [], Budget(c["tmax"], 8)
        values = [ctypes.string_at(self.src + i * MIB, size) for i in range(16)]
        for i in range(c["n"]):
            key = make_key(c["base"], i)
            start = CLOCK()
            self.store.put(key, values[i % 16])
            times.append(CLOCK() - start)
            if budget.over(times):
                break
        return summarize(times, size)

    def get(self, c):
        size, n, times, budget = c["size"], c["n"], [], Budget(c["tmax"], 8)
        for i in range(n):
            key = make_key(c["base"], i)
            start = CLOCK()
            value = self.store.get(key)
            times.append(CLOCK() - start)
            if len(value) != size:
                raise RuntimeError(f"get: {len(value)} bytes instead of {size}")
            if i in (0, n - 1) and value != ctypes.string_at(self.src + (i % 16) * MIB, size):
                raise RuntimeError("DATA MISMATCH get")
            if budget.over(times):
                break
        return summarize(times, size)

    def put_from(self, c):
        size, times, budget = c["size"], [], Budget(c["tmax"], 8)
        for i in range(c["n"]):
            key, address = make_key(c["base"], i), self.src + (i % 16) * MIB
            start = CLOCK()
            self.store.put_from(key, address, size)
            times.append(CLOCK() - start)
            if budget.over(times):
                break
        return summarize(times, size)

    def get_into(self, c):
        size, n, times, budget = c["size"], c["n"], [], Budget(c["tmax"], 8)
        if not c.get("cached"):
            getattr(self.store, "forget_locations", lambda: None)()
        for i in range(n):
            key = make_key(c["base"], i)
            start = CLOCK()
            got = self.store.get_into(key, self.dst, size)
            times.append(CLOCK() - start)
            if got != size:
                raise RuntimeError(f"get_into: {got}")
            if i in (0, n - 1):
                self.check(self.dst, self.src + (i % 16) * MIB, size, "get_into")
            if budget.over(times):
                break
        return summarize(times, size)

    def exist(self, c):
        times, budget = [], Budget(c["tmax"], 8)
        for i in range(c["n"]):
            key = make_key(c["base"], i)
            start = CLOCK()
            there = self.store.exist(key)
            times.append(CLOCK() - start)
            if not there:
                raise RuntimeError("exist: missing key")
            if budget.over(times):
                break
        return summarize(times, 0)

    # ---- batches

    def batch_put_from(self, c):
        size, batch, times, budget = c["size"], c["batch"], [], Budget(c["tmax"], 2)
        addresses, sizes = [self.src + i * size for i in range(batch)], [size] * batch
        for r in range(c["rounds"]):
            if budget.over(times):
                break
            keys = [make_key(c["base"], r * batch + i) for i in range(batch)]
            start = CLOCK()
            self.store.batch_put_from(keys, addresses, sizes)
            times.append(CLOCK() - start)
        return summarize(times, size * batch, batch)

    def batch_get_into(self, c):
        size, batch, times, budget = c["size"], c["batch"], [], Budget(c["tmax"], 2)
        addresses, sizes = [self.dst + i * size for i in range(batch)], [size] * batch
        getattr(self.store, "forget_locations", lambda: None)()
        for r in range(c["rounds"]):
            if budget.over(times):
                break
            keys = [make_key(c["base"], r * batch + i) for i in range(batch)]
            start = CLOCK()
            self.store.batch_get_into(keys, addresses, sizes)
            times.append(CLOCK() - start)
        for i in [*range(0, batch, max(1, batch // 4)), batch - 1]:
            self.check(self.dst + i * size, self.src + i * size, size, "batch_get_into")
        return summarize(times, size * batch, batch)

    def batch_exist(self, c):
        batch, times, budget = c["batch"], [], Budget(c["tmax"], 3)
        for r in range(c["rounds"]):
            if budget.over(times):
                break
            keys = [make_key(c["base"], (r * batch + i) % c["nkeys"]) for i in range(batch)]
            start = CLOCK()
            there = self.store.batch_exist(keys)
            times.append(CLOCK() - start)
            if sum(1 for x in there if x == 1) != batch:
                raise RuntimeError("batch_exist: missing keys")
        return summarize(times, 0, batch)

    # ---- more than there is memory for

    def put_kept(self, c):
        """As fast as the store takes and keeps it; what is refused is tried again."""
        size, batch, times, refused = c["size"], c["batch"], [], 0
        keep_up = getattr(self.store, "keep_up", lambda _: None)
        addresses, sizes = [self.src + i * size for i in range(batch)], [size] * batch
        began = CLOCK()
        for first in range(0, c["n"], batch):
            keys = [make_key(c["base"], first + i) for i in range(batch)]
            while True:
                start = CLOCK()
                try:
                    self.store.batch_put_from(keys, addresses, sizes)
                except RuntimeError:  # no room yet
                    refused += 1
                    if CLOCK() - began > 120e9:
                        raise
                    time.sleep(0.05)
                    continue
                times.append(CLOCK() - start)
                break
            keep_up((first + batch) * size)
        seconds = (CLOCK() - began) / 1e9
        found = summarize(times, size * batch, batch)
        return {**found, "GBps": c["n"] * size / seconds / 1e9, "refused": refused}

    def get_kept(self, c):
        """Read back; times of calls that brought all they asked for, and how much was there."""
        size, batch, times, there, left_out = c["size"], c["batch"], [], 0, 0
        addresses, sizes = [self.dst + i * size for i in range(batch)], [size] * batch
        getattr(self.store, "forget_locations", lambda: None)()
        before = self.store.ssd_reads()
        for first in range(c["first"], c["first"] + c["n"], batch):
            keys = [make_key(c["base"], first + i) for i in range(batch)]
            start = CLOCK()
            came = self.store.batch_get_what_is_there(keys, addresses, sizes)
            took = CLOCK() - start
            for i, has_come in enumerate(came):
                if has_come:
                    source = self.src + ((first + i) % c.get("cycle", 16)) * size
                    self.check(self.dst + i * size, source, size, "get_kept")
            there += sum(came)
            if all(came):
                times.append(took)
            else:
                left_out += 1
        found = summarize(times, size * batch, batch) if times else {"n": 0}
        missing = c["n"] - there
        reads = self.store.ssd_reads() - before
        return {**found, "missing": missing, "ssd_reads": reads, "left_out": left_out}

    def fill(self, c):
        size, batch, n = c["size"], c["batch"], c["n"]
        start = CLOCK()
        for first in range(0, n, batch):
            count = min(batch, n - first)
            keys = [make_key(c["base"], first + i) for i in range(count)]
            addresses = [self.src + i * size for i in range(count)]
            self.store.batch_put_from(keys, addresses, [size] * count)
        seconds = (CLOCK() - start) / 1e9
        return {"n": n, "secs": seconds, "keys_per_s": n / seconds}

    def loop(self, c):
        """One operation for `secs`, counted."""
        kind, batch, size = c["kind"], c.get("batch", 1), c.get("size", 0)
        keys = [make_key(c["base"], i % c["nkeys"]) for i in range(batch)]
        sources = [self.src + j * size for j in range(batch)]
        targets = [self.dst + j * size for j in range(batch)]
        done, i, start = 0, 0, CLOCK()
        end = start + int(c["secs"] * 1e9)
        while CLOCK() < end:
            if kind == "exist":
                self.store.exist(keys[i % batch])
                done += 1
            elif kind == "batch_exist":
                self.store.batch_exist(keys)
                done += batch
            elif kind == "put_small":
                fresh = [make_key(c["tag"], i * batch + j) for j in range(batch)]
                self.store.batch_put_from(fresh, sources, [size] * batch)
                done += batch
            else:
                self.store.batch_get_into(keys, targets, [size] * batch)
                done += batch
            i += 1
        seconds = (CLOCK() - start) / 1e9
        return {"ops": done, "secs": seconds, "per_s": done / seconds}

    def rm(self, c):
        return {"removed": self.store.remove_all()}

    def rm_first(self, c):
        self.store.remove_first(c["base"], c["n"])
        return {}

    def quit(self, c):
        self.store.close()
        return {}


def main(args) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a peer's SDK prints goes to stderr
    try:
        worker = Worker(args.spec, json.loads(args.cfg), args.role, args.segment, args.buffer)
    except Exception as error:  # reported to the parent, which decides
        out.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        out.flush()
        os._exit(1)
    out.write(json.dumps({"ready": 1}) + "\n")
    for line in sys.stdin:
        case = json.loads(line)
        try:
            reply = getattr(worker, case["op"])(case)
        except Exception as error:  # a failing case is a row of the result, not the end of the run
            reply = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(reply) + "\n")
        if case["op"] == "quit":
            break
    out.flush()
    os._exit(0)  # some SDKs hang in their destructors
