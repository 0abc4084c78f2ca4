"""How results are written, and keys read."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    InvalidKey,
    NamespaceNotFound,
    NoSpace,
    NotLeader,
    Unavailable,
)
from cenote.cli import cmd_token, cmd_top
from cenote.cli.connect import grpc_addresses_of
from cenote.cli.exits import exit_code_of
from cenote.cli.output import Bar, key_text, parse_key, print_json, print_pairs, print_table
from cenote.security.tokens import Role, TokenFile
from cenote.v1 import admin_pb2, common_pb2


@given(st.binary(min_size=1, max_size=64))
def test_a_key_that_is_printed_can_be_typed(key: bytes) -> None:
    assert parse_key(key_text(key)) == key


def test_keys_that_are_none_are_refused() -> None:
    for text in ("", "hex:", "hex:0", "hex:zz", "x" * 513):
        with pytest.raises(InvalidArgument):
            parse_key(text)
    with pytest.raises(InvalidKey):
        parse_key("")


def test_tables_into_a_pipe_are_plain_and_unwrapped(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 150
    print_table(["name", "size"], [[long, 1], ["[bold]not markup[/bold]", None]])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert long in out
    assert "[bold]not markup[/bold]" in out
    assert not any(line != line.rstrip() for line in out.splitlines())


def test_numbers_stand_right_also_where_one_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(["name", "ssd", "rest"], [["a", "31 MiB", "x"], ["b", "-", "x"]])
    *_, first, second = capsys.readouterr().out.rstrip().splitlines()
    assert first.split() == ["a", "31", "MiB", "x"]
    assert second.index("-") == first.index("B")


def test_an_empty_table_says_so_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name"], [], empty="nothing here")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "nothing here\n"


def test_no_colour_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    for no_color in (False, True):
        if no_color:
            monkeypatch.setenv("NO_COLOR", "1")
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        print_pairs([("name", "value")])
        # Bold remains, which is no colour.
        assert not any(f"\x1b[3{digit}m" in terminal.getvalue() for digit in range(8))
        assert "value" in terminal.getvalue()


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([{"a": 1}])
    assert json.loads(capsys.readouterr().out) == [{"a": 1}]


def test_a_bar_is_silent_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("Working", total=10, unit="requests") as bar:
        bar.update(5)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoSpace("full"), 1),
        (RuntimeError("bug"), 1),
        (InvalidArgument("wrong"), 2),
        (ConfigError("wrong"), 2),
        (NamespaceNotFound("none"), 3),
        (Unavailable("gone"), 4),
        (NotLeader("standby"), 4),
        (DeadlineExceeded("late"), 4),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def test_the_grpc_address_follows_from_the_lanes() -> None:
    assert grpc_addresses_of("127.0.0.1:5110", None) == ["127.0.0.1:5111"]
    assert grpc_addresses_of("[::1]:7,other:9", None) == ["[::1]:8", "other:10"]
    assert grpc_addresses_of("unix:///run/cenote.sock", None) == ["127.0.0.1:5111"]
    assert grpc_addresses_of("127.0.0.1:5110", "h:1,i:2") == ["h:1", "i:2"]
    with pytest.raises(InvalidArgument):
        grpc_addresses_of("nonsense", None)


class Terminal(io.StringIO):
    """What a command writes to when it is run by hand."""

    def isatty(self) -> bool:
        return True


NODES = ["node", "id", "state", "used", "capacity", "tcp out", "tcp in", "sessions", "seen", "at"]
NODE: list[str | int] = [
    "gpu-node-17",
    17,
    "alive",
    "97.3 %",
    "511.25 GiB",
    "1.25 TiB",
    "981.2 GiB",
    12,
]
NODE += ["250 ms ago", "10.120.130.140:51200"]


def printed_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, *, spare: list[str], wide: bool = False
) -> list[str]:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table(NODES, [NODE, NODE], spare=spare, wide=wide)
    plain = re.sub("\x1b\\[[0-9;]*m", "", terminal.getvalue())
    return [line.rstrip() for line in plain.splitlines() if line.strip()]


def test_a_narrow_terminal_gets_fewer_columns_and_whole_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spare = ["id", "sessions", "at", "capacity"]
    lines = printed_on_a_terminal(monkeypatch, 80, spare=spare)
    assert max(map(len, lines)) <= 80
    assert len(lines) == 4  # header, rule, two nodes: nothing was folded
    assert " ".join(lines[0].split()) == "node state used capacity tcp out tcp in seen"
    said = capsys.readouterr().err
    assert "left out for lack of width: id, sessions, at; all of it: --wide" in said

    assert "10.120.130.140:51200" in printed_on_a_terminal(monkeypatch, 200, spare=spare)[2]
    assert not capsys.readouterr().err
    wide = printed_on_a_terminal(monkeypatch, 80, spare=spare, wide=True)
    assert len(wide) == 4
    assert "10.120.130.140:51200" in wide[3]
    # Where all that can go is not enough, the terminal breaks the lines: no cell is folded.
    assert len(printed_on_a_terminal(monkeypatch, 40, spare=spare)) == 4


def test_top_fits_a_terminal_of_80_columns_also_with_ssds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [
        admin_pb2.NodeStatus(
            view=common_pb2.NodeView(node_id=n, name=f"node{n}"),
            capacity_bytes=3 << 30,
            used_bytes=1 << 30,
            ssd_capacity_bytes=2 << 30,
            ssd_used_bytes=1 << 29,
        )
        for n in range(2)
    ]
    status = admin_pb2.GetStatusResponse(ssd_capacity_bytes=4 << 30)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    cmd_top._print_nodes(None, cmd_top.Sample(0.0, status, nodes, []), wide=False)
    lines = re.sub("\x1b\\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("node" in line for line in lines) == 3
    assert "all of it: --wide" in capsys.readouterr().err
    cmd_top._print_nodes(None, cmd_top.Sample(0.0, status, nodes, []), wide=True)
    assert "tcp out" in terminal.getvalue()


def test_ids_of_tokens_can_be_copied_from_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokens = TokenFile(tmp_path / "tokens.json", must_exist=False)
    made, _ = tokens.create("a-team-with-a-name", Role.WRITE, ("llama-*", "qwen-*"), ttl_s=3600.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    cmd_token.list_tokens(tmp_path / "tokens.json")
    assert made.token_id in terminal.getvalue()
