"""Request traces: one JSON object a line, as released with the Mooncake paper (FAST'25).

`timestamp` in ms, `input_length` in tokens, `hash_ids`: an id for each block of the prompt, equal
where the whole prompt is equal up to there. Other fields are ignored.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from cenote.api.errors import InvalidArgument

__all__ = ["BLOCK_TOKENS", "Trace", "load_trace"]

BLOCK_TOKENS: Final = 512
_LINE_BYTES_MAX: Final = 16 << 20
_REQUESTS_MAX: Final = 10_000_000
_ID_LIMIT: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in columns. Request i has the blocks `block_ids[starts[i]:starts[i + 1]]`."""

    name: str
    """The file's name without extensions, and 8 hex digits of what is in it."""
    timestamps_ms: NDArray[np.int64]
    input_tokens: NDArray[np.int64]
    block_ids: NDArray[np.int64]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.timestamps_ms)

    def blocks_of(self, request: int) -> NDArray[np.int64]:
        """Ids of one request's blocks, in prompt order."""
        return self.block_ids[self.starts[request] : self.starts[request + 1]]

    @property
    def blocks_per_request_max(self) -> int:
        return int(np.diff(self.starts).max(initial=0))

    @property
    def distinct_blocks(self) -> int:
        return len(np.unique(self.block_ids))

    @property
    def duration_s(self) -> float:
        """From the first request to the last one."""
        return float(np.ptp(self.timestamps_ms)) / 1e3 if len(self) else 0.0


def load_trace(path: Path, limit: int | None = None) -> Trace:
    """The first `limit` requests (all where None) of the trace at `path`.

    Raises InvalidArgument naming the line that is no request.
    """
    content = xxh3_64()
    timestamps: list[int] = []
    tokens: list[int] = []
    ids: list[int] = []
    starts = [0]
    try:
        with path.open("rb") as lines:
            for number in itertools.count(1):
                line = lines.readline(_LINE_BYTES_MAX)
                if not line or (limit is not None and len(timestamps) >= limit):
                    break
                content.update(line)
                if line.isspace():
                    continue
                if len(timestamps) == _REQUESTS_MAX:
                    raise InvalidArgument(
                        f"{path} has more than {_REQUESTS_MAX} requests", remedy="use --limit"
                    )
                _add(line, f"{path}, line {number}", timestamps, tokens, ids)
                starts.append(len(ids))
    except OSError as error:
        raise InvalidArgument(
            f"can't read the trace {path}: {error.strerror}",
            remedy="name a file of requests, a JSON object a line; `cenote demo` brings one",
        ) from error
    if not timestamps:
        raise InvalidArgument(f"{path} holds no requests")
    return Trace(
        name=f"{path.name.partition('.')[0]}-{content.intdigest() & 0xFFFFFFFF:08x}",
        timestamps_ms=np.array(timestamps, np.int64),
        input_tokens=np.array(tokens, np.int64),
        block_ids=np.array(ids, np.int64),
        starts=np.array(starts, np.int64),
    )


def _add(line: bytes, where: str, timestamps: list[int], tokens: list[int], ids: list[int]) -> None:
    try:
        request = json.loads(line)
        timestamp, length = request.get("timestamp", 0), request.get("input_length")
        blocks = request["hash_ids"]
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where} is no JSON: {error}") from error
    except (AttributeError, KeyError) as error:
        raise InvalidArgument(
            f"{where} is no request", remedy="each line is an object with hash_ids: [...]"
        ) from error
    if not isinstance(blocks, list) or not all(map(_is_id, blocks)):
        raise InvalidArgument(f"{where}: hash_ids is no list of whole numbers below 2**63")
    if length is None:
        length = len(blocks) * BLOCK_TOKENS
    if not _is_id(length) or not isinstance(timestamp, int | float) or timestamp < 0:
        raise InvalidArgument(f"{where}: timestamp and input_length are numbers of at least 0")
    timestamps.append(int(timestamp))
    tokens.append(length)
    ids.extend(blocks)


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < _ID_LIMIT
