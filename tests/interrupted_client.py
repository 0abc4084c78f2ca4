"""A program that keeps putting and getting, whatever Ctrl-C does to it: `interrupted_client.py
ADDRESS TRANSPORT SECONDS`, and then until it was let alone for long enough to read something. Says
"ready", and at the end a line of JSON about how it went."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
import time

from cenote.client import Client

AT_MOST_S = 30.0


def work(client: Client, counts: dict[str, int], until_s: float) -> None:
    """Put and get until the time is over. Raises AssertionError on wrong bytes."""
    while time.monotonic() < until_s or not counts["hits"]:
        counts["rounds"] += 1
        size = random.choice([100, 4096, 100_000])
        values = {f"{time.monotonic()}-{i}": os.urandom(size) for i in range(20)}
        keys = list(values)
        client.put_batch(keys, list(values.values()))
        for key, got in zip(keys, client.get_batch(keys), strict=True):
            assert got is None or got == values[key], "wrong bytes"
            counts["hits"] += got is not None
        client.put(keys[0] + "s", values[keys[0]])
        one = client.get(keys[0] + "s")
        assert one is None or one == values[keys[0]], "wrong bytes"
        client.exists_batch(keys)


def main() -> None:
    address, transport, seconds = sys.argv[1:]
    client = Client(address, transports=(transport,))
    counts = {"rounds": 0, "hits": 0, "interrupts": 0}
    until_s = time.monotonic() + float(seconds)
    print("ready", flush=True)
    while time.monotonic() < until_s + (0 if counts["hits"] else AT_MOST_S):
        try:
            try:
                work(client, counts, until_s)
            except KeyboardInterrupt:
                counts["interrupts"] += 1
        except KeyboardInterrupt:
            pass
    began_s = time.monotonic()
    while not client.closed or client.stats().nodes_connected:
        with contextlib.suppress(KeyboardInterrupt):
            client.close()
    close_s = time.monotonic() - began_s
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    print(json.dumps({**counts, "close_s": close_s, "threads": threads}), flush=True)


if __name__ == "__main__":
    main()
