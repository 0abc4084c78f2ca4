"""The file of tokens, and what refusals leave behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cenote.api.errors import (
    ConfigError,
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
)
from cenote.security.refusals import LINES_AT_ONCE, Refusals
from cenote.security.tokens import Role, TokenFile, covers, read_token, role_of


def test_a_token_is_known_by_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    entry, token = TokenFile(path, must_exist=False).create("ann", Role.WRITE, ["ann/*", "shared"])
    assert token.encode() not in path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    known = TokenFile(path)
    who = known.authenticate(token.encode())
    assert (who.name, who.role, who.token_id) == ("ann", Role.WRITE, entry.token_id)
    assert all(map(who.covers, ("ann/llama", "shared")))
    assert not any(map(who.covers, ("shared/x", "bob/llama")))
    assert not who.is_pool_wide
    for wrong in (b"", b"x", token[:-1].encode(), token.encode() + b"x", b"\xff" * 500):
        with pytest.raises(Unauthenticated):
            known.authenticate(wrong)


def test_roles() -> None:
    path = Path(os.devnull)
    assert role_of("admin") is Role.ADMIN
    with pytest.raises(InvalidArgument, match="read, write"):
        role_of("owner")
    file = TokenFile(path.with_name("none"), must_exist=False)
    with pytest.raises(InvalidArgument, match="all namespaces"):
        file.create("node", Role.STORE, ["a"])
    with pytest.raises(InvalidArgument, match="namespaces"):
        file.create("node", Role.READ, [])
    assert covers(["*"], "anything")


def test_what_each_role_may(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "t", must_exist=False)
    may = {
        role: {wanted for wanted in Role if file.create("x", role, ["*"])[0].principal.may(wanted)}
        for role in Role
    }
    assert may == {
        Role.READ: {Role.READ},
        Role.WRITE: {Role.READ, Role.WRITE},
        Role.ADMIN: {Role.READ, Role.WRITE, Role.ADMIN},
        Role.STORE: {Role.STORE},
    }


def test_changes_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    people = TokenFile(path, must_exist=False)
    _, first = people.create("first", Role.READ, ["*"])
    master = TokenFile(path)
    assert not master.refresh()
    entry, second = people.create("second", Role.READ, ["*"])
    who = master.authenticate(second.encode())  # made just now
    assert master.still_counts(who)
    people.revoke(entry.token_id)
    assert master.refresh()
    assert not master.still_counts(who)
    with pytest.raises(Unauthenticated, match="revoked"):
        master.authenticate(second.encode())
    path.write_text("no tokens")  # a mistake must let nobody in, and lock nobody out
    assert not master.refresh()
    assert master.authenticate(first.encode())
    path.unlink()
    assert not master.refresh()
    with pytest.raises(InvalidArgument):
        people.revoke("nobody")


def test_a_token_that_expires(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "t", must_exist=False)
    _, token = file.create("brief", Role.READ, ["*"], ttl_s=-1.0)
    with pytest.raises(Unauthenticated, match="expired"):
        file.authenticate(token.encode())


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2, "tokens": []}', '{"tokens": [{}]}'])
def test_files_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        TokenFile(path)
    with pytest.raises(ConfigError):
        TokenFile(tmp_path / "not there")


def test_a_programs_own_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("cenote_1_2\n")
    assert read_token("", str(path)) == "cenote_1_2"
    assert read_token("x", "") == "x"
    for given in (("x", str(path)), ("", str(tmp_path / "none"))):
        with pytest.raises(ConfigError):
            read_token(*given)
    path.write_text("\n")
    with pytest.raises(ConfigError):
        read_token("", str(path))


class _Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def warning(self, message: str, **fields: Any) -> None:
        self.lines.append(fields)


def test_refusals_are_all_counted_and_some_logged() -> None:
    log, now = _Log(), [0.0]
    refusals = Refusals(log, ("lane",), clock=lambda: now[0])  # type: ignore[arg-type]
    for _ in range(100):
        refusals.note("lane", PermissionDenied("no"), "peer")
    assert refusals.counts["lane", "PermissionDenied"] == refusals.total == 100
    assert len(log.lines) == LINES_AT_ONCE
    now[0] = 1.0
    refusals.note("lane", PermissionDenied("no"), "peer")
    assert log.lines[-1]["unsaid_before"] == 100 - LINES_AT_ONCE


def test_a_certificate_stands_for_a_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    file = TokenFile(path, must_exist=False)
    entry, token = file.create("ann", Role.WRITE, ["ann/*"], certificate="dns:engine.ann")
    assert token == ""
    assert "sha256" not in path.read_text()
    known = TokenFile(path)
    who = known.authenticate(b"", ("uri:spiffe://x", "dns:engine.ann", "cn:other"))
    assert (who.name, who.role) == ("ann", Role.WRITE)
    assert known.still_counts(who)
    # Its id, which everybody may know, is no token.
    for secret in (b"", b"_", b"_x"):
        with pytest.raises(Unauthenticated):
            known.authenticate(b"cenote_" + entry.token_id.encode() + secret)
    with pytest.raises(Unauthenticated, match=r"dns:nobody.*no token"):
        known.authenticate(b"", ("dns:nobody",))
    file.revoke(entry.token_id)
    assert known.refresh()
    assert not known.still_counts(who)
    with pytest.raises(Unauthenticated, match="is revoked"):
        known.authenticate(b"", ("dns:engine.ann",))
    again, _ = file.create("ann", Role.READ, ["ann/*"], certificate="dns:engine.ann")
    assert known.authenticate(b"", ("dns:engine.ann",)).token_id == again.token_id


@pytest.mark.parametrize("identity", ["engine", "ip:10.0.0.1", "dns:", ":x"])
def test_what_no_certificate_is_for(tmp_path: Path, identity: str) -> None:
    file = TokenFile(tmp_path / "tokens.json", must_exist=False)
    with pytest.raises(InvalidArgument, match="no identity of a certificate"):
        file.create("ann", Role.WRITE, ["a"], certificate=identity)
