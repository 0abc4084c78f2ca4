"""The tokens that a pool begins with: a directory with the file that masters read, and one file for
each of those who need a token from the start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from cenote.api.errors import CenoteError, ResourceUnavailable

from .tokens import Role, TokenEntry, TokenFile, read_token

__all__ = ["FIRST_TOKENS", "TOKENS_FILE", "make_token_set", "write_token"]

TOKENS_FILE: Final = "tokens.json"
FIRST_TOKENS: Final = {"admin": Role.ADMIN, "store": Role.STORE, "client": Role.WRITE}
"""By name: each is for all namespaces, and lies in NAME.token."""


def make_token_set(directory: Path) -> list[TokenEntry]:
    """Make what is missing of `FIRST_TOKENS` in `directory`; the entries that are new.

    What is there and counts stays as it is, so this may be called again. Raises
    ResourceUnavailable, and ConfigError for a file of tokens that can't be understood.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceUnavailable(f"can't make {directory}: {error.strerror}") from error
    known = TokenFile(directory / TOKENS_FILE, must_exist=False)
    made = []
    for name, role in FIRST_TOKENS.items():
        path = directory / f"{name}.token"
        if _counts(known, path):
            continue
        entry, token = known.create(name, role, ["*"])
        try:
            write_token(path, token)
        except ResourceUnavailable:
            known.revoke(entry.token_id)  # nobody has it
            raise
        made.append(entry)
    return made


def write_token(path: Path, token: str) -> None:
    """Into a file that its owner alone may read, whole or not at all. Raises
    ResourceUnavailable."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(token + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        raise ResourceUnavailable(f"can't write {path}: {error.strerror}") from error


def _counts(known: TokenFile, path: Path) -> bool:
    if not path.exists():
        return False
    try:
        known.authenticate(read_token("", str(path)).encode())
    except CenoteError:
        return False
    return True
