"""vLLM engines as processes, for tests: the test's side of `engine.py`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, final

from waiting import wait_until

__all__ = ["PROMPTS", "Engine", "Generated", "free_port", "vllm_python"]

HERE = Path(__file__).parent
PROMPTS = [
    [i * step % 500 for i in range(count)] for step, count in ((7, 300), (11, 700), (7, 520))
]
"""The last one shares 256 tokens, two blocks, with the first."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""One process per engine: it starts in half the time. Threads are not bound to cores: there may be
fewer of them than ranks."""
START_TIMEOUT_S = 600.0
"""An engine takes 15 s of CPU to start; a busy machine, many times that."""
ANSWER_TIMEOUT_S = 300.0
END_TIMEOUT_S = 120.0


def vllm_python() -> str | None:
    """The interpreter of vLLM's environment, where there is one: see `make test-vllm`."""
    return os.environ.get("CENOTE_TEST_VLLM_PYTHON")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@dataclass(frozen=True, slots=True)
class Generated:
    """What came of some prompts. `cached`: tokens of each that were not computed."""

    duration_s: float
    cached: list[int]
    tokens: list[list[int]]


@final
class Engine:
    """One engine, from `with` to its end.

    with Engine(model, {"master": cluster.lane}) as engine:
        engine.generate(PROMPTS).cached
    """

    def __init__(
        self,
        model: Path,
        extra: Mapping[str, object] | None = None,
        *,
        policy: str = "fail",
        llm: Mapping[str, object] | None = None,
        transfer: Mapping[str, object] | None = None,
        events: str = "",
        program: Path = HERE / "engine.py",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`extra`: the connector's options; None: without connector. `policy`: of vLLM, for loads
        that fail. `transfer`: another connector, as vLLM's KVTransferConfig. `events`: a ZMQ
        address where the engine publishes KV events. `program`: takes the commands of `engine.py`,
        and more."""
        given: dict[str, object] = {
            "model": str(model),
            "events": events,
            "llm": {"distributed_executor_backend": "uni", **(llm or {})},
        }
        if extra is not None:
            given["transfer"] = {
                "kv_connector": "CenoteStoreConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {"staging_bytes": "64MiB", **extra},
            }
        elif transfer is not None:
            given["transfer"] = dict(transfer)
        self._program = program
        self._environment = dict(environment or {})
        self._given = given
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""

    def __enter__(self) -> Self:
        python = vllm_python()
        assert python is not None
        self._process = subprocess.Popen(
            [python, str(self._program), json.dumps(self._given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT, **self._environment},
            start_new_session=True,
        )
        try:
            self._hear(START_TIMEOUT_S)
        except BaseException:
            self._kill()
            raise
        return self

    # ---- what it does ------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def generate(
        self,
        prompts: Sequence[list[int]] = PROMPTS,
        max_tokens: int = 16,
        adapter: Mapping[str, object] | None = None,
    ) -> Generated:
        """16 (or so many) tokens for each prompt, greedily, through an adapter (LoRA) or without:
        its `name`, `id` and `path`."""
        return Generated(
            **self.ask(do="generate", prompts=prompts, max_tokens=max_tokens, adapter=adapter)
        )

    def forget(self, connector: bool = False) -> None:
        """The engine forgets the blocks that it holds itself, and (`connector`) those that the
        connector has saved."""
        assert self.ask(do="reset", connector=connector)["done"]

    def regenerate(
        self, prompts: Sequence[list[int]] = PROMPTS, adapter: Mapping[str, object] | None = None
    ) -> Generated:
        """The prompts again, from what the pool has."""
        self.forget()
        return self.generate(prompts, adapter=adapter)

    def meet_pool(self, timeout_s: float = 60.0) -> None:
        """Until it has had an answer of the pool, and has saved to it (it waits for neither by
        itself)."""
        fresh = iter(range(1, 400))

        def answered() -> bool:
            step = next(fresh)
            self.generate([[(i * 3 + step) % 500 for i in range(700)]], max_tokens=1)
            return {"vllm:cenote_fetches miss", "vllm:cenote_saved_blocks"} <= self.metrics().keys()

        wait_until(answered, timeout_s, what="the engine to meet the pool")

    def fill_pool(
        self,
        prompts: Sequence[list[int]] = PROMPTS,
        cached: Sequence[int] = (256, 640, 512),
        timeout_s: float = 120.0,
        adapter: Mapping[str, object] | None = None,
    ) -> None:
        """Until the pool has so many tokens of the prompts; the engine itself has none of them
        then."""
        wait_until(
            lambda: self.regenerate(prompts, adapter).cached == list(cached),
            timeout_s,
            what="the prompts to come from the pool",
        )
        self.forget()

    def metrics(self) -> dict[str, float]:
        """Its counters; the labels follow a name after blanks."""
        found: dict[str, float] = self.ask(do="metrics")["metrics"]
        return found

    # ---- how it is talked to -----------------------------------------------------------------

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout

    def ask(self, **command: object) -> dict[str, Any]:
        """Have it do a command of its program; what it answers."""
        stdin, _ = self._pipes
        stdin.write(json.dumps(command).encode() + b"\n")
        stdin.flush()
        return self._hear(ANSWER_TIMEOUT_S)

    def _hear(self, timeout_s: float) -> dict[str, Any]:
        _, stdout = self._pipes
        while True:
            line, found, rest = self._pending.partition(b"\n")
            if found:
                self._pending = rest
                if line.startswith(b"ANSWER "):
                    answer: dict[str, Any] = json.loads(line.removeprefix(b"ANSWER "))
                    return answer
                print("engine:", line.decode(errors="replace"), file=sys.stderr)
                continue
            if not select.select([stdout], [], [], timeout_s)[0]:
                raise AssertionError(f"the engine said nothing for {timeout_s} s")
            chunk = os.read(stdout.fileno(), 1 << 16)
            if not chunk:
                raise AssertionError("the engine ended; its log is above")
            self._pending += chunk

    # ---- its end -----------------------------------------------------------------------------

    def quit(self) -> None:
        """It ends as it does when a service is stopped; all its processes with it."""
        process = self._process
        assert process is not None
        self.ask(do="quit")
        assert process.wait(END_TIMEOUT_S) == 0

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_TIMEOUT_S)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        assert process is not None
        if process.poll() is None and error is None:
            self.quit()
        self._kill()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
