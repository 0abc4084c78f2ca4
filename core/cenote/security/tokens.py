"""Tokens: who may do what in which namespaces. A file of them, in which they stand hashed.

A token is `cenote_ID_SECRET`. The file (JSON, made by `cenote token create`) has its id, name,
role, namespaces, and the SHA-256 of the secret. That is 256 random bits, so nobody finds it by
trying, and a slow hash would only make each connection slower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

from cenote.api.errors import (
    ConfigError,
    InvalidArgument,
    ResourceUnavailable,
    Unauthenticated,
)
from cenote.runtime.log import get_logger

__all__ = ["Principal", "Role", "TokenEntry", "TokenFile", "covers", "read_token", "role_of"]

_PREFIX: Final = "cenote"
_FORMAT: Final = 1
_FILE_BYTES_MAX: Final = 8 << 20
_TOKEN_BYTES_MAX: Final = 256
_NAME_CHARS_MAX: Final = 64
_log = get_logger(__name__)
_audit = get_logger("cenote.audit")


class Role(enum.IntEnum):
    """What a token is for. ADMIN may do what WRITE may, and WRITE what READ may."""

    READ = 1
    """Look up and read objects."""
    WRITE = 2
    """Put, remove and pin them, too; make namespaces by opening them."""
    ADMIN = 3
    """Reset namespaces and set their quotas; with all namespaces: drain and rebalance the pool."""
    STORE = 4
    """A store daemon: attach to the master, copy from other daemons."""


def role_of(name: str) -> Role:
    """The role of this name. Raises InvalidArgument."""
    try:
        return Role[name.upper()]
    except KeyError:
        names = ", ".join(role.name.lower() for role in Role)
        raise InvalidArgument(f"there is no role {name!r}", remedy=f"use {names}") from None


def covers(patterns: Sequence[str], namespace: str) -> bool:
    """Whether one of the patterns (a name, or the beginning of names and a *) is this name's."""
    return any(
        namespace.startswith(pattern[:-1]) if pattern.endswith("*") else namespace == pattern
        for pattern in patterns
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Principal:
    """Who speaks, once a token proved it."""

    token_id: str
    name: str
    role: Role
    namespaces: tuple[str, ...]

    @property
    def is_pool_wide(self) -> bool:
        """All namespaces are this one's."""
        return "*" in self.namespaces

    def covers(self, namespace: str) -> bool:
        """Whether the namespace of this name is one of this one's."""
        return covers(self.namespaces, namespace)

    def may(self, role: Role) -> bool:
        """Whether this one may do what needs `role`."""
        if self.role is Role.STORE or role is Role.STORE:
            return self.role is role
        return self.role >= role


@dataclasses.dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token as it stands in the file. Times are seconds since 1970, 0: never."""

    token_id: str
    name: str
    role: Role
    namespaces: tuple[str, ...]
    sha256: str
    """"" where the holder is known by a certificate."""
    created_s: float = 0.0
    expires_s: float = 0.0
    revoked_s: float = 0.0
    certificate: str = ""
    """`uri:...`, `dns:...` or `cn:...`: whom the certificate is for that stands for a token."""

    def state(self, now_s: float) -> str:
        """valid, expired or revoked."""
        if self.revoked_s:
            return "revoked"
        return "expired" if self.expires_s and now_s >= self.expires_s else "valid"

    @property
    def principal(self) -> Principal:
        return Principal(self.token_id, self.name, self.role, self.namespaces)


def check_identity(identity: str) -> None:
    """Raises InvalidArgument where no certificate can be for that."""
    kind, _, value = identity.partition(":")
    if kind not in ("uri", "dns", "cn") or not value:
        raise InvalidArgument(
            f"{identity!r} is no identity of a certificate",
            remedy="write uri:spiffe://..., dns:NAME or cn:NAME, as the certificate has it",
        )


def _counting(entry: TokenEntry) -> Principal:
    state = entry.state(time.time())
    if state == "valid":
        return entry.principal
    raise Unauthenticated(
        f"token {entry.token_id} ({entry.name}) is {state}", remedy="use a newer one"
    )


def read_token(token: str, token_file: str) -> str:
    """A program's own token, from its settings `token` or `token_file`; "" where it has none.

    Raises ConfigError.
    """
    if not token_file:
        return token
    if token:
        raise ConfigError("token and token_file are both given", remedy="give one of them")
    try:
        with open(token_file, "rb") as file:
            text = file.read(_TOKEN_BYTES_MAX + 2).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the token in {token_file}: {error}") from error
    if not text or len(text) > _TOKEN_BYTES_MAX:
        raise ConfigError(f"{token_file} holds no token", remedy="see `cenote token create`")
    return text


def _log_changes(before: Mapping[str, TokenEntry], after: Mapping[str, TokenEntry]) -> None:
    """What a file of tokens says that it did not say before, for the audit log."""
    for token_id in before.keys() | after.keys():
        old, new = before.get(token_id), after.get(token_id)
        if old == new:
            continue
        entry = new or old
        assert entry is not None
        if new is None:
            what = "token removed"
        elif new.revoked_s and not (old and old.revoked_s):
            what = "token revoked"
        else:
            what = "token made" if old is None else "token changed"
        _audit.info(
            what,
            holder=entry.name,
            token=token_id,
            role=entry.role.name.lower(),
            namespaces=",".join(entry.namespaces),
        )


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def _seconds(text: object) -> float:
    return datetime.datetime.fromisoformat(str(text)).timestamp() if text else 0.0


def _entry(row: dict[str, Any]) -> TokenEntry:
    entry = TokenEntry(
        str(row["id"]),
        str(row["name"]),
        role_of(str(row["role"])),
        tuple(str(name) for name in row["namespaces"]),
        str(row.get("sha256", "")),
        _seconds(row.get("created")),
        _seconds(row.get("expires")),
        _seconds(row.get("revoked")),
        str(row.get("certificate", "")),
    )
    if entry.certificate:
        check_identity(entry.certificate)
    elif len(bytes.fromhex(entry.sha256)) != hashlib.sha256().digest_size:
        raise ValueError(f"the hash of token {entry.token_id} is no SHA-256")
    return entry


def _row(entry: TokenEntry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": entry.token_id,
        "name": entry.name,
        "role": entry.role.name.lower(),
        "namespaces": list(entry.namespaces),
        "sha256": entry.sha256,
        "created": _iso(entry.created_s),
    }
    if entry.certificate:
        del row["sha256"]
        row["certificate"] = entry.certificate
    if entry.expires_s:
        row["expires"] = _iso(entry.expires_s)
    if entry.revoked_s:
        row["revoked"] = _iso(entry.revoked_s)
    return row


@final
class TokenFile:
    """The tokens of a pool. Raises ConfigError where the file can't be read or understood."""

    def __init__(self, path: Path, *, must_exist: bool = True) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.entries: dict[str, TokenEntry] = {}
        """By id."""
        if must_exist or path.exists():
            self._load()

    def _stamp(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _load(self) -> None:
        try:
            stamp = self._stamp()
            with self._path.open("rb") as file:
                data = json.loads(file.read(_FILE_BYTES_MAX))
            if data["format"] != _FORMAT:
                raise ValueError(f"format {data['format']} is not known here")
            entries = [_entry(row) for row in data["tokens"]]
        except OSError as error:
            raise ConfigError(f"can't read the tokens in {self._path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, InvalidArgument) as error:
            raise ConfigError(
                f"{self._path} is no file of tokens: {error}",
                remedy="make one with `cenote token create`",
            ) from error
        self.entries = {entry.token_id: entry for entry in entries}
        self._seen = stamp

    def refresh(self) -> bool:
        """Read the file again where it has changed; whether it has. One that can't be read changes
        nothing: what was known goes on counting, and the log says so."""
        try:
            if self._stamp() == self._seen:
                return False
            before = self.entries
            self._load()
            _log_changes(before, self.entries)
        except (ConfigError, OSError) as error:
            stamp = None
            with contextlib.suppress(OSError):
                stamp = self._stamp()
            if stamp != self._seen:  # said once for each state of the file
                _log.error("the tokens of before go on counting", why=error)
            self._seen = stamp
            return False
        return True

    def authenticate(self, token: bytes, identities: Sequence[str] = ()) -> Principal:
        """Who has this token; without one, whose certificate is for one of these identities.

        Raises Unauthenticated.
        """
        if not token and identities:
            return self._by_certificate(identities)
        if not token:
            raise Unauthenticated(
                "this pool wants a token", remedy="give one: CENOTE_CLIENT_TOKEN, or token="
            )
        head, _, rest = token[:_TOKEN_BYTES_MAX].decode("ascii", "replace").partition("_")
        token_id, _, secret = rest.partition("_")
        entry = self.entries.get(token_id) if head == _PREFIX else None
        if entry is None and self.refresh():  # it was made just now
            entry = self.entries.get(token_id)
        digest = hashlib.sha256(secret.encode()).hexdigest()
        if entry is None or entry.certificate or not hmac.compare_digest(digest, entry.sha256):
            raise Unauthenticated("the token is not one of this pool's")
        return _counting(entry)

    def _by_certificate(self, identities: Sequence[str]) -> Principal:
        known = self._with_certificates(identities)
        if not (known and known[0].state(time.time()) == "valid") and self.refresh():
            known = self._with_certificates(identities)  # it was made just now
        if not known:
            raise Unauthenticated(
                f"no entry for a certificate of {', '.join(identities)}, and no token",
                remedy="`cenote token create ... --certificate` makes one",
            )
        return _counting(known[0])

    def _with_certificates(self, identities: Sequence[str]) -> list[TokenEntry]:
        """In the order of the identities, then of the file; those that count first."""
        named = [entry for entry in self.entries.values() if entry.certificate]
        found = [entry for one in identities for entry in named if entry.certificate == one]
        now_s = time.time()
        return sorted(found, key=lambda entry: entry.state(now_s) != "valid")

    def still_counts(self, principal: Principal) -> bool:
        """Whether its token is there still, and says the same."""
        entry = self.entries.get(principal.token_id)
        return (
            entry is not None
            and entry.principal == principal
            and entry.state(time.time()) == "valid"
        )

    # ---- changes, by people ------------------------------------------------------------------

    def create(
        self,
        name: str,
        role: Role,
        namespaces: Sequence[str],
        *,
        ttl_s: float = 0.0,
        certificate: str = "",
    ) -> tuple[TokenEntry, str]:
        """Add a token: (its entry, the token, which is kept nowhere; "" where a certificate for
        that identity stands for it).

        Raises InvalidArgument and ResourceUnavailable.
        """
        if not name.isprintable() or not 0 < len(name) <= _NAME_CHARS_MAX:
            raise InvalidArgument(f"a token's name has 1 to {_NAME_CHARS_MAX} characters")
        if not namespaces:
            raise InvalidArgument(
                "a token is for some namespaces", remedy="name them, or '*' for all"
            )
        if role is Role.STORE and tuple(namespaces) != ("*",):
            raise InvalidArgument("a store daemon's token is for all namespaces", remedy="use '*'")
        now_s = time.time()
        secret = secrets.token_urlsafe(32)
        entry = TokenEntry(
            secrets.token_hex(6),
            name,
            role,
            tuple(namespaces),
            "" if certificate else hashlib.sha256(secret.encode()).hexdigest(),
            now_s,
            now_s + ttl_s if ttl_s else 0.0,
            certificate=certificate,
        )
        if certificate:
            check_identity(certificate)
        self.entries[entry.token_id] = entry
        self._write()
        if certificate:
            return entry, ""
        return entry, f"{_PREFIX}_{entry.token_id}_{secret}"

    def revoke(self, token_id: str) -> TokenEntry:
        """Let a token count no more. Raises InvalidArgument (there is none) and
        ResourceUnavailable."""
        entry = self.entries.get(token_id)
        if entry is None:
            raise InvalidArgument(
                f"there is no token {token_id!r} in {self._path}",
                remedy=f"`cenote token list --tokens {self._path}` shows their ids",
            )
        if not entry.revoked_s:
            entry = dataclasses.replace(entry, revoked_s=time.time())
            self.entries[token_id] = entry
            self._write()
        return entry

    def _write(self) -> None:
        """Whole or not at all."""
        rows = [_row(entry) for entry in self.entries.values()]
        text = json.dumps({"format": _FORMAT, "tokens": rows}, indent=2) + "\n"
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            mode = self._path.stat().st_mode & 0o777 if self._path.exists() else 0o600
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
        except OSError as error:
            raise ResourceUnavailable(f"can't write {self._path}: {error.strerror}") from error
