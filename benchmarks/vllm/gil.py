"""How long the connector's threads hold the GIL for each block that they load or save.

    PYTHONPATH=tests CENOTE_TEST_VLLM_PYTHON=.venv-vllm/bin/python \\
        .venv/bin/python benchmarks/vllm/gil.py [--rounds 7]

Without an engine: the connector's worker half (`gil_worker.py`) over a KV cache in host memory, and
a pool of real processes. Meanwhile the main thread does nothing but spin in Python, as an engine
that needs the GIL all the time would, and asks the connector what it does in a step, every 2 ms. It
has a core of its own (all else shares the others), so that it runs whenever it has the GIL:

    threads = processor time of the process's other threads
    worked  = threads + processor time of the connector's calls in the main thread, less the copies

bounds what the connector held the GIL for: what it does without it, such as waiting, is in there,
too, but nothing that the machine's other work does. And

    lost = wall time - the spinning thread's processor time for itself

is what the spinning went without: others held the GIL, were being woken to take it, or the
core was somebody else's (`alone`: the same spin with the connector idle). Both are told by block.
(How long a thread was runnable can't be told from the kernel: since Linux 6.6 sleeping threads may
stay in the run queue.) `copy` is what the engine's own thread takes to copy a block out at the end
of a step; on CPUs it copies blocks in as well (`load`), without any other thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from typing import Final

from bench_parts import HERE

from cluster import Cluster
from with_vllm.engines import vllm_python

OWN_CORE: Final = min(os.sched_getaffinity(0))
"""Of the spinning thread, in `gil_worker.py`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--batches", default="16,64")
    parser.add_argument("--block-kib", default="256,1024")
    options = parser.parse_args()
    if vllm_python() is None:
        parser.error("set CENOTE_TEST_VLLM_PYTHON: make test-vllm makes .venv-vllm/bin/python")
    print("| | blocks | | threads us/block | worked | worst | lost us/block | least | ms |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for transport in options.transports.split(","):
        for kib in map(int, options.block_kib.split(",")):
            for batch in map(int, options.batches.split(",")):
                measure(transport, kib << 10, batch, options.rounds)


def measure(transport: str, block_bytes: int, batch: int, rounds: int) -> None:
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, own - {OWN_CORE} or own)  # what the daemons begin with
    size_bytes = max(256 << 20, (rounds + 4) * batch * block_bytes * 5 // 4)
    with Cluster(stores=1, dram_bytes=size_bytes) as cluster:
        os.sched_setaffinity(0, own)
        given = {
            "master": cluster.lane,
            "transport": transport,
            "block_bytes": block_bytes,
            "batch": batch,
            "rounds": rounds,
        }
        subprocess.run(
            [str(vllm_python()), str(HERE / "gil_worker.py"), json.dumps(given)],
            check=True,
            timeout=300,
        )


if __name__ == "__main__":
    main()
