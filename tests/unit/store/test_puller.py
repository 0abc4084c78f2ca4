"""Copies between two daemons in process: what lands, what does not, and what becomes of it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cenote.api.rows import COPIED, PULL, CopyStatus
from cenote.store.puller import BUFFER_BYTES, Puller
from cenote.transport.base import SessionIdentity
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb
from ssd_node import DRAM_ID, SSD_ID, SsdNode, payload_of
from waiting import wait_until

KIB, MIB = 1 << 10, 1 << 20
EPOCH = 3
TARGET_ID = 21


class Two:
    """A daemon that has objects, and one that fetches them."""

    def __init__(self, path: Path) -> None:
        for name in ("source", "target"):
            (path / name).mkdir()
        self.source = SsdNode(path / "source")
        self.target = SsdNode(path / "target")
        self.target.segments.attached(2, [TARGET_ID, TARGET_ID + 1])
        identity = SessionIdentity(
            secrets.token_bytes(16), "boot", 1, common_pb2.Credentials(token=b"")
        )
        self.puller = Puller(self.target.segments, identity)
        self.puller.fence(EPOCH)
        host, port = self.source.server.tcp_address or ("", 0)
        self.address = f"{host}:{port}"
        self._copies = 0

    def close(self) -> None:
        self.puller.stop()
        self.target.close()
        self.source.close()

    def pull(
        self,
        slots: list[int],
        target_slot: int,
        offset: int,
        length: int,
        *,
        seq: int,
        epoch: int = EPOCH,
        segment: int = DRAM_ID,
    ) -> int:
        """Order it; the copy's id."""
        self._copies += 1
        rows = [(self._copies, seq, 0, 0, EPOCH, segment, slot, 0, 0) for slot in slots]
        rows.append((self._copies, seq, offset, length, EPOCH, TARGET_ID, target_slot, 1, 1))
        message = pb.PullReplicas(
            sources=[pb.PullSource(address=self.address, segment_ids=[DRAM_ID, SSD_ID])]
        )
        self.puller.enqueue(message, np.array(rows, PULL), epoch)
        return self._copies

    def outcome(self, copy_id: int) -> int:
        """What is told of a copy."""

        def told() -> list[int]:
            rows = np.frombuffer(self.puller.tell(), COPIED)
            found: list[int] = rows["status"][rows["copy_id"] == copy_id].tolist()
            return found

        return wait_until(told, 10.0, what=f"copy {copy_id} to end")[0]

    def bytes_at(self, offset: int, length: int) -> bytes:
        return bytes(self.target.dram.view[offset : offset + length])


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


def test_objects_arrive_with_their_keys_and_versions(two: Two) -> None:
    data = [payload_of(i, 70 * KIB + i) for i in range(20)]
    for i, payload in enumerate(data):
        two.source.put(i, payload, [(i * 128 * KIB, len(payload))], key=b"key-%d" % i)
    two.puller.start()
    ids = [two.pull([i], i + 5, i * 256 * KIB, 128 * KIB, seq=i + 1) for i in range(len(data))]
    assert [two.outcome(one) for one in ids] == [CopyStatus.DONE] * len(ids)
    for i, payload in enumerate(data):
        assert two.bytes_at(i * 256 * KIB, len(payload)) == payload
        record = two.target.dram.record(i + 5, EPOCH, i + 1)
        assert record is not None
        assert b"key-%d" % i in record
    assert two.puller.counters.pulled == len(data)
    assert not two.puller.counters.failed


def test_a_striped_object_with_a_long_key_becomes_one_piece(two: Two) -> None:
    key = b"k" * 200
    data = payload_of(1, 300_000)
    two.source.put(3, data, [(0, 100_032), (1 * MIB, 100_032), (2 * MIB, 100_136)], key=key)
    two.puller.start()
    assert two.outcome(two.pull([3, 4, 5], 7, 4 * MIB, 300_224, seq=4)) == CopyStatus.DONE
    assert two.bytes_at(4 * MIB, len(data) + len(key)) == data + key


def test_one_that_is_larger_than_the_buffer(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cenote.store.puller.BUFFER_BYTES", 256 * KIB)
    assert BUFFER_BYTES > 256 * KIB
    data = payload_of(2, 1_000_001)
    two.source.put(1, data, [(MIB, 1_000_001)])
    two.puller.start()
    assert two.outcome(two.pull([1], 7, 0, 1_000_064, seq=2)) == CopyStatus.DONE
    assert two.bytes_at(0, len(data)) == data


def test_what_is_not_what_was_sealed_becomes_no_slot(two: Two) -> None:
    two.source.put(1, payload_of(1, 5000), [(0, 5000)], checksum=77)
    two.puller.start()
    assert two.outcome(two.pull([1], 7, 0, 8192, seq=2)) == CopyStatus.SOURCE_CHANGED
    assert two.target.dram.record(7, EPOCH, 2) is None
    assert two.bytes_at(0, 5000) == bytes(5000)


def test_a_slot_of_another_version_is_no_source(two: Two) -> None:
    two.source.put(1, payload_of(1, 5000), [(0, 5000)])
    two.puller.start()
    assert two.outcome(two.pull([1], 7, 0, 8192, seq=9)) == CopyStatus.NO_SOURCE
    assert two.outcome(two.pull([2], 7, 0, 8192, seq=2)) == CopyStatus.NO_SOURCE


def test_a_place_that_is_too_small_or_not_there_is_refused(two: Two) -> None:
    two.source.put(1, payload_of(1, 5000), [(0, 5000)])
    two.puller.start()
    assert two.outcome(two.pull([1], 7, 0, 4096, seq=2)) == CopyStatus.FAILED
    assert two.outcome(two.pull([1], 7, 1 << 40, 8192, seq=2)) == CopyStatus.FAILED
    assert two.outcome(two.pull([1], 7, 0, 8192, seq=2, segment=99)) == CopyStatus.FAILED


def test_a_source_that_is_gone_is_told_and_the_next_one_is_tried(two: Two) -> None:
    two.source.put(1, payload_of(1, 5000), [(0, 5000)])
    gone = two.address
    two.address = "127.0.0.1:1"
    two.puller.start()
    lost = two.pull([1], 7, 0, 8192, seq=2)
    two.address = gone
    there = two.pull([1], 7, 0, 8192, seq=2)
    assert two.outcome(lost) == CopyStatus.UNREACHABLE
    assert two.outcome(there) == CopyStatus.DONE


def test_one_source_that_is_stuck_holds_up_nothing_but_its_own(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cenote.store.puller.BATCH_COPIES", 1)
    monkeypatch.setattr("cenote.store.puller.CALL_S", 0.3)
    two.source.put(1, payload_of(1, 5000), [(0, 5000)])
    there = two.address
    with socket.create_server(("127.0.0.1", 0)) as silent:
        two.address = f"127.0.0.1:{silent.getsockname()[1]}"
        stuck = [two.pull([1], 7, 0, 8192, seq=2) for _ in range(40)]
        two.address = there
        good = two.pull([1], 7, 0, 8192, seq=2)
        two.puller.start()
        assert two.outcome(good) == CopyStatus.DONE
        assert [two.outcome(one) for one in stuck] == [CopyStatus.UNREACHABLE] * 40


def test_nothing_of_an_earlier_leader_lands(two: Two) -> None:
    two.source.put(1, payload_of(1, 5000), [(0, 5000)])
    two.pull([1], 7, 0, 8192, seq=2)
    two.puller.fence(EPOCH + 1)
    assert not two.puller.is_busy
    two.pull([1], 8, 0, 8192, seq=2)  # read late
    last = two.pull([1], 9, 8192, 8192, seq=2, epoch=EPOCH + 1)
    two.puller.start()
    assert two.outcome(last) == CopyStatus.DONE
    assert two.target.dram.record(8, EPOCH, 2) is None
    assert two.bytes_at(0, 5000) == bytes(5000)


def test_what_was_told_is_told_once(two: Two) -> None:
    two.source.put(1, payload_of(1, 5000), [(0, 5000)])
    two.puller.start()
    two.outcome(two.pull([1], 7, 0, 8192, seq=2))
    two.puller.told(two.puller.tell())
    assert two.puller.tell() == b""
    assert not two.puller.is_busy
