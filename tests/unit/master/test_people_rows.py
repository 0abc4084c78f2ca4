"""Rows for people: written when something changed, and only then."""

from __future__ import annotations

import json
from collections.abc import Mapping

from cenote.master.memory_backend import MemoryBackend, MemoryLog
from cenote.master.operations import Settings
from cenote.master.people_rows import PeopleRows
from cenote.v1 import master_pb2 as pb
from master_pool import MasterPool, attach_request


class Noting(MemoryBackend):
    def __init__(self) -> None:
        super().__init__(MemoryLog())
        self.rows: dict[str, str] = {}
        self.times = 0

    def publish(self, rows: Mapping[str, str | None]) -> None:
        self.times += 1
        for path, row in rows.items():
            if row is None:
                del self.rows[path]
            else:
                self.rows[path] = row


def test_rows_follow_the_pool() -> None:
    backend = Noting()
    pool = MasterPool(backend, nodes=2)
    rows = PeopleRows(pool.service.decider, Settings(cluster_name="mine"))
    rows.look()
    assert set(backend.rows) == {
        "config",
        "pins",
        "nodes/1",
        "nodes/2",
        "segments/1",
        "segments/2",
        "namespaces/1",
    }
    assert json.loads(backend.rows["config"])["cluster_name"] == "mine"
    node = json.loads(backend.rows["nodes/2"])
    assert (node["name"], node["state"], node["segments"]) == ("node-2", "alive", [2])
    assert json.loads(backend.rows["namespaces/1"])["name"] == "models"
    pool.put(b"a")
    for _ in range(3):
        pool.clock.advance_s(3)
        rows.look()
    assert backend.times == 1, "objects are no rows"
    pool.hello()
    pool.service.pin(pb.PinRequest(keys=pool.batch(b"a")), 1.0)
    pool.service.detach(pb.DetachRequest(node_id=2, epoch=pool.service.epoch), 1.0)
    rows.look()
    assert backend.times == 1, "not that soon"
    pool.clock.advance_s(3)
    rows.look()
    assert "segments/2" not in backend.rows, "its contents did not survive"
    assert json.loads(backend.rows["nodes/2"])["state"] == "detached"
    assert json.loads(backend.rows["pins"])["objects"] == 1
    pool.service.attach(attach_request(3), 1.0)
    pool.clock.advance_s(3)
    rows.look()
    assert "nodes/3" in backend.rows
