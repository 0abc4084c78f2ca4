"""What a daemon keeps of its pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from cenote.api.errors import ResourceUnavailable
from cenote.store.pool_copy import PoolCopyFile
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb

OLD, NEW = b"o" * 16, b"n" * 16


def namespace(number: int, generation: int = 1) -> pb.NamespaceCopy:
    return pb.NamespaceCopy(
        namespace_id=number,
        generation=generation,
        name=f"ns{number}",
        fingerprint=b"f",
        digest_seed=(1 << 64) - generation,
        durability=common_pb2.DURABILITY_RELAXED,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cenote-n.pool"


def test_what_is_told_is_merged_and_outlives_the_process(path: Path) -> None:
    copy = PoolCopyFile(path)
    assert copy.pool_id == b""
    copy.keep(pb.PoolCopy(pool_id=OLD, namespaces=[namespace(1, 2), namespace(2)]))
    copy.keep(pb.PoolCopy(pool_id=OLD, namespaces=[namespace(1, 1), namespace(3)]))
    again = PoolCopyFile(path)
    assert again.pool_id == OLD
    told = again.told(namespaces=True)
    assert told == copy.told(namespaces=True)
    assert list(told.namespaces) == [namespace(1, 2), namespace(2), namespace(3)]
    assert not again.told(namespaces=False).namespaces


def test_another_pool_replaces_it(path: Path) -> None:
    copy = PoolCopyFile(path)
    copy.keep(pb.PoolCopy(pool_id=OLD, namespaces=[namespace(1)]))
    copy.keep(pb.PoolCopy(pool_id=NEW, namespaces=[namespace(5)]))
    told = PoolCopyFile(path).told(namespaces=True)
    assert told == pb.PoolCopy(pool_id=NEW, namespaces=[namespace(5)])


def test_a_rebuilt_pool_goes_on_with_what_is_known(path: Path) -> None:
    """Its master may be lost again before it has told anything."""
    copy = PoolCopyFile(path)
    copy.keep(pb.PoolCopy(pool_id=OLD, namespaces=[namespace(1)]))
    copy.keep(pb.PoolCopy(pool_id=NEW, ancestors=[OLD]))
    told = PoolCopyFile(path).told(namespaces=True)
    assert told == pb.PoolCopy(pool_id=NEW, ancestors=[OLD], namespaces=[namespace(1)])


@pytest.mark.parametrize("kept_bytes", [0, 7, 16, 20])
def test_a_torn_or_damaged_copy_does_not_count(path: Path, kept_bytes: int) -> None:
    PoolCopyFile(path).keep(pb.PoolCopy(pool_id=OLD, namespaces=[namespace(1)]))
    data = path.read_bytes()
    path.write_bytes(data[:kept_bytes])
    assert PoolCopyFile(path).pool_id == b""
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert PoolCopyFile(path).pool_id == b""
    path.write_bytes(data)
    assert PoolCopyFile(path).pool_id == OLD


def test_where_it_cannot_be_written_the_place_that_wants_room_is_named(path: Path) -> None:
    copy = PoolCopyFile(path)
    path.with_suffix(".pool.tmp").mkdir()
    with pytest.raises(ResourceUnavailable, match="room on the file system of " + str(path.parent)):
        copy.keep(pb.PoolCopy(pool_id=OLD))
