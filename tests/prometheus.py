"""A real Prometheus on loopback, for tests that ask it what a dashboard asks.

The programs are `prometheus` and `promtool` of the PATH (Debian and Ubuntu: `apt-get install
prometheus`, or `apt-get download prometheus && dpkg -x prometheus_*.deb DIR`, which starts
nothing); a test skips without.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import yaml

from etcd import free_ports
from waiting import wait_until

__all__ = ["Prometheus", "prometheus_program", "promtool"]

START_S = 30.0
CALL_S = 10.0


def prometheus_program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test where there is none."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}: apt-get install prometheus")
    return found


def promtool(*arguments: str | Path, stdin: bytes | None = None) -> str:
    """What promtool says; the test fails where it finds fault."""
    done = subprocess.run(
        [prometheus_program("promtool"), *arguments],
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=100,
        check=False,
    )
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0, said
    return said


class Prometheus:
    """`with Prometheus(tmp_path, {"cenote-master": [url]}, rules=path) as prometheus:`"""

    def __init__(
        self, directory: Path, jobs: Mapping[str, Sequence[str]], *, rules: Path | None = None
    ) -> None:
        """`jobs`: addresses or URLs of what each job scrapes, once a second."""
        self._program = prometheus_program("prometheus")
        (self.port,) = free_ports(1)
        self._directory = directory
        self._config = directory / "prometheus.yml"
        self._log = directory / "prometheus.log"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [] if rules is None else [str(rules)],
            "scrape_configs": [
                {
                    "job_name": name,
                    "static_configs": [
                        {"targets": [_target(t) for t in targets], "labels": {"pool": "test"}}
                    ],
                }
                for name, targets in jobs.items()
            ],
        }
        self._config.write_text(yaml.safe_dump(config))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        promtool("check", "config", self._config)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={self._config}",
                    f"--storage.tsdb.path={self._directory}/data",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            wait_until(self._is_ready, START_S, what="Prometheus to be ready")
        except BaseException:
            print(self._log.read_text(errors="replace"))
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(10)

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text(errors="replace")
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{self.port}/-/ready"
            return bool(urllib.request.urlopen(url, timeout=CALL_S).status == 200)
        return False

    def get(self, path: str, **arguments: str) -> Any:
        """The data of an answer of its API. Raises AssertionError where it refuses."""
        query = urllib.parse.urlencode(arguments)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        try:
            with urllib.request.urlopen(url, timeout=CALL_S) as reply:
                found = json.load(reply)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The series that it gives now: labels and value of each."""
        found = self.get("query", query=expression)
        assert found["resultType"] == "vector", found
        return [(series["metric"], float(series["value"][1])) for series in found["result"]]


def _target(url: str) -> str:
    return urllib.parse.urlparse(url).netloc or url
