"""The tokens that a pool begins with."""

from __future__ import annotations

from pathlib import Path

import pytest

from cenote.api.errors import ConfigError, ResourceUnavailable
from cenote.security.token_set import FIRST_TOKENS, TOKENS_FILE, make_token_set
from cenote.security.tokens import Role, TokenFile


def token_of(directory: Path, name: str) -> bytes:
    return (directory / f"{name}.token").read_bytes().strip()


def test_each_counts_and_its_owner_alone_may_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "auth"
    made = make_token_set(directory)
    assert [entry.name for entry in made] == list(FIRST_TOKENS)
    tokens = TokenFile(directory / TOKENS_FILE)
    for name, role in FIRST_TOKENS.items():
        principal = tokens.authenticate(token_of(directory, name))
        assert (principal.name, principal.role, principal.is_pool_wide) == (name, role, True)
    assert not directory.stat().st_mode & 0o077
    for path in directory.iterdir():
        assert not path.stat().st_mode & 0o077, path
    assert sorted(path.name for path in directory.iterdir()) == sorted(
        [TOKENS_FILE, *(f"{name}.token" for name in FIRST_TOKENS)]
    )


def test_what_is_there_stays_and_what_is_missing_is_made(tmp_path: Path) -> None:
    make_token_set(tmp_path)
    assert make_token_set(tmp_path) == []
    before = token_of(tmp_path, "client")
    tokens = TokenFile(tmp_path / TOKENS_FILE)
    extra, _ = tokens.create("team-a", Role.WRITE, ["team-a/*"])
    (tmp_path / "store.token").unlink()
    revoked = tokens.authenticate(token_of(tmp_path, "admin"))
    tokens.revoke(revoked.token_id)
    assert [entry.name for entry in make_token_set(tmp_path)] == ["admin", "store"]
    assert token_of(tmp_path, "client") == before
    after = TokenFile(tmp_path / TOKENS_FILE)
    assert extra.token_id in after.entries
    for name in FIRST_TOKENS:
        after.authenticate(token_of(tmp_path, name))


def test_what_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceUnavailable, match="can't make"):
        make_token_set(tmp_path / "file")
    (tmp_path / TOKENS_FILE).write_text("{")
    with pytest.raises(ConfigError, match="no file of tokens"):
        make_token_set(tmp_path)
