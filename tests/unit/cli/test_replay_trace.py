"""Traces: what is read from them, and which line is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cenote.api.errors import InvalidArgument
from cenote.cli.cmd_demo import SAMPLE
from cenote.cli.replay.trace import load_trace


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_requests_come_in_columns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "some.trace.jsonl",
        {"timestamp": 5, "input_length": 700, "output_length": 1, "hash_ids": [1, 2]},
        {"timestamp": 1005, "input_length": 0, "hash_ids": []},
        {"hash_ids": [1, 7, 8]},
    )
    trace = load_trace(path)
    assert len(trace) == 3
    assert [trace.blocks_of(i).tolist() for i in range(3)] == [[1, 2], [], [1, 7, 8]]
    assert trace.input_tokens.tolist() == [700, 0, 3 * 512]
    assert trace.blocks_per_request_max == 3
    assert trace.distinct_blocks == 4
    assert trace.name.startswith("some-")


def test_the_limit_and_the_contents_are_in_the_name(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"hash_ids": [1]}, {"hash_ids": [2]})
    first = load_trace(path, limit=1)
    assert len(first) == 1
    assert first.name != load_trace(path).name


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "no request"),
        ('{"timestamp": 1}', "no request"),
        ('{"hash_ids": "12"}', "hash_ids"),
        ('{"hash_ids": [1, -1]}', "hash_ids"),
        ('{"hash_ids": [true]}', "hash_ids"),
        ('{"hash_ids": [9223372036854775808]}', "hash_ids"),
        ('{"hash_ids": [1], "input_length": "x"}', "input_length"),
        ('{"hash_ids": [1], "timestamp": -1}', "timestamp"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(InvalidArgument, match=f"line 2.*{says}"):
        load_trace(path)


def test_an_unreadable_or_empty_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        load_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidArgument, match="no requests"):
        load_trace(tmp_path / "empty.jsonl")


def test_the_sample_is_what_its_readme_says() -> None:
    trace = load_trace(SAMPLE)
    assert len(trace) == 400
    assert np.all(np.diff(trace.timestamps_ms) >= 0)
    assert trace.distinct_blocks < len(trace.block_ids)
