"""What a replay's clients say, as it comes out of their pipes: in pieces and several at once."""

from __future__ import annotations

import io

import pytest

from cenote.cli.replay.player import Tally
from cenote.cli.replay.worker import READY, MessageBuffer, read_message, write_message


def written(*messages: object) -> bytes:
    stream = io.BytesIO()
    for message in messages:
        write_message(stream, message)
    return stream.getvalue()


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 20])
def test_messages_come_whole_and_none_is_kept_back(piece_bytes: int) -> None:
    data = written(READY, 3, Tally(requests=5))
    buffer = MessageBuffer()
    seen: list[object] = []
    for start in range(0, len(data), piece_bytes):
        seen += buffer.feed(data[start : start + piece_bytes])
    assert seen == [READY, 3, Tally(requests=5)]


def test_a_stream_that_ends_in_the_middle_holds_no_message() -> None:
    data = written(READY)
    assert read_message(io.BytesIO(data)) == READY
    assert read_message(io.BytesIO(data[:-1])) is None
    assert list(MessageBuffer().feed(data[:-1])) == []
