"""One line per event, for people or for machines.

    log = get_logger(__name__)
    log.info("attached", node=node_id, segments=3)

prints `12:01:03.123 INFO    cenote.store attached node=a1 segments=3`, or with JSON lines
`{"time": "2026-01-01T12:01:03.123456+00:00", "level": "info", "logger": "cenote.store",
"message": "attached", "node": "a1", "segments": 3}`. Underneath is the standard library's logging:
records of other libraries come out in the same form, and an application that uses the SDK sets up
logging as it likes; only the programs call `setup_logging`.
"""

from __future__ import annotations

import contextvars
import datetime
import json as json_module
import logging
import sys
from collections.abc import Mapping
from typing import Any, Final, TextIO, cast, final

from cenote.api.errors import ConfigError

__all__ = [
    "LEVELS",
    "REQUEST_ID",
    "StructuredLogger",
    "get_logger",
    "log_if_nobody_listens",
    "setup_logging",
]

LEVELS: Final = ("debug", "info", "warning", "error")
REQUEST_ID: Final[contextvars.ContextVar[str]] = contextvars.ContextVar(
    "cenote-request-id", default=""
)
"""Of the request that is being served in this context: a field of all that is logged meanwhile."""
_FIELDS: Final = "cenote_fields"
_COLOURS: Final = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31;1"}
_MESSAGE_CHARS_MAX: Final = 16_384  # a line stays one write; nobody reads more of it


@final
class StructuredLogger:
    """A logger whose calls take the event's values as keywords.

    The message is a constant that one can search for; what varies goes in the fields.
    """

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def is_enabled(self, level: int) -> bool:
        """Whether records of this level are written: ask before costly fields are made."""
        return self._logger.isEnabledFor(level)

    def debug(self, message: str, /, **fields: object) -> None:
        """Something that only a developer looks for."""
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, /, **fields: object) -> None:
        """A change of state that an operator may want to see later."""
        self._write(logging.INFO, message, fields)

    def warning(self, message: str, /, **fields: object) -> None:
        """Something is wrong, and the program copes."""
        self._write(logging.WARNING, message, fields)

    def error(self, message: str, /, **fields: object) -> None:
        """Something failed, and a person has to do something."""
        self._write(logging.ERROR, message, fields)

    def exception(self, message: str, /, **fields: object) -> None:
        """An error with the traceback of the exception that is being handled: a bug of ours."""
        self._write(logging.ERROR, message, fields, exc_info=True)

    def _write(
        self, level: int, message: str, fields: Mapping[str, object], *, exc_info: bool = False
    ) -> None:
        if self._logger.isEnabledFor(level):
            # stacklevel: the record names the caller of debug(), info(), ..., not this module.
            self._logger.log(
                level, "%s", message, extra={_FIELDS: fields}, exc_info=exc_info, stacklevel=3
            )


def get_logger(name: str) -> StructuredLogger:
    """The structured logger `name`, normally `__name__`."""
    return StructuredLogger(logging.getLogger(name))


def log_if_nobody_listens(logger: str = "cenote") -> None:
    """Inside another program: have `logger`'s events written to standard error, with their fields,
    where that program set up no handler that would."""
    ours = logging.getLogger(logger)
    if ours.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_TextFormatter(terminal=sys.stderr.isatty()))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


def setup_logging(level: str = "info", json: bool = False, stream: TextIO | None = None) -> None:
    """Send every record of at least `level` to `stream` (standard error), one line each.

    Human text, coloured on a terminal, or JSON lines. Replaces what an earlier call set up. Raises
    ConfigError for an unknown level.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f"{level!r} is no log level", remedy=f"one of: {', '.join(LEVELS)}")
    target = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(target)
    handler.setFormatter(_JsonFormatter() if json else _TextFormatter(terminal=target.isatty()))
    root = logging.getLogger()
    for old in [
        h for h in root.handlers if isinstance(h.formatter, _JsonFormatter | _TextFormatter)
    ]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # A full disk or a closed pipe on standard error must not end in a traceback per record.
    logging.raiseExceptions = False


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    fields = cast("Mapping[str, object]", getattr(record, _FIELDS, {}))
    request = REQUEST_ID.get()
    return fields if not request else {**fields, "request": request}


def _message_of(record: logging.LogRecord) -> str:
    message = record.getMessage()
    if len(message) > _MESSAGE_CHARS_MAX:
        message = message[:_MESSAGE_CHARS_MAX] + "..."
    return message


class _TextFormatter(logging.Formatter):
    """Time, level, logger, message, fields; a traceback follows on lines of its own.

    On a terminal the line is coloured and its date left out.
    """

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal
        self._time_format = "%H:%M:%S.%f" if terminal else "%Y-%m-%d %H:%M:%S.%f"

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created).strftime(self._time_format)[:-3]
        parts = [_one_line(_message_of(record))]
        parts += [f"{name}={_shown(value)}" for name, value in _fields_of(record).items()]
        line = f"{when} {record.levelname:<7} {record.name} {' '.join(parts)}"
        if self._terminal and record.levelno in _COLOURS:
            line = f"\x1b[{_COLOURS[record.levelno]}m{line}\x1b[0m"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _JsonFormatter(logging.Formatter):
    """One JSON object per line; no field overwrites the keys that every record has."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry: dict[str, Any] = {
            "time": when.isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message_of(record),
        }
        for name, value in _fields_of(record).items():
            entry[name if name not in entry else f"field_{name}"] = value
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json_module.dumps(entry, default=_as_json)


def _as_json(value: object) -> object:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    return str(value)


def _one_line(text: str) -> str:
    """`text` without line breaks and other control characters, which could forge or hide a line."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    )


def _shown(value: object) -> str:
    """A field's value as one word; in quotes where it is none."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    text = str(value)[:_MESSAGE_CHARS_MAX]
    if text and text.isprintable() and not any(c in text for c in ' "='):
        return text
    return (
        json_module.dumps(text, ensure_ascii=False)
        if text.isprintable()
        else json_module.dumps(text)
    )
