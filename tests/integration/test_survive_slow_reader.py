"""A reader slowed to 1 MB/s through a long batch while the pool is overwritten five times."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from admin import admin_of
from cenote.api.errors import CenoteError
from cluster import Cluster
from payloads import payload_of
from remote import Remote
from throttle import SlowLink

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MIB = 1 << 20
BYTES_PER_S = 1e6
KEYS = 1_000  # the promise is about 6,000; the time that they take is what counts
SIZE = 4_000
POOL_BYTES = 24 * MIB
LEASE_TTL_S = 1.0
TIMES = 5
BLOCK_BYTES = 64 << 10


def test_a_slow_reader_keeps_its_lease_and_gets_right_bytes() -> None:
    """Its lease is renewed several times, so that nothing of it is evicted meanwhile."""
    flags = {"lease-ttl-s": 0.5, "lease-ttl-max-s": LEASE_TTL_S}
    with (
        SlowLink(BYTES_PER_S) as link,
        Cluster(stores=0, dram_bytes=POOL_BYTES, master_flags=flags) as cluster,
    ):
        store = cluster.add_store(flags={"advertise": link.address})
        host, _, port = store.ready["data"].removeprefix("tcp://").rpartition(":")
        link.target = host, int(port)
        keys = [f"k{i}" for i in range(KEYS)]
        block = np.zeros((KEYS, SIZE), np.uint8)
        count = TIMES * POOL_BYTES // BLOCK_BYTES
        with (
            cluster.client(transports=("shm",)) as near,
            cluster.client(transports=("tcp",), deadline_s=30.0) as far,
            admin_of(cluster) as admin,
            Remote("overwrite", cluster.lane, "w", count, BLOCK_BYTES, 4) as writer,
        ):
            near.put_batch(keys, [payload_of(key, SIZE) for key in keys]).raise_for_errors()
            writer.expect("ready")
            longest_s = [0.0]
            reading = threading.Event()
            reading.set()

            def watch() -> None:
                """How long there was no lease at a stretch: none, while it reads."""
                seen_s = time.monotonic()
                while reading.is_set():
                    leases = admin.status().leases
                    now_s = time.monotonic()
                    if leases:
                        seen_s = now_s
                    longest_s[0] = max(longest_s[0], now_s - seen_s)

            watcher = threading.Thread(target=watch)
            watcher.start()
            writer.say("go")
            began_s = time.monotonic()
            try:
                results = far.get_into_batch(keys, block)
            finally:
                took_s = time.monotonic() - began_s
                reading.clear()
                watcher.join()
            assert writer.hear() == []
            status = admin.status()
            stats = far.stats()
        wrong, hits, errors = 0, 0, 0
        for i, key in enumerate(keys):
            error = results.error(i)
            if error is not None:
                assert isinstance(error, CenoteError)
                errors += 1
            elif results[i] is not None:
                hits += 1
                wrong += block[i].tobytes() != payload_of(key, SIZE)
        print(
            f"{took_s:.1f} s, {link.sent_bytes / 1e6:.1f} MB over the link: {hits} right, {errors}"
            f" errors; no lease for {longest_s[0]:.2f} s at most; evicted"
            f" {status.evicted_bytes / status.capacity_bytes:.1f} times the pool"
            f"; {stats}"
        )
        assert wrong == 0
        assert took_s > 2 * LEASE_TTL_S
        assert status.evicted_bytes > (TIMES - 1.5) * status.capacity_bytes
        # Renewed in time, so that all of it stayed.
        assert hits == KEYS
        assert longest_s[0] < LEASE_TTL_S
