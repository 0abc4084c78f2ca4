"""Runs a command in an emulated machine with software RDMA devices: see `guests`.

    python tests/rdma/vm/run.py --nics 2 -- .venv/bin/python -m pytest -m rdma tests

Exit status: the command's own; 128 + N where signal N ended it; 124 on a timeout; 125 where the
machine failed (no qemu, no boot, kernel panic): then the end of its console is on stderr; 77 where
the machine can't be made here, with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rdma.vm.boot_files import VMError, VMTimeout, setup
from rdma.vm.guests import Cluster, kill_all

EXIT_UNAVAILABLE = 77
EXIT_TIMEOUT = 124
EXIT_VM_FAILED = 125


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] [--] COMMAND [ARG...]",
        description="Run a command in an emulated machine with software RDMA devices (rxe0, ...).",
    )
    add = parser.add_argument
    add("--setup", action="store_true", help="install the Debian packages, make the boot files")
    add("-c", dest="shell", metavar="LINE", help="a line for the shell, instead of COMMAND")
    add("--nics", type=int, default=1, help="RDMA devices (default 1)")
    add("--rw", action="append", default=[], metavar="DIR", help="where writes last (repeatable)")
    add("--memory", type=int, default=2048, metavar="MIB")
    add("--timeout", type=float, default=600, metavar="S", help="for the command (default 600)")
    add("--boot-timeout", type=float, default=120, metavar="S")
    add("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command and not options.shell and not options.setup:
        parser.error("no command")
    return options


def _set_up() -> None:
    """Raises VMError where what is needed can't be installed here."""
    if shutil.which("apt-get") is None and shutil.which("qemu-system-x86_64") is None:
        raise VMError("it needs qemu-system-x86_64, and there is no apt-get to install it with")
    setup()


def _run(options: argparse.Namespace) -> int:
    with Cluster(
        nics=options.nics,
        boot_timeout_s=options.boot_timeout,
        memory=options.memory,
        rw=options.rw,
        lifetime=options.boot_timeout + options.timeout + 60,
    ) as guests:
        command = guests[0].spawn(options.shell or options.command)
        status = command.wait(options.timeout, sys.stdout.buffer, sys.stderr.buffer)
    return status if status >= 0 else 128 - status


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)

    def stop(number: int, _frame: object) -> None:
        kill_all()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    if options.setup:
        try:
            _set_up()
        except (VMError, OSError, subprocess.SubprocessError) as error:
            print(f"no machine with RDMA devices can be made here: {error}", file=sys.stderr)
            return EXIT_UNAVAILABLE
    if not options.command and not options.shell:
        return 0
    try:
        return _run(options)
    except VMTimeout as error:
        print(error, file=sys.stderr)
        return EXIT_TIMEOUT
    except VMError as error:
        print(error, file=sys.stderr)
        return EXIT_VM_FAILED


if __name__ == "__main__":
    sys.exit(main())
