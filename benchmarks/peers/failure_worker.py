"""A process of a failure scenario: a client that is told what to do by JSON lines, or a node.

Standard library only (a peer's runs in that peer's own interpreter). Each call's end, duration and
outcome is written as one line at once, so that nothing is lost with a process that hangs or dies.
Times are of CLOCK_MONOTONIC, which all processes of the machine share.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import sys
import time

MIB = 1 << 20


@functools.lru_cache(4)
def payload_of(key: str, size: int) -> bytes:
    return hashlib.shake_128(key.encode()).digest(size)


class Mooncake:
    """A node (a process that contributes memory), or a client that contributes none."""

    def __init__(self, cfg, role):
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self.config = ReplicateConfig()
        self.config.replica_num = cfg["replicas"]
        self.store = MooncakeDistributedStore()
        segment_bytes = cfg["node_bytes"] if role == "node" else 0
        code = self.store.setup(
            "127.0.0.1",
            "P2PHANDSHAKE",
            segment_bytes,
            cfg["buffer_bytes"] if role == "client" else 16 * MIB,
            "tcp",
            "",
            cfg["master"],
        )
        if code != 0:
            raise RuntimeError(f"setup code {code}")

    def put(self, key, value):
        code = self.store.put(key, value, self.config)
        if code != 0:
            raise RuntimeError(f"put code {code}")

    def get(self, key):
        return self.store.get(key) or None  # b"" is a miss, or any failure

    def remove(self, key):
        return self.store.remove(key) == 0


class Cenote:
    def __init__(self, cfg, role):
        from cenote.client import Client

        self.client = Client(
            cfg["master"], transports=("tcp",), namespace="bench", replicas=cfg["replicas"]
        )

    def put(self, key, value):
        self.client.put(key, value)

    def get(self, key):
        return self.client.get(key)

    def remove(self, key):
        return self.client.remove(key)


class Worker:
    def __init__(self, store, say):
        self.store = store
        self.say = say

    def fill(self, c):
        """n keys; whoever is not stored at first is put once more."""
        missing = [f"{c['base']}{i}" for i in range(c["n"])]
        for _ in range(5):
            missing = [key for key in missing if not self._put(key, c["size"])[1]]
            if not missing:
                break
            time.sleep(0.5)
        return {"missing": len(missing)}

    def _put(self, key, size):
        """(when it ended, whether it was stored, seconds, what was wrong)."""
        value = payload_of(key, size)
        began = time.monotonic()
        try:
            self.store.put(key, value)
            what = ""
        except Exception as error:  # any failure of a peer is a result here
            what = f"{type(error).__name__}: {error}"[:120]
        ended = time.monotonic()
        return ended, not what, ended - began, what

    def _get(self, key, size):
        began = time.monotonic()
        try:
            value = self.store.get(key)
            what = "missed" if value is None else ""
        except Exception as error:  # any failure of a peer is a result here
            value, what = None, f"{type(error).__name__}: {error}"[:120]
        ended = time.monotonic()
        if value is not None and value != payload_of(key, size):
            what = "wrong bytes"
        return ended, not what, ended - began, what

    def read(self, c):
        """Random keys of the base, `rate` a second, for `secs`."""
        rng = random.Random(7)
        self._paced(c, lambda i: self._get(f"{c['base']}{rng.randrange(c['n'])}", c["size"]))

    def write(self, c):
        """New keys, `rate` a second, for `secs`."""
        self._paced(c, lambda i: self._put(f"{c['tag']}{i}", c["size"]))

    def _paced(self, c, call):
        start = time.monotonic()
        due, i = start, 0
        while (now := time.monotonic()) < start + c["secs"]:
            if now < due:
                time.sleep(due - now)
            self.say({"sample": call(i)})
            due = max(due + 1 / c["rate"], time.monotonic())
            i += 1

    def check(self, c):
        """All keys of the base, once."""
        keys = [f"{c['base']}{i}" for i in range(c["n"])]
        seen = [self._get(key, c["size"]) for key in keys]
        return {
            "right": sum(one[1] for one in seen),
            "wrong": sum(one[3] == "wrong bytes" for one in seen),
        }

    def prepare(self, c):
        """Make a large payload ahead, so that it does not count."""
        payload_of(c["key"], c["size"])

    def put_one(self, c):
        """One put; says when it begins, so that it can be killed in the middle."""
        value = payload_of(c["key"], c["size"])
        self.say({"begins": time.monotonic()})
        self.store.put(c["key"], value)
        return {}

    def take_over(self, c):
        """Put and get a key in turn until its bytes come, for at most `secs`.

        `stored_s`: when a put first said that it is stored; `right_s`: when the bytes first came
        (None: never); `said_stored`: puts that said so though the key could not be read.
        """
        start = time.monotonic()
        stored = right = None
        said = 0
        what = ""
        while right is None and time.monotonic() < start + c["secs"]:
            ended, ok, _, failed = self._put(c["key"], c["size"])
            # Who comes second is told so by an error: the object is there then, or is said to be.
            if ok or "AlreadyExists" in failed:
                stored = stored or ended
                ended, good, _, failed = self._get(c["key"], c["size"])
                if good:
                    right = ended
                    break
                said += 1
            what = failed
            time.sleep(0.1)
        return {"stored_s": stored, "right_s": right, "said_stored": said, "what": what}

    def remove_one(self, c):
        """Until it is removed, for at most `secs`."""
        end = time.monotonic() + c["secs"]
        while time.monotonic() < end:
            if self.store.remove(c["key"]):
                return {"removed": True}
            time.sleep(0.2)
        return {"removed": False}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--peer", "--role", "--cfg"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a peer's SDK prints goes to stderr

    def say(message) -> None:
        out.write(json.dumps(message) + "\n")

    try:
        kind = {"mooncake": Mooncake, "cenote": Cenote}[args.peer]
        worker = Worker(kind(json.loads(args.cfg), args.role), say)
    except Exception as error:  # reported to the parent, which decides
        say({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    say({"done": {}})
    for line in sys.stdin:
        case = json.loads(line)
        try:
            say({"done": getattr(worker, case["op"])(case) or {}})
        except Exception as error:  # a failing case is a result, not the end of the run
            say({"error": f"{type(error).__name__}: {error}"})
    os._exit(0)  # some SDKs hang in their destructors


if __name__ == "__main__":
    main()
