"""Exit codes of `cenote`, for scripts."""

from __future__ import annotations

from typing import Final

from cenote.api.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NamespaceNotFound,
    Unavailable,
)

__all__ = [
    "EXIT_CODES_HELP",
    "EXIT_ERROR",
    "EXIT_NOT_FOUND",
    "EXIT_OK",
    "EXIT_UNREACHABLE",
    "EXIT_USAGE",
    "NothingOfThatName",
    "exit_code_of",
]

EXIT_OK: Final = 0
EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_FOUND: Final = 3
EXIT_UNREACHABLE: Final = 4
_SIGNAL: Final = 128

EXIT_CODES_HELP: Final = (
    "Exit codes: 0 done; 1 error; 2 wrong usage; 3 no such key, namespace, node or setting; 4 the "
    "pool can't be reached; 128 + n ended by signal n."
)


class NothingOfThatName(InvalidArgument):
    """An argument names something (a node, a setting) that is not there."""


def exit_code_of(error: BaseException) -> int:
    """The exit code of a command that ends with `error`."""
    if isinstance(error, NamespaceNotFound | NothingOfThatName):
        return EXIT_NOT_FOUND
    if isinstance(error, InvalidArgument):
        return EXIT_USAGE
    if isinstance(error, Unavailable | DeadlineExceeded):
        return EXIT_UNREACHABLE
    return EXIT_ERROR
