"""Which weights a block is of, beside those of the model's files, which name the namespace.

Two things change them for a running engine: an adapter (LoRA), of which vLLM's hashes know the name
and the path, not what is in it; and a trainer that writes new weights in place, after which the
files say nothing any more. Either way the keys get a suffix, so that no block of other weights is
found; without both there is none.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from cenote.runtime.log import get_logger

from .weights import adapter_digest, files_identity

__all__ = ["SUFFIX_BYTES", "Adapters", "Variant", "Variants", "with_suffix"]

_log: Final = get_logger("cenote.vllm")
SUFFIX_BYTES: Final = 16
_GENERATION_BYTES: Final = 16
_ADAPTERS_MAX: Final = 4096


@final
class Adapters:
    """Digests of adapters' files, each made once. Used by one thread."""

    def __init__(self, cache: Path | None = None) -> None:
        """`cache`: see `weights_digest`."""
        self._cache = cache
        self._known: dict[str, tuple[object, str | None]] = {}

    def digest(self, path: str) -> str | None:
        """Of the adapter at `path`; None where nobody can say what the engine has of it.

        That is so for what is no directory here, and for files that have changed since they were
        seen first: the engine may have read them before, or after.
        """
        identity = files_identity(Path(path))
        known = self._known.get(path)
        if known is None:
            if len(self._known) >= _ADAPTERS_MAX:
                _log.warning("not shared: too many adapters", adapters=len(self._known))
                return None
            digest = adapter_digest(Path(path), self._cache) if identity else None
            if digest is None:
                _log.warning("not shared: the adapter's files can't be found", path=path)
            self._known[path] = known = (identity, digest)
        elif known[0] != identity and known[1] is not None:
            _log.warning("not shared any more: the adapter's files have changed", path=path)
            self._known[path] = known = (identity, None)
        return known[1]


@dataclass(slots=True)
class Variant:
    """Of one request. `suffix`: of its keys; None: not known yet, or never."""

    adapter_path: str | None
    generation: bytes
    suffix: bytes | None = None


@final
class Variants:
    """What this engine's weights are now."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        self._adapters = Adapters(cache)
        self._generation = b""

    def of(self, adapter_path: str | None) -> Variant:
        """For a request that begins now. With an adapter, `resolve` is to be called for it, in a
        thread that may read files."""
        variant = Variant(adapter_path, self._generation)
        if adapter_path is None:
            variant.suffix = self._generation
        return variant

    def resolve(self, variant: Variant) -> None:
        """Find out what its adapter is."""
        if variant.adapter_path is None:
            return
        digest = self._adapters.digest(variant.adapter_path)
        if digest is not None:
            what = variant.generation + digest.encode()
            variant.suffix = hashlib.blake2b(what, digest_size=SUFFIX_BYTES).digest()

    def renew(self) -> None:
        """The engine's weights have changed: from now on its blocks are nobody else's, since nobody
        else can be known to have the same."""
        self._adapters = Adapters(self._cache)
        self._generation = secrets.token_bytes(_GENERATION_BYTES)


def with_suffix(hashes: list[bytes], suffix: bytes) -> list[bytes]:
    """Hashes as they stand in keys."""
    return [block_hash + suffix for block_hash in hashes] if suffix else hashes
