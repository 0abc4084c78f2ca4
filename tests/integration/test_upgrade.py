"""An upgrade, one daemon at a time, from an earlier commit's code to this one's, under load.

The earlier code is taken out of this repository's own history. The load's clients are of this
commit, so that they talk to old daemons, too; an old client then talks to the new ones.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from payloads import payload_of
from workers import Load, pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
SOURCES = ("proto", "core", "master", "store", "client")
OLD = os.environ.get("CENOTE_UPGRADE_FROM") or "fe7ffa9"
"""The release before, or a commit that stands for one as long as there is none."""

OLD_CLIENT = """
import sys
from cenote.client import Client
import cenote.client
assert cenote.client.__file__.startswith(sys.argv[2]), cenote.client.__file__
for transports in (("shm", "tcp"), ("tcp",)):
    with Client(sys.argv[1], transports=transports) as client:
        keys = [f"old-{transports[0]}-{i}" for i in range(64)]
        values = [key.encode() * 100 for key in keys]
        client.put_batch(keys, values).raise_for_errors()
        assert client.get_batch(keys) == values
        assert client.match(keys).prefix_keys == len(keys)
        assert client.remove_batch(keys).all()
print("done")
"""


@pytest.fixture
def old_code(tmp_path: Path) -> Path:
    """The earlier commit's sources, in a folder of their own."""
    git = ["git", "-C", str(ROOT), "archive", OLD, *SOURCES]
    packed = subprocess.run(git, capture_output=True, timeout=60)
    if packed.returncode:
        reason = packed.stderr.decode(errors="replace").strip()
        pytest.skip(f"no commit {OLD} here, as in a clone without history: {reason}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old"


def environment_of(code: Path) -> str:
    return "PYTHONPATH=" + os.pathsep.join(str(code / source) for source in SOURCES)


def test_no_call_fails_while_daemons_become_new(old_code: Path, seed: int) -> None:
    old = ("env", environment_of(old_code))
    with ExitStack() as stack:
        cluster = stack.enter_context(pool(0))
        cluster.master.daemon.spec.launcher = old
        cluster.master.restart()
        for number in range(3):
            cluster.add_store(flags={"failure-domain": f"domain{number}"}, launcher=old)
        cluster.wait_alive(3)
        for process in cluster.processes:
            maps = Path(f"/proc/{process.pid}/environ").read_bytes()
            assert str(old_code).encode() in maps, f"{process.name} does not run the old code"
        load = Load(stack, cluster, seed, replicas=2, min_replicas=2, deadline_s=8.0)
        load.pass_time(1.0)
        for process in [*cluster.stores, cluster.master]:
            process.daemon.spec.launcher = ()
            process.restart()
            cluster.wait_alive(3, 20.0)
            load.pass_time(1.0)
        load.stop()
        assert load.failures() == []
        stored = load.stored()
        with cluster.client(deadline_s=20.0) as client:
            values = client.get_batch(list(stored))
            assert values == [payload_of(key, size) for key, size in stored.items()]
            assert not client.exists_batch(load.removed()).any()


def test_an_old_client_works_with_new_daemons(old_code: Path) -> None:
    with pool(1) as cluster:
        name, _, path = environment_of(old_code).partition("=")
        ended = subprocess.run(
            [sys.executable, "-c", OLD_CLIENT, cluster.lane, str(old_code)],
            env={**cluster.environment, name: path},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
