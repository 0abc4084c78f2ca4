"""The `ssd` section: more than memory holds is put, then the older half of it is read back.

Each peer has a pool of its own with little memory and a directory on disk. What is put comes as
fast as the store takes and keeps it: a put that is refused is tried again, and where none is ever
refused the next one waits until what is left to copy has room in memory. Reads are checked, counted
where they came from the SSD as the store itself says, and timed one by one and in batches: as they
come, and once the page cache was made to forget the store's files. With each goes how much of the
files was cached before it, and how much came from the device (`page_cache`).
"""

from __future__ import annotations

import os
import tempfile
import time

import page_cache
from adapter import CenoteShm, CenoteTcp
from peers import KIB, MIB, MOONCAKE_VENV, MooncakeAdapter, MooncakeDaemonAdapter

DRAM_BYTES = 512 * MIB
OBJECT_BYTES = 2560 * KIB
OBJECTS = 512
BATCH = 16
SHAPES = (("", 1), (" x16", BATCH))
SETTLE_S = 6.0
"""A peer tells its master of what it wrote with heartbeats, once a second."""


class _Offload:
    """What Mooncake's offload wants, as of its defaults but for a quicker heartbeat."""

    def prepare(self, directory: str) -> None:
        self.ssd = os.path.join(directory, "disk")
        os.makedirs(self.ssd, exist_ok=True)

    def env(self) -> dict[str, str]:
        return {
            "GLOG_minloglevel": "1",
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(256 * MIB),
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "32",
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": self.ssd,
        }


class MooncakeSsd(_Offload, MooncakeAdapter):
    master_flags = ("--enable_offload=true",)

    def start(self, workdir: str, segment_bytes: int) -> None:
        self.prepare(workdir)
        super().start(workdir, segment_bytes)

    def cfg(self) -> dict:
        return {**super().cfg(), "ssd": self.ssd}


class MooncakeDaemonSsd(_Offload, MooncakeDaemonAdapter):
    master_flags = ("--enable_offload=true",)
    client_flags = ("--enable_offload=true",)

    def start(self, workdir: str, segment_bytes: int) -> None:
        self.prepare(workdir)
        super().start(workdir, segment_bytes)


class _WithSsd:
    def start(self, workdir: str, segment_bytes: int) -> None:
        self.store_flags = (
            f"--ssd={os.path.join(workdir, 'ssd')}",
            "--ssd-size=4GiB",
            "--ssd-object-size=256KiB",
        )
        super().start(workdir, segment_bytes)


class CenoteTcpSsd(_WithSsd, CenoteTcp):
    pass


class CenoteShmSsd(_WithSsd, CenoteShm):
    pass


ADAPTERS = {
    "mooncake": "MooncakeSsd",
    "mooncake-daemon": "MooncakeDaemonSsd",
    "cenote": "CenoteTcpSsd",
    "cenote-shm": "CenoteShmSsd",
}


def run(bench, make_peer) -> None:
    """`make_peer(spec, directory, segment_bytes)` starts one; rows go to `bench.record`."""
    asked = [spec.partition("=")[0] for spec in bench.args.peers.split(",")]
    here = os.path.abspath(__file__)
    with tempfile.TemporaryDirectory(dir=bench.args.ssd_directory, prefix="cenote-ssd.") as root:
        peers = []
        try:
            for label in asked:
                if label.startswith("mooncake") and not (MOONCAKE_VENV / "bin").exists():
                    continue
                spec = f"{label}={here}:{ADAPTERS[label]}"
                try:
                    peers.append(make_peer(spec, root, DRAM_BYTES))
                except (RuntimeError, OSError) as error:
                    bench.errors.append([label, "ssd", "start", str(error)])
            for number in range(bench.args.rounds):
                for peer in peers:
                    if not bench.late(f"ssd {peer.label} {number}"):
                        _round(bench, peer, f"o{number}-")
        finally:
            for peer in peers:
                peer.stop()


def _round(bench, peer, base: str) -> None:
    shape = {"base": base, "size": OBJECT_BYTES, "batch": BATCH}
    wrote = peer.client.call(200, op="put_kept", n=OBJECTS, **shape)
    bench.record(peer.label, "ssd", "put 2.5MiB x16, 1.25 GiB into 0.5 of memory", wrote)
    time.sleep(SETTLE_S)
    # The older half, in quarters: as it is after that, then with no file of it in the page cache.
    part = OBJECTS // 8
    cases = [(name, batch, cold) for cold in (False, True) for name, batch in SHAPES]
    for number, (name, batch, is_cold) in enumerate(cases):
        if is_cold:
            page_cache.drop(peer.dir)
        cached, on_disk = page_cache.cached_bytes(peer.dir)
        before = page_cache.device_bytes(peer.pids())
        shape = {"base": base, "size": OBJECT_BYTES, "batch": batch}
        read = peer.client.call(200, op="get_kept", first=number * part, n=part, **shape)
        came = page_cache.device_bytes(peer.pids()) - before
        read |= {
            "cached_share": cached / max(1, on_disk),
            "device_share": came / (part * OBJECT_BYTES),
        }
        temperature = ", nothing cached" if is_cold else ""
        bench.record(peer.label, "ssd", f"get 2.5MiB{name} from SSD{temperature}", read)
    peer.client.call(60, op="rm")
