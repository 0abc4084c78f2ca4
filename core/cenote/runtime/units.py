"""Sizes and durations as people write them.

Sizes: a number with B, with KiB ... PiB (powers of 1024; Kubernetes' Ki ... Pi mean the same) or
with KB ... PB (powers of 1000); a bare number is bytes. `4G` is refused: to some it means 4GB.
Durations: a number with ns, us, ms, s, m, h or d, several of them in a row (`1m30s`), or a bare
number of seconds.
"""

from __future__ import annotations

import math
import re
from decimal import ROUND_FLOOR, Decimal
from typing import Final

from cenote.api.errors import InvalidArgument

__all__ = [
    "format_duration",
    "format_size",
    "parse_duration_s",
    "parse_positive_size_bytes",
    "parse_size_bytes",
]

_PREFIXES: Final = "kmgtp"
_SIZE_UNITS: Final[dict[str, int]] = (
    {"": 1, "b": 1}
    | {f"{p}ib": 1024**i for i, p in enumerate(_PREFIXES, 1)}
    | {f"{p}i": 1024**i for i, p in enumerate(_PREFIXES, 1)}
    | {f"{p}b": 1000**i for i, p in enumerate(_PREFIXES, 1)}
)
_SIZE: Final = re.compile(r"(\d{1,19}(?:\.\d{1,19})?)\s*([a-z]*)", re.ASCII)
_SIZE_BYTES_MAX: Final = 2**63 - 1  # what an off_t can hold

_DURATION_UNITS: Final[dict[str, Decimal]] = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_DURATION_PART: Final = re.compile(r"\s*(\d{1,19}(?:\.\d{1,19})?)\s*([a-zµ]+)", re.IGNORECASE)
_BARE_NUMBER: Final = re.compile(r"\d{1,19}(?:\.\d{1,19})?", re.ASCII)
_TEXT_LENGTH_MAX: Final = 100


def parse_size_bytes(text: str | int) -> int:
    """The bytes that `text` names, e.g. 1610612736 for "1.5GiB"; an int is taken as it is.

    A fraction of a byte is dropped. Raises InvalidArgument where `text` is no size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size_bytes = text
    elif isinstance(text, str):
        match = _SIZE.fullmatch(text.strip().lower()) if len(text) <= _TEXT_LENGTH_MAX else None
        if match is None or match[2] not in _SIZE_UNITS:
            raise InvalidArgument(
                f"{text[:_TEXT_LENGTH_MAX]!r} is no size", remedy=_size_remedy(match)
            )
        exact = Decimal(match[1]) * _SIZE_UNITS[match[2]]
        size_bytes = int(exact.to_integral_value(rounding=ROUND_FLOOR))
    else:
        raise InvalidArgument(f"a size is a str or an int, not {type(text).__name__}")
    if not 0 <= size_bytes <= _SIZE_BYTES_MAX:
        raise InvalidArgument(f"the size {text!r} is not within 0 and 2**63 - 1 bytes")
    return size_bytes


def parse_positive_size_bytes(text: str | int, flag: str) -> int:
    """As parse_size_bytes; raises InvalidArgument, naming `flag`, also where it is less than 1."""
    size_bytes = parse_size_bytes(text)
    if size_bytes < 1:
        raise InvalidArgument(f"{flag} is at least 1 byte, not {text}")
    return size_bytes


def _size_remedy(match: re.Match[str] | None) -> str:
    if match is not None and len(match[2]) == 1 and match[2] in _PREFIXES:
        upper = match[2].upper()
        return f"write {match[1]}{upper}iB (1024) or {match[1]}{upper}B (1000)"
    return "write a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as 1.5GiB"


def format_size(size_bytes: int) -> str:
    """`size_bytes` for people, in powers of 1024 with at most two decimals: "1.5 GiB", "512 B"."""
    sign, rest = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    value = float(rest)
    units = ["B", *(f"{p.upper()}iB" for p in _PREFIXES)]
    for unit in units:
        # 1023.995 and more would be printed as 1024, which is 1 of the next unit.
        if value < 1023.995 or unit == units[-1]:
            break
        value /= 1024
    return f"{sign}{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"


def parse_duration_s(text: str | float) -> float:
    """The seconds that `text` names, e.g. 0.25 for "250ms"; a number is taken as seconds.

    Raises InvalidArgument where `text` is no duration, or is negative or not finite.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        if not (math.isfinite(text) and text >= 0):
            raise InvalidArgument(f"a duration is finite and not negative, not {text!r}")
        return float(text)
    if not isinstance(text, str):
        raise InvalidArgument(f"a duration is a str or a number, not {type(text).__name__}")
    stripped = text.strip()
    if len(stripped) <= _TEXT_LENGTH_MAX and _BARE_NUMBER.fullmatch(stripped):
        return float(stripped)
    total, position = Decimal(0), 0
    while position < len(stripped) <= _TEXT_LENGTH_MAX:
        part = _DURATION_PART.match(stripped, position)
        if part is None or part[2].lower() not in _DURATION_UNITS:
            break
        total += Decimal(part[1]) * _DURATION_UNITS[part[2].lower()]
        position = part.end()
    if not stripped or position != len(stripped):
        raise InvalidArgument(
            f"{text[:_TEXT_LENGTH_MAX]!r} is no duration",
            remedy="write a number with ns, us, ms, s, m, h or d, such as 250ms",
        )
    return float(total)


def format_duration(seconds: float) -> str:
    """`seconds` for people, with three significant digits: "250 ms", "1.5 s", "2 h 5 m"."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 5e-10:
        return "0 ns"
    for unit, size_s in (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        # 999.5 and more would be printed as 1000 (or 1e+03) of this unit.
        if seconds < 999.5 * size_s and (unit != "s" or seconds < 99.95):
            return f"{seconds / size_s:.3g} {unit}"
    if seconds == math.inf:
        return "forever"
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m")]
    parts.append((whole % 60, "s"))
    first = next(i for i, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)
