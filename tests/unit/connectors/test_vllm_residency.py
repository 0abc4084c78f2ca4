"""The books of which blocks are on this host: told once, and told when they are gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from cenote.api.errors import Unavailable
from cenote.api.rows import EXTENT, OBJECT, ObjectStatus
from cenote.api.types import AcquiredLease
from cenote.connectors.vllm.places import HostView
from cenote.connectors.vllm.residency import (
    Change,
    Noted,
    Residency,
    Survey,
)
from cenote.connectors.vllm.residency_watch import ResidencyWatch, survey


def noted(*numbers: int) -> list[Noted]:
    return [Noted(b"key%d" % n, b"hash%d" % n) for n in numbers]


def asked(books: Residency, now_s: float) -> Survey:
    found = books.due(now_s)
    assert found is not None
    return found


def test_a_block_is_told_once_it_is_here_and_once_it_is_gone() -> None:
    books = Residency()
    books.note(noted(1, 2))
    books.note(noted(2))
    question = asked(books, 0.0)
    assert question.fresh == noted(1, 2)
    assert books.due(5.0) is None, "an answer is awaited"
    question.found = [None, "memory"]
    books.answered(question)
    assert books.take() == [Change(True, "memory", (b"hash2",))]
    assert books.due(0.5) is None, "it is too early"
    books.note(noted(2))
    question = asked(books, 1.0)
    assert question.fresh == noted(1), "what is known is not looked for"
    assert question.again == [b"key2"]
    question.found, question.present = ["disk"], [True]
    books.answered(question)
    assert books.take() == [Change(True, "disk", (b"hash1",))]
    question = asked(books, 2.0)
    assert question.again == [b"key1", b"key2"]
    question.present = [True, False]
    books.answered(question)
    assert books.take() == [Change(False, "memory", (b"hash2",))]
    assert not books.take()


def test_what_is_not_here_is_forgotten_after_a_while_and_an_answer_that_did_not_come_is_none() -> (
    None
):
    books = Residency()
    books.note(noted(1))
    now_s = 0.0
    for _ in range(3):
        books.answered(asked(books, now_s))
        now_s += 1.0
    for _ in range(5):
        question = asked(books, now_s)
        question.found = [None]
        books.answered(question)
        now_s += 1.0
    assert books.due(now_s) is None
    assert not books.take()


def test_what_there_is_no_room_for_is_told_as_gone() -> None:
    books = Residency(known_max=2)
    books.note(noted(1, 2, 3))
    question = asked(books, 0.0)
    question.found = ["memory"] * 3
    books.answered(question)
    assert books.take() == [
        Change(True, "memory", (b"hash1", b"hash2", b"hash3")),
        Change(False, "memory", (b"hash1",)),
    ]


def test_after_a_reset_an_answer_of_before_says_nothing() -> None:
    books = Residency()
    books.note(noted(1, 2))
    question = asked(books, 0.0)
    question.found = ["memory", "memory"]
    books.answered(question)
    question = asked(books, 1.0)
    books.clear()
    question.present, question.found = [True, True], []
    books.answered(question)
    assert books.take()[-1] == Change(False, "memory", (b"hash1", b"hash2"))
    assert books.due(9.0) is None


class Space:
    """Segment 1 is here, 2 on an SSD here, 3 elsewhere."""

    def __init__(self, segments: dict[bytes, int]) -> None:
        self.segments = segments
        self.released = 0
        peers = SimpleNamespace(
            nodes={
                1: SimpleNamespace(boot_id="this"),
                2: SimpleNamespace(boot_id="another"),
            },
            node_by_segment={1: 1, 2: 1, 3: 2},
            on_ssd=frozenset({2}),
        )
        self.calls = SimpleNamespace(
            session=SimpleNamespace(
                state=SimpleNamespace(peers=peers), identity=SimpleNamespace(boot_id="this")
            )
        )

    def exists_batch(self, keys: list[bytes], **options: object) -> Any:
        return np.array([key in self.segments for key in keys])

    def acquire(self, keys: list[bytes], ttl_s: float, **options: object) -> AcquiredLease:
        objects = np.zeros(len(keys), OBJECT)
        objects["status"] = [
            ObjectStatus.LEASED if key in self.segments else ObjectStatus.MISS for key in keys
        ]
        objects["extents"] = [1 if key in self.segments else 0 for key in keys]
        hits = [self.segments[key] for key in keys if key in self.segments]
        extents = np.zeros(len(hits), EXTENT)
        extents["segment"] = hits
        return AcquiredLease(
            "n", 1, 1, 0, 5, 1.0, 0.0, "", b"", objects.tobytes(), extents.tobytes()
        )

    def release(self, lease: AcquiredLease) -> None:
        self.released += 1


def test_a_block_is_here_where_all_its_shards_are() -> None:
    places = {"a": (1, 1), "b": (1, 3), "c": (2, 1), "d": (1, None), "e": (3, 3)}
    segments = {
        name.encode() + bytes([shard]): segment
        for name, found in places.items()
        for shard, segment in enumerate(found)
        if segment is not None
    }
    space = Space(segments)
    blocks = [Noted(name.encode(), name.encode()) for name in places]
    question = Survey(0, blocks, [b"a", b"d"])
    survey(cast(Any, space), question, [b"\x00", b"\x01"], 1e9, HostView())
    assert question.found == ["memory", None, "disk", None, None]
    assert question.present == [True, False]
    assert space.released == 1


def test_a_pool_that_does_not_answer_says_nothing_and_is_asked_again() -> None:
    space = Space({b"key1\x00": 1})
    failing = [True]

    def open_space(deadline_s: float) -> Any:
        if failing:
            failing.clear()
            raise Unavailable("gone")
        return space

    def at_once(job: Any) -> bool:
        job()
        return True

    watch = ResidencyWatch(0, [b"\x00"], open_space, at_once, HostView())
    watch.note([(b"key1", b"hash1")])
    assert not watch.poll(0.0)
    assert not watch.poll(1.0)
    assert watch.poll(2.0) == [Change(True, "memory", (b"hash1",))]
    space.segments.clear()
    watch.poll(3.0)
    assert watch.poll(3.1) == [Change(False, "memory", (b"hash1",))]
