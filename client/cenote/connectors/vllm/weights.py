"""What weights a model has: a digest of its files' contents, kept so that it is made once.

All bytes count, since a model that was trained on, merged or pruned may differ from the original
in few places, and to take one's blocks for the other's gives wrong tokens silently. The engine has
read the files when this runs, so that they mostly come from the page cache, at several GB/s.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import xxhash

__all__ = ["WEIGHT_SUFFIXES", "adapter_digest", "files_identity", "weights_digest"]

WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CHUNK_BYTES: Final = 8 << 20  # hashing lets other threads run meanwhile
_CACHE_VERSION: Final = 1
_ADAPTER_CONFIG: Final = "adapter_config.json"


def weights_digest(directory: Path, cache: Path | None = None) -> str | None:
    """A digest of the weights in `directory` (or of the one file that it is), None for none.

    Names of files count only for their order. `cache`: a directory where digests of files are kept
    by their identity (device, inode, size, times); by default `cenote` in the user's cache.
    """
    files = _weight_files(directory)
    if not files:
        return None
    cache = _default_cache() if cache is None else cache
    whole = hashlib.blake2b(digest_size=16)
    for path in files:
        whole.update(_file_digest(path, cache).encode() + b"\n")
    return whole.hexdigest()


def adapter_digest(directory: Path, cache: Path | None = None) -> str | None:
    """A digest of the adapter (LoRA) in `directory`: its weights, and how they are to be applied.
    None where it can't be read. `cache`: see `weights_digest`."""
    try:
        config = json.loads((directory / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
        weights = weights_digest(directory, cache)
    except (OSError, ValueError):
        return None
    if weights is None or not isinstance(config, dict):
        return None
    config.pop("base_model_name_or_path", None)  # says where the model was, when it was trained
    described = json.dumps([weights, config], sort_keys=True)
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def files_identity(directory: Path) -> tuple[object, ...]:
    """Which files an adapter in `directory` is, as the file system tells them apart; () for none.
    It changes when one of them does."""
    try:
        paths = [*_weight_files(directory), directory / _ADAPTER_CONFIG]
        return tuple((path.name, *_identity(path)) for path in paths)
    except OSError:
        return ()


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _weight_files(directory: Path) -> Sequence[Path]:
    if directory.is_file():
        return [directory]
    if not directory.is_dir():
        return []
    found = sorted(path for path in directory.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    # Where there are several formats the engine takes this one.
    preferred = [path for path in found if path.suffix == ".safetensors"]
    return preferred or found


def _default_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "cenote" / "weights"


def _file_digest(path: Path, cache: Path) -> str:
    identity = [_CACHE_VERSION, *_identity(path)]
    name = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()
    kept = cache / name
    with contextlib.suppress(OSError, UnicodeDecodeError):
        digest = kept.read_text(encoding="ascii").strip()
        if len(digest) == 32:
            return digest
    state = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            state.update(chunk)
    digest = state.hexdigest()
    with contextlib.suppress(OSError):  # a home that can't be written to: made again next time
        cache.mkdir(parents=True, exist_ok=True)
        fresh = kept.with_suffix(f".{os.getpid()}")
        fresh.write_text(digest, encoding="ascii")
        fresh.replace(kept)
    return digest
