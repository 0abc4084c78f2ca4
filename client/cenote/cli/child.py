"""Runs a daemon so that it ends when the process that started it does, however that ends.

    python -m cenote.cli.child PARENT_PID MODULE [FLAG ...]

The kernel sends the SIGTERM, so it also comes after a kill -9 of the parent.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Become `MODULE` with its flags."""
    parent_pid, module, *flags = arguments
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent_pid):  # it ended before the kernel was told
        sys.exit(1)
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
