"""One daemon of a cluster (`cluster.py`), as tests handle it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import final

from cenote.cli.daemons import Daemon, DaemonSpec
from promptness import HANG_S, ends_within, wait_ended
from waiting import wait_until

__all__ = ["READY_TIMEOUT_S", "Process"]

READY_TIMEOUT_S = 60.0  # very busy cores and cold caches
STOP_TIMEOUT_S = 2.5


@final
class Process:
    """One daemon of a cluster."""

    def __init__(self, spec: DaemonSpec, directory: Path, environment: Mapping[str, str]) -> None:
        self._daemon = Daemon(spec, directory, environment=environment)
        self.expected_down = True
        self._paused = False

    @property
    def name(self) -> str:
        return self._daemon.name

    @property
    def pid(self) -> int:
        return self._daemon.pid

    @property
    def is_running(self) -> bool:
        return self._daemon.is_running

    @property
    def is_paused(self) -> bool:
        return self._paused

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._daemon.exit_code

    @property
    def ready(self) -> dict[str, str]:
        """Fields of the readiness line."""
        return self._daemon.ready

    @property
    def flags(self) -> dict[str, object]:
        """May be changed before `start`."""
        return self._daemon.spec.flags

    @property
    def daemon(self) -> Daemon:
        return self._daemon

    def log_text(self) -> str:
        """What it logged since its last start."""
        return self._daemon.log_text()

    def start(self) -> None:
        """Start it; `wait_ready` waits."""
        self._daemon.start()
        self.expected_down = False

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> dict[str, str]:
        """Until it serves. Raises what its exit code stands for where it ends instead."""
        try:
            return self._daemon.wait_ready(timeout_s)
        except BaseException:
            self.expected_down = not self.is_running
            raise

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM; the exit code. Fails where it does not end in time."""
        self.expected_down = True
        self.send_signal(signal.SIGTERM)
        return self.wait_exit(timeout_s)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End it by a signal; the exit code."""
        self.expected_down = True
        self.send_signal(number)
        return self.wait_exit()

    def wait_exit(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for its end, which is then no failure; the exit code. Fails where it takes longer,
        but for what the machine adds."""
        self.expected_down = True
        with ends_within(timeout_s, f"the end of {self.name}", late_s=0):
            code = wait_ended(self.pid, lambda: self.exit_code, timeout_s + HANG_S)
        assert code is not None, f"{self.name} did not end within {timeout_s + HANG_S} s"
        return code

    def restart(self, number: signal.Signals = signal.SIGTERM) -> dict[str, str]:
        """End it by `number` where it runs, start it again, wait until it is ready."""
        if self.is_running:
            self.kill(number)
        self.start()
        return self.wait_ready()

    def send_signal(self, number: signal.Signals) -> None:
        self._daemon.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP."""
        self.send_signal(signal.SIGSTOP)
        self._paused = True

        def is_stopped() -> bool:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"

        wait_until(is_stopped, what=f"{self.name} to stop")

    def resume(self) -> None:
        """SIGCONT."""
        self._paused = False
        self.send_signal(signal.SIGCONT)
