"""The lock on a node's name, and what dead daemons left behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from cenote.api.errors import InvalidArgument, ResourceUnavailable
from cenote.runtime import file_lock
from cenote.store.node_files import (
    NodeFiles,
    control_directory_for,
    running_nodes,
    stale_nodes,
)


def test_a_name_has_one_daemon_at_a_time(tmp_path: Path) -> None:
    first = NodeFiles(tmp_path, "n1")
    first.announce(first.node_uuid)
    with pytest.raises(ResourceUnavailable, match=f"pid {os.getpid()} holds .*cenote-n1.lock"):
        NodeFiles(tmp_path, "n1")
    other = NodeFiles(tmp_path, "n1-2")
    other.close()
    first.close()
    first.close()
    second = NodeFiles(tmp_path, "n1")
    assert second.node_uuid == first.node_uuid
    second.close()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    """Whatever ends it; and a file that says nonsense is no obstacle."""
    lock = tmp_path / "cenote-n1.lock"
    for text in (b"", b"\xff\xfe", b"[1]", b'{"pid": null, "node_uuid": "xyz"}', b"{"):
        lock.write_bytes(text)
        files = NodeFiles(tmp_path, "n1")
        assert len(files.node_uuid) == 16
        files.announce(files.node_uuid)
        files.close()
        known = json.loads(lock.read_text())
        uuid = files.node_uuid.hex()
        assert known == {"pid": os.getpid(), "node_uuid": uuid, "starts": 1, "ssd": ""}
    command = ["flock", "--exclusive", "--nonblock", str(lock), "true"]
    assert subprocess.run(command, check=False).returncode == 0


def test_starts_are_counted(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        files = NodeFiles(tmp_path, "n1")
        assert files.start_number == number
        files.announce(files.node_uuid)
        files.close()
    (tmp_path / "cenote-n1.lock").write_bytes(b"{")  # killed while it was written
    files = NodeFiles(tmp_path, "n1")
    files.announce(files.node_uuid, starts_before=3)
    assert files.start_number == 4
    files.close()


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "-a", "a-", "x" * 65, "ä", "a\n"])
def test_names_that_cannot_be_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="can't be a node's name"):
        NodeFiles(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResourceUnavailable, match=r"missing/cenote-n1.lock: No such file"):
        NodeFiles(tmp_path / "missing", "n1")


def test_only_files_of_the_node_itself_are_its_segments(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path, "n")
    for name in ("n-0.data", "n-0.slots", "n-12.slots", "n-1-3.data", "n.x-4.data", "n-5.data.old"):
        (tmp_path / f"cenote-{name}").touch()
    assert files.indexes() == [0, 12]
    files.remove(0)
    files.remove(12)
    assert files.indexes() == []
    assert len(list(tmp_path.glob("cenote-*"))) == 4
    files.close()


def test_files_of_dead_daemons_are_found_and_the_command_removes_them(tmp_path: Path) -> None:
    own = NodeFiles(tmp_path, "own")
    alive = NodeFiles(tmp_path, "alive")
    dead = NodeFiles(tmp_path, "dead-1")
    empty = NodeFiles(tmp_path, "empty")
    dead.announce(dead.node_uuid)
    for files in (own, alive, dead):
        files.data_path(0).write_bytes(bytes(8192))
        files.table_path(0).write_bytes(bytes(4096))
    dead.close()
    empty.close()
    (found,) = stale_nodes(own)
    assert (found.name, found.pid) == ("dead-1", os.getpid())
    assert 4096 <= found.size_bytes <= 65536
    subprocess.run(found.remove_command, shell=True, check=True)
    assert stale_nodes(own) == []
    assert alive.data_path(0).exists()
    alive.close()
    own.close()


def test_daemons_that_run_are_found_and_others_are_not(tmp_path: Path) -> None:
    alive = NodeFiles(tmp_path, "alive", ssd="/dev/nvme0n1")
    silent = NodeFiles(tmp_path, "silent")
    dead = NodeFiles(tmp_path, "dead", ssd="/dev/nvme1n1")
    for files in (alive, dead):
        files.announce(files.node_uuid)
    dead.close()
    found = running_nodes(tmp_path)
    assert [(node.name, node.pid, node.ssd) for node in found] == [
        ("alive", os.getpid(), "/dev/nvme0n1"),
        ("silent", 0, ""),
    ]
    silent.close()
    alive.close()
    assert running_nodes(tmp_path) == []


def test_a_dead_daemon_of_which_nothing_is_known(tmp_path: Path) -> None:
    own = NodeFiles(tmp_path, "own")
    (tmp_path / "cenote-dead.lock").write_text('{"pid": null}')
    (tmp_path / "cenote-dead-0.data").write_bytes(bytes(4096))
    (found,) = stale_nodes(own)
    assert (found.name, found.pid) == ("dead", 0)
    own.close()


def test_who_looks_for_dead_daemons_keeps_none_from_starting(tmp_path: Path) -> None:
    """The look takes the lock for a moment."""
    path = tmp_path / "cenote-n1.lock"
    looking = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(looking, fcntl.LOCK_SH)
    started: list[NodeFiles] = []
    real, tried = fcntl.flock, threading.Event()

    def noted(descriptor: int, operation: int) -> None:
        try:
            real(descriptor, operation)
        except BlockingIOError:
            tried.set()
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", noted)
        patch.setattr(file_lock, "PATIENCE_S", 30.0)
        starting = threading.Thread(target=lambda: started.append(NodeFiles(tmp_path, "n1")))
        starting.start()
        assert tried.wait(30)
        os.close(looking)
        starting.join(30)
    assert [files.name for files in started] == ["n1"]
    started[0].close()


def test_lock_and_tables_may_lie_apart_from_the_data(tmp_path: Path) -> None:
    data, control = tmp_path / "data", tmp_path / "control"
    data.mkdir()
    control.mkdir()
    files = NodeFiles(data, "n1", control_directory=control)
    files.announce(files.node_uuid)
    for path in (files.data_path(0), files.table_path(0), files.data_path(1)):
        path.write_bytes(bytes(4096))
    assert {p.name for p in control.iterdir()} == {"cenote-n1.lock", "cenote-n1-0.slots"}
    assert files.indexes() == [0, 1]
    in_data, in_control = files.available_bytes()
    assert in_data > 0
    assert in_control is not None
    files.close()
    other = NodeFiles(data, "n2", control_directory=control)
    (stale,) = stale_nodes(other)
    assert stale.remove_command.count(str(data)) == 2
    other.close()
    again = NodeFiles(data, "n1", control_directory=control)
    again.remove_all()
    again.close()
    assert not list(data.iterdir())


def test_a_directory_that_went_away_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    files = NodeFiles(tmp_path / "data", "n1", control_directory=tmp_path)
    (tmp_path / "data").rmdir()
    with pytest.raises(ResourceUnavailable, match="data: No such file"):
        files.available_bytes()
    files.close()


def test_only_huge_pages_need_another_directory_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert control_directory_for(tmp_path) == tmp_path
    mounts = [
        "30 1 0:26 / / rw - ext4 /dev/vda rw",
        r"31 30 0:27 / /mnt/huge\040pages rw,relatime shared:7 - hugetlbfs none rw,pagesize=2M",
        "32 30 0:28 / /mnt/huge rw - tmpfs tmpfs rw",
    ]
    monkeypatch.setattr(Path, "read_text", lambda self: "\n".join(mounts))
    monkeypatch.setattr("os.path.realpath", str)
    assert control_directory_for(Path("/mnt/huge pages")) == Path("/dev/shm")
    assert control_directory_for(Path("/mnt/huge pages/a")) == Path("/dev/shm")
    for other in ("/mnt/huge pages2", "/mnt/huge/a", "/"):
        assert control_directory_for(Path(other)) == Path(other)


def test_a_file_system_without_a_page_left_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = NodeFiles(tmp_path, "a")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ResourceUnavailable, match=r"cenote-a\.lock: No space left .*make room"):
        files.announce(files.node_uuid)
    files.close()
